"""What travels between devices, read from the compiled programs of a run; and that every mesh gives the same numbers."""

import dataclasses
import functools
import itertools

import chex
import jax
import numpy as np
import pytest

from emapg_jax import sharding, streams
from emapg_jax.config import RunConfig
from emapg_jax.models import decoder
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.slots import Arrivals
from emapg_jax.train_step import init_state, train_step
from experiments.compile_check import hlo, inputs
from experiments.programs import programs
from tests import tiny

pytestmark = pytest.mark.multi_device

# No two sizes are alike, so that a shape says what an array is: width 48, MLP 160, heads 8 × 8, vocabulary 520, 5 layers.
MODEL = decoder.DecoderConfig(
  vocab_size=520,
  hidden_size=48,
  intermediate_size=160,
  num_layers=5,
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
  max_positions=512,
  tied=False,
)
CONFIG = RunConfig(
  task="add", prompts_per_step=8, group_size=4, max_prompt_tokens=128, max_new_tokens=96, mini_batches=2, micro_batch=2, kl_topk=4
)
TOKENS = 8 * 2 * (128 + 96)  # of a micro-batch on 8 devices that all have rows of their own
MESHES = ("fsdp:8", "data:2,fsdp:2,tensor:2", "fsdp:2,tensor:4")


@functools.cache
def made(mesh, rollout_mesh="auto"):
  config = dataclasses.replace(CONFIG, rollout_mesh=rollout_mesh)
  return programs(config, MODEL, sharding.make_mesh(mesh), longest_prompt=100, eos_ids=(3,), pad_id=0)


def compiled(call):
  return call.function.lower(*call.args, **call.named).compile()


def sent(program):
  """(kind, array) of each collective."""
  found = hlo.collectives(hlo.parse(program.as_text()), 8)
  return [(collective.kind, array) for collective in found for array in collective.arrays]


def weight_shapes(run, mesh):
  """Of each matrix of one layer, and of the embeddings, gathered over fsdp; the sizes in ascending order."""
  shapes = set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(run.abstract_state.policy):
    parts = zip(leaf.shape, leaf.sharding.spec + (None,) * leaf.ndim)
    shape = [size // (mesh.shape["tensor"] if axes == "tensor" else 1) for size, axes in parts]
    shapes.add(tuple(sorted(shape[1:] if "layers" in sharding.path_name(path) else shape)))
  return shapes


@pytest.mark.parametrize("mesh", MESHES)
def test_training_gathers_one_layer_at_a_time_and_no_logits(mesh):
  run = made(mesh)
  calls, own = inputs.scoring(run), weight_shapes(run, run.mesh)
  vocabulary = 520 // run.mesh.shape["tensor"]
  assert calls.keys() == {"anchor_pass", "train_step"}
  for call in calls.values():
    program = compiled(call)
    arrays = sent(program)
    assert any(kind == "all-gather" and tuple(sorted(array.shape)) in own for kind, array in arrays), "fsdp is what is looked at"
    for kind, array in arrays:
      whole = tuple(sorted(array.shape)) in own
      assert array.shape[:1] != (5,) or 48 not in array.shape, f"{kind} {array}: of all layers at once"
      if {520, vocabulary} & set(array.shape):
        assert sorted(array.shape) in ([48, vocabulary], [48 // run.mesh.shape["fsdp"], vocabulary]), f"{kind} {array}"
      elif array.dtype != "s32" and not whole:
        assert np.prod(array.shape) < 8 * TOKENS, f"{kind} {array}: activations of all rows"
    text = program.as_text()
    assert not any(f"f32[{rows},{length},{vocabulary}]" in text for rows, length in itertools.product((16, 32), (96, 95)))


@pytest.mark.parametrize("mesh", MESHES)
def test_moments_and_anchor_are_divided_as_weights_are(mesh):
  run = made(mesh)
  call = inputs.scoring(run)["train_step"]
  state, _ = compiled(call).output_shardings
  given = jax.tree.map(lambda a: a.sharding, run.abstract_state)
  for after, before, leaf in zip(*map(jax.tree.leaves, (state, given, run.abstract_state)), strict=True):
    assert after.is_equivalent_to(before, leaf.ndim)
  parts = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"]
  for tree in (run.abstract_state.ema_params, run.abstract_state.opt_state):
    assert sharding.device_bytes(tree) < 1.15 * sum(a.size * 4 for a in jax.tree.leaves(tree)) / parts, "norms, and copied heads, are whole"


def rollout_calls(run):
  return inputs.sampling(run)


@pytest.mark.parametrize("rollout_mesh", ["auto", "data:4,tensor:2", "data:2,tensor:4"])
def test_no_token_moves_a_weight(rollout_mesh):
  """Nor prefill: what travels is activations, over tensor, and the logits' way to whole rows."""
  run = made("fsdp:2,tensor:4", rollout_mesh)
  mesh, rows = run.rollout_mesh, run.sampler.slots // run.sampler.layout.shards
  assert dict(mesh.shape) == {"auto": {"data": 8, "fsdp": 1, "tensor": 1}}.get(rollout_mesh) or sharding.mesh_sizes(rollout_mesh, 8)
  shapes = (
    weight_shapes(run, run.mesh) | weight_shapes(run, mesh) | {tuple(sorted(a.shape)) for a in jax.tree.leaves(run.abstract_state.policy)}
  )
  calls = rollout_calls(run)
  for name, call in calls.items():
    arrays = sent(compiled(call))
    assert not {tuple(sorted(array.shape)) for _, array in arrays if np.prod(array.shape) > 8 * 8} & shapes, name
    tokens = rows if name == "decode" else run.sampler.prompts // run.sampler.layout.shards * 128
    assert max((np.prod(array.shape) for _, array in arrays), default=0) <= max(tokens * 48, 520 * rows // mesh.shape["tensor"]), name
    if mesh.shape["tensor"] == 1:
      assert all(np.prod(array.shape) <= 2 for _, array in arrays), f"{name}: rows have nothing to tell each other"
  kinds = {kind for kind, array in sent(compiled(calls["decode"])) if 520 // mesh.shape["tensor"] // mesh.shape["tensor"] in array.shape}
  assert kinds <= {"all-to-all"}


def test_a_shard_copies_its_own_prompts():
  run = made("fsdp:2,tensor:4", "data:4,tensor:2")
  sampler = run.sampler
  cache, state = sampler._empty_prompts(128), sampler._empty_slots(224, str(jax.random.key_impl(jax.random.key(0))))
  zeros = np.zeros(sampler.slots, np.int32)
  arrivals = Arrivals(np.zeros(4, np.int32), zeros, zeros, zeros, zeros, zeros, np.zeros((sampler.slots, 2), np.uint32))
  assert not sent(sampler._insert.lower(state, cache, arrivals).compile())


def test_weights_are_cast_before_they_move():
  bf16 = programs(
    CONFIG, dataclasses.replace(MODEL, dtype="bfloat16"), sharding.make_mesh("fsdp:8"), longest_prompt=9, eos_ids=(3,), pad_id=0
  )
  prepared = bf16.prepare.lower(bf16.abstract_state.policy)
  assert not sent(prepared.compile())
  for leaf, layout in zip(*map(jax.tree.leaves, (prepared.out_info, prepared.compile().output_shardings)), strict=True):
    assert leaf.dtype == ("bfloat16" if leaf.ndim > 1 else "float32")
    assert layout.shard_shape(leaf.shape) != leaf.shape or leaf.ndim == 1


@functools.cache
def one_step(spec, devices):
  """Loss, change of the weights under SGD, and the anchor after a step, for a mesh."""
  config = dataclasses.replace(
    CONFIG, prompts_per_step=4, max_prompt_tokens=tiny.PROMPT, max_new_tokens=tiny.RESPONSE, micro_batch=0, mini_batches=1
  )
  mesh = sharding.make_mesh(spec, jax.devices()[:devices])
  run = programs(config, tiny.CONFIG, mesh, longest_prompt=tiny.PROMPT, eos_ids=(3,), pad_id=0)
  before = init_state(tiny.params(), tiny.SGD, True)
  shardings = sharding.tree_shardings(mesh, before)
  constrain = functools.partial(sharding.constrain_batch, mesh)
  step = jax.jit(
    functools.partial(train_step, model=run.model, optimizer=tiny.SGD, config=run.step_config, constrain=constrain),
    out_shardings=(shardings, None),
  )
  data = jax.device_put(jax.device_get(tiny.batch(rows=16)), sharding.batch_sharding(mesh))
  after, metrics = jax.device_get(step(jax.device_put(before, shardings), (), data, tiny.hyper()))
  weights = run.rollout_weights(jax.device_put(tiny.params(), shardings.params))
  rng = np.random.default_rng(1)
  prompts = [rng.integers(0, 16, n).tolist() for n in rng.integers(1, tiny.PROMPT + 1, 8)]
  keys = streams.row_keys(0, streams.ROLLOUT, 1, np.arange(16), np.zeros(16, int))
  sampled = run.sampler.generate(weights, prompts, np.repeat(np.arange(8), 2), keys, Sampling(report_topk=4))
  return float(metrics["loss"].sum), tiny.change(tiny.params(), after.params), after.ema_params, sampled


@pytest.mark.parametrize("spec", ["data:8", "fsdp:8", "fsdp:2,tensor:4", "data:2,tensor:4", "data:2,fsdp:2,tensor:2"])
def test_every_mesh_gives_the_same(spec):
  """tensor:4 for 2 key/value heads, too."""
  (one_loss, one, one_anchor, one_sampled), (loss, many, anchor, sampled) = one_step("data:1", 1), one_step(spec, 8)
  assert loss == pytest.approx(one_loss, rel=1e-5)
  tiny.assert_same_gradient(many, one, rtol=1e-5)
  chex.assert_trees_all_close(anchor, one_anchor, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(sampled.tokens, one_sampled.tokens)
  np.testing.assert_array_equal(sampled.reason, one_sampled.reason)
  np.testing.assert_allclose(sampled.logp, one_sampled.logp, atol=1e-5)
