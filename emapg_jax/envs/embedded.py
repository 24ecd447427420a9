"""Token-level tasks with a tiny vocabulary of their own: nothing to download, and small models learn them in minutes."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from emapg_jax.data import Problem

EVAL_SIZE = 2048

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"


class SymbolTokenizer:
  """One token per symbol; text is symbols separated by spaces.

  Ids: pad 0, bos 1, eos 2, then the symbols in their order. `encode_prompt` puts `bos_id` in front; the caller ends a demonstration with
  `eos_ids[0]`; `encode` adds neither. `decode` leaves out one final end mark and shows every other special token by its name, so that a
  response with a special token inside is never mistaken for one without.
  """

  def __init__(self, symbols: Iterable[str]):
    self._names = (_PAD, _BOS, _EOS, *symbols)
    self._ids = {name: i for i, name in enumerate(self._names)}
    if len(self._ids) != len(self._names) or any(name.split() != [name] for name in self._names):
      raise ValueError(f"symbols must be distinct and hold no space, got {list(self._names[3:])[:20]}.")
    self.vocab_size = len(self._names)
    self.pad_id, self.bos_id = self._ids[_PAD], self._ids[_BOS]
    self.eos_ids = (self._ids[_EOS],)

  def encode(self, text: str) -> list[int]:
    """Ids of the symbols in a text, without bos or eos."""
    unknown = [symbol for symbol in text.split() if symbol not in self._ids]
    if unknown:
      raise ValueError(f"the text {text[:80]!r} holds {unknown[0]!r}, which is not one of the {self.vocab_size} symbols of this task.")
    return [self._ids[symbol] for symbol in text.split()]

  def encode_prompt(self, prompt: str, chat: bool = False) -> list[int]:
    """Ids of a prompt, bos in front. There is no chat format: `chat` must be False."""
    if chat:
      raise ValueError("a task with its own symbols has no chat format: set `chat = False` in the task.")
    return [self.bos_id, *self.encode(prompt)]

  def decode(self, ids: Sequence[int]) -> str:
    """Symbols of some ids; one eos at the end is left out."""
    ids = [int(i) for i in ids]
    if any(i < 0 or i >= self.vocab_size for i in ids):
      raise ValueError(f"token ids {[i for i in ids if i < 0 or i >= self.vocab_size][:5]} are outside [0, {self.vocab_size}).")
    if ids and ids[-1] in self.eos_ids:
      ids.pop()
    return " ".join(self._names[i] for i in ids)

  @property
  def symbols(self) -> tuple[str, ...]:
    """Every symbol but the special ones."""
    return self._names[3:]


class AddTask:
  """Addition with its carries written out, low digit first: `4 7 + 3 8 =` → `5 1 8 0 > 0 8 5`.

  The response is sum and carry of each digit from the lowest to the highest, `>`, and the `digits + 1` digits of the sum from the highest
  to the lowest. Its score is 1 when it has that length, `>` stands in its place and the digits after `>` are right, else 0: the scratch
  part is there to help and is not marked. With eos the response has `3 * digits + 3` tokens. V = 16.

  With two digits, 2,048 of the 10,000 operand pairs are held out for evaluation: the same ones always, whatever the seed of a run. With one
  digit all 100 pairs serve for both.

  Args:
    digits: digits of each operand, 1 or 2.
    noise: the probability with which each token of a demonstration (eos apart) is replaced by a symbol drawn evenly from all that are not
      special, so that a model warmed up on it is left something to learn.
  """

  chat = False

  def __init__(self, digits: int = 2, noise: float = 0.0):
    if digits not in (1, 2):
      raise ValueError(f"AddTask has digits 1 or 2, got {digits}.")
    if not 0.0 <= noise <= 1.0:
      raise ValueError(f"the noise of AddTask is a probability in [0, 1], got {noise}.")
    self.digits, self.noise = digits, noise
    self.tokenizer = SymbolTokenizer([*"0123456789", "+", "=", ">"])
    pairs = [(a, b) for a in range(10**digits) for b in range(10**digits)]
    problems = [Problem(f"{_spell(a, digits)} + {_spell(b, digits)} =", _spell(a + b, digits + 1)) for a, b in pairs]
    self._train, self._eval = _split(problems) if digits > 1 else (problems, problems)

  def prompts(self) -> Sequence[Problem]:
    """Operand pairs to train on."""
    return self._train

  def eval_prompts(self) -> Sequence[Problem]:
    """Operand pairs for evaluation, disjoint from `prompts()` with two digits."""
    return self._eval

  def score(self, problem: Problem, response: str) -> float:
    """1 when the response has the form and its final digits are right, else 0."""
    symbols, scratch = response.split(), 2 * self.digits
    has_form = len(symbols) == scratch + 1 + self.digits + 1 and symbols[scratch] == ">"
    has_form = has_form and not any(symbol in (_PAD, _BOS, _EOS) for symbol in symbols)
    return float(has_form and symbols[scratch + 1 :] == problem.answer.split())

  def extract(self, problem: Problem, response: str) -> str | None:
    """What stands after the last `>`."""
    del problem
    _, mark, answer = response.rpartition(">")
    return answer.strip() if mark else None

  def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
    """The right response, without eos; with `noise` some of its symbols replaced."""
    a, b = (text.split() for text in problem.prompt.removesuffix("=").split("+"))
    carry, symbols = 0, []
    for x, y in zip(reversed(a), reversed(b)):
      carry, digit = divmod(int(x) + int(y) + carry, 10)
      symbols += [str(digit), str(carry)]
    symbols += [">", *problem.answer.split()]
    if self.noise:
      replaced = rng.random(len(symbols)) < self.noise
      drawn = rng.choice(self.tokenizer.symbols, size=len(symbols))
      symbols = [str(new) if replace else old for old, new, replace in zip(symbols, drawn, replaced)]
    return " ".join(symbols)


class BetweenTask:
  """Any three numbers strictly between two others, in increasing order: `12 40 =` → `15 16 33`. V = 504: the numbers 0 to 499 and `=`.

  Many responses are right, so a good policy stays spread over many tokens and the mass outside a small top-k is large. The gap hi − lo
  runs from 4 (one right answer) to 32 (4,495): at gap 4 every token is forced, at 32 the first number alone has 29 candidates and k = 8
  leaves out a large part of them. Demonstrations are drawn evenly from the right answers. 2,048 of the pairs are held out for
  evaluation, always the same.
  """

  chat = False
  _MIN_GAP, _MAX_GAP, _NUMBERS = 4, 32, 500

  def __init__(self):
    self.tokenizer = SymbolTokenizer([*map(str, range(self._NUMBERS)), "="])
    pairs = [(lo, lo + gap) for lo in range(self._NUMBERS) for gap in range(self._MIN_GAP, self._MAX_GAP + 1) if lo + gap < self._NUMBERS]
    self._train, self._eval = _split([Problem(f"{lo} {hi} =") for lo, hi in pairs])

  def prompts(self) -> Sequence[Problem]:
    """Pairs to train on."""
    return self._train

  def eval_prompts(self) -> Sequence[Problem]:
    """Pairs for evaluation, disjoint from `prompts()`."""
    return self._eval

  def score(self, problem: Problem, response: str) -> float:
    """1 when the response is three increasing numbers inside the open interval and nothing else, else 0."""
    lo, hi = (int(symbol) for symbol in problem.prompt.split()[:2])
    symbols = response.split()
    if len(symbols) != 3 or not all(symbol.isdecimal() for symbol in symbols):
      return 0.0
    x, y, z = (int(symbol) for symbol in symbols)
    return float(lo < x < y < z < hi)

  def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
    """A right response drawn evenly from all, without eos."""
    lo, hi = (int(symbol) for symbol in problem.prompt.split()[:2])
    return " ".join(str(n) for n in sorted(rng.choice(np.arange(lo + 1, hi), size=3, replace=False)))


def _spell(number: int, width: int) -> str:
  return " ".join(f"{number:0{width}d}")


def _split(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
  """(train, eval): the EVAL_SIZE problems whose prompts have the smallest hashes are held out, in the order of their hashes."""
  ranked = sorted(problems, key=lambda problem: hashlib.sha256(problem.prompt.encode()).digest())
  held_out = set(ranked[:EVAL_SIZE])
  return [problem for problem in problems if problem not in held_out], ranked[:EVAL_SIZE]
