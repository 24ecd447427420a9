r"""Whether two mathematical answers are the same: the rules of `grading`, on top of math-verify's parser and comparison.

Nothing here limits time or memory. It runs in the workers of `grading_pool`, which are killed when they take too long.
"""

import dataclasses
import re

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, Float, Interval, MatrixBase, Rational, Tuple

from emapg_jax.envs.answer_text import Answer, read_answer
from emapg_jax.envs.grading import Outcome

_LATEX = LatexExtractionConfig(boxed_match_priority=-1)
_LATEX = dataclasses.replace(_LATEX, normalization_config=dataclasses.replace(_LATEX.normalization_config, units=False, boxed="none"))
_RELATIVE_TOLERANCE = Rational(2, 10**6)
_PRECISION = 30  # digits
_ZERO = Rational(1, 10**25)  # what a difference of equal irrational numbers may come to, relative, at that precision


def compare(gold: str, prediction: str) -> Outcome:
  """RIGHT, WRONG, or UNPARSEABLE when the prediction cannot be read."""
  g, p = read_answer(gold), read_answer(prediction)
  if p.text == "":
    return Outcome.UNPARSEABLE
  if _units_differ(g, p) or _percents_differ(g, p):
    return Outcome.WRONG
  if g.text == p.text and g.percent == p.percent:
    return Outcome.RIGHT
  if _is_clock(g.text) and _is_clock(p.text):
    return Outcome.RIGHT if g.text.lstrip("0") == p.text.lstrip("0") else Outcome.WRONG
  return _compare_parsed(g, p)


def _compare_parsed(g: Answer, p: Answer) -> Outcome:
  gold, prediction = _parse(g.text), _parse(p.text)
  if prediction is None:
    return Outcome.UNPARSEABLE
  if gold is None:
    return Outcome.WRONG
  if p.percent and not g.percent:
    prediction = prediction / 100 if isinstance(prediction, Expr) else None
  if prediction is not None and _equal(gold, prediction):
    return Outcome.RIGHT
  # `(100,200)` may be a pair or a number; it was read as a number so far.
  if (g.as_list, p.as_list) != (g.text, p.text):
    gold, prediction = _parse(g.as_list), _parse(p.as_list)
    if gold is not None and prediction is not None and _equal(gold, prediction):
      return Outcome.RIGHT
  return Outcome.WRONG


def _parse(text: str):
  parsed = parse(f"${text}$", [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
  return parsed[0] if parsed and isinstance(parsed[0], (sympy.Basic, MatrixBase)) else None


def _units_differ(g: Answer, p: Answer) -> bool:
  return bool(g.unit and p.unit) and not (g.unit <= p.unit or p.unit <= g.unit)


def _percents_differ(g: Answer, p: Answer) -> bool:
  return bool(p.percent and (g.unit or (not g.percent and "," in p.text)))


def _is_clock(text: str) -> bool:
  match = re.fullmatch(r"(\d{1,2}):(\d{2})", text)
  return match is not None and int(match[1]) <= 24 and int(match[2]) < 60


def _equal(gold, prediction) -> bool:
  """Equality of two parsed answers; elements of sets, tuples, intervals and matrices are compared by the same rules."""
  if isinstance(gold, Eq) and isinstance(prediction, Eq):
    if gold.lhs == prediction.lhs and gold.lhs.is_Symbol:
      return _equal(gold.rhs, prediction.rhs)
  elif isinstance(prediction, Eq):
    if not isinstance(gold, sympy.logic.boolalg.Boolean):
      return _equal(gold, prediction.rhs)
  elif isinstance(gold, Eq) and gold.lhs.is_Symbol:
    return _equal(gold.rhs, prediction)
  if isinstance(gold, sympy.FiniteSet) and isinstance(prediction, sympy.FiniteSet):
    return _equal_sets(gold.args, prediction.args)
  if isinstance(gold, Tuple) and isinstance(prediction, Tuple):
    return len(gold) == len(prediction) and all(map(_equal, gold, prediction))
  if isinstance(gold, Interval) and isinstance(prediction, Interval):
    same_ends = (gold.left_open, gold.right_open) == (prediction.left_open, prediction.right_open)
    return same_ends and _equal(gold.start, prediction.start) and _equal(gold.end, prediction.end)
  if isinstance(gold, MatrixBase) and isinstance(prediction, MatrixBase):
    return gold.shape == prediction.shape and all(map(_equal, gold.flat(), prediction.flat()))
  if isinstance(gold, Expr) and isinstance(prediction, Expr):
    if gold.is_number and prediction.is_number:
      return _equal_numbers(gold, prediction)
    gold, prediction = _without_floats(gold), _without_floats(prediction)
  return verify(gold, prediction, allow_set_relation_comp=True, timeout_seconds=None)


def _equal_sets(gold, prediction) -> bool:
  rest = list(prediction)
  if len(gold) != len(rest):
    return False
  for element in gold:
    match = next((i for i, other in enumerate(rest) if _equal(element, other)), None)
    if match is None:
      return False
    rest.pop(match)
  return True


def _without_floats(expression: Expr) -> Expr:
  """The same expression with every decimal as the fraction that it spells: 0.1 is 1/10."""
  return expression.xreplace({f: Rational(str(f)) for f in expression.atoms(Float)})


def _equal_numbers(gold: Expr, prediction: Expr) -> bool:
  values = [_without_floats(x).doit() for x in (gold, prediction)]
  if any(value.has(sympy.nan, sympy.zoo) for value in values):
    return False
  if values[0] == values[1]:
    return True
  exact = all(isinstance(value, Rational) for value in values)
  difference = sympy.Abs((values[0] - values[1]).evalf(_PRECISION))
  scale = max(sympy.Abs(value.evalf(_PRECISION)) for value in values)
  if not exact and difference <= _ZERO * scale:
    return True
  # A decimal may stand for a number that no decimal spells in full; two decimals are what they say.
  has_decimal = [bool(x.atoms(Float)) for x in (gold, prediction)]
  rounded = any(has_decimal[i] and not _has_decimal_form(values[1 - i]) for i in range(2)) and not all(has_decimal)
  return bool(rounded and difference <= _RELATIVE_TOLERANCE * scale)


def _has_decimal_form(value: Expr) -> bool:
  if not isinstance(value, Rational):
    return False
  q = value.q
  for prime in (2, 5):
    while q % prime == 0:
      q //= prime
  return q == 1
