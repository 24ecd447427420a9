"""Real processes on one machine, with the command a user gives: they compute what one process does, and none outlives another."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from emapg_jax.checkpoint import Checkpointer
from emapg_jax.config import RunConfig
from emapg_jax.envs.embedded import AddTask
from experiments.build import build

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
  keep_last=9,
  samples_logged=9,
)
TIMES = ("seconds_", "tokens_per_second")
HEARTBEAT = 6  # seconds
FAILING, FLAWED = "TEST_FAILING_PROCESS", "a flaw in the reward"


class Even(AddTask):
  """Each even digit of a response is worth the same, so that responses of any model differ; counts what it has scored."""

  scored = 0

  def score(self, problem, response):
    if os.environ.get(FAILING) == str(jax.process_index()):
      raise ZeroDivisionError(FLAWED)
    self.scored += 1
    return sum(symbol in "02468" for symbol in response.split()) / 8

  def metrics(self):
    scored, self.scored = self.scored, 0
    return {"scored": scored}


def make():
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

  def wait_for_step(self, step):
    path, deadline = self.workdir / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and all(process.poll() is None for process in self.processes):
      if path.exists() and len(path.read_text().splitlines()) > step:
        return
      time.sleep(0.05)
    raise AssertionError(f"no step {step}: {self.output(0)}")


def _is_changed(config, field):
  return field.name != "override" and getattr(config, field.name) not in (None, field.default)


def completed(*args, **named):
  with Processes(*args, **named) as run:
    assert run.codes() == [0] * len(run.processes), run.output(0) + run.output(len(run.processes) - 1)
    assert "RuntimeWarning" not in "".join(map(run.output, range(len(run.processes))))


def lines(workdir, name="metrics.jsonl"):
  rows = [json.loads(line) for line in (workdir / name).read_text().splitlines()]
  return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def state_at(workdir, step):
  """A checkpoint, read by this process."""
  abstract = build(dataclasses.replace(TINY, mesh="data:1,tensor:1,fsdp:-1", task="add", digits=1)).abstract_state
  with Checkpointer(str(workdir / "checkpoints"), 9) as checkpointer:
    assert checkpointer.latest_step() == step
    state, host = checkpointer.restore_latest(abstract)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}, host


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """One process with two devices."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  completed(dataclasses.replace(TINY, mesh="data:1,fsdp:2"), workdir, devices=2)
  return workdir


@pytest.fixture(scope="module")
def together(tmp_path_factory):
  """Two processes with a device each, that end after step 2."""
  workdir = tmp_path_factory.mktemp("together") / "run"
  completed(dataclasses.replace(TINY, steps=2, mesh="data:1,fsdp:2"), workdir, count=2)
  return workdir


def test_two_processes_compute_what_one_does_bit_for_bit(alone, together, tmp_path):
  assert lines(together) == lines(alone)[:3]
  assert lines(together, "samples.jsonl") == [row for row in lines(alone, "samples.jsonl") if row["step"] <= 2]
  assert [row["scored"] for row in lines(together)[1:]] == [16, 16]
  assert all(row["eval_scored"] == 18 for row in lines(together))
  assert all(row["reward_std"] > 0 for row in lines(together)[1:])
  found, host = state_at(together, 2)
  shutil.copytree(alone / "checkpoints" / "2", tmp_path / "checkpoints" / "2")
  expected, expected_host = state_at(tmp_path, 2)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  assert dataclasses.replace(host, flags={}) == dataclasses.replace(expected_host, flags={})
  assert not any(name.startswith("process") for name in os.listdir(together))


def test_four_processes_go_on_where_two_stopped(alone, together, tmp_path):
  """Two and two of them sample together, each with a part of the model."""
  workdir = tmp_path / "run"
  shutil.copytree(together, workdir)
  completed(dataclasses.replace(TINY, mesh="data:2,fsdp:2", rollout_mesh="data:2,tensor:2"), workdir, count=4)
  assert "resumed at step 2" in (tmp_path / "run.4.0.txt").read_text()
  for found, expected in zip(lines(workdir), lines(alone), strict=True):
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
  assert lines(workdir, "samples.jsonl") == lines(alone, "samples.jsonl")
  expected, _ = state_at(alone, 3)
  for name, value in state_at(workdir, 3)[0].items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


QUICK = dataclasses.replace(
  TINY, steps=100_000, warmup_steps=0, eval_every=0, eval_problems=2048, save_every=0, keep_last=2, keep_initial="off", mesh="data:1,fsdp:2"
)


def test_one_that_is_asked_to_stop_stops_all(tmp_path):
  with Processes(QUICK, tmp_path / "run", count=2) as run:
    run.wait_for_step(2)
    run.processes[1].send_signal(signal.SIGINT)
    assert run.codes() == [130, 130], run.output(0) + run.output(1)
  saved = lines(tmp_path / "run")[-1]["step"]
  assert (tmp_path / "run" / "checkpoints" / str(saved)).is_dir()
  assert f"stopped at step {saved}" in run.output(0)
  assert "stopped at step" not in run.output(1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_none_waits_for_one_that_is_gone(number, tmp_path):
  """Killed, its connections break; frozen, only its heartbeat is missing."""
  with Processes(QUICK, tmp_path / "run", count=2) as run:
    run.wait_for_step(0)
    run.processes[1].send_signal(number)
    began = time.monotonic()
    assert run.processes[0].wait(60) != 0
    assert time.monotonic() - began < HEARTBEAT + 4
  # Python has the last word where the connection breaks, JAX where nothing is heard.
  told = ("process can't be reached any more", "process 0 of 2 has failed", "the JAX distributed service detected fatal errors")
  assert re.search("|".join(told), run.output(0)), run.output(0)


def test_an_error_in_the_task_of_one_is_told_by_all(tmp_path):
  with Processes(QUICK, tmp_path / "run", count=2, environment={FAILING: "1"}) as run:
    assert run.codes() == [1, 1]
  assert FLAWED in run.output(1)
  assert "error in process 0 of 2: Process 1 failed, and so the run stops everywhere: TaskError: " in run.output(0)


def test_prompts_that_can_not_be_shared_out(tmp_path):
  with Processes(dataclasses.replace(QUICK, prompts_per_step=5, mini_batches=1), tmp_path / "run", count=2) as run:
    assert run.codes() == [1, 1]
  for i in range(2):
    assert f"error in process {i} of 2: --prompts_per_step=5 can't be shared out over 2 processes" in run.output(i)
    assert "Traceback" not in run.output(i)
