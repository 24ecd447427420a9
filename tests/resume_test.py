"""A run that goes on from any of its checkpoints, or was asked to stop, ends as one that nobody disturbed, bit for bit. In process."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from emapg_jax.checkpoint import Checkpointer, CheckpointError
from experiments import loop, rl_step, stopping, warmup
from experiments.build import build, new_state
from tests.checkpoint_test import full_disk
from tests.crash_test import CONFIG, PROBLEMS
from tests.outcome import outcome, step_without_training

STEPS, PER_EPOCH = 7, 3
# Each mini-batch is accumulated from two micro-batches; the learning rate still rises at every step, counted in updates.
ACCUMULATED = dataclasses.replace(
  CONFIG,
  **{"steps": STEPS, "group_size": 4, "micro_batch": 1, "save_every": 1, "keep_last": 10, "keep_best": 0, "samples_logged": 32},
  **{"lr_warmup_steps": 20, "param_dtype": "bfloat16", "learning_rate": 0.03},
)


@pytest.fixture(scope="module")
def built():
  return build(ACCUMULATED)


@pytest.fixture(scope="module")
def whole(built, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole")
  loop.train(built, workdir)
  return workdir, outcome(workdir, built.abstract_state)


def with_config(built, **changes):
  return dataclasses.replace(built, config=dataclasses.replace(built.config, **changes))


@pytest.mark.crash
@pytest.mark.parametrize("saved", [PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1])
def test_goes_on_around_the_end_of_an_epoch(built, whole, tmp_path, saved):
  workdir, undisturbed = whole
  assert PER_EPOCH * ACCUMULATED.prompts_per_step == PROBLEMS
  shutil.copytree(workdir, tmp_path / "run")
  for step in range(saved + 1, STEPS + 1):
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
  with Checkpointer(str(tmp_path / "run" / "checkpoints"), 10) as checkpointer:
    state, host = checkpointer.restore_latest(built.abstract_state)
  assert host.position == saved * ACCUMULATED.prompts_per_step
  counts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state) if "count" in jax.tree_util.keystr(path)]
  assert counts and all(int(count) == saved * 2 for count in counts)  # updates, of which each took two micro-batches
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
  moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
  assert {leaf.dtype for leaf in moments + jax.tree.leaves(state.ema_params)} == {jnp.dtype("float32")}
  loop.train(built, tmp_path / "run")
  assert outcome(tmp_path / "run", built.abstract_state).differences(undisturbed) == []


@pytest.mark.crash
def test_what_is_compared_moves_and_a_complete_run_says_so(built, whole, monkeypatch, capsys):
  workdir, undisturbed = whole
  rates, kls = ([line[name] for line in undisturbed.metrics[1:]] for name in ("learning_rate", "kl"))
  assert all(later > earlier for earlier, later in itertools.pairwise(rates))
  assert kls[-1] > 1e-3  # the anchor is another model than the policy
  monkeypatch.setattr(loop, "plot_curves", lambda *_: send(signal.SIGINT))  # it is saved, and nothing is left to stop
  loop.train(built, workdir)
  said = capsys.readouterr().out
  assert f"the run is complete: checkpoint {STEPS}" in said and "stopping" not in said
  assert outcome(workdir, built.abstract_state).differences(undisturbed) == []


def send(number):
  os.kill(os.getpid(), number)


@pytest.mark.crash
@pytest.mark.parametrize(
  ("number", "code", "part", "saved"),
  [(signal.SIGTERM, 0, "sample_groups", 3), (signal.SIGTERM, 0, "score_batch", 4), (signal.SIGINT, 130, "sample_groups", 3)],
)
def test_a_signal_in_step_four_saves_what_is_whole(built, whole, tmp_path, monkeypatch, capsys, number, code, part, saved):
  """In rollouts the step is given up, behind them it is finished; either way nothing that is done is lost, though no save is due."""
  owner = rl_step if part == "score_batch" else rl_step.rollouts
  function, calls = getattr(owner, part), itertools.count(1)

  def watched(*args):
    if next(calls) == 4:
      send(number)
    return function(*args)

  monkeypatch.setattr(owner, part, watched)
  handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  with pytest.raises(SystemExit) as ended:
    loop.train(with_config(built, save_every=6), tmp_path)
  assert ended.value.code == code
  assert f"stopped at step {saved} of {STEPS}; saved to {tmp_path}/checkpoints/{saved}" in capsys.readouterr().out
  assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
  loop.train(with_config(built, save_every=6), tmp_path)
  found, expected = outcome(tmp_path, built.abstract_state), whole[1]
  assert found.differences(expected) == ["checkpoints"]
  assert found.checkpoints == sorted(["0", "6", "7", str(saved)])


def test_a_second_signal_ends_at_once():
  def at_once(*_):
    raise InterruptedError

  before = signal.signal(signal.SIGTERM, at_once)
  try:
    with stopping.StopRequest() as stop:
      assert not stop.asked
      send(signal.SIGTERM)
      assert stop.asked and stop.exit_code == 0
      with pytest.raises(InterruptedError):
        send(signal.SIGTERM)
    with stopping.StopRequest() as stop:
      send(signal.SIGINT)
      assert stop.exit_code == 130
      with pytest.raises(InterruptedError):
        send(signal.SIGTERM)
      with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
  finally:
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_still_being_imported_ends_without_a_word(number):
  line = [sys.executable, "-X", "importtime", "-m", "experiments.math_grpo"]
  with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
    assert any("jax._src.config" in words for words in process.stderr)
    process.send_signal(number)
    assert [words for words in process.stderr if not words.startswith("import time:")] == []
  assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_warm_up_that_is_stopped_does_not_end_as_if_it_were_saved(monkeypatch, number):
  monkeypatch.setattr(warmup, "_update", lambda params, opt_state, batch, **_: (params, opt_state, jnp.zeros(())))
  run = build(dataclasses.replace(CONFIG, task="add", digits=1, warmup_steps=5, warmup_batch=16))
  with pytest.raises(SystemExit) as ended:
    warmup.warm_up(run, new_state(run), types.SimpleNamespace(agreed=lambda: True, signal=number))
  assert ended.value.code == 128 + number


@pytest.mark.crash
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(tmp_path, monkeypatch):
  def last_step_on_a_full_disk(*args):
    if args[-1] == 2:
      disk.enter_context(full_disk(20_000))
    return step_without_training(*args)

  monkeypatch.setattr(loop, "rl_step", last_step_on_a_full_disk)
  run = build(dataclasses.replace(CONFIG, steps=2, save_every=1, eval_every=0, keep_best=0, keep_last=1))
  with (
    contextlib.ExitStack() as disk,
    pytest.raises(CheckpointError, match=r"Checkpoint [12] could not be written .*Checkpoint [01] is whole"),
  ):
    loop.train(run, tmp_path)
  monkeypatch.setattr(loop, "rl_step", step_without_training)
  loop.train(run, tmp_path)
  found = outcome(tmp_path, run.abstract_state)
  assert [line["step"] for line in found.metrics] == [0, 1, 2]
  assert found.checkpoints == ["2"]
