"""`--profile_steps`: a trace of some RL steps, for xprof."""

import contextlib
import pathlib
import re
from collections.abc import Iterator

import jax

from experiments import report


def parse_steps(text: str, steps: int) -> range:
  """The RL steps that `--profile_steps` asks for: `3-5` is 3, 4 and 5, `3` only that one, empty none.

  Args:
    text: the flag.
    steps: `--steps`, the last step of the run.

  Raises:
    ValueError: if it is neither, runs backwards, or leaves 1 to `steps`.
  """
  if not text:
    return range(0)
  match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
  if match is None:
    raise ValueError(f"--profile_steps={text} is not a range of RL steps: write first-last, as in 3-5, or one number.")
  first, last = int(match[1]), int(match[2] or match[1])
  if first < 1:
    raise ValueError(f"--profile_steps={text} begins before the first RL step, which is 1: write a range within 1-{steps}.")
  if last < first:
    raise ValueError(f"--profile_steps={text} ends before it begins: write the smaller number first, {last}-{first}.")
  if last > steps:
    raise ValueError(f"--profile_steps={text} goes beyond the last RL step, --steps={steps}: lower it, or raise --steps.")
  return range(first, last + 1)


class Profiler:
  """Traces the RL steps of `--profile_steps` into a folder; as a context it ends the trace however the run ends."""

  def __init__(self, profile_steps: str, steps: int, folder: pathlib.Path):
    """Checks the flag; nothing is written before the first step to trace.

    Args:
      profile_steps: the flag, as for `parse_steps`.
      steps: `--steps`.
      folder: where traces go, each into a new folder of its own below it.

    Raises:
      ValueError: as `parse_steps`.
    """
    self._steps, self._folder = parse_steps(profile_steps, steps), folder
    self._traced: list[int] = []
    self._running = False

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self._running:
      self._stop()
    elif self._steps and not self._traced:
      report.say(f"nothing to profile: this run did no RL step of --profile_steps={self._steps[0]}-{self._steps[-1]}")

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Everything inside belongs to RL step `step`. A run that is resumed within the range is traced from there on."""
    if step not in self._steps:
      yield
      return
    if not self._running:
      self._start()
    self._traced.append(step)
    with jax.profiler.StepTraceAnnotation("rl_step", step_num=step):
      yield
    if step == self._steps[-1]:
      self._stop()

  def _start(self) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)  # the tracer would find out only at its end that it cannot write
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each Python call would be an event, and the host's loops would crowd out the device
    jax.profiler.start_trace(self._folder, profiler_options=options)
    self._running = True

  def _stop(self) -> None:
    self._running = False  # before the call: a trace that cannot be written is not to be ended twice
    jax.profiler.stop_trace()
    first, last = self._traced[0], self._traced[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    report.say(f"profile of RL {steps} written to {self._folder}; to look at it: pip install xprof; xprof --logdir={self._folder}")
