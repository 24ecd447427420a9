"""Truncated importance sampling between sampler and trainer: its two functions by hand, and what they do to the training step."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import losses
from experiments.estimators import ESTIMATORS
from tests import tiny
from tests.tiny import assert_same_gradient, values


@pytest.mark.usefixtures("strict_dtypes")
class TruncatedWeightTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_below_and_beyond_the_cap(self):
    weight = self.variant(functools.partial(losses.truncated_weight, cap=2.0))
    # Ratios e^-0.5 = 0.607, e^0.5 = 1.649, e = 2.718, and two that leave float32; the trainer excludes the last token.
    found, capped = weight(np.array([-3.5, -2.5, -2, 100, -200, -np.inf], np.float32), np.full(6, -3, np.float32))
    np.testing.assert_allclose(found, [0.60653066, 1.6487213, 2, 2, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(capped, [False, False, True, True, False, False])

  @chex.variants(with_jit=True, without_jit=True)
  def test_at_a_cap_of_one_nothing_is_capped_where_both_agree(self):
    found, capped = self.variant(functools.partial(losses.truncated_weight, cap=1.0))(np.zeros(2, np.float32), np.zeros(2, np.float32))
    np.testing.assert_array_equal(found, [1, 1])
    np.testing.assert_array_equal(capped, [False, False])

  @chex.variants(with_jit=True, without_jit=True)
  def test_no_gradient(self):
    def total(old_logp, sampling_logp):
      return jnp.sum(losses.truncated_weight(old_logp, sampling_logp, 2.0)[0])

    grads = self.variant(jax.grad(total, argnums=(0, 1)))(np.array([0.1, 5.0], np.float32), np.zeros(2, np.float32))
    np.testing.assert_array_equal(grads, np.zeros((2, 2)))


@pytest.mark.usefixtures("strict_dtypes")
class WithinSequenceRatioTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_geometric_mean_against_both_bounds(self):
    two, half = np.log(2.0), -np.log(2.0)
    rows = [
      ([2.0, -0.8, 0.0], True),  # mean 0.4 < ln 2 = 0.693, though one token's ratio is e²
      ([2.0, 0.1, 0.0], False),  # mean 0.7
      ([-2.0, -0.1, 0.0], False),
      ([-2.0, 0.8, 0.0], True),
      ([two, two, two], True),  # at a bound
      ([half, half, half], True),
      ([two, two, two + 1e-5], False),
      ([half, half, half - 1e-5], False),
    ]
    log_ratios, expected = np.array([row for row, _ in rows], np.float32), [kept for _, kept in rows]
    within = self.variant(functools.partial(losses.within_sequence_ratio, bound=2.0))
    np.testing.assert_array_equal(within(log_ratios, np.zeros_like(log_ratios), np.ones(log_ratios.shape, bool)), expected)
    # Only the difference matters.
    shift = np.float32(-0.5)
    found = within(log_ratios[:4] + shift, np.full((4, 3), shift), np.ones((4, 3), bool))
    np.testing.assert_array_equal(found, expected[:4])

  @chex.variants(with_jit=True, without_jit=True)
  def test_mask(self):
    within = self.variant(functools.partial(losses.within_sequence_ratio, bound=2.0))
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
      # Means over trained tokens: (2 − 0.8) / 2 = 0.6, (2 − 0.6) / 2 = 0.7 and none at all. Over all three they would be 0.4 and 0.467.
      old_logp = jnp.array([[2.0, garbage, -0.8], [2.0, garbage, -0.6], [garbage] * 3], jnp.float32)
      mask = jnp.array([[True, False, True], [True, False, True], [False] * 3])
      for sampling_logp in (jnp.zeros((3, 3)), jnp.where(mask, 0.0, garbage)):
        np.testing.assert_array_equal(within(old_logp, sampling_logp, mask), [True, False, True])


@pytest.mark.parametrize("value", [0.99, 0.0, -1.0, float("nan")])
def test_below_one_is_refused(value):
  with pytest.raises(ValueError, match=f"truncated_weight got cap={value}"):
    losses.truncated_weight(jnp.zeros(1), jnp.zeros(1), value)
  with pytest.raises(ValueError, match=f"within_sequence_ratio got bound={value}"):
    losses.within_sequence_ratio(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1), bool), value)


# Through the training step. One update per step: the old policy is the current one, and the weight is exp(logp − sampling_logp).


@functools.cache
def logp():
  return tiny.toy_stats(tiny.toy_params(), tiny.toy_batch()).logp


def weighted_batch(log_weight):
  return tiny.toy_batch().replace(sampling_logp=logp() - log_weight)


def config(**changes):
  return tiny.config(**{"policy_loss": losses.reinforce_with_aux, "kl": None} | changes)


def test_the_weight_multiplies_the_policy_gradient_token_by_token():
  log_weight = np.random.default_rng(0).normal(size=logp().shape).astype(np.float32)
  weight = np.minimum(np.exp(log_weight), 1.5)
  data = weighted_batch(log_weight)
  found, metrics = tiny.toy_gradient(data, config(tis_cap=1.5))
  expected, _ = tiny.toy_gradient(data.replace(advantages=data.advantages * weight), config())
  assert_same_gradient(found, expected, 1e-5)
  mask, numbers = np.asarray(data.mask), values(metrics)
  assert numbers["tis_weight"] == pytest.approx(weight[mask].mean(), rel=1e-5)
  assert numbers["tis_capped"] == pytest.approx((log_weight > np.log(1.5))[mask].mean(), rel=1e-5)
  assert 0 < numbers["tis_capped"] < 1
  # Without the cap only the metrics know of the mismatch.
  unweighted, metrics = tiny.toy_gradient(data, config())
  assert_same_gradient(unweighted, tiny.toy_gradient(weighted_batch(0.0), config())[0])
  assert values(metrics)["sampler_ratio"] == pytest.approx(np.exp(log_weight)[mask].mean(), rel=1e-5)
  assert not any(name.startswith("tis") for name in metrics)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_sequence_beyond_the_bound_is_as_if_it_were_masked(aggregation):
  """With KL and entropy bonus: numerator and denominator."""
  log_weight = np.zeros(logp().shape, np.float32)
  log_weight[2], log_weight[5] = 0.5, -0.5  # ratios 1.65 and 1 / 1.65
  log_weight[0], log_weight[3, ::2] = 0.3, 0.6  # 1.35; of 5 tokens 3: mean 0.36, 1.43, though a token's ratio is 1.8
  changes = {"aggregation": aggregation, "kl": ESTIMATORS["topk_reverse"], "entropy_coef": 0.1}
  data = weighted_batch(log_weight)
  found, metrics = tiny.toy_gradient(data, config(tis_sequence_bound=1.5, **changes))
  kept = np.ones(tiny.ROWS, bool)
  kept[[2, 5]] = False
  expected, expected_metrics = tiny.toy_gradient(data.replace(mask=data.mask & kept[:, None]), config(**changes))
  assert_same_gradient(found, expected)
  numbers, expected_numbers = values(metrics), values(expected_metrics)
  for name in ("loss", "policy_loss", "entropy", "kl"):
    assert numbers[name] == pytest.approx(expected_numbers[name], rel=1e-6)
  assert metrics["loss"].weight == expected_metrics["loss"].weight
  assert numbers["tis_masked"] == pytest.approx(2 / 7)  # row 1 trains nothing, and is not counted
  # The mismatch is still measured over all.
  assert numbers["sampler_ratio_max"] == pytest.approx(np.exp(0.6), rel=1e-5)


def test_all_sequences_beyond_the_bound():
  grads, metrics = tiny.toy_gradient(weighted_batch(2.0), config(tis_sequence_bound=1.5))
  assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
  assert values(metrics)["tis_masked"] == 1 and values(metrics)["bad_updates"] == 0


def test_the_mismatch_counts_once_in_the_kl():
  """A tail term h of weight s: s alone is exp(0.5) = 1.65; capped at 1.2 it is 1.2 · exp(logp − old_logp) = 1.2, not 1.2 · 1.65 = 1.98."""
  data = weighted_batch(0.5).replace(advantages=jnp.zeros(logp().shape))
  changes = {"kl": ESTIMATORS["k3pp"], "aggregation": "sequence_sum"}
  plain, _ = tiny.toy_gradient(weighted_batch(0.0).replace(advantages=data.advantages), config(**changes))
  for step_config, factor in ((config(**changes), np.exp(0.5)), (config(tis_cap=1.2, **changes), 1.2)):
    found, metrics = tiny.toy_gradient(data, step_config)
    assert_same_gradient(found, jax.tree.map(lambda g: factor * g, plain), 1e-5)  # noqa: B023
    assert values(metrics)["kl_weight"] == pytest.approx(np.exp(0.5) if factor != 1.2 else 1.0, rel=1e-5)


def test_the_exact_part_of_the_kl_carries_no_weight():
  """With every id in the head there is no sampled part, and neither s nor the cap has anything to act on."""
  whole = tiny.toy_stats(tiny.toy_params(), tiny.toy_batch(), topk=16)
  ref = tiny.toy_stats(tiny.toy_params(1), tiny.toy_batch(), ids=whole.topk_ids)
  ids = {"topk_ids": whole.topk_ids, "ref_logp_topk": ref.logp_topk, "ref_log_tail": ref.log_tail, "advantages": jnp.zeros(logp().shape)}
  changes = {"kl": ESTIMATORS["exact_reverse"]}
  plain, _ = tiny.toy_gradient(weighted_batch(0.0).replace(**ids), config(**changes))
  assert_same_gradient(tiny.toy_gradient(weighted_batch(0.5).replace(**ids), config(tis_cap=1.2, **changes))[0], plain)


def test_after_the_first_update_the_weight_is_of_the_old_policy():
  """Two updates: old_logp is the batch's, and the weight min(exp(old_logp − sampling_logp), cap), whatever the policy is by then."""
  data = weighted_batch(0.5).replace(old_logp=logp() - 0.4)  # weights exp(0.1)
  step_config = config(tis_cap=1.2, mini_batches=2, micro_batch=4, kl=ESTIMATORS["k3pp"])
  _, metrics = tiny.toy_gradient(data, step_config)
  numbers = values(metrics)
  assert numbers["tis_weight"] == pytest.approx(np.exp(0.1), rel=1e-5) and numbers["tis_capped"] == 0
