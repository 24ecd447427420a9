"""Per-token credit within a response: from rewards to returns and advantages. jax, pure.

All arrays are [B, T]; entry t belongs to response token t, and the mask is True where that token is trained on. Masked positions, text of
the environment in the middle of a response and padding at its end, are skipped: discount and GAE step once per trainable token, so that the
"next" token below is the next trainable one of the row, and a masked span does not end the episode. Values and rewards at masked positions
have no effect, whatever they hold, NaN and infinity included, and results there are exactly 0.

Results have the dtype of the float inputs, which must agree. No gradient reaches any argument: credit is a constant of the policy loss.
"""

import numbers

import jax
import jax.numpy as jnp
from jax import lax

from emapg_jax import masking
from emapg_jax.types import Hyper, RolloutBatch


def at_last_token(rewards: jax.Array, mask: jax.Array) -> jax.Array:
  """Puts the reward of a response at its last trained token.

    rewards_t = rewards  where t is the largest t with mask_t, else 0

  Value: as above; a row without a trained token writes nothing, even if its reward is NaN. Gradient: none.

  Args:
    rewards: [B], one per response.
    mask: bool [B, T], True where the token is trained on.

  Returns:
    [B, T].

  Raises:
    ValueError: rewards that are no float per row of the mask.
  """
  rewards, mask = jnp.asarray(rewards), jnp.asarray(mask).astype(bool)
  if mask.ndim != 2 or rewards.shape != mask.shape[:1] or not jnp.issubdtype(rewards.dtype, jnp.floating):
    raise ValueError(
      f"at_last_token got rewards of shape {rewards.shape} and dtype {rewards.dtype} with a mask of shape {mask.shape}: it needs floats "
      "[B], one for each row of a mask [B, T]. Rewards that are per token already go to reward_to_go or gae as they are."
    )
  positions = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
  last = jnp.max(jnp.where(mask, positions, -1), axis=1, initial=-1)  # −1, where no token is, for a row without one
  return jnp.where(positions == last[:, None], lax.stop_gradient(rewards)[:, None], 0)


def reward_to_go(rewards: jax.Array, mask: jax.Array, discount: float | jax.Array) -> jax.Array:
  """The return of each token: its own reward and the discounted ones after it.

    G_t = rewards_t + discount · G_next,  G after the last trainable token 0

  Value: as above at trainable positions, 0 elsewhere; `gae` with gae_lambda 1 and values 0. Gradient: none.

  Args:
    rewards: [B, T].
    mask: bool [B, T], True where the token is trained on.
    discount: a number or traced scalar in [0, 1].

  Returns:
    [B, T].

  Raises:
    ValueError: a number out of its range, or arrays that are not floats of one shape and dtype.
  """
  mask, (rewards,) = _checked("reward_to_go", mask, rewards=rewards)
  _check_fraction("reward_to_go", "discount", discount)
  return _discounted(rewards, jnp.zeros_like(rewards), mask, discount, 1.0)


def gae(
  rewards: jax.Array, values: jax.Array, mask: jax.Array, discount: float | jax.Array, gae_lambda: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimation: an exponentially weighted sum of the TD residuals δ from each token on.

    δ_t = rewards_t + discount · values_next − values_t,   values after the last trainable token 0
    A_t = δ_t + discount · gae_lambda · A_next,            A after the last trainable token 0
    returns_t = A_t + values_t

  Value: as above at trainable positions, 0 elsewhere. gae_lambda 0 is δ; gae_lambda 1 is `reward_to_go − values`, in which the values
  are a mere baseline, and its returns are `reward_to_go`. Gradient: none reaches anything, so that the critic does not train through its
  own target.

  Args:
    rewards: [B, T].
    values: [B, T]; entry t is the critic's estimate of the return from token t on, made before token t is seen.
    mask: bool [B, T], True where the token is trained on.
    discount: γ, a number or traced scalar in [0, 1].
    gae_lambda: λ, a number or traced scalar in [0, 1].

  Returns:
    The advantages [B, T], and the returns [B, T], which are the critic's target.

  Raises:
    ValueError: a number out of its range, or arrays that are not floats of one shape and dtype.

  Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438, section 3.
  """
  mask, (rewards, values) = _checked("gae", mask, rewards=rewards, values=values)
  _check_fraction("gae", "discount", discount)
  _check_fraction("gae", "gae_lambda", gae_lambda)
  advantages = _discounted(rewards, values, mask, discount, gae_lambda)
  return advantages, advantages + values


def kl_to_go(own: jax.Array, later: jax.Array, mask: jax.Array) -> jax.Array:
  """The reward-to-go of the KL of whole responses, to be subtracted, times its coefficient, from the advantages.

    G_t = own_t + Σ_{j>t} mask_j · later_j

  The gradient of KL(π‖ρ) over responses y is `E[Σ_t G_t · ∇log π(y_t)]` if `own` is k1, the log-ratio of the token drawn, and `later` is,
  at each position, the value of any estimator of the reverse KL that is unbiased in value.

  own must be k1. Of the KL at t itself, `E_{y_t}[k1 · ∇log π(y_t)]` is the gradient; with the value of another estimator in its place it is
  not. An exact or top-k value depends on y_t not at all or little, and the expectation of a constant times ∇log π(y_t) is 0; with k3 it is
  ∇KL(π‖ρ) − ∇KL(ρ‖π), which vanishes to first order. At j > t the value only stands for its expectation given the tokens before j.

  There is no discount, which is 1: the KL of a response is the plain sum over its tokens, and a discounted one is not its gradient.

  Value: as above at trainable positions, 0 elsewhere. Gradient: none; it is made by what G_t multiplies.

  Args:
    own: [B, T], nats, k1.
    later: [B, T], nats, values of an estimator.
    mask: bool [B, T], True where the token is trained on.

  Returns:
    [B, T], nats.

  Raises:
    ValueError: arrays that are not floats of one shape and dtype.
  """
  mask, (own, later) = _checked("kl_to_go", mask, own=own, later=later)

  def step(after, now):
    own, later, keep = now
    return after + later, jnp.where(keep, own + after, 0)

  return _backwards(step, jnp.zeros(own.shape[:1], own.dtype), (own, later, mask))


def response_advantages(batch: RolloutBatch, own: jax.Array, later: jax.Array, hyper: Hyper) -> tuple[jax.Array, None]:
  """Advantages of whole responses, with the KL in the reward: `advantages_t − kl_coef · kl_to_go_t`; no returns.

  Value: 0 at masked positions. Gradient: none.

  Args:
    batch: advantages and mask are read.
    own: [B, T], nats, and later: [B, T], as for `kl_to_go`; zeros where the KL is not in the reward.
    hyper: kl_coef is read.
  """
  return _less_kl(batch.advantages, kl_to_go(own, later, batch.mask), batch, hyper), None


def reward_to_go_advantages(
  batch: RolloutBatch, own: jax.Array, later: jax.Array, hyper: Hyper, *, discount: float
) -> tuple[jax.Array, None]:
  """The advantages of REINFORCE: `reward_to_go_t − baseline − kl_coef · kl_to_go_t`, the KL undiscounted; no returns.

  Value: 0 at masked positions; a baseline that depends on earlier RL steps alone changes no expectation. Gradient: none.

  Args:
    batch: rewards and mask are read.
    own: [B, T], nats, and later: [B, T], as for `kl_to_go`; zeros where the KL is not in the reward.
    hyper: kl_coef and baseline are read.
    discount: in [0, 1].

  Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
  """
  returns = reward_to_go(at_last_token(batch.rewards, batch.mask), batch.mask, discount)
  return _less_kl(returns - hyper.baseline, kl_to_go(own, later, batch.mask), batch, hyper), None


def gae_advantages(
  batch: RolloutBatch, own: jax.Array, later: jax.Array, hyper: Hyper, *, discount: float, gae_lambda: float
) -> tuple[jax.Array, jax.Array]:
  """The advantages of PPO with a critic, and its returns: `gae` of the score at the last token and of −kl_coef · later at every token.

    advantages_t = A_t − kl_coef · (own_t − later_t)

  The token's own part of the KL is exchanged for k1; see `kl_to_go` for why. The returns keep `later`: its expectation before the token is
  drawn is the same, and its variance lower.

  Value: both 0 at masked positions. Gradient: none.

  Args:
    batch: rewards, old_values and mask are read.
    own: [B, T], nats, and later: [B, T], as for `kl_to_go`; zeros where the KL is not in the reward.
    hyper: kl_coef is read.
    discount: in [0, 1].
    gae_lambda: in [0, 1].
  """
  rewards = at_last_token(batch.rewards, batch.mask) - hyper.kl_coef * later
  advantages, returns = gae(rewards, batch.old_values, batch.mask, discount, gae_lambda)
  return _less_kl(advantages, own - later, batch, hyper), returns


def _less_kl(advantages, kl, batch, hyper):
  return masking.clean(batch.mask, lax.stop_gradient(advantages - hyper.kl_coef * kl))


def _discounted(rewards, values, mask, discount, gae_lambda):
  discount, gae_lambda = (lax.stop_gradient(jnp.asarray(x, rewards.dtype)) for x in (discount, gae_lambda))

  def step(following, now):
    next_advantage, next_value = following
    reward, value, keep = now
    advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
    return (jnp.where(keep, advantage, next_advantage), jnp.where(keep, value, next_value)), jnp.where(keep, advantage, 0)

  nothing = jnp.zeros(rewards.shape[:1], rewards.dtype)
  return _backwards(step, (nothing, nothing), (rewards, values, mask))


def _backwards(step, following, arrays):
  """Scans [B, T] arrays from the last token to the first; `step` sees one column at a time."""
  return lax.scan(step, following, jax.tree.map(jnp.transpose, arrays), reverse=True)[1].T


def _checked(name, mask, **arrays):
  """The mask as bool, and the arrays with no gradient and with 0 at masked positions."""
  mask, arrays = jnp.asarray(mask).astype(bool), {key: jnp.asarray(x) for key, x in arrays.items()}
  dtypes = {x.dtype for x in arrays.values()}
  if mask.ndim != 2 or any(x.shape != mask.shape for x in arrays.values()):
    shapes = ", ".join(f"{key} {x.shape}" for key, x in arrays.items())
    raise ValueError(f"{name} got {shapes} and a mask of shape {mask.shape}: all must be [B, T]. Broadcast or index them explicitly.")
  if len(dtypes) > 1 or not jnp.issubdtype(*dtypes, jnp.floating):
    given = ", ".join(f"{key} {x.dtype}" for key, x in arrays.items())
    raise ValueError(f"{name} got {given}: its arrays must be floats of one dtype, which is the one of the result. Cast them first.")
  return mask, [masking.clean(mask, lax.stop_gradient(x)) for x in arrays.values()]


def _check_fraction(name, argument, x):
  # Only a number has a value to check while tracing.
  if isinstance(x, numbers.Real) and not 0 <= x <= 1:
    raise ValueError(
      f"{name} got {argument}={x}, which must lie in [0, 1]: beyond it the weight of later tokens grows or alternates in sign. Use 1 to "
      "leave them their whole weight."
    )
