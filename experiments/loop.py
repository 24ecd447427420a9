"""The loop of a run: roll out, score, update, log; resume, save and stop without losing anything."""

import dataclasses
import pathlib
import signal
import time

import jax
import numpy as np

from emapg_jax import data, metrics, optim
from emapg_jax.checkpoint import Checkpointer, HostState, flags_difference
from emapg_jax.config import RUNTIME_FLAGS
from emapg_jax.envs.task import score_all
from emapg_jax.train_step import Hyper
from emapg_jax.types import RolloutBatch, TrainState
from experiments import flags, report, rollouts, warmup
from experiments.build import Run, new_state, on_devices
from experiments.plots import plot_curves

FLAT_GROUPS_WARNING = 0.95


class Clock:
  """Wall-clock seconds by phase."""

  def __init__(self):
    self._last = time.perf_counter()
    self.seconds: dict[str, float] = {}

  def lap(self, phase: str) -> None:
    """Books the time since the last lap on `phase`."""
    now = time.perf_counter()
    self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
    self._last = now


class StopRequest:
  """Ctrl-C ends the run after the step in progress; a second one ends it at once."""

  def __init__(self):
    self.asked = False
    self._previous = None

  def __enter__(self):
    self._previous = signal.signal(signal.SIGINT, self._handle)
    return self

  def __exit__(self, *_):
    signal.signal(signal.SIGINT, self._previous)

  def _handle(self, *_):
    self.asked = True
    signal.signal(signal.SIGINT, self._previous)
    report.say("stopping after this step; press Ctrl-C again to stop at once and lose it")


def score_batch(run: Run, state: TrainState, batch: RolloutBatch) -> RolloutBatch:
  """Adds old log-probs, top-k ids and the anchor's statistics; dispatched, not waited for."""
  if run.step_config.kl is None:
    return batch.replace(old_logp=run.score(state.params, (), batch).logp)
  if run.config.topk_owner == "policy":
    old = run.score(state.params, (), batch)
    ref = run.score(state.ema_params, (), batch, old.topk_ids)
  else:
    ref = run.score(state.ema_params, (), batch)
    old = run.score(state.params, (), batch, batch.topk_ids)  # K = 0: only the log-probs are wanted
  return batch.replace(old_logp=old.logp, topk_ids=ref.topk_ids, ref_logp=ref.logp, ref_logp_topk=ref.logp_topk, ref_log_tail=ref.log_tail)


def hyper(run: Run, step: int) -> Hyper:
  """The traced settings of RL step `step`."""
  config = run.config
  return Hyper(
    kl_coef=np.float32(config.kl_coef),
    ema_decay=np.float32(config.ema_decay),
    ema_period=np.int32(config.ema_period),
    lr_scale=np.float32(optim.warmup(step, config.lr_warmup_steps)),
  )


def rl_step(run: Run, state: TrainState, stream: data.PromptStream, step: int, while_updating) -> tuple[TrainState, dict, list[dict]]:
  """One RL step; `while_updating` is host work to do while the devices are busy. Returns state, metrics and sample rows."""
  config, clock = run.config, Clock()
  uids = stream.take(config.prompts_per_step)
  rows = np.repeat(stream.indices(uids), config.group_size)
  responses = rollouts.respond(run, state.params, run.train, rows, rollouts.training_keys(run, step, uids))
  clock.lap("rollout")
  scores = score_all(run.task, responses.problems, responses.texts)
  batch, numbers = rollouts.to_batch(run, responses, scores, uids)
  clock.lap("reward")
  batch = jax.block_until_ready(score_batch(run, state, on_devices(run, batch)))
  clock.lap("anchor")
  state, device_metrics = run.train_step(state, (), batch, hyper(run, step))
  while_updating()
  numbers |= metrics.reduce(device_metrics)
  clock.lap("update")
  numbers |= getattr(run.task, "metrics", dict)()
  numbers["learning_rate"] = config.learning_rate * optim.warmup(step, config.lr_warmup_steps)
  numbers |= {f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()}
  numbers["tokens_per_second"] = float(responses.length.sum()) / sum(clock.seconds.values())
  return state, numbers, rollouts.log_samples(run, responses, scores, "train", min(config.samples_logged, config.rows))


def start(run: Run, checkpointer: Checkpointer, writer: metrics.MetricsWriter) -> tuple[TrainState, HostState]:
  """The state to go on from: the latest checkpoint, or a fresh one (warmed up when the run asks for it)."""
  saved_flags = checkpointer.flags_of_latest()
  if saved_flags is not None:
    accepted = flags_difference(saved_flags, flags.as_strings(run.config), RUNTIME_FLAGS, run.config.override)
    state, host = checkpointer.restore_latest(run.abstract_state)
    step = int(state.step)
    writer.truncate_after(step)
    report.say(f"resumed at step {step}" + "".join(f"; {name} is now {new}, was {old}" for name, (old, new) in accepted.items()))
    return state, dataclasses.replace(host, flags=flags.as_strings(run.config))
  writer.truncate_after(-1)
  state = new_state(run)
  if run.config.warmup_steps:
    state = warmup.warm_up(run, state, report.say)
  return state, HostState(flags=flags.as_strings(run.config))


class Log:
  """Metric lines, each held back until its step is complete, so that files are written while the devices work."""

  def __init__(self, run: Run, writer: metrics.MetricsWriter, progress: metrics.Progress):
    self._run, self._writer, self._progress = run, writer, progress
    self._held: tuple[int, dict, list[dict]] | None = None
    self.last: dict[str, float] = {}
    self._warned = False

  def hold(self, step: int, numbers: dict, samples: list[dict]) -> None:
    """Keeps the line of a step for the next `flush`."""
    self._held = (step, numbers, samples)

  def flush(self) -> None:
    """Writes the line that is held, if any."""
    if self._held is None:
      return
    (step, numbers, samples), self._held = self._held, None
    self._writer.write(step, numbers)
    if samples:
      self._writer.write_samples(step, samples)
    self.last |= numbers
    if step:
      names = ("score_mean", "kl", "entropy", "response_length", "eval_greedy", "eval_sampled")
      self._progress.update(step, {name: numbers[name] for name in names if name in numbers})
    if numbers.get("degenerate", 0) > FLAT_GROUPS_WARNING and not self._warned:
      self._warned = True
      report.say(
        f"warning: at step {step} {numbers['degenerate']:.0%} of the groups have equal rewards and train nothing. If that stays, the task "
        "is too hard or too easy for this policy: change the data, the group size or the reward."
      )

  def close(self) -> None:
    """Ends the progress line."""
    self._progress.close()


def train(run: Run, workdir: pathlib.Path) -> dict[str, float]:
  """Runs to `--steps` and returns the last value of each metric."""
  config = run.config
  writer = metrics.MetricsWriter(str(workdir))
  with StopRequest() as stop, Checkpointer(str(workdir / "checkpoints"), config.keep_last) as checkpointer:
    state, host = start(run, checkpointer, writer)
    flags.write(config, workdir / "flags.txt")
    stream = data.PromptStream(len(run.train.problems), config.seed)
    stream.position = host.position
    step = int(state.step)
    if step >= config.steps:
      report.say(f"the run is complete: checkpoint {step} of --steps={config.steps} is there; raise --steps to go on")
    log = Log(run, writer, metrics.Progress(config.steps, initial=step))
    if step == 0:
      first, samples = rollouts.evaluate(run, state.params, 0) if run.eval else ({}, [])
      report.evaluation(0, first)
      log.hold(0, first, samples)
      log.flush()
      if config.save_every:
        checkpointer.save(0, state, host)
    while step < config.steps and not stop.asked:
      step += 1
      state, numbers, samples = rl_step(run, state, stream, step, log.flush)
      host = _count_bad(run, host, numbers, stream.position)
      last = step == config.steps
      evaluated = bool(run.eval) and (step % config.eval_every == 0 or last)
      if evaluated:
        found, eval_samples = rollouts.evaluate(run, state.params, step)
        numbers, samples = numbers | found, samples + eval_samples
      log.hold(step, numbers, samples if evaluated or last or step == 1 else [])
      if config.save_every and (step % config.save_every == 0 or last):
        log.flush()  # a checkpoint without its line would leave a gap when the run is killed here
        checkpointer.save(step, state, host)
    log.flush()
    log.close()
    if stop.asked:
      checkpointer.save(step, state, host)
  writer.close()
  plot_curves(workdir / "metrics.jsonl", workdir / "curves.png")
  if stop.asked and step < config.steps:
    report.say(f"stopped at step {step} of {config.steps}; saved to {workdir / 'checkpoints' / str(step)}; the same command resumes")
    raise SystemExit(130)
  return log.last


def _count_bad(run: Run, host: HostState, numbers: dict[str, float], position: int) -> HostState:
  """Books the skipped updates of a step; raises when too many steps in a row had no good one."""
  skipped = round(numbers["bad_updates"] * run.config.mini_batches)
  in_row = host.bad_in_row + 1 if skipped == run.config.mini_batches else 0
  if in_row >= run.config.max_bad_steps:
    raise ValueError(
      f"No update of the last {in_row} RL steps had a finite loss and gradient (--max_bad_steps={run.config.max_bad_steps}); the last "
      "checkpoint holds finite weights. Lower the learning rate or the KL coefficient, or look at samples.jsonl for what went wrong."
    )
  return dataclasses.replace(host, position=position, bad_in_row=in_row, bad_total=host.bad_total + skipped)
