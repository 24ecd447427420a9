"""The chunked head against log_softmax on whole logits, value and gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax.token_stats import stats_from_logits, token_stats

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, T, D, V, K = 3, 7, 5, 19, 4
FIELDS = ("logp", "entropy", "logsumexp", "logp_topk", "log_tail")


def inputs(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys[0], (B, T, D), dtype)
  unembedding = jax.random.normal(keys[1], (D, V), dtype)
  return hidden, unembedding, jax.random.randint(keys[2], (B, T), 0, V)


def plain(hidden, unembedding, targets, ids, temperature):
  """The definitions, with [B, T, V] in the open."""
  logits = (hidden @ unembedding).astype(jnp.float32) / temperature
  logps = jax.nn.log_softmax(logits)
  if ids is None:
    ids = jnp.argsort(-logits, axis=-1, stable=True)[..., :K]
  outside = jnp.all(jnp.arange(V)[None, None, :, None] != ids[..., None, :], axis=-1)
  return {
    "logp": jnp.take_along_axis(logps, targets[..., None], -1)[..., 0],
    "entropy": -jnp.sum(jnp.exp(logps) * logps, -1),
    "logsumexp": jax.nn.logsumexp(logits, -1),
    "topk_ids": ids,
    "logp_topk": jnp.take_along_axis(logps, ids, -1),
    "log_tail": jax.nn.logsumexp(jnp.where(outside, logps, -jnp.inf), -1),
  }


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("given", [True, False])
def test_equals_log_softmax(chunk, given):
  hidden, unembedding, targets = inputs()
  ids = jnp.tile(jnp.asarray([0, 7, 18, 3], jnp.int32), (B, T, 1)) if given else None
  expected = plain(hidden, unembedding, targets, ids, 0.7)
  stats = jax.jit(lambda h, u: token_stats(h, u, targets, topk_ids=ids, topk=K, temperature=0.7, chunk=chunk))(hidden, unembedding)
  np.testing.assert_array_equal(stats.topk_ids, expected["topk_ids"])
  for field in FIELDS:
    np.testing.assert_allclose(getattr(stats, field), expected[field], atol=3e-6, err_msg=field)
    assert getattr(stats, field).dtype == jnp.float32


@pytest.mark.parametrize("field", FIELDS)
def test_gradient_of_each_field(field):
  hidden, unembedding, targets = inputs()
  ids = jnp.tile(jnp.asarray([0, 7, 18, 3], jnp.int32), (B, T, 1))
  weights = jax.random.normal(jax.random.key(5), (B, T) + ((K,) if field == "logp_topk" else ()))

  def chunked(h, u):
    return jnp.sum(weights * getattr(token_stats(h, u, targets, topk_ids=ids, temperature=0.7, chunk=3), field))

  def whole(h, u):
    return jnp.sum(weights * plain(h, u, targets, ids, 0.7)[field])

  grads = jax.grad(chunked, argnums=(0, 1))(hidden, unembedding)
  chex.assert_trees_all_close(grads, jax.grad(whole, argnums=(0, 1))(hidden, unembedding), atol=1e-5)


def test_temperature_by_hand():
  # logits [2, 0] at T = 0.5 are [4, 0]: log p0 = −log(1 + e⁻⁴) = −0.018150; at T = 1, −log(1 + e⁻²) = −0.126928.
  hidden, unembedding, target = jnp.ones((1, 1, 1)), jnp.asarray([[2.0, 0.0]]), jnp.zeros((1, 1), jnp.int32)
  assert float(token_stats(hidden, unembedding, target, temperature=0.5).logp[0, 0]) == pytest.approx(-0.018150, abs=1e-6)
  assert float(token_stats(hidden, unembedding, target).logp[0, 0]) == pytest.approx(-0.126928, abs=1e-6)


def test_all_ids_leave_no_tail_and_a_finite_gradient():
  logits = jax.random.normal(jax.random.key(0), (2, V))
  ids = jnp.tile(jnp.arange(V, dtype=jnp.int32), (2, 1))
  targets = jnp.zeros((2,), jnp.int32)
  assert np.all(np.asarray(stats_from_logits(logits, targets, ids).log_tail) == -np.inf)

  def f(logits):
    stats = stats_from_logits(logits, targets, ids)
    return jnp.sum(jnp.exp(stats.log_tail)) + jnp.sum(stats.entropy)

  assert np.all(np.isfinite(jax.grad(f)(logits)))


def test_impossible_ids():
  logits = jax.random.normal(jax.random.key(0), (2, V)).at[:, 3].set(-jnp.inf)
  targets = jnp.zeros((2,), jnp.int32)

  def entropy(logits):
    return jnp.sum(stats_from_logits(logits, targets, topk=K).entropy)

  kept = jnp.delete(logits, 3, axis=1)
  logps = jax.nn.log_softmax(kept)
  np.testing.assert_allclose(entropy(logits), -jnp.sum(jnp.exp(logps) * logps), rtol=1e-6)
  grad = jax.grad(entropy)(logits)
  assert np.all(np.isfinite(grad))
  assert np.all(np.asarray(grad[:, 3]) == 0)


def test_tail_keeps_its_digits_where_one_minus_the_head_has_none():
  # A tail of mass e⁻³⁰ ≈ 9.4e-14 lies far below float32's 6e-8 next to 1.
  logits = jnp.asarray([[0.0, -30.0, -jnp.inf]])
  stats = stats_from_logits(logits, jnp.zeros((1,), jnp.int32), topk=1)
  assert float(stats.log_tail[0]) == pytest.approx(-30.0, rel=1e-6)
  # And where its mass is no float32 at all, its logarithm still is one.
  stats = stats_from_logits(jnp.asarray([[0.0, -200.0, -201.0]]), jnp.zeros((1,), jnp.int32), topk=1)
  assert float(stats.log_tail[0]) == pytest.approx(-200.0 + np.log1p(np.exp(-1.0)), rel=1e-6)


def test_bfloat16_inputs_give_unrounded_logits():
  hidden, unembedding, targets = inputs(jnp.bfloat16)
  stats = token_stats(hidden, unembedding, targets, topk=K)
  exact = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)
  expected = np.log(np.sum(np.exp(exact), -1))
  # A rounded logit of size 4 would be off by up to 2⁻⁷ = 8e-3.
  np.testing.assert_allclose(stats.logsumexp, expected, atol=1e-5)


def test_never_holds_all_logits():
  big_t, vocab = 64, 4096
  hidden = jax.ShapeDtypeStruct((2, big_t, 8), jnp.float32)
  unembedding = jax.ShapeDtypeStruct((8, vocab), jnp.float32)
  targets = jax.ShapeDtypeStruct((2, big_t), jnp.int32)

  def peak(chunk):
    def loss(h, u, t):
      stats = token_stats(h, u, t, topk=8, chunk=chunk)
      return jnp.sum(stats.logp + stats.entropy + stats.log_tail)

    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, unembedding, targets).compile().memory_analysis().temp_size_in_bytes

  # Whole, at least one float32 [2, 64, 4096] lives; in chunks of 4 everything is below half of that one array.
  assert peak(big_t) > 2 * big_t * vocab * 4
  assert peak(4) < 2 * big_t * vocab * 4 / 2


def test_bad_arguments():
  hidden, unembedding, targets = inputs()
  with pytest.raises(ValueError, match=r"width 5 and an unembedding of shape \(19, 5\)"):
    token_stats(hidden, unembedding.T, targets)
  with pytest.raises(ValueError, match=r"temperature > 0, got 0"):
    token_stats(hidden, unembedding, targets, temperature=0.0)
  with pytest.raises(ValueError, match=r"top-k of 20 ids .* vocabulary has 19"):
    token_stats(hidden, unembedding, targets, topk=20)
  for chunk in (0, -1):
    with pytest.raises(ValueError, match=rf"chunk {chunk}, but a chunk holds at least 1"):
      token_stats(hidden, unembedding, targets, chunk=chunk)


@pytest.mark.parametrize("shape", [(0, T), (B, 0), (0, 0)])
@pytest.mark.parametrize("chunk", [2, None])
def test_no_positions_give_no_numbers(shape, chunk):
  def logps(hidden):
    return token_stats(hidden, jnp.ones((D, V)), jnp.zeros(shape, jnp.int32), topk=K, chunk=chunk)

  stats = logps(jnp.zeros((*shape, D)))
  assert stats.logp.shape == stats.log_tail.shape == shape and stats.topk_ids.shape == (*shape, K)
  assert jax.grad(lambda h: jnp.sum(logps(h).logp))(jnp.zeros((*shape, D))).shape == (*shape, D)


def test_approximate_search_gives_ids_that_are_as_good_for_the_kl():
  """Other ids, the same bookkeeping: distinct, with their own log-probs, and a tail that completes them to 1."""
  hidden, unembedding, targets = inputs()
  stats = token_stats(hidden, unembedding, targets, topk=K, approximate=True)
  assert all(len(set(ids)) == K for ids in np.asarray(stats.topk_ids).reshape(-1, K).tolist())
  given = token_stats(hidden, unembedding, targets, topk_ids=stats.topk_ids)
  chex.assert_trees_all_close(stats, given, atol=1e-6)
  np.testing.assert_allclose(jnp.sum(jnp.exp(stats.logp_topk), -1) + jnp.exp(stats.log_tail), 1.0, rtol=1e-6)
