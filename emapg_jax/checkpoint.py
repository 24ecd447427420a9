"""Checkpoints: the train state and the host's counters, written as one atomic unit while training goes on.

A directory `<step>/` gets its final name only once everything in it is on disk. What a killed run leaves (a temporary name, or a
numbered directory that lacks a part) is never read. Saving is asynchronous: `save` returns when the state may be donated, `wait` and
`close` return when the files are committed, and a write that failed raises there or in the next `save`.
"""

import contextlib
import dataclasses
import difflib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from emapg_jax.types import PyTree

_TMP_SUFFIX = ".orbax-checkpoint-tmp"
_MANIFEST = "state/manifest.ocdbt"
_SHOWN = 8  # mismatching leaves named in an error; a whole missing subtree would fill the screen


class _OrbaxRecords(logging.Filter):
  """Keeps orbax out of the absl log: progress is ours to print, and each of its failures reaches the caller as an exception."""

  def filter(self, record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname.replace("\\", "/")


logging.getLogger("absl").addFilter(_OrbaxRecords())


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


class Checkpointer:
  """The checkpoints of one run, `directory/<step>/`. The newest `keep_last` stay; an older one goes after its successor is committed."""

  def __init__(self, directory: str, keep_last: int):
    """Makes the directory and proves that it can be written to.

    Args:
      directory: a local or mounted path, the same for all processes; one run at a time writes to it.
      keep_last: checkpoints to keep, at least 1.

    Raises:
      ValueError: keep_last is below 1, or the directory can't be made or written to.
    """
    if keep_last < 1:
      raise ValueError(f"keep_last is {keep_last}, but a run needs at least 1 checkpoint to resume from. Use keep_last=1 or more.")
    self._directory = epath.Path(directory).expanduser().absolute()
    if jax.process_index() == 0:
      _require_writable(self._directory)
    options = ocp.CheckpointManagerOptions(preservation_policy=ocp.checkpoint_managers.LatestN(keep_last))
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
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(dataclasses.asdict(host)))
    self._pending = step
    try:
      self._manager.save(step, args=items, force=True)  # without force, orbax may skip a step and only return False
    except Exception as error:
      self._fail(error)

  def restore_latest(self, abstract_state: PyTree) -> tuple[PyTree, HostState] | None:
    """The newest complete checkpoint, placed as `abstract_state` says; None when there is none.

    Args:
      abstract_state: the tree of the train state; its leaves are arrays or `jax.ShapeDtypeStruct`s, each with a sharding. The mesh need
        not be that of the run that saved.

    Raises:
      ValueError: a leaf is in only one of the two trees, has another shape or dtype, or has no sharding (nothing is loaded then); or the
        checkpoint is damaged.
    """
    self.wait()
    step = self.latest_step()
    if step is None:
      return None
    target = _with_shardings(abstract_state)
    # Orbax can restore a part and leave the rest of a tree as it was; every difference is refused before that.
    with self._damage_named(step):
      saved = self._manager.item_metadata(step)["state"].tree
    _require_same_leaves(saved, target, f"Checkpoint {step} in {self._directory}")
    with self._damage_named(step):
      if not (self._directory / str(step) / _MANIFEST).exists():
        raise FileNotFoundError(f"{_MANIFEST} is missing")  # the reader would fail at each array, with a traceback for each on the screen
      restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore()))
    return restored["state"], self._host_state(restored["host"], step)

  def latest_step(self) -> int | None:
    """The newest step whose checkpoint is committed and whole, read from disk; None when there is none."""
    return max(self._whole_steps(), default=None)

  @property
  def skipped(self) -> list[str]:
    """Names of the numbered directories that lack a part and so are not resumed from, read from disk; the first `save` sets them aside."""
    return sorted((path.name for path in self._numbered() if not _is_whole(path)), key=int)

  def flags_of_latest(self) -> dict[str, str] | None:
    """The flags of the run that wrote the newest checkpoint, read without touching any array; None when there is none.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    self.wait()
    step = self.latest_step()
    if step is None:
      return None
    with self._damage_named(step):
      host = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
    return self._host_state(host, step).flags

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
    good = self.latest_step()
    kept = "No checkpoint is there to resume from" if good is None else f"Checkpoint {good} is whole and is what a resumed run starts from"
    raise CheckpointError(
      f"Checkpoint {step} could not be written to {self._directory} ({error}). {kept}. Check the free space and the permissions there."
    ) from error

  @contextlib.contextmanager
  def _damage_named(self, step: int) -> Iterator[None]:
    """Says which checkpoint it is and what to do, whatever a cut or missing file makes the reader raise."""
    try:
      yield
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise  # no memory for it says nothing of the files
    except Exception as error:
      cause = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
      previous = max((other for other in self._whole_steps() if other < step), default=None)
      then = "start anew" if previous is None else f"resume from checkpoint {previous}"
      raise ValueError(
        f"Checkpoint {step} in {self._directory} is damaged ({cause}). Move {self._directory / str(step)} away to {then}."
      ) from error

  def _whole_steps(self) -> list[int]:
    return [int(path.name) for path in self._numbered() if _is_whole(path)]

  def _numbered(self) -> list[epath.Path]:
    return [path for path in self._directory.iterdir() if path.name.isdecimal() and path.is_dir()] if self._directory.exists() else []

  def _remove_leftovers(self) -> None:
    """Clears what a killed run left, once, before the first write: a reader must not do it, the files may belong to a live run."""
    if self._tidy:
      return
    self._tidy = True
    if jax.process_index() == 0:
      for path in self._directory.glob(f"*{_TMP_SUFFIX}"):
        path.rmtree()
      for path in self._numbered():
        # Orbax would count it as a checkpoint: retention would keep it in place of a good one, and its step could not be saved.
        if not _is_whole(path):
          path.rename(_free_name(path))
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("checkpoint leftovers removed")
    self._manager.reload()

  def _host_state(self, values: dict[str, Any], step: int) -> HostState:
    names = {field.name for field in dataclasses.fields(HostState)}
    if not isinstance(values, dict) or set(values) != names:
      held = sorted(values) if isinstance(values, dict) else f"a {type(values).__name__}"
      raise ValueError(
        f"Checkpoint {step} in {self._directory} was written by another version: its host state holds {held}, this version wants "
        f"{sorted(names)}. Resume with the version that wrote it, or use another --workdir."
      )
    return HostState(**values)


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


def _require_writable(directory: epath.Path) -> None:
  probe = directory / ".write_probe"
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as error:
    raise ValueError(f"Checkpoints can't be written to {directory} ({error}). Choose a --workdir that this user may write to.") from error


def _is_whole(path: epath.Path) -> bool:
  parts = ("_CHECKPOINT_METADATA", "host/metadata", "state/_METADATA")
  return all((path / part).exists() for part in parts)


def _free_name(path: epath.Path) -> epath.Path:
  name, n = path.parent / f"{path.name}.incomplete", 1
  while name.exists():
    name, n = path.parent / f"{path.name}.incomplete.{n}", n + 1
  return name


def _leaves(tree: PyTree) -> dict[str, Any]:
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _with_shardings(state: PyTree) -> PyTree:
  missing = [name for name, leaf in _leaves(state).items() if getattr(leaf, "sharding", None) is None]
  if missing:
    raise ValueError(
      f"No sharding is given for {', '.join(missing[:_SHOWN])}: a restored array has to know its devices. Set it on the abstract state."
    )
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _require_same_leaves(saved: PyTree, wanted: PyTree, where: str) -> None:
  def describe(leaves: dict[str, Any], name: str) -> str:
    return f"{jax.numpy.dtype(leaves[name].dtype).name}{list(leaves[name].shape)}" if name in leaves else "nothing"

  has, wants = _leaves(saved), _leaves(wanted)
  bad = [name for name in sorted(has.keys() | wants.keys()) if describe(has, name) != describe(wants, name)]
  if bad:
    lines = [f"{name}: checkpoint {describe(has, name)}, run {describe(wants, name)}" for name in bad[:_SHOWN]]
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    raise ValueError(
      f"{where} does not fit this run in {len(bad)} of its arrays: {'; '.join(lines)}{more}. Resume with the model, "
      "critic, optimizer and anchor settings it was saved with, or use another --workdir."
    )
