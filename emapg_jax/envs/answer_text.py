r"""The spelling of an answer: currency, units, percent, grouping commas, mixed numbers, `\text`: taken off or rewritten before parsing."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Answer:
  """An answer ready for the parser, and what was taken off it."""

  text: str  # grouping commas removed
  as_list: str  # the same with `(100,200)` left a list; equal to `text` when there is no such doubt
  unit: frozenset[str]  # words of the unit, in one spelling; empty when there is none
  percent: bool


_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*"
_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\s")
_ORDINAL = re.compile(rf"\^?\{{?{_TEXT}\{{\s*(?:st|nd|rd|th)\s*\}}\}}?$|(?<=\d)(?:st|nd|rd|th)$")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree(?![a-zA-Z])")
_PERCENT = re.compile(rf"\s*(?:\\?%|{_TEXT}\{{\s*(?:\\?%|percent(?:age)?|pct)\s*\}}|\b(?:percent(?:age)?|pct)\b)", re.IGNORECASE)
_CURRENCY = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound", r"\pounds": "pound", "¥": "yen"}
_MIXED_FRAC = re.compile(r"(?<![\d.^_}\w)])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_MIXED_SLASH = re.compile(r"(?<![\d.^_}\w)/])(\d+)\s+(\d+)/(\d+)(?![\d.])")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]|\.\d*,)")
_HEAD = r"(?P<head>.*[\d}\)])"
_TEXT_UNIT = re.compile(rf"{_HEAD}\s*(?P<unit>{_TEXT}\{{[^{{}}]*\}}(?:\s*{_TEXT}\{{[^{{}}]*\}})*)\s*(?P<power>\^\{{?\d\}}?)?$")
_WORD_UNIT = re.compile(
  rf"{_HEAD}\s*(?P<unit>(?<![\\a-zA-Z])[a-zA-Z]{{2,}}(?:[\s/][a-zA-Z]+)*|(?<=\s)[mslgLhkAVWJNK])\s*(?P<power>\^\{{?\d\}}?)?$"
)
_BASE_UNIT = re.compile(r"(?P<head>\d+)\s*_\s*\{?(?P<base>\d+)\}?$")
_NOT_UNITS = frozenset(
  ["pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "or", "and", "mod", "inf", "infinity", "to", "in", "if"]
)
_SYNONYMS = {
  "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km",
  "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "hour": "h", "hr": "h",
  "hrs": "h", "minute": "min", "mins": "min", "second": "s", "sec": "s", "secs": "s", "gram": "g", "kilogram": "kg", "pound": "lb",
  "lbs": "lb", "liter": "l", "litre": "l", "usd": "dollar", "buck": "dollar", "square": "sq", "degree": "degree", "cubic": "cu",
}  # fmt: skip


def read_answer(text: str) -> Answer:
  """Takes an answer apart; the same rules for gold answers and predictions."""
  text = _unwrap(_tidy(text))
  percent = bool(_PERCENT.search(text))
  text = _PERCENT.sub("", text)
  text, currency = _without_currency(text)
  text = _ORDINAL.sub("", text)
  degree = bool(_DEGREE.search(text))
  text, unit = _without_unit(_DEGREE.sub("", text).strip())
  unit |= currency | ({"degree"} if degree else set())
  text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", _unwrap(text)).rstrip(" .,;:").lstrip(" ,;:")
  text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
  text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
  text = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)
  text = _MIXED_SLASH.sub(_mixed, _MIXED_FRAC.sub(_mixed, text))
  if not text.startswith(("(", "[", "{", "\\{")) or re.search(r",0\d\d", text):
    text = as_list = _GROUPED.sub(lambda match: match.group().replace(",", ""), text)
  else:
    as_list, text = text, _GROUPED.sub(lambda match: match.group().replace(",", ""), text)
  return Answer(text, as_list, frozenset(unit), percent)


def _tidy(text: str) -> str:
  text = text.replace("−", "-").replace("–", "-").strip()
  if len(text) > 2 and text[0] == text[-1] == "$" and text[-2] != "\\":
    text = text.strip("$")  # dollars around a formula, not currency
  text = re.sub(r"\\[()\[\]]|\\displaystyle", " ", text)
  text = re.sub(r"(?<=\d)(?:\{,\}|,?\\[,!]|,\\! )\s*(?=\d{3}(?!\d))", ",", text)
  text = _SPACES.sub(" ", text)
  return re.sub(r" +", " ", text).rstrip(" .,;:").lstrip(" ,;:")


def _unwrap(text: str) -> str:
  """`\\text{13}` → `13`, when it is all there is."""
  whole = re.fullmatch(rf"{_TEXT}\{{([^{{}}]*)\}}", text.strip())
  return whole.group(1).strip() if whole else text


def _without_currency(text: str) -> tuple[str, set[str]]:
  found = set()
  for sign, name in _CURRENCY.items():
    if sign in text:
      found.add(name)
      text = text.replace(sign, "")
  return text.strip(), found if len(found) == 1 else set()


def _without_unit(text: str) -> tuple[str, set[str]]:
  base = _BASE_UNIT.fullmatch(text)
  if base:
    return base["head"], {f"base {base['base']}"}
  match = _TEXT_UNIT.fullmatch(text) or _WORD_UNIT.fullmatch(text)
  if not match:
    return text, set()
  words = re.sub(rf"{_TEXT}|[{{}}]", " ", match["unit"]).lower().split()
  if not words or any(word in _NOT_UNITS for word in words):
    return text, set()
  words = {_SYNONYMS.get(word, _SYNONYMS.get(word.removesuffix("s"), word.removesuffix("s") or word)) for word in words} - {"unit"}
  power = (match["power"] or "").strip("^{} ")
  if power and words:
    words = {word + power for word in words}
  return match["head"].strip(), words


def _mixed(match: re.Match) -> str:
  whole, numerator, denominator = match.groups()
  if int(numerator) >= int(denominator):
    return match.group()
  return rf"({whole}+\frac{{{numerator}}}{{{denominator}}})"
