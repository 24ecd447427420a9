"""Checkpoints: the train state and the host's counters, written as one atomic unit while training goes on.

A directory `<step>/` gets its final name only once everything in it is on disk. What a killed run leaves (a temporary name, or a
numbered directory that lacks a part) is never read. Saving is asynchronous: `save` returns when the state may be donated, `wait` and
`close` return when the files are committed, and a write that failed raises there or in the next `save`.
"""

import contextlib
import dataclasses
import difflib
import json
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from emapg_jax import checkpoint_files as files
from emapg_jax import distributed, stored_tree
from emapg_jax.types import PyTree, policy_of


class _OrbaxRecords(logging.Filter):
  """Keeps orbax out of the absl log: progress is ours to print, and each of its failures reaches the caller as an exception."""

  def filter(self, record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname.replace("\\", "/")


logging.getLogger("absl").addFilter(_OrbaxRecords())
# What is left of a write that failed is reported there once more for each file, with a traceback.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


_OTHER_VERSION = "Resume with the version that wrote it, or use another --workdir."


class CheckpointError(RuntimeError):
  """A checkpoint could not be written."""


@dataclasses.dataclass(frozen=True)
class HostState:
  """What a resumed run needs beside the arrays; stored as JSON inside the checkpoint."""

  position: int = 0  # of the data stream, in problems drawn since the start of the run
  bad_in_row: int = 0  # RL steps in a row without one finite mini-batch
  bad_total: int = 0  # mini-batches skipped since the start of the run
  kl_coef: float | None = None  # the adapted one; None before the first step, and where it is fixed
  baseline: float | None = None  # running mean reward; None before the first step, and where there is none
  flags: dict[str, str] = dataclasses.field(default_factory=dict)
  evaluation: dict[str, float] = dataclasses.field(default_factory=dict)  # made at this step; empty when none was


@dataclasses.dataclass
class _Retention:
  """Which checkpoints stay: the newest, and those of the best evaluations, of equals the earlier. A policy in the sense of orbax."""

  keep_last: int
  keep_best: int
  metric: str
  values: dict[int, float]  # of the metric, by step; a checkpoint without an evaluation has none

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    steps = sorted(info.step for info in checkpoints)
    best = sorted((step for step in steps if step in self.values), key=lambda step: (-self.values[step], step))
    kept = {*steps[-self.keep_last :], *best[: self.keep_best]}
    return [info.step in kept for info in checkpoints]

  def is_best(self, evaluation: dict[str, float]) -> bool:
    value = evaluation.get(self.metric)
    return value is not None and sum(other >= value for other in self.values.values()) < self.keep_best


class Checkpointer:
  """The checkpoints of one run, `directory/<step>/`; one that does not stay goes after a later one is committed."""

  def __init__(self, directory: str, keep_last: int, keep_best: int = 0, best_metric: str = ""):
    """Makes the directory and proves that it can be written to.

    Args:
      directory: a local or mounted path, the same for all processes; one run at a time writes to it.
      keep_last: newest checkpoints to keep, at least 1.
      keep_best: checkpoints to keep beside them, those whose `HostState.evaluation` has the highest `best_metric`.

    Raises:
      ValueError: keep_last is below 1, or the directory can't be made or written to.
    """
    if keep_last < 1:
      raise ValueError(f"keep_last is {keep_last}, but a run needs at least 1 checkpoint to resume from. Use keep_last=1 or more.")
    self._directory = epath.Path(directory).expanduser().absolute()
    if jax.process_index() == 0:
      files.require_writable(self._directory)
    evaluations = distributed.from_first(self._evaluations(best_metric)) if keep_best else {}
    self._retention = _Retention(keep_last, keep_best, best_metric, evaluations)
    options = ocp.CheckpointManagerOptions(preservation_policy=self._retention)
    # Handlers are given at once: a manager that only learns them from its first save finds no metadata before it.
    handlers = {"state": ocp.StandardCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
    self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
    self._pending: int | None = None  # the step that may not be committed yet
    self._tidy = False
    self._closed = False

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def save(self, step: int, state: PyTree, host: HostState) -> None:
    """Starts writing checkpoint `step`; on return `state` may be donated. A step that is already saved is left as it is.

    Raises:
      CheckpointError: this write, or the one before it, failed.
      ValueError: a later step is already in the directory, so this one would not be what a resumed run starts from.
    """
    self._remove_leftovers()
    self.wait()
    latest = self.latest_step()
    if latest == step:
      return
    if latest is not None and step < latest:
      raise ValueError(
        f"Checkpoint {step} can't be written to {self._directory}: checkpoint {latest} is already there, and a resumed run starts from the "
        "latest. Resume from it, or use another --workdir."
      )
    sums = stored_tree.checksums(state)
    items = ocp.args.Composite(state=ocp.args.StandardSave(stored_tree.plain(state)), host=ocp.args.JsonSave(_sealed(host, step, sums)))
    self._pending = step
    if self._retention.metric in host.evaluation:
      self._retention.values[step] = host.evaluation[self._retention.metric]
    try:
      self._manager.save(step, args=items, force=True)  # without force, orbax may skip a step and only return False
    except Exception as error:
      self._fail(error)

  def is_best(self, evaluation: dict[str, float]) -> bool:
    """Whether a checkpoint of the step with this evaluation would be one of the `keep_best`: worth a save when none is due."""
    return self._retention.is_best(evaluation)

  def restore_latest(self, abstract_state: PyTree) -> tuple[PyTree, HostState] | None:
    """The newest complete checkpoint, placed as `abstract_state` says; None when there is none.

    Args:
      abstract_state: the tree of the train state; its leaves are arrays or `jax.ShapeDtypeStruct`s, each with a sharding. The mesh need
        not be that of the run that saved.

    Raises:
      ValueError: a leaf is in only one of the two trees, has another shape or dtype, or no sharding that fits (nothing is loaded then); or
        the checkpoint is damaged, be it by a single bit.
    """
    self.wait()
    step = self.latest_step()
    if step is None:
      return None
    target = stored_tree.targets(abstract_state)
    # Orbax can restore a part and leave the rest of a tree as it was; every difference is refused before that.
    with files.damage_named(self._directory, step):
      saved = self._manager.item_metadata(step)["state"].tree
    remedy = "Resume with the model, critic, optimizer and anchor settings it was saved with"
    stored_tree.require_same_leaves(saved, target, f"Checkpoint {step} in {self._directory}", remedy)
    with files.damage_named(self._directory, step):
      files.require_manifest(self._directory / str(step))
      restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore()))
    host, sums = _opened(restored["host"], self._directory, step)
    with files.damage_named(self._directory, step):
      _require_unchanged(restored["state"], sums)
    return stored_tree.typed(restored["state"], abstract_state), host

  def latest_step(self) -> int | None:
    """The newest step whose checkpoint is committed and whole, read from disk; None when there is none.

    With several processes all must ask, and get what process 0 sees: a network file system may show the others an older folder.
    """
    return distributed.from_first(self._newest())

  def _newest(self) -> int | None:
    return max(files.whole_steps(self._directory), default=None)

  @property
  def skipped(self) -> list[str]:
    """Names of the numbered directories that lack a part and so are not resumed from, read from disk; the first `save` sets them aside."""
    return sorted((path.name for path in files.numbered(self._directory) if not files.is_whole(path)), key=int)

  def flags_of_latest(self) -> dict[str, str] | None:
    """The flags of the run that wrote the newest checkpoint, read without touching any array; None when there is none.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    self.wait()
    step = self.latest_step()
    if step is None:
      return None
    with files.damage_named(self._directory, step):
      host = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
    return _opened(host, self._directory, step)[0].flags

  def wait(self) -> None:
    """Blocks until the checkpoint being written is committed.

    Raises:
      CheckpointError: it could not be written.
    """
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      self._fail(error)
    self._pending = None

  def close(self) -> None:
    """Waits as `wait` does and ends the writing threads; a second call does nothing.

    Raises:
      CheckpointError: the last checkpoint could not be written.
    """
    if self._closed:
      return
    self._closed = True
    try:
      self.wait()
    finally:
      self._manager.close()

  def _fail(self, error: Exception) -> None:
    step, self._pending = self._pending, None
    good = self._newest()
    others = "" if distributed.count() == 1 else " Where it tells of other processes, look at what these have printed."
    kept = "No checkpoint is there to resume from" if good is None else f"Checkpoint {good} is whole and is what a resumed run starts from"
    raise CheckpointError(
      f"Checkpoint {step} could not be written to {self._directory} ({error}). {kept}. Check the free space and the permissions there."
      f"{others}"
    ) from error

  def _evaluations(self, metric: str) -> dict[int, float]:
    """The metric of each checkpoint that has one. One that can't be read has none: resuming from it is what names the damage."""
    values = {}
    for step in files.whole_steps(self._directory):
      with contextlib.suppress(ValueError, KeyError, TypeError):
        values[step] = float(json.loads((self._directory / str(step) / files.HOST).read_text())["evaluation"][metric])
    return values

  def _remove_leftovers(self) -> None:
    """Clears what a killed run left, once, before the first write: a reader must not do it, the files may belong to a live run."""
    if self._tidy:
      return
    self._tidy = True
    if jax.process_index() == 0:
      for path in self._directory.glob(f"*{files.TMP_SUFFIX}"):
        path.rmtree()
      for path in files.numbered(self._directory):
        # Orbax would count it as a checkpoint: retention would keep it in place of a good one, and its step could not be saved.
        if not files.is_whole(path):
          path.rename(files.free_name(path))
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("checkpoint leftovers removed")
    self._manager.reload()


def _sealed(host: HostState, step: int, sums: dict[str, int]) -> dict[str, Any]:
  """What is written beside the arrays, with a checksum of its own."""
  values = dataclasses.asdict(host) | {"step": step, "array_sums": sums}
  return values | {"checksum": _checksum(values)}


def _checksum(values: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _opened(
  values: Any, directory: epath.Path, step: int, remedy: files.Remedy = files.to_resume, other_version: str = _OTHER_VERSION
) -> tuple[HostState, dict[str, int]]:
  """What `_sealed` made, and the sums of the arrays; ValueError where it is of another version, has been changed, or is of another step."""
  names = {field.name for field in dataclasses.fields(HostState)} | {"step", "array_sums", "checksum"}
  if not isinstance(values, dict) or set(values) != names:
    held = sorted(values) if isinstance(values, dict) else f"a {type(values).__name__}"
    raise ValueError(
      f"Checkpoint {step} in {directory} was written by another version: its host state holds {held}, this version wants {sorted(names)}. "
      f"{other_version}"
    )
  with files.damage_named(directory, step, remedy):
    if values.pop("checksum") != _checksum(values):
      raise ValueError(f"{files.HOST} is not what was written")
    if (written := values.pop("step")) != step:
      raise ValueError(f"it was written as checkpoint {written}")
  sums = values.pop("array_sums")
  return HostState(**values), sums


def flags_difference(
  old: dict[str, str], new: dict[str, str], runtime: frozenset[str], override: Sequence[str]
) -> dict[str, tuple[str | None, str | None]]:
  """Refuses to resume a run under other settings; returns {flag: (old, new)} for the differences that `override` accepts.

  Args:
    old: flags stored in the checkpoint.
    new: flags of this start.
    runtime: flags that may differ freely, such as the number of steps or the mesh.
    override: flags whose difference is intended. One that does not differ is accepted, so that the same command resumes twice.

  Raises:
    ValueError: another flag differs or is present on one side only, or `override` names no flag.
  """
  known = old.keys() | new.keys()
  for name in override:
    if name not in known:
      near = difflib.get_close_matches(name, sorted(known), n=1)
      raise ValueError(f"--override names {name!r}, which is no flag of this run." + (f" Did you mean {near[0]!r}?" if near else ""))
  differing = {name: (old.get(name), new.get(name)) for name in sorted(known - runtime) if old.get(name) != new.get(name)}
  refused = {name: values for name, values in differing.items() if name not in override}
  if refused:
    lines = "; ".join(f"--{name} was {_flag(before)}, is now {_flag(after)}" for name, (before, after) in refused.items())
    raise ValueError(
      f"The run in this --workdir was started with other settings: {lines}. Start it again with the old values, use "
      f"another --workdir, or accept the change with --override={','.join(sorted({*refused, *override}))}."
    )
  return differing


def _flag(value: str | None) -> str:
  return "not set" if value is None else repr(value)


def _require_unchanged(restored: PyTree, sums: dict[str, int]) -> None:
  bad = stored_tree.changed(restored, sums)
  if bad:
    raise ValueError(f"not what was written: {bad}")


def restore_policy(path: str, policy: PyTree, anchor: PyTree | None = None) -> tuple[PyTree, PyTree | None, int]:
  """The policy and, if asked for, the anchor of another run's checkpoint, and its step. Optimizer and critic are not read.

  Args:
    path: the folder of a run, whose latest checkpoint is taken, or one of its checkpoints, `RUN/checkpoints/120`. Nothing is written there.
    policy: the tree of the policy, with shardings, as in `Checkpointer.restore_latest`.
    anchor: that of the anchor, or None.

  Raises:
    ValueError: there is no checkpoint, it is damaged, has no anchor, or is of another architecture.
  """
  # The other run may go on meanwhile: all processes start from what the first finds.
  directory, step = distributed.together(lambda: _located(epath.Path(path).expanduser().absolute()))[0]
  place, where = directory / str(step), f"Checkpoint {step} in {directory}"
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    with files.damage_named(directory, step, files.to_start_from):
      host = json.loads((place / files.HOST).read_text())
      files.require_manifest(place)
      saved = reader.metadata(place / "state").item_metadata.tree
    _, sums = _opened(host, directory, step, files.to_start_from, "Start from a run of this version.")
    if "params" not in saved:
      raise ValueError(f"{where} does not hold the state of a run, but {', '.join(saved)}: give one of RUN/checkpoints.")
    if anchor is not None and not jax.tree.leaves(saved["ema_params"]):
      raise ValueError(f"{where} has no anchor to start from: leave out --init_anchor, or choose another run.")
    parts = {"params": policy} | ({} if anchor is None else {"ema_params": anchor})
    wanted = stored_tree.targets(parts)
    remedy = "Set the model to that of the other run (--model_path, or the sizes of a random one, and --param_dtype)"
    stored_tree.require_same_leaves(
      {"params": policy_of(saved["params"])} | {k: saved[k] for k in parts if k != "params"}, wanted, where, remedy
    )
    critic = policy_of(saved["params"]) is not saved["params"]
    item = wanted | ({"params": {"policy": wanted["params"]}} if critic else {})
    with files.damage_named(directory, step, files.to_start_from):
      arguments = ocp.checkpoint_utils.construct_restore_args(item)
      restored = reader.restore(place / "state", args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True))
      _require_unchanged(restored, sums)
  return restored["params"]["policy"] if critic else restored["params"], restored.get("ema_params"), step


def _located(path: epath.Path) -> tuple[epath.Path, int]:
  """The folder and the step of the checkpoint that a path means."""
  if files.is_step(path.name) and files.is_begun(path):
    with files.damage_named(path.parent, int(path.name), files.to_start_from):
      if files.missing(path):
        raise FileNotFoundError(f"{files.missing(path)[0]} is missing")
    return path.parent, int(path.name)
  steps = files.whole_steps(path / "checkpoints")
  if not steps:
    lacking = [f"{place.name} lacks {files.missing(place)[0]}" for place in files.numbered(path / "checkpoints")]
    why = "" if path.exists() else ", which does not exist"
    raise ValueError(
      f"There is no checkpoint to start from in {path}{why}{f' (of what is there, {lacking[0]})' if lacking else ''}: give --init_from the "
      "folder of a run, which holds checkpoints/, or one of its checkpoints, as in RUN/checkpoints/120."
    )
  return path / "checkpoints", max(steps)
