"""Grading in processes that can be killed: one answer may hang or crash its worker, the batch still comes back in time and in order.

Each worker is a fresh interpreter (`python -m emapg_jax.envs.grading_pool`), not a fork and not a multiprocessing child: the parent has
JAX's threads, and a child must import neither JAX nor the run's main module. Requests and answers are lines of JSON. A worker grades in
its main thread, sets the kernel's alarm for itself (a power tower blocks inside one big-integer operation, where no Python handler runs)
and is also killed from outside; so it ends even when the parent was killed.
"""

import collections
import dataclasses
import json
import math
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from typing import IO

from emapg_jax.envs.grading import Outcome, grade, quick_grade

_START_LIMIT = 120.0  # seconds for a worker's imports; generous, since a loaded machine takes long
_LONGEST = 3600  # seconds for one answer; the clocks behind it overflow at some 10^8
_ATTEMPTS = 2  # how often an answer is graded on which workers die
_MEMORY_LIMIT = 4 * 2**30  # bytes of address space of a worker


@dataclasses.dataclass(eq=False)
class _Worker:
  process: subprocess.Popen
  log: IO[bytes]  # what the worker wrote to stderr before it was ready
  deadline: float
  ready: bool = False
  item: int | None = None
  buffer: bytes = b""


class GradingError(RuntimeError):
  """No grading process can be started."""


class GradingPool:
  """A pool of grading processes. Start is lazy; workers stay alive between batches; use as a context manager or call `close`.

  Usable from any thread; concurrent batches wait for each other.

  Args:
    workers: the most processes at a time.
    time_limit: seconds for one answer, at most 3600, after which its worker is killed and the answer counts as a timeout.
  """

  def __init__(self, workers: int = 4, time_limit: float = 5.0):
    if workers < 1 or not 0 < time_limit <= _LONGEST:
      raise ValueError(
        f"a grading pool needs workers >= 1 and 0 < time_limit <= {_LONGEST} seconds, got workers={workers} and time_limit={time_limit}."
      )
    self._size, self._time_limit = workers, time_limit
    self._workers: list[_Worker] = []
    self._lock = threading.Lock()
    # Also at interpreter exit, should the owner forget; it holds the list, not the pool.
    self._finalizer = weakref.finalize(self, _stop_all, self._workers)

  def grade(self, golds: Sequence[Sequence[str]], predictions: Sequence[str | None]) -> list[Outcome]:
    """One outcome for each prediction, in their order; `golds[i]` are the answers of which any counts for prediction i.

    Takes at most about `time_limit` and a start of a worker (1–2 s) for every `workers` answers that hang.

    Raises:
      GradingError: no worker can be started; the message holds what the worker said.
    """
    if len(golds) != len(predictions):
      raise ValueError(f"got {len(golds)} gold answers for {len(predictions)} predictions; each prediction needs its own.")
    outcomes = [quick_grade(gold, prediction) for gold, prediction in zip(golds, predictions)]
    pending = collections.deque(i for i, outcome in enumerate(outcomes) if outcome is None)
    requests = {i: json.dumps([list(golds[i]), predictions[i]]).encode() + b"\n" for i in pending}
    if requests:
      with self._lock:
        if not self._finalizer.alive:
          raise RuntimeError("this grading pool is closed; make a new one.")
        _Batch(self._workers, self._size, self._time_limit, requests, pending, outcomes).run()
    return outcomes

  def close(self) -> None:
    """Ends every worker; the pool cannot be used afterwards. May be called twice."""
    with self._lock:
      self._finalizer()

  def __enter__(self) -> "GradingPool":
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers alive now."""
    return [worker.process.pid for worker in self._workers if worker.process.poll() is None]


class _Batch:
  """One call of the pool: a single loop that hands out requests, reads answers and enforces deadlines."""

  def __init__(self, workers, size, time_limit, requests, pending, outcomes):
    self.workers, self.size, self.time_limit = workers, size, time_limit
    self.requests, self.pending, self.outcomes = requests, pending, outcomes
    self.deaths = collections.Counter()
    self.failed_starts = 0

  def run(self) -> None:
    for worker in [worker for worker in self.workers if worker.process.poll() is not None]:
      self._remove(worker)  # died while idle, which says nothing of any answer
    try:
      while self.pending or any(worker.item is not None for worker in self.workers):
        self._hand_out()
        self._read()
        self._enforce_deadlines()
    finally:
      # After an exception (Ctrl-C) a busy worker would answer into the next batch.
      for worker in [worker for worker in self.workers if worker.item is not None]:
        self._remove(worker)

  def _hand_out(self) -> None:
    busy = sum(worker.item is not None for worker in self.workers)
    while len(self.workers) < min(self.size, busy + len(self.pending)):
      self.workers.append(_start(self.time_limit))
    for worker in [worker for worker in self.workers if worker.ready and worker.item is None]:
      if not self.pending:
        return
      worker.item = self.pending.popleft()
      worker.deadline = time.monotonic() + self.time_limit
      try:
        worker.process.stdin.write(self.requests[worker.item])
      except BrokenPipeError:
        self._died(worker)

  def _read(self) -> None:
    waited_for = [worker for worker in self.workers if worker.item is not None or not worker.ready]
    if not waited_for:
      return
    with selectors.DefaultSelector() as selector:
      for worker in waited_for:
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
      timeout = max(0.0, min(worker.deadline for worker in waited_for) - time.monotonic())
      workers = [key.data for key, _ in selector.select(timeout)]
    for worker in workers:
      chunk = os.read(worker.process.stdout.fileno(), 65536)
      if not chunk:
        self._died(worker)
        continue
      worker.buffer += chunk
      if worker.buffer.endswith(b"\n"):
        self._answered(worker, json.loads(worker.buffer))
        worker.buffer = b""

  def _answered(self, worker: _Worker, answer: str) -> None:
    if worker.item is None:
      worker.ready = True
      worker.log.close()
      return
    self.outcomes[worker.item] = Outcome(answer)
    worker.item = None

  def _enforce_deadlines(self) -> None:
    now = time.monotonic()
    for worker in [worker for worker in self.workers if worker.deadline <= now]:
      if worker.item is not None:
        self.outcomes[worker.item], worker.item = Outcome.TIMEOUT, None
        self._remove(worker)
      elif not worker.ready:
        self._failed_start(worker, f"was not ready after {_START_LIMIT:.0f} s")

  def _died(self, worker: _Worker) -> None:
    if not worker.ready:
      self._failed_start(worker, "ended before it was ready")
      return
    item, worker.item = worker.item, None
    self._remove(worker)
    if item is None:
      return
    self.deaths[item] += 1
    if worker.process.returncode == -signal.SIGALRM:
      self.outcomes[item] = Outcome.TIMEOUT
    elif self.deaths[item] >= _ATTEMPTS:
      self.outcomes[item] = Outcome.CRASHED
    else:
      self.pending.appendleft(item)

  def _failed_start(self, worker: _Worker, what: str) -> None:
    _kill(worker)
    worker.log.seek(0)
    said = worker.log.read().decode("utf-8", "replace").strip()[-1000:]
    self._remove(worker)
    self.failed_starts += 1
    if self.failed_starts >= 3:
      raise GradingError(f"a grading worker {what}, three times in this batch. It said: {said or 'nothing'}")

  def _remove(self, worker: _Worker) -> None:
    self.workers.remove(worker)
    _stop_all([worker])


def _start(time_limit: float) -> _Worker:
  root = str(pathlib.Path(__file__).resolve().parents[2])
  path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
  log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
  process = subprocess.Popen(
    [sys.executable, "-P", "-m", "emapg_jax.envs.grading_pool", str(time_limit)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
    env={**os.environ, "PYTHONPATH": path},
    start_new_session=True,  # Ctrl-C is for the trainer
  )  # fmt: skip
  return _Worker(process, log, deadline=time.monotonic() + _START_LIMIT)


def _kill(worker: _Worker) -> None:
  worker.process.kill()
  worker.process.wait()


def _stop_all(workers: list[_Worker]) -> None:
  for worker in workers:
    worker.process.kill()
  for worker in workers:
    worker.process.wait()
    worker.process.stdin.close()
    worker.process.stdout.close()
    worker.log.close()
  workers.clear()


def _worker_main(time_limit: float) -> None:
  import logging
  import resource

  from emapg_jax.envs import comparison

  comparison.compare(r"\frac{1}{2}", r"\sqrt{2}")  # so that no answer pays for the first use of the parser

  try:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  except (ValueError, OSError):
    pass  # a safeguard that not every system offers
  logging.disable(logging.CRITICAL)
  # Whatever a library prints must not end up between the answers.
  answers = os.fdopen(os.dup(1), "w")
  silence = os.open(os.devnull, os.O_WRONLY)
  os.dup2(silence, 1)
  print('"ready"', file=answers, flush=True)
  os.dup2(silence, 2)
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  for line in sys.stdin:
    golds, prediction = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, math.ceil(time_limit) + 1)
    try:
      outcome = grade(golds, prediction)
    except Exception:  # also RecursionError and MemoryError: it could not be read, and the worker goes on
      outcome = Outcome.UNPARSEABLE
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(outcome.value), file=answers, flush=True)


if __name__ == "__main__":
  _worker_main(float(sys.argv[1]))
