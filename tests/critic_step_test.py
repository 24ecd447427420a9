"""The training step with a critic: two models, two optimizers, one step; and the metrics of advantages and returns."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emapg_jax import optim
from emapg_jax.score_step import value_step
from emapg_jax.train_step import init_state
from tests import tiny
from tests.tiny import assert_same_gradient, values

OPTIMIZER = optim.with_critic(optim.make_optimizer(1e-2), optim.make_optimizer(0.1, weight_decay=0.0))
CONFIG = tiny.config(value_clip=0.2)


def state(optimizer=OPTIMIZER, seed=0):
  return init_state(tiny.toy_params(seed, critic=True), optimizer, True)


def old_values(params, data):
  return value_step(params["value"], (), data, critic=tiny.toy_critic, config=tiny.config())


def test_the_critic_learns_its_returns():
  data, now, found = tiny.toy_batch(), state(), []
  for _ in range(6):
    data = data.replace(old_values=old_values(now.params, data))
    now, metrics = tiny.toy_step(now, data, CONFIG, OPTIMIZER)
    found.append(values(metrics)["value_loss"])
  assert all(after < before for before, after in itertools.pairwise(found))
  assert found[-1] < 0.9 * found[0]


def test_the_gradient_of_the_critic_is_that_of_its_own_loss():
  data = tiny.toy_batch()
  rows, columns = np.nonzero(data.mask)

  def loss(params):
    found = tiny.toy_values(params, data.tokens)[rows, data.prompt_length[rows] + columns - 1]
    return 0.5 * jnp.sum(jnp.square(found - data.returns[rows, columns]))

  value, slope = jax.value_and_grad(loss)(tiny.toy_params(critic=True)["value"])
  for aggregation, weight in (("token_mean", len(rows)), ("sequence_sum", 7)):  # of 8 rows, one has no token
    step_config = tiny.config(aggregation=aggregation)
    grads, metrics = tiny.toy_gradient(data, step_config, critic=True)
    assert_same_gradient(grads["value"], jax.tree.map(lambda g: g / weight, slope), 1e-5)  # noqa: B023
    found = values(metrics)
    assert found["value_loss"] == pytest.approx(float(value) / weight, rel=1e-5)
    assert found["value_grad_norm"] == pytest.approx(float(optax.tree.norm(grads["value"])), rel=1e-4)


def test_the_policy_does_not_know_of_the_critic():
  data = tiny.toy_batch()
  grads, metrics = tiny.toy_gradient(data, CONFIG, critic=True)
  alone, alone_metrics = tiny.toy_gradient(data, CONFIG)
  assert_same_gradient(grads["policy"], alone)
  found, expected = values(metrics), values(alone_metrics)
  for name in expected:
    assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
  assert metrics.keys() - alone_metrics.keys() == {"value_loss", "value_clip_fraction", "value_grad_norm", "value_update_norm"}


def test_only_the_policy_is_averaged():
  before = state()
  after, metrics = tiny.toy_step(before, tiny.toy_batch(), CONFIG, OPTIMIZER, ema_decay=0.75)
  assert after.params.keys() == {"policy", "value"}
  expected = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, before.policy, after.policy)
  chex.assert_trees_all_close(after.ema_params, expected, rtol=1e-6, atol=1e-7)
  distance = optax.tree.norm(jax.tree.map(lambda a, p: a - p, after.ema_params, after.policy)) / optax.tree.norm(after.policy)
  assert values(metrics)["anchor_distance"] == pytest.approx(float(distance), rel=1e-5)


@pytest.mark.parametrize("part", ["returns", "old_values", "advantages"])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_skips_both_updates(part, broken):
  data, before = tiny.toy_batch(), state()
  data = data.replace(**{part: getattr(data, part).at[2, 0].set(broken)})
  after, metrics = tiny.toy_step(before, data, CONFIG, OPTIMIZER, ema_decay=1.0)
  assert float(metrics["bad_updates"].sum) == 1
  chex.assert_trees_all_equal((after.params, after.opt_state), (before.params, before.opt_state))
  assert int(after.step) == 1


def of_two_rows(**columns):
  """A batch that trains two tokens of row 0 and one of row 2, with numbers at these, and garbage elsewhere."""
  data = tiny.toy_batch()
  mask = jnp.zeros_like(data.mask).at[0, :2].set(True).at[2, 0].set(True)

  def spread(numbers):
    return jnp.full(mask.shape, 1e6).at[0, 0].set(numbers[0]).at[0, 1].set(numbers[1]).at[2, 0].set(numbers[2])

  return data.replace(mask=mask, **{name: spread(numbers) for name, numbers in columns.items()})


def test_metrics_of_advantages_and_returns_by_hand():
  # Advantages: mean -2/3; squares of deviations 25/9, 4/9 and 49/9, sum 78/9, over n - 1 = 2: variance 13/3.
  # Returns: mean 2, variance (1 + 0 + 1) / 2 = 1. Errors 0.5, 0, -0.5: mean 0, variance 0.25; so 1 - 0.25 / 1.
  data = of_two_rows(advantages=(1.0, 0.0, -3.0), returns=(1.0, 2.0, 3.0), old_values=(0.5, 2.0, 3.5))
  _, metrics = tiny.toy_gradient(data, CONFIG, critic=True)
  found = values(metrics)
  assert found["advantage_mean"] == pytest.approx(-2 / 3, rel=1e-5)
  assert found["advantage_std"] == pytest.approx((13 / 3) ** 0.5, rel=1e-5)
  assert found["advantage_max"] == 3
  assert found["value_mean"] == pytest.approx(2, rel=1e-5)
  assert found["explained_variance"] == pytest.approx(0.75, rel=1e-5)
  # A constant added to all values explains as much; values of the wrong sign explain less than nothing: errors 2, 4, 6 of variance 4.
  for old, expected in (((10.5, 12.0, 13.5), 0.75), ((-1.0, -2.0, -3.0), -3.0)):
    found = values(tiny.toy_gradient(of_two_rows(returns=(1.0, 2.0, 3.0), old_values=old), CONFIG, critic=True)[1])
    assert found["explained_variance"] == pytest.approx(expected, rel=1e-4)


def test_metrics_without_spread_or_without_a_token():
  equal = of_two_rows(advantages=(2.0, 2.0, 2.0), returns=(1.0, 1.0, 1.0), old_values=(0.5, 2.0, 3.5))
  _, metrics = tiny.toy_gradient(equal, CONFIG, critic=True)
  assert metrics["explained_variance"].weight == 0 and metrics["explained_variance"].sum == 0
  assert values(metrics)["advantage_std"] == 0
  _, metrics = tiny.toy_gradient(equal.replace(mask=jnp.zeros_like(equal.mask)), CONFIG, critic=True)
  assert all(metrics[name].weight == 0 for name in ("advantage_mean", "advantage_std", "explained_variance", "value_mean"))
  assert all(values(metrics)[name] == -np.inf for name in ("advantage_max", "ratio_max", "sampler_ratio_max"))
  # Of many 0.1 the computed variance is rounding, not 0, and nothing may be divided by it.
  data = tiny.toy_batch()
  returns = jnp.full_like(data.returns, 0.1)
  kept = returns[data.mask]
  assert jnp.sum((kept - jnp.sum(kept) / kept.size) ** 2) > 0
  assert tiny.toy_gradient(data.replace(returns=returns), CONFIG, critic=True)[1]["explained_variance"].weight == 0
