"""Metrics: typed reduction, files that survive a crash and a resume, and a progress line for terminals and for logs."""

import fcntl
import io
import json
import math
import os
import pty
import shutil
import struct
import termios
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from emapg_jax import metrics
from emapg_jax.metrics import MetricsWriter, Progress
from emapg_jax.types import Max, Weighted


def weighted(total, weight):
  return Weighted(jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))


def read(path):
  # Line by line on "\n" alone, with a parser that refuses NaN as JSON does.
  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().decode().split("\n")[:-1]]


def events(folder):
  """(step, name, value) of every scalar and (step, "purge", None) of every session start, in the order of writing."""
  found = []
  for path in sorted(folder.iterdir(), key=lambda path: path.name.rsplit(".", 1)[-1]):
    data = path.read_bytes()
    while data:
      header, (length,) = data[:8], struct.unpack("<Q", data[:8])
      assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(header)
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      if event.HasField("session_log"):
        found.append((event.step, "purge", None))
      found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
      data = data[16 + length :]
  return found


def test_reduce_divides_sums_and_passes_maxima():
  # kl: 3 / 4. A name that ends in _max is still a mean when its type says so.
  values = {"kl": weighted(3.0, 4.0), "ratio_max": weighted(6.0, 2.0), "ratio": Max(jnp.float32(5.0))}
  assert metrics.reduce(values) == {"kl": 0.75, "ratio_max": 3.0, "ratio": 5.0}
  assert all(type(value) is float for value in metrics.reduce(values).values())


def test_reduce_leaves_out_what_saw_nothing():
  values = {"empty": weighted(0.0, 0.0), "no_max": Max(jnp.float32(-jnp.inf)), "zero": weighted(0.0, 2.0), "bad": weighted(jnp.nan, 1.0)}
  reduced = metrics.reduce(values)
  assert reduced.keys() == {"zero", "bad"}
  assert reduced["zero"] == 0.0
  assert math.isnan(reduced["bad"])


def test_reduce_refuses_a_bare_number():
  with pytest.raises(ValueError, match=r"'loss' is a .*only Weighted and Max"):
    metrics.reduce({"loss": jnp.float32(1.0)})


def test_lines_are_on_disk_at_once_and_valid_json(tmp_path):
  with MetricsWriter(str(tmp_path / "run")) as writer:
    writer.write(1, {"loss": np.float32(0.5), "kl": math.nan, "grad_norm": jnp.float32(jnp.inf), "count": 3})
    assert read(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 0.5, "kl": None, "grad_norm": None, "count": 3}]
  writer.close()
  assert events(tmp_path / "run" / "tensorboard") == [(1, "loss", 0.5), (1, "count", 3.0)]


def test_samples_keep_any_text_on_one_line(tmp_path):
  # A line feed, a line separator, a letter beyond ASCII, a lone surrogate.
  samples = [{"prompt": "a\nb", "completion": "\u2028é\ud800", "rewards": np.array([1.0, np.nan])}, {"prompt": "c", "answer": None}]
  with MetricsWriter(str(tmp_path)) as writer:
    writer.write_samples(5, samples)
  first = {"step": 5, "prompt": "a\nb", "completion": "\u2028é\ud800", "rewards": [1.0, None]}
  assert read(tmp_path / "samples.jsonl") == [first, {"step": 5, "prompt": "c", "answer": None}]


def test_resume_cuts_later_lines_and_half_a_line(tmp_path):
  writer = MetricsWriter(str(tmp_path))
  for step in range(6):
    writer.write(step, {"loss": float(step)})
    writer.write_samples(step, [{"prompt": "x"}, {"prompt": "y"}])
  writer.close()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 6, "lo')

  writer = MetricsWriter(str(tmp_path))
  assert writer.truncate_after(3) == {"metrics.jsonl": 3, "samples.jsonl": 4}  # steps 4, 5 and half of 6; two samples of 4 and of 5
  assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
  assert [line["step"] for line in read(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2, 3, 3]
  writer.write(4, {"loss": -4.0})
  writer.close()
  assert read(tmp_path / "metrics.jsonl")[-2:] == [{"step": 3, "loss": 3.0}, {"step": 4, "loss": -4.0}]
  # TensorBoard drops what it has read at steps >= 4 when it meets the session start.
  assert events(tmp_path / "tensorboard")[-3:] == [(5, "loss", 5.0), (4, "purge", None), (4, "loss", -4.0)]
  assert len(events(tmp_path / "tensorboard")) == 8

  writer = MetricsWriter(str(tmp_path))
  assert writer.truncate_after(4) == {"metrics.jsonl": 0, "samples.jsonl": 0}
  assert writer.truncate_after(-1) == {"metrics.jsonl": 5, "samples.jsonl": 8}
  assert read(tmp_path / "metrics.jsonl") == []


def test_a_last_line_without_its_end_is_cut_even_if_it_parses(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": 1}')
  assert MetricsWriter(str(tmp_path)).truncate_after(5) == {"metrics.jsonl": 1, "samples.jsonl": 0}
  assert read(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_new_line_is_not_glued_to_half_a_line(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n{"step": 10, "lo')
  writer = MetricsWriter(str(tmp_path))
  writer.write(10, {"loss": 1.0})
  writer.close()
  assert read(tmp_path / "metrics.jsonl") == [{"step": 9}, {"step": 10, "loss": 1.0}]


def test_progress_in_a_log_prints_whole_lines_now_and_then():
  file = io.StringIO()
  progress = Progress(100, initial=20, log_every=0.05, file=file)
  for step in range(21, 31):
    progress.update(step, {"reward": 0.5, "kl": 0.001234567})
  time.sleep(0.06)
  progress.update(31, {"reward": 0.625, "kl": 0.5})
  progress.update(32, {"reward": 0.75, "kl": 0.5})
  progress.close()
  progress.close()
  lines = file.getvalue().splitlines()
  assert "\r" not in file.getvalue() and file.getvalue().endswith("\n")
  assert [line.split(" [")[0] for line in lines] == ["step 20/100 20%", "step 31/100 31%", "step 32/100 32%"]
  assert "step/s" in lines[1] and lines[1].endswith("reward=0.625 kl=0.5")
  # 11 steps took at least 0.06 s, so the 69 that are left take at least 0.37 s: the steps before the resume are no part of the rate.
  rate = float(lines[1].split(", ")[1].removesuffix("step/s]"))
  assert rate <= 11 / 0.06


def test_progress_on_a_terminal_is_one_line_and_without_a_size_falls_back_to_lines():
  for size, in_place in (((40, 100), True), ((0, 0), False)):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with os.fdopen(slave, "w") as file:
      progress = Progress(4, file=file)
      progress.update(4, {"reward": 0.5})
      progress.close()
      text = os.read(master, 10_000).decode()
    os.close(master)
    lines = [line for line in text.split("\r\n") if line]  # the terminal turns \n into \r\n
    assert len(lines) == (1 if in_place else 2)
    assert ("\r" in lines[0]) == in_place
    assert "4/4" in lines[-1] and "reward=0.5" in lines[-1]


def test_progress_does_not_repeat_its_last_line():
  file = io.StringIO()
  progress = Progress(1, log_every=0.0, file=file)
  progress.update(1, {})
  progress.close()
  assert [line.split(" [")[0] for line in file.getvalue().splitlines()] == ["step 0/1 0%", "step 1/1 100%"]


def test_a_dead_events_thread_is_an_error_and_no_hang(tmp_path):
  """On a full disk tensorboardX's thread ends; nobody reads its queue any more."""
  writer = metrics.MetricsWriter(str(tmp_path))
  writer.write(1, {"loss": 1.0})
  writer._events.file_writer.event_writer._worker.stop()
  with pytest.raises(OSError, match="TensorBoard events can't be written"):
    for step in range(2, 100):
      writer.write(step, {f"m{i}": 1.0 for i in range(20)})
  writer.close()


def test_workdir_that_can_not_be_made(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match=r"The folder of the run, .*file/run, can't be made .*--workdir"):
    metrics.MetricsWriter(str(tmp_path / "file" / "run"))


def test_a_folder_that_goes_away_is_an_error(tmp_path):
  with metrics.MetricsWriter(str(tmp_path / "run")) as writer:
    writer.write(0, {"x": 1.0})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match=r"metrics.jsonl is gone: something has removed the folder"):
      writer.write(1, {"x": 1.0})
