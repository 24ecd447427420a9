"""`--profile_steps`: what it accepts, and the traces it leaves behind."""

import contextlib
import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from experiments import profiling


def run_steps(steps, profiler, raise_in=None, error=KeyboardInterrupt):
  """RL steps as the loop does them, each a matmul."""
  for step in steps:
    with profiler.step(step):
      jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
      if step == raise_in:
        raise error


def traced(folder):
  """Step numbers annotated in each trace of a folder, in the JSON; and the names of the files beside them."""
  found = []
  for path in sorted(folder.rglob("*.trace.json.gz")):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == "rl_step")
    (proto,) = path.parent.glob("*.xplane.pb")  # what xprof reads
    assert b"rl_step" in proto.read_bytes()
    found.append(steps)
  return found


@pytest.mark.parametrize("text, expected", [("", []), ("3", [3]), ("3-5", [3, 4, 5]), ("1-1", [1]), ("07-10", [7, 8, 9, 10])])
def test_steps_are_read(text, expected):
  assert list(profiling.parse_steps(text, 10)) == expected


@pytest.mark.parametrize(
  "text, message",
  [
    *((text, "is not a range of RL steps: write first-last") for text in ("x", "3-", "-3", "3-5-7", "3,5", " 3", "3.0", "٣", "3\n")),
    ("0", "begins before the first RL step"),
    ("0-2", "begins before the first RL step"),
    ("5-3", "ends before it begins: write the smaller number first, 3-5"),
    ("9-11", "goes beyond the last RL step, --steps=10"),
    ("11", "goes beyond the last RL step, --steps=10"),
  ],
)
def test_nonsense_is_refused(text, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    profiling.parse_steps(text, 10)
  with pytest.raises(ValueError, match=f"--profile_steps={text}"):
    profiling.Profiler(text, 10, tmp_path)


def test_the_steps_asked_for_are_traced_and_no_other(tmp_path, capsys):
  folder = tmp_path / "run" / "profile"
  with profiling.Profiler("2-3", 4, folder) as profiler:
    run_steps([1], profiler)
    assert not folder.exists()
    run_steps([2, 3], profiler)
    assert traced(folder) == [[2, 3]]  # at the end of the last one, not of the run
    said = capsys.readouterr().out
    run_steps([4], profiler)
  assert traced(folder) == [[2, 3]]
  assert "RL steps 2 to 3" in said and f"xprof --logdir={folder}" in said and "pip install xprof" in said
  assert capsys.readouterr().out == ""


def test_a_resumed_run_is_traced_from_its_first_step(tmp_path, capsys):
  with profiling.Profiler("2-4", 9, tmp_path) as profiler:
    run_steps([4, 5], profiler)
  assert traced(tmp_path) == [[4]] and "RL step 4 written" in capsys.readouterr().out
  # Beyond the range there is nothing to trace, which is said.
  with profiling.Profiler("2-4", 9, tmp_path) as profiler:
    run_steps([5, 6], profiler)
  assert traced(tmp_path) == [[4]] and "did no RL step of --profile_steps=2-4" in capsys.readouterr().out


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_run_that_ends_within_the_range_leaves_its_trace(error, tmp_path, capsys):
  with pytest.raises(error) if error else contextlib.nullcontext(), profiling.Profiler("1-5", 9, tmp_path) as profiler:
    run_steps([1, 2], profiler, raise_in=2 if error else None, error=error)
  assert traced(tmp_path) == [[1, 2]] and "RL steps 1 to 2" in capsys.readouterr().out
  # The tracer is free again.
  with profiling.Profiler("1", 9, tmp_path / "next") as profiler:
    run_steps([1], profiler)
  assert traced(tmp_path / "next") == [[1]]


def test_without_the_flag_nothing_happens(tmp_path, capsys):
  with profiling.Profiler("", 2, tmp_path / "profile") as profiler:
    run_steps([1, 2], profiler)
  assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_a_folder_that_cannot_be_written_is_known_before_the_step(tmp_path):
  (tmp_path / "profile").write_text("a file")
  done = []
  with pytest.raises(FileExistsError), profiling.Profiler("1", 2, tmp_path / "profile") as profiler, profiler.step(1):
    done.append(1)
  assert not done
