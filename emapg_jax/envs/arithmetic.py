"""Small sums as chat text: the task on which a small pretrained model can be seen to improve."""

from collections.abc import Sequence

from emapg_jax.data import Problem
from emapg_jax.envs.grading import extract_number, same_number


class ArithmeticTask:
  """Additions of two numbers, asked in words: `What is 3 + 4? Answer with the number.`

  All operand pairs are trained on, and `eval_prompts()` are the same pairs: with 100 of them the task measures whether the policy was
  sharpened, not whether it generalises.

  Args:
    digits: the most digits of an operand, 1 or 2.
  """

  chat = True

  def __init__(self, digits: int = 1):
    if digits not in (1, 2):
      raise ValueError(f"ArithmeticTask has digits 1 or 2, got {digits}.")
    pairs = [(a, b) for a in range(10**digits) for b in range(10**digits)]
    self._problems = [Problem(f"What is {a} + {b}? Answer with the number.", str(a + b)) for a, b in pairs]

  def prompts(self) -> Sequence[Problem]:
    """All operand pairs."""
    return self._problems

  def eval_prompts(self) -> Sequence[Problem]:
    """All operand pairs too."""
    return self._problems

  def extract(self, problem: Problem, response: str) -> str | None:
    """The last number of a response."""
    del problem
    return extract_number(response)

  def score(self, problem: Problem, response: str) -> float:
    """1 when the last number of the response equals the sum exactly, else 0."""
    number = extract_number(response)
    return float(number is not None and same_number(problem.answer, number) is True)
