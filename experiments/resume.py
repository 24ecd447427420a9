"""Where a run goes on from."""

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp

from emapg_jax import distributed, metrics
from emapg_jax.checkpoint import Checkpointer, HostState, flags_difference, restore_policy
from emapg_jax.config import RUNTIME_FLAGS
from emapg_jax.types import PyTree, TrainState
from experiments import flags, report, warmup
from experiments.build import Run, new_state
from experiments.stopping import StopRequest


def start(
  run: Run, checkpointer: Checkpointer, writer: metrics.MetricsWriter, workdir: pathlib.Path, stop: StopRequest
) -> tuple[TrainState, HostState]:
  """The state to go on from: the latest checkpoint, or a fresh one (warmed up when the run asks for it)."""
  now = flags.as_strings(run.config) | {"problems": run.train.fingerprint()}
  require_alike(now)
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
  state = _from_another_run(run) if run.config.init_from else new_state(run)
  if run.config.warmup_steps:
    state = warmup.warm_up(run, state, stop)
  return state, HostState(flags=now)


def require_alike(now: dict[str, str]) -> None:
  """With several processes: all must have the same flags and problems, or they would go different ways, or train on mixed data.

  Raises:
    ValueError: on every process, where one differs.
  """
  for process, other in enumerate(distributed.gathered(now)):
    different = [name for name in now if other.get(name) != now[name]]
    if different:
      name = different[0]
      raise ValueError(
        f"Process {process} was started with {name}={other.get(name)!r}, process {distributed.index()} with {now[name]!r}: start all "
        "processes with the same command, and give them the same data."
      )


def _from_another_run(run: Run) -> TrainState:
  """A fresh state around the policy of `--init_from`, and around its anchor with `--init_anchor`."""
  abstract, take_anchor = run.abstract_state, run.config.init_anchor
  policy, anchor, step = restore_policy(run.config.init_from, abstract.policy, abstract.ema_params if take_anchor else None)
  report.say(f"starts from the policy{' and the anchor' if take_anchor else ''} of {run.config.init_from} at its step {step}")

  def fresh(policy, anchor):
    state = run.fresh_state(policy)
    return state.replace(ema_params=anchor) if take_anchor else state

  return jax.jit(fresh, out_shardings=jax.tree.map(lambda a: a.sharding, abstract), donate_argnums=(0, 1))(policy, anchor)


def keep_initial(run: Run, state: TrainState, folder: pathlib.Path) -> PyTree:
  """The policy as it was before the first RL step: a copy, saved beside the checkpoints at step 0 and read back on resume."""
  fresh = int(state.step) == 0
  if fresh and distributed.is_first():
    shutil.rmtree(folder, ignore_errors=True)  # of a start that never came to a checkpoint
  distributed.gathered(None)  # no process looks there before
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
