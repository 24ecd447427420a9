"""The settings of a run: one frozen dataclass, checked as a whole before anything is built. Field names are the names of the flags."""

import dataclasses
import difflib
import math
from typing import Any

from emapg_jax import losses

ALGORITHMS = ("grpo",)
SWITCH = ("auto", "on", "off")
DTYPES = ("auto", "float32", "bfloat16")
KL_SAMPLED = ("k1", "k2", "k3", "k3pp", "k4", "k5")
KL_EXACT = ("exact_reverse", "exact_forward")
KL_TOPK = tuple(f"{form}topk_{direction}" for form in ("", "score_", "published_") for direction in ("reverse", "forward"))
KL_ESTIMATORS = KL_SAMPLED + KL_EXACT + KL_TOPK

# Flags that may change when a run is resumed: they decide how, how long and how often, not what is computed.
RUNTIME_FLAGS = frozenset(
  ("workdir", "steps", "mesh", "micro_batch", "grading_workers", "eval_every", "save_every", "keep_last", "samples_logged", "override")
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
  train_data: tuple[str, ...] = _field((), "JSONL or parquet files of {problem, answer}, for task math.")
  eval_data: tuple[str, ...] = _field((), "Like train_data, for evaluation; empty: the task's own, or none.")

  prompts_per_step: int = _field(128, "Prompts in an RL step.")
  group_size: int = _field(8, "Sampled responses per prompt, G.")
  max_prompt_tokens: int = _field(1024, "Longest prompt, in tokens.")
  max_new_tokens: int = _field(1024, "Longest response, in tokens.")
  overlong_prompts: str = _field("drop", "What to do with longer prompts.", ("drop", "error"))
  temperature: float = _field(1.0, "Of sampling, and so of the policy, the old policy and the anchor in every log-probability.")
  chat_template: str = _field("", "Chat template (text or file) instead of the tokenizer's own.")
  box_instruction: bool = _field(True, "Task math: ask for the answer in \\boxed{}. Off for models that do so by themselves.")
  answer_mode: str = _field("boxed", "Task math: where the answer is looked for.", ("boxed", "number"))
  grading_workers: int = _field(0, "Task math: grading processes; 0: one per core, at most 8.")
  grading_seconds: float = _field(5.0, "Task math: time limit of one comparison.")

  algorithm: str = _field("grpo", "Policy gradient.", ALGORITHMS)
  aggregation: str = _field("token_mean", "How per-token losses become one number.", losses.AGGREGATIONS)
  clip_low: float = _field(0.2, "Lower clip ε: the ratio is bounded at 1 − ε.")
  clip_high: float = _field(0.28, "Upper clip ε: the ratio is bounded at 1 + ε.")
  dual_clip: float = _field(0.0, "Largest ratio for negative advantages, above 1; 0: off.")
  mask_truncated: bool = _field(False, "Leave responses that hit max_new_tokens out of the loss (they stay in the group statistics).")

  kl: str = _field("topk_reverse", "KL estimator.", KL_ESTIMATORS)
  kl_topk: int = _field(32, "K, ids with exact treatment; for top-k estimators.")
  kl_topk_ids: str = _field(
    "auto", "Whose top-k: policy, anchor, or auto (policy for reverse, anchor for forward).", ("auto", "policy", "anchor")
  )
  kl_topk_approximate: bool = _field(False, "Find the top-k by approximate search (fast on TPU); the KL stays unbiased.")
  kl_coef: float = _field(0.001, "β, weight of the KL in the loss; 0: no anchor pass.")
  kl_iw_low: float = _field(0.0, "Lower bound of the KL's importance weight; 0: none.")
  kl_iw_high: float = _field(0.0, "Upper bound of the KL's importance weight; 0: none.")
  ema_decay: float = _field(0.95, "η, the weight the anchor keeps; 1: fixed anchor, 0: a copy every period.")
  ema_period: int = _field(10, "RL steps between anchor updates.")

  keep_initial: str = _field("auto", "Log the KL to the initial model: a third copy and one more pass; auto: embedded tasks.", SWITCH)

  learning_rate: float = _field(1e-6, "Peak learning rate of AdamW.")
  lr_warmup_steps: int = _field(0, "RL steps of linear learning-rate warm-up.")
  adam_b1: float = _field(0.9, "AdamW: weight kept of the first moment.")
  adam_b2: float = _field(0.999, "AdamW: weight kept of the second moment.")
  weight_decay: float = _field(0.01, "AdamW: decoupled weight decay; norms and biases don't decay.")
  clip_norm: float = _field(1.0, "Largest global gradient norm.")
  mini_batches: int = _field(2, "Optimizer updates per epoch.")
  micro_batch: int = _field(0, "Rows per device and forward; 0: a whole mini-batch.")
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
  save_every: int = _field(20, "RL steps between checkpoints; 0: never.")
  keep_last: int = _field(2, "Checkpoints kept.")
  samples_logged: int = _field(8, "Completions written to samples.jsonl at each evaluation.")
  mesh: str = _field("data:-1", "Device mesh: AXIS:SIZE of data, fsdp, tensor; -1: what is left.")
  dtype: str = _field("auto", "Of activations and matmuls; auto: float32 on CPU, bfloat16 on accelerators.", DTYPES)
  remat: bool = _field(True, "Recompute each layer's activations in the backward pass: less memory, a third more work.")
  override: tuple[str, ...] = _field((), "Flags that may differ from those of the checkpoint that is resumed.")

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, choices = getattr(self, field.name), field.metadata["choices"]
      if choices and value not in choices:
        near = difflib.get_close_matches(value, choices, 1, cutoff=0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"--{field.name}={value} is unknown.{hint} Use one of {', '.join(choices)}.")
      if isinstance(value, float):
        self._require(field.name, math.isfinite(value), "must be a finite number")
    for name in _POSITIVE:
      self._require(name, getattr(self, name) > 0, "must be above 0")
    for name in _NOT_NEGATIVE:
      self._require(name, getattr(self, name) >= 0, "must be at least 0")
    for name in _FRACTIONS:
      self._require(name, 0 <= getattr(self, name) <= 1, "must lie in [0, 1]")
    for name in ("adam_b1", "adam_b2"):
      self._require(name, getattr(self, name) < 1, "must be below 1, or its moment never moves")
    self._require("seed", self.seed < 2**32, "must be below 2**32: larger ones repeat the draws of smaller ones")
    for name in ("ema_period", "steps", "lr_warmup_steps"):
      self._require(name, getattr(self, name) < 2**31, "must be below 2**31")
    self._require("grading_seconds", self.grading_seconds <= 3600, "must be at most 3600")
    self._check_group()
    self._check_kl()
    self._check_used()

  def _require(self, name: str, holds: bool, text: str) -> None:
    if not holds:
      raise ValueError(f"--{name}={getattr(self, name)} {text}.")

  def _check_group(self) -> None:
    self._require("group_size", self.group_size > 1, "must be at least 2: grpo compares the responses to one prompt")
    self._require("dual_clip", self.dual_clip == 0 or self.dual_clip > 1, "must be above 1, or 0 for off")
    rows = self.prompts_per_step * self.group_size
    if rows % self.mini_batches:
      raise ValueError(
        f"--prompts_per_step={self.prompts_per_step} × --group_size={self.group_size} = {rows} sequences do not divide into "
        f"--mini_batches={self.mini_batches}: choose a divisor of {rows}."
      )

  def _check_kl(self) -> None:
    topk_default = next(f.default for f in dataclasses.fields(self) if f.name == "kl_topk")
    if self.kl not in KL_TOPK and self.kl_topk not in (topk_default, 0):
      raise ValueError(
        f"--kl_topk={self.kl_topk} has no meaning for --kl={self.kl}: leave it out (or set it to 0, where "
        f"a flagfile sets it), or use one of {', '.join(KL_TOPK)}."
      )
    if self.kl_iw_low and self.kl_iw_high and self.kl_iw_low > self.kl_iw_high:
      raise ValueError(f"--kl_iw_low={self.kl_iw_low} lies above --kl_iw_high={self.kl_iw_high}: swap them, or set one to 0 for none.")

  def _check_used(self) -> None:
    for names, used, text in _USED_ONLY_IF:
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
  def uses_anchor(self) -> bool:
    """Whether an anchor is kept: it is read by the KL, or could be evaluated."""
    return self.kl_coef > 0 or self.ema_decay < 1

  @property
  def topk_owner(self) -> str:
    """Whose top-k ids the KL uses: `policy` or `anchor`."""
    if self.kl_topk_ids != "auto":
      return self.kl_topk_ids
    return "anchor" if self.kl.endswith("forward") else "policy"


_POSITIVE = (
  *("steps", "prompts_per_step", "max_prompt_tokens", "max_new_tokens", "temperature", "grading_seconds", "ema_period", "clip_norm"),
  *("mini_batches", "max_bad_steps", "warmup_learning_rate", "warmup_batch", "digits", "hidden_size", "num_layers", "num_heads"),
  *("eval_problems", "keep_last"),
)
_NOT_NEGATIVE = (
  *("seed", "grading_workers", "clip_high", "kl_topk", "kl_coef", "kl_iw_low", "kl_iw_high", "learning_rate", "lr_warmup_steps"),
  *("weight_decay", "micro_batch", "warmup_steps", "eval_every", "save_every", "samples_logged"),
)
_FRACTIONS = ("clip_low", "ema_decay", "adam_b1", "adam_b2", "warmup_accuracy", "demonstration_noise")

# Options that would be ignored are refused: (names, whether they are used, when they are not).
_USED_ONLY_IF = (
  (("train_data", "eval_data", "answer_mode", "box_instruction"), lambda c: c.task == "math", "unless --task=math"),
  (("grading_seconds",), lambda c: c.task == "math", "unless --task=math"),
  (("digits",), lambda c: c.task in ("add", "arithmetic"), "unless --task is add or arithmetic"),
  (("demonstration_noise",), lambda c: c.task == "add", "unless --task=add"),
  (("hidden_size", "num_layers", "num_heads"), lambda c: not c.model_path, "with --model_path, whose config.json says it"),
  (("warmup_accuracy", "warmup_learning_rate", "warmup_batch"), lambda c: c.warmup_steps > 0, "with --warmup_steps=0"),
  (("chat_template",), lambda c: c.model_path, "without --model_path"),
  (("kl_iw_low", "kl_iw_high", "kl_topk_ids", "kl_topk_approximate"), lambda c: c.kl_coef > 0, "with --kl_coef=0"),
  (("kl_topk_ids", "kl_topk_approximate"), lambda c: c.kl in KL_TOPK, "unless --kl is a top-k estimator"),
  (("kl_iw_low", "kl_iw_high"), lambda c: c.kl not in KL_EXACT, "with an exact KL, which has no sampled part"),
)
