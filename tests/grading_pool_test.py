"""Grading in processes that are killed, and the task that uses it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from emapg_jax.data import Problem
from emapg_jax.envs import grading_pool
from emapg_jax.envs.grading import Outcome
from emapg_jax.envs.grading_pool import GradingPool
from emapg_jax.envs.math import BOX_INSTRUCTION, MathTask

TOWER = "5^{5^{5^{5}}}"
LIMIT = 1.5  # an easy answer takes 0.05 s on an idle core


@pytest.fixture(scope="module")
def pool():
  with GradingPool(workers=2, time_limit=LIMIT) as pool:
    yield pool


def easy(pool):
  """A batch that needs the workers and is right, wrong, right."""
  return pool.grade([["1/2"]] * 3, [r"\frac{2}{4}", r"\frac{1}{3}", "0.50"]) == [Outcome.RIGHT, Outcome.WRONG, Outcome.RIGHT]


def is_alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


@pytest.mark.parametrize("answer", [TOWER, "10^{100000000}", "9!!!!!"])
def test_a_hanging_answer_is_a_timeout_and_the_pool_goes_on(pool, answer):
  start = time.monotonic()
  outcomes = pool.grade([["1"], ["1/2"]], [answer, r"\frac{2}{4}"])
  assert outcomes == [Outcome.TIMEOUT, Outcome.RIGHT]
  assert time.monotonic() - start < LIMIT + 15  # the rest is the start of workers on a busy machine
  assert easy(pool)


def test_from_a_worker_thread(pool):
  outcomes = []
  thread = threading.Thread(target=lambda: outcomes.extend(pool.grade([["1"], ["1/2"]], [TOWER, r"\frac{2}{4}"])))
  thread.start()
  thread.join(60)
  assert outcomes == [Outcome.TIMEOUT, Outcome.RIGHT]


def test_64_at_once_mixed_in_the_order_of_the_inputs(pool):
  towers = {5, 40}
  golds = [[f"{i}/7"] for i in range(64)]
  predictions = [TOWER if i in towers else rf"\frac{{{2 * (i + i % 3)}}}{{14}}" for i in range(64)]  # right where i % 3 == 0
  outcomes = pool.grade(golds, predictions)
  assert outcomes == [Outcome.TIMEOUT if i in towers else Outcome.RIGHT if i % 3 == 0 else Outcome.WRONG for i in range(64)]
  assert easy(pool) and len(pool.pids) <= 2


def test_braces_without_end_are_unparseable_at_once(pool):
  start = time.monotonic()
  assert pool.grade([["1"]], ["{" * 100_000]) == [Outcome.UNPARSEABLE]
  assert time.monotonic() - start < 0.5
  assert pool.grade([["1"]], ["{" * 300])[0] in (Outcome.UNPARSEABLE, Outcome.TIMEOUT)
  assert easy(pool)


def test_concurrent_batches_do_not_mix(pool):
  results = {}

  def run(name, gold):
    results[name] = pool.grade([[gold]] * 8, [rf"\frac{{{i}}}{{8}}" for i in range(8)])

  threads = [threading.Thread(target=run, args=(i, f"{2 * i}/16")) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert results == {i: [Outcome.RIGHT if i == j else Outcome.WRONG for j in range(8)] for i in range(4)}


def test_workers_killed_while_idle_or_busy_do_not_hang_the_batch(pool):
  while not (easy(pool) and len(pool.pids) == 2 and all(worker.ready for worker in pool._workers)):
    pass
  for pid in pool.pids:
    os.kill(pid, signal.SIGKILL)
  while pool.pids:
    time.sleep(0.01)
  assert pool.grade([["1/2"]], [r"\frac{2}{4}"]) == [Outcome.RIGHT]  # all of the idle workers were dead: no answer suffers

  def kill_all():
    for pid in pool.pids:
      os.kill(pid, signal.SIGKILL)

  killer = threading.Timer(LIMIT / 3, kill_all)
  killer.start()
  assert pool.grade([["1"], ["2"]], [TOWER, TOWER]) == [Outcome.TIMEOUT] * 2  # tried again after the kill, and then too slow
  killer.join()
  assert easy(pool)


def test_an_answer_that_kills_its_workers_counts_as_crashed(monkeypatch):
  # A worker that dies on every request, in place of one that is out of memory.
  program = "print('\"ready\"', flush=True); input()"
  popen = subprocess.Popen

  def start(command, **options):
    return popen([command[0], "-c", program], **options)

  monkeypatch.setattr(grading_pool.subprocess, "Popen", start)
  with GradingPool(workers=1, time_limit=30) as pool:
    assert pool.grade([["1"], ["7"]], ["x", "7"]) == [Outcome.CRASHED, Outcome.RIGHT]


def test_a_worker_that_cannot_start_is_an_error_with_its_words(monkeypatch):
  popen = subprocess.Popen
  monkeypatch.setattr(
    grading_pool.subprocess, "Popen", lambda command, **o: popen([command[0], "-c", "raise SystemExit('no parser')"], **o)
  )
  with GradingPool(workers=1) as pool, pytest.raises(RuntimeError, match="It said: no parser"):
    pool.grade([["1"]], ["x"])


def test_close_leaves_no_process_and_no_further_use():
  pool = GradingPool(workers=2, time_limit=LIMIT)
  assert easy(pool)
  pids = pool.pids
  assert pids and all(map(is_alive, pids))
  pool.close()
  pool.close()
  assert not any(map(is_alive, pids)) and pool.pids == []
  with pytest.raises(RuntimeError, match="closed"):
    easy(pool)


def test_workers_end_when_their_parent_is_killed():
  code = (
    "import os, threading; from emapg_jax.envs.grading_pool import GradingPool\npool = GradingPool(1, 1.0); pool.grade([['1/2']], ['x'])\n"
    f"print(pool.pids[0], flush=True)\nthreading.Timer(.3, os._exit, [9]).start(); pool.grade([['1']], ['{TOWER}'])"
  )
  parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
  assert parent.returncode == 9, parent.stderr
  end = time.monotonic() + 20  # its own alarm comes after 2 s
  while is_alive(int(parent.stdout)) and time.monotonic() < end and not _is_zombie(int(parent.stdout)):
    time.sleep(0.1)
  assert not is_alive(int(parent.stdout)) or _is_zombie(int(parent.stdout))


def _is_zombie(pid):
  try:
    with open(f"/proc/{pid}/stat") as stat:
      return stat.read().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return False


def test_options_that_make_no_sense():
  for workers, limit in [(0, 1.0), (1, 0.0), (1, float("nan"))]:
    with pytest.raises(ValueError, match="workers >= 1 and 0 < time_limit <= 3600"):
      GradingPool(workers, limit)
  with GradingPool() as pool, pytest.raises(ValueError, match="1 gold answers for 2"):
    pool.grade([["1"]], ["1", "2"])


def test_math_task_scores_in_order_and_counts():
  problems = [Problem("half?", r"\frac{1}{2}"), Problem("roots?", ("2", "-2")), Problem("tower?", "3")]
  task = MathTask(problems, box_instruction=True, workers=2, time_limit=LIMIT)
  try:
    assert [problem.prompt for problem in task.prompts()] == [f"{text}\n\n{BOX_INSTRUCTION}" for text in ("half?", "roots?", "tower?")]
    rows = [2, 0, 1, 1, 0, 0, 2]
    answers = [TOWER, "0.5", "-2", "2", r"\frac{", "0.4", "3"]
    responses = [rf"So \boxed{{{answer}}}." for answer in answers]
    scores = task.score_batch([task.prompts()[row] for row in rows], responses)
    assert scores == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert task.score(task.prompts()[0], "one half, 1/2") == 0.0
    # `\boxed{\frac{}` is never closed: no answer, like the response without a box.
    assert task.metrics() == {"graded": 8, "no_answer": 2, "unparseable": 0, "grading_timeouts": 1, "grading_crashes": 0}
    assert set(task.metrics().values()) == {0.0}
    assert task.extract(task.prompts()[0], responses[1]) == "0.5"
  finally:
    task.close()


def test_math_task_modes():
  problem = Problem("count", "72")
  number, boxed = MathTask([problem], answer_mode="number"), MathTask([problem])
  assert number.prompts() == [problem] and number.chat is True
  assert [task.score(problem, "The total is 72 clips, altogether.") for task in (number, boxed)] == [1.0, 0.0]
  thinking = MathTask([problem], prompt_opens_think=True, eval_problems=[Problem("other", "1")])
  assert thinking.score(problem, r"\boxed{72}") == 0.0 and thinking.score(problem, r"hm</think>\boxed{72}") == 1.0
  assert thinking.eval_prompts() == [Problem("other", "1")]
  with pytest.raises(ValueError, match="unknown answer_mode 'plain'; use one of boxed, number"):
    MathTask([problem], answer_mode="plain")
  with pytest.raises(ValueError, match="has the answer ''"):
    MathTask([Problem("p")])


@pytest.mark.parametrize("limit", [float("inf"), float("nan"), 1e10, 1e8, 3601, 0])
def test_a_limit_that_no_clock_takes_is_refused(limit):
  with pytest.raises(ValueError, match=r"0 < time_limit <= 3600 seconds, got workers=1 and time_limit="):
    GradingPool(workers=1, time_limit=limit)
