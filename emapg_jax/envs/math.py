"""Mathematical problems with checkable answers, graded in a pool of processes."""

import collections
from collections.abc import Sequence

from emapg_jax.data import Problem
from emapg_jax.envs.grading import Outcome, extract_answer
from emapg_jax.envs.grading_pool import GradingPool

BOX_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

ANSWER_MODES = ("boxed", "number")


class MathTask:
  r"""Problems whose responses end in an answer; the score is 1 when it equals the gold answer (or any of several), else 0.

  Args:
    problems: from `emapg_jax.data.load_problems`.
    eval_problems: the problems of `eval_prompts()`; None: there are none.
    answer_mode: `boxed` reads the last `\boxed{}`; `number` does too and falls back on the last number of a response without a box.
    box_instruction: whether each user message ends in an instruction to box the answer.
    prompt_opens_think: whether the rendered prompt ends inside `<think>` (`grading.opens_think` tells); an attribute, may be set later.
    workers: grading processes at a time.
    time_limit: seconds of grading per answer, after which it scores 0 and counts as a timeout.
  """

  chat = True

  def __init__(
    self,
    problems: Sequence[Problem],
    *,
    eval_problems: Sequence[Problem] | None = None,
    answer_mode: str = "boxed",
    box_instruction: bool = False,
    prompt_opens_think: bool = False,
    workers: int = 4,
    time_limit: float = 5.0,
  ):
    if answer_mode not in ANSWER_MODES:
      raise ValueError(f"unknown answer_mode {answer_mode!r}; use one of {', '.join(ANSWER_MODES)}.")
    for problem in [*problems, *(eval_problems or ())]:
      if not problem.answers or not all(answer.strip() for answer in problem.answers):
        raise ValueError(
          f"the problem {problem.prompt[:80]!r} has the answer {problem.answer!r}; every problem needs one that is not empty."
        )
    self.answer_mode = answer_mode
    self.prompt_opens_think = prompt_opens_think
    instruction = f"\n\n{BOX_INSTRUCTION}" if box_instruction else ""
    self._problems = [Problem(problem.prompt + instruction, problem.answer) for problem in problems]
    self._eval = [Problem(each.prompt + instruction, each.answer) for each in eval_problems or ()]
    self._pool = GradingPool(workers, time_limit)
    self._counts: collections.Counter = collections.Counter()

  def prompts(self) -> Sequence[Problem]:
    """The problems to train on, each with the instruction when there is one."""
    return self._problems

  def eval_prompts(self) -> Sequence[Problem]:
    """The problems for evaluation."""
    return self._eval

  def extract(self, problem: Problem, response: str) -> str | None:
    """The answer read from a response, None when there is none."""
    del problem
    return extract_answer(response, self.answer_mode, self.prompt_opens_think)

  def score(self, problem: Problem, response: str) -> float:
    """1 for a right answer, else 0."""
    return self.score_batch([problem], [response])[0]

  def score_batch(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
    """The scores of several responses, in their order whichever is graded first."""
    predictions = [self.extract(*pair) for pair in zip(problems, responses)]
    outcomes = self._pool.grade([problem.answers for problem in problems], predictions)
    self._counts["no_answer"] += sum(prediction is None for prediction in predictions)
    self._counts.update(outcome.value for outcome in outcomes)
    self._counts["graded"] += len(outcomes)
    return [float(outcome is Outcome.RIGHT) for outcome in outcomes]

  def metrics(self) -> dict[str, float]:
    """Counts since the last call: responses graded, without an answer, unparseable, timed out, and those on which a worker died."""
    counts, self._counts = self._counts, collections.Counter()
    return {
      "graded": float(counts["graded"]),
      "no_answer": float(counts["no_answer"]),
      "unparseable": float(counts[Outcome.UNPARSEABLE.value]),
      "grading_timeouts": float(counts[Outcome.TIMEOUT.value]),
      "grading_crashes": float(counts[Outcome.CRASHED.value]),
    }

  def close(self) -> None:
    """Ends the grading processes."""
    self._pool.close()
