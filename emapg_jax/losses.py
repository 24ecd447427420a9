"""Policy losses and the critic's loss per token, and their aggregation to (sum, weight).

Losses are unreduced, one number per token, and are to be minimised. What lies at masked positions must be replaced by `masking.clean`
before it gets here; only `gspo` and `aggregate` know the mask.

A `PolicyLoss` is any of them in one call shape, `(logp, old_logp, advantages, mask) -> (loss, PolicyAux)`, with its bounds bound:

  ppo_clip   token_level(functools.partial(ppo_clip, clip_low=0.2, clip_high=0.28))
  cispo      token_level(functools.partial(cispo, clip_low=1.0, clip_high=4.0))
  gspo       functools.partial(gspo, clip_low=3e-4, clip_high=4e-4)
  reinforce  reinforce_with_aux
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from emapg_jax import masking
from emapg_jax.types import Weighted

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")


class PolicyAux(NamedTuple):
  """What a policy loss did with each token; carries no gradient. A token of advantage 0 counts as not clipped."""

  ratio: jax.Array  # [...], exp(logp − old_logp), for gspo that of the sequence; before any bound
  clipped_low: jax.Array  # bool [...], 1 − clip_low stands in for the ratio
  clipped_high: jax.Array  # bool [...], 1 + clip_high stands in for the ratio
  dual_clipped: jax.Array  # bool [...], dual_clip stands in for the ratio


TokenLoss = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, PolicyAux]]  # (logp, old_logp, advantages)
PolicyLoss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, PolicyAux]]  # (logp, old_logp, advantages, mask)


def token_level(loss: TokenLoss) -> PolicyLoss:
  """The call shape of a PolicyLoss for a loss that sees each token alone, and so has no use for the mask."""

  def policy_loss(logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, mask: jax.Array) -> tuple[jax.Array, PolicyAux]:
    del mask
    return loss(logp, old_logp, advantages)

  return policy_loss


def ppo_clip(
  logp: jax.Array,
  old_logp: jax.Array,
  advantages: jax.Array,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  dual_clip: float | None = None,
) -> tuple[jax.Array, PolicyAux]:
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
    The loss [...] and PolicyAux.

  Raises:
    ValueError: a bound out of its range.

  Schulman et al. (PPO), arXiv 1707.06347, section 3. Two bounds: Yu et al. (DAPO), arXiv 2503.14476, section 3.1. Dual clip: Ye et al.,
  "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv 1912.09729, the section on dual-clip PPO.
  """
  _check_bounds("ppo_clip", clip_low, clip_high)
  _check_shapes("ppo_clip", logp=logp, old_logp=old_logp, advantages=advantages)
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(
      f"ppo_clip got dual_clip={dual_clip}, which must lie above 1: it is the largest ratio that a negative advantage is multiplied by. "
      "Use 3, or None to switch it off."
    )
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
  return -advantages * bounded, PolicyAux(ratio, clipped_low, clipped_high, dual_clipped)


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


def reinforce_with_aux(logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, mask: jax.Array) -> tuple[jax.Array, PolicyAux]:
  """`reinforce` in the call shape of a PolicyLoss: old_logp is read for the reported ratio alone, the mask not at all."""
  del mask
  ratio = lax.stop_gradient(jnp.exp(logp - old_logp))
  never = jnp.zeros_like(ratio, bool)
  return reinforce(logp, advantages), PolicyAux(ratio, never, never, never)


def cispo(logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float) -> tuple[jax.Array, PolicyAux]:
  """The loss of CISPO: `reinforce` with a bounded importance weight, so that no token loses its gradient.

    ratio = exp(logp − old_logp)
    loss = −sg(clip(ratio, 1 − clip_low, 1 + clip_high)) · advantages · logp

  Value: no estimate of anything, like that of `reinforce`; only its gradient has a meaning. Exactly 0 at advantage 0. Gradient:
  `−clip(ratio, …) · advantages · ∇logp` for every token, past a bound too, of either sign, and even where the ratio overflows. None passes
  through the weight, and none reaches old_logp and advantages.

  Args:
    logp: [...], nats, current policy.
    old_logp: [...], nats, the policy at the start of the RL step.
    advantages: [...].
    clip_low: distance of the lower bound from 1, in [0, 1]; 1 for no lower bound, as in the paper's runs.
    clip_high: distance of the upper bound from 1, at least 0.

  Returns:
    The loss [...] and PolicyAux, whose clipped_* say that the weight was bounded.

  Raises:
    ValueError: a bound out of its range.

  MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv 2506.13585, section 3.1.
  """
  _check_bounds("cispo", clip_low, clip_high)
  _check_shapes("cispo", logp=logp, old_logp=old_logp, advantages=advantages)
  old_logp, advantages = lax.stop_gradient((old_logp, advantages))
  ratio = lax.stop_gradient(jnp.exp(logp - old_logp))
  active = advantages != 0
  clipped_low = active & (ratio < 1 - clip_low)
  clipped_high = active & (ratio > 1 + clip_high)
  # By where, and not jnp.clip, so that a token of advantage 0 has weight 0 whatever its ratio: 0 times infinity is NaN.
  weight = jnp.where(clipped_low, 1 - clip_low, jnp.where(clipped_high, 1 + clip_high, jnp.where(active, ratio, 0)))
  loss = -weight * advantages * jnp.where(active, logp, 0)
  return loss, PolicyAux(ratio, clipped_low, clipped_high, jnp.zeros_like(clipped_low))


def gspo(
  logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, mask: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, PolicyAux]:
  """The loss of GSPO-token: the clipped surrogate at the ratio of the whole sequence, a geometric mean over its trained tokens.

    s = exp(Σ_t mask · (logp − old_logp) / Σ_t mask)                one per row
    s_t = sg(s) · exp(logp − sg(logp))                              of value s, of gradient s · ∇logp_t
    loss = −min(advantages · s_t, advantages · clip(s_t, 1 − clip_low, 1 + clip_high))

  Value: that of `ppo_clip` at ratio s; 0 at masked positions and at advantage 0. Gradient: `−advantages · s · ∇logp` up to and at a
  bound, exactly 0 past it, even where s overflows, and at masked positions, whatever they hold. None reaches old_logp and advantages.
  With one advantage per row, the mean of a row's gradients is that of its sequence-level surrogate `−min(A · s, A · clip(s, …))`, so the
  paper's objective is the aggregation `sequence_mean`.

  Args:
    logp: [..., T], nats, current policy.
    old_logp: [..., T], nats, the policy at the start of the RL step.
    advantages: [..., T].
    mask: bool [..., T], True where the token is trained on; a row is one sequence.
    clip_low: distance of the lower bound from 1, in [0, 1]. A sequence's ratio stays much closer to 1 than a token's: 3e-4 in the paper.
    clip_high: distance of the upper bound from 1, at least 0; 4e-4 in the paper.

  Returns:
    The loss [..., T] and PolicyAux, whose ratio is s, 1 in a row without trained tokens.

  Raises:
    ValueError: a bound out of its range, or arrays that differ in shape.

  Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071, section 4.3; its settings: section 5.1.
  """
  _check_bounds("gspo", clip_low, clip_high)
  logp, old_logp, advantages = masking.clean(mask, logp, old_logp, advantages)
  current = lax.stop_gradient(logp)
  mean = _row_mean(current - lax.stop_gradient(old_logp), mask)
  # ppo_clip's log-ratio: the difference has value 0 and the gradient of the token.
  log_ratio = mean[..., None].astype(logp.dtype) + (logp - current)
  return ppo_clip(log_ratio, jnp.zeros_like(log_ratio), advantages, clip_low, clip_high)


def truncated_weight(old_logp: jax.Array, sampling_logp: jax.Array, cap: float) -> tuple[jax.Array, jax.Array]:
  """Truncated importance sampling between two computations of one policy: the trainer's and the sampler's.

    weight = sg min(exp(old_logp − sampling_logp), cap)

  Multiplies the policy loss of a token. Value: in [0, cap], cap where the ratio overflows. Gradient: none.

  Args:
    old_logp: [...], nats, the policy at the start of the RL step as the trainer scores it.
    sampling_logp: [...], nats, of the distribution the token was drawn from.
    cap: the largest weight, at least 1.

  Returns:
    The weight [...], and where it was capped, bool [...].

  Raises:
    ValueError: a cap below 1.

  Ionides, "Truncated Importance Sampling", 2008; for sampler and trainer that disagree: Yao et al., "Your Efficient RL Framework Secretly
  Brings You Off-Policy RL Training", 2025.
  """
  _check_shapes("truncated_weight", old_logp=old_logp, sampling_logp=sampling_logp)
  if not cap >= 1:
    raise ValueError(f"truncated_weight got cap={cap}, which must be at least 1, or tokens on which both agree lose weight, too.")
  log_ratio = lax.stop_gradient(old_logp - sampling_logp)
  ratio = jnp.exp(log_ratio)
  return jnp.minimum(ratio, cap), ratio > cap


def within_sequence_ratio(old_logp: jax.Array, sampling_logp: jax.Array, mask: jax.Array, bound: float) -> jax.Array:
  """Which sequences the trainer and the sampler agree on: `1 / bound ≤ exp(mean_t(old_logp − sampling_logp)) ≤ bound`.

  A sequence beyond it is to be left out of the loss as a whole: numerator and denominator (but that of fixed_length counts all real rows).

  Args:
    old_logp: [..., T], nats, the policy at the start of the RL step as the trainer scores it.
    sampling_logp: [..., T], nats, of the distribution the token was drawn from.
    mask: bool [..., T], True where the token is trained on; the mean is over these.
    bound: the largest geometric mean of the ratio, at least 1.

  Returns:
    bool [...]; True in a row without trained tokens.

  Raises:
    ValueError: a bound below 1.
  """
  _check_shapes("within_sequence_ratio", old_logp=old_logp, sampling_logp=sampling_logp, mask=mask)
  if not bound >= 1:
    raise ValueError(f"within_sequence_ratio got bound={bound}, which must be at least 1: below it, nothing lies in [1 / bound, bound].")
  mean = _row_mean(lax.stop_gradient(old_logp - sampling_logp), mask)
  return jnp.abs(mean) <= math.log(bound)


def value_loss(values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float | None) -> tuple[jax.Array, jax.Array]:
  """The squared error of the critic, with a bound on how far a value can move from the one at the start of the RL step.

    bounded = old_values + clip(values − old_values, −clip, clip)
    loss = ½ · max((values − returns)², (bounded − returns)²)

  Value: `½ (values − returns)²`, with the value replaced by the bound it has passed where that is the farther one from the return, as it is
  when the value has moved towards the return. Gradient: `(values − returns) · ∇values` up to and at a bound, and past it where the value
  has moved away from the return or the two errors are equal; exactly 0 where the bound stands in. None reaches old_values and returns.

  Args:
    values: [...], the critic, which carries the gradient.
    old_values: [...], the critic at the start of the RL step; not read when clip is None.
    returns: [...], its target.
    clip: the largest move that still pays, in units of the return, above 0; None for the plain squared error.

  Returns:
    The loss [...], and bool [...], True where the bound stands in for the value.

  Raises:
    ValueError: a clip out of its range.

  Schulman et al. (PPO), arXiv 1707.06347, equation 9, whose squared error has neither ½ nor bound. The bound: Engstrom et al.,
  "Implementation Matters in Deep Policy Gradients: A Case Study on PPO and TRPO", arXiv 2005.12729, the item on value function clipping.
  """
  if clip is not None and not clip > 0:
    raise ValueError(
      f"value_loss got clip={clip}, which must lie above 0: it is how far a value may move from the old one before its gradient ends. "
      "Use a fraction of the range of the returns, or None to switch it off."
    )
  _check_shapes("value_loss", values=values, old_values=old_values, returns=returns)
  old_values, returns = lax.stop_gradient((old_values, returns))
  errors = values - returns
  if clip is None:
    return 0.5 * jnp.square(errors), jnp.zeros_like(errors, bool)
  low, high = old_values - clip, old_values + clip
  bounded = jnp.where(values > high, high, jnp.where(values < low, low, lax.stop_gradient(values)))
  # Decided by comparison, not by max and clip: those share the gradient between their arguments where the two are equal.
  clipped = jnp.abs(bounded - returns) > jnp.abs(errors)
  # No comparison holds with NaN, so that a broken old value would go unseen.
  errors = jnp.where(clipped, bounded - returns, errors) + jnp.where(jnp.isnan(old_values), old_values, 0)
  return 0.5 * jnp.square(errors), clipped


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
    _check_shapes("aggregate", rows_of_mask=mask[..., 0], real=real)
    return Weighted(masking.masked_sum(per_token, mask), masking.masked_count(real) * max_new_tokens)
  if mode == "sequence_sum":
    return masking.masked_mean(masking.masked_sum(per_token, mask, axis=-1), jnp.any(mask, axis=-1))
  if mode == "sequence_mean":
    return masking.masked_mean(_row_mean(per_token, mask), jnp.any(mask, axis=-1))
  raise ValueError(f"Aggregation {mode!r} is unknown. Use one of {', '.join(AGGREGATIONS)}.")


def _check_shapes(name, **arrays):
  shapes = {key: jnp.shape(x) for key, x in arrays.items()}
  if len(set(shapes.values())) > 1:
    given = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
    raise ValueError(f"{name} got {given}: they must be of one shape. Broadcast them explicitly, so that no axis is taken for another.")


def _row_mean(x, mask):
  """The mean over what the mask keeps of each row; 0 in a row without any."""
  rows = masking.masked_sum(x, mask, axis=-1)
  return rows / jnp.maximum(masking.masked_count(mask, axis=-1), 1).astype(rows.dtype)


def _check_bounds(name, clip_low, clip_high):
  if not 0 <= clip_low <= 1 or not clip_high >= 0:
    raise ValueError(
      f"{name} got clip_low={clip_low} and clip_high={clip_high}, which are distances from 1: clip_low must lie in [0, 1] and "
      "clip_high must be at least 0. The ratio is kept in [1 − clip_low, 1 + clip_high]."
    )
