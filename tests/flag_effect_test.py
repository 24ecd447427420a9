"""Every flag of a run does something: each is changed once, and what is built from it, or computed by what reads it, must change.

Nothing is trained. A run is built, which compiles nothing, and asked: for its compiled-in settings, an update of its optimizer, the batch
that it makes of given responses, the settings of its next step. The table names which of these must change. It is checked against the
dataclass, so that a new flag without an entry fails.
"""

import dataclasses
import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import data
from emapg_jax.checkpoint import HostState
from emapg_jax.config import RunConfig
from emapg_jax.types import Hyper
from experiments import loop, rl_step, rollouts, warmup
from experiments.build import Run, build, new_state
from experiments.build import plans as build_plans
from experiments.estimators import ESTIMATORS
from tests import tiny

DATA = pathlib.Path(__file__).parent / "data"
LLAMA, QWEN = str(DATA / "tiny_llama"), str(DATA / "tiny_qwen2")

BASE = {
  **{"task": "add", "digits": 1, "prompts_per_step": 8, "group_size": 4, "max_prompt_tokens": 8, "max_new_tokens": 8},
  **{"hidden_size": 8, "num_layers": 1, "num_heads": 2, "learning_rate": 1e-2, "kl_topk": 4, "dtype": "float32"},
}
MODEL = {"task": "arithmetic", "model_path": LLAMA, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_prompt_tokens": 64}
MATH = MODEL | {"task": "math", "digits": 2, "train_data": ("{folder}/train.jsonl",), "max_prompt_tokens": 128}
PPO = {"algorithm": "ppo"}
WARM = {"warmup_steps": 2}

# Flag: what must change, the value, and what else it takes.
PERTURBED = {
  "seed": ("keys", 1, {}),
  "task": ("prompts", "between", {"digits": 2}),
  "model_path": ("model", QWEN, MODEL),
  "train_data": ("prompts", ("{folder}/other.jsonl",), MATH),
  "eval_data": ("evaluation", ("{folder}/other.jsonl",), MATH),
  "prompts_per_step": ("sampled", 16, {}),
  "group_size": ("sampled", 8, {}),
  "max_prompt_tokens": ("model", 16, {}),
  "max_new_tokens": ("sampler", 16, {}),
  "temperature": ("sampling", 0.5, {}),
  "top_p": ("sampling", 0.8, {"truncated_sampling": True, "top_k": 4}),
  "top_k": ("sampling", 3, {"truncated_sampling": True, "top_p": 0.9}),
  "stop_strings": ("sampler", ("1",), {}),
  "rollout_slots": ("sampler", 16, {}),
  "decode_block": ("sampler", 4, {}),
  "prefill_chunk": ("sampler", 3, {}),
  "chat_template": ("prompts", "{{ messages[0]['content'] }} ->", MODEL),
  "box_instruction": ("prompts", False, MATH),
  "answer_mode": ("task", "number", MATH),
  "grading_workers": ("task", 3, MATH),
  "grading_seconds": ("task", 1.0, MATH),
  "algorithm": ("policy_loss", "rloo", {}),
  "advantage": ("batch", "leave_one_out", {}),
  "policy_loss": ("policy_loss", "gspo", {}),
  "aggregation": ("step", "sequence_mean", {}),
  "clip_low": ("policy_loss", 0.1, {}),
  "clip_high": ("policy_loss", 0.1, {}),
  "mini_batches": ("step", 4, {}),
  "dynamic_sampling": ("sampled", True, {}),
  "overlong_share": ("batch", 0.5, {}),
  "max_refills": ("sampled", 2, {"dynamic_sampling": True}),
  "dual_clip": ("policy_loss", 3.0, {}),
  "discount": ("credit", 0.9, PPO),
  "gae_lambda": ("credit", 0.9, PPO),
  "baseline_decay": ("next_host", 0.5, {"algorithm": "reinforce"}),
  "epochs": ("step", 2, {}),
  "old_logp": ("step", "sampler", {}),
  "tis_cap": ("step", 2.0, {}),
  "tis_sequence_bound": ("step", 2.0, {}),
  "entropy_coef": ("step", 0.1, {}),
  "mask_truncated": ("batch", True, {}),
  "kl": ("step", "score_topk_reverse", {}),
  "kl_topk": ("step", 5, {}),
  "kl_topk_ids": ("sampling", "anchor", {"mini_batches": 1, "keep_initial": "off"}),
  "kl_topk_approximate": ("step", True, {}),
  "kl_coef": ("hyper", 0.1, {}),
  "kl_placement": ("step", "reward", {}),
  "kl_target": ("next_host", 0.05, {}),
  "kl_gain": ("next_host", 0.2, {"kl_target": 0.05}),
  "kl_iw_low": ("step", 0.5, {}),
  "kl_iw_high": ("step", 2.0, {}),
  "ema_decay": ("hyper", 0.5, {}),
  "ema_period": ("hyper", 2, {}),
  "keep_initial": ("old_pass", "off", {"kl": "k3", "kl_topk": 0, "mini_batches": 1}),
  "learning_rate": ("optimizer", 1e-3, {}),
  "lr_schedule": ("lr_scales", "linear", {"lr_schedule": "cosine", "decay_steps": 200}),
  "lr_unit": ("lr_scales", "update", {"lr_warmup_steps": 3}),
  "lr_warmup_steps": ("lr_scales", 3, {}),
  "decay_steps": ("lr_scales", 300, {"lr_schedule": "cosine", "decay_steps": 200}),
  "adam_b1": ("optimizer", 0.5, {}),
  "adam_b2": ("optimizer", 0.9, {}),
  "adam_mu_dtype": ("optimizer", "bfloat16", {}),
  "weight_decay": ("optimizer", 0.1, {}),
  "clip_norm": ("optimizer", 2.0, {}),
  "micro_batch": ("step", 1, {}),
  "micro_tokens": ("plans", 16, {}),
  "shared_prefix": ("step", "on", {}),
  "critic_learning_rate": ("optimizer", 1e-3, PPO),
  "critic_weight_decay": ("optimizer", 0.1, PPO),
  "critic_clip_norm": ("optimizer", 2.0, PPO),
  "value_clip": ("step", 0.1, PPO),
  "max_bad_steps": ("stops", 4, {}),
  "warmup_steps": ("warmed_up", 1, WARM),
  "warmup_accuracy": ("warmed_up", 0.4, WARM),
  "warmup_learning_rate": ("warmed_up", 1e-2, WARM),
  "warmup_batch": ("demonstrations", 128, WARM),
  "demonstration_noise": ("demonstrations", 0.5, {}),
  "digits": ("prompts", 2, {}),
  "hidden_size": ("state", 16, {}),
  "num_layers": ("state", 2, {}),
  "num_heads": ("model", 4, {}),
  "eval_every": ("evaluation", 0, {}),
  "eval_temperature": ("sampling", 0.5, {}),
  "eval_top_p": ("sampling", 0.5, {}),
  "eval_top_k": ("sampling", 5, {}),
  "eval_problems": ("evaluation", 10, {}),
  "samples_logged": ("evaluation", 3, {}),
  "mesh": ("mesh", "data:4,fsdp:2", {}),
  "rollout_mesh": ("rollout_mesh", "data:4,tensor:2", {"hidden_size": 12}),
  "dtype": ("model", "bfloat16", {}),
  "remat": ("model", "none", {}),
  "param_dtype": ("state", "bfloat16", {}),
  "anchor_memory": ("state", "pinned_host", {}),
}
# Refused where it acts: the changed value, and the text of the error.
REFUSED = {"overlong_prompts": ("error", r"1 of 3 prompts are longer than 128 tokens", MATH)}
# Only a whole run shows them.
ELSEWHERE = {
  "workdir": "where a run writes: run_test, all of it",
  "steps": "when a run ends: run_test, test_what_a_run_leaves",
  "save_every": "which checkpoints there are: run_test, test_what_a_run_leaves",
  "keep_last": "which of them stay: checkpoint_test",
  "keep_best": "which of them stay beside those, and are saved when none is due: retention_test",
  "best_metric": "by what: retention_test, test_the_best_survive_a_resume_and_another_metric_has_its_own_best",
  "init_from": "where the weights come from: init_from_test, all of it",
  "init_anchor": "and the anchor's: init_from_test, test_a_given_checkpoint_with_its_anchor",
  "truncated_sampling": "whether top_p and top_k are accepted: config_test, test_refused",
  "profile_steps": "which steps are traced: profiling_test",
  "override": "what may differ on resume: checkpoint_test, test_override_accepts_what_it_names_and_only_that",
}


def test_table_is_complete():
  tables = (PERTURBED, REFUSED, ELSEWHERE)
  assert set().union(*tables) == {field.name for field in dataclasses.fields(RunConfig)}
  assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("problems")
  for name, problems in {"train": ["1 + 1", "2 + 2", "8 + 8 " * 50], "other": ["3 + 3", "4 + 4"]}.items():
    (path / f"{name}.jsonl").write_text("".join(json.dumps({"problem": problem, "answer": "2"}) + "\n" for problem in problems))
  return path


def configured(folder, **changes) -> RunConfig:
  def filled(x):
    return tuple(path.format(folder=folder) for path in x) if isinstance(x, tuple) else x

  return RunConfig(**{name: filled(value) for name, value in (BASE | changes).items()})


@functools.cache
def built(config: RunConfig) -> Run:
  return build(config)


def plain(tree):
  """Something that compares with ==."""
  return jax.tree.map(lambda x: np.asarray(x).tolist(), tree)


def step(run):
  functions = ("policy_loss", "credit", "kl")
  fields = {f.name: getattr(run.step_config, f.name) for f in dataclasses.fields(run.step_config) if f.name not in functions}
  return fields | {"kl": [name for name, kl in ESTIMATORS.items() if kl is run.step_config.kl]}


def policy_loss(run):
  """At ratios from e^-2 to e^2, and advantages of both signs; the mean ratio of a row is different for each."""
  logp = jnp.linspace(-2, 2, 24).reshape(4, 6)
  advantages = jnp.tile(jnp.array([1.0, -1.0]), (4, 3))
  return plain(run.step_config.policy_loss(logp, jnp.zeros_like(logp), advantages, jnp.ones_like(logp, bool))[0])


def credit(run):
  batch = tiny.toy_batch()
  hyper = Hyper(*(jnp.float32(x) for x in (0.1, 1, 1, 1, 0.3)))
  own, later = batch.ref_logp, batch.ref_log_tail
  return None if run.step_config.credit is None else plain(run.step_config.credit(batch, own, later, hyper))


def optimizer(run):
  """Two updates, the first of them by a gradient beyond the largest norm; with the types of what is kept."""
  part = {"kernel": jnp.array([1.0, 2.0]), "bias": jnp.ones(1)}
  params = {"policy": part, "value": part} if run.config.uses_critic else part
  state, found = run.optimizer.init(params), []
  for size in (5.0, 0.3):
    grads = jax.tree.map(lambda p: size * jnp.array([0.6, -0.8, 0.1])[: len(p)], params)  # noqa: B023
    updates, state = run.optimizer.update(grads, state, params)
    found.append(plain(updates))
  return found, [str(x.dtype) for x in jax.tree.leaves(state)]


def responses(run, count):
  """Of all lengths up to the longest, which is not ended, on the host."""
  length = np.resize(np.arange(1, run.config.max_new_tokens + 1, dtype=np.int32), count)
  tokens = np.ones((count, run.config.max_new_tokens), np.int32)
  return rollouts.Responses(
    problems=[run.train.problems[0]] * count,
    prompts=np.ones((count, 4), np.int32),
    prompt_length=np.full(count, 3, np.int32),
    tokens=tokens,
    length=length,
    sampling_logp=-np.ones(tokens.shape, np.float32),
    topk_ids=np.zeros((*tokens.shape, 0), np.int32),
    reason=np.where(length < run.config.max_new_tokens, "eos", "length"),
  )


def batch(run):
  rows = run.config.rows
  scores = np.resize([0.0, 1.0, 1.0], rows)
  groups = rollouts.Groups(
    responses(run, rows), scores, np.repeat(np.arange(run.config.prompts_per_step), run.config.group_size), np.arange(rows)
  )
  found, metrics = rollouts.to_batch(run, groups)
  return plain(vars(found)), metrics


class Flat:
  """In place of the model and the scores: responses that are all given, and all wrong; counts them."""

  def __init__(self, run, monkeypatch):
    self.calls = []
    monkeypatch.setattr(rollouts, "respond", self._respond)
    monkeypatch.setattr(type(run), "rollout_weights", lambda run, params: params)
    monkeypatch.setattr(rollouts, "score_all", lambda task, problems, texts: np.zeros(len(texts)))

  def _respond(self, run, weights, prompts, rows, keys, sampling):
    del weights, prompts, sampling
    self.calls.append((len(rows), np.asarray(jax.random.key_data(keys)).tolist()))
    return responses(run, len(rows))


def sampled(run, monkeypatch):
  flat, stream = Flat(run, monkeypatch), data.PromptStream(len(run.train.problems), run.config.seed)
  groups = rollouts.sample_groups(run, None, stream, 1, lambda phase: None)
  return len(flat.calls), stream.position, len(groups.kept)


def keys(run, monkeypatch):
  flat = Flat(run, monkeypatch)
  rollouts.sample_groups(run, None, data.PromptStream(len(run.train.problems), 0), 1, lambda phase: None)
  return flat.calls


def evaluation(run, monkeypatch):
  Flat(run, monkeypatch)
  if run.eval is None:
    return None
  metrics, samples = rollouts.evaluate(run, None, 0)
  return metrics, len(samples), len(run.eval.problems), run.eval.fingerprint()


def next_host(run):
  """After two steps, the KL above any target and the reward unlike the first."""
  host = HostState()
  for kl, reward in ((0.06, 0.2), (0.06, 0.8)):
    host = rl_step._next_host(run, host, {"bad_updates": 0.0, "kl": kl, "reward_mean": reward}, 1)
  return host


def stops(run):
  try:
    loop._stop_if_bad(run, HostState(bad_in_row=3))
  except ValueError:
    return True
  return False


def task(run):
  pool = run.task._pool
  return run.task.extract(run.train.problems[0], "It is 7."), pool._size, pool._time_limit


def demonstrations(run):
  return plain(vars(warmup._demonstrations(run, np.random.default_rng(0)))["tokens"])


def warmed_up(run, monkeypatch):
  monkeypatch.setattr(warmup, "CHECK_EVERY", 1)
  monkeypatch.setattr(warmup, "greedy_accuracy", lambda run, params: 0.5)
  return plain(warmup.warm_up(run, new_state(run), types.SimpleNamespace(agreed=lambda: False)).params)


def sampler(run):
  made = run.sampler
  stopped = made.stop and made.stop.find(range(16))
  return made.slots, made.max_prompt_tokens, made.max_new_tokens, made._block, made._chunk, stopped


def plans(run):
  rows = run.config.rows
  groups = rollouts.Groups(responses(run, rows), np.zeros(rows), np.zeros(rows, int), np.arange(rows))
  return [plan and plain([vars(part) for part in plan]) for plan in build_plans(run, rollouts.to_batch(run, groups)[0], 1)]


ASK = {
  "step": step,
  "policy_loss": policy_loss,
  "credit": credit,
  "optimizer": optimizer,
  "lr_scales": lambda run: [plain(run.lr_scales(step)) for step in (1, 2, 150)],
  "hyper": lambda run: plain(rl_step.hyper(run, HostState(), 1)),
  "state": lambda run: [(a.shape, str(a.dtype), str(a.sharding.spec), a.sharding.memory_kind) for a in jax.tree.leaves(run.abstract_state)],
  "model": lambda run: run.model_config,
  "mesh": lambda run: dict(run.mesh.shape),
  "rollout_mesh": lambda run: dict(run.team.mesh.shape),
  "prompts": lambda run: (run.train.fingerprint(), run.train.tokens),
  "sampler": sampler,
  "sampling": lambda run: (run.sampling, run.eval_sampling),
  "plans": plans,
  "old_pass": lambda run: run.needs_old_pass,
  "batch": batch,
  "next_host": next_host,
  "stops": stops,
  "task": task,
  "demonstrations": demonstrations,
}
FAKED = {"sampled": sampled, "keys": keys, "evaluation": evaluation, "warmed_up": warmed_up}


@pytest.mark.parametrize("name", PERTURBED)
def test_flag(name, folder, monkeypatch, capsys):
  part, value, companions = PERTURBED[name]
  before, after = configured(folder, **companions), configured(folder, **companions | {name: value})
  assert getattr(before, name) != getattr(after, name)

  def ask(config):
    return FAKED[part](built(config), monkeypatch) if part in FAKED else ASK[part](built(config))

  found, expected = ask(after), ask(before)
  assert found != expected, f"--{name} changes nothing of {part}"
  assert ask(before) == expected, "what is compared does not change by itself"
  capsys.readouterr()


@pytest.mark.parametrize("name", REFUSED)
def test_flag_that_is_refused_where_it_acts(name, folder):
  value, text, companions = REFUSED[name]
  assert build(configured(folder, **companions)).train.dropped == 1
  with pytest.raises(ValueError, match=text):
    build(configured(folder, **companions | {name: value}))
