"""Whole runs on a tiny model: what they leave behind, resume bit for bit, bad input, interruption. In process where that is enough."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from emapg_jax.checkpoint import Checkpointer
from emapg_jax.config import RunConfig
from emapg_jax.envs.embedded import AddTask
from experiments import loop, stopping, warmup
from experiments.build import build, new_state
from experiments.compiled_once import CompiledOnce

TINY = RunConfig(
  task="add",
  digits=1,
  dtype="float32",
  steps=6,
  prompts_per_step=8,
  group_size=4,
  max_prompt_tokens=8,
  max_new_tokens=8,
  mini_batches=2,
  learning_rate=1e-3,
  adam_b2=0.99,
  kl_topk=4,
  kl_coef=0.05,
  ema_decay=0.7,
  ema_period=2,
  warmup_steps=60,
  hidden_size=16,
  num_heads=2,
  num_layers=1,
  eval_every=3,
  eval_problems=20,
  save_every=3,
)
TINY_LLAMA = str(pathlib.Path(__file__).parent / "data" / "tiny_llama")
HF = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "warmup_steps": 0}  # what a run from a model folder leaves at its default
TIMES = ("seconds_", "tokens_per_second")


def run(config: RunConfig, workdir: pathlib.Path):
  """Runs to the end; returns the final state and the metric lines without what a clock measured."""
  built = build(dataclasses.replace(config, workdir=str(workdir)))
  loop.train(built, workdir)
  with Checkpointer(str(workdir / "checkpoints"), 1) as checkpointer:
    state, host = checkpointer.restore_latest(built.abstract_state)
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return jax.device_get(state), host, [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, *run(TINY, workdir)


def test_what_a_run_leaves(whole):
  workdir, state, host, lines = whole
  assert int(state.step) == 6
  assert host.position == 6 * 8
  assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
  names = (
    *("score_mean", "reward_mean", "loss", "policy_loss", "kl", "entropy", "grad_norm", "response_length", "truncated_fraction"),
    *(
      "solve_none",
      "solve_all",
      "anchor_distance",
      "topk_mass",
      "tail_hit_rate",
      "kl_head",
      "kl_tail",
      "kl_weight",
      "learning_rate",
      "kl_initial",
    ),
  )
  assert all(name in line for line in lines[1:] for name in names)
  assert [("eval_sampled" in line, "eval_greedy" in line) for line in lines] == [(step % 3 == 0,) * 2 for step in range(7)]
  raw = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert all(f"seconds_{phase}" in raw[1] for phase in ("rollout", "reward", "anchor", "update"))
  samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
  assert {"step", "prompt", "completion", "score", "extracted"} <= samples[0].keys()
  assert {sample["kind"] for sample in samples} == {"sampled", "greedy", "train"}
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["3", "6"]
  assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")
  assert list((workdir / "tensorboard").iterdir())
  assert "--kl_coef=0.05" in (workdir / "flags.txt").read_text().splitlines()


def test_rollouts_change_the_weights_and_the_anchor_lags(whole):
  _, state, _, lines = whole
  distance = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), state.params, state.ema_params)
  assert max(jax.tree.leaves(distance)) > 1e-4
  assert 0 <= lines[1]["kl"] < 0.01
  assert lines[6]["kl"] > lines[1]["kl"]


@pytest.mark.parametrize("kl", ["topk_forward", "exact_forward", "k5", "score_topk_reverse"])
def test_kl_whose_ids_are_the_anchors_or_none(kl, tmp_path):
  topk = {} if kl in ("topk_forward", "score_topk_reverse") else {"kl_topk": 0}
  _, _, lines = run(dataclasses.replace(TINY, kl=kl, steps=3, eval_every=0, warmup_steps=5, **topk), tmp_path)
  assert abs(lines[1]["kl"]) < abs(lines[3]["kl"])
  assert ("topk_mass" in lines[1]) == (kl != "k5")


@pytest.mark.crash
def test_resume_is_bit_exact_twice(whole, tmp_path):
  _, state, host, lines = whole
  run(dataclasses.replace(TINY, steps=3, anchor_memory="pinned_host"), tmp_path)
  resumed, resumed_host, resumed_lines = run(TINY, tmp_path)
  chex.assert_trees_all_equal(resumed, state)
  assert dataclasses.replace(resumed_host, flags={}) == dataclasses.replace(host, flags={})
  assert resumed_lines == lines
  # A run that is complete does nothing, and says so.
  again, _, again_lines = run(TINY, tmp_path)
  chex.assert_trees_all_equal(again, state)
  assert again_lines == lines


def test_the_initial_model_is_kept_apart_from_the_anchor(whole):
  workdir, _, _, lines = whole
  # The anchor follows (η = 0.7 every 2 steps), the initial model does not.
  assert lines[6]["kl_initial"] > 1.2 * lines[6]["kl"]
  assert lines[1]["kl_initial"] == pytest.approx(0, abs=1e-6)
  assert (workdir / "initial" / "0").is_dir()


def test_resume_without_the_initial_model_is_an_error(tmp_path):
  short = dataclasses.replace(TINY, steps=1, eval_every=0, save_every=1, warmup_steps=1)
  run(short, tmp_path)
  shutil.rmtree(tmp_path / "initial")
  with pytest.raises(ValueError, match=r"initial model.*is missing from .*initial.*--keep_initial=off"):
    run(dataclasses.replace(short, steps=2), tmp_path)


def test_resume_with_another_setting_is_refused_unless_overridden(tmp_path):
  short = dataclasses.replace(TINY, steps=1, eval_every=0, save_every=1, warmup_steps=1)
  run(short, tmp_path)
  changed = dataclasses.replace(short, steps=2, kl_coef=0.5)
  with pytest.raises(ValueError, match=r"(?s)kl_coef.*0\.05.*0\.5.*--override"):
    run(changed, tmp_path)
  state, host, _ = run(dataclasses.replace(changed, override=("kl_coef",)), tmp_path)
  assert int(state.step) == 2
  assert host.flags["kl_coef"] == "0.5"


def test_mesh_and_memory_of_the_anchor_may_change_on_resume(tmp_path):
  short = dataclasses.replace(TINY, steps=1, eval_every=0, save_every=1, warmup_steps=5, mesh="data:8")
  run(short, tmp_path)
  state, _, lines = run(dataclasses.replace(short, steps=2, mesh="data:2,fsdp:2,tensor:2", anchor_memory="pinned_host"), tmp_path)
  assert int(state.step) == 2
  assert [line["step"] for line in lines] == [0, 1, 2]


@pytest.fixture
def compiles():
  """The number of compilations so far, as a function."""
  seen = []

  def listen(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
      seen.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield lambda: len(seen)
  jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_are_counted(compiles):
  before = compiles()
  jax.jit(lambda x: x * 17 - compiles())(1.0)
  assert compiles() > before


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"kl_topk": 17}, r"--kl_topk=17 exceeds the vocabulary of 16"),
    ({"micro_batch": 3, "mesh": "data:4,tensor:2"}, r"does not split into 2 mini-batches of micro-batches of 12"),
    ({"mesh": "tensor:8"}, r"2 heads that share 2 key/value heads can't be spread over 8 devices"),
    ({"prompts_per_step": 3}, r"= 12 sequences can't be spread over 8 devices"),
    ({"max_prompt_tokens": 3}, r"no prompt is left"),
    ({"task": "ad", "digits": 2}, r"--task=ad is unknown"),
    ({"task": "math", "digits": 2}, r"--task=math needs --train_data"),
    ({"task": "arithmetic", "warmup_steps": 0}, r"--task=arithmetic needs --model_path"),
    ({"model_path": "/nowhere", "hidden_size": 64, "num_layers": 2, "num_heads": 4}, r"brings its own tokenizer"),
    ({"task": "no_such_module:make", "digits": 2}, r"no module 'no_such_module'"),
    ({"mesh": "data:5"}, r"does not fit 8 devices"),
    ({"warmup_batch": 100}, r"--warmup_batch=100 can't be spread over 8 devices"),
    ({"prompts_per_step": 8, "mini_batches": 8}, r"A mini-batch of 4 sequences can't be spread over 8 devices"),
    (
      HF | {"task": "tests.parity:make", "digits": 2, "model_path": TINY_LLAMA, "warmup_steps": 1},
      r"needs a task with demonstrations and a tokenizer",
    ),
    ({"hidden_size": 15}, r"--hidden_size=15 is not a multiple"),
    (HF | {"task": "arithmetic", "model_path": "/nowhere"}, r"/nowhere"),
  ],
)
def test_bad_input_is_refused_before_anything_compiles(changes, text, compiles):
  before = compiles()
  with pytest.raises(ValueError, match=text):
    build(dataclasses.replace(TINY, **changes))
  assert compiles() == before


def command(*args):
  # One device, as a user has; the cache is that of the tests.
  env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  return [sys.executable, "-m", "experiments.math_grpo", *args], env


def cli(*args):
  line, env = command(*args)
  return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
  ("args", "text"),
  [
    (("--kl=k9",), "error: --kl=k9 is unknown. Did you mean"),
    (("--ema_decai=0.9",), "Unknown command line flag 'ema_decai'"),
    (("add",), "error: 'add' is not a flag"),
    (("--task=math", "--train_data=/nowhere.jsonl"), "error: the data file /nowhere.jsonl does not exist"),
  ],
)
def test_command_line_errors_are_one_paragraph(args, text):
  done = cli(*args)
  assert done.returncode == 1
  assert text in done.stderr
  assert "Traceback" not in done.stderr


def test_workdir_that_can_not_be_written_to(tmp_path):
  (tmp_path / "file").write_text("")
  done = cli("--task=add", "--kl_topk=4", "--steps=1", f"--workdir={tmp_path / 'file' / 'run'}")
  assert done.returncode == 1
  assert "error:" in done.stderr
  assert str(tmp_path / "file") in done.stderr
  assert "Traceback" not in done.stderr


def tiny_flags(workdir, **changes):
  config = dataclasses.replace(TINY, workdir=str(workdir), **changes)
  given = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
  return [f"--{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in given.items()]


def start_and_wait_for_step(args, workdir, step):
  line, env = command(*args)
  process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  deadline = time.time() + 120
  while time.time() < deadline and process.poll() is None:
    lines = (workdir / "metrics.jsonl").read_text().splitlines() if (workdir / "metrics.jsonl").exists() else []
    if len(lines) > step:
      return process
    time.sleep(0.05)
  process.kill()
  raise AssertionError(f"no step {step} within the time: {process.communicate()[0]}")


@pytest.mark.crash
def test_interrupt_saves_and_says_where_and_the_run_goes_on(tmp_path):
  args = tiny_flags(tmp_path, steps=100_000, eval_every=0, save_every=0, warmup_steps=1)
  process = start_and_wait_for_step(args, tmp_path, 3)
  process.send_signal(signal.SIGINT)
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 130, out
  saved = int(next((tmp_path / "checkpoints").iterdir()).name)
  assert f"saved to {tmp_path / 'checkpoints' / str(saved)}" in out
  assert f"--flagfile={tmp_path / 'flags.txt'}" in out
  done = cli(*tiny_flags(tmp_path, steps=saved + 2, eval_every=0, save_every=0, warmup_steps=1))
  assert done.returncode == 0, done.stderr
  assert f"resumed at step {saved}" in done.stdout
  lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert lines == list(range(saved + 3))


@pytest.mark.crash
def test_killed_run_ends_where_the_undisturbed_one_does(tmp_path):
  """kill -9 after the checkpoint of step 3; the same command then gives the lines of a run that nobody disturbed."""
  undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
  done = cli(*tiny_flags(undisturbed, steps=12, mesh="data:1"))
  assert done.returncode == 0, done.stderr
  process = start_and_wait_for_step(tiny_flags(killed, steps=12, mesh="data:1", eval_every=1), killed, 5)
  process.kill()
  process.communicate()
  done = cli(*tiny_flags(killed, steps=12, mesh="data:1"))
  assert done.returncode == 0, done.stderr
  assert "resumed at step" in done.stdout

  def numbers(workdir):
    skip = (*TIMES, "eval_")
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(skip)} for line in lines]

  assert numbers(killed) == numbers(undisturbed)


def test_resume_from_the_warm_up_has_every_step_once(tmp_path):
  short = dataclasses.replace(TINY, steps=2, save_every=2, eval_every=2, warmup_steps=1)
  _, _, lines = run(short, tmp_path)
  shutil.rmtree(tmp_path / "checkpoints" / "2")
  _, _, again = run(short, tmp_path)
  assert [line["step"] for line in again] == [0, 1, 2]
  assert again == lines


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_greedy": 0.5}\n')
  _, _, lines = run(dataclasses.replace(TINY, steps=1, save_every=1, eval_every=0, warmup_steps=1), tmp_path)
  assert [line["step"] for line in lines] == [0, 1]
  assert "eval_greedy" not in lines[0]


def test_one_run_at_a_time(tmp_path):
  with stopping.only_run_in(tmp_path), pytest.raises(ValueError, match=r"Another run is writing to"), stopping.only_run_in(tmp_path):
    pytest.fail("two runs in one folder")
  with stopping.only_run_in(tmp_path):
    pass


def test_resume_with_other_problems_is_refused(tmp_path, monkeypatch):
  short = dataclasses.replace(TINY, steps=1, save_every=1, eval_every=0, warmup_steps=1)
  run(short, tmp_path)
  fewer = AddTask(1).prompts()[:50]
  monkeypatch.setattr(AddTask, "prompts", lambda *_: fewer)
  with pytest.raises(ValueError, match=r"problems"):
    run(dataclasses.replace(short, steps=2), tmp_path)


def test_metrics_without_a_checkpoint_are_not_overwritten(tmp_path):
  short = dataclasses.replace(TINY, steps=1, save_every=0, eval_every=0, warmup_steps=1, workdir=str(tmp_path))
  loop.train(build(short), tmp_path)
  before = (tmp_path / "metrics.jsonl").read_bytes()
  with pytest.raises(ValueError, match=r"holds the metrics of a run up to step 1, but no checkpoint"):
    loop.train(build(short), tmp_path)
  assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_step_on_which_nothing_is_trained(tmp_path, monkeypatch, capsys):
  """Every score is NaN: no token is trained on, nothing moves, the run goes on."""
  monkeypatch.setattr(AddTask, "score", lambda *_: float("nan"))
  short = dataclasses.replace(TINY, steps=2, save_every=1, eval_every=2, warmup_steps=1)
  state, _, lines = run(short, tmp_path)
  assert lines[2]["unscored"] == 32
  assert lines[2]["eval_unscored"] == 40
  assert "eval_greedy" not in lines[2]
  assert "kl" not in lines[2]
  assert lines[2]["empty_updates"] == 1
  assert "warning: at step 1 100% of the updates had no token to train on" in capsys.readouterr().out
  assert "grad_norm" not in lines[2]
  assert int(state.step) == 2


def test_warm_up_compiles_once_and_gives_the_layout_of_the_run(tmp_path):
  built = build(dataclasses.replace(TINY, mesh="data:2,fsdp:2,tensor:2", warmup_steps=3, workdir=str(tmp_path)))
  with stopping.StopRequest() as stop:
    state = warmup.warm_up(built, new_state(built), stop)
  assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(lambda a: a.sharding, built.abstract_state)


def test_a_second_compilation_for_the_same_shapes_is_a_warning():
  twice = CompiledOnce(lambda x, y: x * y, "twice")
  twice(np.float32(1), np.float32(2))
  twice(np.float32(3), np.float32(4))
  twice(np.ones(2, np.float32), np.float32(4))
  # A weak type is what a Python number becomes: same shape and dtype, compiled anew.
  with pytest.warns(RuntimeWarning, match="twice was compiled again"):
    twice(jax.numpy.asarray(1.0), np.float32(2))
