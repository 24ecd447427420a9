"""Policy losses per token, and their aggregation to (sum, weight).

Losses are unreduced, one number per token, and are to be minimised. What lies at masked positions must be replaced by `masking.clean`
before it gets here; only `aggregate` knows the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from emapg_jax import masking
from emapg_jax.types import Weighted

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")


class PPOAux(NamedTuple):
  """What the clipped loss did with each token; carries no gradient."""

  ratio: jax.Array  # [...], exp(logp − old_logp), before any bound
  clipped_low: jax.Array  # bool [...], the loss is the constant at 1 − clip_low
  clipped_high: jax.Array  # bool [...], the loss is the constant at 1 + clip_high
  dual_clipped: jax.Array  # bool [...], the loss is the constant at dual_clip


def ppo_clip(
  logp: jax.Array,
  old_logp: jax.Array,
  advantages: jax.Array,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  dual_clip: float | None = None,
) -> tuple[jax.Array, PPOAux]:
  """The clipped surrogate loss of PPO and GRPO, with one bound for each side and an optional third for negative advantages.

    ratio = exp(logp − old_logp)
    loss = −min(advantages · ratio, advantages · clip(ratio, 1 − clip_low, 1 + clip_high))
    loss = min(loss, −advantages · dual_clip)  where advantages < 0 and dual_clip is given

  Value: `−advantages · ratio`, with the ratio replaced by the bound it has passed: above `1 + clip_high` for positive advantages, below
  `1 − clip_low` and above `dual_clip` for negative ones. Gradient: `−advantages · ratio · ∇logp` up to and at a bound, exactly 0 past it,
  even where the ratio overflows. None reaches old_logp and advantages.

  Args:
    logp: [...], nats, current policy.
    old_logp: [...], nats, the policy at the start of the RL step.
    advantages: [...].
    clip_low: distance of the lower bound from 1, in [0, 1].
    clip_high: distance of the upper bound from 1, at least 0.
    dual_clip: largest ratio for negative advantages, above 1; None for no such bound.

  Returns:
    The loss [...] and PPOAux.

  Raises:
    ValueError: a bound out of its range.

  Schulman et al. (PPO), arXiv 1707.06347, section 3. Two bounds: Yu et al. (DAPO), arXiv 2503.14476, section 3.1. Dual clip: Ye et al.,
  "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv 1912.09729, the section on dual-clip PPO.
  """
  _check_bounds(clip_low, clip_high, dual_clip)
  old_logp, advantages = lax.stop_gradient((old_logp, advantages))
  log_ratio = logp - old_logp
  ratio = lax.stop_gradient(jnp.exp(log_ratio))
  positive, negative, idle = advantages > 0, advantages < 0, advantages == 0
  # Decided from the ratio, not by min and clip: those share the gradient between their arguments where the two are equal.
  clipped_low = negative & (ratio < 1 - clip_low)
  clipped_high = positive & (ratio > 1 + clip_high)
  dual_clipped = jnp.zeros_like(negative) if dual_clip is None else negative & (ratio > dual_clip)
  # Before exp, too: past a bound, or at advantage 0, the ratio may be infinite, and 0 times it or its derivative is NaN.
  bounded = jnp.exp(jnp.where(clipped_low | clipped_high | dual_clipped | idle, 0, log_ratio))
  bounded = jnp.where(clipped_low, 1 - clip_low, jnp.where(clipped_high, 1 + clip_high, bounded))
  if dual_clip is not None:
    bounded = jnp.where(dual_clipped, dual_clip, bounded)
  return -advantages * bounded, PPOAux(ratio, clipped_low, clipped_high, dual_clipped)


def reinforce(logp: jax.Array, advantages: jax.Array) -> jax.Array:
  """The score-function loss: `−advantages · logp`.

  Value: no estimate of anything; only its gradient has a meaning. Gradient: `−advantages · ∇logp`; none reaches advantages.

  Args:
    logp: [...], nats, current policy, which must be the one that drew the tokens.
    advantages: [...].

  Returns:
    The loss [...].

  Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
  """
  return -lax.stop_gradient(advantages) * logp


def aggregate(
  per_token: jax.Array,
  mask: jax.Array,
  mode: str,
  real: jax.Array | None = None,
  max_new_tokens: int | None = None,
) -> Weighted:
  """Sums per-token values so that sum / weight, added up over micro-batches and devices, is the mean that `mode` names.

    token_mean     Σ_{b,t} m·x                    / Σ_{b,t} m
    sequence_mean  Σ_b (Σ_t m·x / Σ_t m)          / number of rows with a token
    sequence_sum   Σ_b Σ_t m·x                    / number of rows with a token
    fixed_length   Σ_{b,t} m·x                    / (number of real rows · max_new_tokens)

  where m is the mask. `fixed_length` (Dr. GRPO, arXiv 2503.20783, section 3.2) counts real rows with no token, too; the other modes don't
  see them.

  Value: sum 0 (and weight 0, but for fixed_length) where nothing is kept. Gradient: exactly 0 at masked positions, whatever they hold.

  Args:
    per_token: [B, T].
    mask: bool [B, T], True where the token is trained on.
    mode: one of AGGREGATIONS.
    real: bool [B], False for rows that only fill up the batch; read by fixed_length alone.
    max_new_tokens: the longest possible response; read by fixed_length alone.

  Returns:
    Weighted of two float32 scalars.

  Raises:
    ValueError: an unknown mode, or fixed_length without `real` and a positive `max_new_tokens`.
  """
  if mode == "token_mean":
    return masking.masked_mean(per_token, mask)
  if mode == "fixed_length":
    if real is None or not max_new_tokens or max_new_tokens < 0:
      raise ValueError(
        "Aggregation fixed_length divides by the number of real rows times max_new_tokens, but got "
        f"{'no' if real is None else 'a'} `real` and max_new_tokens={max_new_tokens}. Pass a bool per row and a positive length."
      )
    return Weighted(masking.masked_sum(per_token, mask), masking.masked_count(real) * max_new_tokens)
  rows = masking.masked_sum(per_token, mask, axis=-1)
  lengths = masking.masked_count(mask, axis=-1)
  if mode == "sequence_sum":
    return masking.masked_mean(rows, lengths > 0)
  if mode == "sequence_mean":
    return masking.masked_mean(rows / jnp.maximum(lengths, 1), lengths > 0)
  raise ValueError(f"Aggregation {mode!r} is unknown. Use one of {', '.join(AGGREGATIONS)}.")


def _check_bounds(clip_low, clip_high, dual_clip):
  if not 0 <= clip_low <= 1 or clip_high < 0:
    raise ValueError(
      f"ppo_clip got clip_low={clip_low} and clip_high={clip_high}, which are distances from 1: clip_low must lie in [0, 1] and "
      "clip_high must be at least 0. The ratio is kept in [1 − clip_low, 1 + clip_high]."
    )
  if dual_clip is not None and dual_clip <= 1:
    raise ValueError(
      f"ppo_clip got dual_clip={dual_clip}, which must lie above 1: it is the largest ratio that a negative advantage is multiplied by. "
      "Use 3, or None to switch it off."
    )
