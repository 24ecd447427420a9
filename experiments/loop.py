"""The loop of a run: resume, step, evaluate, log, save; stop without losing anything."""

import dataclasses
import pathlib

from emapg_jax import data, distributed, metrics
from emapg_jax.checkpoint import Checkpointer, HostState
from emapg_jax.config import BEST_METRICS
from experiments import flags, profiling, report, rollouts
from experiments.build import Run
from experiments.log import Log
from experiments.plots import plot_curves
from experiments.resume import keep_initial, start
from experiments.rl_step import rl_step
from experiments.stopping import StopRequest, only_run_in


def train(run: Run, workdir: pathlib.Path) -> dict[str, float]:
  """Runs to `--steps` and returns the last value of each metric."""
  config = run.config
  with StopRequest() as stop, only_run_in(workdir):
    step, last = _steps(run, workdir, stop)
    stop.over = True
    if distributed.is_first():
      plot_curves(workdir / "metrics.jsonl", workdir / "curves.png")
    if step < config.steps:
      report.say(f"stopped at step {step} of {config.steps}; saved to {workdir / 'checkpoints' / str(step)}")
      alone = distributed.count() == 1
      again = f"python -m experiments.math_grpo --flagfile={workdir / 'flags.txt'} --workdir={workdir}"
      report.say(f"it goes on with: {again}" if alone else "it goes on when all processes are started again, with the same command")
      raise SystemExit(stop.exit_code)
  return last


def _steps(run: Run, workdir: pathlib.Path, stop: StopRequest) -> tuple[int, dict[str, float]]:
  """To `--steps` or to where the run was asked to stop: the step that is saved, and the last value of each metric."""
  config, first = run.config, distributed.is_first()
  with (
    metrics.MetricsWriter(str(workdir) if first else None) as writer,
    Checkpointer(str(workdir / "checkpoints"), config.keep_last, config.keep_best, config.best_metric) as checkpointer,
    profiling.Profiler(config.profile_steps if first else "", config.steps, workdir / "profile") as profiler,
  ):
    state, host = start(run, checkpointer, writer, workdir, stop)
    initial = keep_initial(run, state, workdir / "initial") if run.keep_initial else None
    if first:
      flags.write(config, workdir / "flags.txt")
    stream = data.PromptStream(len(run.train.problems), config.seed)
    stream.position = host.position
    step = began = int(state.step)
    if step >= config.steps:
      report.say(f"the run is complete: checkpoint {step} of --steps={config.steps} is there; raise --steps to go on")
    log = Log(writer, metrics.Progress(config.steps, initial=step, shown=first), config)
    if step == 0:
      found, samples = rollouts.evaluate(run, state.policy, 0) if run.eval else ({}, [])
      report.evaluation(0, found)
      if config.save_every:  # before the line: a kill in between then starts the evaluation again, and not the run
        checkpointer.save(0, state, _with_evaluation(host, found))
        checkpointer.wait()
      log.write(0, found, samples)
    while step < config.steps and not stop.agreed():
      try:
        with profiler.step(step + 1), stop.may_leave_rollouts(run):
          state, host, numbers, samples = rl_step(run, state, host, initial, stream, step + 1)
      except rollouts.RolloutsGivenUp:
        break
      step += 1
      last = step == config.steps
      evaluated, found = bool(run.eval) and (step % config.eval_every == 0 or last), {}
      if evaluated:
        found, eval_samples = rollouts.evaluate(run, state.policy, step)
        report.evaluation(step, found)
        numbers, samples = numbers | found, samples + eval_samples
      # No line before the last checkpoint is on disk, or a kill would lose more than `save_every` of them; the line comes before its own
      # checkpoint, or a kill in between would leave a gap.
      checkpointer.wait()
      log.write(step, numbers, samples if evaluated or last or step == 1 or host.bad_in_row else [])
      _stop_if_bad(run, host)
      # A resumed run saves its end even with --save_every=0: the flags it has written are no longer those of the checkpoint it came from.
      due = config.save_every and step % config.save_every == 0
      if (due or (last and (config.save_every or began)) or checkpointer.is_best(found)) and not host.bad_in_row:
        checkpointer.save(step, state, _with_evaluation(host, found))
    log.close()
    if stop.agreed():
      checkpointer.save(step, state, _with_evaluation(host, {}))
  return step, log.last


def _with_evaluation(host: HostState, found: dict[str, float]) -> HostState:
  return dataclasses.replace(host, evaluation={name: found[name] for name in BEST_METRICS if name in found})


def _stop_if_bad(run: Run, host: HostState) -> None:
  if host.bad_in_row >= run.config.max_bad_steps:
    raise ValueError(
      f"No update of the last {host.bad_in_row} RL steps had a finite loss and gradient (--max_bad_steps={run.config.max_bad_steps}); the "
      "last checkpoint is of a good step. Lower the learning rate or the KL coefficient, or look at samples.jsonl for what went wrong."
    )
