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
from emapg_jax.train_step import check_divides, score_step
from emapg_jax.types import Max
from experiments.estimators import ESTIMATORS
from tests import tiny

MODES = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")


def values(metrics):
  return {k: float(m.value) if isinstance(m, Max) else float(m.sum / jnp.maximum(m.weight, 1)) for k, m in metrics.items()}


def assert_same_gradient(found, expected):
  """Equal to float32 rounding: relative to the largest entry, as the summands are."""
  largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected))
  chex.assert_trees_all_close(found, expected, atol=2e-6 * largest, rtol=1e-6)


@functools.cache
def reference(mode="token_mean"):
  return tiny.gradient(tiny.batch(), tiny.config(aggregation=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batch_size_changes_nothing(micro_batch, mode):
  grads, metrics = tiny.gradient(tiny.batch(), tiny.config(micro_batch=micro_batch, aggregation=mode))
  assert_same_gradient(grads, reference(mode)[0])
  found, expected = values(metrics), values(reference(mode)[1])
  assert found.keys() == expected.keys()
  for name in expected:
    assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_row_order_changes_nothing():
  order = np.random.default_rng(1).permutation(tiny.ROWS)
  grads, _ = tiny.gradient(jax.tree.map(lambda x: x[order], tiny.batch()))
  assert_same_gradient(grads, reference()[0])


@pytest.mark.parametrize("mode", MODES)
def test_padding_columns_change_nothing(mode):
  grads, _ = tiny.gradient(tiny.batch(extra_columns=9), tiny.config(aggregation=mode))
  assert_same_gradient(grads, reference(mode)[0])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_garbage_at_masked_positions_changes_nothing(garbage):
  data = tiny.batch()
  hide = {
    name: jnp.where(data.mask.reshape(data.mask.shape + (1,) * (x.ndim - 2)), x, garbage)
    for name, x in vars(data).items()
    if name in ("advantages", "sampling_logp", "old_logp", "ref_logp", "ref_logp_topk", "ref_log_tail")
  }
  grads, metrics = tiny.gradient(data.replace(**hide))
  chex.assert_trees_all_equal(grads, reference()[0])
  assert values(metrics) == values(reference()[1])


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
    hidden, unembedding = tiny.model(params, (), data.tokens)
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
    logps, refs = (jax.nn.log_softmax((lambda h, u: h @ u)(*tiny.model(p, (), data.tokens)) / temperature) for p in (params, anchor))
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
  grads, metrics = tiny.gradient(tiny.batch(), tiny.config(kl=ESTIMATORS[name]))
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))
  assert np.isfinite(values(metrics)["kl"])
  without, _ = tiny.gradient(tiny.batch(), tiny.config(kl=ESTIMATORS[name]), kl_coef=0.0)
  difference = optax.tree.norm(jax.tree.map(lambda a, b: a - b, grads, without))
  assert difference > 1e-5, "the KL has a gradient"


def test_kl_weight_bounds_act():
  data = tiny.batch()
  shifted = data.replace(sampling_logp=data.sampling_logp - 0.5)  # every weight is e^0.5 = 1.65
  _, metrics = tiny.gradient(shifted, tiny.config(kl_iw_high=1.2))
  found = values(metrics)
  assert found["kl_weight"] == pytest.approx(1.2, rel=1e-5)
  assert found["kl_weight_clipped"] == 1
  assert values(tiny.gradient(shifted)[1])["kl_weight"] == pytest.approx(np.exp(0.5), rel=1e-5)


def test_all_masked_batch_trains_nothing():
  data = tiny.batch()
  grads, metrics = tiny.gradient(data.replace(mask=jnp.zeros_like(data.mask)))
  assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
  assert values(metrics)["bad_updates"] == 0


def test_bad_mini_batch_is_skipped_and_counted():
  """One of two mini-batches has an infinite advantage: its update is left out, the other's is kept, and the step goes on."""
  data = tiny.batch()
  optimizer = optim.make_optimizer(1e-2)
  row = int(np.argmax(np.asarray(data.mask).sum(1)))
  bad = data.replace(advantages=data.advantages.at[row].set(jnp.inf))
  step = tiny.step_fn(tiny.config(mini_batches=2, micro_batch=4), optimizer)
  after, metrics = step(tiny.state(optimizer), (), bad, tiny.hyper())
  assert float(metrics["bad_updates"].sum) == 1
  assert int(after.step) == 1
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after))
  count = next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(after.opt_state) if "count" in jax.tree_util.keystr(path))
  assert int(count) == 1
  # And with nothing but bad updates, nothing but the step moves.
  before = tiny.state(optimizer)
  after, _ = step(tiny.state(optimizer), (), data.replace(advantages=jnp.full_like(data.advantages, jnp.inf)), tiny.hyper(ema_decay=1.0))
  chex.assert_trees_all_equal(after.params, before.params)
  chex.assert_trees_all_equal(after.opt_state, before.opt_state)


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


def test_mini_batches_are_updates_in_an_order_that_depends_on_the_step():
  data = tiny.batch()
  two = tiny.step_fn(tiny.config(mini_batches=2, micro_batch=2), optim.make_optimizer(1e-2))
  state = tiny.state(optim.make_optimizer(1e-2))
  first, _ = two(state, (), data, tiny.hyper())
  later, _ = two(tiny.state(optim.make_optimizer(1e-2)).replace(step=jnp.int32(5)), (), data, tiny.hyper())
  count = next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(first.opt_state) if "count" in jax.tree_util.keystr(path))
  assert int(count) == 2
  difference = optax.tree.norm(jax.tree.map(lambda a, b: a - b, first.params, later.params))
  assert difference > 1e-5, "other rows came first"


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
