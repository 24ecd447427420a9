"""Metrics: from sums on the devices to numbers, files and a progress line."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from emapg_jax.types import Max, Weighted


def reduce(metrics: Mapping[str, Weighted | Max]) -> dict[str, float]:
  """One number per metric, fetched in one transfer: sum / weight of a `Weighted`, the value of a `Max`.

  A metric that saw nothing (weight 0, or a maximum of -inf) is absent: a 0 in its place would be read as a measurement.

  Raises:
    ValueError: a metric is of neither type, so that how it adds up over micro-batches is not known.
  """
  for name, metric in metrics.items():
    if not isinstance(metric, Weighted | Max):
      raise ValueError(
        f"Metric {name!r} is a {type(metric).__name__}, but only Weighted and Max add up over micro-batches. Use one of them."
      )
  numbers = {}
  for name, metric in jax.device_get(dict(metrics)).items():
    if isinstance(metric, Max):
      if float(metric.value) != -math.inf:
        numbers[name] = float(metric.value)
    elif float(metric.weight) != 0.0:
      numbers[name] = float(metric.sum) / float(metric.weight)
  return numbers


_EVENT_QUEUE = 10_000  # more than a step has: a write must not wait for a thread that may have died


class MetricsWriter:
  """Appends to `metrics.jsonl`, `samples.jsonl` and TensorBoard events (`tensorboard/`) in a workdir.

  A line is on disk when its write returns; TensorBoard's events follow within seconds, from a thread, and at `close`. Without a workdir,
  as in all but one of several processes, nothing is written, and nothing has been.
  """

  def __init__(self, workdir: str | None):
    self._writes = workdir is not None
    self._paths = {name: os.path.join(workdir, name) for name in ("metrics.jsonl", "samples.jsonl")} if self._writes else {}
    self._events_dir = os.path.join(workdir or "", "tensorboard")
    self._files: dict[str, TextIO] = {}
    self._events: SummaryWriter | None = None
    self._purge_step: int | None = None
    if not self._writes:
      return
    try:
      os.makedirs(workdir, exist_ok=True)
    except OSError as error:
      raise OSError(f"The folder of the run, {workdir}, can't be made ({error.strerror}): choose another --workdir.") from error

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def truncate_after(self, step: int) -> dict[str, int]:
    """Removes what an interrupted run wrote after `step`; returns how many lines left each file.

    A line that is not whole, as a crash leaves it, counts among them. TensorBoard hides the events after `step`.
    """
    self.close()
    self._purge_step = step + 1
    return {name: _cut(path, step) for name, path in self._paths.items()}

  def last_step(self) -> int:
    """The last step in metrics.jsonl, -1 when there is none."""
    if not self._writes:
      return -1
    try:
      with open(self._paths["metrics.jsonl"], "rb") as lines:
        return max((step for line in lines if (step := _step_of(line)) is not None), default=-1)
    except FileNotFoundError:
      return -1

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Appends one line, `step` and then `values`; NaN and infinities become null, TensorBoard gets the finite numbers."""
    if not self._writes:
      return
    line = _jsonable(values)
    self._append("metrics.jsonl", [{"step": step, **line}])
    if not os.path.exists(self._paths["metrics.jsonl"]):
      raise OSError(f"{self._paths['metrics.jsonl']} is gone: something has removed the folder of this run while it was writing there.")
    if self._events is None:
      # Names have a resolution of one second, and a name that exists is overwritten.
      suffix = f".{time.time_ns()}"
      self._events = SummaryWriter(
        self._events_dir, purge_step=self._purge_step, flush_secs=10, filename_suffix=suffix, max_queue=_EVENT_QUEUE
      )
    self._require_events_thread()
    for name, value in line.items():
      if isinstance(value, int | float):
        self._events.add_scalar(name, value, step)

  def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
    """Appends one line per sample (prompt, completion, reward ...) to `samples.jsonl`, each with its `step`."""
    if not self._writes:
      return
    self._append("samples.jsonl", [{"step": step, **_jsonable(sample)} for sample in samples])

  def close(self) -> None:
    """Closes the files; a later write opens them again."""
    for file in self._files.values():
      file.close()
    self._files.clear()
    if self._events is not None:
      if self._events_thread_lives():
        self._events.close()
      self._events = None

  def _events_thread_lives(self) -> bool:
    return self._events.file_writer.event_writer._worker.is_alive()

  def _require_events_thread(self) -> None:
    # A write that fails ends tensorboardX's thread without a word, and a later one would wait for ever for room in its queue.
    if not self._events_thread_lives():
      self._events.file_writer.event_writer._event_queue.cancel_join_thread()
      raise OSError(
        f"TensorBoard events can't be written to {self._events_dir}: look at the free space and the permissions there, then run the same "
        "command again."
      )

  def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    if name not in self._files:
      _cut(self._paths[name], None)  # a line appended to half a line would make both unreadable
      # A lone surrogate can't be encoded; backslashreplace writes it as the escape that JSON has for it.
      self._files[name] = open(self._paths[name], "a", encoding="utf-8", errors="backslashreplace", newline="\n")  # noqa: SIM115
    file = self._files[name]
    file.write("".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines))
    file.flush()


def _cut(path: str, last_step: int | None) -> int:
  """Rewrites a JSONL file without unreadable lines and, unless None, without those after `last_step`; returns how many went."""
  if not os.path.exists(path):
    return 0
  with open(path, "rb") as file:
    lines = file.read().split(b"\n")
  # After the last newline stands either nothing or a line that a crash cut short, even if it happens to parse.
  kept = [line for line in lines[:-1] if (step := _step_of(line)) is not None and (last_step is None or step <= last_step)]
  removed = len(lines) - 1 - len(kept) + (lines[-1] != b"")
  if removed:
    with open(path + ".tmp", "wb") as file:
      file.writelines(line + b"\n" for line in kept)
    os.replace(path + ".tmp", path)
  return removed


def _step_of(line: bytes) -> int | None:
  try:
    record = json.loads(line)
  except ValueError:
    return None
  step = record.get("step") if isinstance(record, dict) else None
  return step if isinstance(step, int) else None


def _jsonable(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(key): _jsonable(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_jsonable(item) for item in value]
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    return _jsonable(np.asarray(value).tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value if isinstance(value, str | int | float | None) else str(value)


class _Lines(tqdm):
  """A tqdm for logs: each display is a line of its own, with nothing that moves the cursor."""

  def display(self, msg: str | None = None, pos: int | None = None) -> bool:
    if msg == "":
      return False
    self.fp.write(f"{self}\n")
    self.fp.flush()
    return True

  def close(self) -> None:
    if not self.disable and self.last_print_n < self.n:
      self.display()
    self.leave = False  # tqdm would show the last state a second time
    super().close()


class Progress:
  """One progress line with the time left: redrawn in place on a terminal, printed every `log_every` seconds in a log."""

  def __init__(self, total: int, initial: int = 0, log_every: float = 30.0, file: TextIO | None = None, shown: bool = True):
    """Args: total, the last step; initial, the step a resumed run starts from; log_every, seconds; file, standard error by default."""
    file = sys.stderr if file is None else file
    # In a terminal that reports no size (some containers and CI runners) tqdm would draw nothing at all.
    terminal = file.isatty() and all(os.get_terminal_size(file.fileno()))
    bar = tqdm if terminal else _Lines
    # miniters=1: the time alone decides when to show, and no monitor thread is needed.
    self._bar = bar(
      total=total,
      initial=initial,
      disable=not shown,
      file=file,
      unit="step",
      miniters=1,
      mininterval=0.1 if terminal else log_every,
      dynamic_ncols=terminal,
      bar_format=None if terminal else "step {n_fmt}/{total_fmt} {percentage:.0f}% [{elapsed}<{remaining}, {rate_fmt}]{postfix}",
    )

  def update(self, step: int, numbers: Mapping[str, float]) -> None:
    """Shows that `step` steps are done, with a few numbers."""
    self._bar.set_postfix_str(" ".join(f"{name}={value:.4g}" for name, value in numbers.items()), refresh=False)
    self._bar.update(step - self._bar.n)

  def close(self) -> None:
    """Shows the last state and ends the line."""
    self._bar.close()
