"""Micro-batches by length: the plan, and that it changes neither gradient nor metrics nor scores."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import losses, micro_batches
from emapg_jax.score_step import score_step, value_step
from emapg_jax.token_stats import token_stats
from emapg_jax.train_step import init_state, train_step
from tests import tiny
from tests.tiny import assert_same_gradient, values

LENGTHS = (2, 4, 6)


def host(data):
  return jax.tree.map(np.asarray, data)


def with_lengths(lengths, data=None):
  """A batch of which the rows are trained up to these lengths."""
  data = tiny.toy_batch() if data is None else data
  return data.replace(mask=jnp.arange(tiny.RESPONSE)[None, :] < jnp.asarray(lengths)[:, None])


def plan_of(data, step_config=None, micro_tokens=16, step=None, **settings):
  return micro_batches.by_length(host(data), micro_tokens, step_config or tiny.config(), step, **({"lengths": LENGTHS} | settings))


def contents(plan, update=0):
  """(length, rows, real) of each micro-batch."""
  return [
    (part.length, part.rows[update, i].tolist(), part.real[update, i].tolist()) for part in plan for i in range(int(part.count[update]))
  ]


def test_a_plan_by_hand():
  """4 prompt tokens: of a budget of 16, rows read to 2, 4, 6 tokens take 6, 8, 10, so that 2, 2, 1 go together. Sorted, the rows are
  2 and 6 (6 tokens), 3 (5), 7 (4), 0 (3), 5 (2), 4 (1), 1 (none)."""
  plan = plan_of(with_lengths([3, 0, 6, 5, 1, 2, 6, 4]))
  assert contents(plan) == [
    (2, [5, 4], [True, True]),
    (2, [1, 1], [True, False]),
    (4, [7, 0], [True, True]),
    (6, [2], [True]),
    (6, [6], [True]),
    (6, [3], [True]),
  ]
  # Room for a batch of nothing but rows of that length.
  assert [part.rows.shape for part in plan] == [(1, 4, 2), (1, 4, 2), (1, 8, 1)]
  # 4 · 6 + 2 · 8 + 3 · 10 = 70 tokens go through the model, 27 of them responses.
  data = host(with_lengths([3, 0, 6, 5, 1, 2, 6, 4]))
  prompts = int(data.prompt_length.sum())
  assert micro_batches.padded_fraction(data, plan, tiny.config()) == pytest.approx(1 - (prompts + 27) / 70)
  assert micro_batches.padded_fraction(data, None, tiny.config()) == pytest.approx(1 - (prompts + 27) / 80)
  # Three epochs are as much more of both.
  epochs = tiny.config(epochs=3)
  assert micro_batches.padded_fraction(data, plan_of(data, epochs, step=0), epochs) == pytest.approx(1 - (prompts + 27) / 70)


def test_a_plan_with_shared_prompts_by_hand():
  """Pairs of rows read to 2, 4, 6 tokens take 4 + 2 · 2, 4 + 2 · 4, 4 + 2 · 6 = 8, 12, 16 of 16: 2, 1, 1 pairs. The longest of each are
  of 3, 6, 2, 6 tokens."""
  step_config, data = tiny.config(prompt_rows=2), with_lengths([3, 0, 6, 5, 1, 2, 6, 4])
  plan = plan_of(data, step_config)
  assert contents(plan) == [
    (2, [4, 5, 4, 5], [True, True, False, False]),
    (4, [0, 1], [True, True]),
    (6, [2, 3], [True, True]),
    (6, [6, 7], [True, True]),
  ]
  data = host(data)
  useful = int(data.prompt_length[::2].sum()) + 27
  assert micro_batches.padded_fraction(data, plan, step_config) == pytest.approx(1 - useful / (16 + 12 + 16 + 16))
  assert micro_batches.padded_fraction(data, None, step_config) == pytest.approx(1 - useful / 64)


def test_what_is_taken():
  data = tiny.toy_batch()
  part = jax.tree.map(lambda x: x[0], plan_of(with_lengths([3, 0, 6, 5, 1, 2, 6, 4]))[0])  # rows 5 and 4, then 1 and 1
  first, second = (micro_batches.take(data, part, index) for index in (0, 1))
  assert {first.mask.shape, first.old_logp.shape} == {(2, 2)} and first.ref_logp_topk.shape == (2, 2, tiny.TOPK)
  np.testing.assert_array_equal(first.tokens, data.tokens[jnp.asarray([5, 4]), :6])
  np.testing.assert_array_equal(first.mask, data.mask[jnp.asarray([5, 4]), :2])
  np.testing.assert_array_equal(first.rewards, data.rewards[jnp.asarray([5, 4])])
  assert first.real.tolist() == [True, True] and second.real.tolist() == [True, False]
  assert not micro_batches.take(data.replace(mask=~data.mask), part, 1).mask[1].any()


@pytest.mark.parametrize("prompt_rows", [1, 2])
@pytest.mark.parametrize("devices", [1, 4])
def test_every_row_once_per_epoch_in_its_mini_batch_and_far_enough(prompt_rows, devices):
  step_config = tiny.config(mini_batches=2, micro_batch=2, epochs=2, prompt_rows=prompt_rows)
  rng = np.random.default_rng(0)
  for step in range(4):
    lengths = rng.integers(0, 7, 16)
    data = with_lengths(lengths, tiny.toy_batch(rows=16))
    plan = plan_of(data, step_config, 14 * prompt_rows, step, devices=devices)
    (plain,) = micro_batches.in_order(data, jnp.int32(step), step_config)
    for update in range(4):
      rows = []
      for length, chosen, real in contents(plan, update):
        units, left = divmod(len(chosen), devices * prompt_rows)
        assert not left and units * (4 + length * prompt_rows) <= 14 * prompt_rows
        assert max(lengths[chosen]) <= length
        units = np.reshape(chosen, (-1, prompt_rows))
        np.testing.assert_array_equal(units, units[:, :1] // prompt_rows * prompt_rows + np.arange(prompt_rows)[None, :])
        rows += np.asarray(chosen)[real].tolist()
      assert sorted(rows) == sorted(np.asarray(plain.rows[update]).ravel().tolist())
    for epoch in (0, 2):
      assert sorted(np.asarray(plain.rows[epoch : epoch + 2]).ravel().tolist()) == list(range(16))


def test_which_rows_meet_in_an_update_is_no_matter_of_how_many_are_read_at_a_time():
  data = tiny.toy_batch(16)

  def updates(plan):
    real = [[part.rows[u][np.asarray(part.real[u])].ravel() for part in plan] for u in range(2)]
    return [sorted(np.concatenate([np.ravel(rows) for rows in parts]).tolist()) for parts in real]

  expected = None
  for prompt_rows, micro_batch in ((1, 1), (1, 2), (2, 4), (4, 8)):
    config = tiny.config(micro_batch=micro_batch, mini_batches=2, prompt_rows=prompt_rows, together=4, seed=3)
    for plan in (micro_batches.in_order(data, jnp.int32(2), config), plan_of(data, config, micro_tokens=40, step=2)):
      found = updates(jax.tree.map(np.asarray, plan))
      expected = expected or found
      assert found == expected
  # Whole blocks of 4 rows, and not always the first two.
  assert all(row // 4 * 4 in found for found in expected for row in found)
  assert expected[0] != list(range(8))


def test_lengths_that_are_read():
  assert micro_batches.read_lengths(1024) == (256, 512, 1024)
  assert micro_batches.read_lengths(100) == (25, 50, 100)
  assert micro_batches.read_lengths(40) == (16, 20, 40)
  assert micro_batches.read_lengths(16) == (16,)
  assert micro_batches.read_lengths(7) == (7,)
  # A row's last trained token counts, whatever is left out before it.
  mask = np.array([[True, False, True, False], [False] * 4, [False, False, False, True]])
  np.testing.assert_array_equal(micro_batches.trained_length(mask), [3, 0, 4])


def test_never_more_than_a_mini_batch():
  plan = plan_of(with_lengths([6, 1, 1, 1, 1, 1, 1, 1]), micro_tokens=1000)
  assert contents(plan) == [(6, [0, 1, 2, 3, 4, 5, 6, 7], [True] * 8)]
  # Three devices get three rows each of a mini-batch of 8.
  assert [part.rows.shape for part in plan_of(tiny.toy_batch(), micro_tokens=1000, devices=3)] == [(1, 1, 9)] * 3


@pytest.mark.parametrize(
  ("changes", "settings", "message"),
  [
    ({}, {"micro_tokens": 9}, r"budget of 9 tokens per device .* 1 sequences of 4 prompt tokens, .* 6 response tokens each: 10 are needed"),
    ({"prompt_rows": 2}, {"micro_tokens": 15}, r"does not hold 2 sequences .* 16 are needed"),
    ({}, {"lengths": (2, 4)}, r"can't be read to \(2, 4\) tokens.*6 that the batch holds"),
    ({}, {"lengths": (4, 2, 6)}, r"lengths must rise"),
    ({"mini_batches": 3}, {"step": 0}, r"8 sequences does not split into 3 mini-batches"),
    ({"prompt_rows": 3, "micro_batch": 6}, {}, r"8 sequences does not split"),
  ],
)
def test_what_is_refused(changes, settings, message):
  with pytest.raises(ValueError, match=message):
    plan_of(tiny.toy_batch(), tiny.config(**changes), **settings)


def test_prompts_that_micro_batches_would_tear_apart():
  with pytest.raises(ValueError, match=r"Micro-batches of 4 sequences do not split into the 3 that share a prompt"):
    micro_batches.one_pass(tiny.toy_batch(), tiny.config(prompt_rows=3, micro_batch=4))


@functools.partial(jax.jit, static_argnums=0)
def _step(step_config, state, data, plan, which):
  def policy_loss(*arrays):  # one compilation for all
    return jax.lax.switch(which, tuple(tiny.POLICY_LOSSES.values()), *arrays)

  step_config = dataclasses.replace(step_config, policy_loss=policy_loss)
  bound = {"model": tiny.toy_model, "critic": tiny.toy_critic, "optimizer": tiny.SGD, "config": step_config}
  return train_step(state, (), data, tiny.hyper(kl_coef=0.5), plan, **bound)


def stepped(data, step_config, plan=None, which=0):
  before = tiny.toy_params(critic=True)
  after, metrics = _step(step_config, init_state(before, tiny.SGD, True), data, plan, which)
  assert metrics["bad_updates"].sum == 0
  return jax.tree.map(lambda a, b: a - b, before, after.params), metrics


def assert_same(found, expected, rtol):
  assert_same_gradient(found[0], expected[0], rtol)
  one, other = values(found[1]), values(expected[1])
  assert one.keys() == other.keys()
  for name in other:
    assert one[name] == pytest.approx(other[name], rel=10 * rtol, abs=10 * rtol), name
  # Not only the mean: what it is divided by, too.
  chex.assert_trees_all_close(found[1], expected[1], rtol=10 * rtol, atol=10 * rtol)


def off_policy(aggregation="token_mean", **changes):
  return dataclasses.replace(tiny.off_policy_config(aggregation, 4), mini_batches=2, tis_sequence_bound=1.3, **changes)


def uneven():
  """16 rows of 0 to 6 tokens, three without any, two of them not real."""
  data = tiny.toy_batch(rows=16)
  data = data.replace(mask=data.mask.at[9].set(False), real=data.real.at[jnp.asarray([1, 9])].set(False))
  assert jnp.sum(~data.mask.any(1)) == 2
  return data


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_gradient_and_metrics_are_those_of_whole_rows(aggregation, x64):
  """Two mini-batches; each in micro-batches of one length and of three, of which some hold fills."""
  data, step_config = uneven(), off_policy(aggregation)
  plan = plan_of(data, step_config, 30, 0)  # 5, 3, 3 rows
  fills = [np.asarray(rows)[~np.asarray(real)] for update in (0, 1) for _, rows, real in contents(plan, update)]
  assert any(data.mask[rows].any() and data.real[rows].any() for rows in fills), "rows that are trained would count twice"
  assert all(part.count.sum() > 0 for part in plan)
  for which in range(len(tiny.POLICY_LOSSES)):
    assert_same(stepped(data, step_config, plan, which), stepped(data, step_config, None, which), 1e-12)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_the_mask_and_in_fills(garbage):
  """The longest row of a micro-batch is what fills it up: with garbage behind its last token, and everywhere in rows that train nothing."""
  data, step_config = uneven(), off_policy()
  plan = plan_of(data, step_config, 30, 0)

  def spoilt(x):
    mask = data.mask.reshape(data.mask.shape + (1,) * (x.ndim - 2))
    return jnp.where(mask, x, jnp.asarray(garbage, x.dtype))

  names = ("advantages", "sampling_logp", "old_logp", "ref_logp", "ref_logp_topk", "ref_log_tail", "old_values", "returns")
  found = stepped(data.replace(**{name: spoilt(getattr(data, name)) for name in names}), step_config, plan)
  expected = stepped(data, step_config, plan)
  chex.assert_trees_all_equal(found[0], expected[0])
  assert values(found[1]) == values(expected[1])


def test_of_nothing_comes_nothing():
  data, step_config = uneven(), off_policy()
  plan = plan_of(data, step_config, 30, 0)
  grads, metrics = stepped(data.replace(mask=jnp.zeros_like(data.mask)), step_config, plan)
  assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
  assert values(metrics)["empty_updates"] == 1 and values(metrics)["ratio_max"] == -np.inf


def test_nothing_compiles_again_while_lengths_change():
  step_config, counts, sizes = off_policy(), set(), set()
  for seed in range(3):
    data = with_lengths(np.random.default_rng(seed).integers(0, 7, 16) if seed else np.full(16, 6), uneven())
    plan = plan_of(data, step_config, 30, seed)
    counts.add(tuple(part.count.tobytes() for part in plan))
    stepped(data, step_config, plan)
    sizes.add(_step._cache_size())
  assert len(counts) == 3 and len(sizes) == 1


def test_logits_held_at_a_time():
  """128 logits of 16 ids are 8 positions: 4 of each of two rows, 8 of one."""
  chunks = []

  def stats(*args, chunk, **settings):
    chunks.append((len(args[0]), chunk))
    return token_stats(*args, chunk=chunk, **settings)

  data = with_lengths([3, 0, 6, 5, 1, 2, 6, 4])
  score = functools.partial(score_step, model=tiny.toy_model, config=tiny.config(stats=stats, head_logits=128))
  jax.eval_shape(score, tiny.toy_params(), (), data, None, plan_of(data))
  assert {(2, 4), (1, 8)} <= set(chunks)


def test_scores_and_values_stand_where_they_belong():
  """Without a plan every position has its number; with one, those up to the last trained token have the same, and zeros follow."""
  data, step_config = tiny.toy_batch(), tiny.config(topk=3, micro_batch=2)
  plan = plan_of(data)
  calls = []

  def model(*args):
    jax.debug.callback(lambda: calls.append(None))
    return tiny.toy_model(*args)

  score = jax.jit(functools.partial(score_step, model=model, config=step_config))
  value = jax.jit(functools.partial(value_step, critic=tiny.toy_critic, config=step_config))
  params = tiny.toy_params(critic=True)
  for ids in (None, data.topk_ids):
    whole, found = score(params["policy"], (), data, ids), score(params["policy"], (), data, ids, plan)
    assert whole.logp_topk.shape == found.logp_topk.shape == (8, 6, 3 if ids is None else tiny.TOPK)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole)):
      np.testing.assert_allclose(one[data.mask], other[data.mask], rtol=1e-6, atol=1e-6)
      assert not np.any(one[1, 2:])  # the row without a trained token is read to 2 tokens
  assert np.all(np.asarray(whole.logp) < 0)
  jax.effects_barrier()
  assert len(calls) == 2 * (4 + len(contents(plan))), "no forward of nothing but fills"
  whole, found = value(params["value"], (), data), value(params["value"], (), data, plan)
  np.testing.assert_allclose(found[data.mask], whole[data.mask], rtol=1e-6)
  expected = tiny.toy_values(params["value"], data.tokens)
  np.testing.assert_allclose(whole[3], expected[3, data.prompt_length[3] - 1 :][:6], rtol=1e-6)
