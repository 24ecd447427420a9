r"""Extraction of answers and their comparison. Tables are (gold, prediction); no pool here: the input is harmless."""

import subprocess
import sys

import pytest

from emapg_jax.envs.grading import (
  MAX_ANSWER_CHARS,
  Outcome,
  after_think,
  extract_answer,
  extract_boxed,
  extract_number,
  grade,
  opens_think,
  quick_grade,
  same_number,
)

BOXES = [
  (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
  (r"\boxed{\{1,2\}}", r"\{1,2\}"),
  (r"so \fbox{42}.", "42"),
  (r"\boxed{42", None),
  (r"\boxed 7", "7"),
  (r"it is $\boxed 7$.", "7"),
  (r"\boxed 7.", "7"),
  (r"\boxed {7}", "7"),
  (r"\boxed{}", None),
  (r"\boxed{ }", None),
  (r"\boxed", None),
  ("maybe 41 or 42 or 43", None),
  (r"\boxed{1} ... so \boxed{1}", "1"),
  (r"\boxed{7} wait, \boxed{8}", "8"),
  (r"\boxed{2}, \boxed{3}", "3"),
  (r"\boxed{7} wait, \boxed{8", None),
  (r"\boxed{\boxed{5}}", "5"),
  (r"<answer>\boxed{42}</answer>", "42"),
  (r"\boxed{a\}b} c}", r"a\}b"),
  (r"\boxed{1\\} x", r"1\\"),
  (r"\boxedness{3}", None),
  ("\\boxed{" + "{" * 100_000, None),
  ("\\boxed{" * 100_000, None),
]


@pytest.mark.parametrize("text, answer", BOXES, ids=lambda value: str(value)[:20])
def test_extract_boxed(text, answer):
  assert extract_boxed(text) == answer


def test_what_counts_is_after_the_thinking():
  assert after_think("plain") == "plain"
  assert after_think("<think>a</think>b</think> c") == " c"
  assert after_think("no opening mark</think> c") == " c"
  assert after_think("<think> still at it") is None
  assert after_think("still at it", prompt_opens_think=True) is None
  assert after_think("done</think> c", prompt_opens_think=True) == " c"


def test_a_rendered_prompt_opens_think():
  assert opens_think("<|Assistant|><think>\n") and opens_think("x<think>")
  assert not opens_think("x") and not opens_think("<think>\n\n</think>\n\n") and not opens_think("")


@pytest.mark.parametrize(
  "response, prompt_opens_think, answer",
  [
    (r"The answer is \boxed{4}", False, "4"),
    (r"The answer is \boxed{4}", True, None),
    (r"<answer>\boxed{42}</answer>", False, "42"),
    (r"<think>\boxed{7}</think> \boxed{8}", False, "8"),
    (r"\boxed{7}</think> \boxed{8}", True, "8"),
    (r"<think>\boxed{7}</think> so it is seven", False, None),
    (r"<think>\boxed{7}", False, None),
  ],
)
def test_extract_answer_follows_the_reasoning_markers(response, prompt_opens_think, answer):
  assert extract_answer(response, "boxed", prompt_opens_think) == answer


@pytest.mark.parametrize(
  "text, number",
  [
    ("The total is 72 clips, altogether.", "72"),
    ("$29.00", "29.00"),
    ("70,000.", "70000"),
    ("9,500", "9500"),
    (r"\$9{,}500", "9500"),
    (r"10\,000", "10000"),
    ("1,234,567.5 km", "1234567.5"),
    ("1, 2", "2"),
    ("1,2", "2"),
    ("12,3456", "3456"),
    ("1,000,50", "50"),
    ("#### -3", "-3"),
    ("it is −3.", "-3"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("5-3", "3"),
    ("5 - 3", "3"),
    ("x=-3", "-3"),
    ("(-3)", "-3"),
    ("(2)-3", "3"),
    ("only .5 of it", "0.5"),
    ("no number, here.", None),
    ("", None),
  ],
)
def test_extract_number(text, number):
  assert extract_number(text) == number


def test_number_mode_prefers_a_box():
  assert extract_answer(r"It is \boxed{72}, from 3 boxes.", "number") == "72"
  assert extract_answer("It is 72, altogether.", "number") == "72"
  assert extract_answer("It is 72, altogether.", "boxed") is None
  assert extract_answer(r"72 \boxed{", "number") is None
  assert extract_answer("<think>72", "number") is None


RIGHT = [
  # fractions, sets, grouping, currency
  ("1/2", r"\frac{1}{2}"),
  (r"\{1,2\}", r"\{2,1\}"),
  (r"\{1,2\}", "1,2"),
  ("9500", r"\$9{,}500"),
  ("8000", "8,000"),
  ("10000", r"10\,000"),
  ("10080", r"10,\!080"),
  ("29", "$29.00"),
  ("70000", "70,000."),
  ("1000", "(1,000)"),
  ("(100, 200)", "(100,200)"),
  ("0.1", ".1"),
  ("1000000", "1e6"),
  # \text, mixed numbers, percent, units, degrees
  ("13", r"\text{13}"),
  ("2.5", r"2\frac{1}{2}"),
  ("-2.5", r"-2\frac12"),
  ("5/4", "1 1/4"),
  (r"28\%", "28 percent"),
  (r"28\%", "28"),
  (r"28\%", r"28\text{ percent}"),
  ("0.28", r"28\%"),
  ("35", r"35\text{ cm}"),
  (r"35\text{ cm}", "35"),
  ("35 cm", "35 centimeters"),
  (r"12 \text{ cm}^2", r"12\mathrm{~cm}^2"),
  ("125 miles", "125 miles apart"),
  ("90", r"90^\circ"),
  ("90", "90°"),
  (r"90^\circ", "90 degrees"),
  # exact and relative comparison
  (r"0.5+\frac{\pi}{8}", r"\pi \div 8 + 1 \div 2"),
  ("1/12", "0.0833333333333333"),
  ("1/3", "0.333333"),
  (r"\frac{x+2}{7}", "x/7+2/7"),
  ("0.5x", r"\frac{x}{2}"),
  (r"3\sqrt{13}", r"\sqrt{117}"),
  (r"1+\sqrt{2}", r"\sqrt{3+2\sqrt{2}}"),
  (r"10^9 \sqrt{2}", "1414213562.37"),
  (r"\tan^2(y)+1", r"\sec^2(y)"),
  (r"\pm 2021", r"\{-2021,2021\}"),
  ("12:00", "12:00"),
  (r"\{\frac12,\pi\}", r"\{\pi, 0.5\}"),
  (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4.0\end{bmatrix}"),
  # equations, intervals
  ("5", "x=5"),
  ("x=5", "5"),
  ("2x+4y-3=0", r"y=-\frac12 x+\frac34"),
  (r"y=-\frac12 x+\frac34", "2x+4y-3=0"),
  ("(0,12.5)", "0<x<12.5"),
  ("0<x<12.5", "(0,12.5)"),
  ("[-2,7]", r"x \in [-2,7]"),
  (r"(-\infty,3]\cup\{4\}", r"\{4\}\cup(-\infty,3]"),
  ("-10,-8,4", r"a=4,\,-8,\,-10"),
  # words and choices
  ("Evelyn", r"\text{Evelyn}"),
  (r"\text{no real solution}", "No real solution."),
  ("none of these", "None of these."),
  ("ab", "ba"),
  ("xy", r"x \cdot y"),
  ("odd function", r"\textbf{odd function}"),
  ("A", r"\text{(A)}"),
  ("6, 8", r"6 \text{ and } 8"),
]

WRONG = [
  ("1/3", r"\frac{1}{2}"),
  (r"\frac{12}{3}", r"\frac{1}{23}"),
  ("12", "1,2"),
  ("(1,0)", "(1,000)"),
  ("500", "9,500"),
  ("12345", "1,23,45"),
  ("32349", "32, 349"),
  ("1", r"2\frac{1}{2}"),
  ("11/4", "1 1/4"),
  ("28", r"28\%"),
  (r"28\%", "0.28"),
  (r"28\%", "2800"),
  ("35 m", "35 cm"),
  (r"35\text{ m}", r"35\text{ cm}"),
  ("1/2^98", "1/2^99"),
  ("1/2006!", "1/2004!"),
  ("1e-30", "2e-30"),
  ("n=1,2,3", "n=2,3,4"),
  ("(0,1.5)", "(0,1)"),
  ("[0,1]", "(0,1)"),
  ("(0,1)", "[0,1]"),
  ("2021", r"\pm 2021"),
  (r"\pm 2021", "2021"),
  ("1:00", "12:00"),
  ("1:10", "2:20"),
  ("1+1/e", "1-1/e"),
  ("(2,1)", "(1,2)"),
  ("(1,2)", "(2,1)"),
  ("1/3", "0.33"),
  ("3.14", r"\pi"),
  (r"\frac{1}{3 \cdot 10^9}", "0.0000000004"),
  ("16386.17", "16386.18"),
  (r"10^{100}", r"10^{100}+1"),
  ("x=5", "x=6"),
  ("x=5", "y=5"),
  (r"\{1,2\}", "3"),
  (r"\{1,2\}", r"\{1,3\}"),
  (r"\{\frac12, 0.5\}", r"\{0.5, 3\}"),
  ("204_5", "204_6"),
  ("Even", "eevN"),
  ("none of these", "one of these"),
  ("A", "B"),
  (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
]


@pytest.mark.parametrize("gold, prediction", RIGHT)
def test_right(gold, prediction):
  assert grade(gold, prediction) is Outcome.RIGHT


@pytest.mark.parametrize("gold, prediction", WRONG)
def test_wrong(gold, prediction):
  assert grade(gold, prediction) is Outcome.WRONG


def test_the_last_box_decides():
  def outcome(gold, response):
    return grade(gold, extract_boxed(response))

  assert outcome("42", "maybe 41 or 42 or 43") is Outcome.WRONG
  assert outcome("1", r"\boxed{1} ... so \boxed{1}") is Outcome.RIGHT
  assert outcome("7", r"\boxed{7} wait, \boxed{8}") is Outcome.WRONG
  assert outcome("8", r"\boxed{7} wait, \boxed{8}") is Outcome.RIGHT
  assert outcome(r"\{2,3\}", r"\boxed{2}, \boxed{3}") is Outcome.WRONG


def test_the_argument_order_is_gold_then_prediction():
  assert grade(r"28\%", "28") is Outcome.RIGHT and grade("28", r"28\%") is Outcome.WRONG


def test_any_of_several_answers_counts():
  golds = ("n(n-1)", r"\frac{1}{2}", "7")
  assert [grade(golds, prediction) for prediction in ("7", "0.5", "n^2-n", "8")] == [Outcome.RIGHT] * 3 + [Outcome.WRONG]


def test_unparseable_is_told_from_wrong():
  assert grade("5", r"\frac{") is Outcome.UNPARSEABLE
  assert grade("5", "2" + " " * MAX_ANSWER_CHARS + "+3") is Outcome.UNPARSEABLE
  assert grade("5", None) is Outcome.WRONG


def test_quick_grade_answers_only_where_it_is_sure():
  assert quick_grade(["7"], "7.0") is Outcome.RIGHT
  assert quick_grade(["7"], "8") is Outcome.WRONG
  assert quick_grade([r"\frac12"], r" \frac12 ") is Outcome.RIGHT
  assert quick_grade(["8", "x"], "9") is None
  assert quick_grade(["1/2"], "0.5") is None
  assert same_number("9,500", "9500.0") is True and same_number("1,2", "12") is None
  assert same_number("0.1", "0.10000000000000000001") is False


def test_the_trainers_process_imports_neither_sympy_nor_jax_for_grading():
  code = "import sys, emapg_jax.envs.grading_pool; print(sorted({'jax', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)))"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
  code = "import sys, emapg_jax.envs.comparison; print('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
