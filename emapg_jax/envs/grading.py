r"""From a response to the answer in it, and from two answers to whether they are the same. Argument order: (gold, prediction).

Extraction. The answer is looked for after the last `</think>`; a response that is still inside `<think>` has none. It is the content of
the last `\boxed{}` (`\fbox{}`, `\boxed 7`); no box, an empty box or one that is never closed is no answer. The plain-number mode falls
back on the last number of the text when there is no box.

Comparison. Texts that are equal up to spelling are equal. Everything else is parsed with math-verify and compared exactly; a decimal also
counts for an exact number that has no finite decimal form, to a *relative* error of 2e-6. In addition:
  percent   `28\%` equals 28 only when the gold answer carries the percent sign (and then 0.28 does not); without, it is 28/100
  units     ignored unless both sides have one and they differ; degrees and currency signs are units
  commas    `9,500`, `9{,}500` and `10\,000` are one number when every group has three digits; `1,2` is a list
  order     `{1,2}` and `1,2` are sets, `(1,2)` is ordered; `0<x<2` and `x \in (0,2)` equal the interval `(0,2)`
  equations `x=5` equals 5

This module imports no sympy until `grade` needs it, and `grade` may take for ever or crash its process (towers of powers): call it through
`grading_pool`.
"""

import enum
import functools
import re
from collections.abc import Sequence
from decimal import Decimal

MAX_ANSWER_CHARS = 2000


class Outcome(enum.Enum):
  """What grading came to; only RIGHT scores."""

  RIGHT = "right"
  WRONG = "wrong"
  UNPARSEABLE = "unparseable"  # there was an answer, but it could not be read as mathematics
  TIMEOUT = "timeout"
  CRASHED = "crashed"  # the worker died on it, twice


def opens_think(rendered_prompt: str) -> bool:
  """Whether a rendered prompt ends inside `<think>`, as the templates of R1-distilled models do."""
  return rendered_prompt.rstrip().endswith("<think>")


def after_think(response: str, prompt_opens_think: bool = False) -> str | None:
  """The part of a response that counts: what follows the last `</think>`; None when it was still thinking; else all of it."""
  _, end, rest = response.rpartition("</think>")
  if end:
    return rest
  return None if prompt_opens_think or "<think>" in response else response


_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def _last_match(pattern: re.Pattern, text: str) -> re.Match | None:
  return functools.reduce(lambda _, match: match, pattern.finditer(text), None)


def extract_boxed(text: str) -> str | None:
  r"""The content of the last box of a text; None when there is none, when it is empty or when it is not closed. Linear in the text."""
  last = _last_match(_BOX, text)
  if last is None:
    return None
  if not text.startswith("{", last.end()):
    bare = re.match(r"[^\s$]+", text[last.end() :])
    return (bare.group().rstrip(".,;:)]") or None) if bare else None
  start, depth, i = last.end() + 1, 1, last.end() + 1
  while i < len(text):
    if text[i] == "\\":
      i += 1  # an escaped brace is not a brace
    elif text[i] in "{}":
      depth += 1 if text[i] == "{" else -1
      if not depth:
        return text[start:i].strip() or None
    i += 1
  return None


_COMMA = r"(?:\{,\}|,\\!|\\,|,)"
_NUMBER = re.compile(rf"(?<![\d.])(?:\d{{1,3}}(?:{_COMMA}\d{{3}})+(?!{_COMMA}?\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")


def extract_number(text: str) -> str | None:
  """The last number of a text, as plain digits (`-9500`, `0.5`): without grouping commas, currency or the punctuation after it."""
  last = _last_match(_NUMBER, text)
  if last is None:
    return None
  digits = re.sub(_COMMA, "", last.group())
  # A minus between two operands, as in `5-3` or `5 - 3`, is no sign: a sign touches its number and nothing touches it from the left.
  before = text[max(0, last.start() - 8) : last.start()].rstrip("$€£¥\\")
  signed = before.endswith(("-", "−")) and (len(before) == 1 or not re.match(r"[\w)\]}%-]", before[-2]))
  return ("-" if signed else "") + ("0" + digits if digits.startswith(".") else digits)


def extract_answer(response: str, answer_mode: str = "boxed", prompt_opens_think: bool = False) -> str | None:
  """The answer of a response or None, in `boxed` mode or in `number` mode (a box if there is one, else the last number)."""
  text = after_think(response, prompt_opens_think)
  if text is None:
    return None
  if answer_mode == "number" and not _BOX.search(text):
    return extract_number(text)
  return extract_boxed(text)


_PLAIN_NUMBER = re.compile(rf"\s*[-+]?(?:\d{{1,3}}(?:{_COMMA}\d{{3}})+|\d+)(?:\.\d+)?\s*")


def same_number(gold: str, prediction: str) -> bool | None:
  """Whether two plain numbers are equal, exactly; None when one of them is not a plain number."""
  if not (_PLAIN_NUMBER.fullmatch(gold) and _PLAIN_NUMBER.fullmatch(prediction)):
    return None
  return Decimal(re.sub(_COMMA, "", gold).strip()) == Decimal(re.sub(_COMMA, "", prediction).strip())


def quick_grade(golds: Sequence[str], prediction: str | None) -> Outcome | None:
  """The outcome where no mathematics is needed, at once and safely; None where `grade` has to be asked."""
  if prediction is None:
    return Outcome.WRONG
  if any(prediction.strip() == gold.strip() for gold in golds):
    return Outcome.RIGHT
  if len(prediction) > MAX_ANSWER_CHARS:
    return Outcome.UNPARSEABLE
  same = [same_number(gold, prediction) for gold in golds]
  if any(same):
    return Outcome.RIGHT
  return Outcome.WRONG if None not in same else None


def grade(golds: str | Sequence[str], prediction: str | None) -> Outcome:
  """The outcome for one prediction; with several gold answers any counts. May not return: see the module's docstring."""
  golds = (golds,) if isinstance(golds, str) else golds
  outcome = quick_grade(golds, prediction)
  if outcome is not None:
    return outcome
  from emapg_jax.envs.comparison import compare  # late: it needs sympy, which the trainer's process can do without

  outcomes = []
  for gold in golds:
    outcomes.append(compare(gold, prediction))
    if outcomes[-1] is Outcome.RIGHT:
      return Outcome.RIGHT
  return Outcome.UNPARSEABLE if Outcome.UNPARSEABLE in outcomes else Outcome.WRONG
