"""What `--algorithm`, `--kl` and their like may be, and what an algorithm stands for."""

GROUP_ADVANTAGES = ("group_normalized", "group_centred", "leave_one_out")
ADVANTAGES = (*GROUP_ADVANTAGES, "batch_normalized", "reward_to_go", "gae")
# Bounds of each policy loss, unless the algorithm has its own.
CLIPS = {
  "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
  "cispo": {"clip_low": 1.0, "clip_high": 4.0},
  "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
  "reinforce": {},
}
# What `--algorithm` stands for: never the anchor or the KL. Each value gives way to its own flag.
ALGORITHMS = {
  "grpo": {"advantage": "group_normalized", "policy_loss": "ppo_clip", "aggregation": "token_mean"},
  "dr_grpo": {"advantage": "group_centred", "policy_loss": "ppo_clip", "aggregation": "fixed_length", "clip_high": 0.2},
  "dapo": {
    "advantage": "group_normalized",
    "policy_loss": "ppo_clip",
    "aggregation": "token_mean",
    "dynamic_sampling": True,
    "overlong_share": 0.2,
  },
  "rloo": {"advantage": "leave_one_out", "policy_loss": "reinforce", "aggregation": "sequence_sum"},
  "reinforce": {"advantage": "reward_to_go", "policy_loss": "reinforce", "aggregation": "sequence_sum"},
  "ppo": {"advantage": "gae", "policy_loss": "ppo_clip", "aggregation": "token_mean", "clip_high": 0.2},
  "cispo": {"advantage": "group_normalized", "policy_loss": "cispo", "aggregation": "token_mean"},
  "gspo": {"advantage": "group_normalized", "policy_loss": "gspo", "aggregation": "sequence_mean"},
}
KL_SAMPLED = ("k1", "k2", "k3", "k3pp", "k4", "k5")
KL_EXACT = ("exact_reverse", "exact_forward")
KL_TOPK = tuple(f"{form}topk_{direction}" for form in ("", "score_", "published_") for direction in ("reverse", "forward"))
KL_ESTIMATORS = KL_SAMPLED + KL_EXACT + KL_TOPK
# Unbiased in the value of the reverse KL, which the KL in the reward is made of.
KL_IN_REWARD = tuple(name for name in KL_ESTIMATORS if not name.endswith("forward") and name not in ("k2", "k5"))
