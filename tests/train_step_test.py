"""The RL step: what must not change its gradient, what must, and what happens to the state."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emapg_jax import optim
from emapg_jax.score_step import score_step
from emapg_jax.step_config import check_divides
from emapg_jax.train_step import init_state
from experiments.estimators import ESTIMATORS
from tests import tiny
from tests.tiny import assert_same_gradient, values


@functools.cache
def reference():
  return tiny.gradient(tiny.batch(), tiny.config())


def count(opt_state):
  return int(next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state) if "count" in jax.tree_util.keystr(path)))


def test_what_changes_nothing_of_the_decoder():
  """invariance_test says the same of each loss, on a simpler model: here attention must not see the padding either."""
  order = np.random.default_rng(1).permutation(tiny.ROWS)
  data = jax.tree.map(lambda x: x[order], tiny.batch(extra_columns=9))
  grads, metrics = tiny.gradient(data, tiny.config(micro_batch=2))
  assert_same_gradient(grads, reference()[0])
  found, expected = values(metrics), values(reference()[1])
  assert found.keys() == expected.keys()
  for name in expected:
    assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_on_policy_ratio_is_one_with_a_gradient():
  found = values(reference()[1])
  assert found["ratio"] == pytest.approx(1, abs=1e-5)
  assert found["ratio_max"] == pytest.approx(1, abs=1e-5)
  assert found["clip_fraction_low"] == found["clip_fraction_high"] == 0
  assert optax.tree.norm(tiny.gradient(tiny.batch(), kl_coef=0.0)[0]) > 1e-3


def test_gradient_against_an_independent_formula():
  """Policy gradient on-policy: −mean of A·∇log π(token); written here with log_softmax and no code of the step."""
  data = tiny.batch()

  def loss(params):
    hidden, unembedding = tiny.hidden_states(params, data.tokens)
    logps = jax.nn.log_softmax(hidden @ unembedding)
    total = 0.0
    for row in range(tiny.ROWS):
      for t in range(int(data.mask[row].sum())):
        at = int(data.prompt_length[row]) + t
        total += data.advantages[row, t] * logps[row, at - 1, data.tokens[row, at]]
    return -total / int(data.mask.sum())

  expected = jax.grad(loss)(tiny.params())
  chex.assert_trees_all_close(tiny.gradient(data, kl_coef=0.0)[0], expected, atol=1e-6, rtol=1e-4)


def test_kl_gradient_with_all_ids_against_an_independent_formula():
  """With K = V the KL term is the exact reverse KL of the two tempered models, averaged over trained tokens."""
  data, anchor, temperature = tiny.batch(), tiny.params(1), 0.7
  step_config = tiny.config(temperature=temperature, kl=ESTIMATORS["exact_reverse"])
  score = functools.partial(score_step, model=tiny.model, config=dataclasses.replace(step_config, topk=16))
  old = score(tiny.params(), (), data.replace(topk_ids=data.topk_ids[..., :0]))
  ref = score(anchor, (), data, old.topk_ids)
  data = data.replace(
    advantages=jnp.zeros_like(data.advantages),
    old_logp=old.logp,
    sampling_logp=old.logp,
    topk_ids=old.topk_ids,
    ref_logp=ref.logp,
    ref_logp_topk=ref.logp_topk,
    ref_log_tail=ref.log_tail,
  )

  def loss(params):
    total = 0.0
    logps, refs = (jax.nn.log_softmax((lambda h, u: h @ u)(*tiny.hidden_states(p, data.tokens)) / temperature) for p in (params, anchor))
    for row in range(tiny.ROWS):
      for t in range(int(data.mask[row].sum())):
        at = int(data.prompt_length[row]) + t - 1
        total += jnp.sum(jnp.exp(logps[row, at]) * (logps[row, at] - refs[row, at]))
    return 0.3 * total / int(data.mask.sum())

  grads, metrics = tiny.gradient(data, step_config, kl_coef=0.3)
  expected = jax.grad(loss)(tiny.params())
  chex.assert_trees_all_close(grads, expected, atol=1e-6, rtol=1e-4)
  assert values(metrics)["kl"] * 0.3 == pytest.approx(float(loss(tiny.params())), rel=1e-5)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_runs_and_reports(name):
  grads, metrics = tiny.toy_gradient(tiny.toy_batch(), tiny.config(kl=ESTIMATORS[name]))
  chex.assert_tree_all_finite(grads)
  assert np.isfinite(values(metrics)["kl"])
  without, _ = tiny.toy_gradient(tiny.toy_batch(), tiny.config(kl=ESTIMATORS[name]), kl_coef=0.0)
  difference = optax.tree.norm(jax.tree.map(lambda a, b: a - b, grads, without))
  assert difference > 1e-5, "the KL has a gradient"


def test_the_kl_in_the_reward_is_not_in_the_loss_too():
  grads, metrics = tiny.toy_gradient(tiny.toy_batch(), tiny.config(kl_in_reward=True))
  chex.assert_trees_all_equal(grads, tiny.toy_gradient(tiny.toy_batch(), tiny.config(kl=None))[0])
  assert not any(name.startswith("kl") for name in metrics)


def test_kl_weight_bounds_act():
  data = tiny.toy_batch(spread=0.0)
  shifted = data.replace(sampling_logp=data.sampling_logp - 0.5)  # every weight is e^0.5 = 1.65
  _, metrics = tiny.toy_gradient(shifted, tiny.config(kl_iw_high=1.2))
  found = values(metrics)
  assert found["kl_weight"] == pytest.approx(1.2, rel=1e-5)
  assert found["kl_weight_clipped"] == 1
  free = values(tiny.toy_gradient(shifted)[1])
  assert free["kl_weight"] == pytest.approx(np.exp(0.5), rel=1e-5)
  # The weight is the tail's alone: the head is exact whoever drew the token.
  plain = values(tiny.toy_gradient(data)[1])
  assert free["kl_head"] == plain["kl_head"] and free["kl_tail"] == pytest.approx(np.exp(0.5) * plain["kl_tail"], rel=1e-5) != 0


def test_an_update_without_a_token_is_left_out_with_its_momentum():
  """After a step that fills Adam's moments, one on which nothing has a score must not move the weights by them, nor by weight decay."""
  data, optimizer = tiny.toy_batch(), adamw()
  state, metrics = tiny.toy_step(init_state(tiny.toy_params(), optimizer, True), data, tiny.config(), optimizer)
  assert float(metrics["empty_updates"].sum) == 0
  after, metrics = tiny.toy_step(state, data.replace(mask=jnp.zeros_like(data.mask)), tiny.config(), optimizer)
  chex.assert_trees_all_equal((after.params, after.opt_state), (state.params, state.opt_state))
  assert float(metrics["empty_updates"].sum) == 1 and float(metrics["bad_updates"].sum) == 0
  assert metrics["grad_norm"].weight == 0
  assert int(after.step) == 2


def test_bad_mini_batch_is_skipped_and_counted():
  """One of two mini-batches has an infinite advantage: its update is left out, the other's is kept, and the step goes on."""
  data, optimizer = tiny.toy_batch(), adamw()
  bad = data.replace(advantages=data.advantages.at[2].set(jnp.inf))
  two = tiny.config(mini_batches=2, micro_batch=4)
  before = init_state(tiny.toy_params(), optimizer, True)
  after, metrics = tiny.toy_step(before, bad, two, optimizer)
  assert float(metrics["bad_updates"].sum) == 1
  assert int(after.step) == 1
  chex.assert_tree_all_finite(after)
  assert count(after.opt_state) == 1
  # And with nothing but bad updates, nothing but the step moves.
  after, _ = tiny.toy_step(before, data.replace(advantages=jnp.full_like(data.advantages, jnp.inf)), two, optimizer, ema_decay=1.0)
  chex.assert_trees_all_equal((after.params, after.opt_state), (before.params, before.opt_state))


@functools.cache
def adamw():
  return optim.make_optimizer(1e-2)


def test_an_update_that_is_not_finite_is_skipped_too():
  """A finite gradient times an infinite rate: the weights would be lost, and the next checkpoint with them."""
  before = tiny.state()
  after, metrics = tiny.step_fn()(tiny.state(), (), tiny.batch(), tiny.hyper(lr_scale=np.inf, ema_decay=1.0))
  assert float(metrics["bad_updates"].sum) == 1
  chex.assert_trees_all_equal(after.params, before.params)


def test_anchor_follows_by_its_period_and_reads_the_new_policy():
  data, step = tiny.batch(), tiny.step_fn()
  state = tiny.state()
  anchors, policies = [state.ema_params], [tiny.params()]
  for _ in range(4):
    anchors[-1] = jax.tree.map(np.asarray, anchors[-1])
    state, _ = step(state, (), data, tiny.hyper(ema_decay=0.75, ema_period=2))
    anchors.append(jax.tree.map(np.asarray, state.ema_params))
    policies.append(jax.tree.map(np.asarray, state.params))
  chex.assert_trees_all_equal(anchors[1], anchors[0])
  chex.assert_trees_all_equal(anchors[3], anchors[2])
  for now in (2, 4):
    expected = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, anchors[now - 1], policies[now])
    chex.assert_trees_all_close(anchors[now], expected, rtol=1e-6, atol=1e-7)


def test_learning_rate_scale():
  full, _ = tiny.gradient(tiny.batch())
  half, _ = tiny.gradient(tiny.batch(), lr_scale=0.5)
  chex.assert_trees_all_close(jax.tree.map(lambda g: g * 0.5, full), half, atol=1e-7)


def recorder(updates):
  """An optimizer that moves nothing and keeps the gradient of each update of an RL step."""

  def init(params):
    return jnp.int32(0), jax.tree.map(lambda p: jnp.zeros((updates, *p.shape)), params)

  def update(grads, state, params):
    del params
    count, kept = state
    kept = jax.tree.map(lambda k, g: k.at[count].set(g), kept, grads)
    return jax.tree.map(jnp.zeros_like, grads), (count + 1, kept)

  return optax.GradientTransformation(init, update)


@functools.cache
def recorded(mini_batches, epochs=1, step=0):
  """The gradients [updates, ...] of an RL step at the weights before it; their sums are divided by one number, tokens or not."""
  optimizer = recorder(mini_batches * epochs)
  step_config = tiny.config(mini_batches=mini_batches, epochs=epochs, micro_batch=2, aggregation="fixed_length")
  state = init_state(tiny.toy_params(), optimizer, True).replace(step=jnp.int32(step))
  after, _ = tiny.toy_step(state, tiny.toy_batch(), step_config, optimizer)
  assert int(after.opt_state[0]) == mini_batches * epochs
  return np.concatenate([np.reshape(g, (mini_batches * epochs, -1)) for g in jax.tree.leaves(after.opt_state[1])], axis=1)


def test_an_epoch_is_a_pass_over_all_rows_in_an_order_of_its_own():
  first, second = np.split(recorded(2, epochs=2), 2)
  for epoch in (first, second):
    np.testing.assert_allclose(epoch.sum(0), recorded(4).sum(0) / 2, atol=1e-6)
    assert np.abs(epoch[0] - epoch[1]).max() > 1e-3
  assert min(np.abs(first[0] - second[i]).max() for i in (0, 1)) > 1e-3, "other rows came together"
  np.testing.assert_allclose(first, recorded(2), atol=1e-6)
  later = recorded(2, epochs=2, step=5)
  assert min(np.abs(first[0] - later[i]).max() for i in range(4)) > 1e-3, "the order depends on the step"


def test_each_update_has_its_learning_rate():
  gradients = recorded(2)
  step_config = tiny.config(mini_batches=2, micro_batch=2, aggregation="fixed_length")
  for scales, expected in (
    ([1.0, 0.0], gradients[0]),
    ([0.0, 1.0], gradients[1]),
    ([0.0, 0.25], gradients[1] / 4),
    (0.0, 0 * gradients[0]),
  ):
    found, _ = tiny.toy_gradient(tiny.toy_batch(), step_config, lr_scale=scales)
    np.testing.assert_allclose(np.concatenate([g.ravel() for g in jax.tree.leaves(found)]), expected, atol=1e-6)


def test_on_policy_the_old_log_probs_are_not_read():
  data = tiny.toy_batch(spread=0.0)
  unread = data.replace(old_logp=jnp.full_like(data.old_logp, jnp.nan))
  grads, metrics = tiny.toy_gradient(unread, kl_coef=0.0)
  chex.assert_trees_all_equal(grads, tiny.toy_gradient(data, kl_coef=0.0)[0])
  found = values(metrics)
  assert found["ratio"] == found["ratio_max"] == 1 and found["bad_updates"] == 0
  assert optax.tree.norm(grads) > 1e-2


@pytest.mark.parametrize(
  ("changes", "read", "unread"),
  [
    ({"mini_batches": 2, "micro_batch": 4}, "old_logp", None),
    ({"epochs": 2}, "old_logp", None),
    ({"old_from_sampler": True}, "sampling_logp", "old_logp"),
    ({"old_from_sampler": True, "mini_batches": 2, "micro_batch": 4}, "sampling_logp", "old_logp"),
  ],
)
def test_which_old_log_probs_are_read(changes, read, unread):
  data, step_config = tiny.toy_batch(), tiny.config(**changes, kl=None)
  for name in {read, unread} - {None}:
    broken = data.replace(**{name: jnp.full_like(data.old_logp, jnp.nan)})
    found = values(tiny.toy_gradient(broken, step_config)[1])
    assert found["bad_updates"] == (name == read)
    assert np.isnan(found["policy_loss"]) == (name == read)
  # Where no update moves anything, the ratio is that to what is read.
  expected = np.exp(tiny.toy_stats(tiny.toy_params(), data).logp - getattr(data, read))
  assert values(tiny.toy_gradient(data, step_config, lr_scale=0.0)[1])["ratio"] == pytest.approx(expected[data.mask].mean(), rel=1e-5)


def test_the_mismatch_with_the_sampler_is_measured_before_the_first_update():
  """Sampler and trainer agree here, until the first of two updates has moved the policy far away."""
  data = tiny.toy_batch(spread=0.0)
  _, metrics = tiny.toy_gradient(data, tiny.config(mini_batches=2, micro_batch=4, old_from_sampler=True))
  found = values(metrics)
  assert found["ratio_max"] > 2
  for name, expected in (("sampler_ratio", 1), ("sampler_ratio_max", 1), ("sampler_kl", 0)):
    assert found[name] == pytest.approx(expected, abs=1e-5), name
  assert 0 < metrics["sampler_ratio"].weight < metrics["ratio"].weight
  # The trainer's own old log-probs are those of the start for all updates: all tokens count.
  _, metrics = tiny.toy_gradient(data.replace(sampling_logp=data.old_logp - 0.1), tiny.config(mini_batches=2, micro_batch=4))
  assert metrics["sampler_ratio"].weight == metrics["ratio"].weight
  assert values(metrics)["sampler_ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)


def test_entropy_bonus():
  data = tiny.toy_batch()

  def entropy(params):
    hidden, unembedding = tiny.toy_states(params, data.tokens)
    logps = jax.nn.log_softmax(hidden @ unembedding / 0.7)
    rows, columns = np.nonzero(data.mask)
    logps = logps[rows, data.prompt_length[rows] + columns - 1]
    return -jnp.sum(jnp.exp(logps) * logps, axis=-1).mean()

  with_bonus, metrics = tiny.toy_gradient(data, tiny.config(entropy_coef=0.3, temperature=0.7))
  without, _ = tiny.toy_gradient(data, tiny.config(temperature=0.7))
  difference = jax.tree.map(lambda a, b: a - b, with_bonus, without)
  value, slope = jax.value_and_grad(entropy)(tiny.toy_params())
  assert_same_gradient(difference, jax.tree.map(lambda g: -0.3 * g, slope), 1e-5)
  assert values(metrics)["entropy"] == pytest.approx(float(value), rel=1e-5)
  assert float(entropy(jax.tree.map(lambda p, d: p - 0.1 * d, tiny.toy_params(), difference))) > float(value)


def test_compiles_once_whatever_the_traced_settings_are():
  step = tiny.step_fn(optimizer=optim.make_optimizer(1e-3))
  state = tiny.state(optim.make_optimizer(1e-3))
  for i in range(3):
    state, _ = step(state, (), tiny.batch(seed=i), tiny.hyper(kl_coef=0.1 * i, ema_decay=1 - 0.1 * i, ema_period=1 + i, lr_scale=0.5 + i))
  assert step._cache_size() == 1


def test_donated_state_is_gone_and_the_anchor_is_no_alias():
  step, state = tiny.step_fn(), jax.tree.map(jnp.copy, tiny.state())
  after, _ = step(state, (), tiny.batch(), tiny.hyper(ema_decay=1.0))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.ema_params)))
  chex.assert_trees_all_equal(after.ema_params, tiny.params())
  pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((after.params, after.ema_params))]
  assert len(set(pointers)) == len(pointers)


def test_weight_decay_never_reaches_the_anchor():
  optimizer = optim.make_optimizer(1e-2, weight_decay=0.5)
  after, _ = tiny.step_fn(optimizer=optimizer)(tiny.state(optimizer), (), tiny.batch(), tiny.hyper(ema_period=10))
  chex.assert_trees_all_equal(after.ema_params, tiny.params())
  assert optax.tree.norm(after.params) < optax.tree.norm(tiny.params())


def test_without_an_anchor_none_is_kept_or_reported():
  after, metrics = tiny.step_fn(tiny.config(kl=None))(tiny.state(with_anchor=False), (), tiny.batch(), tiny.hyper())
  assert after.ema_params is None
  assert not {"kl", "anchor_distance", "topk_mass"} & metrics.keys()


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_score_step_keeps_the_order_of_rows(micro_batch):
  data = tiny.batch()
  stats = score_step(tiny.params(), (), data, data.topk_ids, model=tiny.model, config=tiny.config(micro_batch=micro_batch))
  np.testing.assert_allclose(stats.logp, data.old_logp, atol=1e-5)
  np.testing.assert_array_equal(stats.topk_ids, data.topk_ids)


def test_batch_that_does_not_divide():
  with pytest.raises(ValueError, match=r"8 sequences does not split into 3 mini-batches of micro-batches of 2"):
    check_divides(8, tiny.config(mini_batches=3, micro_batch=2))
