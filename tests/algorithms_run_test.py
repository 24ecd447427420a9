"""Every algorithm through the loop of a run, on a model of one layer: what is said and logged, what is scored, resume bit for bit."""

import dataclasses
import functools
import json
import types

import chex
import jax
import numpy as np
import pytest

from emapg_jax.checkpoint import Checkpointer, HostState
from emapg_jax.config import RunConfig
from emapg_jax.envs.embedded import AddTask
from emapg_jax.presets import ALGORITHMS
from emapg_jax.types import RolloutBatch, TokenStats
from experiments import loop, report, rl_step, rollouts
from experiments.build import Run, build

SMALL = {
  **{"task": "add", "digits": 1, "dtype": "float32", "steps": 3, "prompts_per_step": 4, "group_size": 4, "remat": "none"},
  **{"max_prompt_tokens": 8, "max_new_tokens": 8, "hidden_size": 8, "num_heads": 1, "num_layers": 1, "learning_rate": 1e-2},
  **{
    "kl": "k3pp",
    "kl_topk": 0,
    "kl_coef": 0.05,
    "ema_decay": 0.7,
    "ema_period": 1,
    "keep_initial": "off",
    "eval_every": 0,
    "samples_logged": 0,
  },
}
REVERSE, FORWARD = {"kl": "topk_reverse", "kl_topk": 4}, {"kl": "topk_forward", "kl_topk": 4}
ADAPTIVE = {"algorithm": "grpo", "kl_placement": "reward", "kl_target": 1e-6, "kl_gain": 0.5} | REVERSE


@pytest.fixture(autouse=True)
def low_digits(monkeypatch):
  """A score that a model with random weights earns now and then, so that some groups differ and some don't."""
  monkeypatch.setattr(AddTask, "score", lambda _, problem, response: float(sum(s in "01234" for s in response.split()) >= 4))


_compiled = {}


@functools.cache
def _built(changes):
  run = build(RunConfig(**SMALL | dict(changes)))
  key = (run.step_config.micro_batch, run.step_config.topk, run.needs_old_pass, run.sampler.slots, run.sampler.prompts)
  return dataclasses.replace(run, **{name: _compiled.setdefault((name, *key), getattr(run, name)) for name in ("sampler", "score")})


def built(**changes) -> Run:
  """A run of these settings; one for all tests, so that it compiles once, and with what runs have in common from the first of them."""
  return _built(tuple(changes.items()))


def train(run: Run, workdir, **changes):
  """Runs on, with `steps` or `save_every` changed; the state and host state that were saved, and the metrics without those of a clock."""
  config = dataclasses.replace(run.config, workdir=str(workdir), **{"save_every": run.config.steps} | changes)
  loop.train(dataclasses.replace(run, config=config), workdir)
  with Checkpointer(str(workdir / "checkpoints"), 1) as checkpointer:
    state, host = checkpointer.restore_latest(run.abstract_state)
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()[1:]]
  clock = ("seconds_", "tokens_per_second")
  return jax.device_get(state), host, [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]


HEADERS = {
  "grpo": "advantage group_normalized · loss ppo_clip (1 − 0.2 to 1 + 0.28) · aggregation token_mean · 1 × 2 updates per RL step",
  "dr_grpo": "advantage group_centred · loss ppo_clip (1 − 0.2 to 1 + 0.2) · aggregation fixed_length · 1 × 2 updates per RL step",
  "dapo": "advantage group_normalized · loss ppo_clip (1 − 0.2 to 1 + 0.28) · aggregation token_mean · 1 × 2 updates per RL step"
  " · dynamic sampling, at most 4 more batches · over-long penalty on the last 20% of 8 tokens",
  "rloo": "advantage leave_one_out · loss reinforce · aggregation sequence_sum · 1 × 1 updates per RL step",
  "reinforce": "advantage reward_to_go · loss reinforce · aggregation sequence_sum · 1 × 1 updates per RL step",
  "ppo": "advantage gae · loss ppo_clip (1 − 0.2 to 1 + 0.2) · aggregation token_mean · 1 × 2 updates per RL step"
  " · critic at rate 1e-05, γ 1, λ 0.95",
  "cispo": "advantage group_normalized · loss cispo (1 − 1 to 1 + 4) · aggregation token_mean · 1 × 2 updates per RL step",
  "gspo": "advantage group_normalized · loss gspo (1 − 0.0003 to 1 + 0.0004) · aggregation sequence_mean · 1 × 2 updates per RL step",
}
ALWAYS = {
  *("score_mean", "reward_mean", "reward_std", "solve_none", "solve_all", "solve_some", "degenerate", "response_length", "learning_rate"),
  *("truncated_fraction", "loss", "policy_loss", "kl", "entropy", "ratio", "ratio_max", "clip_fraction_low", "clip_fraction_high"),
  *("grad_norm", "update_norm", "bad_updates", "anchor_distance", "advantage_mean", "advantage_std", "advantage_max"),
  *("sampler_ratio", "sampler_ratio_max", "sampler_kl"),
}
CRITIC = {"value_loss", "value_clip_fraction", "value_mean", "value_grad_norm", "value_update_norm"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset_says_what_it_is_and_trains(algorithm, tmp_path, capsys):
  run = built(algorithm=algorithm)
  report.header(run, tmp_path)
  assert f"policy gradient: {algorithm}: {HEADERS[algorithm]}\n" in capsys.readouterr().out
  state, host, lines = train(run, tmp_path, steps=2)
  assert [line["step"] for line in lines] == [1, 2]
  for line in lines:
    assert np.isfinite(list(line.values())).all()
    assert line.keys() >= ALWAYS
    assert line["grad_norm"] > 0 and line["update_norm"] > 0 and line["bad_updates"] == 0
    assert line["ratio_max"] > 0 and line["sampler_ratio"] == pytest.approx(1, abs=1e-5)
  assert lines[1]["kl"] > 0
  assert (lines[0].keys() >= CRITIC) == (algorithm == "ppo")
  assert ("baseline" in lines[0]) == (algorithm == "reinforce")
  assert host.position == sum(line.get("groups_sampled", 4) for line in lines)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.policy, state.ema_params)
  assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce"])
def test_a_step_of_one_update_is_strictly_on_policy(algorithm, tmp_path):
  """No old pass, and a ratio of 1, not nearly so."""
  run, scored = built(algorithm=algorithm), []
  assert not run.needs_old_pass

  def score(*args):
    scored.append(args)
    return run.score(*args)

  lines = train(dataclasses.replace(run, score=score), tmp_path)[2]
  assert len(scored) == 3, "the anchor, once a step"
  assert [(line["ratio"], line["ratio_max"], line["clip_fraction_low"], line["clip_fraction_high"]) for line in lines] == [(1, 1, 0, 0)] * 3
  # Sampler against trainer is measured on what the update computes anyway.
  assert all(line["sampler_kl"] < 1e-9 and line["sampler_ratio_max"] == pytest.approx(1, abs=1e-5) for line in lines)


@pytest.mark.parametrize(
  "changes",
  [{"algorithm": "reinforce"}, {"algorithm": "ppo"}, {"algorithm": "dapo"}, ADAPTIVE],
  ids=["reinforce", "ppo", "dapo", "adaptive"],
)
def test_resume_is_bit_exact(changes, tmp_path, capsys):
  run = built(**changes)
  state, host, lines = train(run, tmp_path / "whole", steps=4)
  train(run, tmp_path / "resumed", steps=2)
  resumed, resumed_host, resumed_lines = train(run, tmp_path / "resumed", steps=4)
  assert "resumed at step 2" in capsys.readouterr().out
  chex.assert_trees_all_equal(resumed, state)  # policy, anchor, optimizer; and of ppo the critic with its own
  assert resumed_lines == lines
  assert dataclasses.replace(resumed_host, flags={}) == dataclasses.replace(host, flags={})
  assert (host.baseline is not None, host.kl_coef is not None) == (changes["algorithm"] == "reinforce", "kl_target" in changes)


@pytest.mark.parametrize(
  ("changes", "logged", "kept"),
  [({"kl_target": 0.0, "kl_gain": 0.1}, None, None), ({"kl_coef": 0.5}, 0.5, 0.55)],  # the KL is above its target: 0.5 · (1 + 0.5 · 0.2)
  ids=["fixed again", "another start"],
)
def test_a_coefficient_set_by_hand_on_resume_is_not_the_adapted_one(changes, logged, kept, tmp_path):
  _, host, _ = train(built(**ADAPTIVE), tmp_path, steps=2)
  assert host.kl_coef not in (None, 0.05)
  _, host, lines = train(built(**ADAPTIVE), tmp_path, steps=3, override=tuple(changes), **changes)
  assert lines[2].get("kl_coef") == logged
  assert host.kl_coef == (kept and pytest.approx(kept))


def test_a_critic_is_neither_added_nor_dropped_on_resume(tmp_path):
  train(built(algorithm="grpo"), tmp_path, steps=1)
  now = built(algorithm="ppo")
  differing = ("algorithm", "advantage", "clip_high", "kl_coef")
  with pytest.raises(ValueError, match="--advantage was group_normalized, is now gae: only gae has a critic"):
    train(now, tmp_path, override=differing)


def test_a_resumed_run_saves_its_end_whatever_save_every_says(tmp_path):
  train(built(algorithm="grpo"), tmp_path, steps=1)
  state, _, lines = train(built(algorithm="grpo"), tmp_path, steps=2, save_every=0)
  assert int(state.step) == 2 and len(lines) == 2


def test_the_critic_and_its_optimizer_are_in_the_checkpoint(tmp_path):
  state, _, lines = train(built(algorithm="ppo"), tmp_path)
  assert state.params.keys() == {"policy", "value"}
  assert set(state.opt_state.inner_states) == {"policy", "value"}
  counts = {name: optax_count(inner) for name, inner in state.opt_state.inner_states.items()}
  assert counts == {"policy": 6, "value": 6}
  # It began as a copy of the policy with a head of zeros: what it says is 0 at first, and then something.
  assert lines[0]["value_mean"] == 0
  assert lines[2]["value_mean"] != 0
  assert np.abs(state.params["value"]["head"]["kernel"]).max() > 0


def optax_count(state):
  """The counter of AdamW, wherever in the state it lies."""
  (count,) = {int(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state) if getattr(path[-1], "name", "") == "count"}
  return count


def test_the_baseline_is_a_running_mean_of_the_steps_before(tmp_path):
  _, host, lines = train(built(algorithm="reinforce"), tmp_path)
  first, second, third = (line["reward_mean"] for line in lines)
  means = [first, 0.9 * first + 0.1 * second]
  assert len({first, second, third}) == 3
  np.testing.assert_allclose([line["baseline"] for line in lines], [0.0, *means], rtol=1e-6)
  assert host.baseline == pytest.approx(0.9 * means[1] + 0.1 * third, rel=1e-12)
  # Rewards of 0 and of 1 are among those of each step, and every token has what its response has.
  for line, baseline in zip(lines, [0.0, *means]):
    assert line["advantage_max"] == pytest.approx(max(baseline, 1 - baseline), rel=1e-6)


def test_the_kl_coefficient_follows_its_target(tmp_path):
  """At first the KL to the anchor is 0, below the target; from then on above it: 0.9 and then 1.1 times, for gain 0.5 and a fifth of it."""
  _, host, lines = train(built(**ADAPTIVE), tmp_path)
  assert lines[0]["kl"] < 0.8e-6 and min(lines[1]["kl"], lines[2]["kl"]) > 1.2e-6
  np.testing.assert_allclose([line["kl_coef"] for line in lines], [0.05, 0.045, 0.0495], rtol=1e-6)
  assert host.kl_coef == pytest.approx(0.05445, rel=1e-12)


@pytest.mark.parametrize("changes", [{"algorithm": "ppo", "kl_placement": "reward"}, ADAPTIVE], ids=["ppo", "grpo"])
def test_kl_in_the_reward(changes, tmp_path, capsys):
  run = built(**changes)
  report.header(run, tmp_path)
  assert "EMA anchor, half-life 1.9 RL steps, in the reward (η=0.7 every 1 steps)" in capsys.readouterr().out
  lines = train(run, tmp_path)[2]
  for line in lines:
    assert np.isfinite(list(line.values())).all()
    assert line.keys() >= ALWAYS
    # In the loss of the policy there is no KL.
    assert line["policy_loss"] == pytest.approx(line["loss"], rel=1e-5)
  # Before the first step policy and anchor are one. (The KL in the loss of a step of two updates is above 0 already.)
  assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)
  assert lines[2]["kl"] > 1e-6


def drifted(run: Run, by) -> Run:
  """The run with a sampler whose log-probabilities of rows 0, 2, 4… are off by `by[0]`, of the others by `by[1]`."""

  def generate(*args):
    out = run.sampler.generate(*args)
    return dataclasses.replace(out, sampling_logp=out.sampling_logp + np.resize(np.float32(by), len(out.logp))[:, None])

  return dataclasses.replace(run, sampler=types.SimpleNamespace(generate=generate, between_blocks=None))


def test_old_log_probabilities_of_the_sampler(tmp_path):
  run = built(old_logp="sampler", epochs=2, lr_schedule="linear", lr_warmup_steps=1, decay_steps=3)
  assert not (run.step_config.on_policy or run.needs_old_pass)
  lines = train(drifted(run, (-0.5, -0.5)), tmp_path)[2]
  # 2 epochs of 2 mini-batches. Steps 1 and 2 at the peak, step 3, the second of two to 0, at a half.
  np.testing.assert_allclose([line["learning_rate"] for line in lines], [1e-2, 1e-2, 0.5e-2], rtol=1e-6)
  for line in lines:
    assert np.isfinite(list(line.values())).all()
    # The trainer's over the sampler's, of the first update alone, as the later ones are of another policy: e^0.5.
    assert line["sampler_ratio"] == pytest.approx(1.6487213, rel=1e-4)
    assert line["sampler_ratio_max"] == pytest.approx(1.6487213, rel=1e-4)
    assert line["ratio"] > 1.4, "it starts there, not at 1"


def test_truncated_importance_sampling_and_a_schedule_of_updates(tmp_path):
  run = built(epochs=2, tis_cap=1.5, tis_sequence_bound=2.0, lr_schedule="cosine", lr_unit="update", lr_warmup_steps=4, decay_steps=12)
  state, _, lines = train(drifted(run, (-0.5, 1.0)), tmp_path)
  assert optax_count(state.opt_state) == 12
  # The last of the four updates of a step is number 4, 8 and 12: the peak, then (1 + cos πx) / 2 at x = 3/8 and 7/8.
  np.testing.assert_allclose([line["learning_rate"] for line in lines], [1e-2, 0.69134172e-2, 0.03806023e-2], rtol=1e-5)
  for line in lines:
    # Ratios of e^0.5 = 1.65, within a factor of 2 and above the cap; and of 1/e, which is not.
    assert line["tis_masked"] == 0.5
    assert (line["tis_weight"], line["tis_capped"]) == (1.5, 1.0)
    assert line["ratio"] == pytest.approx(1, abs=0.2), "of the trainer's own old log-probabilities"


def test_truncated_importance_sampling_of_a_faithful_sampler_changes_nothing(tmp_path):
  run = built(epochs=2, tis_cap=1.5, tis_sequence_bound=2.0, lr_schedule="cosine", lr_unit="update", lr_warmup_steps=4, decay_steps=12)
  for line in train(run, tmp_path)[2]:
    assert line["tis_weight"] == pytest.approx(1, abs=1e-5)
    assert (line["tis_capped"], line["tis_masked"]) == (0, 0)


@pytest.mark.parametrize(
  ("settings", "ratios", "clipped"),
  [
    ({"algorithm": "grpo"}, [0.79, 0.81, 1.27, 1.29, 99.0], ["low", None, None, "high", None]),
    ({"algorithm": "grpo", "dual_clip": 3.0}, [0.79, 0.81, 1.27, 1.29, 3.1], ["low", None, None, "high", "dual"]),
    ({"algorithm": "dr_grpo"}, [0.79, 0.81, 1.19, 1.21, 99.0], ["low", None, None, "high", None]),
    ({"algorithm": "ppo", "clip_low": 0.1, "clip_high": 0.3}, [0.89, 0.91, 1.29, 1.31, 99.0], ["low", None, None, "high", None]),
    ({"algorithm": "gspo"}, [0.9996, 0.9998, 1.0003, 1.0005, 99.0], ["low", None, None, "high", None]),
    ({"algorithm": "cispo"}, [1e-3, 0.5, 4.9, 5.1, 4.9], [None, None, None, "high", None]),
    ({"algorithm": "cispo", "clip_low": 0.5}, [0.49, 0.51, 4.9, 5.1, 4.9], ["low", None, None, "high", None]),
    ({"algorithm": "rloo"}, [0.1, 0.5, 2.0, 9.0, 9.0], [None] * 5),
  ],
)
def test_clip_bounds_reach_the_policy_loss(settings, ratios, clipped):
  """Rows of one token with the advantages −1 −1 1 1 −1: below and above the lower bound, and the upper, and one for the dual clip."""
  loss = build(RunConfig(**SMALL | settings)).step_config.policy_loss
  advantages, mask = np.float32([[-1], [-1], [1], [1], [-1]]), np.ones((5, 1), bool)
  _, aux = loss(np.log(np.float32(ratios))[:, None], np.zeros((5, 1), np.float32), advantages, mask)
  found = {"low": aux.clipped_low, "high": aux.clipped_high, "dual": aux.dual_clipped}
  for name, where in found.items():
    assert np.ravel(where).tolist() == [name == each for each in clipped], name


class Scored:
  """A run whose models are names: what is scored with which ids, by `score_batch`."""

  def __init__(self, monkeypatch, **changes):
    self.run = build(RunConfig(**SMALL | changes))
    self.calls = []
    state = types.SimpleNamespace(policy="policy", ema_params="anchor", params={"policy": "policy", "value": "critic"})
    bare = RolloutBatch(**{field.name: None for field in dataclasses.fields(RolloutBatch)} | {"topk_ids": "sampler's"})
    functions = {"score": self._score, "policy_kl": self._policy_kl, "value": self.run.value and self._value, "credit": None}
    run = dataclasses.replace(self.run, **functions)
    initial = "initial" if run.keep_initial else None
    monkeypatch.setattr(rl_step.anchor, "on_device", lambda name: name)
    self.batch, self.numbers = rl_step.score_batch(run, state, initial, bare, None)

  def _score(self, params, frozen, batch, ids=None, plan=None):
    self.calls.append((params, ids))
    own = f"{params}'s"
    return TokenStats(own, own, own, ids or own, own, own)

  def _policy_kl(self, stats, ref, batch):
    return stats.logp, ref.logp, ref.topk_ids

  def _value(self, params, frozen, batch, plan=None):
    return params


ON_POLICY = {"mini_batches": 1}
K3 = {"kl": "k3"}


@pytest.mark.parametrize(
  ("changes", "calls"),
  [
    (ON_POLICY | {"kl_coef": 0.0}, []),
    ({"kl_coef": 0.0}, [("policy", None)]),
    (ON_POLICY | K3, [("anchor", "sampler's")]),
    (K3 | {"old_logp": "sampler"}, [("anchor", "sampler's")]),
    (ON_POLICY | K3 | {"epochs": 2}, [("policy", None), ("anchor", "policy's")]),
    (ON_POLICY | K3 | {"old_logp": "sampler", "kl_placement": "reward"}, [("policy", None), ("anchor", "policy's")]),
    (REVERSE, [("policy", None), ("anchor", "policy's")]),
    # Where the policy need not be scored, the sampler has said which ids are its most likely.
    (ON_POLICY | REVERSE, [("anchor", "sampler's")]),
    (REVERSE | {"old_logp": "sampler"}, [("anchor", "sampler's")]),
    (ON_POLICY | REVERSE | {"kl_topk_ids": "anchor"}, [("anchor", None)]),
    (ON_POLICY | FORWARD, [("anchor", None)]),
    (FORWARD, [("anchor", None), ("policy", "anchor's")]),
    (ON_POLICY | FORWARD | {"kl_topk_ids": "policy"}, [("anchor", "sampler's")]),
    (FORWARD | {"kl_topk_ids": "policy"}, [("policy", None), ("anchor", "policy's")]),
    (ON_POLICY | {"kl_coef": 0.0, "keep_initial": "on"}, [("policy", None), ("initial", "policy's")]),
    (ON_POLICY | FORWARD | {"keep_initial": "on"}, [("anchor", None), ("policy", "anchor's"), ("initial", "anchor's")]),
    (REVERSE | {"algorithm": "ppo"}, [("policy", None), ("anchor", "policy's")]),
  ],
)
def test_what_is_scored_and_on_whose_ids(monkeypatch, changes, calls):
  found = Scored(monkeypatch, **changes)
  assert found.calls == calls
  models = [model for model, _ in calls]
  assert found.batch.old_logp == ("policy's" if "policy" in models else None)
  assert found.batch.ref_logp == found.batch.ref_logp_topk == found.batch.ref_log_tail == ("anchor's" if "anchor" in models else None)
  if found.run.step_config.topk:
    owner = "sampler" if found.run.sampling.report_topk else found.run.config.topk_owner
    assert found.batch.topk_ids == f"{owner}'s"
  owner = "anchor's" if "anchor" in models else "policy's"
  assert found.numbers == ({"kl_initial": ("policy's", "initial's", owner)} if "initial" in models else {})
  assert found.batch.old_values == ("critic" if found.run.config.uses_critic else None)


class Enough(Exception):
  """Raised by a step that is not to be done."""


def test_the_kl_in_a_normalised_reward_is_divided_like_the_reward(monkeypatch):
  """0.05 in units of reward is 0.2 in units of a quarter of it; the coefficient itself, which the target adapts, stays."""
  monkeypatch.setattr(rollouts, "sample_groups", lambda *_: None)
  monkeypatch.setattr(rollouts, "to_batch", lambda *_: ({}, {"reward_scale": 0.25}))
  seen = []

  def score_batch(run, state, initial, batch, settings, plan):
    seen.append(settings)
    return batch, {}

  def train_step(state, frozen, batch, settings, plan):
    seen.append(settings)
    raise Enough

  monkeypatch.setattr(rl_step, "score_batch", score_batch)
  run = build(RunConfig(**SMALL | {"advantage": "batch_normalized", "kl_placement": "reward"}))
  with pytest.raises(Enough):
    rl_step.rl_step(dataclasses.replace(run, train_step=train_step), types.SimpleNamespace(policy=None), HostState(), None, None, 1)
  np.testing.assert_allclose([settings.kl_coef for settings in seen], [0.2, 0.05], rtol=1e-6)
