"""One run at a time in a folder, and what ends it early."""

import contextlib
import fcntl
import pathlib
import signal
from typing import Any

from emapg_jax import distributed
from experiments import report
from experiments.build import Run
from experiments.rollouts import RolloutsGivenUp


@contextlib.contextmanager
def only_run_in(workdir: pathlib.Path):
  """Holds a lock on the folder of the run, in process 0; it ends with the process, however that ends. All processes must see the folder."""
  if not distributed.is_first():
    distributed.require_shared(workdir)
    yield
    return
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / "lock", "w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(f"Another run is writing to {workdir}: wait for it, stop it, or choose another --workdir.") from error
    distributed.require_shared(workdir)
    yield


class StopRequest:
  """Ctrl-C, or the SIGTERM of a machine that is about to go, ends the run at the next border of a step; a second one ends it at once.

  Several processes wait for each other until they end, and one that dies takes the others with it. So where they end as agreed, one that
  has had no signal yet goes on ignoring its first, behind the `with`, too.
  """

  def __init__(self):
    self.signal: int | None = None  # the one that the run stops for
    self.over = False  # nothing is left to stop
    self._came = False  # to this process
    self._previous: dict[int, Any] = {}

  @property
  def asked(self) -> bool:
    """Whether this process got a signal, or has agreed on one."""
    return self.signal is not None

  def agreed(self) -> bool:
    """Whether any process got a signal, which from then on all have got; asked at a border of a step, by all of them."""
    came = [number for number in distributed.gathered(self.signal) if number is not None]
    if came:
      self.signal = came[0]
    return bool(came)

  @property
  def exit_code(self) -> int:
    """Of a run that is saved: 130 after Ctrl-C, 0 for a scheduler, which would count anything else as a failure."""
    return 130 if self.signal == signal.SIGINT else 0

  def __enter__(self):
    for number in (signal.SIGINT, signal.SIGTERM):
      # What other code than Python's has set is None here, and can't be set again.
      self._previous[number] = signal.signal(number, self._handle) or signal.SIG_DFL
    return self

  def __exit__(self, kind: type[BaseException] | None, *_):
    self.over = True
    if distributed.count() == 1 or self._came or kind not in (None, SystemExit):
      self._restore()

  def _restore(self) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, _: Any) -> None:
    known, self._came = self.over or self.asked, True
    if self.signal is None:  # another would make the exit code of this process differ from the others'
      self.signal = number
    self._restore()
    if known:
      return
    with contextlib.suppress(RuntimeError):  # it came in the middle of another print
      report.say(
        "stopping after this step; ask again (Ctrl-C, SIGTERM) to stop at once and lose it (of a supervised warm-up nothing is kept)"
      )

  @contextlib.contextmanager
  def may_leave_rollouts(self, run: Run):
    """Inside, a request ends sampling between two blocks of decoding with RolloutsGivenUp, and only what can be drawn again is lost.

    With several processes a request to any of them is one to all, which leave within a block or two of their own.
    """
    sampler = run.sampler

    def leave():
      if self.asked:
        raise RolloutsGivenUp

    before = sampler.between_blocks
    sampler.between_blocks = leave if distributed.count() == 1 else _LeaveTogether(self, run.team.processes)
    try:
      yield
    finally:
      sampler.between_blocks = before


class _LeaveTogether:
  """Called between two blocks: lets the processes of a team leave behind the same one, or some would wait for what others don't compute.

  A process that hears of a request behind block b posts b + 1 for its team before it begins that block. No other can be done with the block
  before it has begun here, since its tokens are exchanged: so behind block b + 1 all find the note, and whoever found it earlier waits.
  """

  def __init__(self, request: StopRequest, team: tuple[int, ...]):
    self._request, self._team = request, str(team[0])
    self._board, self._done = distributed.Board(), 0

  def __call__(self) -> None:
    self._done += 1
    last = self._board.read()
    if self._team in last:
      if self._done >= int(last[self._team]):
        raise RolloutsGivenUp
    elif last or self._request.asked:
      self._board.post(self._team, str(self._done + 1))
