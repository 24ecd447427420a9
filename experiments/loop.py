"""The loop of a run: roll out, score, update, log; resume, save and stop without losing anything."""

import contextlib
import dataclasses
import fcntl
import pathlib
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np

from emapg_jax import anchor, data, metrics, micro_batches
from emapg_jax.checkpoint import Checkpointer, HostState, flags_difference
from emapg_jax.config import RUNTIME_FLAGS, RunConfig
from emapg_jax.envs.task import counters
from emapg_jax.presets import GROUP_ADVANTAGES
from emapg_jax.types import Hyper, Plan, PyTree, RolloutBatch, TrainState, Weighted
from experiments import flags, profiling, report, rollouts, warmup
from experiments.build import Run, new_state, on_devices, plans
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


@contextlib.contextmanager
def only_run_in(workdir: pathlib.Path):
  """Holds a lock on the folder of the run; it ends with the process, however that ends."""
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / "lock", "w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(f"Another run is writing to {workdir}: wait for it, stop it, or choose another --workdir.") from error
    yield


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
    report.say("stopping after this step; press Ctrl-C again to stop at once and lose it (of a supervised warm-up nothing is kept)")


def score_batch(
  run: Run, state: TrainState, initial: PyTree | None, batch: RolloutBatch, settings: Hyper, plan: Plan | None = None
) -> tuple[RolloutBatch, dict[str, Weighted]]:
  """Adds old log-probs, ids, the anchor's statistics, values and credit; and the KL to the initial model. Dispatched, not waited for."""
  sampled, old, ref = batch, None, None  # what is scored stays as it came: with other ids in it, scoring would compile again
  if run.step_config.kl is not None and run.config.topk_owner == "anchor":
    ref = run.score(state.ema_params, (), sampled, None, plan)
    batch = batch.replace(topk_ids=ref.topk_ids)
  if run.needs_old_pass:
    old = run.score(state.policy, (), sampled, None if ref is None else ref.topk_ids, plan)
    batch = batch.replace(old_logp=old.logp)
  numbers = {}
  if initial is not None:
    numbers["kl_initial"] = run.policy_kl(old, run.score(initial, (), sampled, old.topk_ids, plan), batch)
  if run.step_config.kl is not None:
    if ref is None:
      batch = batch.replace(topk_ids=batch.topk_ids if old is None else old.topk_ids)
      ref = run.score(state.ema_params, (), sampled, batch.topk_ids, plan)
    batch = batch.replace(ref_logp=ref.logp, ref_logp_topk=ref.logp_topk, ref_log_tail=ref.log_tail)
  if run.value is not None:
    batch = batch.replace(old_values=run.value(state.params["value"], (), batch, plan))
  if run.credit is not None:
    (advantages, returns), credited = run.credit(batch, old if run.step_config.kl_in_reward else None, settings)
    batch = batch.replace(advantages=advantages, returns=returns)
    numbers |= credited
  return batch, numbers


def hyper(run: Run, host: HostState, step: int) -> Hyper:
  """The traced settings of RL step `step`."""
  config = run.config
  return Hyper(
    kl_coef=np.float32(config.kl_coef if host.kl_coef is None else host.kl_coef),
    ema_decay=np.float32(config.ema_decay),
    ema_period=np.int32(config.ema_period),
    lr_scale=run.lr_scales(step),
    baseline=np.float32(host.baseline or 0.0),
  )


def rl_step(
  run: Run, state: TrainState, host: HostState, initial: PyTree | None, stream: data.PromptStream, step: int
) -> tuple[TrainState, HostState, dict, list[dict]]:
  """One RL step: the next states, metrics and sample rows. Each phase is waited for, so that its time is its own."""
  config, clock = run.config, Clock()
  groups = rollouts.sample_groups(run, state.policy, stream, step, clock.lap)
  batch, numbers = rollouts.to_batch(run, groups)
  scoring, training = plans(run, batch, step)
  if training is not None or run.step_config.prompt_rows > 1:
    numbers["padded_fraction"] = micro_batches.padded_fraction(batch, training, run.step_config)
  clock.lap("reward")
  settings = hyper(run, host, step)
  for_credit = settings.replace(kl_coef=np.float32(settings.kl_coef / numbers.get("reward_scale", 1.0)))
  batch, scored = jax.block_until_ready(score_batch(run, state, initial, on_devices(run, batch), for_credit, scoring))
  clock.lap("anchor")
  state, device_metrics = run.train_step(state, (), batch, settings, training)
  numbers |= metrics.reduce(device_metrics | scored)
  clock.lap("update")
  numbers["learning_rate"] = config.learning_rate * float(settings.lr_scale[-1])
  if config.kl_target:
    numbers["kl_coef"] = float(settings.kl_coef)
  if config.advantage == "reward_to_go":
    numbers["baseline"] = float(settings.baseline)
  numbers |= {f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()}
  numbers["tokens_per_second"] = float(groups.responses.length.sum()) / sum(clock.seconds.values())
  numbers |= {f"task_{name}" if name in numbers or name == "step" else name: value for name, value in counters(run.task).items()}
  samples = rollouts.log_samples(run, groups.responses, groups.scores, "train", min(config.samples_logged, config.rows))
  return state, _next_host(run, host, numbers, stream.position), numbers, samples


def _next_host(run: Run, host: HostState, numbers: dict[str, float], position: int) -> HostState:
  """Books the skipped updates of a step and where the data stream is; adapts the KL coefficient and the baseline."""
  config, updates = run.config, run.config.updates
  skipped = round(numbers["bad_updates"] * updates)
  kl_coef, baseline, mean = host.kl_coef, host.baseline, numbers["reward_mean"]
  if config.kl_target and "kl" in numbers:
    kl_coef = anchor.adapted_kl_coef(config.kl_coef if kl_coef is None else kl_coef, numbers["kl"], config.kl_target, config.kl_gain)
  if config.advantage == "reward_to_go" and np.isfinite(mean):
    baseline = mean if baseline is None else config.baseline_decay * baseline + (1 - config.baseline_decay) * mean
  return dataclasses.replace(
    host,
    position=position,
    bad_in_row=host.bad_in_row + 1 if skipped == updates else 0,
    bad_total=host.bad_total + skipped,
    kl_coef=kl_coef,
    baseline=baseline,
  )


def start(
  run: Run, checkpointer: Checkpointer, writer: metrics.MetricsWriter, workdir: pathlib.Path, stop: StopRequest
) -> tuple[TrainState, HostState]:
  """The state to go on from: the latest checkpoint, or a fresh one (warmed up when the run asks for it)."""
  now = flags.as_strings(run.config) | {"problems": run.train.fingerprint()}
  if checkpointer.skipped:
    report.say(f"checkpoints that are not whole are left out: {', '.join(checkpointer.skipped)}")
  saved = checkpointer.flags_of_latest()
  if saved is not None:
    accepted = flags_difference(saved, now, RUNTIME_FLAGS, run.config.override)
    if "gae" in accepted.get("advantage", ()):
      raise ValueError(
        f"--advantage was {accepted['advantage'][0]}, is now {run.config.advantage}: only gae has a critic, which no checkpoint of a run "
        "without one holds, or has a place for in another. Start in another --workdir."
      )
    state, host = checkpointer.restore_latest(run.abstract_state)
    step = int(state.step)
    writer.truncate_after(step or -1)  # step 0 is evaluated again
    report.say(f"resumed at step {step}" + "".join(f"; {name} is now {new}, was {old}" for name, (old, new) in accepted.items()))
    adapted = None if "kl_coef" in accepted or not run.config.kl_target else host.kl_coef
    return state, dataclasses.replace(host, flags=now, kl_coef=adapted)
  if writer.last_step() > 0:
    raise ValueError(
      f"{workdir} holds the metrics of a run up to step {writer.last_step()}, but no checkpoint to resume it from. Start in another "
      "--workdir, or remove this one; --save_every above 0 makes a run resumable."
    )
  writer.truncate_after(-1)
  state = new_state(run)
  if run.config.warmup_steps:
    state = warmup.warm_up(run, state, stop)
  return state, HostState(flags=now)


def keep_initial(run: Run, state: TrainState, folder: pathlib.Path) -> PyTree:
  """The policy as it was before the first RL step: a copy, saved beside the checkpoints at step 0 and read back on resume."""
  fresh = int(state.step) == 0
  if fresh:
    shutil.rmtree(folder, ignore_errors=True)  # of a start that never came to a checkpoint
  with Checkpointer(str(folder), 1) as saved:
    if fresh:
      initial = jax.tree.map(jnp.copy, state.policy)
      saved.save(0, initial, HostState())
      return initial
    found = saved.restore_latest(run.abstract_state.policy)
  if found is None:
    raise ValueError(
      f"The initial model, to which this run logs its KL, is missing from {folder}: put it back, or go on without it by "
      "--keep_initial=off --override=keep_initial."
    )
  return found[0]


class Log:
  """Where the numbers of a step go: the metrics writer, the progress line, and remarks on what looks wrong."""

  def __init__(self, writer: metrics.MetricsWriter, progress: metrics.Progress, config: RunConfig):
    self._writer, self._progress = writer, progress
    self._by_group = config.advantage in GROUP_ADVANTAGES  # then a group of equal rewards trains nothing
    self._floor_is_rounding = not config.truncated_sampling
    self._warned: set[str] = set()
    self.last: dict[str, float] = {}

  def write(self, step: int, numbers: dict, samples: list[dict]) -> None:
    """Writes the line of a step, and its samples if there are any."""
    self._writer.write(step, numbers)
    if samples:
      self._writer.write_samples(step, samples)
    self.last |= numbers
    if step:
      names = ("score_mean", "kl", "entropy", "response_length", "eval_greedy", "eval_sampled")
      self._progress.update(step, {name: numbers[name] for name in names if name in numbers})
    if step == 1 and "sampler_kl" in numbers and self._floor_is_rounding:
      report.say(f"noise floor of the KL: {numbers['sampler_kl']:.2g} nats per token (the policy to itself, sampler against trainer)")
    if numbers.get("empty_updates", 0) > 0:
      self._warn(
        "empty updates",
        f"at step {step} {numbers['empty_updates']:.0%} of the updates had no token to train on and were left out: every response in them "
        "was without a score, empty, or left out by a flag. Look at samples.jsonl and at what scores the responses.",
      )
    flat = max(numbers.get("degenerate", 0), numbers.get("groups_filled", 0))
    if self._by_group and flat > FLAT_GROUPS_WARNING:
      self._warn(
        "flat groups",
        f"at step {step} {flat:.0%} of the groups have equal scores and teach nothing. If that stays, the task is too "
        "hard or too easy for this policy: change the data, the group size or the reward.",
      )
    if step > 1 and self._floor_is_rounding and 0 < numbers.get("kl", -1.0) < numbers.get("sampler_kl", 0.0):
      self._warn(
        "noise floor",
        f"at step {step} the KL to the anchor, {numbers['kl']:.2g}, lies below the noise floor of {numbers['sampler_kl']:.2g} (the policy "
        "to itself, sampler against trainer): its gradient is rounding. Compute in float32, or let the anchor lag more.",
      )

  def _warn(self, kind: str, text: str) -> None:
    if kind not in self._warned:
      self._warned.add(kind)
      report.say(f"warning: {text}")

  def close(self) -> None:
    """Ends the progress line."""
    self._progress.close()


def train(run: Run, workdir: pathlib.Path) -> dict[str, float]:
  """Runs to `--steps` and returns the last value of each metric."""
  config = run.config
  with (
    StopRequest() as stop,
    only_run_in(workdir),
    metrics.MetricsWriter(str(workdir)) as writer,
    Checkpointer(str(workdir / "checkpoints"), config.keep_last) as checkpointer,
    profiling.Profiler(config.profile_steps, config.steps, workdir / "profile") as profiler,
  ):
    state, host = start(run, checkpointer, writer, workdir, stop)
    initial = keep_initial(run, state, workdir / "initial") if run.keep_initial else None
    flags.write(config, workdir / "flags.txt")
    stream = data.PromptStream(len(run.train.problems), config.seed)
    stream.position = host.position
    step = began = int(state.step)
    if step >= config.steps:
      report.say(f"the run is complete: checkpoint {step} of --steps={config.steps} is there; raise --steps to go on")
    log = Log(writer, metrics.Progress(config.steps, initial=step), config)
    if step == 0:
      found, samples = rollouts.evaluate(run, state.policy, 0) if run.eval else ({}, [])
      report.evaluation(0, found)
      if config.save_every:  # before the line: a kill in between then starts the evaluation again, and not the run
        checkpointer.save(0, state, host)
        checkpointer.wait()
      log.write(0, found, samples)
    while step < config.steps and not stop.asked:
      step += 1
      with profiler.step(step):
        state, host, numbers, samples = rl_step(run, state, host, initial, stream, step)
      last = step == config.steps
      evaluated = bool(run.eval) and (step % config.eval_every == 0 or last)
      if evaluated:
        found, eval_samples = rollouts.evaluate(run, state.policy, step)
        report.evaluation(step, found)
        numbers, samples = numbers | found, samples + eval_samples
      # The line comes before the checkpoint: the other way round a kill in between would leave a gap.
      log.write(step, numbers, samples if evaluated or last or step == 1 or host.bad_in_row else [])
      _stop_if_bad(run, host)
      # A resumed run saves its end even with --save_every=0: the flags it has written are no longer those of the checkpoint it came from.
      due = config.save_every and step % config.save_every == 0
      if (due or (last and (config.save_every or began))) and not host.bad_in_row:
        checkpointer.save(step, state, host)
    log.close()
    if stop.asked:
      checkpointer.save(step, state, host)
  plot_curves(workdir / "metrics.jsonl", workdir / "curves.png")
  if stop.asked and step < config.steps:
    report.say(f"stopped at step {step} of {config.steps}; saved to {workdir / 'checkpoints' / str(step)}")
    report.say(f"it goes on with: python -m experiments.math_grpo --flagfile={workdir / 'flags.txt'} --workdir={workdir}")
    raise SystemExit(130)
  return log.last


def _stop_if_bad(run: Run, host: HostState) -> None:
  if host.bad_in_row >= run.config.max_bad_steps:
    raise ValueError(
      f"No update of the last {host.bad_in_row} RL steps had a finite loss and gradient (--max_bad_steps={run.config.max_bad_steps}); the "
      "last checkpoint is of a good step. Lower the learning rate or the KL coefficient, or look at samples.jsonl for what went wrong."
    )
