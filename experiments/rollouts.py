"""One batch of responses: sampled, scored and turned into a RolloutBatch; and evaluation, which is the same without training.

With several processes each samples and scores a share of the prompts, and then all of them hold everything: what follows from it, from
advantages to the plan of an update, they find out alike.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from emapg_jax import advantages, data, distributed, streams
from emapg_jax.envs.task import Problem, ask, counters, score_all
from emapg_jax.rollout import batching
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.sampler import LENGTH
from emapg_jax.types import PyTree, RolloutBatch
from experiments.algorithms import ROW_ADVANTAGES
from experiments.build import Prompts, Run


@dataclasses.dataclass(frozen=True)
class Responses:
  """Sampled responses on the host; row i answers problems[i]."""

  problems: list[Problem]
  prompts: np.ndarray  # int32 [B, P]
  prompt_length: np.ndarray  # int32 [B]
  tokens: np.ndarray  # int32 [B, T]
  length: np.ndarray  # int32 [B]
  sampling_logp: np.ndarray  # float32 [B, T]
  topk_ids: np.ndarray  # int32 [B, T, K]; K is 0 where the trainer finds the ids
  reason: np.ndarray  # str [B]: eos, stop or length

  def take(self, rows: np.ndarray) -> "Responses":
    """Some of them, in the order of `rows`."""
    values = vars(self).items()
    return Responses(**{name: value[rows] if isinstance(value, np.ndarray) else [value[i] for i in rows] for name, value in values})


def join(parts: list[Responses]) -> Responses:
  """All responses of several calls, one after the other; prompts padded to the widest."""
  width = max(part.prompts.shape[1] for part in parts)
  parts = [dataclasses.replace(part, prompts=np.pad(part.prompts, ((0, 0), (0, width - part.prompts.shape[1])))) for part in parts]
  columns = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(Responses)}
  return Responses(
    **{k: np.concatenate(v) if isinstance(v[0], np.ndarray) else [x for part in v for x in part] for k, v in columns.items()}
  )


@dataclasses.dataclass(frozen=True)
class Groups:
  """The responses of an RL step with their scores, group by group, and which rows are trained on."""

  responses: Responses
  scores: np.ndarray  # float64 [N], in [0, 1], NaN where there is none
  group_ids: np.ndarray  # int64 [N], the prompt_uid
  kept: np.ndarray  # int64 [B], rows of whole groups


def _padded(run: Run, prompts: Prompts, rows: np.ndarray) -> tuple[list[Problem], np.ndarray, np.ndarray]:
  """prompts[rows]: problems, ids and lengths."""
  return [prompts.problems[i] for i in rows], *batching.pad(
    [prompts.tokens[i] for i in rows], run.config.max_prompt_tokens, run.tokenizer.pad_id
  )


class RolloutsGivenUp(Exception):
  """The rollouts of an RL step were left between two blocks of decoding; the state is that of the step before."""


def respond(run: Run, weights: PyTree, prompts: Prompts, rows: np.ndarray, keys: jax.Array, sampling: Sampling) -> Responses:
  """Responses to prompts[rows], with weights from `run.rollout_weights`; waits for them. The processes of a team must call it alike."""
  distinct, owner = np.unique(rows, return_inverse=True)
  out = run.sampler.generate(weights, [prompts.tokens[i] for i in distinct], owner, keys, sampling)
  return Responses(*_padded(run, prompts, rows), out.tokens, out.length, out.sampling_logp, out.topk_ids, out.reason)


def _text(run: Run, responses: Responses, i: int) -> str:
  return run.tokenizer.decode(responses.tokens[i, : responses.length[i]].tolist())


def _scores(run: Run, responses: Responses) -> np.ndarray:
  return score_all(run.task, responses.problems, [_text(run, responses, i) for i in range(len(responses.problems))])


def _not_booked(phase: str) -> None:
  del phase


def respond_and_score(
  run: Run,
  weights: PyTree,
  prompts: Prompts,
  rows: np.ndarray,
  keys: jax.Array,
  sampling: Sampling,
  lap: Callable[[str], None] = _not_booked,
) -> tuple[Responses, np.ndarray]:
  """Responses to prompts[rows] and their scores, in that order and the same on every process; `lap` books the time.

  A team samples the shares of its processes together, and each process reads and scores its own.
  """
  if distributed.count() == 1:
    responses = respond(run, weights, prompts, rows, keys, sampling)
    lap("rollout")
    scores = _scores(run, responses)
    lap("reward")
    return responses, scores
  of_team = np.concatenate([distributed.share(len(rows), process) for process in run.team.processes])
  own = np.flatnonzero(np.isin(of_team, distributed.share(len(rows), distributed.index())))
  mine = None
  with contextlib.suppress(RolloutsGivenUp):  # of this process; the others hear of it when they have their own
    mine = respond(run, weights, prompts, rows[of_team], keys[of_team], sampling).take(own)
  lap("rollout")

  def scored() -> dict[str, np.ndarray] | None:
    if mine is None:
      return None
    scores = _scores(run, mine)
    lap("reward")
    longest = int(mine.length.max(initial=0))
    sampled = {name: getattr(mine, name)[:, :longest] for name in ("tokens", "sampling_logp", "topk_ids")}
    return sampled | {"length": mine.length, "reason": mine.reason, "scores": scores}

  parts = distributed.together(scored)
  if any(part is None for part in parts):
    raise RolloutsGivenUp
  columns = _whole(parts, run)
  scores = columns.pop("scores")
  lap("gather")
  return Responses(*_padded(run, prompts, rows), **columns), scores


def _whole(parts: list[dict[str, np.ndarray]], run: Run) -> dict[str, np.ndarray]:
  """The columns of all shares, tokens padded to the largest number again."""

  def widened(name: str, column: np.ndarray) -> np.ndarray:
    if column.ndim == 1:
      return column
    missing = [(0, 0), (0, run.config.max_new_tokens - column.shape[1])] + [(0, 0)] * (column.ndim - 2)
    return np.pad(column, missing, constant_values=run.tokenizer.pad_id if name == "tokens" else 0)

  return {name: np.concatenate([widened(name, part[name]) for part in parts]) for name in parts[0]}


def task_counters(run: Run) -> dict[str, float]:
  """The task's counters since the last call, those of all processes together."""
  parts = distributed.together(lambda: counters(run.task))
  return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(name for part in parts for name in part)}


def training_keys(run: Run, step: int, uids: np.ndarray) -> jax.Array:
  """A key per sequence of RL step `step`: rows are the group of the first uid, then of the second, and so on."""
  group = run.config.group_size
  return streams.row_keys(run.config.seed, streams.ROLLOUT, step, np.repeat(uids, group), np.tile(np.arange(group), len(uids)))


def sample_groups(run: Run, params: PyTree, stream: data.PromptStream, step: int, lap: Callable[[str], None]) -> Groups:
  """The groups of RL step `step`; under dynamic sampling, batch after batch until enough groups have scores that differ, or tries end.

  What is missing then is filled up with flat groups, and useful ones beyond `prompts_per_step` are dropped; always whole groups, and in the
  order of sampling. `lap` books the time.
  """
  config, group = run.config, run.config.group_size
  parts, scores, ids = [], [], []
  weights = run.rollout_weights(params)
  for _ in range(1 + config.max_refills if config.dynamic_sampling else 1):
    uids = stream.take(config.prompts_per_step)
    rows = np.repeat(stream.indices(uids), group)
    responses, found = respond_and_score(run, weights, run.train, rows, training_keys(run, step, uids), run.sampling, lap)
    parts.append(responses)
    scores.append(found)
    ids.append(np.repeat(uids, group))
    all_scores, group_ids, length = np.concatenate(scores), np.concatenate(ids), np.concatenate([part.length for part in parts])
    useful = advantages.has_spread(all_scores, group_ids, length > 0)[::group]
    if not config.dynamic_sampling or useful.sum() >= config.prompts_per_step:
      break
  groups = np.arange(len(useful))
  if config.dynamic_sampling:
    groups = np.concatenate([groups[useful], groups[~useful]])
  kept = (groups[: config.prompts_per_step, None] * group + np.arange(group)).ravel()
  return Groups(join(parts), all_scores, group_ids, kept)


def to_batch(run: Run, groups: Groups) -> tuple[RolloutBatch, dict[str, float]]:
  """The RolloutBatch of the groups to train on, and the metrics of all that was sampled."""
  config, responses, ids = run.config, groups.responses, groups.group_ids
  valid = responses.length > 0
  shaping = np.zeros(len(ids))
  if config.overlong_share:
    cache = max(1, round(config.overlong_share * config.max_new_tokens))
    shaping = advantages.overlong_penalty(responses.length, config.max_new_tokens, cache)
  rewards = groups.scores + shaping
  scored = advantages.scored(rewards, valid)
  metrics = _metrics(responses, groups.scores, rewards, scored) | advantages.group_metrics(rewards, ids, valid, groups.scores)
  if config.overlong_share:
    metrics["overlong_penalty"] = float(shaping[scored].mean()) if scored.any() else float("nan")
  if config.dynamic_sampling:
    spread = advantages.has_spread(groups.scores, ids, valid)
    metrics |= {"groups_sampled": len(ids) // config.group_size, "groups_filled": float(1 - spread[groups.kept].mean())}

  responses = responses.take(groups.kept)
  rewards, ids, valid, scored = (x[groups.kept] for x in (rewards, ids, valid, scored))
  size = batching.fit(int(responses.length.max()), config.max_new_tokens)
  row_advantage = ROW_ADVANTAGES.get(config.advantage)
  batch = batching.assemble(
    responses.prompts,
    responses.prompt_length,
    responses.tokens[:, :size],
    responses.length,
    responses.sampling_logp[:, :size],
    row_advantage(rewards, ids, valid) if row_advantage else np.zeros(len(ids)),
    scored & ((responses.reason != LENGTH) | (not config.mask_truncated)),
    None if row_advantage else rewards,
  )
  batch = batch.replace(topk_ids=responses.topk_ids[:, :size])
  metrics["padded_fraction"] = float(1 - (responses.prompt_length + responses.length).sum() / batch.tokens.size)
  if config.advantage == "batch_normalized":
    metrics["reward_scale"] = advantages.reward_scale(rewards, ids, valid)
  return batch, metrics


def _metrics(responses: Responses, scores: np.ndarray, rewards: np.ndarray, scored: np.ndarray) -> dict[str, float]:
  known = rewards[scored]
  return {
    "score_mean": float(scores[scored].mean()) if known.size else float("nan"),
    "reward_mean": float(known.mean()) if known.size else float("nan"),
    "reward_std": float(known.std(ddof=1)) if known.size > 1 else 0.0,
    "unscored": int((~scored).sum()),
    "response_length": float(responses.length.mean()),
    "response_length_max": int(responses.length.max()),
    "truncated_fraction": float((responses.reason == LENGTH).mean()),
  }


def evaluate(run: Run, params: PyTree, step: int) -> tuple[dict[str, float], list[dict]]:
  """Mean score over the evaluation problems, sampled and greedy; the task's counters; samples for the log."""
  counters(run.task)  # what came before belongs to no evaluation
  metrics, samples = {}, []
  weights, rows = run.rollout_weights(params), np.arange(len(run.eval.problems))
  for kind, sampling in run.eval_sampling.items():
    keys = streams.row_keys(run.config.seed, streams.EVAL, step, rows, np.zeros_like(rows))
    responses, found = respond_and_score(run, weights, run.eval, rows, keys, sampling)
    samples += log_samples(run, responses, found, kind, min(len(rows), run.config.samples_logged))
    if np.isfinite(found).any():
      metrics[f"eval_{kind}"] = float(np.nanmean(found))
    metrics["eval_unscored"] = metrics.get("eval_unscored", 0) + int(np.isnan(found).sum())
  own = {f"eval_task_{name}" if f"eval_{name}" in metrics else f"eval_{name}": value for name, value in task_counters(run).items()}
  return metrics | own, samples


def log_samples(run: Run, responses: Responses, scores: np.ndarray, kind: str, count: int) -> list[dict]:
  """The first `count` responses as rows of samples.jsonl, on the process that writes it."""

  def extract(problem: Problem, text: str) -> str | None:
    return ask(run.task, "extract", problem, text) if hasattr(run.task, "extract") else None

  texts = [_text(run, responses, i) for i in range(count if distributed.is_first() else 0)]
  return [
    {
      "kind": kind,
      "prompt": responses.problems[i].prompt,
      "completion": completion,
      "score": float(scores[i]),
      "extracted": extract(responses.problems[i], completion),
      "answer": responses.problems[i].answer,
      "tokens": int(responses.length[i]),
      "reason": str(responses.reason[i]),
    }
    for i, completion in enumerate(texts)
  ]
