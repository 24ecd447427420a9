"""The head with its vocabulary split over devices: the numbers of `token_stats`, and nothing of the vocabulary's size on the wires."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax import sharding
from emapg_jax.sharded_token_stats import sharded_token_stats
from emapg_jax.token_stats import token_stats

pytestmark = [pytest.mark.multi_device, pytest.mark.usefixtures("strict_dtypes")]

B, T, D, V, K = 8, 5, 24, 1360, 3
FIELDS = ("logp", "entropy", "logsumexp", "logp_topk", "log_tail")
SPECS = ("tensor:8", "data:2,tensor:4", "data:2,fsdp:2,tensor:2")
BLOCKS = {V // 8, V // 4, V // 2, 256, 128, V // 8 - 128, V // 4 - 256, V // 2 - 512, V // 2 - 640}  # of columns, with what is left


def inputs(vocab=V, k=K):
  rng = np.random.default_rng(0)
  # Whole numbers of few digits: many logits are equal, some of them on different devices, and which are is not a matter of rounding.
  hidden = rng.integers(-1, 2, (B, T, D)).astype(np.float32)
  unembedding = rng.integers(-1, 2, (D, vocab)).astype(np.float32) / 4
  targets = rng.integers(0, vocab, (B, T)).astype(np.int32)
  ids = rng.permuted(np.tile(np.arange(vocab, dtype=np.int32), (B, T, 1)), axis=-1)[..., :k]
  if k:
    ids[..., 0] = np.where(np.all(ids != targets[..., None], axis=-1), targets, ids[..., 0])  # so that targets are among them
  return hidden, unembedding, targets, ids


def place(mesh, hidden, unembedding, *rows):
  by_rows = sharding.batch_sharding(mesh)
  return (
    jax.device_put(hidden, by_rows),
    jax.device_put(unembedding, NamedSharding(mesh, P("fsdp", "tensor"))),
    *jax.device_put(rows, by_rows),
  )


def loss(weights, hidden, unembedding, targets, ids, *, stats, k=K, chunk=2):
  out = stats(hidden, unembedding, targets, topk_ids=ids, topk=k, temperature=0.7, chunk=chunk)
  # A field that is -inf has weight 0 in no loss but one that asks for it.
  return sum(jnp.sum(weights[name] * jnp.where(vars(out)[name] > -jnp.inf, vars(out)[name], 0.0)) for name in FIELDS), out


def weights(k=K):
  rng = np.random.default_rng(1)
  return {name: rng.normal(size=(B, T, k) if name == "logp_topk" else (B, T)).astype(np.float32) for name in FIELDS}


@functools.cache
def gradient(spec, k=K):
  """(value, statistics) and gradients, for a mesh; or on one device for None."""
  stats = token_stats if spec is None else sharded_token_stats(sharding.make_mesh(spec))
  return jax.jit(jax.value_and_grad(functools.partial(loss, stats=stats, k=k), argnums=(1, 2), has_aux=True))


def compare(spec, args, k=K):
  found = gradient(spec, k)(weights(k), *place(sharding.make_mesh(spec), *args))
  expected = gradient(None, k)(weights(k), *args)
  (_, stats), grads = found
  (_, one), one_grads = expected
  np.testing.assert_array_equal(stats.topk_ids, one.topk_ids)
  chex.assert_trees_all_close(stats, one, rtol=1e-6, atol=1e-5)
  chex.assert_trees_all_close(grads, one_grads, rtol=1e-5, atol=2e-5)
  return one


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_one_device(spec, given):
  hidden, unembedding, targets, ids = inputs()
  one = compare(spec, (hidden, unembedding, targets, ids if given else None))
  if not given:
    logits = hidden @ unembedding
    np.testing.assert_array_equal(one.topk_ids, np.argsort(-logits, axis=-1, kind="stable")[..., :K])
    kth = np.take_along_axis(logits, np.asarray(one.topk_ids)[..., -1:], -1)
    assert np.any(np.sum(logits >= kth, axis=-1) > K), "ties decide who is in"


@pytest.mark.parametrize("k", [0, 16])
def test_no_ids_and_all_ids(k):
  hidden, unembedding, targets, _ = inputs(16, k)
  one = compare("data:2,tensor:4", (hidden, unembedding, targets, None), k)
  assert np.all(np.asarray(one.log_tail) == (-np.inf if k else 0))


def test_impossible_ids():
  """Ids of probability 0 on every device, all of one device's among them; one is a target, and one is among the given ids."""
  hidden, unembedding, targets, ids = inputs()
  hidden = np.abs(hidden) + 1
  unembedding[:, ::7] = unembedding[:, : V // 4] = -np.inf
  targets[0, 0] = ids[1, 1, 0] = 0
  for given in (ids, None):
    (_, stats), (_, grad) = gradient("data:2,tensor:4")(
      weights(), *place(sharding.make_mesh("data:2,tensor:4"), hidden, unembedding, targets, given)
    )
    (_, one), (_, one_grad) = gradient(None)(weights(), hidden, unembedding, targets, given)
    assert float(stats.logp[0, 0]) == -np.inf
    chex.assert_trees_all_close(stats, one, rtol=1e-6, atol=1e-5)
    chex.assert_trees_all_close(grad, one_grad, rtol=1e-5, atol=2e-5)


def shapes_on_the_wires(text):
  """[(kind, shape)] of all that collectives of a compiled program take and give."""
  defined = {name: result for name, result in re.findall(r"^\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ", text, re.M)}
  found = []
  kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
  for result, kind, operands in re.findall(rf"= (\([^()]*\)|\S+) ({kinds})(?:-start)?\(([^)]*)\)", text):
    types = [result, *(defined[name] for name in re.findall(r"%[\w.\-]+", operands))]
    found += [(kind, tuple(int(n) for n in dims.split(",") if n)) for dims in re.findall(r"\w\[([\d,]*)\]", " ".join(types))]
  assert found, "no collective was found: the text has another form"
  return found


def check_wires(text, spec, transposed=False):
  """What has the vocabulary's size, or a block's, is a device's share of the unembedding, gathered over fsdp, or of its summed gradient."""
  mesh = sharding.make_mesh(spec)
  share = V // mesh.shape["tensor"]
  large = [(kind, shape) for kind, shape in shapes_on_the_wires(text) if {V, *BLOCKS} & set(shape) or max(shape, default=0) >= 128]
  fsdp, allowed = mesh.shape["fsdp"], set()
  for kind, axis, widths in (("all-gather", "fsdp", (1, fsdp)), ("reduce-scatter", "fsdp", (1, fsdp)), ("all-reduce", "data", (fsdp,))):
    if mesh.shape[axis] > 1:
      shapes = {(D // n, columns) for n in widths for columns in ((share, *BLOCKS) if kind == "reduce-scatter" else (share,))}
      allowed |= {(kind, shape) for shape in (shapes | {shape[::-1] for shape in shapes} if transposed else shapes)}
  assert set(large) <= allowed, sorted(set(large) - allowed)
  return large


@pytest.mark.parametrize("spec", SPECS)
def test_no_logits_and_no_columns_travel(spec):
  mesh = sharding.make_mesh(spec)
  args = weights(), *place(mesh, *inputs())
  for own in (args, (*args[:-1], None)):
    assert bool(check_wires(gradient(spec).lower(*own).compile().as_text(), spec)) == (spec != "tensor:8")


def test_the_assertion_sees_what_travels_without_the_split():
  mesh = sharding.make_mesh("tensor:8")
  args = weights(), *place(mesh, *inputs()[:3], None)
  text = gradient(None).lower(*args).compile().as_text()
  with pytest.raises(AssertionError):
    check_wires(text, "tensor:8")


@pytest.mark.parametrize("tied", [False, True])
def test_within_a_scan_over_micro_batches(tied):
  """As the training step has it: the tied embedding, laid out by the table, and its gradient added up over micro-batches."""
  spec = "data:2,fsdp:2,tensor:2"
  mesh = sharding.make_mesh(spec)
  hidden, unembedding, targets, ids = (jnp.concatenate([x, x[::-1]]) if x.shape[0] == B else jnp.asarray(x) for x in inputs())
  params = {"embed": {"embedding": unembedding.T}, "attn": {"q": {"bias": jnp.zeros((1, 2, 12))}}}
  layout = {"embed": {"embedding": NamedSharding(mesh, P("tensor", "fsdp"))}, "attn": {"q": {"bias": NamedSharding(mesh, P())}}}

  def step(params, batch, stats, constrain):
    def micro_loss(params, hidden, targets, ids):
      hidden = jnp.tanh(hidden + params["attn"]["q"]["bias"].reshape(1, 1, D))
      return loss(weights(), hidden, params["embed"]["embedding"].T, targets, ids, stats=stats)[0]

    def micro_step(total, indices):
      micro = constrain(jax.tree.map(lambda x: x[indices], batch))
      return jax.tree.map(jnp.add, total, jax.grad(micro_loss)(params, *micro)), None

    indices = jnp.arange(2 * B).reshape(B, 2).T
    return jax.lax.scan(micro_step, jax.tree.map(jnp.zeros_like, params), indices)[0]

  one = jax.jit(functools.partial(step, stats=functools.partial(token_stats, tied=tied), constrain=lambda x: x))(
    params, (hidden, targets, ids)
  )
  bound = {"stats": functools.partial(sharded_token_stats(mesh), tied=tied), "constrain": functools.partial(sharding.constrain_batch, mesh)}
  args = jax.device_put(params, layout), jax.device_put((hidden, targets, ids), sharding.batch_sharding(mesh))
  compiled = jax.jit(functools.partial(step, **bound), out_shardings=layout).lower(*args).compile()
  check_wires(compiled.as_text(), spec, transposed=True)
  chex.assert_trees_all_close(compiled(*args), one, rtol=1e-5, atol=5e-5)


def test_without_a_split_it_is_the_head_itself():
  mesh = sharding.make_mesh("data:1", jax.devices()[:1])
  assert sharded_token_stats(mesh) is token_stats
  split = sharding.make_mesh("tensor:8")
  assert sharded_token_stats(split) is sharded_token_stats(sharding.make_mesh("tensor:8")), "a static argument that is equal to itself"


@pytest.mark.parametrize("spec", ["data:8", "data:2,fsdp:4"])
def test_rows_on_many_devices_find_their_own_ids(spec):
  """Left to itself, XLA gathers the logits of all rows for the search."""
  compare(spec, (*inputs()[:3], None))
  mesh = sharding.make_mesh(spec)
  args = weights(), *place(mesh, *inputs()[:3], None)
  gathered = [shape for kind, shape in shapes_on_the_wires(gradient(spec).lower(*args).compile().as_text()) if kind == "all-gather"]
  assert all(len(shape) < 3 for shape in gathered), gathered


def test_rows_on_many_devices_stay_apart_in_the_head_itself():
  """Without a mesh to its name it is told where rows lie by its arguments: then only the gradient of the unembedding is added up."""
  mesh = sharding.make_mesh("data:8")
  text = gradient(None).lower(weights(), *place(mesh, *inputs())).compile().as_text()
  assert {len(shape) for kind, shape in shapes_on_the_wires(text) if kind == "all-reduce"} == {0, 2}
  assert not [found for found in shapes_on_the_wires(text) if found[0] != "all-reduce"]


def test_what_cant_be_split_is_refused():
  hidden, unembedding, targets, _ = inputs(20)
  stats = sharded_token_stats(sharding.make_mesh("tensor:8"))
  with pytest.raises(ValueError, match=r"vocabulary of 20 ids .* over the 8 devices of the mesh axis tensor"):
    stats(hidden, unembedding, targets)
  stats = sharded_token_stats(sharding.make_mesh("data:4,tensor:2"))
  with pytest.raises(ValueError, match=r"^6 rows can't be spread over the 4 devices"):
    stats(hidden[:6], unembedding, targets[:6])
  with pytest.raises(ValueError, match=r"shape \(23, 20\) .* 23 rows over the 2 devices of the mesh axis fsdp"):
    sharded_token_stats(sharding.make_mesh("data:2,fsdp:2,tensor:2"))(hidden[..., 1:], unembedding[1:], targets)
  with pytest.raises(ValueError, match=r"top-k of 21 ids .* vocabulary has 20"):
    stats(hidden, unembedding, targets, topk=21)
