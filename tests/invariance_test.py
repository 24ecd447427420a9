"""What must change neither the loss nor its summed gradient: micro-batches, row order, padding, garbage behind a mask.

Each test goes through `train_step` with plain SGD, so that the change of the weights is the gradient. The old policy is the sampler's and
differs from the current one, so that ratios and bounds are at work; the KL and the entropy bonus are on.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import credit, losses, optim
from emapg_jax.score_step import before_responses, credit_step
from emapg_jax.train_step import init_state, train_step
from tests import tiny
from tests.tiny import POLICY_LOSSES, assert_same_gradient, values
from tests.tiny import off_policy_config as config

RTOL = {"float32": 1e-6, "float64": 1e-12}
PER_TOKEN = ("advantages", "sampling_logp", "old_logp", "ref_logp", "ref_logp_topk", "ref_log_tail", "old_values", "returns")
GARBAGE = [np.nan, np.inf, -np.inf, 1e30]
ORDER = np.random.default_rng(1).permutation(tiny.ROWS)


@pytest.fixture(params=RTOL)
def rtol(request):
  with jax.enable_x64(request.param == "float64"):
    assert jax.tree.leaves(tiny.toy_params())[0].dtype == request.param
    yield RTOL[request.param]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(step_config, optimizer, critic, state, frozen, data, which):
  # One compilation for all policy losses.
  def policy_loss(*arrays):
    return jax.lax.switch(which, tuple(POLICY_LOSSES.values()), *arrays)

  step_config = dataclasses.replace(step_config, policy_loss=policy_loss)
  hyper = tiny.hyper(kl_coef=0.5)
  return train_step(state, frozen, data, hyper, model=tiny.toy_model, optimizer=optimizer, config=step_config, critic=critic)


def gradient(data, step_config, name, critic=None, frozen=()):
  before = tiny.toy_params(critic=critic is not None)
  state = init_state(before, tiny.FAST_SGD, False)
  after, metrics = _step(step_config, tiny.FAST_SGD, critic, state, frozen, data, list(POLICY_LOSSES).index(name))
  assert metrics["bad_updates"].sum == 0
  return tiny.change(before, after.params), metrics


def assert_same(found, expected, rtol):
  assert_same_gradient(found[0], expected[0], rtol)
  for name in {"loss", "value_loss"} & expected[1].keys():
    assert values(found[1])[name] == pytest.approx(values(expected[1])[name], rel=rtol, abs=rtol)


def permuted(data):
  return jax.tree.map(lambda x: x[ORDER], data)


def padded(data, columns=3, rows=4):
  """With garbage in the columns and rows added, and rows that are not real."""
  widths = {tiny.RESPONSE, tiny.RESPONSE + tiny.PROMPT}

  def pad(name, x):
    fill = {"tokens": 15, "prompt_length": 1, "mask": False, "real": False, "topk_ids": 0}.get(name, np.nan)
    more = columns if x.ndim > 1 and x.shape[1] in widths else 0
    return jnp.pad(x, [(0, rows), (0, more), (0, 0)][: x.ndim], constant_values=fill)

  return data.replace(**{name: pad(name, x) for name, x in vars(data).items()})


def test_bounds_are_active():
  """Or what follows would say little."""
  for name in POLICY_LOSSES:
    found = values(gradient(tiny.toy_batch(), config(), name)[1])
    assert 0 < found["kl_weight_clipped"] < 1
    assert (0 < found["clip_fraction_low"] < 0.5) == (0 < found["clip_fraction_high"] < 0.5) == (name != "reinforce")
    assert (0 < found["clip_fraction_dual"] < 0.5) == (name == "ppo_clip")


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batch_size(micro_batch, aggregation, rtol):
  data = tiny.toy_batch()
  for name in POLICY_LOSSES:
    assert_same(gradient(data, config(aggregation, micro_batch), name), gradient(data, config(aggregation), name), rtol)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_row_order(aggregation, rtol):
  data = tiny.toy_batch()
  for name in POLICY_LOSSES:
    assert_same(gradient(permuted(data), config(aggregation), name), gradient(data, config(aggregation), name), rtol)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_padding_columns_and_rows_with_micro_batches_of_two(aggregation, rtol):
  data = tiny.toy_batch()
  for name in POLICY_LOSSES:
    assert_same(gradient(padded(data), config(aggregation, 2), name), gradient(data, config(aggregation), name), rtol)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_uneven_lengths(aggregation, rtol):
  """The short responses and the long ones, each in a batch of their own: the sums and weights of the two are those of the whole."""
  data = tiny.toy_batch()
  short = jnp.sum(data.mask, axis=1) <= 3
  assert jnp.sum(short) == 4
  for name in POLICY_LOSSES:
    whole, metrics = gradient(data, config(aggregation), name)
    parts = [gradient(data.replace(mask=data.mask & rows[:, None], real=rows), config(aggregation), name) for rows in (short, ~short)]
    weights = [float(part["loss"].weight) for _, part in parts]
    assert sum(weights) == float(metrics["loss"].weight) and min(weights) > 0
    shares = [weight / sum(weights) for weight in weights]
    assert_same_gradient(jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, parts[0][0], parts[1][0]), whole, rtol)  # noqa: B023
    loss = sum(share * values(part)["loss"] for share, (_, part) in zip(shares, parts))
    assert loss == pytest.approx(values(metrics)["loss"], rel=rtol, abs=rtol)


def test_with_a_critic(rtol):
  data = tiny.toy_batch()
  expected = gradient(data, config(), "ppo_clip", tiny.toy_critic)
  assert 0 < values(expected[1])["value_clip_fraction"] < 1
  for variant, micro_batch in ((permuted(data), 8), (padded(data), 2)):
    assert_same(gradient(variant, config(micro_batch=micro_batch), "ppo_clip", tiny.toy_critic), expected, rtol)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_garbage_at_masked_positions(name, garbage):
  """In all that is given per token, in the critic's values, and in the reward of the row that trains nothing."""
  data = tiny.toy_batch()
  # The value of a token is that of the position before it: those before masked tokens get an id of their own.
  rows, first = jnp.arange(tiny.ROWS)[:, None], data.prompt_length[:, None] - 1
  at = (rows, first + jnp.arange(tiny.RESPONSE)[None, :])
  data = data.replace(tokens=data.tokens.at[at].set(jnp.where(data.mask, data.tokens[at], 15)))
  hidden = {key: spoilt(data.mask, getattr(data, key), garbage) for key in PER_TOKEN}
  hidden["rewards"] = spoilt(data.mask.any(1), data.rewards, garbage)

  expected = gradient(data, config(), name, _critic_of_garbage, jnp.zeros(16))
  found = gradient(data.replace(**hidden), config(), name, _critic_of_garbage, jnp.zeros(16).at[15].set(garbage))
  chex.assert_trees_all_equal(found[0], expected[0])
  assert values(found[1]) == values(expected[1])


def _critic_of_garbage(params, frozen, batch):
  return before_responses(tiny.toy_values(params, batch.tokens) + frozen[batch.tokens], batch)


def spoilt(mask, x, garbage):
  return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.asarray(garbage, x.dtype))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_at_masked_positions_of_the_credit(garbage):
  data = tiny.toy_batch()
  step_config = tiny.config(credit=functools.partial(credit.gae_advantages, discount=0.9, gae_lambda=0.8), kl_in_reward=True)
  stats = tiny.toy_stats(tiny.toy_params(), data, ids=data.topk_ids)
  hidden = {key: spoilt(data.mask, getattr(data, key), garbage) for key in PER_TOKEN}
  hidden["rewards"] = spoilt(data.mask.any(1), data.rewards, garbage)
  bad_stats = stats.replace(**{key: spoilt(data.mask, x, garbage) for key, x in vars(stats).items() if key != "topk_ids"})
  expected, expected_metrics = credit_step(data, stats, tiny.hyper(), config=step_config)
  found, found_metrics = credit_step(data.replace(**hidden), bad_stats, tiny.hyper(), config=step_config)
  chex.assert_trees_all_equal(found, expected)
  assert values(found_metrics) == values(expected_metrics)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_all_masked(aggregation, rtol):
  del rtol
  data = tiny.toy_batch()
  data = data.replace(mask=jnp.zeros_like(data.mask))
  for name in POLICY_LOSSES:
    grads, metrics = gradient(data, config(aggregation), name)
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
    assert values(metrics)["loss"] == 0


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_one_token(aggregation, rtol):
  """One token of one row: its gradient is that of -A · ratio · logp, over the weight of the aggregation."""
  data = tiny.toy_batch()

  def logp(params):
    hidden, unembedding = tiny.toy_states(params, data.tokens[3:4])
    at = data.prompt_length[3]
    return jax.nn.log_softmax(hidden[0, at - 1] @ unembedding)[data.tokens[3, at]]

  value, slope = jax.value_and_grad(logp)(tiny.toy_params())
  # At ratio 1.2 no bound acts on A = -2. What does not depend on A, KL and entropy, is what A = 0 leaves.
  data = data.replace(mask=jnp.zeros_like(data.mask).at[3, 0].set(True), sampling_logp=jnp.full_like(data.old_logp, value - np.log(1.2)))
  weight = tiny.ROWS * tiny.RESPONSE if aggregation == "fixed_length" else 1
  for name in POLICY_LOSSES:
    some, none = (gradient(data.replace(advantages=jnp.full_like(data.advantages, a)), config(aggregation), name)[0] for a in (-2.0, 0.0))
    expected = jax.tree.map(lambda s: 2.0 * (1.0 if name == "reinforce" else 1.2) / weight * s, slope)  # noqa: B023
    assert_same_gradient(jax.tree.map(lambda a, b: a - b, some, none), expected, 3 * rtol)


@pytest.mark.parametrize("trained", [False, True])
def test_optimizer_state_stays_finite(trained):
  """AdamW divides by the root of the second moment, which is 0 at first."""
  data = tiny.toy_batch()
  data = data.replace(mask=jnp.zeros_like(data.mask).at[3, 0].set(trained))
  optimizer, before = _adamw(), tiny.toy_params(critic=True)
  for index in range(len(POLICY_LOSSES)):
    state = init_state(before, optimizer, True)
    for _ in range(2):
      state, metrics = _step(config(), optimizer, tiny.toy_critic, state, (), data, index)
      assert metrics["bad_updates"].sum == 0
    chex.assert_tree_all_finite(state)
    moved = [bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(before["policy"]), jax.tree.leaves(state.policy))]
    assert all(moved) if trained else not any(moved)


@functools.cache
def _adamw():
  return optim.with_critic(*(optim.make_optimizer(1e-2, weight_decay=0.0) for _ in range(2)))
