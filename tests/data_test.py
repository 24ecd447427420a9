"""Loading problems, the order in which a run visits them, and the length filter."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from emapg_jax.data import Problem, PromptStream, filter_long, load_problems


def write(path, *lines):
  path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
  return str(path)


def test_jsonl_answers_of_every_kind(tmp_path):
  rows = [("p1", "\\frac{1}{2}"), ("p2\u2028", 7), ("p3", ["1", 2.5]), ("p4", ["x"]), ("p5", 0)]
  path = write(tmp_path / "a.jsonl", *({"problem": p, "answer": a, "other": 1} for p, a in rows), "", "")
  wanted = [Problem("p1", "\\frac{1}{2}"), Problem("p2\u2028", "7"), Problem("p3", ("1", "2.5")), Problem("p4", "x"), Problem("p5", "0")]
  assert load_problems(path) == load_problems([path]) == wanted
  assert wanted[2].answers == ("1", "2.5") and wanted[3].answers == ("x",)


def test_line_separators_inside_a_text_do_not_split_it(tmp_path):
  (tmp_path / "a.jsonl").write_text('\ufeff{"problem": "a\u2028b\x85", "answer": "c"}\r\n', encoding="utf-8")
  assert load_problems(str(tmp_path / "a.jsonl")) == [Problem("a\u2028b\x85", "c")]


def test_parquet_and_several_files_in_order(tmp_path):
  pyarrow.parquet.write_table(
    pyarrow.table({"problem": ["q1", "q2"], "answer": [["1", "2"], ["3"]], "more": [1, 2]}), tmp_path / "b.parquet"
  )
  path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": "0"})
  assert load_problems([str(tmp_path / "b.parquet"), path]) == [Problem("q1", ("1", "2")), Problem("q2", "3"), Problem("p", "0")]


GOOD = {"problem": "p", "answer": "1"}


@pytest.mark.parametrize(
  "row, said",
  [
    ('{"problem": "p", "answ', "not a complete JSON object.*cut off"),
    ({"problem": "p"}, "`answer` is None"),
    ({"problem": "p", "answer": ""}, "`answer` is ''"),
    ({"problem": "p", "answer": "  "}, "`answer` is '  '"),
    ({"problem": "p", "answer": None}, "`answer` is None"),
    ({"problem": "p", "answer": True}, "`answer` is True"),
    ('{"problem": "p", "answer": NaN}', "`answer` is nan"),
    ({"problem": "p", "answer": []}, "empty list"),
    ({"problem": "p", "answer": ["1", ""]}, "`answer` is ''"),
    ({"answer": "1"}, "`problem` is None"),
    ({"problem": " ", "answer": "1"}, "`problem` is ' '"),
    ({"problem": 3, "answer": "1"}, "`problem` is 3"),
    ([1], "expected an object"),
  ],
)
def test_a_bad_row_names_file_and_line(tmp_path, row, said):
  path = write(tmp_path / "bad.jsonl", GOOD, "", row, GOOD)
  with pytest.raises(ValueError, match=f"bad.jsonl, line 3: .*{said}"):
    load_problems([path])


@pytest.mark.parametrize(
  "row, said",
  [
    ('{"problem": "p\\ud83d", "answer": "1"}', "`problem` is no valid Unicode"),
    ('{"problem": "p", "answer": ["1", "a\\ud83d"]}', "`answer` is no valid Unicode"),
    ('{"problem": "p", "answer": ' + "7" * 5000 + "}", "JSON that cannot be read .*digits.*long numbers as text"),
    ("[" * 100_000, "JSON that cannot be read .*recursion"),
  ],
  ids=["problem", "answer", "digits", "levels"],
)
def test_what_python_cannot_hold_names_file_and_line(tmp_path, row, said):
  path = write(tmp_path / "bad.jsonl", GOOD, row)
  with pytest.raises(ValueError, match=f"bad.jsonl, line 2: {said}"):
    load_problems([path])


def test_a_whole_number_may_be_longer_than_any_float(tmp_path):
  path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": [10**400, 1]})
  assert load_problems(path) == [Problem("p", (str(10**400), "1"))]


def test_parquet_that_is_no_unicode_names_file_and_row(tmp_path):
  texts = pyarrow.array([b"a", b"caf\xe9", b"c"]).view(pyarrow.string())
  pyarrow.parquet.write_table(pyarrow.table({"problem": texts, "answer": ["1", "2", "3"]}), tmp_path / "bad.parquet")
  with pytest.raises(ValueError, match=r"bad.parquet, row 2: not readable as text .*write the file again in UTF-8"):
    load_problems([str(tmp_path / "bad.parquet")])


def test_a_bad_parquet_row_names_file_and_row(tmp_path):
  pyarrow.parquet.write_table(pyarrow.table({"problem": ["a", "b"], "answer": ["1", None]}), tmp_path / "bad.parquet")
  with pytest.raises(ValueError, match=r"bad.parquet, row 2: `answer` is None"):
    load_problems([str(tmp_path / "bad.parquet")])


def test_files_that_cannot_be_read_at_all(tmp_path):
  pyarrow.parquet.write_table(pyarrow.table({"problem": ["a"], "solution": ["1"]}), tmp_path / "other.parquet")
  (tmp_path / "cut.parquet").write_bytes((tmp_path / "other.parquet").read_bytes()[:40])
  (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "caf\xe9", "answer": "1"}')
  (tmp_path / "table.csv").write_text("problem,answer")
  (tmp_path / "empty.jsonl").write_text("\n\n")
  for name, said in {
    "none.jsonl": "does not exist",
    "other.parquet": "no column answer; its columns are problem, solution",
    "cut.parquet": "not a readable parquet",
    "latin.jsonl": "line 1: not a complete JSON",
    "table.csv": "not a known format",
    "empty.jsonl": "holds no problem",
  }.items():
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
      load_problems([str(tmp_path / name)])
  with pytest.raises(ValueError, match="no file given"):
    load_problems([])


def test_each_epoch_is_a_new_permutation_of_the_seed():
  stream = PromptStream(50, seed=3)
  uids = stream.take(150)
  assert uids.dtype == np.int64 and uids.tolist() == list(range(150))
  epochs = stream.indices(uids).reshape(3, 50)
  for epoch in epochs:
    assert sorted(epoch.tolist()) == list(range(50))
  assert not (epochs[0] == epochs[1]).all() and not (epochs[1] == epochs[2]).all()
  assert (PromptStream(50, seed=3).indices(uids) == epochs.ravel()).all()
  assert (PromptStream(50, seed=4).indices(uids) != epochs.ravel()).any()


def test_one_take_spans_epochs_without_a_gap():
  whole = PromptStream(10, seed=0)
  rows = whole.indices(whole.take(40))
  parts = PromptStream(10, seed=0)
  pieces = [parts.indices(parts.take(n)) for n in (7, 25, 0, 8)]
  assert np.concatenate(pieces).tolist() == rows.tolist()


@pytest.mark.parametrize("saved_at", [59, 60, 61, 120])
def test_resume_around_an_epoch_boundary(saved_at):
  per_step, steps_per_epoch = 2, 60
  uninterrupted = PromptStream(per_step * steps_per_epoch, seed=11)
  batches = [uninterrupted.take(per_step) for _ in range(130)]
  rows = [uninterrupted.indices(batch).tolist() for batch in batches]

  before = PromptStream(per_step * steps_per_epoch, seed=11)
  for _ in range(saved_at):
    before.take(per_step)
  after = PromptStream(per_step * steps_per_epoch, seed=11)
  after.position = before.position
  for step in range(saved_at, 130):
    uids = after.take(per_step)
    assert uids.tolist() == batches[step].tolist()
    assert after.indices(uids).tolist() == rows[step]


def test_index_does_not_depend_on_the_position_or_on_what_was_asked_before():
  stream = PromptStream(6, seed=1)
  forwards = [stream.index(uid) for uid in range(60)]
  backwards = [stream.index(uid) for uid in reversed(range(60))]
  assert forwards == backwards[::-1] and stream.position == 0


def test_a_stream_refuses_nonsense():
  for size, seed in [(0, 0), (3, -1)]:
    with pytest.raises(ValueError, match="size >= 1 and seed >= 0"):
      PromptStream(size, seed)
  with pytest.raises(ValueError, match="negative"):
    PromptStream(3, 0).index(-1)
  with pytest.raises(ValueError, match="at least 0"):
    PromptStream(3, 0).take(-1)


PROMPTS = [[1] * n for n in (7, 8, 9, 20)]


def test_long_prompts_are_dropped_whole_and_counted():
  kept, dropped = filter_long(PROMPTS, 8)
  assert kept.tolist() == [0, 1] and dropped == 2
  kept, dropped = filter_long(PROMPTS, 20, "error")
  assert kept.tolist() == [0, 1, 2, 3] and dropped == 0


def test_long_prompts_can_be_an_error_and_so_is_an_empty_rest():
  with pytest.raises(ValueError, match="2 of 4 prompts are longer than 8 tokens, the first is prompt 2 with 9"):
    filter_long(PROMPTS, 8, "error")
  with pytest.raises(ValueError, match="all 4 are longer than 6 tokens, the shortest has 7"):
    filter_long(PROMPTS, 6)
  with pytest.raises(ValueError, match="no prompt is left"):
    filter_long([], 6)
  with pytest.raises(ValueError, match="unknown policy 'cut'"):
    filter_long(PROMPTS, 8, "cut")
