"""What processes tell each other, with one process or with others played by the test; several real ones are in multi_process_test."""

import os
import pickle
import random
import re
import signal
import socket
import threading
import time
import types

import jax
import numpy as np
import pytest

from emapg_jax import distributed
from emapg_jax.config import RunConfig
from experiments import build, resume, rollouts, stopping
from experiments.launch import Launch


def with_processes(monkeypatch, count, index=0):
  monkeypatch.setattr(distributed, "count", lambda: count)
  monkeypatch.setattr(distributed, "index", lambda: index)


class Others:
  """In place of the all-gather: every process sends what this one does, but for the values that the test gives some of them."""

  def __init__(self, monkeypatch, count, values=None, index=0):
    with_processes(monkeypatch, count, index)
    self.sizes, self._values, self._sent = [], values or {}, {}
    monkeypatch.setattr(distributed, "_all_gather", self._gather)

  def _gather(self, piece, size):
    if size == distributed._FIRST_PIECE and not self.sizes:
      self._sent = {process: self._message(value) for process, value in self._values.items()}
    begin = sum(self.sizes)
    self.sizes.append(size)
    pieces = [self._sent.get(i, b"")[begin : begin + size] if i in self._sent else piece for i in range(distributed.count())]
    return np.stack([np.frombuffer(each.ljust(size, b"\0"), np.uint8) for each in pieces])

  @staticmethod
  def _message(value):
    payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(8, "little") + payload


@pytest.mark.parametrize(("size", "count"), [(8, 2), (9, 4), (2, 4), (0, 2), (7, 1)])
def test_shares_are_consecutive_and_even(monkeypatch, size, count):
  with_processes(monkeypatch, count)
  shares = [distributed.share(size, process) for process in range(count)]
  assert np.concatenate(shares).tolist() == list(range(size))
  assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("size", [0, 1, 4000, 4096, 5000, 2_000_000])
def test_long_and_short_values_arrive_whole(monkeypatch, size):
  short, long = {"reason": np.array(["eos"]), "nan": np.float32("nan")}, np.random.default_rng(0).bytes(size)
  others = Others(monkeypatch, 3, {1: long, 2: None})
  monkeypatch.setattr(distributed, "_IN_FLIGHT", 2**20)
  found = distributed.gathered(short)
  assert found[1:] == [long, None]
  assert found[0]["reason"].tolist() == ["eos"] and np.isnan(found[0]["nan"])
  assert sum(others.sizes) >= size
  assert all(piece <= 2**20 // 4 for piece in others.sizes), "no more than this is on a device at a time"
  assert len(set(others.sizes)) <= 12, "each size is a program"


def test_one_process_talks_to_nobody(monkeypatch):
  monkeypatch.setattr(distributed, "_all_gather", None)
  assert distributed.gathered("x") == ["x"]
  assert distributed.from_first(3) == 3
  assert distributed.together(lambda: 4) == [4]
  assert distributed.is_first()
  distributed.require_shared("/nowhere")
  with pytest.raises(SystemExit), distributed.ended_by_an_error():
    raise SystemExit(1)


def test_one_that_is_asked_to_stop_is_enough(monkeypatch):
  Others(monkeypatch, 3, {2: signal.SIGTERM})
  request = stopping.StopRequest()
  assert request.agreed() and request.exit_code == 0
  Others(monkeypatch, 3, {})
  assert not stopping.StopRequest().agreed()


def test_ctrl_c_to_another_is_ctrl_c_to_all(monkeypatch):
  Others(monkeypatch, 2, {1: signal.SIGINT})
  request = stopping.StopRequest()
  assert request.agreed() and request.exit_code == 130


@pytest.fixture
def fatal_signals():
  """SIGTERM and SIGINT raise, so that a test hears of one that would have ended its process."""

  def end(number, _):
    raise InterruptedError(number)

  before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.usefixtures("fatal_signals")
@pytest.mark.parametrize("stops_for", [None, signal.SIGTERM])
def test_the_first_signal_to_a_process_of_a_saved_run_does_not_end_it(monkeypatch, capsys, stops_for):
  """It would end the others as well: they wait for it."""
  for behind in (False, True):
    Others(monkeypatch, 2, {1: stops_for})
    with pytest.raises(SystemExit), stopping.StopRequest() as request:
      assert request.agreed() == bool(stops_for)
      request.over = True
      if not behind:
        signal.raise_signal(signal.SIGINT)
      raise SystemExit(0)
    if behind:
      signal.raise_signal(signal.SIGINT)
    assert request.exit_code == 0 or not stops_for, "that of the others"
    for number in (signal.SIGTERM, signal.SIGINT):
      with pytest.raises(InterruptedError):
        signal.raise_signal(number)
  assert capsys.readouterr().out == "", "there is nothing left to stop"


@pytest.mark.usefixtures("fatal_signals")
@pytest.mark.parametrize(("count", "error"), [(1, SystemExit), (2, ValueError)])
def test_nothing_is_ignored_by_one_process_or_after_an_error(monkeypatch, count, error):
  with_processes(monkeypatch, count)
  with pytest.raises(error), stopping.StopRequest():
    raise error
  with pytest.raises(InterruptedError):
    signal.raise_signal(signal.SIGTERM)


class Board:
  """A `distributed.Board` of processes that are all here."""

  def __init__(self):
    self.notes = {}

  def post(self, name, text):
    self.notes.setdefault(name, text)

  def read(self):
    return dict(self.notes)


class Sampling:
  """A process in its rollouts."""

  def __init__(self, team):
    self.team, self.request, self.blocks, self.left = team, stopping.StopRequest(), 0, False
    self.between_blocks = stopping._LeaveTogether(self.request, team)

  def can_end_a_block(self, others):
    """Those of its team have all begun that block, too."""
    team = [other for other in others if other.team == self.team]
    return not self.left and all(other.blocks > self.blocks or (other.blocks == self.blocks and not other.left) for other in team)

  def end_a_block(self):
    self.blocks += 1
    try:
      self.between_blocks()
    except rollouts.RolloutsGivenUp:
      self.left = True


@pytest.mark.parametrize("teams", [[(0, 1)], [(0, 1, 2), (3, 4, 5)], [(0,), (1,)]], ids=str)
def test_a_team_leaves_its_rollouts_behind_one_block_whoever_is_asked_when(monkeypatch, teams):
  for seed in range(100):
    rng, board = random.Random(seed), Board()
    monkeypatch.setattr(distributed, "Board", lambda: board)  # noqa: B023
    processes = [Sampling(team) for team in teams for _ in team]
    asked, turns, done = rng.sample(processes, 2), [rng.randrange(30) for _ in range(2)], None
    for turn in range(1000):
      for process in (process for process, when in zip(asked, turns) if when == turn):
        process.request.signal = signal.SIGTERM
      able = [process for process in processes if process.can_end_a_block(processes)]
      if not able:
        break
      rng.choice(able).end_a_block()
      done = [process.blocks for process in processes] if board.notes and done is None else done
    assert all(process.left for process in processes), "none waits for one that has left"
    assert all(process.blocks <= before + 2 for process, before in zip(processes, done)), "of other teams, too"


def test_process_0_decides(monkeypatch):
  Others(monkeypatch, 2, {0: "first"}, index=1)
  assert distributed.from_first("second") == "first"


def test_where_one_fails_all_do(monkeypatch):
  Others(monkeypatch, 2, {1: (None, "ValueError: no score")})
  with pytest.raises(distributed.OtherProcessError, match=r"Process 1 failed.*ValueError: no score"):
    distributed.together(lambda: 1)
  others = Others(monkeypatch, 2, {1: (1, None)})

  def fail():
    raise ZeroDivisionError("own")

  with pytest.raises(ZeroDivisionError, match="own"):
    distributed.together(fail)
  assert others.sizes, "the others hear of it before"
  Others(monkeypatch, 2, {1: (1, None)})
  assert distributed.together(lambda: 0) == [0, 1]


def test_a_folder_that_another_does_not_see(monkeypatch, tmp_path):
  class Unseen(Others):
    def _gather(self, piece, size):
      self.sizes.clear()
      value = pickle.loads(piece[8:])
      self._values = {1: False} if value is True else {}
      return super()._gather(piece, size)

  Unseen(monkeypatch, 2)
  with pytest.raises(ValueError, match=r"Process 1 does not see in .*--workdir"):
    distributed.require_shared(tmp_path)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("error", "code", "printed"),
  [
    (SystemExit(1), 1, r"^$"),
    (KeyboardInterrupt(), 130, r"^$"),
    (TypeError("odd"), 1, r"Traceback[\s\S]*TypeError: odd\nprocess 1 of 2 has failed"),
    (jax.errors.JaxRuntimeError("INTERNAL: out of hands"), 1, r"Traceback[\s\S]*out of hands\nprocess 1 of 2 has failed"),
    (
      jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer\nat f()"),
      1,
      r"^error: Another process can't be reached any more \(UNKNOWN: Gloo AllGather failed: .*peer\): look .*\nprocess 1 of 2 has failed",
    ),
  ],
)
def test_a_process_that_fails_ends_at_once(monkeypatch, capsys, error, code, printed):
  class Ended(BaseException):
    pass

  def leave(code):
    codes.append(code)
    raise Ended

  codes, slept = [], []
  monkeypatch.setattr(os, "_exit", leave)
  monkeypatch.setattr(time, "sleep", slept.append)
  for process in (1, 0):
    with_processes(monkeypatch, 2, process)
    with pytest.raises(Ended), distributed.ended_by_an_error():
      raise error
    if process:
      assert re.search(printed, capsys.readouterr().err)
  assert codes == [code, code]
  assert slept == [1.0], "process 0 is the one that the others hear the end of"


@pytest.mark.parametrize("code", [None, 0, 130])
def test_an_end_that_was_agreed_on_is_waited_for(monkeypatch, code):
  with_processes(monkeypatch, 2)
  with pytest.raises(SystemExit), distributed.ended_by_an_error():
    raise SystemExit(code)


def test_a_host_array_is_placed_where_it_belongs():
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
  array = np.arange(8)
  placed = distributed.place(array, layout)
  assert placed.sharding == layout
  array[:] = 0
  np.testing.assert_array_equal(placed, np.arange(8))


def test_a_coordinator_that_is_not_there():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  with pytest.raises(ValueError, match=rf"Process 1 could not reach the coordinator at {address} within 0 s.*start process 0"):
    distributed.initialize(address, 2, 1, patience=0)


@pytest.mark.parametrize(
  ("coordinator", "text"),
  [
    ("localhost:1", r"Not all 2 processes have met at localhost:1 within 0\.01 s.*--process_id"),
    (None, "Not all processes have met within 0"),
  ],
)
def test_processes_that_never_come(monkeypatch, capsys, coordinator, text):
  ended, codes = threading.Event(), []

  def initialize(*_, **__):
    assert ended.wait(10)
    raise RuntimeError("ended")

  monkeypatch.setattr(distributed, "_require_reachable", lambda *_: None)
  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
  with pytest.raises(ValueError, match=r"could not be connected \(ended\)"):
    distributed.initialize(coordinator, coordinator and 2, coordinator and 0, patience=0.01)
  assert codes == [1]
  assert re.search(text, capsys.readouterr().err)


def test_prompts_that_can_not_be_shared_out(monkeypatch):
  with_processes(monkeypatch, 2)
  with pytest.raises(ValueError, match=r"--prompts_per_step=5 can't be shared out over 2 processes.*: make it a multiple of 2"):
    build.build(RunConfig(task="add", prompts_per_step=5, mini_batches=1))


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:port", "host:70000"])
def test_an_address_that_is_none(address):
  with pytest.raises(ValueError, match=f"--coordinator={address} is not HOST:PORT"):
    distributed.initialize(address, 2, 1)


def test_without_a_cluster_around_it(monkeypatch):
  def initialize(*args, **named):
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  with pytest.raises(
    ValueError, match=r"could not be connected \(coordinator_address should be defined.\).*give each process --coordinator"
  ):
    distributed.initialize()


@pytest.mark.parametrize(
  ("flags", "text"),
  [
    ({"coordinator": "a:1"}, r"--coordinator=a:1 is not all of --coordinator=HOST:PORT, --num_processes and --process_id"),
    ({"num_processes": 2, "process_id": 0}, r"--num_processes=2 --process_id=0 is not all of"),
    ({"coordinator": "a:1", "num_processes": 1, "process_id": 0}, r"at least 2 processes"),
    ({"coordinator": "a:1", "num_processes": 2, "process_id": -1}, r"numbered from 0 to 1"),
    ({"heartbeat_timeout": 60}, r"no effect with a single process"),
    ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, r"numbered from 0 to 1"),
    ({"coordinator": "a:1", "num_processes": 2, "process_id": 0, "distributed": True}, r"leave one of both out"),
    ({"heartbeat_timeout": 1}, r"--heartbeat_timeout=1 must be at least 2"),
  ],
)
def test_flags_of_a_launch_that_contradict_each_other(flags, text):
  with pytest.raises(ValueError, match=text):
    Launch(**flags)


@pytest.mark.parametrize(
  ("flags", "args"), [({}, None), ({"distributed": True}, ()), ({"coordinator": "a:1", "num_processes": 2, "process_id": 0}, ("a:1", 2, 0))]
)
def test_who_is_connected(monkeypatch, flags, args):
  calls = []
  monkeypatch.setattr(distributed, "initialize", lambda *args, **named: calls.append((args, named)))
  Launch(**flags, **({} if args is None else {"heartbeat_timeout": 7})).connect("folder")
  assert calls == ([] if args is None else [(args, {"heartbeat_timeout": 7})])
  if args is not None:
    with pytest.raises(ValueError, match="need --workdir"):
      Launch(**flags).connect("")


def test_processes_with_other_flags_are_refused(monkeypatch):
  flags = {"seed": "0", "problems": "abc"}
  Others(monkeypatch, 3, {2: flags | {"problems": "xyz"}})
  with pytest.raises(ValueError, match=r"Process 2 was started with problems='xyz', process 0 with 'abc': .* the same data"):
    resume.require_alike(flags)
  Others(monkeypatch, 3, {})
  resume.require_alike(flags)


def test_the_smallest_device_counts(monkeypatch):
  devices = [types.SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit}) for limit in (7, 5)]
  monkeypatch.setattr(build.jax, "local_devices", lambda: devices)
  assert build._device_bytes() == 5
  Others(monkeypatch, 2, {1: [4, 6]})
  assert build._device_bytes() == 4
  Others(monkeypatch, 2, {1: [None]})
  assert build._device_bytes() is None


def test_a_port_that_is_taken():
  with socket.socket() as taken:
    taken.bind(("", 0))
    port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=rf"Process 0 can't listen at port {port} of --coordinator=localhost:{port} .*--process_id=0 once"):
      distributed._require_reachable(f"localhost:{port}", 2, 0, 1)
