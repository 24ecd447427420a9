"""Problems from files, the seeded order in which a run visits them, and the length filter. Host code: numpy only."""

import dataclasses
import json
import math
import pathlib
import reprlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

# Keeps the draws of the data order apart from every other use of the run's seed.
DATA_STREAM = 0x6461_7461

LENGTH_POLICIES = ("drop", "error")


@dataclasses.dataclass(frozen=True)
class Problem:
  """One prompt and what counts as a right answer to it; with several answers any of them counts."""

  prompt: str
  answer: str | tuple[str, ...] = ""

  @property
  def answers(self) -> tuple[str, ...]:
    """The answers as a tuple, whether there is one or several."""
    return (self.answer,) if isinstance(self.answer, str) else self.answer


def load_problems(paths: str | Sequence[str]) -> list[Problem]:
  """Problems of JSONL (`.jsonl`, `.json` with one object a line) and parquet files, in the order of the files and their rows.

  Each row has `problem` (text) and `answer` (text, a number, or a list of them: any counts); other columns are ignored.

  Raises:
    ValueError: names file and line (JSONL) or row (parquet, from 1) of the first thing that is not so.
  """
  paths = [paths] if isinstance(paths, (str, pathlib.Path)) else list(paths)
  problems = [_problem(row, where) for path in paths for row, where in _rows(pathlib.Path(path))]
  if not problems:
    raise ValueError(
      f"the data set {', '.join(map(str, paths)) or '(no file given)'} holds no problem at all; "
      "give at least one file with a row of {problem, answer}."
    )
  return problems


def _rows(path: pathlib.Path) -> Iterator[tuple[object, str]]:
  if not path.is_file():
    raise ValueError(f"the data file {path} does not exist or is not a file (looked from {pathlib.Path.cwd()}); check the path.")
  if path.suffix in (".jsonl", ".json"):
    return _jsonl_rows(path)
  if path.suffix == ".parquet":
    return _parquet_rows(path)
  raise ValueError(f"the data file {path} ends in {path.suffix!r}, not a known format; use .jsonl (one object a line) or .parquet.")


def _jsonl_rows(path: pathlib.Path) -> Iterator[tuple[object, str]]:
  # Bytes are split at newlines only: str.splitlines would also cut at U+2028, which JSON text may hold.
  for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
    if not line.strip():
      continue
    where = f"{path}, line {number}"
    try:
      row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
      start = line[:60].decode("utf-8", "replace")
      raise ValueError(
        f"{where}: not a complete JSON object ({error}); the line starts {start!r}. "
        "A file cut off in the middle ends like this: fetch or write it again."
      ) from error
    except (ValueError, RecursionError) as error:  # more digits or levels than Python reads
      raise ValueError(f"{where}: JSON that cannot be read ({error}); write long numbers as text, or remove the row.") from error
    yield row, where


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[object, str]]:
  import pyarrow
  import pyarrow.parquet

  try:
    table = pyarrow.parquet.read_table(path)
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{path}: not a readable parquet file ({error}); fetch or write it again.") from error
  missing = {"problem", "answer"} - set(table.column_names)
  if missing:
    raise ValueError(f"{path}: no column {' or '.join(sorted(missing))}; its columns are {', '.join(table.column_names)}. Rename them.")
  table = table.select(["problem", "answer"])
  try:
    rows = table.to_pylist()
  except _UNREADABLE as error:
    number = next(i for i in range(table.num_rows) if not _is_readable(table.slice(i, 1))) + 1
    raise ValueError(f"{path}, row {number}: not readable as text or numbers ({error}); write the file again in UTF-8.") from error
  yield from ((row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))


_UNREADABLE = (ValueError, OverflowError)  # arrow does not look into its texts; Python does when it makes them its own


def _is_readable(table) -> bool:
  try:
    table.to_pylist()
  except _UNREADABLE:
    return False
  return True


def _problem(row: object, where: str) -> Problem:
  if not isinstance(row, dict):
    raise ValueError(f"{where}: expected an object with `problem` and `answer`, found {type(row).__name__} {reprlib.repr(row)}.")
  prompt = row.get("problem")
  if not isinstance(prompt, str) or not prompt.strip():
    columns = ", ".join(map(str, row))
    raise ValueError(f"{where}: `problem` is {reprlib.repr(prompt)}, it must be a text that is not empty; the columns are {columns}.")
  _require_unicode("problem", prompt, where)
  answer = row.get("answer")
  if not isinstance(answer, list):
    return Problem(prompt, _answer(answer, where))
  if not answer:
    raise ValueError(f"{where}: `answer` is an empty list; give at least one right answer or remove the row.")
  answers = tuple(_answer(each, where) for each in answer)
  return Problem(prompt, answers[0] if len(answers) == 1 else answers)


def _answer(answer: object, where: str) -> str:
  if isinstance(answer, (int, float)) and not isinstance(answer, bool) and (isinstance(answer, int) or math.isfinite(answer)):
    return str(answer)
  if isinstance(answer, str) and answer.strip():
    _require_unicode("answer", answer, where)
    return answer.strip()
  raise ValueError(
    f"{where}: `answer` is {reprlib.repr(answer)}, it must be a text that is not empty, a finite number, or a list of these; "
    "add the right answer or remove the row."
  )


def _require_unicode(column: str, text: str, where: str) -> None:
  """JSON may escape half of a surrogate pair, which no tokenizer and no file takes."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f"{where}: `{column}` is no valid Unicode ({error}); correct the text or remove the row.") from error


class PromptStream:
  """The endless order in which a run visits its problems: every epoch a new permutation, drawn from the seed and the epoch alone.

  A prompt's uid is its position in this stream, `epoch * size + rank in the epoch's shuffle`, so it is unique in a run. `position` (an int)
  is the whole state: setting it, say after a restore, continues exactly as an uninterrupted stream does.
  """

  def __init__(self, size: int, seed: int):
    if size < 1 or seed < 0:
      raise ValueError(f"a prompt stream needs size >= 1 and seed >= 0, got size={size} and seed={seed}.")
    self.size = size
    self.seed = seed
    self.position = 0
    self._orders: dict[int, np.ndarray] = {}

  def take(self, n: int) -> np.ndarray:
    """The next n uids, int64 [n]; may span epochs."""
    if n < 0:
      raise ValueError(f"cannot take {n} prompts from a stream; n must be at least 0.")
    uids = np.arange(self.position, self.position + n, dtype=np.int64)
    self.position += n
    return uids

  def index(self, uid: int) -> int:
    """The data-set row of a uid, whatever the position of the stream."""
    if uid < 0:
      raise ValueError(f"prompt uid {uid} is negative; uids are positions in the stream and start at 0.")
    epoch, rank = divmod(int(uid), self.size)
    return int(self._order(epoch)[rank])

  def indices(self, uids: Iterable[int]) -> np.ndarray:
    """The data-set rows of several uids, int64, in their order."""
    return np.asarray([self.index(uid) for uid in uids], dtype=np.int64)

  def _order(self, epoch: int) -> np.ndarray:
    if epoch not in self._orders:
      while len(self._orders) >= 2:  # a step reaches into two epochs at most, unless it is longer than an epoch
        self._orders.pop(next(iter(self._orders)))
      self._orders[epoch] = np.random.default_rng([self.seed, DATA_STREAM, epoch]).permutation(self.size)
    return self._orders[epoch]


def filter_long(token_lists: Sequence[Sequence[int]], limit: int, policy: str = "drop") -> tuple[np.ndarray, int]:
  """Which prompts have at most `limit` tokens. Prompts are never cut, so the chat header is always whole.

  Args:
    token_lists: the token ids of each fully rendered prompt.
    limit: the most tokens a prompt may have.
    policy: `drop` leaves longer prompts out, `error` refuses them.

  Returns:
    (indices of the prompts kept, int64, ascending; number of prompts dropped, for the log)

  Raises:
    ValueError: a long prompt under `error`, nothing left under `drop`, an unknown policy.
  """
  if policy not in LENGTH_POLICIES:
    raise ValueError(f"unknown policy {policy!r} for over-long prompts; use one of {', '.join(LENGTH_POLICIES)}.")
  lengths = np.asarray([len(tokens) for tokens in token_lists], dtype=np.int64)
  kept = np.flatnonzero(lengths <= limit)
  dropped = len(lengths) - len(kept)
  if dropped and policy == "error":
    first = int(np.flatnonzero(lengths > limit)[0])
    raise ValueError(
      f"{dropped} of {len(lengths)} prompts are longer than {limit} tokens, the first is prompt {first} with {lengths[first]}; "
      "raise the limit, or use the policy 'drop' to leave them out."
    )
  if not len(kept):
    shortest = f"the shortest has {lengths.min()}" if len(lengths) else "there were none to begin with"
    raise ValueError(f"no prompt is left: all {len(lengths)} are longer than {limit} tokens, {shortest}; raise the limit on prompt tokens.")
  return kept, dropped
