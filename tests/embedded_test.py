"""The token-level tasks: formats, splits, right and wrong responses."""

import collections

import numpy as np
import pytest

from emapg_jax.envs.embedded import AddTask, BetweenTask, SymbolTokenizer
from emapg_jax.envs.task import Problem, score_all

RNG = np.random.default_rng(0)
# By the hash of the prompt, so a changed format or rule shows here.
FIRST_ADD = ["0 7 + 4 6 =", "6 7 + 9 9 =", "9 9 + 4 3 ="]
FIRST_BETWEEN = ["469 474 =", "429 451 =", "443 466 ="]


def test_tokenizer_round_trip_and_ids():
  tokenizer = AddTask().tokenizer
  assert tokenizer.vocab_size == 16
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 1, (2,))
  assert tokenizer.encode("4 7 + =") == [7, 10, 13, 14]
  assert tokenizer.decode([7, 10, 13, 14, 2]) == "4 7 + ="
  for i in range(16):
    assert tokenizer.encode(tokenizer.decode([i, 3])) == [i, 3]
  assert BetweenTask().tokenizer.vocab_size == 504
  assert BetweenTask().tokenizer.decode(BetweenTask().tokenizer.encode("0 499 12 =")) == "0 499 12 ="


def test_special_tokens_inside_a_response_stay_visible():
  tokenizer = SymbolTokenizer("ab")
  assert tokenizer.decode([3, 0, 4]) == "a <pad> b"
  assert tokenizer.decode([3, 2, 4, 2]) == "a <eos> b"
  assert tokenizer.decode([3, 2, 2]) == "a <eos>"
  assert tokenizer.decode([]) == tokenizer.decode([2]) == ""


def test_tokenizer_errors():
  with pytest.raises(ValueError, match="'c', which is not one of the 5"):
    SymbolTokenizer("ab").encode("a c")
  with pytest.raises(ValueError, match=r"\[5, -1\] are outside \[0, 5\)"):
    SymbolTokenizer("ab").decode([3, 5, -1])
  for symbols in ["aa", ["a b"], [""], ["<pad>"]]:
    with pytest.raises(ValueError, match="distinct"):
      SymbolTokenizer(symbols)


def test_addition_is_written_low_digit_first():
  # 7 + 8 = 15: digit 5, carry 1. 4 + 3 + 1 = 8: digit 8, carry 0. The sum is 085.
  task = AddTask(digits=2)
  assert task.demonstration(Problem("4 7 + 3 8 =", "0 8 5"), RNG) == "5 1 8 0 > 0 8 5"
  # 9 + 9 = 18, then 9 + 9 + 1 = 19: 198.
  assert task.demonstration(Problem("9 9 + 9 9 =", "1 9 8"), RNG) == "8 1 9 1 > 1 9 8"
  assert AddTask(digits=1).demonstration(Problem("6 + 7 =", "1 3"), RNG) == "3 1 > 1 3"


@pytest.mark.parametrize("digits, pairs", [(1, 100), (2, 10_000)])
def test_every_demonstration_scores_one_and_every_prompt_is_in_the_format(digits, pairs):
  task = AddTask(digits=digits)
  problems = {problem.prompt: problem for problem in [*task.prompts(), *task.eval_prompts()]}
  assert len(problems) == pairs
  for problem in problems.values():
    a, b = problem.prompt.removesuffix(" =").split(" + ")
    total = int(a.replace(" ", "")) + int(b.replace(" ", ""))
    assert problem.answer == " ".join(f"{total:0{digits + 1}d}")
    assert len(task.tokenizer.encode(problem.prompt)) == 2 * digits + 2
  responses = [task.demonstration(problem, RNG) for problem in problems.values()]
  assert all(len(task.tokenizer.encode(response)) == 3 * digits + 2 for response in responses)
  assert score_all(task, list(problems.values()), responses).min() == 1.0


def test_addition_marks_form_and_final_digits_only():
  task, problem = AddTask(), Problem("4 7 + 3 8 =", "0 8 5")
  right = ["5 1 8 0 > 0 8 5", "0 0 0 0 > 0 8 5", "9 9 + = > 0 8 5"]
  wrong = [
    "", "> 0 8 5", "0 8 5", "5 1 8 0 > 0 8 6", "5 1 8 0 > 8 5", "5 1 8 0 > 0 8 5 5", "5 1 8 0 0 8 5", "5 1 8 > 0 8 5", "5 1 8 0 0 > 0 8 5",
    "5 1 8 0 = 0 8 5", "<pad> 1 8 0 > 0 8 5", "5 1 8 0 > 0 8 5 <eos>", "5 1 8 0 > 5 8 0",
  ]  # fmt: skip
  assert [task.score(problem, response) for response in right] == [1.0] * 3
  assert [task.score(problem, response) for response in wrong] == [0.0] * len(wrong)
  assert task.extract(problem, right[0]) == "0 8 5" and task.extract(problem, "0 8 5") is None


@pytest.mark.parametrize("make", [AddTask, BetweenTask])
def test_the_split_is_disjoint_fixed_and_of_2048(make):
  task = make()
  train, held_out = ({problem.prompt for problem in problems} for problems in (task.prompts(), task.eval_prompts()))
  assert len(held_out) == len(task.eval_prompts()) == 2048 and not train & held_out
  assert make().eval_prompts() == task.eval_prompts() and make().prompts() == task.prompts()


def test_the_split_does_not_change_between_versions():
  assert [problem.prompt for problem in AddTask().eval_prompts()[:3]] == FIRST_ADD
  assert [problem.prompt for problem in BetweenTask().eval_prompts()[:3]] == FIRST_BETWEEN


def test_held_out_sums_look_like_the_others():
  # A split by a bad rule would leave some digit out of training: with 2,048 held out by a hash every last digit keeps about a tenth.
  counts = collections.Counter(problem.answer[-1] for problem in AddTask().eval_prompts())
  assert len(counts) == 10 and min(counts.values()) > 140 and max(counts.values()) < 270  # 205 ± 14 expected


def test_noise_replaces_that_share_of_the_tokens_and_only_by_ordinary_symbols():
  task, rng = AddTask(digits=1, noise=0.3), np.random.default_rng(5)
  clean = AddTask(digits=1)
  pairs = [(task.demonstration(problem, rng).split(), clean.demonstration(problem, rng).split()) for problem in task.prompts() * 40]
  assert all(len(noisy) == len(right) for noisy, right in pairs)
  changed = np.mean([a != b for noisy, right in pairs for a, b in zip(noisy, right)])
  # Of 13 symbols one is the right one: .3 * 12/13 = .277. 20,000 tokens: standard error .0032, five of them .016.
  assert abs(changed - 0.3 * 12 / 13) < 0.016
  assert {symbol for noisy, _ in pairs for symbol in noisy} == set(task.tokenizer.symbols)
  assert task.demonstration(task.prompts()[5], np.random.default_rng(1)) == task.demonstration(task.prompts()[5], np.random.default_rng(1))


def test_between_accepts_any_three_inside():
  task, problem = BetweenTask(), Problem("12 40 =")
  right = ["13 14 15", "15 16 33", "37 38 39"]
  wrong = ["", "12 13 14", "38 39 40", "14 13 15", "13 13 15", "13 14", "13 14 15 16", "13 14 =", "13 14 <eos>", "-13 14 15"]
  assert [task.score(problem, response) for response in right] == [1.0] * 3
  assert [task.score(problem, response) for response in wrong] == [0.0] * len(wrong)


def test_between_always_has_an_answer_and_demonstrations_are_right():
  task = BetweenTask()
  problems = [*task.prompts(), *task.eval_prompts()]
  bounds = np.asarray([problem.prompt.split()[:2] for problem in problems], dtype=int)
  gaps = bounds[:, 1] - bounds[:, 0]
  assert (gaps.min(), gaps.max()) == (4, 32) and bounds.min() == 0 and bounds.max() == 499
  assert score_all(task, problems, [task.demonstration(problem, RNG) for problem in problems]).min() == 1.0
  first_of_31 = {task.demonstration(Problem("100 132 ="), RNG).split()[0] for _ in range(300)}
  assert len(first_of_31) > 12


def test_options_that_make_no_sense():
  with pytest.raises(ValueError, match="digits 1 or 2, got 3"):
    AddTask(digits=3)
  with pytest.raises(ValueError, match=r"got 1\.5"):
    AddTask(noise=1.5)
