"""Checks on scores, and loading a user's own task."""

import sys

import numpy as np
import pytest

from emapg_jax.envs.arithmetic import ArithmeticTask
from emapg_jax.envs.task import SCORE_MAX, SCORE_MIN, Problem, TaskError, counters, load_task, score_all

PROBLEMS = [Problem("first", "1"), Problem("second", "2")]


class Fixed:
  def __init__(self, scores):
    self.scores = dict(zip("ab", scores))

  def score(self, problem, response):
    del problem
    return self.scores[response]


class Batched(Fixed):
  def score_batch(self, problems, responses):
    del problems
    return [self.scores[response] for response in responses][: len(self.scores)]


@pytest.mark.parametrize("kind", [Fixed, Batched])
def test_scores_come_in_order_and_nan_passes(kind):
  scores = score_all(kind([0.25, float("nan")]), PROBLEMS, ["a", "b"])
  assert scores.dtype == np.float64
  np.testing.assert_array_equal(scores, [0.25, np.nan])
  np.testing.assert_array_equal(score_all(kind([True, np.float32(0.5)]), PROBLEMS, ["b", "a"]), [0.5, 1.0])


def test_score_range_is_zero_to_one():
  assert (SCORE_MIN, SCORE_MAX) == (0.0, 1.0)


@pytest.mark.parametrize("kind", [Fixed, Batched])
@pytest.mark.parametrize("bad", [-0.001, 1.001, float("inf"), None, "1", [1.0]])
def test_a_score_out_of_range_names_task_value_and_problem(kind, bad):
  with pytest.raises(ValueError) as error:
    score_all(kind([1.0, bad]), PROBLEMS, ["a", "b"])
  assert kind.__name__ in str(error.value) and repr(bad) in str(error.value) and "second" in str(error.value)


def test_counts_must_match():
  with pytest.raises(ValueError, match="2 problems for 1 responses"):
    score_all(Fixed([1.0]), PROBLEMS, ["a"])
  with pytest.raises(ValueError, match="1 scores for 2"):
    score_all(Batched([1.0]), PROBLEMS, ["a", "a"])


SOURCE = """
from emapg_jax.envs.task import Problem

class Mine:
  def prompts(self):
    return [Problem("say a", "a")]
  def score(self, problem, response):
    return float(response == problem.answer)

class Empty(Mine):
  def prompts(self):
    return []

class Strings(Mine):
  def prompts(self):
    return [Problem("x"), "y"]

class NoScore:
  def prompts(self):
    return [Problem("x")]
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
  (tmp_path / "my_own_task.py").write_text(SOURCE)
  (tmp_path / "my_broken_task.py").write_text("import a_module_that_is_not_there\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  yield
  for name in ("my_own_task", "my_broken_task"):
    sys.modules.pop(name, None)


def test_a_users_task_is_loaded_and_scored(user_module):
  task = load_task("my_own_task:Mine")
  np.testing.assert_array_equal(score_all(task, list(task.prompts()) * 2, ["a", "b"]), [1.0, 0.0])


@pytest.mark.parametrize(
  "name, said",
  [
    ("my_own_task", "module:function"),
    ("my_own_task:", "module:function"),
    ("no_such_task:make", "there is no module 'no_such_task'"),
    ("my_own_task.sub:make", "there is no module"),
    ("my_broken_task:make", "itself imports 'a_module_that_is_not_there'"),
    ("my_own_task:make", "no function 'make'; it has Empty, Mine"),
    ("my_own_task:Empty", r"prompts\(\) is empty"),
    ("my_own_task:Strings", r"prompts\(\)\[1\] is a str"),
    ("my_own_task:NoScore", "no method `score`"),
  ],
)
def test_what_is_wrong_with_a_users_task_is_said(user_module, name, said):
  with pytest.raises(ValueError, match=said):
    load_task(name)


def test_arithmetic_scores_the_last_number_exactly():
  task = ArithmeticTask()
  assert len(task.prompts()) == len(task.eval_prompts()) == 100
  problem = task.prompts()[34]
  assert problem == Problem("What is 3 + 4? Answer with the number.", "7")
  responses = {"7": 1, "3 + 4 = 7.": 1, "It's **7**!": 1, "7.0": 1, "-7": 0, "17": 0, "7 or 8": 0, "seven": 0, "": 0, "7.5": 0}
  assert {response: task.score(problem, response) for response in responses} == responses
  assert task.extract(problem, "3 + 4 = 7.") == "7" and task.extract(problem, "seven") is None


def test_arithmetic_answers_are_the_sums():
  assert [int(problem.answer) for problem in ArithmeticTask().prompts()] == [a + b for a in range(10) for b in range(10)]


class Faulty:
  """Raises from score, as a task in the making does."""

  chat = True

  def prompts(self):
    return [Problem("p", "1")]

  def score(self, problem, response):
    return float(int(response) == 3)

  def metrics(self):
    return None


def test_what_a_users_task_raises_names_task_and_method():
  with pytest.raises(TaskError, match=r"`score` of task tests\.task_test\.Faulty raised ValueError: invalid literal") as caught:
    score_all(Faulty(), Faulty().prompts(), ["x"])
  assert isinstance(caught.value.__cause__, ValueError)


def test_counters_must_be_numbers():
  with pytest.raises(TaskError, match=r"metrics\(\) of task .*Faulty returned None"):
    counters(Faulty())
  assert counters(object()) == {}
