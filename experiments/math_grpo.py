"""GRPO with an EMA anchor and top-k KL on problems whose answers can be checked.

python -m experiments.math_grpo                                        the quickstart: embedded task, no download
python -m experiments.math_grpo --flagfile=experiments/flags/X.flags   a recipe; later flags override it
python -m experiments.math_grpo --distributed ...                      on every worker of a TPU pod slice, or as every task of SLURM
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  # Until a run can save, Ctrl-C has nothing to wait for: an exception would be shown by one import, and swallowed by another.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import time

import jax
from absl import app

from emapg_jax import distributed
from emapg_jax.checkpoint import CheckpointError
from emapg_jax.envs.grading_pool import GradingError
from experiments import flags, loop, profiling, report, resume
from experiments.build import build
from experiments.launch import Launch

flags.define()
flags.define(Launch)


def _effective(config):
  """The config with `auto` and empty values replaced by what they mean here."""
  dtype = config.dtype if config.dtype != "auto" else ("float32" if jax.default_backend() == "cpu" else "bfloat16")
  name = config.task.replace(":", ".")
  workdir = config.workdir or f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
  expand = os.path.expanduser  # a shell leaves the ~ of --workdir=~/x alone
  return dataclasses.replace(
    config,
    dtype=dtype,
    workdir=expand(workdir),
    model_path=expand(config.model_path),
    init_from=expand(config.init_from),
    train_data=tuple(map(expand, config.train_data)),
    eval_data=tuple(map(expand, config.eval_data)),
  )


def _first_evaluation(workdir: pathlib.Path) -> dict[str, float]:
  with open(workdir / "metrics.jsonl", encoding="utf-8") as lines:
    return next((row for row in map(json.loads, lines) if "eval_sampled" in row), {})


def main(argv: list[str]) -> None:
  """Checks, builds, trains, sums up."""
  began = time.time()
  try:
    if len(argv) > 1:
      raise ValueError(f"{argv[1]!r} is not a flag: write --name=value.")
    config, launch = flags.read(), flags.read(Launch)
    profiling.parse_steps(config.profile_steps, config.steps)
    launch.connect(config.workdir)
    resume.require_alike(flags.as_strings(config))  # before anything that they do together
    config = _effective(config)
    workdir = pathlib.Path(config.workdir)
    run = build(config)
    report.header(run, workdir)
    with contextlib.closing(run.task) if hasattr(run.task, "close") else contextlib.nullcontext():
      last = loop.train(run, workdir)
    if distributed.is_first():
      report.summary(_first_evaluation(workdir), last, workdir, time.time() - began)
  except (ValueError, OSError, CheckpointError, GradingError, distributed.OtherProcessError) as error:
    report.fail(error)


def run_main() -> None:
  """Entry point: without any flag, the quickstart."""
  if len(sys.argv) == 1:
    sys.argv.append(f"--flagfile={flags.QUICKSTART}")
  for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="replace")  # a terminal that lacks a sign is no reason to stop
  try:
    with distributed.ended_by_an_error():
      app.run(main)
  except KeyboardInterrupt:
    raise SystemExit(130) from None


if __name__ == "__main__":
  run_main()
