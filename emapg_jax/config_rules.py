"""Bounds of single settings, and which settings are read only beside others; `RunConfig` refuses what breaks them."""

import numpy as np

from emapg_jax.presets import KL_EXACT, KL_TOPK

FLOAT32_MAX = float(np.finfo(np.float32).max)
POSITIVE = (
  *("group_size", "epochs", "kl_gain", "critic_clip_norm", "max_refills", "steps", "prompts_per_step", "max_prompt_tokens"),
  *("max_new_tokens", "temperature", "grading_seconds", "ema_period", "clip_norm", "decode_block", "prefill_chunk", "eval_temperature"),
  *("mini_batches", "max_bad_steps", "warmup_learning_rate", "warmup_batch", "digits", "hidden_size", "num_layers", "num_heads"),
  *("eval_problems", "keep_last", "top_p", "eval_top_p"),
)
NOT_NEGATIVE = (
  *("dual_clip", "tis_cap", "tis_sequence_bound", "kl_target", "decay_steps", "critic_learning_rate", "critic_weight_decay", "value_clip"),
  *("seed", "grading_workers", "clip_high", "kl_topk", "kl_coef", "kl_iw_low", "kl_iw_high", "learning_rate", "lr_warmup_steps"),
  *("weight_decay", "micro_batch", "warmup_steps", "eval_every", "save_every", "keep_best", "samples_logged"),
  *("top_k", "eval_top_k", "rollout_slots", "micro_tokens"),
)
FRACTIONS = (
  *("overlong_share", "discount", "gae_lambda", "baseline_decay"),
  *("top_p", "eval_top_p", "clip_low", "ema_decay", "adam_b1", "adam_b2", "warmup_accuracy", "demonstration_noise"),
)

# Options that would be ignored are refused: (names, whether they are used, when they are not).
USED_ONLY_IF = (
  (("train_data", "eval_data", "answer_mode", "box_instruction"), lambda c: c.task == "math", "unless --task=math"),
  (("grading_seconds",), lambda c: c.task == "math", "unless --task=math"),
  (("digits",), lambda c: c.task in ("add", "arithmetic"), "unless --task is add or arithmetic"),
  (("demonstration_noise",), lambda c: c.task == "add", "unless --task=add"),
  (("hidden_size", "num_layers", "num_heads"), lambda c: not c.model_path, "with --model_path, whose config.json says it"),
  (("warmup_accuracy", "warmup_learning_rate", "warmup_batch"), lambda c: c.warmup_steps > 0, "with --warmup_steps=0"),
  (
    ("warmup_steps",),
    lambda c: not c.init_from,
    "with --init_from, whose weights are where the run starts (after a flagfile that sets it add --warmup_steps=0 --warmup_accuracy=0)",
  ),
  (("init_anchor",), lambda c: c.init_from, "without --init_from"),
  (("init_anchor",), lambda c: c.uses_anchor, "without an anchor (--kl_coef=0 and --ema_decay=1)"),
  (("keep_best",), lambda c: c.eval_every > 0 and c.save_every > 0, "with --eval_every=0 or --save_every=0"),
  (("best_metric",), lambda c: c.keep_best > 0, "with --keep_best=0"),
  (("chat_template",), lambda c: c.model_path, "without --model_path"),
  (("eval_temperature", "eval_top_p", "eval_top_k"), lambda c: c.eval_every > 0, "with --eval_every=0"),
  (("dual_clip",), lambda c: c.policy_loss == "ppo_clip", "unless --policy_loss=ppo_clip"),
  (("dual_clip",), lambda c: not c.on_policy, "with one update per RL step, in which every ratio is 1"),
  (("value_clip",), lambda c: c.updates > 1, "with one update per RL step, before which no value has moved"),
  (("old_logp",), lambda c: c.policy_loss != "reinforce", "with --policy_loss=reinforce, which reads no old log-probabilities"),
  (("tis_cap", "tis_sequence_bound"), lambda c: c.old_logp == "trainer", "with --old_logp=sampler, which leaves nothing to correct"),
  (("max_refills",), lambda c: c.dynamic_sampling, "without --dynamic_sampling"),
  (("discount",), lambda c: c.advantage in ("gae", "reward_to_go"), "unless --advantage is gae or reward_to_go"),
  (("baseline_decay",), lambda c: c.advantage == "reward_to_go", "unless --advantage=reward_to_go"),
  (("gae_lambda", "value_clip", "critic_learning_rate"), lambda c: c.uses_critic, "unless --advantage=gae"),
  (("critic_weight_decay", "critic_clip_norm"), lambda c: c.uses_critic, "unless --advantage=gae"),
  (("lr_unit",), lambda c: c.lr_warmup_steps or c.decay_steps, "without --lr_warmup_steps or --decay_steps"),
  (("decay_steps",), lambda c: c.lr_schedule != "constant", "with --lr_schedule=constant"),
  (("kl_iw_low", "kl_iw_high", "kl_topk_ids", "kl_topk_approximate"), lambda c: c.kl_coef > 0, "with --kl_coef=0"),
  (("kl_iw_low", "kl_iw_high"), lambda c: not (c.tis_cap and (c.on_policy or c.kl_in_reward)), "with --tis_cap here: every weight is 1"),
  (("kl_placement", "kl_target"), lambda c: c.kl_coef > 0, "with --kl_coef=0"),
  (("anchor_memory",), lambda c: c.uses_anchor, "without an anchor (--kl_coef=0 and --ema_decay=1)"),
  (("kl_gain",), lambda c: c.kl_target > 0, "without --kl_target"),
  (("kl_topk_ids", "kl_topk_approximate"), lambda c: c.kl in KL_TOPK, "unless --kl is a top-k estimator"),
  (("kl_iw_low", "kl_iw_high"), lambda c: c.kl not in KL_EXACT, "with an exact KL, which has no sampled part"),
)
