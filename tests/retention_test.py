"""Which checkpoints stay: the newest, and beside them those of the best evaluations."""

import dataclasses

import jax.numpy as jnp
import pytest

from emapg_jax.checkpoint import Checkpointer, CheckpointError, HostState
from experiments import build as building
from experiments import loop, rollouts
from experiments.build import build
from tests.checkpoint_test import full_disk
from tests.crash_test import CONFIG
from tests.outcome import lines, step_without_training

STATE = {"x": jnp.arange(4.0)}


def host(value):
  return HostState(evaluation={} if value is None else {"eval_greedy": value, "eval_sampled": 1 - value})


def kept(directory, values, first=0, last=1, best=1, metric="eval_greedy"):
  """The steps that stay when each was evaluated with one of `values`, None where it was not."""
  with Checkpointer(str(directory), last, best, metric) as checkpointer:
    for step, value in enumerate(values, first):
      checkpointer.save(step, STATE, host(value))
  return sorted(int(path.name) for path in directory.iterdir())


@pytest.mark.parametrize(
  ("values", "last", "best", "stay"),
  [
    ((0.1, 0.9, 0.5, 0.4, 0.3), 1, 1, [1, 4]),
    ((0.1, 0.9, 0.5, 0.4, 0.3), 2, 2, [1, 2, 3, 4]),
    ((0.1, 0.9, 0.9, 0.4, 0.3), 1, 1, [1, 4]),  # of equals the earlier
    ((0.1, 0.2, 0.3), 1, 1, [2]),  # one checkpoint can be both
    ((None, 0.2, None, None), 1, 2, [1, 3]),  # without an evaluation none is best, however few there are
    ((None, None, None), 2, 1, [1, 2]),
    ((0.9, 0.2, 0.3), 2, 0, [1, 2]),
  ],
)
def test_the_best_stay_beside_the_newest(tmp_path, values, last, best, stay):
  assert kept(tmp_path, values, last=last, best=best) == stay


def test_the_best_survive_a_resume_and_another_metric_has_its_own_best(tmp_path):
  assert kept(tmp_path, (0.1, 0.9, 0.5)) == [1, 2]
  assert kept(tmp_path, (0.6, 0.7), first=3) == [1, 4]
  with Checkpointer(str(tmp_path), 1, 1, "eval_greedy") as checkpointer:
    assert [checkpointer.is_best({"eval_greedy": x}) for x in (0.8, 0.9, 0.91)] == [False, False, True]
    assert not checkpointer.is_best({}) and not checkpointer.is_best({"eval_sampled": 1.0})
  assert kept(tmp_path, (0.8,), first=5, metric="eval_sampled") == [4, 5]  # 0.3 of step 4 is above 0.1 of step 1


def test_without_keep_best_nothing_is_best(tmp_path):
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    assert not checkpointer.is_best({"eval_greedy": 1.0})


def test_a_best_checkpoint_that_can_not_be_read_is_no_reason_to_stop(tmp_path):
  kept(tmp_path, (0.9, 0.5))
  (tmp_path / "0" / "host" / "metadata").write_text("{")
  assert kept(tmp_path, (0.6,), first=2) == [2]


def test_a_failed_write_takes_no_good_checkpoint_with_it(tmp_path):
  big = {"x": jnp.arange(2.0**18)}
  with Checkpointer(str(tmp_path), 1, 1, "eval_greedy") as checkpointer:
    checkpointer.save(1, big, host(0.9))
    checkpointer.save(2, big, host(0.1))
    checkpointer.wait()
    with full_disk(10_000), pytest.raises(CheckpointError, match="Checkpoint 2 is whole"):
      checkpointer.save(3, big, host(1.0))
      checkpointer.wait()
  with Checkpointer(str(tmp_path), 1, 1, "eval_greedy") as checkpointer:
    assert checkpointer.latest_step() == 2
  assert kept(tmp_path, (0.2,), first=4) == [1, 4]


def test_keep_best_needs_something_to_evaluate_on(monkeypatch):
  monkeypatch.setattr(building, "eval_problems", lambda *_: [])
  with pytest.raises(ValueError, match=r"--keep_best=1 has no effect: there are no problems to evaluate on"):
    build(CONFIG)


@pytest.mark.crash
def test_a_run_saves_its_best_evaluation_between_checkpoints(tmp_path, monkeypatch):
  """The best of steps 0 to 8 is step 5, when no checkpoint is due; it stays to the end, over a resume."""
  found = {0: 0.1, 1: 0.3, 2: 0.2, 3: 0.3, 4: 0.1, 5: 0.7, 6: 0.6, 7: 0.7, 8: 0.5}
  monkeypatch.setattr(loop, "rl_step", step_without_training)
  monkeypatch.setattr(rollouts, "evaluate", lambda run, params, step: ({"eval_greedy": found[step]}, []))
  built = build(dataclasses.replace(CONFIG, steps=8, save_every=4, keep_last=1, keep_best=1))
  saved, save = [], Checkpointer.save

  def watched(self, step, *args):
    saved.append(step)
    save(self, step, *args)

  monkeypatch.setattr(Checkpointer, "save", watched)
  loop.train(dataclasses.replace(built, config=dataclasses.replace(built.config, steps=6)), tmp_path)
  # Step 3 equals step 1 and is none; 6 is the end. The first is that of the initial model.
  assert saved == [0, 0, 1, 4, 5, 6]
  assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["5", "6"]
  loop.train(built, tmp_path)
  assert saved[6:] == [8]
  assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["5", "8"]
  assert [line["eval_greedy"] for line in lines(tmp_path / "metrics.jsonl")] == list(found.values())
