"""A run that starts from another one's weights: its policy bit for bit, its anchor if asked for, all else fresh; on any mesh."""

import dataclasses
import itertools
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest

from emapg_jax import stored_tree
from emapg_jax.checkpoint import Checkpointer, HostState, restore_policy
from experiments import loop, resume
from experiments.build import build, new_state
from tests.crash_test import CONFIG
from tests.outcome import step_without_training

SHORT = dataclasses.replace(CONFIG, steps=2, save_every=1, eval_every=0, keep_best=0, keep_last=5)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
  """A run with checkpoints 1 and 2, of which all arrays differ, and the states in them."""
  workdir = tmp_path_factory.mktemp("other")
  fresh, states = jax.device_get(new_state(build(SHORT))), {}
  with Checkpointer(str(workdir / "checkpoints"), 5) as checkpointer:
    for step in (1, 2):
      noise = itertools.count(step)
      states[step] = jax.tree.map(lambda x: (x + next(noise)).astype(x.dtype), fresh)  # noqa: B023
      checkpointer.save(step, jax.tree.map(jnp.asarray, states[step]), HostState())
  return workdir, states


def begun(tmp_path, **changes):
  """The state in which a run begins."""
  run = build(dataclasses.replace(SHORT, **changes))
  return run, resume._from_another_run(run)


def assert_fresh(run, state):
  assert int(state.step) == 0
  chex.assert_trees_all_equal(state.opt_state, new_state(run).opt_state)
  assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(lambda a: a.sharding, run.abstract_state)


@pytest.mark.parametrize("mesh", ["data:-1", "data:2,fsdp:2,tensor:2"])
def test_policy_only(other, tmp_path, mesh):
  workdir, states = other
  run, state = begun(tmp_path, init_from=str(workdir), mesh=mesh)
  chex.assert_trees_all_equal(jax.device_get(state.params), states[2].params)
  chex.assert_trees_all_equal(jax.device_get(state.ema_params), states[2].params)
  assert_fresh(run, state)


def test_a_given_checkpoint_with_its_anchor(other, tmp_path):
  workdir, states = other
  run, state = begun(tmp_path, init_from=str(workdir / "checkpoints" / "1"), init_anchor=True)
  chex.assert_trees_all_equal(jax.device_get((state.params, state.ema_params)), (states[1].params, states[1].ema_params))
  assert_fresh(run, state)


def test_a_critic_is_not_taken_and_not_missed(other, tmp_path):
  workdir, states = other
  run, state = begun(tmp_path, init_from=str(workdir), algorithm="ppo")
  chex.assert_trees_all_equal(jax.device_get(state.policy), states[2].params)
  assert_fresh(run, state)
  with Checkpointer(str(tmp_path / "with_critic" / "checkpoints"), 1) as checkpointer:
    checkpointer.save(3, state, HostState())
  _, again = begun(tmp_path, init_from=str(tmp_path / "with_critic"), init_anchor=True)
  chex.assert_trees_all_equal(jax.device_get((again.params, again.ema_params)), (states[2].params, states[2].params))


def test_a_run_from_another_one_keeps_its_start_as_the_initial_model_and_resumes_by_itself(other, tmp_path, capsys, monkeypatch):
  workdir, states = other
  monkeypatch.setattr(loop, "rl_step", step_without_training)
  config = dataclasses.replace(SHORT, init_from=str(workdir), steps=1)
  run = build(config)
  loop.train(run, tmp_path)
  assert f"starts from the policy of {workdir} at its step 2" in capsys.readouterr().out
  with Checkpointer(str(tmp_path / "initial"), 1) as saved:
    chex.assert_trees_all_equal(jax.device_get(saved.restore_latest(run.abstract_state.policy)[0]), states[2].params)
  monkeypatch.setattr(resume, "restore_policy", lambda *_: pytest.fail("its own checkpoint is there"))
  loop.train(dataclasses.replace(run, config=dataclasses.replace(config, steps=2)), tmp_path)
  assert "resumed at step 1" in capsys.readouterr().out


def test_the_other_run_may_be_read_only(other, tmp_path):
  workdir, _ = other
  before = sorted((str(path), path.stat().st_mtime_ns) for path in pathlib.Path(workdir).rglob("*"))
  begun(tmp_path, init_from=str(workdir))
  assert sorted((str(path), path.stat().st_mtime_ns) for path in pathlib.Path(workdir).rglob("*")) == before


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    (
      {"hidden_size": 32},
      r"Checkpoint 2 in \S+ does not fit .*params/embed/embedding: checkpoint float32\[16, 16\], run float32\[16, 32\].*--model_path",
    ),
    ({"num_layers": 2}, r"params/layers/attn/k/kernel: checkpoint float32\[1, .*run float32\[2, "),
  ],
)
def test_another_architecture_is_refused_by_its_leaves(other, tmp_path, changes, text):
  with pytest.raises(ValueError, match=text):
    begun(tmp_path, init_from=str(other[0]), **changes)


def test_no_checkpoint_no_anchor_and_a_part_of_a_run(other, tmp_path):
  abstract = build(SHORT).abstract_state
  with pytest.raises(
    ValueError, match=rf"no checkpoint to start from in {tmp_path}/nowhere, which does not exist: give --init_from the folder of a run"
  ):
    restore_policy(str(tmp_path / "nowhere"), abstract.policy)
  with Checkpointer(str(tmp_path / "run" / "checkpoints"), 1) as checkpointer:
    checkpointer.save(3, new_state(build(SHORT)).replace(ema_params=None), HostState())
  with pytest.raises(ValueError, match=r"Checkpoint 3 in \S+ has no anchor to start from: leave out --init_anchor"):
    restore_policy(str(tmp_path / "run"), abstract.policy, abstract.ema_params)
  with Checkpointer(str(tmp_path / "initial"), 1) as checkpointer:
    checkpointer.save(0, new_state(build(SHORT)).policy, HostState())
  with pytest.raises(ValueError, match=r"Checkpoint 0 in \S+ does not hold the state of a run, but embed, "):
    restore_policy(str(tmp_path / "initial" / "0"), abstract.policy)


def test_a_damaged_one_of_a_run_that_is_left_alone(other, tmp_path, monkeypatch):
  """What helps there is never to move that run's files away, as it is in one's own."""
  policy = build(SHORT).abstract_state.policy
  shutil.copytree(other[0], tmp_path / "run")
  run, folder = str(tmp_path / "run"), tmp_path / "run" / "checkpoints"

  def refused(path, cause, remedy):
    with pytest.raises(ValueError, match=rf"^Checkpoint 2 in {folder} is damaged \({cause}\)\. {remedy}\.$"):
      restore_policy(path, policy)

  name = next(iter(stored_tree.leaves({"params": policy})))
  other_one = rf"Start from another checkpoint of that run, as by --init_from={folder}/1, or copy this one again"
  sums = stored_tree.checksums
  with monkeypatch.context() as patch:
    patch.setattr(stored_tree, "checksums", lambda tree: sums(tree) | {name: 0})
    refused(run, f"not what was written: {name}", other_one)
  path = folder / "2" / "host" / "metadata"
  written = path.read_text()
  path.write_text(written.replace('"position": ', '"position": 1'))
  refused(run, "host/metadata is not what was written", other_one)
  path.write_text(written.replace("array_sums", "checksums"))
  with pytest.raises(ValueError, match=r"^Checkpoint 2 in \S+ was written by another version: .* Start from a run of this version\.$"):
    restore_policy(run, policy)
  (folder / "2" / "state" / "manifest.ocdbt").unlink()
  refused(run, "state/manifest.ocdbt is missing", other_one)
  path.unlink()
  refused(str(folder / "2"), "host/metadata is missing", other_one)
  restore_policy(run, policy)  # of what is whole, the newest
  (folder / "1" / "host" / "metadata").unlink()
  no_other = "That run has no other: copy it again, if this is a copy, or start from another run"
  refused(str(folder / "2"), "host/metadata is missing", no_other)
  with pytest.raises(ValueError, match=rf"in {run} \(of what is there, [12] lacks host/metadata\): give --init_from the folder of a run"):
    restore_policy(run, policy)
