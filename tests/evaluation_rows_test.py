"""Evaluation over numbers of problems that devices don't divide: each problem once, in its order, and the mean over exactly these."""

import dataclasses

import jax
import numpy as np
import pytest

from emapg_jax import sharding
from experiments import build as building
from experiments import rollouts
from experiments.build import build, new_state
from experiments.prompts import Prompts
from tests.crash_test import CONFIG

pytestmark = pytest.mark.multi_device
COUNTS = (10, 8, 3)


def evaluated(devices, monkeypatch):
  """By number of problems: the metrics and the samples of an evaluation on so many devices."""
  make_mesh = sharding.make_mesh
  with monkeypatch.context() as patch:
    patch.setattr(building.sharding, "make_mesh", lambda spec: make_mesh(spec, jax.devices()[:devices]))
    run = build(dataclasses.replace(CONFIG, eval_problems=10))
  params, found = new_state(run).policy, {}
  for count in COUNTS:
    some = dataclasses.replace(run, eval=Prompts(run.eval.problems[:count], run.eval.tokens[:count], 0))
    found[count] = rollouts.evaluate(some, params, 1)
  return run.eval.problems, found


def test_every_row_counts_once_on_any_number_of_devices(monkeypatch):
  problems, one = evaluated(1, monkeypatch)
  assert len(problems) == 10
  for devices in (4, 8):
    _, many = evaluated(devices, monkeypatch)
    for count in COUNTS:
      (metrics, samples), (expected, expected_samples) = many[count], one[count]
      assert metrics == expected
      assert samples == expected_samples
      assert [row["prompt"] for row in samples] == [problem.prompt for problem in problems[:count]] * 2
      for kind in ("sampled", "greedy"):
        assert metrics[f"eval_{kind}"] == np.mean([row["score"] for row in samples if row["kind"] == kind])
