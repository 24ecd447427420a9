"""Attention: every form against the naive one, forward and gradient; garbage, queries without keys, memory, devices and platforms."""

import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from emapg_jax import sharding
from emapg_jax.models import attention as module
from emapg_jax.models.attention import UNSEEN, attention

TOLERANCE = {"float32": 1e-5, "float64": 1e-13}  # rounding of a few hundred terms of order 1


@pytest.fixture(autouse=True)
def strict(strict_dtypes):
  """The maths is ours alone."""


def arrays(rows, queries, keys, heads, kv_heads, width=8, dtype="float32"):
  """q, k, v and the cotangent of the output."""
  shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
  return tuple(
    jax.random.normal(key, (rows, length, count, width), dtype)
    for key, (length, count) in zip(jax.random.split(jax.random.key(0), 4), shapes)
  )


def positions_of(queries, keys):
  return tuple(jnp.arange(length, dtype=jnp.int32)[None, :] for length in (queries, keys))


def naive(q, k, v, q_positions=None, kv_positions=None):
  """Repeats keys and values, holds all scores; a query without keys gives 0. In the dtype of its arguments."""
  if q_positions is None:
    q_positions, kv_positions = positions_of(q.shape[1], k.shape[1])
  k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
  seen = ((kv_positions[:, None, :] <= q_positions[:, :, None]) & (kv_positions < UNSEEN)[:, None, :])[:, None]
  scores = jnp.where(seen, jnp.einsum("bshd,bchd->bhsc", q, k) / q.shape[-1] ** 0.5, -jnp.inf)
  weights = jnp.where(seen, jnp.exp(scores - jnp.max(jnp.where(seen, scores, -1e9), axis=-1, keepdims=True)), 0)
  return jnp.einsum("bhsc,bchd->bshd", weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30), v)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(function, q, k, v, cotangent, *positions):
  value, backward = jax.vjp(lambda q, k, v: function(q, k, v, *positions), q, k, v)
  return value, *backward(cotangent)


def in_chunks(queries, keys):
  return lambda q, k, v, *positions: module._chunked(q, k, v, *positions, queries, keys)


def assert_same(function, args, positions=(), reference=naive):
  tolerance = TOLERANCE[args[0].dtype.name]
  expected = value_and_grads(reference, *args, *positions)
  for name, got, want in zip(("out", "dq", "dk", "dv"), value_and_grads(function, *args, *positions), expected):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1, float(np.abs(want).max())), err_msg=name)


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(1, 4, 2), (9, 4, 4), (130, 4, 2), (205, 8, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_causal_equals_naive(length, heads, kv_heads, dtype, x64):
  """One key, short enough for all scores at once, and chunks that the length is no multiple of; 1, 2 and 4 query heads a key head."""
  assert_same(attention, arrays(2, length, length, heads, kv_heads, dtype=dtype))


def prefix_layout():
  """Two prompts of 3 and 20 tokens in 20 slots, then their 13 response tokens; the queries are these."""
  lengths = jnp.array([[3], [20]], jnp.int32)
  slots = jnp.arange(20, dtype=jnp.int32)[None, :]
  responses = lengths + jnp.arange(13, dtype=jnp.int32)[None, :]
  return responses, jnp.concatenate([jnp.where(slots < lengths, slots, UNSEEN), responses], axis=1)


def prefill_layout():
  """Rows that write from 5 and from 30 on into a cache of 64 slots; the first query of the second row is padding and sees nothing."""
  queries = jnp.array([[5], [30]], jnp.int32) + jnp.arange(13, dtype=jnp.int32)[None, :]
  return queries.at[1, 0].set(-1), jnp.arange(64, dtype=jnp.int32)[None, :]


def decode_layout():
  return jnp.array([[4], [63]], jnp.int32), jnp.arange(64, dtype=jnp.int32)[None, :]


@pytest.mark.parametrize("layout", [prefix_layout, prefill_layout, decode_layout])
@pytest.mark.parametrize("chunks", [None, (5, 9), (8, 64)])
def test_positions_equal_naive(layout, chunks, x64):
  positions = layout()
  args = arrays(2, positions[0].shape[1], positions[1].shape[1], 4, 2, dtype="float64")
  assert_same(in_chunks(*chunks) if chunks else attention, args, positions)


def test_long_prefill_goes_in_chunks(x64):
  """200 queries at 50..249 of 300 slots: more scores than are held at once."""
  queries, keys = positions_of(200, 300)
  args = arrays(1, 200, 300, 2, 1, dtype="float64")
  assert_same(attention, args, (queries + 50, keys))
  assert "while" in jax.jit(attention).lower(*args[:3], queries + 50, keys).as_text()


def forms(queries, keys):
  """The forms that a case of this shape can take: with all scores at once (or one query), and in chunks with the same contract."""

  def chunked(q, k, v, q_positions, kv_positions):
    k, v, first = module._without_garbage(k, v, kv_positions)
    reached = jnp.repeat(first[:, None, :] <= q_positions[:, :, None], q.shape[2] // k.shape[2], axis=2)
    return in_chunks(queries, keys)(q, k, v, q_positions, kv_positions) + jnp.where(reached, jnp.nan, 0.0).astype(q.dtype)[..., None]

  return attention, chunked


@pytest.mark.parametrize("layout", [prefix_layout, prefill_layout, decode_layout])
def test_garbage_that_no_query_sees_reaches_nothing(layout):
  """Slots that no query of the row sees hold NaN and infinities: the same values and gradients as with zeros there, and none for them."""
  q_positions, kv_positions = layout()
  q, k, v, cotangent = arrays(2, q_positions.shape[1], kv_positions.shape[1], 4, 2)
  unseen = (kv_positions > jnp.max(q_positions, axis=1, keepdims=True))[..., None, None]
  assert unseen.any()
  for form in forms(5, 9):
    clean = value_and_grads(form, q, jnp.where(unseen, 0, k), jnp.where(unseen, 0, v), cotangent, q_positions, kv_positions)
    for in_k, in_v in ((jnp.nan, jnp.nan), (jnp.inf, 0.0), (0.0, -jnp.inf)):
      dirty = value_and_grads(form, q, jnp.where(unseen, in_k, k), jnp.where(unseen, in_v, v), cotangent, q_positions, kv_positions)
      jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert all(np.isfinite(a).all() for a in clean)
    assert not np.any(np.where(unseen, clean[2], 0)) and not np.any(np.where(unseen, clean[3], 0))


@pytest.mark.parametrize("length", [20, 130])
@pytest.mark.parametrize("spoilt", ["k", "v"])
def test_garbage_at_a_later_position_changes_nothing_before_it_and_is_not_hidden_after_it(length, spoilt):
  """A NaN at position 11 in one head of row 1: seen by the two query heads that read it, from 11 on."""
  q, k, v, _ = arrays(2, length, length, 4, 2)
  run = jax.jit(attention)
  clean = run(q, k, v)
  bad = {"k": k, "v": v}
  bad[spoilt] = bad[spoilt].at[1, 11, 0, 3].set(jnp.nan)
  dirty = run(q, **bad)
  expected = np.array(clean)
  expected[1, 11:, :2] = np.nan
  np.testing.assert_array_equal(dirty, expected)


def test_one_query_shows_a_value_that_is_not_finite():
  positions = decode_layout()
  q, k, v, _ = arrays(2, 1, 64, 4, 2)
  out = jax.jit(attention)(q, k, v.at[:, 5].set(jnp.nan), *positions)
  assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()  # the rows see up to 4 and up to 63


def test_queries_without_keys_give_zero_and_no_gradient():
  """Row 0 has no key at all; row 1 starts at key 2; a query at UNSEEN sees every key but those at UNSEEN."""
  kv_positions = jnp.array([[UNSEEN] * 6, [2, 3, 4, 5, UNSEEN, UNSEEN]], jnp.int32)
  q_positions = jnp.array([[0, 1, 2, 3], [0, 1, 2, UNSEEN]], jnp.int32)
  args = arrays(2, 4, 6, 4, 2)
  for function in (attention, in_chunks(3, 2)):
    out, dq, dk, dv = value_and_grads(function, *args, jnp.minimum(q_positions, UNSEEN - 1), kv_positions)
    for a in (out[0], out[1, :2], dq[0], dq[1, :2], dk[0], dv[0], dk[1, 4:], dv[1, 4:]):
      np.testing.assert_array_equal(a, np.zeros(a.shape))
    np.testing.assert_allclose(out[1, 2], jnp.repeat(args[2][1, 0], 2, axis=0), rtol=1e-6)  # one key: its value
    assert np.isfinite(out).all() and np.all(np.any(dq[1, 3] != 0, axis=-1))
  assert_same(attention, args, (q_positions, kv_positions))
  one = value_and_grads(attention, args[0][:, :1], *args[1:3], args[3][:, :1], q_positions[:, :1], kv_positions)
  assert not any(np.any(a) for a in one)


@pytest.mark.parametrize("length", [40, 130])
def test_bfloat16_stays_near_float32(length):
  args = arrays(2, length, length, 4, 2, dtype="bfloat16")
  low = value_and_grads(attention, *args)
  full = value_and_grads(naive, *(a.astype(jnp.float32) for a in args))
  for got, want in zip(low, full):
    assert got.dtype == jnp.bfloat16
    # 8 bits of mantissa: 0.4 % for each rounding of an input, weight or result.
    assert np.linalg.norm(got.astype(jnp.float32) - want) < 0.01 * np.linalg.norm(want)


def test_bfloat16_sums_are_float32():
  """With q = 0 every weight is 1: the mean of 600 ones is 1, but a bfloat16 sum stops at 256."""
  ones = jnp.ones((1, 600, 2, 8), jnp.bfloat16)
  np.testing.assert_array_equal(jax.jit(attention)(jnp.zeros_like(ones), ones, ones).astype(jnp.float32), np.ones((1, 600, 2, 8)))


def test_large_scores_do_not_overflow(x64):
  """Scores of ±1e4, where even a float64 exp overflows: nearly one-hot weights, by a maximum that holds over the chunks."""
  q, k, v, cotangent = arrays(1, 130, 130, 2, 1, dtype="float64")
  expected = value_and_grads(naive, 100 * q, 100 * k, v, cotangent)
  for got, want in zip(value_and_grads(attention, 100 * q, 100 * k, v, cotangent), expected):
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_chunks_in_the_future_are_not_visited():
  def visits(q_positions, kv_positions, queries, keys):
    shape = (1, q_positions.shape[1], 1, 2), (1, kv_positions.shape[1], 1, 2)
    return list(module._chunks(jnp.ones(shape[0]), jnp.ones(shape[1]), jnp.ones(shape[1]), q_positions, kv_positions, queries, keys)[2])

  assert visits(*positions_of(64, 64), 16, 16) == [1, 2, 3, 4]
  assert visits(*positions_of(40, 40), 16, 16) == [1, 2, 3]  # the last chunk is half padding
  queries, keys = positions_of(16, 64)
  assert visits(queries + 16, keys, 16, 16) == [2]  # a cache that is filled up to 31
  assert visits(queries, jnp.full_like(keys, UNSEEN), 16, 16) == [0]


def test_chunks_are_even():
  """130 of at most 128 go as 72 + 58 rather than 128 + 2; with many heads 64 is the most: 130 = 3 × 48 less 14."""
  few, many = jnp.zeros((1, 130, 2, 8)), jnp.zeros((16, 130, 4, 8))
  assert module._chunk_lengths(few, few) == (72, 72)
  assert module._chunk_lengths(many, few[:, :13]) == (48, 13)


def test_memory_grows_linearly():
  """Temporary bytes of forward and gradient, from the compiled program: doubled with the length; of the naive form, times four."""

  def bytes_at(function, length):
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1, 2)]
    return value_and_grads.lower(function, *shapes).compile().memory_analysis().temp_size_in_bytes

  linear = [bytes_at(attention, length) for length in (1024, 2048, 4096)]
  assert all(b < 2.3 * a for a, b in itertools.pairwise(linear)), linear
  square = [bytes_at(naive, length) for length in (1024, 2048)]
  assert square[1] > 3.5 * square[0] and linear[1] < square[1] / 10


@pytest.mark.multi_device
@pytest.mark.parametrize("spec", ["data:8", "data:2,fsdp:2,tensor:2"])
def test_eight_devices_equal_one(spec):
  """Also no device gathers what the others hold: rows and heads are independent."""
  args = arrays(8, 130, 130, 4, 2)
  mesh = sharding.make_mesh(spec)
  on_mesh = jax.device_put(args, NamedSharding(mesh, module._splash_specs(mesh)))
  compiled = value_and_grads.lower(attention, *on_mesh).compile()
  for got, want in zip(compiled(*on_mesh), value_and_grads(attention, *args)):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())


@pytest.mark.multi_device
def test_splash_kernel_interpreted_on_a_mesh():
  """Rows over data and fsdp, heads over tensor, a length that the kernel's blocks don't divide."""
  args = arrays(4, 130, 130, 4, 2)
  mesh = sharding.make_mesh("data:2,fsdp:2,tensor:2")
  on_mesh = jax.device_put(args, NamedSharding(mesh, module._splash_specs(mesh)))
  expected = value_and_grads(naive, *args)
  for got, want in zip(value_and_grads(functools.partial(module._splash, interpret=True), *on_mesh), expected):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(np.abs(want).max()))


TPU_PROGRAMS = """
import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from emapg_jax import sharding
from emapg_jax.models import attention

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = sharding.make_mesh("data:2,tensor:2", devices)
one, heads, rows = SingleDeviceSharding(devices[0]), NamedSharding(mesh, attention._splash_specs(mesh)), sharding.batch_sharding(mesh)
gradient = jax.jit(lambda q, k, v, cotangent: jax.vjp(attention.attention, q, k, v)[1](cotangent))
for layout, length, dtype, counts in (
  (one, 1024, "bfloat16", (9, 3)), (one, 200, "float32", (9, 3)), (heads, 256, "bfloat16", (8, 2)), (rows, 256, "bfloat16", (9, 3))
):
  q, k = (jax.ShapeDtypeStruct((4, length, count, 64), dtype, sharding=layout) for count in counts)
  text = gradient.lower(q, k, k, q).compile().as_text()
  print("kernels", text.count("tpu_custom_call"), "gathers", text.count("all-gather"))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compiles_for_tpus_to_splash_forward_and_backward():
  """Three kernels (forward; dq; dk and dv) on one device and on a mesh, there without a collective; three key heads don't split over two
  devices and go in chunks. In a process of its own: libtpu ends one whose XLA_FLAGS it doesn't know."""
  env = os.environ | {"XLA_FLAGS": "", "TPU_SKIP_MDS_QUERY": "1"}
  done = subprocess.run([sys.executable, "-c", TPU_PROGRAMS], env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == ["kernels 3 gathers 0"] * 3 + ["kernels 0 gathers 0"]


def test_lowers_to_cudnn_for_cuda_only(monkeypatch):
  """Forward and backward kernels in the CUDA program, none in the CPU's; what the GPU at hand would say is said for it."""
  from jax._src.cudnn import fused_attention_stablehlo

  assert not module._cudnn_fits(jnp.zeros((1, 8, 2, 64), jnp.bfloat16))
  monkeypatch.setattr(module, "_cudnn_fits", lambda q: True)
  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
  shapes = [jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2, 2, 4)]
  traced = jax.jit(lambda *args: value_and_grads(attention, *args)).trace(*shapes)
  text = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")}
  assert set(re.findall(r"@(__cudnn[\w$]+)", text["cuda"])) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
  assert "while" not in text["cuda"] and "cudnn" not in text["cpu"] and "while" in text["cpu"]
