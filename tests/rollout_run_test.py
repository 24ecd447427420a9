"""How responses are sampled and how rows go through the model, through the loop of a run: two steps of a model of one layer."""

import dataclasses
import functools
import json

import jax
import pytest

from emapg_jax.config import RunConfig
from emapg_jax.envs.embedded import AddTask
from emapg_jax.micro_batches import trained_length
from emapg_jax.rollout.draw import Sampling
from experiments import loop, report
from experiments.build import Run, _unescaped, build
from tests.algorithms_run_test import SMALL

# One update a step, so that the same rows meet in it however they are read; on 8 devices, 4 rows each; responses of 1 to 32 tokens.
PLAIN = SMALL | {"steps": 2, "mini_batches": 1, "prompts_per_step": 8, "max_new_tokens": 32}
PPO, DAPO = {"algorithm": "ppo"}, {"algorithm": "dapo", "mask_truncated": True, "keep_initial": "on"}
NOT_COMPARED = ("seconds_", "tokens_per_second", "padded_fraction")


@pytest.fixture(autouse=True)
def odd_lengths(monkeypatch):
  """A score that responses of random weights have with even chances."""
  monkeypatch.setattr(AddTask, "score", lambda _, problem, response: float(len(response.split()) % 2))


@functools.cache
def sampler():
  return build(RunConfig(**PLAIN)).sampler


def built(**changes) -> Run:
  """A run that samples as all others do, with one sampler for all."""
  return dataclasses.replace(build(RunConfig(**PLAIN | changes)), sampler=sampler())


def train(run: Run, workdir) -> tuple[list[dict], list]:
  """The lines of metrics of both steps, and the batches that were trained on."""
  batches = []

  def step(state, frozen, batch, *args):
    batches.append(jax.device_get(batch))
    return run.train_step(state, frozen, batch, *args)

  config = dataclasses.replace(run.config, workdir=str(workdir), save_every=0)
  loop.train(dataclasses.replace(run, config=config, train_step=step), workdir)
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()[-2:]], batches


@functools.cache
def plain(settings, folder):
  return train(built(**dict(settings)), folder / "plain")[0]


@pytest.mark.parametrize(
  ("common", "changes", "prompt_rows"),
  [
    # A device takes 72 tokens: one row of 8 + 32, or three of 8 + 16; the last micro-batch is not full.
    (PPO, {"micro_tokens": 72}, 1),
    (DAPO, {"shared_prefix": "on"}, 4),
    # Two responses of 32 with one prompt of 8, or of 16.
    (DAPO, {"shared_prefix": "on", "micro_tokens": 72}, 2),
  ],
  ids=["ppo, by length", "dapo, shared", "dapo, both"],
)
def test_how_rows_are_read_changes_no_metric(common, changes, prompt_rows, tmp_path_factory):
  run = built(**common | changes)
  assert run.step_config.prompt_rows == prompt_rows
  lines, batches = train(run, tmp_path_factory.mktemp("changed"))
  expected = plain(tuple(common.items()), tmp_path_factory.getbasetemp() / common["algorithm"])
  for line, other, batch in zip(lines, expected, batches, strict=True):
    assert line.keys() == other.keys()
    for name in line:
      if not name.startswith(NOT_COMPARED):
        assert line[name] == pytest.approx(other[name], rel=2e-5, abs=1e-6), name
    # What is read if every row is read to the end, and each prompt once for the rows that share it.
    rows, size = batch.mask.shape
    read = rows // prompt_rows * (batch.tokens.shape[1] - size) + rows * size
    unplanned = 1 - (batch.prompt_length[::prompt_rows].sum() + trained_length(batch.mask).sum()) / read
    assert line["padded_fraction"] < unplanned if "micro_tokens" in changes else line["padded_fraction"] == pytest.approx(unplanned)
  assert {batch.mask.shape[1] for batch in batches} == {32}
  assert lines[1]["kl"] > 1e-3 and lines[0]["reward_std"] > 0, "there is something to compare"
  assert ("kl_initial" in lines[0], "value_loss" in lines[0]) == (common is DAPO, common is PPO)


def test_cut_samples_with_stop_strings_through_few_slots(tmp_path, capsys, monkeypatch):
  stops = ("7", "3 4")
  changes = {"stop_strings": stops, "rollout_slots": 8, "decode_block": 3, "top_k": 6, "truncated_sampling": True, "max_new_tokens": 8}
  run = build(RunConfig(**PLAIN | changes | {"eval_every": 2, "eval_problems": 8, "eval_top_p": 0.9, "samples_logged": 32}))
  report.header(run, tmp_path)
  said = capsys.readouterr().out
  assert (
    "rollouts: 8 slots, 8 prompts prefilled at a time, blocks of 3 tokens · top_p 1, top_k 6: ratios and KL assume full support\n" in said
  )
  assert "stop_strings=('7', '3 4')" in said
  asked, generate = [], run.sampler.generate
  monkeypatch.setattr(run.sampler, "generate", lambda *args: asked.append(args[-1]) or generate(*args))
  lines, _ = train(run, tmp_path)
  # The log-probabilities that tokens were drawn with are those of six ids, so that the KL to them is no rounding.
  said += capsys.readouterr().out
  assert "warning" not in said and "noise floor" not in said
  evaluated = [Sampling(top_p=0.9), Sampling(temperature=0.0)]
  assert asked == [*evaluated, Sampling(top_k=6), Sampling(top_k=6), *evaluated]
  rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
  for row in rows:
    text, stopped = row["completion"], row["reason"] == "stop"
    assert text.endswith(stops) == any(stop in text for stop in stops) == stopped
    assert not any(stop in text[:-1] for stop in stops), "it ends where the text is first there"
    assert row["tokens"] == len(text.split()) + (row["reason"] == "eos")
  for line in lines:
    reasons = [row["reason"] for row in rows if (row["step"], row["kind"]) == (line["step"], "train")]
    assert len(reasons) == 32 and set(reasons) == {"eos", "stop", "length"}
    assert line["truncated_fraction"] == reasons.count("length") / 32
    assert line["sampler_ratio_max"] < 0.95, "what a token has of all ids, over what it has of six"
  assert "stop" in {row["reason"] for row in rows if row["kind"] == "sampled"}


@pytest.mark.parametrize(("flag", "text"), [(r"a\nb", "a\nb"), (r"\\nabla", r"\nabla"), (r"\q\\", "\\q\\"), ("END", "END")])
def test_a_stop_string_as_a_flag_holds_it(flag, text):
  assert _unescaped(flag) == text


@pytest.mark.parametrize("changes", [{"top_k": 17, "truncated_sampling": True}, {"eval_top_k": 17, "eval_every": 1}])
def test_more_ids_than_the_vocabulary_holds(changes):
  with pytest.raises(ValueError, match=r"top_k=17 exceeds the vocabulary of 16 tokens"):
    build(RunConfig(**SMALL | changes))
