"""The settings of a run: one frozen dataclass, checked as a whole before anything is built. Field names are the names of the flags."""

import dataclasses
import difflib
from typing import Any

import numpy as np

from emapg_jax import losses, optim
from emapg_jax.config_rules import FLOAT32_MAX, FRACTIONS, NOT_NEGATIVE, POSITIVE, USED_ONLY_IF
from emapg_jax.presets import ADVANTAGES, ALGORITHMS, CLIPS, GROUP_ADVANTAGES, KL_ESTIMATORS, KL_IN_REWARD, KL_TOPK

SWITCH = ("auto", "on", "off")
DTYPES = ("auto", "float32", "bfloat16")
BEST_METRICS = ("eval_greedy", "eval_sampled")
# Flags that may change when a run is resumed: they decide how, how long and how often, not what is computed.
RUNTIME_FLAGS = frozenset(
  (
    *("workdir", "steps", "mesh", "micro_batch", "micro_tokens", "rollout_mesh", "rollout_slots", "decode_block", "prefill_chunk"),
    *("eval_every", "save_every", "keep_last", "keep_best", "best_metric", "samples_logged", "profile_steps", "override"),
    *("remat", "anchor_memory", "grading_workers"),
  )
)


def _field(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
  return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything a run depends on."""

  workdir: str = _field("", "Folder of the run; an existing one is resumed. Empty: a new folder under runs/.")
  seed: int = _field(0, "Seed of every random draw.")
  steps: int = _field(100, "RL steps in all, those before a resume included.")
  task: str = _field(
    "math", "add, between (embedded, need no model), arithmetic, math, or module:function that returns a Task of your own."
  )
  model_path: str = _field("", "Hugging Face folder (Llama or Qwen2) to start from. Empty: random weights, for embedded tasks.")
  init_from: str = _field(
    "", "Folder of another run, or one of its checkpoints (RUN/checkpoints/120): start from its policy, with a fresh optimizer, at step 0."
  )
  init_anchor: bool = _field(False, "init_from: take that run's anchor too. Off: the anchor starts as a copy of the policy.")
  train_data: tuple[str, ...] = _field((), "JSONL or parquet files of {problem, answer}, for task math.")
  eval_data: tuple[str, ...] = _field((), "Like train_data, for evaluation; empty: the task's own, or none.")

  prompts_per_step: int = _field(128, "Prompts in an RL step.")
  group_size: int = _field(8, "Sampled responses per prompt, G.")
  max_prompt_tokens: int = _field(1024, "Longest prompt, in tokens.")
  max_new_tokens: int = _field(1024, "Longest response, in tokens.")
  overlong_prompts: str = _field("drop", "What to do with longer prompts.", ("drop", "error"))
  temperature: float = _field(1.0, "Of sampling, and so of the policy, the old policy and the anchor in every log-probability.")
  top_p: float = _field(1.0, "Sample from the smallest set of ids with this mass; below 1 only with truncated_sampling.")
  top_k: int = _field(0, "Sample from this many most likely ids; 0: from all. Above 0 only with truncated_sampling.")
  truncated_sampling: bool = _field(False, "Allow top_p and top_k in training, though ratios and KL assume that every id can be drawn.")
  stop_strings: tuple[str, ...] = _field((), "Texts that end a response and stay in it; with commas between; \\n is a line break.")
  rollout_slots: int = _field(0, "Sequences decoded at a time, on all devices, refilled as they end; 0: an RL step, or what memory holds.")
  decode_block: int = _field(32, "Tokens decoded between looks at ended sequences and stop strings.")
  prefill_chunk: int = _field(512, "Prompt tokens of a sequence prefilled at a time.")
  chat_template: str = _field("", "Chat template (text or file) instead of the tokenizer's own.")
  box_instruction: bool = _field(True, "Task math: ask for the answer in \\boxed{}. Off for models that do so by themselves.")
  answer_mode: str = _field("boxed", "Task math: where the answer is looked for.", ("boxed", "number"))
  grading_workers: int = _field(0, "Task math: grading processes; 0: one per core, at most 8.")
  grading_seconds: float = _field(5.0, "Task math: time limit of one comparison.")

  algorithm: str = _field("grpo", "Preset of the flags below that name it; each has precedence over it.", tuple(ALGORITHMS))
  advantage: str | None = _field(None, "How rewards become advantages. Default: the algorithm's.", ADVANTAGES)
  policy_loss: str | None = _field(None, "Policy loss of a token. Default: the algorithm's.", tuple(CLIPS))
  aggregation: str | None = _field(None, "How per-token losses become one number. Default: the algorithm's.", losses.AGGREGATIONS)
  clip_low: float | None = _field(
    None, "Lower clip ε: the ratio is bounded at 1 − ε. Default: the algorithm's, or that of a policy loss set by hand."
  )
  clip_high: float | None = _field(None, "Upper clip ε: the ratio is bounded at 1 + ε. Default: as that of clip_low is found.")
  mini_batches: int | None = _field(None, "Optimizer updates per epoch. Default: 2; 1 with policy loss reinforce.")
  dynamic_sampling: bool | None = _field(
    None, "Replace groups whose scores are all equal by other prompts, whole groups only. Default: the algorithm's."
  )
  overlong_share: float | None = _field(
    None, "Soft over-long penalty: falls from 0 to −1 over this last share of max_new_tokens; 0: none. Default: the algorithm's."
  )
  max_refills: int = _field(
    4, "Dynamic sampling: batches sampled at most beyond the first; what is missing then is filled up with flat groups."
  )
  dual_clip: float = _field(0.0, "Policy loss ppo_clip: largest ratio for negative advantages, above 1; 0: off.")
  discount: float = _field(1.0, "γ per trained token, for advantages gae and reward_to_go.")
  gae_lambda: float = _field(0.95, "λ of advantage gae.")
  baseline_decay: float = _field(0.9, "Advantage reward_to_go: weight kept by the running mean reward that is subtracted.")
  epochs: int = _field(1, "Passes over the data of an RL step.")
  old_logp: str = _field("trainer", "Old log-probabilities: recomputed by the trainer, or those of the sampler.", ("trainer", "sampler"))
  tis_cap: float = _field(0.0, "Truncated importance sampling: largest weight old/sampled of a token, at least 1; 0: off.")
  tis_sequence_bound: float = _field(
    0.0, "Leave out sequences whose geometric-mean old/sampled ratio lies outside [1/this, this], above 1; 0: off."
  )
  entropy_coef: float = _field(0.0, "Weight of the entropy bonus per token; 0: off.")
  mask_truncated: bool = _field(False, "Leave responses that hit max_new_tokens out of the loss (they stay in the group statistics).")

  kl: str = _field("topk_reverse", "KL estimator.", KL_ESTIMATORS)
  kl_topk: int = _field(32, "K, ids with exact treatment; for top-k estimators.")
  kl_topk_ids: str = _field(
    "auto", "Whose top-k: policy, anchor, or auto (policy for reverse, anchor for forward).", ("auto", "policy", "anchor")
  )
  kl_topk_approximate: bool = _field(False, "Find the top-k by approximate search (fast on TPU); the KL stays unbiased.")
  kl_coef: float = _field(0.001, "β, weight of the KL; 0: no anchor pass. With kl_target, where it starts.")
  kl_placement: str = _field(
    "loss", "KL in the loss (token level), or in the reward (sequence level: k1 at a token, the estimator after it).", ("loss", "reward")
  )
  kl_target: float = _field(0.0, "Adapt kl_coef towards this KL per token, in nats; 0: fixed.")
  kl_gain: float = _field(0.1, "kl_target: largest relative change of kl_coef per RL step is a fifth of this.")
  kl_iw_low: float = _field(0.0, "Lower bound of the KL's importance weight; 0: none.")
  kl_iw_high: float = _field(0.0, "Upper bound of the KL's importance weight; 0: none.")
  ema_decay: float = _field(0.95, "η, the weight the anchor keeps; 1: fixed anchor, 0: a copy every period.")
  ema_period: int = _field(10, "RL steps between anchor updates.")

  keep_initial: str = _field("auto", "Log the KL to the initial model: a third copy and one more pass; auto: embedded tasks.", SWITCH)

  learning_rate: float = _field(1e-6, "Peak learning rate of AdamW.")
  lr_schedule: str = _field("constant", "Learning rate after its warm-up; cosine and linear end at 0.", optim.LR_SCHEDULES)
  lr_unit: str = _field("rl_step", "What lr_warmup_steps and decay_steps count: RL steps or optimizer updates.", ("rl_step", "update"))
  lr_warmup_steps: int = _field(0, "Steps of linear learning-rate warm-up.")
  decay_steps: int = _field(0, "Step at which a cosine or linear schedule ends, the warm-up included.")
  adam_b1: float = _field(0.9, "AdamW: weight kept of the first moment.")
  adam_b2: float = _field(0.999, "AdamW: weight kept of the second moment.")
  adam_mu_dtype: str = _field("float32", "AdamW: what the first moment is stored in.", optim.MU_DTYPES)
  weight_decay: float = _field(0.01, "AdamW: decoupled weight decay; norms and biases don't decay.")
  clip_norm: float = _field(1.0, "Largest global gradient norm.")
  micro_batch: int = _field(0, "Rows per device and forward; 0: a whole mini-batch.")
  micro_tokens: int = _field(
    0, "Tokens per device and forward, padding included: short responses then share a micro-batch. 0: micro_batch rows, all as long."
  )
  shared_prefix: str = _field("auto", "Read the prompt of a group once for all its responses; auto: where that is faster.", SWITCH)
  critic_learning_rate: float = _field(1e-5, "Advantage gae: peak learning rate of the critic, with the schedule of the policy's.")
  critic_weight_decay: float = _field(0.01, "Advantage gae: the critic's decoupled weight decay.")
  critic_clip_norm: float = _field(1.0, "Advantage gae: the critic's largest global gradient norm.")
  value_clip: float = _field(0.2, "Advantage gae: how far a value may move from the old one before its loss stops pulling; 0: no bound.")
  max_bad_steps: int = _field(3, "Stop after this many RL steps in a row without one finite update.")

  warmup_steps: int = _field(0, "Embedded tasks: supervised steps before RL, at most.")
  warmup_accuracy: float = _field(0.0, "Embedded tasks: end the supervised steps at this greedy accuracy; 0: run all of them.")
  warmup_learning_rate: float = _field(3e-3, "Embedded tasks: learning rate of the supervised steps.")
  warmup_batch: int = _field(256, "Embedded tasks: demonstrations per supervised step.")
  demonstration_noise: float = _field(0.0, "Task add: probability that a demonstration token is replaced by a random one.")
  digits: int = _field(2, "Tasks add and arithmetic: digits per operand.")
  hidden_size: int = _field(64, "Width of a random model.")
  num_layers: int = _field(2, "Layers of a random model.")
  num_heads: int = _field(4, "Heads of a random model.")

  eval_every: int = _field(20, "RL steps between evaluations; 0: never.")
  eval_problems: int = _field(2048, "Problems per evaluation, at most.")
  eval_temperature: float | None = _field(None, "Of sampled evaluation, above 0 (greedy evaluation comes beside it). Default: temperature.")
  eval_top_p: float = _field(1.0, "top_p of sampled evaluation.")
  eval_top_k: int = _field(0, "top_k of sampled evaluation; 0: all ids.")
  save_every: int = _field(20, "RL steps between checkpoints; 0: only after Ctrl-C or SIGTERM.")
  keep_last: int = _field(2, "Checkpoints kept.")
  keep_best: int = _field(0, "Checkpoints kept beside them: those of the best evaluations, which are saved even between.")
  best_metric: str = _field("eval_greedy", "keep_best: what is compared; higher is better.", BEST_METRICS)
  samples_logged: int = _field(8, "Completions written to samples.jsonl at each evaluation.")
  mesh: str = _field("data:-1", "Device mesh: AXIS:SIZE of data, fsdp, tensor; -1: what is left.")
  rollout_mesh: str = _field("auto", "The same devices in sampling: data and tensor; auto: tensor as large as memory asks for.")
  dtype: str = _field("auto", "Of activations and matmuls; auto: float32 on CPU, bfloat16 on accelerators.", DTYPES)
  param_dtype: str = _field(
    "float32", "Of the policy's weights; bfloat16 loses updates below 0.2 % of one: nearly all at rates near 1e-6.", optim.MU_DTYPES
  )
  anchor_memory: str = _field("device", "Where the anchor lies; pinned_host: copied to devices when read.", ("device", "pinned_host"))
  remat: str = _field(
    "full", "What of each layer the backward pass computes again; dots: all but products with weights.", ("full", "dots", "none")
  )
  profile_steps: str = _field("", "RL steps to write a profile of, as 3-5 or 3; it goes to profile/ in the workdir.")
  override: tuple[str, ...] = _field((), "Flags that may differ from those of the checkpoint that is resumed.")

  def __post_init__(self):
    self._check_choice("algorithm")
    self._fill_in()
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None:
        self._check_choice(field.name)
      if isinstance(value, float):
        self._require(field.name, abs(value) <= FLOAT32_MAX, "must be a finite number in float32")
    for names, holds, text in (
      (POSITIVE, lambda x: x > 0, "must be above 0"),
      (NOT_NEGATIVE, lambda x: x >= 0, "must be at least 0"),
      (FRACTIONS, lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
    ):
      for name in names:
        self._require(name, getattr(self, name) is None or holds(getattr(self, name)), text)
    for name in ("adam_b1", "adam_b2"):
      self._require(name, np.float32(getattr(self, name)) < 1, "must be below 1 in float32, or its moment never moves")
    self._require("adam_b1", self.adam_mu_dtype == "float32" or self.adam_b1 <= 0.95, "is too slow for a bfloat16 moment: use at most 0.95")
    self._require("seed", self.seed < 2**32, "must be below 2**32: larger ones repeat the draws of smaller ones")
    for name in ("ema_period", "steps", "lr_warmup_steps", "decay_steps"):
      self._require(name, getattr(self, name) < 2**31, "must be below 2**31")
    self._require("grading_seconds", self.grading_seconds <= 3600, "must be at most 3600")
    self._check_rows()
    self._check_sampling()
    self._check_policy()
    self._check_schedule()
    self._check_kl()
    self._check_used()

  def _check_choice(self, name: str) -> None:
    value, choices = getattr(self, name), type(self).__dataclass_fields__[name].metadata["choices"]
    if choices and value not in choices:
      begins = [choice for choice in choices if choice.startswith(str(value).lower())]
      near = begins or difflib.get_close_matches(str(value).lower(), choices, 1, cutoff=0.3)
      hint = f" Did you mean {near[0]!r}?" if near else ""
      raise ValueError(f"--{name}={value} is unknown.{hint} Use one of {', '.join(choices)}.")

  def _fill_in(self) -> None:
    """Replaces None by what the algorithm gives, but for the bounds of another policy loss than its own, and reinforce, which has none."""
    preset = ALGORITHMS[self.algorithm]
    loss = self.policy_loss or preset["policy_loss"]
    if loss != preset["policy_loss"]:
      preset = {name: value for name, value in preset.items() if name not in ("clip_low", "clip_high")}
    values = {"dynamic_sampling": False, "overlong_share": 0.0, "mini_batches": 1 if loss == "reinforce" else 2}
    for name, value in (values | CLIPS.get(loss, {}) | preset).items():
      if getattr(self, name) is None:
        object.__setattr__(self, name, value)

  def _require(self, name: str, holds: bool, text: str) -> None:
    if not holds:
      raise ValueError(f"--{name}={getattr(self, name)} {text}.")

  def _check_rows(self) -> None:
    if self.advantage in GROUP_ADVANTAGES or self.dynamic_sampling:
      why = "dynamic sampling" if self.dynamic_sampling else f"advantage {self.advantage}"
      self._require("group_size", self.group_size > 1, f"must be at least 2: {why} compares the responses to one prompt")
    if self.advantage == "batch_normalized":
      self._require(
        "prompts_per_step", self.rows > 1, f"× --group_size={self.group_size} must be at least 2: batch_normalized compares them"
      )
    if self.rows % self.mini_batches:
      raise ValueError(
        f"--prompts_per_step={self.prompts_per_step} × --group_size={self.group_size} = {self.rows} sequences do not divide into "
        f"--mini_batches={self.mini_batches}: choose a divisor of {self.rows}."
      )

  def _check_sampling(self) -> None:
    for text in self.stop_strings:
      if "\n" in text or text != text.strip():
        raise ValueError(
          f"--stop_strings={text!r} holds a line break, or a space at an end, which no flagfile can: write \\n, or leave it out."
        )
    self._require(
      "rollout_slots", self.rollout_slots <= self.rows, f"exceeds the {self.rows} sequences of an RL step: use at most that many"
    )
    if self.truncated_sampling and not (self.top_k > 0 or self.top_p < 1):
      raise ValueError(
        "--truncated_sampling has no effect with --top_p=1 and --top_k=0, which keep every id: leave it out, or set one of them."
      )
    if not self.truncated_sampling and (self.top_k > 0 or self.top_p < 1):
      raise ValueError(
        f"--top_p={self.top_p} and --top_k={self.top_k} cut what training samples are drawn from, but ratios, the KL and its tail "
        "assume that every id can be drawn. Leave them at 1 and 0, or set --truncated_sampling to cut training samples all the same."
      )
    if self.micro_tokens and self.micro_batch:
      raise ValueError(
        f"--micro_batch={self.micro_batch} and --micro_tokens={self.micro_tokens} both say how much a forward takes: set one of them."
      )

  def _check_policy(self) -> None:
    for name in ("dual_clip", "tis_sequence_bound"):
      self._require(name, getattr(self, name) == 0 or getattr(self, name) > 1, "must be above 1, or 0 for off")
    self._require("tis_cap", self.tis_cap == 0 or self.tis_cap >= 1, "must be at least 1, or 0 for off")
    for name in ("clip_low", "clip_high"):
      if getattr(self, name) is not None and not CLIPS[self.policy_loss]:
        raise ValueError(
          f"--{name}={getattr(self, name)} has no effect with --policy_loss={self.policy_loss}: leave it out (a flagfile's, by a copy)."
        )
    if self.policy_loss == "reinforce" and self.updates > 1:
      raise ValueError(
        f"--mini_batches={self.mini_batches} and --epochs={self.epochs} make {self.updates} updates per RL step, but "
        "--policy_loss=reinforce holds for the policy that drew the tokens only, which is the first update's. Set both to 1, or use "
        "ppo_clip or cispo."
      )

  def _check_schedule(self) -> None:
    if self.lr_schedule == "constant":
      return
    text = (
      f"must exceed --lr_warmup_steps={self.lr_warmup_steps}: --lr_schedule={self.lr_schedule} ends there. Pass the steps of the whole run"
    )
    self._require("decay_steps", self.decay_steps > self.lr_warmup_steps, text)
    count = self.steps * (1 if self.lr_unit == "rl_step" else self.updates)
    if count > self.decay_steps:
      raise ValueError(
        f"--steps={self.steps} makes {count} steps of the learning-rate schedule, which reaches 0 at --decay_steps={self.decay_steps}: "
        "what comes after would train nothing. Raise --decay_steps or lower --steps."
      )

  def _check_kl(self) -> None:
    if self.kl_placement == "reward" and self.kl not in KL_IN_REWARD:
      raise ValueError(
        f"--kl={self.kl} can't be in the reward: what is put there must have the value of the reverse KL. Use one of "
        f"{', '.join(KL_IN_REWARD)}, or --kl_placement=loss."
      )
    self._require("kl_gain", self.kl_gain < 5, "must be below 5, or kl_coef could change its sign")
    topk_default = next(f.default for f in dataclasses.fields(self) if f.name == "kl_topk")
    if self.kl not in KL_TOPK and self.kl_topk not in (topk_default, 0):
      raise ValueError(
        f"--kl_topk={self.kl_topk} has no meaning for --kl={self.kl}: leave it out (or set it to 0, where "
        f"a flagfile sets it), or use one of {', '.join(KL_TOPK)}."
      )
    if self.kl_iw_low and self.kl_iw_high and self.kl_iw_low > self.kl_iw_high:
      raise ValueError(f"--kl_iw_low={self.kl_iw_low} lies above --kl_iw_high={self.kl_iw_high}: swap them, or set one to 0 for none.")

  def _check_used(self) -> None:
    for names, used, text in USED_ONLY_IF:
      if not used(self):
        for name in names:
          default = type(self).__dataclass_fields__[name].default
          if getattr(self, name) != default:
            raise ValueError(f"--{name}={getattr(self, name)} has no effect {text}: leave it out.")
    if "\n" in self.chat_template:
      raise ValueError("--chat_template holds line breaks, which a flagfile can't: write the template to a file and give its path.")

  @property
  def rows(self) -> int:
    """Sequences in an RL step."""
    return self.prompts_per_step * self.group_size

  @property
  def updates(self) -> int:
    """Optimizer updates in an RL step."""
    return self.epochs * self.mini_batches

  @property
  def on_policy(self) -> bool:
    """Whether the policy that is updated is its own old policy."""
    return self.updates == 1 and self.old_logp == "trainer"

  @property
  def kl_in_reward(self) -> bool:
    """Whether the KL is part of the advantages."""
    return self.kl_placement == "reward" and self.kl_coef > 0

  @property
  def uses_critic(self) -> bool:
    """Whether a critic is trained."""
    return self.advantage == "gae"

  @property
  def uses_anchor(self) -> bool:
    """Whether an anchor is kept: it is read by the KL, or could be evaluated."""
    return self.kl_coef > 0 or self.ema_decay < 1

  @property
  def topk_owner(self) -> str:
    """Whose top-k ids the KL uses: `policy` or `anchor`."""
    if self.kl_topk_ids != "auto":
      return self.kl_topk_ids
    return "anchor" if self.kl.endswith("forward") else "policy"
