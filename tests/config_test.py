"""The settings of a run: what is refused, and that flags and flagfiles carry them."""

import dataclasses
import subprocess
import sys

import pytest

from emapg_jax.config import KL_ESTIMATORS, RunConfig
from experiments import flags
from experiments.estimators import ESTIMATORS


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"kl": "topk_revers"}, r"--kl=topk_revers is unknown. Did you mean 'topk_reverse'\?"),
    ({"aggregation": "mean"}, r"--aggregation=mean is unknown.* Use one of token_mean"),
    ({"algorithm": "ppo"}, r"--algorithm=ppo is unknown"),
    ({"temperature": 0.0}, r"--temperature=0.0 must be above 0"),
    ({"ema_decay": 1.1}, r"--ema_decay=1.1 must lie in \[0, 1\]"),
    ({"kl_coef": -1.0}, r"--kl_coef=-1.0 must be at least 0"),
    ({"group_size": 1}, r"--group_size=1 must be at least 2"),
    ({"learning_rate": float("inf")}, r"--learning_rate=inf must be a finite number"),
    ({"kl_coef": float("nan")}, r"--kl_coef=nan must be a finite number"),
    ({"adam_b1": 1.0}, r"--adam_b1=1.0 must be below 1"),
    ({"seed": 2**32}, r"--seed=4294967296 must be below 2\*\*32"),
    ({"ema_period": 2**31}, r"--ema_period=2147483648 must be below"),
    ({"task": "math", "grading_seconds": 1e8}, r"--grading_seconds=100000000.0 must be at most 3600"),
    ({"dual_clip": 0.5}, r"--dual_clip=0.5 must be above 1"),
    ({"prompts_per_step": 3, "group_size": 3, "mini_batches": 2}, r"= 9 sequences do not divide into --mini_batches=2"),
    ({"kl": "k3", "kl_topk": 8}, r"--kl_topk=8 has no meaning for --kl=k3"),
    ({"task": "add", "train_data": ("a.jsonl",)}, r"--train_data=.* has no effect unless --task=math"),
    ({"task": "between", "digits": 1}, r"--digits=1 has no effect unless --task is add or arithmetic"),
    ({"task": "arithmetic", "model_path": "m", "num_heads": 2}, r"--num_heads=2 has no effect with --model_path"),
    ({"warmup_accuracy": 0.5}, r"--warmup_accuracy=0.5 has no effect with --warmup_steps=0"),
    ({"kl_coef": 0.0, "kl_iw_high": 2.0}, r"--kl_iw_high=2.0 has no effect with --kl_coef=0"),
    ({"kl": "k3", "kl_topk_approximate": True}, r"--kl_topk_approximate=True has no effect unless --kl is a top-k estimator"),
    ({"model_path": "m", "chat_template": "a\nb"}, r"--chat_template holds line breaks"),
    ({"kl_iw_low": 2.0, "kl_iw_high": 1.0}, r"--kl_iw_low=2.0 lies above --kl_iw_high=1.0"),
  ],
)
def test_refused(changes, text):
  with pytest.raises(ValueError, match=text):
    RunConfig(**changes)


def test_every_estimator_that_is_named_exists():
  assert set(KL_ESTIMATORS) == set(ESTIMATORS)


@pytest.mark.parametrize(
  ("kl", "ids", "owner"), [("topk_reverse", "auto", "policy"), ("topk_forward", "auto", "anchor"), ("topk_reverse", "anchor", "anchor")]
)
def test_owner_of_the_ids(kl, ids, owner):
  assert RunConfig(kl=kl, kl_topk_ids=ids).topk_owner == owner


def test_anchor_is_kept_when_something_could_read_it():
  assert RunConfig().uses_anchor
  assert RunConfig(kl_coef=0.0).uses_anchor
  assert RunConfig(ema_decay=1.0).uses_anchor
  assert not RunConfig(kl_coef=0.0, ema_decay=1.0).uses_anchor


def test_flagfile_repeats_the_run(tmp_path):
  config = RunConfig(task="math", steps=7, remat=False, train_data=("a.jsonl", "b.parquet"), kl_coef=1e-7, mesh="data:2,fsdp:-1")
  flags.write(config, tmp_path / "flags.txt")
  code = (
    "import sys; from absl import flags as f; from experiments import flags; flags.define(); f.FLAGS(sys.argv); print(repr(flags.read()))"
  )
  out = subprocess.run([sys.executable, "-c", code, f"--flagfile={tmp_path / 'flags.txt'}"], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == repr(config)


def test_every_field_has_a_help_text():
  assert all(len(field.metadata["help"]) > 5 for field in dataclasses.fields(RunConfig))
