"""From the flags of the policy gradient to functions: advantage, policy loss, credit of a token, optimizer and its schedule."""

import functools
from collections.abc import Callable

import numpy as np
import optax

from emapg_jax import advantages, credit, losses, optim
from emapg_jax.config import RunConfig
from emapg_jax.step_config import Credit

# One advantage per response, from (rewards, group_ids, valid); the other kinds are made token by token, by `token_credit`.
ROW_ADVANTAGES = {
  "group_normalized": advantages.group_normalized,
  "group_centred": advantages.group_centred,
  "leave_one_out": advantages.leave_one_out,
  "batch_normalized": advantages.batch_normalized,
}


def policy_loss(config: RunConfig) -> losses.PolicyLoss:
  """The loss of `--policy_loss` with its bounds."""
  clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
  return {
    "ppo_clip": losses.token_level(functools.partial(losses.ppo_clip, **clips, dual_clip=config.dual_clip or None)),
    "cispo": losses.token_level(functools.partial(losses.cispo, **clips)),
    "gspo": functools.partial(losses.gspo, **clips),
    "reinforce": losses.reinforce_with_aux,
  }[config.policy_loss]


def token_credit(config: RunConfig) -> Credit | None:
  """How a token's advantage is made from more than that of its response; None: it isn't."""
  if config.advantage == "gae":
    return functools.partial(credit.gae_advantages, discount=config.discount, gae_lambda=config.gae_lambda)
  if config.advantage == "reward_to_go":
    return functools.partial(credit.reward_to_go_advantages, discount=config.discount)
  return credit.response_advantages if config.kl_in_reward else None


def optimizer(config: RunConfig) -> optax.GradientTransformation:
  """AdamW of the policy, and of the critic where there is one."""
  adamw = functools.partial(optim.make_optimizer, b1=config.adam_b1, b2=config.adam_b2, mu_dtype=config.adam_mu_dtype)
  policy = adamw(config.learning_rate, weight_decay=config.weight_decay, clip_norm=config.clip_norm)
  if not config.uses_critic:
    return policy
  value = adamw(config.critic_learning_rate, weight_decay=config.critic_weight_decay, clip_norm=config.critic_clip_norm)
  return optim.with_critic(policy, value)


def lr_scales(config: RunConfig) -> Callable[[int], np.ndarray]:
  """From the number of an RL step, counted from 1, to the learning-rate scale of each of its updates."""
  schedule = optim.lr_schedule(config.lr_schedule, config.lr_warmup_steps, config.decay_steps)
  updates = config.updates

  def scales(step: int) -> np.ndarray:
    if config.lr_unit == "rl_step":
      return np.full(updates, schedule(step), np.float32)
    return np.asarray([schedule((step - 1) * updates + i) for i in range(1, updates + 1)], np.float32)

  return scales
