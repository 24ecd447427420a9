import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from emapg_jax import credit, kl

NAN, INF = np.nan, np.inf


def row(*numbers):
  return np.array([numbers], np.float32)


def keep(*flags):
  return np.array([flags], bool)


@pytest.mark.usefixtures("strict_dtypes")
class AtLastTokenTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_the_last_trained_token_gets_it(self):
    # [t0, t1, EOS, PAD, PAD]; a full row without an end; EOS alone; text of the environment in the middle, and at the end.
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 0]], bool)
    placed = self.variant(credit.at_last_token)(np.array([1, 2, -3, 4, 5], np.float32), mask)
    np.testing.assert_array_equal(placed, [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [-3, 0, 0, 0, 0], [0, 0, 0, 4, 0], [0, 5, 0, 0, 0]])

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(10.0, NAN, INF)
  def test_a_row_without_trained_tokens_writes_nothing(self, score):
    mask = np.array([[0, 0, 0], [1, 1, 0]], bool)
    placed = self.variant(credit.at_last_token)(np.array([score, 1], np.float32), mask)
    np.testing.assert_array_equal(placed, [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(credit.reward_to_go(placed, mask, 1.0), [[0, 0, 0], [1, 1, 0]])


@pytest.mark.usefixtures("strict_dtypes")
class RewardToGoTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_the_discount_steps_once_per_trainable_token(self):
    to_go = self.variant(credit.reward_to_go)(row(0, 0, 1), keep(1, 0, 1), 0.5)
    np.testing.assert_array_equal(to_go, row(0.5, 0, 1))  # a step for the masked token, too, would give 0.25

  @chex.variants(with_jit=True, without_jit=True)
  def test_a_masked_span_does_not_end_the_episode(self):
    to_go = self.variant(credit.reward_to_go)(row(0, 0, 0, 0, 0, 1), keep(1, 1, 0, 0, 1, 1), 1.0)
    np.testing.assert_array_equal(to_go, row(1, 1, 0, 0, 1, 1))
    to_go = self.variant(credit.reward_to_go)(row(0, 0, 0, 0, 0, 1, 7, NAN), keep(1, 1, 0, 0, 1, 1, 0, 0), 1.0)
    np.testing.assert_array_equal(to_go, row(1, 1, 0, 0, 1, 1, 0, 0))

  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_of_masked_tokens_do_not_leak(self):
    # −1 everywhere, as of a KL in the reward: −1 − 1, −1 − 0.9 · 1, and −1 alone.
    for discount, first in ((1.0, -2), (0.9, -1.9), (0.0, -1)):
      to_go = self.variant(credit.reward_to_go)(row(-1, -1, -1, -1), keep(1, 0, 0, 1), discount)
      np.testing.assert_allclose(to_go, row(first, 0, 0, -1), rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_rows_are_apart(self):
    # Row 1: 3; 2 + 3/2; 1 + 3.5/2. Row 2: nothing. Row 3: 4 alone.
    rewards, mask = np.array([[1, 2, 3], [1, 2, 3], [5, 4, 6]], np.float32), np.array([[1, 1, 1], [0, 0, 0], [0, 1, 0]], bool)
    to_go = self.variant(credit.reward_to_go)(rewards, mask, 0.5)
    np.testing.assert_array_equal(to_go, [[2.75, 3.5, 3], [0, 0, 0], [0, 4, 0]])


# γ = 0.9, λ = 0.5, γλ = 0.45, from the last token to the first:
#   δ = 3 − 2 = 1                     A = 1
#   δ = −2 + 0.9 · 2 − 1 = −1.2       A = −1.2 + 0.45 · 1 = −0.75
#   δ = 1 + 0.9 · 1 − 0.5 = 1.4       A = 1.4 − 0.45 · 0.75 = 1.0625
REWARDS, VALUES = row(1, -2, 3), row(0.5, 1, 2)
DELTAS = row(1.4, -1.2, 1)
ADVANTAGES = row(1.0625, -0.75, 1)
RETURNS = row(1.5625, 0.25, 3)
MASK = keep(1, 1, 1)
# The same three tokens with text of the environment between, before and after them, where garbage lies.
SPREAD = keep(0, 1, 0, 0, 1, 1, 0, 0)
GARBAGE = row(NAN, 0, 1e30, -INF, 0, 0, INF, NAN)


def spread(x, elsewhere=GARBAGE):
  wide = np.array(elsewhere, x.dtype)
  wide[SPREAD] = x[0]
  return wide


NOTHING = np.zeros_like(GARBAGE)


@pytest.mark.usefixtures("strict_dtypes")
class GAETest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_by_hand(self):
    advantages, returns = self.variant(credit.gae)(REWARDS, VALUES, MASK, 0.9, 0.5)
    np.testing.assert_allclose(advantages, ADVANTAGES, rtol=1e-6)
    np.testing.assert_allclose(returns, RETURNS, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_masked_positions_are_skipped_whatever_they_hold(self):
    for elsewhere in (GARBAGE, np.full_like(GARBAGE, 5)):
      rewards, values = spread(REWARDS, elsewhere), spread(VALUES, elsewhere)
      advantages, returns = self.variant(credit.gae)(rewards, values, SPREAD, 0.9, 0.5)
      np.testing.assert_allclose(advantages, spread(ADVANTAGES, NOTHING), rtol=1e-6)
      np.testing.assert_allclose(returns, spread(RETURNS, NOTHING), rtol=1e-6)
      np.testing.assert_array_equal(advantages[~SPREAD], np.zeros(5))
      np.testing.assert_array_equal(returns[~SPREAD], np.zeros(5))

  @chex.variants(with_jit=True, without_jit=True)
  def test_lambda_one_is_reward_to_go_minus_values(self):
    advantages, returns = self.variant(credit.gae)(REWARDS, VALUES, MASK, 0.9, 1.0)
    # 3; −2 + 0.9 · 3 = 0.7; 1 + 0.9 · 0.7 = 1.63
    np.testing.assert_allclose(credit.reward_to_go(REWARDS, MASK, 0.9), row(1.63, 0.7, 3), rtol=1e-6)
    np.testing.assert_allclose(returns, row(1.63, 0.7, 3), rtol=1e-6)
    np.testing.assert_allclose(advantages, row(1.63 - 0.5, 0.7 - 1, 3 - 2), rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_lambda_zero_is_the_residual(self):
    advantages, returns = self.variant(credit.gae)(REWARDS, VALUES, MASK, 0.9, 0.0)
    np.testing.assert_allclose(advantages, DELTAS, rtol=1e-6)
    np.testing.assert_allclose(returns, DELTAS + VALUES, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_a_true_critic_leaves_nothing(self):
    rewards, mask = row(0, 0, 9, 1), keep(1, 1, 0, 1)
    advantages, returns = self.variant(credit.gae)(rewards, row(1, 1, 9, 1), mask, 1.0, 0.95)
    np.testing.assert_array_equal(advantages, row(0, 0, 0, 0))
    np.testing.assert_array_equal(returns, row(1, 1, 0, 1))

  @chex.variants(with_jit=True, without_jit=True)
  def test_rows_without_tokens_and_of_one_token(self):
    # The value after the one token is 0, not that of the padding.
    rewards, values = np.array([[NAN, 4], [3, NAN]], np.float32), np.array([[7, INF], [1, 8]], np.float32)
    advantages, returns = self.variant(credit.gae)(rewards, values, np.array([[0, 0], [1, 0]], bool), 0.9, 0.5)
    np.testing.assert_array_equal(advantages, [[0, 0], [2, 0]])
    np.testing.assert_array_equal(returns, [[0, 0], [3, 0]])


@pytest.mark.usefixtures("strict_dtypes")
class KLToGoTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_by_hand(self):
    # 1 + 0.25 + 0.125, −2 + 0.125, masked, 8: neither its own `later` nor that of the masked token enters.
    to_go = self.variant(credit.kl_to_go)(row(1, -2, 4, 8), row(0.5, 0.25, 3, 0.125), keep(1, 1, 0, 1))
    np.testing.assert_array_equal(to_go, row(1.375, -1.875, 0, 8))

  @chex.variants(with_jit=True, without_jit=True)
  def test_garbage_at_masked_positions_has_no_effect(self):
    # 1 + 5 + 6, 2 + 6, 3
    to_go = self.variant(credit.kl_to_go)(spread(row(1, 2, 3)), spread(row(4, 5, 6)), SPREAD)
    np.testing.assert_array_equal(to_go, spread(row(12, 8, 3), NOTHING))


def test_kl_to_go_makes_the_gradient_of_the_sequence_kl_with_k1_at_the_own_position_only(x64, strict_dtypes):
  """All responses of up to two tokens out of three, of which token 0 ends a response; what lies after the end is NaN."""
  rng = np.random.default_rng(0)
  theta, anchor = jnp.asarray(rng.normal(size=(4, 3))), jnp.asarray(rng.normal(size=(4, 3)))  # row 0: first token; 1 + y_0: second
  tokens = jnp.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
  mask = jnp.stack([jnp.ones(7, bool), tokens[:, 0] > 0], axis=1)
  contexts = jnp.stack([jnp.zeros(7, tokens.dtype), 1 + tokens[:, 0]], axis=1)

  def logp(theta):
    return jnp.where(mask, jax.nn.log_softmax(theta)[contexts, tokens], 0)

  def sequence_kl(theta):
    return jnp.sum(jnp.exp(jnp.sum(logp(theta), axis=1)) * jnp.sum(logp(theta) - logp(anchor), axis=1))

  def by_score_function(own, later):
    probability = jnp.exp(jnp.sum(logp(theta), axis=1))[:, None]
    to_go = credit.kl_to_go(jnp.where(mask, own, NAN), jnp.where(mask, later, NAN), mask)
    return jax.grad(lambda theta: jnp.sum(probability * to_go * logp(theta)))(theta)

  k1, k3 = kl.k1(logp(theta), logp(anchor)), kl.k3(logp(theta), logp(anchor))
  exact = kl.exact_reverse_kl(theta, anchor)[contexts]
  expected = jax.grad(sequence_kl)(theta)
  for later in (k1, k3, exact):
    np.testing.assert_allclose(by_score_function(k1, later), expected, rtol=1e-9, atol=1e-12)
  for own in (k3, exact):
    assert np.linalg.norm(by_score_function(own, own) - expected) > 0.5 * np.linalg.norm(expected)


CALLS = {
  "at_last_token": lambda x: credit.at_last_token(x[:, 0], MASK),
  "reward_to_go": lambda x: credit.reward_to_go(x, MASK, 0.9),
  "gae": lambda x: credit.gae(x, 2 * x, MASK, 0.9, 0.5),
  "kl_to_go": lambda x: credit.kl_to_go(x, 2 * x, MASK),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_gradient_reaches_anything(name, strict_dtypes):
  x = jnp.asarray(REWARDS)
  total = lambda x: sum(jnp.sum(jnp.square(y)) for y in jax.tree.leaves(CALLS[name](x)))  # noqa: E731
  assert float(total(x)) != 0
  np.testing.assert_array_equal(jax.grad(total)(x), np.zeros_like(x))


def test_no_gradient_reaches_discount_and_lambda(strict_dtypes):
  total = lambda *args: jnp.sum(credit.gae(REWARDS, VALUES, MASK, *args)[0])  # noqa: E731
  assert [float(g) for g in jax.grad(total, argnums=(0, 1))(0.9, 0.5)] == [0, 0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_of_the_result_is_that_of_the_inputs(name, dtype, x64, strict_dtypes):
  for compiled in (lambda f: f, jax.jit):
    for result in jax.tree.leaves(compiled(CALLS[name])(jnp.asarray(REWARDS, dtype))):
      assert result.dtype == dtype and result.shape == (1, 3)


def test_float64_is_float64_and_traced_scalars_of_another_dtype_do_not_change_that(x64, strict_dtypes):
  rewards, values = REWARDS.astype(np.float64), VALUES.astype(np.float64)
  advantages, returns = credit.gae(rewards, values, MASK, 0.9, 0.5)
  np.testing.assert_allclose(advantages, [[1.0625, -0.75, 1]], rtol=1e-14)
  np.testing.assert_allclose(returns, [[1.5625, 0.25, 3]], rtol=1e-14)
  scalars = jnp.array([0.75, 0.5], jnp.float32)  # of which float32 loses nothing
  advantages, _ = jax.jit(lambda scalars: credit.gae(rewards, values, MASK, scalars[0], scalars[1]))(scalars)
  # δ = 1.25, −1.5, 1; γλ = 0.375: A = 1, −1.125, 1.25 − 0.421875
  np.testing.assert_array_equal(advantages, [[0.828125, -1.125, 1]])
  assert advantages.dtype == np.float64


def test_padding_and_the_order_of_rows_change_nothing(strict_dtypes):
  rng = np.random.default_rng(0)
  rewards, values = rng.normal(size=(2, 4, 9)).astype(np.float32)
  mask = rng.random((4, 9)) < 0.6
  wider = ((0, 2), (0, 5))
  padded = [np.pad(x, wider, constant_values=NAN) for x in (rewards, values)]
  for function in (functools.partial(credit.gae, discount=0.9, gae_lambda=0.5), credit.kl_to_go):
    plain, wide, reversed_rows = (
      np.asarray(function(*arrays, mask=keep))
      for arrays, keep in (((rewards, values), mask), (padded, np.pad(mask, wider)), ((rewards[::-1], values[::-1]), mask[::-1]))
    )
    np.testing.assert_array_equal(wide[..., :4, :9], plain)
    assert np.count_nonzero(wide) == np.count_nonzero(plain)
    np.testing.assert_array_equal(reversed_rows, plain[..., ::-1, :])


def test_no_tokens_at_all(strict_dtypes):
  empty, mask = jnp.zeros((2, 0)), jnp.zeros((2, 0), bool)
  results = (credit.at_last_token(jnp.ones(2), mask), credit.reward_to_go(empty, mask, 1.0), credit.kl_to_go(empty, empty, mask))
  for result in (*results, *credit.gae(empty, empty, mask, 1.0, 1.0)):
    assert result.shape == (2, 0)


def test_what_a_trained_token_holds_is_not_hidden(strict_dtypes):
  broken = row(1, NAN, 1)
  assert np.isnan(credit.reward_to_go(broken, MASK, 1.0)).tolist() == [[True, True, False]]
  assert np.isnan(credit.kl_to_go(broken, row(0, 0, 0), MASK)).tolist() == [[False, True, False]]
  assert np.isnan(credit.at_last_token(np.array([NAN], np.float32), MASK)).tolist() == [[False, False, True]]


@pytest.mark.parametrize("x", [-0.1, 1.1, 2, NAN, np.float32(1.5)])
def test_numbers_out_of_range_are_errors(x):
  with pytest.raises(ValueError, match="reward_to_go got discount="):
    credit.reward_to_go(REWARDS, MASK, x)
  with pytest.raises(ValueError, match="gae got discount="):
    credit.gae(REWARDS, VALUES, MASK, x, 1.0)
  with pytest.raises(ValueError, match="gae got gae_lambda="):
    credit.gae(REWARDS, VALUES, MASK, 1.0, x)


def test_arrays_that_do_not_fit_are_errors(x64):
  with pytest.raises(ValueError, match=r"at_last_token got rewards of shape \(1, 3\)"):
    credit.at_last_token(REWARDS, MASK)
  with pytest.raises(ValueError, match=r"dtype int32"):
    credit.at_last_token(np.array([1], np.int32), MASK)
  with pytest.raises(ValueError, match=r"reward_to_go got rewards \(3,\)"):
    credit.reward_to_go(REWARDS[0], MASK[0], 1.0)
  with pytest.raises(ValueError, match="rewards int32"):  # the discount in this dtype would be 0
    credit.reward_to_go(REWARDS.astype(np.int32), MASK, 0.5)
  with pytest.raises(ValueError, match=r"gae got rewards \(1, 3\), values \(1, 2\)"):
    credit.gae(REWARDS, VALUES[:, :2], MASK, 1.0, 1.0)
  with pytest.raises(ValueError, match="own float32, later float64"):
    credit.kl_to_go(REWARDS, VALUES.astype(np.float64), MASK)
