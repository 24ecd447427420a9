"""Top-k KL estimators, and the numerics they share with the sampled and exact ones. Notation, shapes and sources: `emapg_jax.kl`.

The chain-rule forms (`topk_*`) are the ones to use: the KL over the K + 1 outcomes {each id of q} ∪ {tail} is exact, and only the KL
inside the tail is sampled. The score forms are the smallest repair of the published ones, and the published ones are kept for reproduction.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

# Below this |x|, expm1(x) − x loses more digits than the series; with eleven terms the series is exact to rounding in float64.
_SERIES_BELOW = 0.25
_SERIES_TERMS = 11


@jax.custom_jvp
def excess(x: Array) -> Array:
  """f(x) = eˣ − 1 − x, never negative, to full relative precision at every x, ±inf included; gradient expm1(x)."""
  small = jnp.where(jnp.abs(x) < _SERIES_BELOW, x, 0.0)
  series = jnp.ones_like(small)
  for n in range(_SERIES_TERMS + 1, 2, -1):
    series = 1.0 + small / n * series
  # expm1(inf) − inf would be NaN.
  large = jnp.where(x == jnp.inf, jnp.inf, jnp.expm1(x) - jnp.where(x == jnp.inf, 0.0, x))
  return jnp.where(jnp.abs(x) < _SERIES_BELOW, 0.5 * small * small * series, large)


@excess.defjvp
def _excess_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  return excess(x), jnp.expm1(x) * dx


def _safe_difference(a: Array, b: Array) -> tuple[Array, Array, Array]:
  """b − a where both are finite, else 0; and where each is −inf."""
  a_out, b_out = a == -jnp.inf, b == -jnp.inf
  return jnp.where(a_out | b_out, 0.0, b - a), a_out, b_out


@jax.custom_jvp
def outcome_term(a: Array, b: Array) -> Array:
  """D(a, b) = eᵃ·f(b − a), one outcome's share of KL(eᵃ‖eᵇ) between two log-masses; the masses of a partition must sum to 1 in both.

  Value: ≥ 0; D(−inf, −inf) = 0, D(a, −inf) = +inf, D(−inf, b) = eᵇ.
  Gradient: −eᵃ(b − a) for a, eᵇ − eᵃ for b; 0 for a where either is −inf, so that an infinite value keeps a finite gradient.
  """
  d, a_out, b_out = _safe_difference(a, b)
  near = jnp.abs(d) < 1.0
  # Far apart, eᵃ·f(d) could be 0·inf.
  value = jnp.where(near, jnp.exp(a) * excess(jnp.where(near, d, 0.0)), jnp.exp(b) - jnp.exp(a) * (1.0 + d))
  return jnp.where(a_out, jnp.exp(b), jnp.where(b_out, jnp.inf, value))


@outcome_term.defjvp
def _outcome_term_jvp(primals, tangents):
  (a, b), (da, db) = primals, tangents
  d, a_out, b_out = _safe_difference(a, b)
  near = (jnp.abs(d) < 1.0) & ~a_out & ~b_out
  to_b = jnp.where(near, jnp.exp(a) * jnp.expm1(jnp.where(near, d, 0.0)), jnp.exp(b) - jnp.exp(a))
  return outcome_term(a, b), to_b * db - jnp.exp(a) * d * da


def log_ratio(logp: Array, ref_logp: Array) -> Array:
  """u = logp − sg(ref_logp); 0, with gradient 0, where both are −inf."""
  both_out = (logp == -jnp.inf) & (ref_logp == -jnp.inf)
  return jnp.where(both_out, 0.0, logp - lax.stop_gradient(ref_logp))


def clamp(x: Array, max_log_ratio: float | None) -> tuple[Array, Array]:
  """x held to ±max_log_ratio, with gradient 0 beyond, and a bool array that says where it was held (nowhere for None)."""
  if max_log_ratio is None:
    return x, jnp.zeros(x.shape, bool)
  beyond = jnp.abs(x) > max_log_ratio
  return jnp.where(beyond, lax.stop_gradient(jnp.clip(x, -max_log_ratio, max_log_ratio)), x), beyond


def log_unit(logp: Array, detach: Array) -> Array:
  """log r: value 0, gradient ∇logp; gradient 0 where `detach` is set or logp is not finite."""
  logp = jnp.where(detach | ~jnp.isfinite(logp), 0.0, logp)
  return logp - lax.stop_gradient(logp)


def reverse_score_term(logp: Array, ref_logp: Array, max_log_ratio: float | None) -> Array:
  """r·sg(u): value u, gradient u·∇logp."""
  u, beyond = clamp(log_ratio(logp, ref_logp), max_log_ratio)
  return jnp.exp(log_unit(logp, beyond)) * lax.stop_gradient(u)


def forward_score_term(logp: Array, ref_logp: Array, max_log_ratio: float | None) -> Array:
  """sg(w)·log w + log r: value w·log w, gradient (1 − w)·∇logp."""
  u, beyond = clamp(log_ratio(logp, ref_logp), max_log_ratio)
  # w = 0 times log w = −inf is 0.
  excluded = u == jnp.inf
  u = jnp.where(excluded, 0.0, u)
  w = jnp.where(excluded, 0.0, jnp.exp(lax.stop_gradient(-u)))
  return -w * u + log_unit(logp, beyond)


def _tail_token(in_tail: Array, *arrays: Array) -> tuple[Array, ...]:
  """Numbers of the sampled token, emptied outside the tail before any exp, so that no NaN can reach a gradient."""
  return tuple(jnp.where(in_tail, x, 0.0) for x in arrays)


def topk_reverse_kl(
  logp_topk: Array,
  ref_logp_topk: Array,
  log_tail: Array,
  ref_log_tail: Array,
  logp: Array,
  ref_logp: Array,
  in_topk: Array,
  *,
  max_log_ratio: float | None = 20.0,
) -> tuple[Array, Array]:
  """Chain-rule top-k estimate of KL(π‖ρ); the default.

  head = Σ_{j∈q} D(logp_topk, ref_logp_topk) + D(log_tail, ref_log_tail); tail = 1[p∉q]·r·f(Δ − u), Δ = log_tail − ref_log_tail.
  Value: E[head + s·tail] = KL(π‖ρ) for any q that does not depend on p; head ≥ 0 and tail ≥ 0.
  Gradient: expectation ∇KL(π‖ρ); a tail token with |Δ − u| > max_log_ratio keeps the value at the bound and gradient 0.
  """
  # Deviation: the paper's reverse form drops a term of the gradient; see `published_topk_reverse_kl`.
  ref_logp_topk, ref_log_tail = lax.stop_gradient((ref_logp_topk, ref_log_tail))
  head = jnp.sum(outcome_term(logp_topk, ref_logp_topk), axis=-1) + outcome_term(log_tail, ref_log_tail)
  delta, no_tail, no_ref_tail = _safe_difference(ref_log_tail, log_tail)
  in_tail = ~(jnp.asarray(in_topk, bool) | no_tail | no_ref_tail)
  logp, ref_logp, delta = _tail_token(in_tail, logp, ref_logp, delta)
  x, beyond = clamp(delta - log_ratio(logp, ref_logp), max_log_ratio)
  return head, jnp.where(in_tail, jnp.exp(log_unit(logp, beyond)) * excess(x), 0.0)


def topk_forward_kl(
  logp_topk: Array,
  ref_logp_topk: Array,
  log_tail: Array,
  ref_log_tail: Array,
  logp: Array,
  ref_logp: Array,
  in_topk: Array,
  *,
  max_log_ratio: float | None = 20.0,
) -> tuple[Array, Array]:
  """Chain-rule top-k estimate of KL(ρ‖π); the default.

  head = Σ_{j∈q} D(ref_logp_topk, logp_topk) + D(ref_log_tail, log_tail); tail = 1[p∉q]·r·w·f(u − Δ), Δ = log_tail − ref_log_tail.
  Value: E[head + s·tail] = KL(ρ‖π) for any q that does not depend on p; head ≥ 0 and tail ≥ 0.
  Gradient: expectation ∇KL(ρ‖π); a tail token with |u| or |u − Δ| > max_log_ratio keeps the value at the bound and gradient 0.
  """
  # Deviation: the paper's forward form keeps a term of the gradient in the tail only; see `published_topk_forward_kl`.
  ref_logp_topk, ref_log_tail = lax.stop_gradient((ref_logp_topk, ref_log_tail))
  head = jnp.sum(outcome_term(ref_logp_topk, logp_topk), axis=-1) + outcome_term(ref_log_tail, log_tail)
  delta, no_ref_tail, no_tail = _safe_difference(ref_log_tail, log_tail)
  in_tail = ~(jnp.asarray(in_topk, bool) | no_tail | no_ref_tail)
  logp, ref_logp, delta = _tail_token(in_tail, logp, ref_logp, delta)
  full_u = log_ratio(logp, ref_logp)
  u, u_beyond = clamp(full_u, max_log_ratio)
  x, x_beyond = clamp(full_u - delta, max_log_ratio)
  beyond = u_beyond | x_beyond
  u, x = (jnp.where(beyond, lax.stop_gradient(y), y) for y in (u, x))
  # w·f(x) = e⁻ᵘ·f(x) is D(−u, x − u), and D knows what to do with 0·inf; unclamped, x − u is −Δ.
  inside = outcome_term(-u, jnp.where(beyond, x - u, -delta))
  return head, jnp.where(in_tail, jnp.exp(log_unit(logp, beyond)) * inside, 0.0)


def _mass_times_log_ratio(a: Array, b: Array, detach_ratio: bool = False) -> Array:
  """eᵃ·(a − b), 0 where a = −inf, +inf with gradient 0 where only b = −inf."""
  d, a_out, b_out = _safe_difference(a, b)
  d = lax.stop_gradient(d) if detach_ratio else d
  return jnp.where(b_out & ~a_out, jnp.inf, -jnp.exp(a) * d)


def truncated_reverse_kl(logp_topk: Array, ref_logp_topk: Array) -> Array:
  """The part of KL(π‖ρ) that lies on q; for offline distillation only.

  Σ_{j∈q} π(j)·(logp_topk − ref_logp_topk)
  Value: not a KL: it may be negative, and lacks the tail.
  Gradient: through both factors; not ∇KL(π‖ρ).
  """
  return jnp.sum(_mass_times_log_ratio(logp_topk, lax.stop_gradient(ref_logp_topk)), axis=-1)


def truncated_forward_kl(logp_topk: Array, ref_logp_topk: Array) -> Array:
  """The part of KL(ρ‖π) that lies on q; for offline distillation only.

  Σ_{j∈q} ρ(j)·(ref_logp_topk − logp_topk)
  Value: not a KL: it may be negative, and lacks the tail.
  Gradient: −Σ_{j∈q} ρ(j)·∇logp_topk; not ∇KL(ρ‖π).
  """
  return jnp.sum(_mass_times_log_ratio(lax.stop_gradient(ref_logp_topk), logp_topk), axis=-1)


def _score_tail(term, logp: Array, ref_logp: Array, in_topk: Array, max_log_ratio: float | None) -> Array:
  in_topk = jnp.asarray(in_topk, bool)  # of an integer, ~1 is −2 and would count as true
  logp, ref_logp = _tail_token(~in_topk, logp, ref_logp)
  return jnp.where(in_topk, 0.0, term(logp, ref_logp, max_log_ratio))


def published_topk_reverse_kl(
  logp_topk: Array, ref_logp_topk: Array, logp: Array, ref_logp: Array, in_topk: Array, *, max_log_ratio: float | None = 20.0
) -> tuple[Array, Array]:
  """Top-k estimate of KL(π‖ρ) as published (Algorithm 1): its gradient is BIASED by +∇π(q) for 0 < K < V.

  head = Σ_{j∈q} π(j)·(logp_topk − ref_logp_topk), gradient through both factors; tail = 1[p∉q]·r·sg(u).
  Value: E[head + s·tail] = KL(π‖ρ).
  Gradient: expectation ∇KL(π‖ρ) + ∇π(q); a tail token with |u| > max_log_ratio keeps the value at the bound and gradient 0.
  """
  return truncated_reverse_kl(logp_topk, ref_logp_topk), _score_tail(reverse_score_term, logp, ref_logp, in_topk, max_log_ratio)


def published_topk_forward_kl(
  logp_topk: Array, ref_logp_topk: Array, logp: Array, ref_logp: Array, in_topk: Array, *, max_log_ratio: float | None = 20.0
) -> tuple[Array, Array]:
  """Top-k estimate of KL(ρ‖π) as published (Algorithm 2): its gradient is BIASED by −∇π(q) for 0 < K < V.

  head = Σ_{j∈q} ρ(j)·(ref_logp_topk − logp_topk); tail = 1[p∉q]·(sg(w)·log w + log r).
  Value: E[head + s·tail] = KL(ρ‖π).
  Gradient: expectation ∇KL(ρ‖π) − ∇π(q); a tail token with |u| > max_log_ratio keeps the value at the bound and gradient 0.
  """
  return truncated_forward_kl(logp_topk, ref_logp_topk), _score_tail(forward_score_term, logp, ref_logp, in_topk, max_log_ratio)


def score_topk_reverse_kl(
  logp_topk: Array, ref_logp_topk: Array, logp: Array, ref_logp: Array, in_topk: Array, *, max_log_ratio: float | None = 20.0
) -> tuple[Array, Array]:
  """Top-k estimate of KL(π‖ρ): the published values with an unbiased gradient.

  head = Σ_{j∈q} π(j)·sg(logp_topk − ref_logp_topk); tail = 1[p∉q]·r·sg(u).
  Value: E[head + s·tail] = KL(π‖ρ).
  Gradient: expectation ∇KL(π‖ρ); a tail token with |u| > max_log_ratio keeps the value at the bound and gradient 0.
  """
  # Deviation: the ratio in the head is detached, which removes the published bias +∇π(q).
  head = jnp.sum(_mass_times_log_ratio(logp_topk, lax.stop_gradient(ref_logp_topk), detach_ratio=True), axis=-1)
  return head, _score_tail(reverse_score_term, logp, ref_logp, in_topk, max_log_ratio)


def score_topk_forward_kl(
  logp_topk: Array, ref_logp_topk: Array, logp: Array, ref_logp: Array, in_topk: Array, *, max_log_ratio: float | None = 20.0
) -> tuple[Array, Array]:
  """Top-k estimate of KL(ρ‖π): the published values with an unbiased gradient.

  head = Σ_{j∈q} ρ(j)·(ref_logp_topk − logp_topk) + π(q) − sg π(q); tail = 1[p∉q]·(sg(w)·log w + log r).
  Value: E[head + s·tail] = KL(ρ‖π).
  Gradient: expectation ∇KL(ρ‖π); a tail token with |u| > max_log_ratio keeps the value at the bound and gradient 0.
  """
  # Deviation: π(q) − sg π(q) restores ∇π(q), which the published form leaves out.
  mass = jnp.sum(jnp.exp(logp_topk), axis=-1)
  head = truncated_forward_kl(logp_topk, ref_logp_topk) + (mass - lax.stop_gradient(mass))
  return head, _score_tail(forward_score_term, logp, ref_logp, in_topk, max_log_ratio)
