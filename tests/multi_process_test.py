"""Real processes on one machine, with the command a user gives: they compute what one process does, and none outlives another."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import types

import chex
import jax
import numpy as np
import pytest

from emapg_jax.checkpoint import Checkpointer, HostState, restore_policy
from emapg_jax.config import RunConfig
from emapg_jax.envs.embedded import AddTask
from emapg_jax.rollout import sampler
from experiments import warmup
from experiments.build import build, new_state

pytestmark = pytest.mark.multi_process

TINY = RunConfig(
  task="tests.multi_process_test:make",
  dtype="float32",
  steps=3,
  prompts_per_step=4,
  group_size=4,
  max_prompt_tokens=8,
  max_new_tokens=8,
  mini_batches=2,
  learning_rate=1e-3,
  kl_topk=4,
  kl_coef=0.05,
  ema_decay=0.7,
  ema_period=1,
  hidden_size=16,
  num_heads=2,
  num_layers=1,
  warmup_steps=2,
  warmup_accuracy=0.0,
  eval_every=1,
  eval_problems=9,
  save_every=1,
  keep_last=2,
  samples_logged=9,
)
# What several processes must decide alike: batches to sample again, which checkpoint is the best; and an anchor on the hosts.
ALIKE = {"warmup_steps": 0, "init_anchor": True, "dynamic_sampling": True, "max_refills": 3, "anchor_memory": "pinned_host"}
ALIKE |= {"keep_best": 1, "best_metric": "eval_sampled"}
TIMES = ("seconds_", "tokens_per_second")
HEARTBEAT = 6  # seconds
FAILING, FLAWED = "TEST_FAILING_PROCESS", "a flaw in the reward"
HELD, BLOCK = "TEST_HELD", "a block of decoding"


class Even(AddTask):
  """Whether a response begins with an even digit, so that those of any model differ, but not of each group; counts what it has scored."""

  scored = 0

  def score(self, problem, response):
    if os.environ.get(FAILING) == str(jax.process_index()):
      raise ZeroDivisionError(FLAWED)
    self.scored += 1
    return float(response[:1] in tuple("02468"))

  def metrics(self):
    scored, self.scored = self.scored, 0
    return {"scored": scored}


def make():
  """For --task; where TEST_HELD is the folder of a run, its third step waits in the rollouts until a file `go` is there."""
  folder, step = os.environ.get(HELD), sampler._Work.step

  def held_step(work):
    metrics = pathlib.Path(folder, "metrics.jsonl")
    if metrics.exists() and len(metrics.read_text().splitlines()) == 3:
      print(BLOCK, flush=True)
      while not metrics.with_name("go").exists():
        time.sleep(0.02)
    return step(work)

  if folder:
    sampler._Work.step = held_step
  return Even(1)


class Processes:
  """A run as `count` processes with `devices` each; what they print goes to a file each."""

  def __init__(self, config, workdir, count=1, devices=1, environment=None):
    config = dataclasses.replace(config, workdir=str(workdir))
    given = [f"--{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config) if _is_changed(config, field)]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | (environment or {})
    with socket.socket() as free:
      free.bind(("localhost", 0))
      address = f"localhost:{free.getsockname()[1]}"
    launches = [[f"--coordinator={address}", f"--num_processes={count}", f"--process_id={i}"] for i in range(count)]
    self.workdir, self.printed, self.processes = workdir, [], []
    for i, launch in enumerate(launches):
      self.printed.append(workdir.parent / f"{workdir.name}.{count}.{i}.txt")
      launch = [*launch, f"--heartbeat_timeout={HEARTBEAT}"] if count > 1 else []
      with self.printed[-1].open("w") as out:
        line = [sys.executable, "-m", "experiments.math_grpo", *given, *launch]
        self.processes.append(subprocess.Popen(line, env=env, stdout=out, stderr=subprocess.STDOUT))

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()

  def output(self, i):
    return self.printed[i].read_text()

  def codes(self, seconds=120):
    """The exit codes once all have ended."""
    deadline = time.monotonic() + seconds
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

  def wait_for(self, condition):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and all(process.poll() is None for process in self.processes):
      if condition():
        return
      time.sleep(0.05)
    raise AssertionError(f"it did not come to that: {self.output(0)}")

  def wait_for_step(self, step):
    path = self.workdir / "metrics.jsonl"
    self.wait_for(lambda: path.exists() and len(path.read_text().splitlines()) > step)


def _is_changed(config, field):
  return field.name != "override" and getattr(config, field.name) not in (None, field.default)


def completed(*args, **named):
  with Processes(*args, **named) as run:
    assert run.codes() == [0] * len(run.processes), run.output(0) + run.output(len(run.processes) - 1)
    assert "RuntimeWarning" not in "".join(map(run.output, range(len(run.processes))))


def lines(workdir, name="metrics.jsonl"):
  rows = [json.loads(line) for line in (workdir / name).read_text().splitlines()]
  return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def here():
  """The same model in this process, on all its devices."""
  return build(dataclasses.replace(TINY, mesh="data:1,tensor:1,fsdp:-1"))


def state_at(workdir, step):
  """A checkpoint, read by this process."""
  abstract = here().abstract_state
  with Checkpointer(str(workdir / "checkpoints"), 9) as checkpointer:
    assert checkpointer.latest_step() == step
    state, host = checkpointer.restore_latest(abstract)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}, host


@pytest.fixture(scope="module")
def other(tmp_path_factory):
  """Another run, of one process, whose checkpoint is of its model after a warm-up, with an anchor of its own."""
  workdir = tmp_path_factory.mktemp("other")
  run = here()
  state = warmup.warm_up(run, new_state(run), types.SimpleNamespace(agreed=lambda: False))
  with Checkpointer(str(workdir / "checkpoints"), 1) as checkpointer:
    checkpointer.save(5, state.replace(ema_params=jax.tree.map(lambda x: 0.9 * x, state.params)), HostState())
  return workdir


def begun_from(other, **changes):
  return dataclasses.replace(TINY, **{"mesh": "data:1,fsdp:2", "init_from": str(other)} | ALIKE | changes)


@pytest.fixture(scope="module")
def alone(other, tmp_path_factory):
  """One process with two devices."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  completed(begun_from(other), workdir, devices=2)
  return workdir


def checkpoints(workdir):
  return {path.name for path in (workdir / "checkpoints").iterdir()}


def test_two_processes_compute_what_one_does_bit_for_bit(other, alone, tmp_path):
  """Each samples its own share."""
  workdir = tmp_path / "run"
  completed(begun_from(other), workdir, count=2)
  assert lines(workdir) == lines(alone)
  assert lines(workdir, "samples.jsonl") == lines(alone, "samples.jsonl")
  sampled = [row["groups_sampled"] for row in lines(workdir)[1:]]
  assert [row["scored"] for row in lines(workdir)[1:]] == [4 * groups for groups in sampled]
  assert max(sampled) > 4, "some groups have one score, and others are sampled for them"
  assert all(row["eval_scored"] == 18 for row in lines(workdir))
  found, host = state_at(workdir, 3)
  expected, expected_host = state_at(alone, 3)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  assert dataclasses.replace(host, flags={}) == dataclasses.replace(expected_host, flags={})
  assert checkpoints(workdir) == checkpoints(alone) > {"2", "3"}, "the best one is neither of the newest two"
  assert not any(name.startswith("process") for name in os.listdir(workdir))


def test_a_team_leaves_its_rollouts_together_and_four_processes_go_on(other, alone, tmp_path):
  """Two that sample together, of which one is asked to end in the third step; then two and two of them, each with a part of the model."""
  workdir = tmp_path / "run"
  config = begun_from(other, rollout_mesh="tensor:2", decode_block=1, save_every=9)
  with Processes(config, workdir, count=2, environment={HELD: str(workdir)}) as run:
    run.wait_for(lambda: BLOCK in run.output(1))
    run.processes[1].send_signal(signal.SIGTERM)
    (workdir / "go").touch()
    assert run.codes() == [0, 0], run.output(0) + run.output(1)
    assert "stopped at step 2 of 3" in run.output(0)
    assert [run.output(i).count(BLOCK) for i in range(2)] == [2, 2], "the one it heard in, and the next"
  completed(begun_from(other, mesh="data:2,fsdp:2", rollout_mesh="data:2,tensor:2"), workdir, count=4)
  told = (tmp_path / "run.4.0.txt").read_text()
  assert "resumed at step 2" in told
  assert "rollouts: 8 slots, 2 prompts prefilled at a time in each of 2 teams of processes, blocks" in told
  for found, expected in zip(lines(workdir), lines(alone), strict=True):
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
  assert lines(workdir, "samples.jsonl") == lines(alone, "samples.jsonl")
  expected, _ = state_at(alone, 3)
  for name, value in state_at(workdir, 3)[0].items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


QUICK = dataclasses.replace(
  TINY, steps=100_000, warmup_steps=0, eval_every=0, eval_problems=2048, save_every=0, keep_initial="off", mesh="data:1,fsdp:2"
)


@pytest.mark.parametrize(("gone", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)])
def test_none_waits_for_one_that_is_gone(gone, number, tmp_path):
  """Killed, its connections break; frozen, only its heartbeat is missing."""
  with Processes(QUICK, tmp_path / "run", count=2) as run:
    run.wait_for_step(0)
    run.processes[gone].send_signal(number)
    began = time.monotonic()
    assert run.processes[1 - gone].wait(60) != 0
    assert time.monotonic() - began < HEARTBEAT + 4
  # Python has the last word where the connection breaks, JAX where nothing is heard.
  told = ("process can't be reached any more", r"process \d of 2 has failed", "the JAX distributed service detected fatal errors")
  assert re.search("|".join(told), run.output(1 - gone)), run.output(1 - gone)


def test_after_the_same_warm_up_as_in_one_process_an_error_in_the_task_of_one_is_told_by_all(other, tmp_path):
  config = dataclasses.replace(QUICK, warmup_steps=TINY.warmup_steps, keep_initial="on")
  with Processes(config, tmp_path / "run", count=2, environment={FAILING: "1"}) as run:
    assert run.codes() == [1, 1]
  assert FLAWED in run.output(1)
  assert "error in process 0 of 2: Process 1 failed, and so the run stops everywhere: TaskError: " in run.output(0)
  policy = here().abstract_state.policy
  with Checkpointer(str(tmp_path / "run" / "initial"), 1) as initial:
    found, _ = initial.restore_latest(policy)
  expected, _, _ = restore_policy(str(other), policy)
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
