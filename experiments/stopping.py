"""One run at a time in a folder, and what ends it early."""

import contextlib
import fcntl
import pathlib
import signal

from experiments import report


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
