"""The gradient of the head, which is written by hand, against differentiated definitions in float64: every field, block and edge."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import token_stats as module
from emapg_jax.token_stats import stats_from_logits, token_stats

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, T, D, V, K = 2, 5, 3, 300, 4
FIELDS = ("logp", "entropy", "logsumexp", "logp_topk", "log_tail")


def inputs(dtype=np.float64):
  rng = np.random.default_rng(0)
  targets = rng.integers(0, V, (B, T)).astype(np.int32)
  # Ids of the first, second and last block of columns, different at each position; the target is one of them at some.
  ids = np.sort(rng.permuted(np.tile(np.arange(V, dtype=np.int32), (B, T, 1)), axis=-1)[..., :K], axis=-1)
  ids[0, 0] = targets[0, 0], *np.delete(np.asarray([0, 127, 128, 299], np.int32), 3)
  return rng.normal(size=(B, T, D)).astype(dtype), rng.normal(size=(D, V)).astype(dtype), targets, ids


def definitions(hidden, unembedding, targets, ids, temperature=0.7):
  logps = jax.nn.log_softmax(hidden @ unembedding / temperature)
  outside = jnp.all(jnp.arange(V, dtype=jnp.int32)[None, None, :, None] != ids[..., None, :], axis=-1)
  return {
    "logp": jnp.take_along_axis(logps, targets[..., None], -1)[..., 0],
    "entropy": -jnp.sum(jnp.exp(logps) * logps, -1),
    "logsumexp": jax.nn.logsumexp(hidden @ unembedding / temperature, -1),
    "logp_topk": jnp.take_along_axis(logps, ids, -1),
    "log_tail": jax.nn.logsumexp(jnp.where(outside, logps, -jnp.inf), -1),
  }


def weighted(fields, weights):
  return sum(jnp.sum(weights[name] * fields[name]) for name in FIELDS)


@functools.cache
def gradients(chunk, given, tied):
  """Of the head, and of the definitions on its ids, for weights of the fields."""

  @jax.jit
  def both(weights, hidden, unembedding, targets, ids):
    def head(hidden, unembedding):
      stats = token_stats(hidden, unembedding, targets, topk_ids=ids if given else None, topk=K, temperature=0.7, chunk=chunk, tied=tied)
      return weighted(vars(stats), weights), stats.topk_ids

    def defined(hidden, unembedding, ids):
      return weighted(definitions(hidden, unembedding, targets, ids), weights)

    (value, ids), found = jax.value_and_grad(head, argnums=(0, 1), has_aux=True)(hidden, unembedding)
    return (value, found), jax.value_and_grad(defined, argnums=(0, 1))(hidden, unembedding, ids)

  return both


# A chunk of 2 of 5 positions is 120 of 300 columns at all of them, which makes blocks of 128, 128 and 44; whole, one of 300.
@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize("given, tied", [(True, False), (False, False), (True, True)])
def test_every_field_in_float64(chunk, given, tied, x64):
  args = inputs()
  rng = np.random.default_rng(1)
  one_by_one = [{name: rng.normal(size=(B, T, K) if name == "logp_topk" else (B, T)) for name in FIELDS}]
  for kept in FIELDS:
    one_by_one.append({name: weight * (name == kept) for name, weight in one_by_one[0].items()})
  for weights in one_by_one:
    found, expected = gradients(chunk, given, tied)(weights, *args)
    assert found[1][0].dtype == np.float64
    chex.assert_trees_all_close(found, expected, rtol=1e-10, atol=1e-11)


def test_blocks_are_no_wider_than_their_budgets(monkeypatch):
  """Many columns for few positions: then it is their weights that fill the memory."""
  monkeypatch.setattr(module, "WEIGHTS_PER_BLOCK", 256 * D)
  args = [jnp.asarray(x) for x in inputs(np.float32)]

  def total(hidden, unembedding):
    return jnp.sum(token_stats(hidden, unembedding, args[2], topk_ids=args[3]).logp)

  found = jax.jit(jax.grad(total, argnums=(0, 1)))
  text = str(jax.make_jaxpr(found)(*args[:2]))
  assert f"f32[{D},256]" in text and f"f32[{D},44]" in text
  expected = jax.grad(lambda h, u: jnp.sum(definitions(h, u, *args[2:], temperature=1.0)["logp"]), argnums=(0, 1))(*args[:2])
  chex.assert_trees_all_close(found(*args[:2]), expected, atol=2e-5)


def logits_gradient(logits, targets, ids, weights):
  """Through the head, of which the unembedding is the logits of the one position, and the hidden state is 1."""

  def total(unembedding):
    stats = token_stats(jnp.ones((1, 1, 1)), unembedding, targets[None, :], topk_ids=ids[None])
    # As a loss that takes care not to use a field that is -inf.
    return sum(jnp.sum(weights[name] * jnp.where(vars(stats)[name] > -jnp.inf, vars(stats)[name], 0.0)) for name in weights)

  return jax.grad(total)(logits)[0]


def test_impossible_ids_take_no_part():
  # p = (1/2, 1/4, 1/4, 0, 0), ids (0, 3), H = 1.5·log 2 = 1.039721.
  logits = jnp.log(jnp.asarray([[2.0, 1.0, 1.0, 0.0, 0.0]]))
  gradient = functools.partial(logits_gradient, logits, jnp.asarray([1]), jnp.asarray([[0, 3]]))
  # −p·(log p + H): 1/2·(0.693147 − 1.039721), 1/4·(1.386294 − 1.039721).
  np.testing.assert_allclose(gradient({"entropy": 1.0}), [-0.173287, 0.086643, 0.086643, 0, 0], atol=1e-6)
  np.testing.assert_allclose(gradient({"log_tail": 1.0}), [-0.5, 0.25, 0.25, 0, 0], atol=1e-6)
  np.testing.assert_allclose(gradient({"logp_topk": 1.0}), [0.5, -0.25, -0.25, 0, 0], atol=1e-6)  # of id 3 nothing
  np.testing.assert_allclose(gradient({"logp": 1.0}), [-0.5, 0.75, -0.25, 0, 0], atol=1e-6)


@pytest.mark.parametrize("differentiated", [False, True])
def test_nothing_flows_through_a_field_that_is_minus_infinity(differentiated):
  # The target and one of the ids are impossible; of the ids that are left out, all are. What the loss says of those fields is ignored.
  logits = jnp.asarray([[1.0, 0.0, -jnp.inf, -jnp.inf]])

  def fields(unembedding):
    targets, ids = jnp.asarray([[3]]), jnp.asarray([[[0, 1, 2]]])
    if differentiated:
      stats = stats_from_logits(unembedding[None], targets, ids)
    else:
      stats = token_stats(jnp.ones((1, 1, 1)), unembedding, targets, topk_ids=ids)
    return jnp.stack([stats.logp[0, 0], stats.log_tail[0, 0], stats.logp_topk[0, 0, 2]])

  assert np.all(np.asarray(fields(logits)) == -np.inf)
  np.testing.assert_array_equal(jax.grad(lambda logits: jnp.sum(fields(logits)))(logits), np.zeros((1, 4)))


@pytest.mark.parametrize("k, chunk", [(0, 2), (0, None), (V, 2)])
def test_no_ids_and_all_ids(k, chunk):
  hidden, unembedding, targets, _ = (jnp.asarray(x) for x in inputs(np.float32))
  ids = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, T, k))
  weights = jax.random.normal(jax.random.key(0), (B, T, k))

  def total(fields):
    tail = fields["log_tail"]  # log 1 without ids, log 0 with all
    return jnp.sum(jnp.exp(tail)) + jnp.sum(fields["entropy"] - fields["logp"]) + jnp.sum(weights * fields["logp_topk"])

  found = jax.grad(lambda *a: total(vars(token_stats(*a, targets, topk_ids=ids, temperature=0.7, chunk=chunk))), argnums=(0, 1))
  defined = jax.grad(lambda *a: total(definitions(*a, targets, ids) | {"log_tail": jnp.zeros((B, T))}), argnums=(0, 1))
  chex.assert_trees_all_close(found(hidden, unembedding), defined(hidden, unembedding), atol=1e-4)


def test_tail_keeps_its_digits_in_the_gradient():
  # Of a tail of mass e⁻³⁰, and of one that is no float32, the shares are what they are: 1/(1 + e⁻¹) = 0.731059.
  for low in (-30.0, -200.0):
    gradient = logits_gradient(jnp.asarray([[0.0, low, low - 1]]), jnp.asarray([0]), jnp.asarray([[0]]), {"log_tail": 1.0})
    np.testing.assert_allclose(gradient, [-1.0, 0.731059, 0.268941], rtol=2e-5)


def test_bfloat16_gradient_is_rounded_only_at_the_ends(monkeypatch):
  """Against float32 on the same numbers: factors and results are off by 2⁻⁹ at most, and the sum over 32 blocks is float32."""
  monkeypatch.setattr(module, "WEIGHTS_PER_BLOCK", 128 * D)
  rng = np.random.default_rng(0)
  targets = rng.integers(0, 32 * 128, (B, T)).astype(np.int32)
  args = jnp.asarray(rng.normal(size=(B, T, D)), jnp.bfloat16), jnp.asarray(rng.normal(size=(D, 32 * 128)), jnp.bfloat16)

  def total(*args):
    stats = token_stats(*args, targets, topk_ids=targets[..., None])
    return jnp.sum(stats.logp + stats.entropy) + jnp.sum(stats.logp_topk)

  gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
  for a, b in zip(gradient(*args), gradient(*jax.tree.map(lambda x: x.astype(jnp.float32), args))):
    assert a.dtype == jnp.bfloat16
    assert float(jnp.linalg.norm(a.astype(jnp.float32) - b)) < 2**-8 * float(jnp.linalg.norm(b))


def test_equals_the_differentiated_form():
  """`stats_from_logits` is differentiated by JAX: the two say the same."""
  hidden, unembedding, targets, ids = (jnp.asarray(x) for x in inputs(np.float32))

  def total(stats):
    return jnp.sum(jnp.sin(stats.logp) + stats.entropy**2 + stats.log_tail) + jnp.sum(stats.logp_topk * jnp.exp(stats.logp_topk))

  found = jax.grad(lambda h, u: total(token_stats(h, u, targets, topk_ids=ids)), argnums=(0, 1))
  whole = jax.grad(lambda h, u: total(stats_from_logits(h @ u, targets, ids)), argnums=(0, 1))
  chex.assert_trees_all_close(found(hidden, unembedding), whole(hidden, unembedding), atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_unembedding_is_held_once(tied):
  """[D, V] is an eighth of all logits here, and no temporary: what lives beside the result is a few chunks of logits."""
  length, vocab, width = 512, 8192, 64
  shapes = (
    jax.ShapeDtypeStruct((1, length, width), jnp.float32),
    jax.ShapeDtypeStruct((vocab, width) if tied else (width, vocab), jnp.float32),
    jax.ShapeDtypeStruct((1, length), jnp.int32),
  )

  def total(hidden, unembedding, targets):
    stats = token_stats(hidden, unembedding.T if tied else unembedding, targets, topk=8, chunk=8, tied=tied)
    return jnp.sum(stats.logp + stats.entropy + stats.log_tail) + jnp.sum(stats.logp_topk)

  memory = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
  chunk, whole = 4 * 8 * vocab, 4 * length * vocab
  assert memory.output_size_in_bytes >= 4 * width * vocab
  assert memory.temp_size_in_bytes < 8 * chunk + 4 * width * vocab / 2 < whole / 4


def test_low_logits_without_a_tail():
  """exp(100) is no float32: where the tail is empty, nothing may be measured from 0."""
  logits, target = jnp.asarray([[[-100.0, -101.0, -102.0]]]), jnp.zeros((1, 1), jnp.int32)
  p = np.exp([0.0, -1.0, -2.0]) / np.sum(np.exp([0.0, -1.0, -2.0]))
  for field, value, gradient in (
    ("logp", np.log(p[0]), np.eye(3)[0] - p),
    ("entropy", -np.sum(p * np.log(p)), -p * (np.log(p) - np.sum(p * np.log(p)))),
  ):
    for stats in (lambda x: token_stats(x, jnp.eye(3), target, topk=3), lambda x: stats_from_logits(x, target, topk=3)):
      found = jax.value_and_grad(lambda x: vars(stats(x))[field].sum())(logits)  # noqa: B023
      np.testing.assert_allclose(found[0], value, rtol=1e-5)
      np.testing.assert_allclose(found[1][0, 0], gradient, atol=1e-5)
