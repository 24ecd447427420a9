"""Every `--algorithm` on one embedded task, run after run, as a table of scores.

  python -m experiments.algorithm_table [--algorithms=grpo,ppo] [--seeds=3] [--recipe=FLAGFILE] [--out=FOLDER] [-- FLAGS]

What follows `--` goes to every run, as in `-- --ema_decay=1`. Each run has its own folder in FOLDER, and the table is FOLDER/table.md.
FOLDER must hold no earlier table; one that was interrupted can't be continued.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import absl.flags
import numpy as np
from absl import app

from emapg_jax.config import RunConfig
from emapg_jax.presets import ALGORITHMS
from experiments import flags, report

LAST = 8  # RL steps that a final score is the mean of
FIRST = 4
# What an algorithm needs beside the recipe: the critic begins to learn with the first RL step, and has as many as the policy.
OWN_FLAGS = {"ppo": ("--critic_learning_rate=1e-3",)}


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the table."""

  algorithms: tuple[str, ...] = flags.field(tuple(ALGORITHMS), "Values of --algorithm, one row each.")
  seeds: int = flags.field(3, "Seeds 0, 1, … of each.")
  recipe: str = flags.field("experiments/flags/one_digit.flags", "Flagfile of the task and all that the algorithms share.")
  out: str = flags.field("runs/algorithm_table", "Folder for the runs and the table.")

  def __post_init__(self):
    unknown = [name for name in self.algorithms if name not in ALGORITHMS]
    if unknown:
      raise ValueError(f"--algorithms names {', '.join(unknown)}, which is unknown. Use some of {', '.join(ALGORITHMS)}.")
    if self.seeds < 1:
      raise ValueError(f"--seeds is {self.seeds}; at least one run of each algorithm is needed. Pass 1 or more.")
    if any((pathlib.Path(self.out) / f"{name}-{seed}").exists() for name in self.algorithms for seed in range(self.seeds)):
      raise ValueError(f"--out={self.out} holds runs of an earlier table: choose another folder, or remove it.")
    if not pathlib.Path(self.recipe).is_file():
      raise ValueError(f"--recipe={self.recipe} is not there: give a flagfile, such as experiments/flags/one_digit.flags.")


def _arguments(config: Config, algorithm: str, extra: Sequence[str]) -> list[str]:
  return [f"--flagfile={config.recipe}", f"--algorithm={algorithm}", *OWN_FLAGS.get(algorithm, ()), *extra]


def check(config: Config, extra: Sequence[str]) -> None:
  """Raises ValueError when a run of the table would be refused, before the first one starts."""
  reserved = [flag for flag in extra if flag.lstrip("-").partition("=")[0] in ("algorithm", "seed", "workdir")]
  if reserved:
    raise ValueError(
      f"{', '.join(reserved)}: the algorithm, the seed and the folder of a run are set by the table. Leave them out after --."
    )
  for algorithm in config.algorithms:
    values = absl.flags.FlagValues()
    flags.define(RunConfig, values)
    try:
      values(["math_grpo", *_arguments(config, algorithm, extra)])
      run = flags.read(RunConfig, values)
    except (ValueError, absl.flags.Error) as error:
      raise ValueError(f"--algorithm={algorithm}: {error}") from error
    if run.steps < FIRST + LAST:
      raise ValueError(
        f"--steps={run.steps} is too short for the scores of the first {FIRST} and the last {LAST} steps: use {FIRST + LAST}."
      )


def run_one(config: Config, algorithm: str, seed: int, extra: Sequence[str]) -> dict[str, float]:
  """Trains in a process of its own; the scores at the start and at the end, and the seconds."""
  workdir, began = pathlib.Path(config.out) / f"{algorithm}-{seed}", time.time()
  arguments = [*_arguments(config, algorithm, extra), f"--seed={seed}", f"--workdir={workdir}"]
  done = subprocess.run([sys.executable, "-m", "experiments.math_grpo", *arguments], capture_output=True, text=True)
  if done.returncode:
    raise ValueError(f"The run of {algorithm} with seed {seed} failed: {done.stderr.strip()[-500:]}")
  with open(workdir / "metrics.jsonl", encoding="utf-8") as file:
    lines = [line for line in map(json.loads, file) if "score_mean" in line]
  scores = np.asarray([line["score_mean"] for line in lines])
  return {
    "steps": len(lines),
    "first": float(scores[:FIRST].mean()),
    "last": float(scores[-LAST:].mean()),
    "entropy": lines[-1]["entropy"],
    "seconds": time.time() - began,
  }


def table(results: dict[str, list[dict[str, float]]]) -> str:
  """One row per algorithm: scores of each seed, and their mean."""
  head = f"| algorithm | steps | score, first {FIRST} steps | score, last {LAST} steps, each seed | mean | entropy at the end |"
  lines = [head, "|" + "---|" * 6]
  for algorithm, runs in results.items():
    mean = {name: np.mean([run[name] for run in runs]) for name in runs[0]}
    each = " ".join(f"{run['last']:.3f}" for run in runs)
    numbers = f"{mean['first']:.3f} | {each} | {mean['last']:.3f} | {mean['entropy']:.2f}"
    lines.append(f"| {algorithm} | {mean['steps']:.0f} | {numbers} |")
  return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
  """Runs all, writes the table after each algorithm."""
  try:
    config = flags.read(Config)
    check(config, argv[1:])
    results = {}
    for algorithm in config.algorithms:
      results[algorithm] = []
      for seed in range(config.seeds):
        results[algorithm].append(run_one(config, algorithm, seed, argv[1:]))
        report.say(f"{algorithm}, seed {seed}: " + ", ".join(f"{k} {v:.4g}" for k, v in results[algorithm][-1].items()))
      (pathlib.Path(config.out) / "table.md").write_text(table(results), encoding="utf-8")
    report.say(table(results))
  except (ValueError, OSError) as error:
    report.fail(error)


if __name__ == "__main__":
  flags.define(Config)
  app.run(main)
