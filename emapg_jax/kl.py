"""Token-level KL estimators: pure functions, per token, unreduced, batched over leading axes.

Notation, at one position with vocabulary V:
  π       the policy, which carries the gradient; `logp` is its log-probability of the sampled token p.
  ρ       the anchor; `ref_logp`. No `ref_*` argument ever receives a gradient, even if it was traced through the policy.
  μ       the distribution p was really drawn from; `sampling_logp`.
  q       a set of K token ids that does not depend on p; `logp_topk` and `ref_logp_topk` are the log-probabilities of its members,
          `log_tail` and `ref_log_tail` the log of the mass outside it (a logsumexp over the rest of the vocabulary, −inf when K = V),
          `in_topk` says whether p ∈ q.
  sg      stop-gradient.
  u = logp − ref_logp;  w = e⁻ᵘ;  r = exp(logp − sg logp), of value 1 and gradient ∇logp;  f(x) = eˣ − 1 − x.
  "reverse" is KL(π‖ρ), "forward" is KL(ρ‖π).

Shapes and units: per-token arguments are floats [...], in nats, of logits divided by the rollout temperature and normalised over the full
vocabulary; `*_topk` arguments are [..., K], logits are [..., V], `in_topk` is bool [...]. Results are [...], in nats. float32 is enough.

Expectations below are over p ~ π. If p came from another μ of full support, multiply a sampled estimator, or the `tail` of a top-k one, by
`s = importance_weight(logp, sampling_logp)`; then they hold for p ~ μ. The `head` of a top-k estimator is exact and is never weighted.

`max_log_ratio` (None: off) bounds the log-ratio of the sampled token: beyond it the value is the one at the bound and the gradient is 0.
Zero probabilities: 0·log 0 = 0; mass where the other distribution has none is +inf, never NaN, and adds nothing to the gradient of π there.

Sources: Zhang and Ba, "EMA Policy Gradient", arXiv 2602.04417 (k3pp, k4, k5, top-k);
J. Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3).
"""

import jax
import jax.numpy as jnp
from jax import lax

from emapg_jax.topk_kl import (
  clamp,
  excess,
  forward_score_term,
  log_ratio,
  log_unit,
  outcome_term,
  published_topk_forward_kl,
  published_topk_reverse_kl,
  reverse_score_term,
  score_topk_forward_kl,
  score_topk_reverse_kl,
  topk_forward_kl,
  topk_reverse_kl,
  truncated_forward_kl,
  truncated_reverse_kl,
)

__all__ = [
  "exact_forward_kl",
  "exact_reverse_kl",
  "importance_weight",
  "k1",
  "k2",
  "k3",
  "k3pp",
  "k4",
  "k5",
  "published_topk_forward_kl",
  "published_topk_reverse_kl",
  "score_topk_forward_kl",
  "score_topk_reverse_kl",
  "topk_forward_kl",
  "topk_reverse_kl",
  "truncated_forward_kl",
  "truncated_reverse_kl",
]

Array = jax.Array


def k1(logp: Array, ref_logp: Array) -> Array:
  """The log-ratio: a signed value, and no gradient on average.

  u
  Value: expectation KL(π‖ρ); signed, never clamped.
  Gradient: expectation 0: as a loss it does nothing but add variance.
  """
  return log_ratio(logp, ref_logp)


def k2(logp: Array, ref_logp: Array) -> Array:
  """Half the squared log-ratio: a biased value with the gradient of the reverse KL.

  u²/2
  Value: biased; equal to KL(π‖ρ) to second order only. Never clamped.
  Gradient: expectation ∇KL(π‖ρ).
  """
  return 0.5 * jnp.square(log_ratio(logp, ref_logp))


def k3(logp: Array, ref_logp: Array, *, max_log_ratio: float | None = 20.0) -> Array:
  """The reverse KL in value, the forward KL in gradient.

  w − 1 − log w = f(−u)
  Value: expectation KL(π‖ρ); ≥ 0.
  Gradient: expectation ∇KL(ρ‖π), NOT the gradient of the value.
  """
  u, _ = clamp(log_ratio(logp, ref_logp), max_log_ratio)
  return excess(-u)


def k3pp(logp: Array, ref_logp: Array, *, max_log_ratio: float | None = 20.0) -> Array:
  """K3++: the reverse KL in value and gradient, with the variance of k3.

  r·(w − 1 − log w) = r·f(−u), gradient through both factors
  Value: expectation KL(π‖ρ); ≥ 0.
  Gradient: expectation ∇KL(π‖ρ).
  """
  u, beyond = clamp(log_ratio(logp, ref_logp), max_log_ratio)
  return jnp.exp(log_unit(logp, beyond)) * excess(-u)


def k4(logp: Array, ref_logp: Array) -> Array:
  """The reverse KL in value and gradient, by the score function.

  r·sg(u)
  Value: expectation KL(π‖ρ); signed, never clamped.
  Gradient: expectation ∇KL(π‖ρ).
  """
  return reverse_score_term(logp, ref_logp, None)


def k5(logp: Array, ref_logp: Array, *, max_log_ratio: float | None = 20.0) -> Array:
  """The forward KL in value and gradient, from a token of the policy.

  sg(w)·log w + log r
  Value: expectation KL(ρ‖π); signed.
  Gradient: expectation ∇KL(ρ‖π).
  """
  return forward_score_term(logp, ref_logp, max_log_ratio)


def exact_reverse_kl(logits: Array, ref_logits: Array) -> Array:
  """KL(π‖ρ) over the last axis of two arrays of logits [..., V].

  Σ_j D(log π(j), log ρ(j)) with D(a, b) = eᵃ·f(b − a), which is Σ_j π(j)·log(π(j)/ρ(j)) without its cancellation
  Value: exact, ≥ 0.
  Gradient: exact; 0 at tokens that both exclude.
  """
  logps, ref_logps = jax.nn.log_softmax(logits), jax.nn.log_softmax(lax.stop_gradient(ref_logits))
  return jnp.sum(outcome_term(logps, ref_logps), axis=-1)


def exact_forward_kl(logits: Array, ref_logits: Array) -> Array:
  """KL(ρ‖π) over the last axis of two arrays of logits [..., V].

  Σ_j D(log ρ(j), log π(j)) with D(a, b) = eᵃ·f(b − a), which is Σ_j ρ(j)·log(ρ(j)/π(j)) without its cancellation
  Value: exact, ≥ 0.
  Gradient: exact; 0 at tokens that both exclude.
  """
  logps, ref_logps = jax.nn.log_softmax(logits), jax.nn.log_softmax(lax.stop_gradient(ref_logits))
  return jnp.sum(outcome_term(ref_logps, logps), axis=-1)


def importance_weight(
  logp: Array, sampling_logp: Array, low: float | None = None, high: float | None = None, *, max_log_ratio: float | None = 20.0
) -> Array:
  """s, the weight of a token drawn from μ in an expectation over π.

  sg(clip(exp(clip(logp − sampling_logp, ±max_log_ratio)), low, high))
  Value: π(p)/μ(p) within the bounds, which clip and drop no token; 1 on-policy.
  Gradient: none.
  """
  u, _ = clamp(log_ratio(logp, sampling_logp), max_log_ratio)
  return lax.stop_gradient(jnp.clip(jnp.exp(u), low, high))
