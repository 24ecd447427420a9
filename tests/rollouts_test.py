"""Groups that are sampled, kept, filled up and dropped, and what becomes of them as batch and metrics; no model samples anything here."""

import types

import jax
import numpy as np
import pytest

from emapg_jax import data
from emapg_jax.config import RunConfig
from emapg_jax.envs.task import Problem
from experiments import rollouts

NAN = float("nan")
SPREAD, FLAT, SOLVED = (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)
LONGEST = 8


class Fake:
  """A run of which each call for responses gives the next scripted batch: a score, and a length, for every row of every group.

  Response i of all that were sampled consists of token i, and its text is `i`; its prompt is the row of the problem, of 1 or 2 tokens.
  """

  def __init__(self, monkeypatch, scores, lengths=None, ended=None, **changes):
    group_size = len(scores[0][0])
    prompts = {"prompts_per_step": len(scores[0]), "group_size": group_size}
    self.config = RunConfig(task="add", max_new_tokens=LONGEST, mini_batches=1, **prompts | changes)
    self.rollout_weights, self.sampling = (lambda params: f"prepared {params}"), "as in training"
    self.tokenizer = types.SimpleNamespace(decode=lambda ids: str(ids[0]) if ids else "")
    self.train, self.task = None, types.SimpleNamespace(score_batch=self._score)
    self.stream = data.PromptStream(50, seed=0)
    self.keys, self.laps, self.texts = [], [], []
    self._scores, self._sampled = [np.ravel(batch) for batch in scores], 0
    self._lengths, self._ended = lengths or [3] * len(self._scores[0]), ended
    monkeypatch.setattr(rollouts, "respond", self._respond)

  def _respond(self, run, weights, prompts, rows, keys, sampling):
    assert (run, weights, prompts, sampling) == (self, "prepared policy", self.train, "as in training")
    self.keys.append(np.asarray(jax.random.key_data(keys)))
    ids = self._sampled + np.arange(len(rows), dtype=np.int32)
    self._sampled += len(rows)
    length = np.resize(np.asarray(self._lengths, np.int32), len(rows))
    return rollouts.Responses(
      problems=[Problem(str(row)) for row in rows],
      prompts=np.full((len(rows), 2), 7, np.int32),
      prompt_length=1 + np.asarray(rows, np.int32) % 2,
      tokens=np.tile(ids[:, None], (1, LONGEST)),
      length=length,
      sampling_logp=-np.tile(ids[:, None], (1, LONGEST)).astype(np.float32),
      topk_ids=np.tile(ids[:, None, None], (1, LONGEST, 2)),
      reason=np.where(np.resize(np.asarray(self._ended or [1]), len(rows)), np.resize(["eos", "stop"], len(rows)), "length"),
    )

  def _score(self, problems, texts):
    assert len(problems) == len(texts)
    self.texts.append(texts)
    return self._scores.pop(0)

  def sample(self):
    return rollouts.sample_groups(self, "policy", self.stream, 1, self.laps.append)

  def batch(self):
    groups = self.sample()
    return groups, *rollouts.to_batch(self, groups)


def test_without_dynamic_sampling_there_is_one_try_and_every_row_is_kept(monkeypatch):
  run = Fake(monkeypatch, [[FLAT, SPREAD, SOLVED]])
  groups, _, metrics = run.batch()
  assert groups.kept.tolist() == list(range(6))
  assert run.stream.position == 3
  assert run.laps == ["rollout", "reward"]
  assert run.texts == [[str(i) for i in range(6)]]
  assert "groups_sampled" not in metrics and "groups_filled" not in metrics
  assert metrics["degenerate"] == 2 / 3


@pytest.mark.parametrize(
  ("scores", "useful"),
  [
    ([0.0] + [0.95] * 7, True),
    ([0.1] * 8, False),  # whatever their float mean is
    ([0.0] * 8, False),
    ([NAN] + [1.0] * 7, False),
    ([NAN] + [1.0] * 6 + [0.0], True),
    ([NAN] * 7 + [1.0], False),
    ([NAN] * 8, False),
  ],
)
def test_a_group_is_kept_or_replaced_as_a_whole(monkeypatch, scores, useful):
  differs = [1.0] + [0.0] * 7
  run = Fake(monkeypatch, [[scores, differs], [differs, differs]], dynamic_sampling=True)
  groups, batch, _ = run.batch()
  # Rows 0–7 and 8–15 are the first batch; without the first group the one of rows 16–23 takes its place, and that of 24–31 is not needed.
  assert groups.kept.tolist() == (list(range(16)) if useful else list(range(8, 24)))
  assert run.stream.position == (2 if useful else 4)
  assert batch.tokens[np.arange(16), batch.prompt_length].tolist() == groups.kept.tolist()
  assert np.unique(groups.group_ids[groups.kept]).size == 2


def test_an_empty_response_counts_for_no_spread(monkeypatch):
  run = Fake(monkeypatch, [[(0.0, 1.0, 1.0), (1.0, 0.0, 1.0)]] * 2, lengths=[0, 3, 3], dynamic_sampling=True)
  # Of the first group only (1, 1) counts, of the second (0, 1).
  assert run.sample().kept.tolist() == [3, 4, 5, 9, 10, 11]


def test_no_more_tries_than_needed_and_what_is_too_much_is_dropped(monkeypatch):
  tries = [[FLAT, SPREAD, FLAT], [SPREAD, FLAT, FLAT], [FLAT, SPREAD, SPREAD]]
  run = Fake(monkeypatch, [*tries, [SPREAD] * 3], dynamic_sampling=True, max_refills=9)
  groups, batch, metrics = run.batch()
  # Groups 1, 3, 7 and 8 of the nine are useful, and three are wanted.
  assert groups.kept.tolist() == [2, 3, 6, 7, 14, 15]
  assert len(groups.scores) == 18
  assert run.stream.position == 9
  assert run.laps == ["rollout", "reward"] * 3
  assert batch.mask.shape[0] == 6
  assert (metrics["groups_sampled"], metrics["groups_filled"]) == (9, 0.0)


@pytest.mark.parametrize("refills", [1, 3])
def test_tries_end_and_flat_groups_fill_the_batch_up(monkeypatch, refills):
  run = Fake(monkeypatch, [[FLAT, FLAT, SPREAD]] + [[SOLVED] * 3] * 9, dynamic_sampling=True, max_refills=refills)
  groups, batch, metrics = run.batch()
  assert groups.kept.tolist() == [4, 5, 0, 1, 2, 3]
  assert run.stream.position == 3 * (1 + refills)
  assert batch.mask.shape[0] == 6
  assert metrics["groups_sampled"] == 3 * (1 + refills)
  assert metrics["groups_filled"] == pytest.approx(2 / 3)
  # What fills it up trains nothing.
  np.testing.assert_array_equal(batch.advantages[2:], 0)
  assert np.all(batch.advantages[:2] != 0)


def test_every_prompt_and_every_draw_is_another_one(monkeypatch):
  run = Fake(monkeypatch, [[FLAT, SPREAD]] * 20, dynamic_sampling=True, max_refills=3)
  first, second = run.sample(), run.sample()
  assert first.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
  assert second.group_ids.tolist() == [4, 4, 5, 5, 6, 6, 7, 7], "the stream goes on behind all that was drawn"
  keys = np.concatenate(run.keys)
  assert len(np.unique(keys, axis=0)) == len(keys) == 16
  # A prompt is the problem that the stream gives at its uid.
  rows = run.stream.indices(first.group_ids)
  assert [problem.prompt for problem in first.responses.problems] == [str(row) for row in rows]


def test_metrics_are_of_all_that_was_sampled(monkeypatch):
  run = Fake(monkeypatch, [[FLAT, SOLVED], [SPREAD, SPREAD]], lengths=[2, 4, 6, 8], ended=[1, 1, 1, 0], dynamic_sampling=True)
  groups, batch, metrics = run.batch()
  assert groups.kept.tolist() == [4, 5, 6, 7]
  # Scores 0 0 1 1 0 1 0 1: of the rows that are trained on alone no group would be solved by none or by all.
  assert metrics["score_mean"] == metrics["reward_mean"] == 0.5
  assert metrics["reward_std"] == pytest.approx(np.sqrt(8 * 0.25 / 7))
  assert (metrics["solve_none"], metrics["solve_all"], metrics["solve_some"], metrics["degenerate"]) == (0.25, 0.25, 0.5, 0.5)
  assert (metrics["response_length"], metrics["response_length_max"], metrics["truncated_fraction"]) == (5.0, 8, 0.25)
  assert metrics["unscored"] == 0
  # 2 + 4 + 6 + 8 tokens and as many prompts of 1 or 2 tokens in 4 rows of 2 + 8.
  prompts = groups.responses.prompt_length[groups.kept].sum()
  assert metrics["padded_fraction"] == pytest.approx(1 - (20 + prompts) / 40)
  assert batch.mask.sum() == 20


def test_the_batch_holds_the_kept_rows_and_nothing_of_the_others(monkeypatch):
  run = Fake(monkeypatch, [[FLAT, SPREAD], [SPREAD, FLAT]], lengths=[1, 2, 3, 5], dynamic_sampling=True, advantage="group_centred")
  groups, batch, _ = run.batch()
  assert groups.kept.tolist() == [2, 3, 4, 5]
  np.testing.assert_array_equal(batch.mask.sum(axis=1), [3, 5, 1, 2])
  np.testing.assert_array_equal(batch.advantages[:, 0], [-0.5, 0.5, -0.5, 0.5])
  np.testing.assert_array_equal(batch.sampling_logp[:, 0], [-2, -3, -4, -5])
  np.testing.assert_array_equal(batch.topk_ids[:, 0], [[2, 2], [3, 3], [4, 4], [5, 5]])
  assert batch.topk_ids.shape == (*batch.mask.shape, 2)
  np.testing.assert_array_equal(batch.prompt_length, groups.responses.prompt_length[2:6])


# Half of 8 tokens is 4: nothing up to length 4, then a quarter per token.
LENGTHS, PENALTY = [4, 5, 6, 8], [0.0, -0.25, -0.5, -1.0]


def test_the_overlong_penalty_is_part_of_the_reward_and_not_of_the_score(monkeypatch):
  run = Fake(monkeypatch, [[(1.0, 1.0, 0.0, 0.0)]], lengths=LENGTHS, overlong_share=0.5, advantage="group_centred")
  _, batch, metrics = run.batch()
  assert metrics["score_mean"] == 0.5
  # Rewards 1, 0.75, −0.5 and −1, with mean 1/16.
  assert metrics["reward_mean"] == 0.0625
  assert metrics["overlong_penalty"] == -0.4375
  np.testing.assert_allclose(batch.advantages[:, 0], np.array([1, 0.75, -0.5, -1]) - 0.0625, rtol=1e-6)
  assert metrics["reward_std"] == pytest.approx(np.std([1, 0.75, -0.5, -1], ddof=1))


def test_a_penalty_makes_no_group_useful_but_is_trained_on(monkeypatch):
  scores = [(1.0, 1.0, 1.0, 1.0)]
  run = Fake(monkeypatch, [scores, scores], lengths=LENGTHS, overlong_share=0.5, dynamic_sampling=True, max_refills=1)
  _, batch, metrics = run.batch()
  assert run.stream.position == 2, "equal scores are sampled anew, whatever the lengths"
  assert (metrics["groups_filled"], metrics["solve_all"], metrics["degenerate"]) == (1.0, 1.0, 0.0)
  assert np.all(np.diff(batch.advantages[:, 0]) < 0), "the longer, the worse"


@pytest.mark.parametrize(("share", "penalty"), [(0.2, -0.5), (0.01, 0.0), (1.0, -0.875)])
def test_the_share_is_of_the_longest_response_and_at_least_a_token(monkeypatch, share, penalty):
  # At length 7 of 8: the last 2 tokens (1.6 rounded), the last one, all eight.
  run = Fake(monkeypatch, [[SPREAD]], lengths=[7], overlong_share=share)
  assert run.batch()[2].get("overlong_penalty", 0.0) == penalty


@pytest.mark.parametrize("advantage", ["group_centred", "batch_normalized", "reward_to_go", "gae"])
def test_rows_without_a_score_or_a_token_are_not_trained_on(monkeypatch, advantage):
  run = Fake(monkeypatch, [[(NAN, 1.0, 0.0, 0.0)]], lengths=[3, 3, 0, 3], advantage=advantage)
  _, batch, metrics = run.batch()
  assert batch.mask.any(axis=1).tolist() == [False, True, False, True]
  assert metrics["unscored"] == 2
  assert metrics["score_mean"] == 0.5  # of 1 and 0
  if batch.rewards is None:
    assert np.isfinite(batch.advantages).all()
    np.testing.assert_array_equal(batch.advantages[[0, 2]], 0)
    assert batch.advantages[1, 0] == -batch.advantages[3, 0] > 0


def test_when_nothing_is_scored_the_means_are_unknown(monkeypatch):
  _, batch, metrics = Fake(monkeypatch, [[(NAN, NAN)]], overlong_share=0.5, advantage="batch_normalized").batch()
  assert not batch.mask.any()
  assert np.isnan(metrics["score_mean"]) and np.isnan(metrics["reward_mean"])
  assert (metrics["reward_std"], metrics["unscored"], metrics["reward_scale"]) == (0.0, 2, 1.0)
  np.testing.assert_array_equal(batch.advantages, 0)


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_responses_stay_in_the_statistics_of_their_group(monkeypatch, masked):
  run = Fake(monkeypatch, [[(1.0, 0.0)]], lengths=[3, 8], ended=[1, 0], mask_truncated=masked, advantage="group_centred")
  _, batch, metrics = run.batch()
  assert batch.mask.any(axis=1).tolist() == [True, not masked]
  assert batch.advantages[0, 0] == 0.5, "of a mean over both"
  assert (metrics["truncated_fraction"], metrics["score_mean"]) == (0.5, 0.5)


def test_groups_of_one_have_a_batch_to_be_compared_to(monkeypatch):
  _, batch, metrics = Fake(monkeypatch, [[(1.0,), (0.0,), (0.0,), (0.0,)]], advantage="batch_normalized").batch()
  # Mean 1/4, std sqrt((9 + 3) / 16 / 3) = 1/2.
  np.testing.assert_allclose(batch.advantages[:, 0], [1.5, -0.5, -0.5, -0.5], rtol=3e-6)
  assert metrics["reward_scale"] == pytest.approx(0.5 + 1e-6, rel=1e-9)
  assert metrics["degenerate"] == 1.0


def test_the_reward_scale_is_of_what_is_trained_on(monkeypatch):
  scores = [[FLAT, (0.5, 1.0)], [(0.5, 1.0), SOLVED]]
  run = Fake(monkeypatch, scores, dynamic_sampling=True, advantage="batch_normalized")
  _, batch, metrics = run.batch()
  # 0.5, 1, 0.5, 1: mean 3/4, std sqrt(4 / 16 / 3).
  assert metrics["reward_scale"] == pytest.approx(np.sqrt(1 / 12) + 1e-6, rel=1e-9)
  np.testing.assert_allclose(batch.advantages[:, 0], np.array([-0.25, 0.25] * 2) / metrics["reward_scale"], rtol=1e-6)


@pytest.mark.parametrize(
  ("advantage", "given"),
  [("group_normalized", False), ("leave_one_out", False), ("batch_normalized", False), ("reward_to_go", True), ("gae", True)],
)
def test_rewards_go_with_the_batch_where_credit_is_made_of_them(monkeypatch, advantage, given):
  run = Fake(monkeypatch, [[FLAT, SPREAD]], lengths=[8, 6], overlong_share=0.5, dynamic_sampling=True, max_refills=1, advantage=advantage)
  run._scores.append(np.ravel([SOLVED, SPREAD]))
  groups, batch, metrics = run.batch()
  assert groups.kept.tolist() == [2, 3, 6, 7]
  assert ("reward_scale" in metrics) == (advantage == "batch_normalized")
  if not given:
    assert batch.rewards is None
    return
  # Scores 0 1 0 1 and penalties −1 −1/2 −1 −1/2.
  np.testing.assert_array_equal(batch.rewards, np.array([-1, 0.5, -1, 0.5], np.float32))
  assert batch.rewards.dtype == np.float32
  np.testing.assert_array_equal(batch.advantages, 0)


def responses(width, ids):
  n = len(ids)
  numbers = np.asarray(ids, np.int32)
  return rollouts.Responses(
    problems=[Problem(str(i)) for i in ids],
    prompts=np.tile(numbers[:, None], (1, width)),
    prompt_length=np.full(n, width, np.int32),
    tokens=np.tile(10 * numbers[:, None], (1, 3)),
    length=numbers % 4,
    sampling_logp=np.tile(-numbers[:, None], (1, 3)).astype(np.float32),
    topk_ids=np.tile(numbers[:, None, None], (1, 3, 2)),
    reason=np.where(numbers % 2 == 0, "eos", "length"),
  )


def test_join_and_take_keep_every_column_in_step():
  joined = rollouts.join([responses(2, [1, 2]), responses(4, [3]), responses(3, [4, 5])])
  assert joined.prompts.shape == (5, 4)
  np.testing.assert_array_equal(joined.prompts[0], [1, 1, 0, 0])
  np.testing.assert_array_equal(joined.prompt_length, [2, 2, 4, 3, 3])
  rows = np.array([4, 2, 2, 0])
  taken, expected = joined.take(rows), [5, 3, 3, 1]
  np.testing.assert_array_equal(taken.tokens[:, 0], 10 * np.array(expected))
  np.testing.assert_array_equal(taken.prompts[:, 0], expected)
  np.testing.assert_array_equal(taken.sampling_logp[:, 2], -np.array(expected))
  assert taken.length.tolist() == [i % 4 for i in expected]
  np.testing.assert_array_equal(taken.topk_ids[:, 1, 1], expected)
  assert taken.reason.tolist() == ["eos" if i % 2 == 0 else "length" for i in expected]
  assert [problem.prompt for problem in taken.problems] == [str(i) for i in expected]
  assert (taken.tokens.dtype, taken.sampling_logp.dtype) == (np.int32, np.float32)


def test_a_counter_of_the_task_never_replaces_an_accuracy(monkeypatch):
  run = Fake(monkeypatch, [[(0.0, 1.0)], [(1.0, 1.0)]])
  run.config, run.eval = types.SimpleNamespace(seed=0, samples_logged=0), types.SimpleNamespace(problems=[1, 2])
  run.eval_sampling = {"sampled": 1, "greedy": 0}
  run.task.metrics = lambda: {"greedy": 77.0, "own": 3.0}
  rows, ids = np.zeros(2, int), np.zeros((2, 1), int)
  answered = rollouts.Responses([1, 2], ids, rows, ids, rows, ids, ids, rows)
  monkeypatch.setattr(rollouts, "respond", lambda *args: answered)
  found, _ = rollouts.evaluate(run, None, 0)
  assert found == {"eval_sampled": 0.5, "eval_greedy": 1.0, "eval_unscored": 0, "eval_task_greedy": 77.0, "eval_own": 3.0}
