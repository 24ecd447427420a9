"""The settings of a run: what is refused, and that flags and flagfiles carry them."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest
from absl.flags import FlagValues

from emapg_jax.config import RUNTIME_FLAGS, RunConfig
from emapg_jax.presets import ALGORITHMS, KL_ESTIMATORS
from experiments import flags
from experiments.estimators import ESTIMATORS


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"kl": "topk_revers"}, r"--kl=topk_revers is unknown. Did you mean 'topk_reverse'\?"),
    ({"aggregation": "mean"}, r"--aggregation=mean is unknown.* Use one of token_mean"),
    ({"algorithm": "pro"}, r"--algorithm=pro is unknown. Did you mean 'ppo'\?"),
    ({"top_p": 0.9}, r"--top_p=0.9 and --top_k=0 cut .* can be drawn"),
    ({"top_k": 50}, r"--top_p=1.0 and --top_k=50 cut"),
    ({"truncated_sampling": True}, r"--truncated_sampling has no effect with --top_p=1 and --top_k=0"),
    ({"top_p": 0.0, "truncated_sampling": True}, r"--top_p=0.0 must be above 0"),
    ({"eval_top_p": 1.5}, r"--eval_top_p=1.5 must lie in \[0, 1\]"),
    ({"eval_top_k": 5, "eval_every": 0}, r"--eval_top_k=5 has no effect with --eval_every=0"),
    ({"stop_strings": ("a\nb",)}, r"--stop_strings='a\\nb' holds a line break"),
    ({"stop_strings": (" b",)}, r"--stop_strings=' b' holds a line break, or a space"),
    ({"eval_temperature": 0.0}, r"--eval_temperature=0.0 must be above 0"),
    ({"rollout_slots": 1025}, r"--rollout_slots=1025 exceeds the 1024 sequences of an RL step"),
    ({"rollout_slots": -1}, r"--rollout_slots=-1 must be at least 0"),
    ({"decode_block": 0}, r"--decode_block=0 must be above 0"),
    ({"micro_batch": 2, "micro_tokens": 100}, r"--micro_batch=2 and --micro_tokens=100 both say"),
    ({"temperature": 0.0}, r"--temperature=0.0 must be above 0"),
    ({"ema_decay": 1.1}, r"--ema_decay=1.1 must lie in \[0, 1\]"),
    ({"kl_coef": -1.0}, r"--kl_coef=-1.0 must be at least 0"),
    ({"group_size": 1}, r"--group_size=1 must be at least 2"),
    ({"learning_rate": float("inf")}, r"--learning_rate=inf must be a finite number"),
    ({"kl_coef": float("nan")}, r"--kl_coef=nan must be a finite number"),
    ({"learning_rate": 1e39}, r"--learning_rate=1e\+39 must be a finite number in float32"),
    ({"adam_b2": 1 - 1e-11}, r"--adam_b2=0.99999999999 must be below 1 in float32"),
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
    ({"advantage": "gea"}, r"--advantage=gea is unknown. Did you mean 'gae'\?"),
    ({"policy_loss": "ppo_clp"}, r"--policy_loss=ppo_clp is unknown. Did you mean 'ppo_clip'\?"),
    ({"algorithm": "reinforce", "clip_low": 0.2}, r"--clip_low=0.2 has no effect with --policy_loss=reinforce"),
    ({"policy_loss": "reinforce", "clip_high": 0.2}, r"--clip_high=0.2 has no effect with --policy_loss=reinforce"),
    ({"algorithm": "rloo", "mini_batches": 2}, r"--mini_batches=2 and --epochs=1 make 2 updates .* Set both to 1"),
    ({"algorithm": "reinforce", "epochs": 3}, r"--mini_batches=1 and --epochs=3 make 3 updates"),
    ({"algorithm": "rloo", "old_logp": "sampler"}, r"--old_logp=sampler has no effect with --policy_loss=reinforce"),
    ({"clip_low": 1.1}, r"--clip_low=1.1 must lie in \[0, 1\]"),
    ({"clip_high": -0.1}, r"--clip_high=-0.1 must be at least 0"),
    ({"algorithm": "cispo", "dual_clip": 3.0}, r"--dual_clip=3.0 has no effect unless --policy_loss=ppo_clip"),
    ({"advantage": "leave_one_out", "group_size": 1}, r"--group_size=1 must be at least 2: advantage leave_one_out compares"),
    ({"advantage": "group_centred", "group_size": 1}, r"--group_size=1 must be at least 2: advantage group_centred"),
    ({"algorithm": "ppo", "group_size": 1, "dynamic_sampling": True}, r"--group_size=1 must be at least 2: dynamic sampling compares"),
    (
      {"advantage": "batch_normalized", "group_size": 1, "prompts_per_step": 1, "mini_batches": 1},
      r"--prompts_per_step=1 × --group_size=1 must be at least 2",
    ),
    *(({"kl_placement": "reward", "kl": kl}, rf"--kl={kl} can't be in the reward") for kl in ("k2", "k5", "exact_forward", "topk_forward")),
    ({"kl_placement": "rewards"}, r"--kl_placement=rewards is unknown. Did you mean 'reward'\?"),
    ({"kl_placement": "reward", "kl_coef": 0.0}, r"--kl_placement=reward has no effect with --kl_coef=0"),
    ({"kl_target": 0.1, "kl_coef": 0.0}, r"--kl_target=0.1 has no effect with --kl_coef=0"),
    ({"kl_gain": 0.2}, r"--kl_gain=0.2 has no effect without --kl_target"),
    ({"kl_gain": 5.0, "kl_target": 0.1}, r"--kl_gain=5.0 must be below 5"),
    ({"tis_cap": 0.5}, r"--tis_cap=0.5 must be at least 1, or 0 for off"),
    ({"tis_sequence_bound": 1.0}, r"--tis_sequence_bound=1.0 must be above 1, or 0 for off"),
    ({"tis_cap": 2.0, "old_logp": "sampler"}, r"--tis_cap=2.0 has no effect with --old_logp=sampler"),
    ({"tis_sequence_bound": 2.0, "old_logp": "sampler"}, r"--tis_sequence_bound=2.0 has no effect with --old_logp=sampler"),
    *(
      ({name: value}, rf"--{name}={value} has no effect unless --advantage=gae")
      for name, value in {
        **{"gae_lambda": 0.9, "value_clip": 0.1, "critic_learning_rate": 1e-4, "critic_weight_decay": 0.1, "critic_clip_norm": 2.0}
      }.items()
    ),
    ({"discount": 0.9}, r"--discount=0.9 has no effect unless --advantage is gae or reward_to_go"),
    ({"algorithm": "ppo", "baseline_decay": 0.5}, r"--baseline_decay=0.5 has no effect unless --advantage=reward_to_go"),
    ({"mini_batches": 1, "dual_clip": 3.0}, r"--dual_clip=3.0 has no effect with one update per RL step"),
    ({"algorithm": "ppo", "mini_batches": 1, "value_clip": 0.1}, r"--value_clip=0.1 has no effect with one update per RL step"),
    ({"mini_batches": 1, "tis_cap": 2.0, "kl_iw_high": 2.0}, r"--kl_iw_high=2.0 has no effect with --tis_cap here: every weight is 1"),
    ({"kl_placement": "reward", "tis_cap": 2.0, "kl_iw_high": 2.0}, r"--kl_iw_high=2.0 has no effect with --tis_cap here"),
    ({"policy_loss": "ppo"}, r"--policy_loss=ppo is unknown. Did you mean 'ppo_clip'\?"),
    ({"algorithm": "PPO"}, r"--algorithm=PPO is unknown. Did you mean 'ppo'\?"),
    ({"max_refills": 2}, r"--max_refills=2 has no effect without --dynamic_sampling"),
    ({"overlong_share": 1.1}, r"--overlong_share=1.1 must lie in \[0, 1\]"),
    ({"lr_schedule": "cosin"}, r"--lr_schedule=cosin is unknown. Did you mean 'cosine'\?"),
    ({"lr_schedule": "cosine"}, r"--decay_steps=0 must exceed --lr_warmup_steps=0"),
    (
      {"lr_schedule": "linear", "decay_steps": 10, "lr_warmup_steps": 10, "steps": 10},
      r"--decay_steps=10 must exceed --lr_warmup_steps=10",
    ),
    ({"lr_schedule": "cosine", "decay_steps": 99}, r"--steps=100 makes 100 steps of the learning-rate schedule.* --decay_steps=99"),
    ({"lr_schedule": "cosine", "decay_steps": 199, "lr_unit": "update"}, r"--steps=100 makes 200 steps of the learning-rate schedule"),
    ({"decay_steps": 100}, r"--decay_steps=100 has no effect with --lr_schedule=constant"),
    ({"lr_unit": "update"}, r"--lr_unit=update has no effect without --lr_warmup_steps or --decay_steps"),
    ({"keep_best": -1}, r"--keep_best=-1 must be at least 0"),
    ({"keep_best": 1, "eval_every": 0}, r"--keep_best=1 has no effect with --eval_every=0 or --save_every=0"),
    ({"keep_best": 1, "save_every": 0}, r"--keep_best=1 has no effect with --eval_every=0 or --save_every=0"),
    ({"best_metric": "eval_sampled"}, r"--best_metric=eval_sampled has no effect with --keep_best=0"),
    ({"keep_best": 1, "best_metric": "eval_sample"}, r"--best_metric=eval_sample is unknown. Did you mean 'eval_sampled'\?"),
    ({"init_anchor": True}, r"--init_anchor=True has no effect without --init_from"),
    ({"init_from": "a", "init_anchor": True, "kl_coef": 0.0, "ema_decay": 1.0}, r"--init_anchor=True has no effect without an anchor"),
    ({"init_from": "a", "warmup_steps": 5}, r"--warmup_steps=5 has no effect with --init_from, whose weights are where the run starts"),
    ({"adam_mu_dtype": "bfloat16", "adam_b1": 0.99}, r"--adam_b1=0.99 is too slow for a bfloat16 moment"),
  ],
)
def test_refused(changes, text):
  with pytest.raises(ValueError, match=text):
    RunConfig(**changes)


@pytest.mark.parametrize(
  "changes",
  [
    {"algorithm": "ppo", "group_size": 1},
    {"algorithm": "reinforce", "group_size": 1},
    {"advantage": "batch_normalized", "group_size": 1},
    {"lr_schedule": "cosine", "decay_steps": 100},
    {"lr_schedule": "linear", "decay_steps": 200, "lr_unit": "update", "lr_warmup_steps": 199},
    {"algorithm": "rloo", "tis_cap": 2.0},
    {"tis_cap": 1.0},
    *({"kl_placement": "reward", "kl": kl} for kl in ("k1", "k3", "k3pp", "k4", "exact_reverse", "topk_reverse", "score_topk_reverse")),
  ],
)
def test_accepted(changes):
  assert vars(RunConfig(**changes)).items() >= changes.items()


CHOICES = ("advantage", "policy_loss", "aggregation", "clip_low", "clip_high", "mini_batches", "dynamic_sampling", "overlong_share")
PRESETS = {
  "grpo": ("group_normalized", "ppo_clip", "token_mean", 0.2, 0.28, 2, False, 0.0),
  "dr_grpo": ("group_centred", "ppo_clip", "fixed_length", 0.2, 0.2, 2, False, 0.0),
  "dapo": ("group_normalized", "ppo_clip", "token_mean", 0.2, 0.28, 2, True, 0.2),
  "rloo": ("leave_one_out", "reinforce", "sequence_sum", None, None, 1, False, 0.0),
  "reinforce": ("reward_to_go", "reinforce", "sequence_sum", None, None, 1, False, 0.0),
  "ppo": ("gae", "ppo_clip", "token_mean", 0.2, 0.2, 2, False, 0.0),
  "cispo": ("group_normalized", "cispo", "token_mean", 1.0, 4.0, 2, False, 0.0),
  "gspo": ("group_normalized", "gspo", "sequence_mean", 3e-4, 4e-4, 2, False, 0.0),
}


def choices(config):
  return tuple(getattr(config, name) for name in CHOICES)


@pytest.mark.parametrize("algorithm", PRESETS)
def test_presets(algorithm):
  config = RunConfig(algorithm=algorithm)
  assert choices(config) == PRESETS[algorithm]
  # No preset touches anything else: neither anchor nor KL.
  named = {field.name for field in dataclasses.fields(RunConfig) if field.default is None}
  assert named == {*CHOICES, "eval_temperature"}
  rest = {name for name in vars(config) if name not in (*CHOICES, "algorithm")}
  assert all(getattr(config, name) == getattr(RunConfig(), name) for name in rest)
  assert dataclasses.replace(config) == config


def test_all_presets_are_tested():
  assert PRESETS.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("algorithm", PRESETS)
def test_one_flag_leaves_the_others(algorithm):
  other = {"advantage": "batch_normalized", "aggregation": "sequence_mean", "dynamic_sampling": True, "overlong_share": 0.5}
  for name, value in other.items():
    expected = dict(zip(CHOICES, PRESETS[algorithm])) | {name: value}
    assert choices(RunConfig(algorithm=algorithm, **{name: value})) == tuple(expected.values())
  if PRESETS[algorithm][3] is not None:
    expected = dict(zip(CHOICES, PRESETS[algorithm])) | {"clip_low": 0.1}
    assert choices(RunConfig(algorithm=algorithm, clip_low=0.1)) == tuple(expected.values())


@pytest.mark.parametrize(
  ("changes", "bounds", "mini_batches"),
  [
    ({"algorithm": "grpo", "policy_loss": "cispo"}, (1.0, 4.0), 2),
    ({"algorithm": "grpo", "policy_loss": "cispo", "clip_high": 2.0}, (1.0, 2.0), 2),
    ({"algorithm": "dr_grpo", "policy_loss": "gspo"}, (3e-4, 4e-4), 2),
    ({"algorithm": "dr_grpo", "policy_loss": "ppo_clip"}, (0.2, 0.2), 2),  # as if it were left out
    ({"algorithm": "rloo", "policy_loss": "ppo_clip"}, (0.2, 0.28), 2),
    ({"algorithm": "ppo", "policy_loss": "reinforce"}, (None, None), 1),
    ({"algorithm": "gspo", "policy_loss": "reinforce"}, (None, None), 1),
  ],
)
def test_a_policy_loss_set_by_hand_brings_its_own_bounds(changes, bounds, mini_batches):
  config = RunConfig(**changes)
  assert (config.clip_low, config.clip_high) == bounds
  assert config.mini_batches == mini_batches


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
  config = RunConfig(task="math", steps=7, remat="none", train_data=("a.jsonl", "b.parquet"), kl_coef=1e-7, mesh="data:2,fsdp:-1")
  flags.write(config, tmp_path / "flags.txt")
  code = (
    "import sys; from absl import flags as f; from experiments import flags; flags.define(); f.FLAGS(sys.argv); print(repr(flags.read()))"
  )
  out = subprocess.run([sys.executable, "-c", code, f"--flagfile={tmp_path / 'flags.txt'}"], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == repr(config)


@pytest.mark.parametrize(
  "changes", [*({"algorithm": name} for name in PRESETS), {"algorithm": "dapo", "dynamic_sampling": False, "tis_cap": 2.0}]
)
def test_flagfile_of_resolved_settings_reads_back(changes, tmp_path):
  config = RunConfig(**changes)
  flags.write(config, tmp_path / "flags.txt")
  values = FlagValues()
  flags.define(RunConfig, values)
  values(["program", f"--flagfile={tmp_path / 'flags.txt'}"])
  assert flags.read(RunConfig, values) == config


def test_the_page_names_the_flags_that_may_differ_on_resume():
  page = (pathlib.Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
  (named,) = re.findall(r"how long and how often:(.*?)\. Any other", page, re.DOTALL)
  assert set(re.findall(r"`(\w+)`", named)) == RUNTIME_FLAGS - {"workdir", "override"}


def test_every_field_has_a_help_text():
  assert all(len(field.metadata["help"]) > 5 for field in dataclasses.fields(RunConfig))
