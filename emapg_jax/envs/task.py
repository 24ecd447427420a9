"""What a task is, how its scores are checked, and how a user's own task is loaded.

A task in one file, `parity.py`, run with `--task=parity:make`:

```python
from emapg_jax.envs.task import Problem


class Parity:
  chat = True  # the prompt is a user message; False: raw text

  def prompts(self):
    return [Problem(f"Is {n} even or odd? Answer with one word.", ("odd" if n % 2 else "even")) for n in range(1000)]

  def score(self, problem, response):
    words = response.lower().replace(".", " ").split()
    return float(bool(words) and words[-1] == problem.answer)


def make():
  return Parity()
```

A score lies in [SCORE_MIN, SCORE_MAX]; NaN says that there is none, and the response is then left out of everything.
Looked up when present:

  tokenizer               the task brings its own (token-level tasks); otherwise the model's is used
  chat: bool              True (default): `prompt` is the user message of the model's chat template; False: raw text
  eval_prompts()          problems for evaluation; otherwise the run evaluates on data of its own
  extract(problem, response) -> str | None        the answer that was read from a response, for the sample log
  score_batch(problems, responses) -> sequence    all scores at once, in the order of the responses
  demonstration(problem, rng) -> str              a right response, for supervised warm-up; `rng` is a numpy Generator
  metrics() -> dict[str, float]                   counters since the last call, summed over processes: counts and sums, no means
  close()                                         frees what the task holds
"""

import importlib
import numbers
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from emapg_jax.data import Problem

__all__ = ["SCORE_MAX", "SCORE_MIN", "Problem", "Task", "load_task", "score_all"]

SCORE_MIN = 0.0
SCORE_MAX = 1.0


class Task(Protocol):
  """Problems and how responses to them are scored; the module's docstring lists the optional attributes."""

  def prompts(self) -> Sequence[Problem]:
    """The problems to train on, in a fixed order."""
    ...

  def score(self, problem: Problem, response: str) -> float:
    """A score in [SCORE_MIN, SCORE_MAX], or NaN for none."""
    ...


class TaskError(RuntimeError):
  """The task's own code raised, or returned what it must not; the cause is attached."""


def ask(task: Task, method: str, *args: object) -> object:
  """Calls a method of the task; what it raises comes out as a TaskError that names task and method.

  Raises:
    TaskError: the method raised something else than a ValueError of this project's own tasks.
  """
  try:
    return getattr(task, method)(*args)
  except Exception as error:
    if type(task).__module__.startswith("emapg_jax."):
      raise
    raise TaskError(f"the method `{method}` of task {_name(task)} raised {type(error).__name__}: {error}") from error


def counters(task: Task) -> dict[str, float]:
  """The task's counters since the last call; none when it has no `metrics`.

  Raises:
    TaskError: they are not a dict from name to number.
  """
  found = ask(task, "metrics") if hasattr(task, "metrics") else {}
  if not isinstance(found, dict) or not all(isinstance(value, numbers.Real) for value in found.values()):
    raise TaskError(f"metrics() of task {_name(task)} returned {str(found)[:80]}; it must return a dict from name to number.")
  return {str(name): float(value) for name, value in found.items()}


def score_all(task: Task, problems: Sequence[Problem], responses: Sequence[str]) -> np.ndarray:
  """Scores of responses, float64, in their order; in one call of the task's `score_batch` when it has one.

  Raises:
    ValueError: a score that is no number or outside [SCORE_MIN, SCORE_MAX] (NaN passes through), or not one score per response.
  """
  if len(problems) != len(responses):
    raise ValueError(f"got {len(problems)} problems for {len(responses)} responses; each response needs its problem.")
  if hasattr(task, "score_batch"):
    scores = list(ask(task, "score_batch", problems, responses))
  else:
    scores = [ask(task, "score", *pair) for pair in zip(problems, responses)]
  if len(scores) != len(responses):
    raise ValueError(f"task {_name(task)}: score_batch returned {len(scores)} scores for {len(responses)} responses; return one for each.")
  for problem, score in zip(problems, scores):
    is_number = isinstance(score, (numbers.Real, np.bool_))
    if not is_number or score < SCORE_MIN or score > SCORE_MAX:
      raise ValueError(
        f"task {_name(task)} gave the score {score!r} for the problem {problem.prompt[:80]!r}; a score is a number in "
        f"[{SCORE_MIN:g}, {SCORE_MAX:g}], or NaN when there is none. Rescale it in the task's `score`."
      )
  return np.asarray(scores, dtype=np.float64)


def load_task(name: str) -> Task:
  """The task that a function of the user's own module returns; `name` is `module:function`, called without arguments.

  Raises:
    ValueError: the module, the function or something in the task it returned is not as it must be.
  """
  module_name, _, function_name = name.partition(":")
  if not module_name or not function_name:
    raise ValueError(f"task {name!r} is not of the form module:function, for example my_task:make.")
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name is not None and not (module_name + ".").startswith(error.name + "."):
      raise ValueError(f"task {name!r}: the module {module_name!r} itself imports {error.name!r}, which is not installed.") from error
    raise ValueError(
      f"task {name!r}: there is no module {module_name!r}; give its dotted name, without .py, "
      "and start from its folder or put that on PYTHONPATH."
    ) from error
  function = getattr(module, function_name, None)
  if not callable(function):
    found = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
    raise ValueError(f"task {name!r}: {module_name!r} has no function {function_name!r}; it has {', '.join(found) or 'none'}.")
  task = function()
  for method in ("prompts", "score"):
    if not callable(getattr(task, method, None)):
      raise ValueError(
        f"task {name!r}: the {type(task).__name__} that it returned has no method `{method}`; a task needs prompts() and score()."
      )
  for method in ("prompts", "eval_prompts"):
    if hasattr(task, method):
      problems = ask(task, method)
      if not problems:
        raise ValueError(f"task {name!r}: {method}() is empty; return at least one Problem.")
      for i, problem in enumerate(problems):
        if not isinstance(problem, Problem):
          raise ValueError(
            f"task {name!r}: {method}()[{i}] is a {type(problem).__name__}, not an emapg_jax.envs.task.Problem(prompt, answer)."
          )
  return task


def _name(task: Task) -> str:
  return f"{type(task).__module__}.{type(task).__qualname__}"
