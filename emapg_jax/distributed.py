"""Several processes as one program: how they meet, what they tell each other, and that they end together.

Every process runs the same code on the same data and draws the same random numbers, so that all of them know what to do next without
asking. What only one of them knows, such as the responses and scores of its share of the prompts, goes through `gathered`. With one
process nothing here communicates.
"""

import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

_FIRST_PIECE = 4096  # bytes; most messages are no longer
_IN_FLIGHT = 2**28  # bytes that a gather has on a device at a time, of all processes
_LAST_WORDS = 1.0  # seconds that process 0 leaves the others to say what went wrong: they end when it does


# How a program that exchanges something says that another process has gone.
_LOST_TOUCH = re.compile(r"gloo|nccl|unavailable|connection|deadline_exceeded", re.IGNORECASE)

_boards = itertools.count()


class OtherProcessError(RuntimeError):
  """Another process failed, so that this one can't go on."""


def initialize(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  heartbeat_timeout: int = 30,
  patience: int = 300,
) -> None:
  """Connects the processes; must come before anything that looks at a device.

  Args:
    coordinator: host:port at which process 0 listens. None: this and the next two are found in the environment, as of a TPU pod slice, GKE,
      SLURM or Open MPI.
    num_processes: how many there are.
    process_id: which of them this one is, from 0.
    heartbeat_timeout: seconds after which a process that gives no sign of life counts as dead; JAX then ends the others.
    patience: seconds to wait for processes that start later; after them this one ends, with exit code 1.

  Raises:
    ValueError: the environment says nothing of other processes, the coordinator can't be reached, or devices and processes don't add up.
  """
  if coordinator is not None:
    _require_reachable(coordinator, num_processes, process_id, patience)
  try:
    with _ended_after(patience, coordinator, num_processes):
      jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method=None if coordinator is None else "deactivate",
        initialization_timeout=patience + 60,  # after which it ends the process with a stack trace
        heartbeat_timeout_seconds=heartbeat_timeout,
      )
  except (ValueError, RuntimeError) as error:
    cause = (str(error).strip() or type(error).__name__).splitlines()[0]
    mend = (
      "The port must be free on the host of process 0, and each process have a number of its own."
      if coordinator
      else "Without a TPU pod slice, GKE, SLURM or Open MPI, give each process --coordinator, --num_processes and --process_id."
    )
    raise ValueError(f"The processes could not be connected ({cause}). {mend}") from error
  # JAX has taken SIGTERM for a preemption notice of its own, and what would have ended the process no longer does.
  signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
  _require_even_devices(num_processes)
  gathered(None)  # while all are here: on CPU, those that meet for the first time wait for each other for 30 seconds only


def _require_reachable(coordinator: str, num_processes: int, process_id: int, patience: int) -> None:
  """Waits until process 0 listens: where nobody does, JAX would end the process with a stack trace."""
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError(
      f"--coordinator={coordinator} is not HOST:PORT, as in 10.0.0.1:8476: name the host of process 0 and a free port on it."
    )
  if process_id == 0:
    try:
      with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a run that has just ended don't take it
        probe.bind(("", int(port)))
    except OSError as error:
      raise ValueError(
        f"Process 0 can't listen at port {port} of --coordinator={coordinator} ({error}): choose a free port, and give --process_id=0 once."
      ) from error
    print(f"process 0 of {num_processes} waits for the others at {coordinator}, at most {patience} s", file=sys.stderr, flush=True)
    return
  deadline = time.monotonic() + patience
  while True:
    try:
      socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
      print(f"process {process_id} of {num_processes} has found process 0 at {coordinator}", file=sys.stderr, flush=True)
      return
    except OSError as error:
      if time.monotonic() > deadline:
        raise ValueError(
          f"Process {process_id} could not reach the coordinator at {coordinator} within {patience} s ({error}): start process 0 on that "
          "host, and let this one through to its port."
        ) from error
    time.sleep(0.2)


@contextlib.contextmanager
def _ended_after(patience: float, coordinator: str | None, num_processes: int | None) -> Iterator[None]:
  """Ends the process with a message where the body takes longer: JAX waits in code that no exception reaches, and tells nobody who came."""

  def end():
    told = (
      f" at {coordinator} within {patience:g} s. Each says so on its own screen once it has found that place: start those that don't, each "
      "with its own --process_id, and let them through to the port."
      if coordinator
      else f" within {patience:g} s. Start the program on every host of the slice, or as every task of the job; the hosts must reach the "
      "first of them."
    )
    every = "" if num_processes is None else f"{num_processes} "
    print(f"error: Not all {every}processes have met{told}", file=sys.stderr, flush=True)
    os._exit(1)

  timer = threading.Timer(patience, end)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _require_even_devices(num_processes: int | None) -> None:
  count = jax.process_count()
  if num_processes is not None and count != num_processes:
    raise ValueError(
      f"JAX sees {count} process(es) on {jax.default_backend()} where --num_processes={num_processes}: this backend joins none. On CPU "
      "leave JAX_CPU_COLLECTIVES_IMPLEMENTATION at gloo."
    )
  held = np.bincount([device.process_index for device in jax.devices()], minlength=count)
  if held.min() != held.max():
    raise ValueError(f"The processes hold {held.min()} to {held.max()} devices each: all need the same number. Start them on equal hosts.")


def index() -> int:
  """Which of the processes this is; 0 as long as they aren't connected."""
  return jax.process_index() if jax.distributed.is_initialized() else 0


def count() -> int:
  """How many processes there are; 1 as long as they aren't connected."""
  return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
  """Whether this is process 0, the one that writes files and speaks."""
  return index() == 0


def share(size: int, process: int) -> np.ndarray:
  """The indices from 0 to `size` that belong to a process: consecutive, and as many as any other's where that is possible."""
  return np.arange(size * process // count(), size * (process + 1) // count())


def gathered(value: Any) -> list[Any]:
  """The values of all processes, in their order; each must call it, at the same place. Values are pickled: arrays come bit by bit."""
  if count() == 1:
    return [value]
  payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
  message = len(payload).to_bytes(8, "little") + payload
  pieces = [_all_gather(message[:_FIRST_PIECE], _FIRST_PIECE)]
  sizes = [8 + int.from_bytes(piece[:8].tobytes(), "little") for piece in pieces[0]]
  largest_piece = max(_FIRST_PIECE, _IN_FLIGHT // _power_of_two(count()))
  done, longest = _FIRST_PIECE, max(sizes)
  while done < longest:
    size = min(largest_piece, _power_of_two(longest - done))
    pieces.append(_all_gather(message[done : done + size], size))
    done += size
  messages = np.concatenate(pieces, axis=1)
  return [pickle.loads(row[8:size]) for row, size in zip(messages, sizes)]


def _power_of_two(number: int) -> int:
  return max(4, 1 << (number - 1).bit_length())  # few sizes, since each is a program of its own; whole words


def _all_gather(piece: bytes, size: int) -> np.ndarray:
  """uint8 [processes, size]"""
  words = np.frombuffer(piece.ljust(size, b"\0"), np.uint32)
  try:
    found = multihost_utils.process_allgather(words)
  except (RuntimeError, ValueError) as error:
    raise _out_of_reach(error) from error
  return np.ascontiguousarray(found).view(np.uint8)


def from_first(value: T) -> T:
  """The value that process 0 has."""
  return gathered(value if is_first() else None)[0]


def together(function: Callable[[], T]) -> list[T]:
  """What `function()` returned on each process, in their order. It must be work of this process alone, in which no other takes part.

  Raises:
    Exception: the function's own error where it failed, so that no process waits for one that is gone.
    OtherProcessError: everywhere else.
  """
  if count() == 1:
    return [function()]
  result = failure = None
  try:
    result = function()
  except Exception as error:
    failure = error
  outcomes = gathered((result, failure and f"{type(failure).__name__}: {failure}"))
  if failure:
    raise failure
  for process, (_, text) in enumerate(outcomes):
    if text:
      raise OtherProcessError(f"Process {process} failed, and so the run stops everywhere: {text}")
  return [value for value, _ in outcomes]


class Board:
  """Notes between processes that are at different places in the program: whoever looks sees what was posted before, and waits for nobody.

  All processes must make their boards in the same order. Each look asks process 0, which takes a fraction of a millisecond.
  """

  def __init__(self):
    from jax._src import distributed  # its key-value store, which JAX has no public name for

    self._client, self._folder = distributed.global_state.client, f"emapg_jax/board/{next(_boards)}/"

  def post(self, name: str, text: str) -> None:
    """Leaves a note, unless one of this name is there."""
    try:
      self._client.key_value_set(self._folder + name, text)
    except RuntimeError as error:
      if "ALREADY_EXISTS" not in str(error):
        raise _out_of_reach(error) from error

  def read(self) -> dict[str, str]:
    """All notes, by name."""
    try:
      return {key.removeprefix(self._folder): text for key, text in self._client.key_value_dir_get(self._folder)}
    except RuntimeError as error:
      raise _out_of_reach(error) from error


def _out_of_reach(error: Exception) -> OtherProcessError:
  cause = (str(error).strip() or type(error).__name__).splitlines()[0]
  return OtherProcessError(f"Another process can't be reached any more ({cause}): look at what it has printed.")


def place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
  """A host array that all processes hold, as one array over their devices: each lays out its own part."""
  if sharding is None or sharding.is_fully_addressable:
    return jax.device_put(array, sharding, may_alias=False)
  return jax.make_array_from_callback(np.shape(array), sharding, lambda at: np.array(np.asarray(array)[at]))


def require_shared(folder: os.PathLike) -> None:
  """Proves that all processes see the same folder.

  Raises:
    ValueError: one of them does not see what process 0 wrote there.
  """
  if count() == 1:
    return
  probe = os.path.join(folder, f".shared_{os.getpid() if is_first() else ''}")

  def write():
    if is_first():
      with open(probe, "w") as file:
        file.write("")
    return probe

  name = together(write)[0]
  missing = [process for process, seen in enumerate(gathered(_appears(name))) if not seen]
  if is_first():
    os.remove(name)
  if missing:
    raise ValueError(
      f"Process {missing[0]} does not see in {folder} what process 0 has written there: checkpoints need a --workdir that is the same "
      "folder for all processes, such as a mounted network file system."
    )


def _appears(path: str, patience: float = 10.0) -> bool:
  deadline = time.monotonic() + patience
  while not os.path.exists(path):
    if time.monotonic() > deadline:
      return False
    with contextlib.suppress(OSError):
      os.listdir(os.path.dirname(path))  # makes a network file system look again
    time.sleep(0.1)
  return True


@contextlib.contextmanager
def ended_by_an_error() -> Iterator[None]:
  """Ends this process at once where the body fails, with exit code 1 (130 after Ctrl-C); one that stops as agreed ends as usual.

  At its usual end a process waits for the others. They, in turn, wait for what this one no longer does, and learn only from its death.
  """
  try:
    yield
  except BaseException as error:
    stops_as_agreed = isinstance(error, SystemExit) and error.code != 1
    if count() == 1 or stops_as_agreed:
      raise
    if isinstance(error, jax.errors.JaxRuntimeError) and _LOST_TOUCH.search(str(error)):
      print(f"error: {_out_of_reach(error)}", file=sys.stderr)
    elif not isinstance(error, SystemExit | KeyboardInterrupt):
      traceback.print_exc()
    if not isinstance(error, SystemExit | KeyboardInterrupt):
      print(f"process {index()} of {count()} has failed; the others end with it, or ended before it", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()
    if is_first():
      time.sleep(_LAST_WORDS)
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
