"""One batch of responses: sampled, scored and turned into a RolloutBatch; and evaluation, which is the same without training."""

import dataclasses

import jax
import numpy as np

from emapg_jax import advantages, streams
from emapg_jax.envs.task import Problem, ask, counters, score_all
from emapg_jax.rollout import batching
from emapg_jax.types import PyTree, RolloutBatch
from experiments.build import Prompts, Run, on_devices


@dataclasses.dataclass(frozen=True)
class Responses:
  """Sampled responses on the host; row i answers problems[i]."""

  problems: list[Problem]
  prompts: np.ndarray  # int32 [B, P]
  prompt_length: np.ndarray  # int32 [B]
  tokens: np.ndarray  # int32 [B, T]
  length: np.ndarray  # int32 [B]
  logp: np.ndarray  # float32 [B, T]
  ended: np.ndarray  # bool [B]
  texts: list[str]


def respond(run: Run, params: PyTree, prompts: Prompts, rows: np.ndarray, keys: jax.Array, greedy: bool = False) -> Responses:
  """Responses to prompts[rows]; waits for them."""
  tokens, lengths = batching.pad([prompts.tokens[i] for i in rows], run.config.max_prompt_tokens, run.tokenizer.pad_id)
  sample = run.sample_greedy if greedy else run.sample
  out = jax.device_get(sample(params, *on_devices(run, (tokens, lengths, keys))))
  texts = [run.tokenizer.decode(ids[:n].tolist()) for ids, n in zip(out.tokens, out.length)]
  problems = [prompts.problems[i] for i in rows]
  return Responses(problems, tokens, lengths, out.tokens, out.length, out.logp, out.ended, texts)


def training_keys(run: Run, step: int, uids: np.ndarray) -> jax.Array:
  """A key per sequence of RL step `step`: rows are the group of the first uid, then of the second, and so on."""
  group = run.config.group_size
  return streams.row_keys(run.config.seed, streams.ROLLOUT, step, np.repeat(uids, group), np.tile(np.arange(group), len(uids)))


def to_batch(run: Run, responses: Responses, scores: np.ndarray, uids: np.ndarray) -> tuple[RolloutBatch, dict[str, float]]:
  """The RolloutBatch of scored responses, and the metrics of their rewards."""
  config = run.config
  group_ids = np.repeat(uids, config.group_size)
  valid = responses.length > 0
  scored = advantages.scored(scores, valid)
  size = batching.fit(int(responses.length.max()), config.max_new_tokens)
  trained = scored & (responses.ended | (not config.mask_truncated))
  batch = batching.assemble(
    responses.prompts,
    responses.prompt_length,
    responses.tokens[:, :size],
    responses.length,
    responses.logp[:, :size],
    advantages.group_normalized(scores, group_ids, valid),
    trained,
  )
  known = scores[scored]
  metrics = {
    "score_mean": float(known.mean()) if known.size else float("nan"),
    "reward_mean": float(known.mean()) if known.size else float("nan"),
    "reward_std": float(known.std(ddof=1)) if known.size > 1 else 0.0,
    "unscored": int((~scored).sum()),
    "response_length": float(responses.length.mean()),
    "response_length_max": int(responses.length.max()),
    "truncated_fraction": float(1 - responses.ended.mean()),
    "padded_fraction": float(1 - (responses.prompt_length + responses.length).sum() / batch.tokens.size),
    **advantages.group_metrics(scores, group_ids, valid),
  }
  return batch, metrics


def evaluate(run: Run, params: PyTree, step: int) -> tuple[dict[str, float], list[dict]]:
  """Mean score over the evaluation problems, sampled at the training temperature and greedy; the task's counters; samples for the log."""
  counters(run.task)  # what came before belongs to no evaluation
  metrics, samples = {}, []
  for kind in ("sampled", "greedy"):
    scores, count, width = [], len(run.eval.problems), run.config.rows
    for start in range(0, count, width):
      rows = np.arange(start, start + width)
      # The last batch is filled up, so that nothing compiles again, and the fill is cut off before anything is counted.
      keys = streams.row_keys(run.config.seed, streams.EVAL, step, rows, np.zeros_like(rows))
      responses = respond(run, params, run.eval, rows % count, keys, greedy=kind == "greedy")
      real = min(width, count - start)
      scores.append(score_all(run.task, responses.problems[:real], responses.texts[:real]))
      if start == 0:
        samples += log_samples(run, responses, scores[0], kind, min(real, run.config.samples_logged))
    found = np.concatenate(scores)
    if np.isfinite(found).any():
      metrics[f"eval_{kind}"] = float(np.nanmean(found))
    metrics["eval_unscored"] = metrics.get("eval_unscored", 0) + int(np.isnan(found).sum())
  return metrics | {f"eval_{name}": value for name, value in counters(run.task).items()}, samples


def log_samples(run: Run, responses: Responses, scores: np.ndarray, kind: str, count: int) -> list[dict]:
  """The first `count` responses as rows of samples.jsonl."""

  def extract(problem: Problem, text: str) -> str | None:
    return ask(run.task, "extract", problem, text) if hasattr(run.task, "extract") else None

  return [
    {
      "kind": kind,
      "prompt": responses.problems[i].prompt,
      "completion": responses.texts[i],
      "reward": float(scores[i]),
      "extracted": extract(responses.problems[i], responses.texts[i]),
      "answer": responses.problems[i].answer,
      "tokens": int(responses.length[i]),
      "reason": "eos" if responses.ended[i] else "length",
    }
    for i in range(count)
  ]
