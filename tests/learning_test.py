"""A short real run must learn: one-digit addition from noisy demonstrations, through the command line as a user runs it.

Seen to fail on each of: learning rate 0, advantages with the sign flipped, rewards rolled by one sample, log-probs shifted by one token.
It can't see padding trained on or an end token left out; train_step_test and batching_test do.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.learning

FLAGS = pathlib.Path(__file__).parent.parent / "experiments" / "flags" / "one_digit.flags"


def test_learns(tmp_path):
  env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device, optimised code
  done = subprocess.run(
    [sys.executable, "-m", "experiments.math_grpo", f"--flagfile={FLAGS}", f"--workdir={tmp_path}"],
    env=env,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
  scores = np.array([line["score_mean"] for line in lines])
  assert len(scores) == 40
  assert 0.3 <= scores[:4].mean() <= 0.55
  assert scores[-8:].mean() >= 0.8
  assert lines[-1]["entropy"] < 0.4
