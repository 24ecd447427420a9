"""kill -9 at random moments: whatever is killed when, the run ends as the one that nobody disturbed, bit for bit.

As a program it kills as often as asked and prints a table:

  python -m tests.crash_test --kills=20 [--seed=0]

A child process runs the training program and ends itself by SIGKILL at a moment drawn in advance: some time after its start, after a
rollout, a save or a line of metrics began or ended. The same command is then started again. Children are forked from a process that has
imported everything, so that a kill takes a second or two.
"""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time

import pytest

from emapg_jax.checkpoint import Checkpointer
from emapg_jax.checkpoint_files import TMP_SUFFIX
from emapg_jax.config import RunConfig
from emapg_jax.envs.embedded import AddTask
from emapg_jax.metrics import MetricsWriter
from emapg_jax.rollout.sampler import Sampler
from experiments import flags, math_grpo
from experiments.build import build
from tests.outcome import outcome

PROBLEMS = 24  # 3 steps per epoch
STEPS, SAVE_EVERY = 10, 2
CONFIG = RunConfig(
  **{"task": "tests.crash_test:task", "dtype": "float32", "steps": STEPS, "prompts_per_step": 8, "group_size": 2, "max_prompt_tokens": 8},
  **{"max_new_tokens": 8, "decode_block": 2, "mini_batches": 2, "learning_rate": 1e-3, "kl_topk": 4, "kl_coef": 0.05, "ema_decay": 0.7},
  **{"ema_period": 2, "hidden_size": 16, "num_heads": 2, "num_layers": 1, "eval_every": 1, "eval_problems": 4, "samples_logged": 16},
  **{"save_every": SAVE_EVERY, "keep_last": 2, "keep_best": 1, "lr_warmup_steps": 10, "lr_unit": "update", "remat": "none"},
)
MOMENTS = {  # method whose call is waited for: seconds after it, at most
  "start": (None, 1.0),
  "rollout": (Sampler.generate, 0.05),
  "save": (Checkpointer.save, 0.2),
  "line": (MetricsWriter.write, 0.05),
  "epoch": (MetricsWriter.write, 0.0),
}


@dataclasses.dataclass(frozen=True)
class Kill:
  """When a run ends itself."""

  moment: str
  call: int = 1  # the first that counts
  delay: float = 0.0
  number: int = signal.SIGKILL


def drawn(rng: random.Random, moment: str | None = None) -> Kill:
  """A random moment; calls are few, so that it nearly always comes."""
  moment = moment or rng.choice(list(MOMENTS))
  return Kill(moment, rng.randint(1, 2 if moment == "save" else 4), rng.choice([0.0, rng.random()]) * MOMENTS[moment][1])


def _arm(kill: Kill, checkpoints: pathlib.Path) -> None:
  def die():
    os.kill(os.getpid(), kill.number)

  def later():
    while kill.moment == "save" and not any(checkpoints.glob(f"*{TMP_SUFFIX}")):
      time.sleep(0.0005)
    time.sleep(kill.delay)
    die()

  def wait():
    threading.Thread(target=later, daemon=True).start()

  method = MOMENTS[kill.moment][0]
  if method is None:
    return wait()
  calls = 0
  before = kill.moment in ("rollout", "save")  # it is hit at work; a line is to be written first

  def watched(self, *args, **kwargs):
    nonlocal calls
    found = None if before else method(self, *args, **kwargs)
    if kill.moment != "epoch" or (args[0] and args[0] * CONFIG.prompts_per_step % PROBLEMS == 0):
      calls += 1
      if calls == kill.call:
        wait() if before or kill.delay else die()
    return method(self, *args, **kwargs) if before else found

  owner = next(cls for cls in (Sampler, Checkpointer, MetricsWriter) if getattr(cls, method.__name__, None) is method)
  setattr(owner, method.__name__, watched)
  return None


class _Task(AddTask):
  """Few problems, and scores that differ without any training before."""

  def prompts(self):
    return super().prompts()[:PROBLEMS]

  def score(self, problem, response):
    return (len(response) + len(problem.prompt)) % 4 / 3


def task() -> AddTask:
  """For --task."""
  return _Task(1)


def _child(arguments: list[str], kill: Kill | None, log: str, cache: str) -> None:
  # One device and little optimisation: read when the first array is made.
  os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
  import jax

  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(out, 1), os.dup2(out, 2)
  if kill:
    _arm(kill, pathlib.Path(log).parent / "checkpoints")
  sys.argv = ["math_grpo", *arguments]
  math_grpo.run_main()


class Runs:
  """Starts runs, each in a process of its own, and compares what they end with."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._context = multiprocessing.get_context("forkserver")
    self._context.set_forkserver_preload(["experiments.math_grpo", "tests.outcome"])
    self._abstract_state = build(CONFIG).abstract_state
    self.undisturbed = self.end(folder / "undisturbed")

  def start(self, workdir: pathlib.Path, kill: Kill | None) -> int:
    """Its exit code: -9 when it was killed, 0 when it came to its end before that."""
    workdir.mkdir(exist_ok=True)
    flags.write(dataclasses.replace(CONFIG, workdir=str(workdir)), workdir / "given.txt")
    arguments = [f"--flagfile={workdir / 'given.txt'}", f"--workdir={workdir}"]
    args = (arguments, kill, str(workdir / "log.txt"), str(self.folder / "cache"))
    process = self._context.Process(target=_child, args=args)
    process.start()
    process.join(120)
    if process.exitcode not in (0, -signal.SIGKILL):
      process.kill()
      raise AssertionError(f"exit code {process.exitcode}: {(workdir / 'log.txt').read_text()}")
    return process.exitcode

  def end(self, workdir: pathlib.Path):
    """Lets it come to its end."""
    assert self.start(workdir, None) == 0
    return outcome(workdir, self._abstract_state)


def _steps(workdir: pathlib.Path) -> tuple[int, int]:
  """The last line of metrics that is whole, and the newest checkpoint; -1 for none."""
  path = workdir / "metrics.jsonl"
  written = [int(found) for found in re.findall(r'^{"step": (\d+).*}\n', path.read_text() if path.exists() else "", re.MULTILINE)]
  steps = [int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdecimal()]
  return max(written, default=-1), max(steps, default=-1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  return Runs(tmp_path_factory.mktemp("crash"))


KILLS = {
  "in_a_rollout": (Kill("rollout", 5, 0.005),),
  "in_a_save_and_at_once_again": (Kill("save", 3), Kill("start", delay=0.4)),
  "behind_the_line_of_an_epochs_last_step_twice": (Kill("epoch", 1), Kill("epoch", 2)),
}


@pytest.mark.crash
@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_ends_as_an_undisturbed_one(runs, name):
  workdir = runs.folder / name
  for kill in KILLS[name]:
    assert runs.start(workdir, kill) == -signal.SIGKILL
    line, checkpoint = _steps(workdir)
    assert line - checkpoint <= SAVE_EVERY
    assert kill.moment != "save" or list(workdir.glob(f"checkpoints/*{TMP_SUFFIX}"))
  assert runs.end(workdir).differences(runs.undisturbed) == []
  assert [row["step"] for row in runs.undisturbed.metrics] == list(range(STEPS + 1))


@pytest.mark.crash
def test_a_run_that_is_asked_to_end_saves_within_its_grace_and_says_so_by_its_exit_code(runs):
  workdir = runs.folder / "asked"
  assert runs.start(workdir, Kill("rollout", 5, 0.005, signal.SIGTERM)) == 0
  line, checkpoint = _steps(workdir)
  assert line == checkpoint < STEPS
  assert f"stopped at step {checkpoint} of {STEPS}; saved to" in (workdir / "log.txt").read_text()
  assert runs.end(workdir).differences(runs.undisturbed) in ([], ["checkpoints"])  # it may have been saved at a step of its own


def main() -> int:
  """Kills as often as asked; 1 when a run ended otherwise than the undisturbed one, or lost more than it may."""
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  rng, began, worst, failed = random.Random(args.seed), time.time(), 0, 0
  with tempfile.TemporaryDirectory() as folder:
    runs, counts = Runs(pathlib.Path(folder)), collections.Counter()
    print(f"undisturbed: {STEPS} steps in {time.time() - began:.1f} s\nrun kill moment   call delay  last line  checkpoint")
    kills, number = 0, 0
    while kills < args.kills:
      number += 1
      workdir, alive = runs.folder / f"run{number}", True
      while alive and kills < args.kills:
        kill = drawn(rng)
        alive = runs.start(workdir, kill) != 0
        if alive:
          kills += 1
          counts[kill.moment] += 1
          line, checkpoint = _steps(workdir)
          worst = max(worst, line - checkpoint)
          print(f"{number:3} {kills:4} {kill.moment:8} {kill.call:4} {kill.delay:5.3f} {line:10} {checkpoint:11}", flush=True)
      bad = runs.end(workdir).differences(runs.undisturbed)
      failed += bool(bad)
      print(
        f"{number:3}      end: " + (f"DIFFERS in {', '.join(bad[:8])}" if bad else "equal to the undisturbed run, bit for bit"), flush=True
      )
  print(f"{kills} kills ({dict(counts)}) in {number} runs, {time.time() - began:.0f} s; most steps lost {worst}; {failed} runs differ")
  return int(failed > 0 or worst > SAVE_EVERY)


if __name__ == "__main__":
  sys.exit(main())
