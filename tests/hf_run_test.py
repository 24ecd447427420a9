"""Whole runs from a Hugging Face folder: chat prompts, problems from files, a user's own task."""

import dataclasses
import json
import pathlib

import jax
import pytest

from emapg_jax.checkpoint import Checkpointer
from emapg_jax.config import RunConfig
from experiments import loop
from experiments.build import build

DATA = pathlib.Path(__file__).parent / "data"
SMALL = RunConfig(
  model_path=str(DATA / "tiny_llama"),
  dtype="float32",
  steps=2,
  prompts_per_step=4,
  group_size=2,
  max_prompt_tokens=64,
  max_new_tokens=16,
  mini_batches=2,
  learning_rate=1e-3,
  kl_topk=8,
  mesh="data:2,fsdp:2,tensor:2",
  eval_every=2,
  eval_problems=6,
  save_every=0,
  remat="none",
)


def run(tmp_path, **changes):
  built = build(dataclasses.replace(SMALL, workdir=str(tmp_path), **changes))
  loop.train(built, tmp_path)
  lines, samples = (
    [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("metrics.jsonl", "samples.jsonl")
  )
  return built, lines, samples


def test_chat_task_on_a_model_folder(tmp_path):
  built, lines, samples = run(tmp_path, task="arithmetic")
  assert [line["step"] for line in lines] == [0, 1, 2]
  assert built.tokenizer.eos_ids == (1, 3)
  prompt = built.tokenizer.decode(built.train.tokens[0])
  assert prompt.endswith("assistant\n"), "the chat header is whole"
  assert all(sample["reason"] in ("eos", "length") for sample in samples)
  assert lines[1]["entropy"] > 0


def test_problems_from_a_file_and_groups_without_spread(tmp_path, capsys):
  rows = [{"problem": f"How much is {n} plus {n}?", "answer": str(2 * n)} for n in range(6)]
  (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  built, lines, _ = run(
    tmp_path / "run",
    task="math",
    model_path=str(DATA / "tiny_qwen2"),
    train_data=(str(tmp_path / "train.jsonl"),),
    eval_data=(str(tmp_path / "train.jsonl"),),
    max_prompt_tokens=128,
    kl_coef=0.0,
    grading_workers=1,
  )
  assert built.task.prompt_opens_think, "the template ends in <think>"
  assert "boxed" in built.train.problems[0].prompt
  last = lines[-1]
  assert last["eval_no_answer"] == 12, "six problems, sampled and greedy; they are no part of the training counts"
  assert last["score_mean"] == 0
  assert last["solve_none"] == last["degenerate"] == 1
  assert last["policy_loss"] == 0
  assert last["grad_norm"] == 0
  assert last["bad_updates"] == 0
  assert lines[1]["no_answer"] == last["no_answer"] == 8
  assert "have equal scores and teach nothing" in capsys.readouterr().out


def test_a_users_own_task(tmp_path):
  _, lines, samples = run(tmp_path, task="tests.parity:make", eval_every=0)
  assert 0 < lines[-1]["score_mean"] < 1
  assert lines[-1]["grad_norm"] > 0
  assert samples[0]["answer"] in ("odd", "even")


def test_bfloat16_activations_and_parameters(tmp_path):
  """Anchor and moments stay float32, in the checkpoint too; the trainer's log-probs are near the sampler's, not equal to them."""
  built, lines, _ = run(
    tmp_path, task="tests.parity:make", eval_every=0, save_every=2, dtype="bfloat16", param_dtype="bfloat16", learning_rate=1e-3
  )
  with Checkpointer(str(tmp_path / "checkpoints"), 1) as checkpointer:
    state, _ = checkpointer.restore_latest(built.abstract_state)
  dtypes = [{str(x.dtype) for x in jax.tree.leaves(tree)} for tree in (state.params, state.ema_params, state.opt_state)]
  assert dtypes == [{"bfloat16"}, {"float32"}, {"float32", "int32"}]
  assert lines[2]["anchor_distance"] > 0
  assert lines[1]["ratio"] == pytest.approx(1, abs=0.05)
  assert 0 < abs(lines[1]["sampler_ratio"] - 1) < 0.05


def test_positions_of_the_model_are_a_limit():
  with pytest.raises(ValueError, match=r"--max_prompt_tokens=200 \+ --max_new_tokens=100 = 300 exceeds the 256 positions"):
    build(dataclasses.replace(SMALL, task="arithmetic", max_prompt_tokens=200, max_new_tokens=100))
