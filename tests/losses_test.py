import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from emapg_jax import losses, masking

NAN, INF = np.nan, np.inf


def clip_value_and_grad(variant, ratios, advantages, **bounds):
  """Loss, gradient with respect to the *ratio*, and aux; the policy's log-prob is log(ratio) against an old one of 0."""

  def total(log_ratio):
    loss, aux = losses.ppo_clip(log_ratio, jnp.zeros_like(log_ratio), jnp.array(advantages, jnp.float32), **bounds)
    return jnp.sum(loss), (loss, aux)

  log_ratio = jnp.log(jnp.array(ratios, jnp.float32))
  grad, (loss, aux) = variant(jax.grad(total, has_aux=True))(log_ratio)
  return loss, grad / jnp.array(ratios, jnp.float32), aux


@pytest.mark.usefixtures("strict_dtypes")
class PPOClipTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_both_sides_of_both_signs(self):
    loss, grad, aux = clip_value_and_grad(self.variant, [2, 2, 0.5, 0.5], [1, -1, 1, -1], clip_low=0.2, clip_high=0.2)
    # −min(2, 1.2), −min(−2, −1.2), −min(0.5, 0.8), −min(−0.5, −0.8). Only the first and the last take the clipped branch.
    np.testing.assert_allclose(loss, [-1.2, 2.0, -0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(grad, [0, 1, -1, 0], rtol=1e-6)
    np.testing.assert_array_equal(aux.clipped_high, [True, False, False, False])
    np.testing.assert_array_equal(aux.clipped_low, [False, False, False, True])
    np.testing.assert_allclose(aux.ratio, [2, 2, 0.5, 0.5], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_each_bound_has_its_own_width_and_the_advantage_scales(self):
    # Bounds 0.8 and 1.28 by default. Inside both: 1.25 · 3 and 0.85 · −2. Past each: 1.28 · 3 and 0.8 · −2.
    loss, grad, aux = clip_value_and_grad(self.variant, [1.25, 1.3, 0.85, 0.75], [3, 3, -2, -2])
    np.testing.assert_allclose(loss, [-3.75, -3.84, 1.7, 1.6], rtol=1e-6)
    np.testing.assert_allclose(grad, [-3, 0, 2, 0], rtol=1e-6)
    np.testing.assert_array_equal(aux.clipped_high, [False, True, False, False])
    np.testing.assert_array_equal(aux.clipped_low, [False, False, False, True])
    # The same ratios with the widths swapped, bounds 0.72 and 1.2: now the first two are past, the last two inside.
    loss, grad, _ = clip_value_and_grad(self.variant, [1.25, 1.3, 0.85, 0.75], [3, 3, -2, -2], clip_low=0.28, clip_high=0.2)
    np.testing.assert_allclose(loss, [-3.6, -3.6, 1.7, 1.5], rtol=1e-6)
    np.testing.assert_allclose(grad, [0, 0, 2, 2], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_at_a_bound_the_gradient_is_whole(self):
    # Bounds 1 ± 0, so that a ratio of 1 lies on both, exactly. min and clip would share the gradient: 0.75 or 0.5.
    loss, grad, aux = clip_value_and_grad(self.variant, [1, 1], [1, -1], clip_low=0.0, clip_high=0.0)
    np.testing.assert_allclose(loss, [-1, 1])
    np.testing.assert_allclose(grad, [-1, 1])
    assert not np.any(aux.clipped_low) and not np.any(aux.clipped_high)

  @chex.variants(with_jit=True, without_jit=True)
  def test_dual_clip_bounds_negative_advantages_only(self):
    loss, grad, aux = clip_value_and_grad(self.variant, [10, 1, 2.9, 10], [-1, 1, -1, 1], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    # min(10, 3); 1 is untouched, where a bound without a sign would give −3; 2.9 is inside; the last is the ordinary bound 1.2.
    np.testing.assert_allclose(loss, [3.0, -1.0, 2.9, -1.2], rtol=1e-6)
    np.testing.assert_allclose(grad, [0, -1, 1, 0], rtol=1e-6)
    np.testing.assert_array_equal(aux.dual_clipped, [True, False, False, False])
    np.testing.assert_array_equal(aux.clipped_high, [False, False, False, True])
    assert not np.any(aux.clipped_low)

  @chex.variants(with_jit=True, without_jit=True)
  def test_overflowing_ratio_past_a_bound_has_gradient_zero(self):
    log_ratio, advantages = jnp.array([200.0, 200.0, -200.0]), jnp.array([1.0, -1.0, -1.0])

    def loss(x):
      return losses.ppo_clip(x, jnp.zeros(3), advantages, dual_clip=3.0)[0]

    np.testing.assert_allclose(self.variant(loss)(log_ratio), [-1.28, 3.0, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(self.variant(jax.grad(lambda x: jnp.sum(loss(x))))(log_ratio), [0, 0, 0])


@pytest.mark.parametrize(
  "bounds, message",
  [
    ({"clip_low": 1.2}, "clip_low=1.2"),
    ({"clip_low": -0.1}, "clip_low=-0.1"),
    ({"clip_high": -0.1}, "clip_high=-0.1"),
    ({"dual_clip": 1.0}, "dual_clip=1.0"),
  ],
)
def test_bounds_out_of_range_are_errors(bounds, message):
  with pytest.raises(ValueError, match=message):
    losses.ppo_clip(jnp.zeros(1), jnp.zeros(1), jnp.ones(1), **bounds)


def test_reinforce_value_and_gradient(strict_dtypes):
  logp, advantages = jnp.array([-1.0, -2.0]), jnp.array([0.5, -3.0])
  np.testing.assert_allclose(losses.reinforce(logp, advantages), [0.5, -6.0])
  grads = jax.grad(lambda *args: jnp.sum(losses.reinforce(*args)), argnums=(0, 1))(logp, advantages)
  np.testing.assert_allclose(grads, [[-0.5, 3.0], [0, 0]])


def loss_grad_aux(variant, policy_loss, *args):
  """Loss, its gradient with respect to logp, the first of args, and aux."""

  def total(*args):
    loss, aux = policy_loss(*args)
    return jnp.sum(loss), (loss, aux)

  grad, (loss, aux) = variant(jax.grad(total, has_aux=True))(*(jnp.asarray(x) for x in args))
  return loss, grad, aux


def at_ratios(ratios):
  """Old log-probs against which a policy of log-prob −1 has these ratios."""
  return -1 - jnp.log(jnp.array(ratios, jnp.float32))


CISPO = functools.partial(losses.cispo, clip_low=0.2, clip_high=0.28)


@pytest.mark.usefixtures("strict_dtypes")
class CISPOTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_the_weight_is_bounded_and_every_token_keeps_its_gradient(self):
    advantages = np.array([1, -1, 1, -1, 3, -2], np.float32)
    loss, grad, aux = loss_grad_aux(self.variant, CISPO, jnp.full(6, -1.0), at_ratios([2, 2, 0.5, 0.5, 1.25, 0.9]), advantages)
    # Weights 1.28, 1.28, 0.8, 0.8 past the bounds, of either sign; 1.25 and 0.9 inside. Gradient −weight · advantage, and the loss is
    # that times logp = −1. A gradient through the weight would add to 1.25 · 3 another 1.25 · 3 · logp.
    expected = np.array([1.28, -1.28, 0.8, -0.8, 3.75, -1.8])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, -expected, rtol=1e-6)
    np.testing.assert_array_equal(aux.clipped_high, [True, True, False, False, False, False])
    np.testing.assert_array_equal(aux.clipped_low, [False, False, True, True, False, False])
    np.testing.assert_allclose(aux.ratio, [2, 2, 0.5, 0.5, 1.25, 0.9], rtol=1e-6)
    assert not np.any(aux.dual_clipped)

  @chex.variants(with_jit=True, without_jit=True)
  def test_clip_low_one_is_no_lower_bound(self):
    loss_fn = functools.partial(losses.cispo, clip_low=1.0, clip_high=2.0)
    _, grad, aux = loss_grad_aux(self.variant, loss_fn, jnp.full(3, -1.0), at_ratios([0.01, 2.9, 3.1]), [1.0, 1.0, 1.0])
    np.testing.assert_allclose(grad, [-0.01, -2.9, -3.0], rtol=1e-6)
    np.testing.assert_array_equal([aux.clipped_low, aux.clipped_high], [[False] * 3, [False, False, True]])

  @chex.variants(with_jit=True, without_jit=True)
  def test_overflowing_ratios_are_bounded(self):
    # exp(±200) is inf and 0 in float32.
    loss, grad, _ = loss_grad_aux(self.variant, CISPO, [-1.0] * 3, [-201.0, -201.0, 199.0], [1.0, -1.0, -1.0])
    np.testing.assert_allclose([loss, grad], [[1.28, -1.28, -0.8], [-1.28, 1.28, 0.8]], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_advantage_zero_is_zero_whatever_the_rest(self):
    loss_fn = functools.partial(losses.cispo, clip_low=0.2, clip_high=INF)
    loss, grad, aux = loss_grad_aux(self.variant, loss_fn, [-1.0, -1.0, -INF], [-201.0, 199.0, -1.0], [0.0, 0.0, 0.0])
    np.testing.assert_array_equal([loss, grad], np.zeros((2, 3)))
    assert not np.any(aux.clipped_low) and not np.any(aux.clipped_high)


GSPO = functools.partial(losses.gspo, clip_low=0.2, clip_high=0.28)


@pytest.mark.usefixtures("strict_dtypes")
class GSPOTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_both_sides_of_both_signs(self):
    # Geometric means over the first two tokens: sqrt(4 · 1) = 2, sqrt(1/4 · 1) = 1/2, sqrt(1.44 · 1) = 1.2. The third token is masked;
    # with it the first would be 28^(1/3). The second token's own ratio is 1: it is clipped for its sequence alone.
    first = np.array([4, 4, 0.25, 0.25, 1.44, 1.44], np.float32)
    ratios = np.stack([first, np.ones(6), np.full(6, 7)], axis=1)
    advantages = np.repeat(np.array([1, -1, 1, -1, 3, -2], np.float32)[:, None], 3, axis=1)
    mask = np.repeat([[True, True, False]], 6, axis=0)
    loss, grad, aux = loss_grad_aux(self.variant, GSPO, jnp.full((6, 3), -1.0), at_ratios(ratios), advantages, mask)
    # −min(2, 1.28), −min(−2, −1.28), −min(1/2, 0.8), −min(−1/2, −0.8), −3 · 1.2, 2 · 1.2; the gradient is that times 1, or 0.
    np.testing.assert_allclose(loss, np.array([[-1.28, 2, -0.5, 0.8, -3.6, 2.4]]).T * [1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(grad, np.array([[0, 2, -0.5, 0, -3.6, 2.4]]).T * [1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(aux.ratio, np.array([[2, 2, 0.5, 0.5, 1.2, 1.2]]).T * [1, 1, 1], rtol=1e-6)
    np.testing.assert_array_equal(aux.clipped_high, np.array([[1, 0, 0, 0, 0, 0]]).T * [1, 1, 0])
    np.testing.assert_array_equal(aux.clipped_low, np.array([[0, 0, 0, 1, 0, 0]]).T * [1, 1, 0])

  @chex.variants(with_jit=True, without_jit=True)
  def test_the_mean_is_over_the_trained_tokens_of_each_row(self):
    # 8^(1/3), 8, and 8^(1/2) with a gap; advantages per token, of both signs, are clipped each by its own sign.
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 0, 1]], bool)
    advantages = np.array([[1, -1, 0.5], [-1, 9, 9], [-1, 9, 2]], np.float32)
    loss, grad, aux = loss_grad_aux(self.variant, GSPO, jnp.full((3, 3), -1.0), at_ratios([[8, 1, 1]] * 3), advantages, mask)
    root = np.sqrt(8)
    np.testing.assert_allclose(aux.ratio, np.array([[2, 8, root]]).T * [1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(loss, [[-1.28, 2, -0.64], [8, 0, 0], [root, 0, -2.56]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, 2, 0], [8, 0, 0], [root, 0, 0]], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_one_trained_token_is_ppo_clip(self):
    ratios = np.array([2, 2, 0.5, 0.5, 1.1, 0.9], np.float32)[:, None]
    advantages = np.array([1, -1, 1, -1, 3, -2], np.float32)[:, None]
    old_logp = np.asarray(at_ratios(ratios))
    ppo = loss_grad_aux(self.variant, losses.ppo_clip, jnp.full((6, 1), -1.0), old_logp, advantages)
    wide = [np.pad(x, ((0, 0), (1, 1)), constant_values=5.0) for x in (np.full((6, 1), -1.0, np.float32), old_logp, advantages)]
    gspo = loss_grad_aux(self.variant, GSPO, *wide, np.array([[False, True, False]] * 6))
    jax.tree.map(lambda p, g: np.testing.assert_allclose(g[:, 1:2], p, rtol=1e-6), ppo, gspo)

  @chex.variants(with_jit=True, without_jit=True)
  def test_the_mean_gradient_of_a_row_is_that_of_its_sequence_ratio(self):
    logp, old_logp = np.array([[-1.0, -0.5, -2.0, NAN]], np.float32), np.array([[-1.2, -0.6, -1.9, NAN]], np.float32)
    mask = jnp.array([[True, True, True, False]])

    def tokens(logp):
      return losses.aggregate(GSPO(logp, old_logp, jnp.full((1, 4), 3.0), mask)[0], mask, "sequence_mean").sum

    def sequence(logp):
      return -3 * jnp.exp(jnp.mean(logp - old_logp[0, :3]))

    value, grad = self.variant(jax.value_and_grad(tokens))(logp)
    expected_value, expected_grad = jax.value_and_grad(sequence)(logp[0, :3])
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(grad, np.append(expected_grad, 0)[None], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_garbage_at_masked_positions_has_no_effect(self):
    logp, old_logp = np.array([[-1.0, NAN, 1e4, -2.0]], np.float32), np.array([[-1.1, 3.0, -INF, -2.1]], np.float32)
    mask = np.array([[True, False, False, True]])
    loss, grad, aux = loss_grad_aux(self.variant, GSPO, logp, old_logp, np.array([[2, NAN, INF, 2]], np.float32), mask)
    np.testing.assert_allclose([loss, grad], np.stack([mask, mask]) * (-2 * np.exp(0.1)), rtol=1e-6)
    np.testing.assert_allclose(aux.ratio, np.full((1, 4), np.exp(0.1)), rtol=1e-6)

  def test_a_row_without_trained_tokens_is_zero_and_makes_no_nan_on_the_way(self):
    mask = np.array([[False, False], [True, True]])
    with jax.debug_nans(True):
      loss, grad, aux = loss_grad_aux(jax.jit, GSPO, [[5.0, -9.0], [-1.0, -1.0]], jnp.full((2, 2), -1.0), jnp.ones((2, 2)), mask)
    np.testing.assert_array_equal([loss, grad], np.full((2, 2, 2), [[0], [-1]]))
    np.testing.assert_array_equal(aux.ratio, np.ones((2, 2)))

  @chex.variants(with_jit=True, without_jit=True)
  def test_overflowing_sequence_past_a_bound_or_at_advantage_zero(self):
    old_logp, advantages = jnp.array([[-201.0], [199.0], [-201.0], [199.0]]), jnp.array([[1.0], [-1.0], [0.0], [0.0]])
    loss, grad, _ = loss_grad_aux(self.variant, GSPO, -jnp.ones((4, 1)), old_logp, advantages, np.ones((4, 1), bool))
    np.testing.assert_allclose(loss, [[-1.28], [0.8], [0], [0]], rtol=1e-6)
    np.testing.assert_array_equal(grad, np.zeros((4, 1)))


POLICY_LOSSES = {
  "ppo_clip": lambda **bounds: losses.token_level(functools.partial(losses.ppo_clip, **bounds)),
  "reinforce": lambda **bounds: losses.reinforce_with_aux,
  "cispo": lambda **bounds: losses.token_level(functools.partial(losses.cispo, **bounds)),
  "gspo": lambda **bounds: functools.partial(losses.gspo, **bounds),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("width", [0.0, 0.2])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name, width, strict_dtypes):
  """At logp = old_logp the ratio is 1: in the middle of bounds, or on both of width 0, where the gradient is still whole."""
  logp = jnp.array([[-1.0, -0.25, -3.0], [-2.0, -0.5, -1.5]])
  advantages, mask = jnp.array([[1.0, 1.0, 1.0], [-2.0, 0.5, 0.0]]), jnp.ones((2, 3), bool)
  policy_loss = POLICY_LOSSES[name](clip_low=width, clip_high=width)
  loss, grad, aux = loss_grad_aux(jax.jit, policy_loss, logp, logp, advantages, mask)
  expected = jax.grad(lambda logp: jnp.sum(losses.reinforce(logp, advantages)))(logp)
  np.testing.assert_array_equal(grad, expected)
  np.testing.assert_array_equal(expected, -advantages)
  # Those that estimate something have value −advantages · 1; the others have the one of reinforce.
  np.testing.assert_array_equal(loss, -advantages if name in ("ppo_clip", "gspo") else -advantages * logp)
  np.testing.assert_array_equal(aux.ratio, np.ones((2, 3)))
  for clipped in aux[1:]:
    assert clipped.dtype == bool and clipped.shape == (2, 3) and not np.any(clipped)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradient_reaches_the_current_policy_alone_and_a_broken_logp_is_not_hidden(name, strict_dtypes):
  policy_loss = POLICY_LOSSES[name](clip_low=0.2, clip_high=0.28)
  mask, old_logp, advantages = jnp.ones((1, 2), bool), jnp.array([[-1.1, -1.1]]), jnp.array([[2.0, 2.0]])

  def total(logp, old_logp, advantages):
    return jnp.sum(policy_loss(logp, old_logp, advantages, mask)[0])

  grads = jax.grad(total, argnums=(0, 1, 2))(jnp.array([[-1.0, -1.0]]), old_logp, advantages)
  weight = 1 if name == "reinforce" else np.exp(0.1)  # the ratio, of the tokens and of the sequence
  np.testing.assert_allclose(grads, np.array([[[-2 * weight]], [[0]], [[0]]]) * [1, 1], rtol=1e-6)
  assert np.isnan(total(jnp.array([[NAN, -1.0]]), old_logp, advantages))


def test_reinforce_with_aux_reports_the_ratio_and_does_not_weigh_by_it(strict_dtypes):
  loss, grad, aux = loss_grad_aux(jax.jit, losses.reinforce_with_aux, [[-1.0, -1.0]], at_ratios([[2, 0.5]]), [[3.0, -3.0]], [[True, True]])
  np.testing.assert_array_equal([loss, grad], [[[3, -3]], [[-3, 3]]])
  np.testing.assert_allclose(aux.ratio, [[2, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("name, args", [("cispo", 3), ("gspo", 4)])
@pytest.mark.parametrize("clip_low, clip_high", [(1.2, 0.2), (-0.1, 0.2), (0.2, -0.1), (0.2, NAN)])
def test_bounds_of_every_loss_are_checked_in_its_own_name(name, args, clip_low, clip_high):
  with pytest.raises(ValueError, match=f"{name} got clip_low={clip_low} and clip_high={clip_high}"):
    getattr(losses, name)(*[jnp.zeros((1, 1))] * args, clip_low=clip_low, clip_high=clip_high)


# Two completions, A = [4] and B = [1, 1, 1], padded to 4 with garbage.
PER_TOKEN = np.array([[4, NAN, INF, -INF], [1, 1, 1, NAN]], np.float32)
MASK = np.array([[1, 0, 0, 0], [1, 1, 1, 0]], bool)
EXPECTED = {
  "token_mean": (7.0, 4.0, 1.75),  # (4 + 3) / 4 tokens
  "sequence_mean": (5.0, 2.0, 2.5),  # (4 + 1) / 2 rows
  "sequence_sum": (7.0, 2.0, 3.5),  # (4 + 3) / 2 rows
  "fixed_length": (7.0, 8.0, 0.875),  # (4 + 3) / (2 rows · 4)
}
# d sum / d token of A and of B: the token mean of B divides by its 3 tokens.
GRADIENTS = {"token_mean": (1, 1), "sequence_mean": (1, 1 / 3), "sequence_sum": (1, 1), "fixed_length": (1, 1)}


def aggregate(mode, per_token, mask, real=None):
  real = np.ones(len(mask), bool) if real is None else real
  return losses.aggregate(jnp.asarray(per_token), jnp.asarray(mask), mode, jnp.asarray(real), max_new_tokens=4)


@pytest.mark.usefixtures("strict_dtypes")
class AggregateTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*losses.AGGREGATIONS)
  def test_value_and_gradient(self, mode):
    def total(per_token):
      weighted = aggregate(mode, per_token, MASK)
      return weighted.sum, weighted

    grad, weighted = self.variant(jax.grad(total, has_aux=True))(PER_TOKEN)
    expected_sum, expected_weight, expected_value = EXPECTED[mode]
    np.testing.assert_allclose([weighted.sum, weighted.weight], [expected_sum, expected_weight], rtol=1e-6)
    np.testing.assert_allclose(weighted.sum / weighted.weight, expected_value, rtol=1e-6)
    a, b = GRADIENTS[mode]
    np.testing.assert_allclose(grad, [[a, 0, 0, 0], [b, b, b, 0]], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*losses.AGGREGATIONS)
  def test_padding_changes_nothing(self, mode):
    per_token = np.pad(PER_TOKEN, ((0, 3), (0, 100)), constant_values=NAN)
    mask = np.pad(MASK, ((0, 3), (0, 100)))
    real = np.array([True, True, False, False, False])
    weighted = self.variant(lambda *args: aggregate(mode, *args))(per_token, mask, real)
    np.testing.assert_allclose([weighted.sum, weighted.weight], EXPECTED[mode][:2], rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*losses.AGGREGATIONS)
  def test_a_real_row_without_tokens_counts_for_fixed_length_alone(self, mode):
    weighted = self.variant(lambda *args: aggregate(mode, *args))(np.pad(PER_TOKEN, ((0, 1), (0, 0))), np.pad(MASK, ((0, 1), (0, 0))))
    expected_sum, expected_weight, _ = EXPECTED[mode]
    np.testing.assert_allclose(weighted.sum, expected_sum, rtol=1e-6)
    np.testing.assert_allclose(weighted.weight, 12 if mode == "fixed_length" else expected_weight)  # 3 rows · 4

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*losses.AGGREGATIONS)
  def test_all_masked_is_zero_with_finite_gradient(self, mode):
    def total(per_token):
      weighted = aggregate(mode, per_token, np.zeros_like(MASK), np.zeros(2, bool))
      return weighted.sum, weighted.weight

    (value, weight), grad = self.variant(jax.value_and_grad(total, has_aux=True))(PER_TOKEN)
    np.testing.assert_array_equal([value, weight], [0, 0])
    np.testing.assert_array_equal(grad, np.zeros((2, 4)))


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_micro_batches_add_up(mode, strict_dtypes):
  whole = aggregate(mode, PER_TOKEN, MASK)
  parts = aggregate(mode, PER_TOKEN[:1], MASK[:1]) + aggregate(mode, PER_TOKEN[1:], MASK[1:])
  np.testing.assert_allclose([parts.sum, parts.weight], [whole.sum, whole.weight], rtol=1e-6)


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_no_nan_is_made_on_the_way(mode, strict_dtypes):
  """A row without tokens must not divide by its length, though a `where` would hide it, or `jax_debug_nans` is of no use in training."""
  with jax.debug_nans(True):
    grad = jax.grad(lambda x: aggregate(mode, x, np.zeros_like(MASK)).sum)(jnp.ones((2, 4)))
  np.testing.assert_array_equal(grad, np.zeros((2, 4)))


def test_bad_aggregations_are_errors():
  with pytest.raises(ValueError, match=r"'mean' is unknown.*token_mean"):
    losses.aggregate(jnp.ones((1, 1)), jnp.ones((1, 1), bool), "mean")
  with pytest.raises(ValueError, match="no `real`"):
    losses.aggregate(jnp.ones((1, 1)), jnp.ones((1, 1), bool), "fixed_length", max_new_tokens=4)
  with pytest.raises(ValueError, match="max_new_tokens=None"):
    losses.aggregate(jnp.ones((1, 1)), jnp.ones((1, 1), bool), "fixed_length", real=jnp.ones(1, bool))


def test_clip_loss_and_aggregation_with_garbage_at_masked_positions(strict_dtypes):
  mask = jnp.array([[True, False, False]])
  logp, old_logp = jnp.array([[-1.0, NAN, 1e4]]), jnp.array([[-1.0, 3.0, -INF]])

  def total(logp):
    clean_logp, clean_old, clean_advantages = masking.clean(mask, logp, old_logp, jnp.full((1, 3), 2.0))
    loss, _ = losses.ppo_clip(clean_logp, clean_old, clean_advantages)
    return losses.aggregate(loss, mask, "token_mean").sum

  value, grad = jax.value_and_grad(total)(logp)
  np.testing.assert_allclose(value, -2)
  np.testing.assert_allclose(grad, [[-2, 0, 0]])


def test_advantage_zero_is_zero_whatever_the_ratio():
  """Groups without spread are the usual case; one overflowing ratio among them must not spoil the mini-batch."""
  loss = lambda logp: jnp.sum(losses.ppo_clip(logp, jnp.zeros(2), jnp.zeros(2))[0])  # noqa: E731
  logp = jnp.asarray([200.0, -200.0])
  assert float(loss(logp)) == 0
  assert np.all(np.asarray(jax.grad(loss)(logp)) == 0)
