"""The folder of a run's checkpoints: which of its entries are whole, and errors that name one and say what to do."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from etils import epath

TMP_SUFFIX = ".orbax-checkpoint-tmp"
MANIFEST = "state/manifest.ocdbt"
HOST = "host/metadata"
Remedy = Callable[[epath.Path, int], str]  # what to do about a damaged checkpoint in a folder
_PARTS = ("_CHECKPOINT_METADATA", HOST, "state/_METADATA")


def require_writable(directory: epath.Path) -> None:
  """Makes the folder; raises ValueError where nothing can be written to it."""
  probe = directory / ".write_probe"
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as error:
    raise ValueError(f"Checkpoints can't be written to {directory} ({error}). Choose a --workdir that this user may write to.") from error


def to_resume(directory: epath.Path, step: int) -> str:
  """What to do where a checkpoint of this run is damaged."""
  previous = max((other for other in whole_steps(directory) if other < step), default=None)
  then = "start anew" if previous is None else f"resume from checkpoint {previous}"
  return f"Move {directory / str(step)} away to {then}."


def to_start_from(directory: epath.Path, step: int) -> str:
  """What to do where a checkpoint of another run, from which one is to start, is damaged: that run may be another's, and is left alone."""
  others = sorted((other for other in whole_steps(directory) if other != step), key=lambda other: (other > step, -other))
  if others:
    return f"Start from another checkpoint of that run, as by --init_from={directory / str(others[0])}, or copy this one again."
  return "That run has no other: copy it again, if this is a copy, or start from another run."


@contextlib.contextmanager
def damage_named(directory: epath.Path, step: int, remedy: Remedy = to_resume) -> Iterator[None]:
  """Says which checkpoint it is and what to do, whatever a cut or missing file makes the reader raise."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # no memory for it says nothing of the files
  except Exception as error:
    cause = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    raise ValueError(f"Checkpoint {step} in {directory} is damaged ({cause}). {remedy(directory, step)}") from error


def require_manifest(path: epath.Path) -> None:
  """Raises FileNotFoundError where the index of the arrays is missing."""
  if not (path / MANIFEST).exists():  # the reader would fail at each array, with a traceback for each on the screen
    raise FileNotFoundError(f"{MANIFEST} is missing")


def numbered(directory: epath.Path) -> list[epath.Path]:
  """The entries with the name of a step, whole or not."""
  return [path for path in directory.iterdir() if is_step(path.name) and path.is_dir()] if directory.exists() else []


def is_step(name: str) -> bool:
  """Whether a checkpoint would have this name: a number, written in one way."""
  return name.isdecimal() and name == str(int(name))


def whole_steps(directory: epath.Path) -> list[int]:
  """The steps whose checkpoint is committed and has all its parts, in no order."""
  return [int(path.name) for path in numbered(directory) if is_whole(path)]


def is_whole(path: epath.Path) -> bool:
  """Whether a numbered folder has all parts of a checkpoint; an interrupted write, or a copy, may lack one."""
  return not missing(path)


def is_begun(path: epath.Path) -> bool:
  """Whether a folder has any part of a checkpoint."""
  return any((path / part).exists() for part in _PARTS)


def missing(path: epath.Path) -> list[str]:
  """The parts of a checkpoint that a folder lacks."""
  return [part for part in _PARTS if not (path / part).exists()]


def free_name(path: epath.Path) -> epath.Path:
  """A name beside `path` under which it can be set aside."""
  name, n = path.parent / f"{path.name}.incomplete", 1
  while name.exists():
    name, n = path.parent / f"{path.name}.incomplete.{n}", n + 1
  return name
