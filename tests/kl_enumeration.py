"""Exact expectations of KL estimators: every token of a small vocabulary takes its turn as the sampled one. Run it in float64.

An estimator is given as a function of a `Position` that returns (head, tail) for one sampled token; `sampled` wraps those without a head.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax


@struct.dataclass
class Position:
  """All that an estimator may see of one position; shapes [...] and, for *_topk, [..., K]."""

  logp: jax.Array
  ref_logp: jax.Array
  logp_topk: jax.Array
  ref_logp_topk: jax.Array
  log_tail: jax.Array
  ref_log_tail: jax.Array
  in_topk: jax.Array


Estimator = Callable[[Position], tuple[jax.Array, jax.Array]]


def sampled(fn) -> Estimator:
  return lambda pos: (jnp.zeros_like(pos.logp), fn(pos.logp, pos.ref_logp))


def topk(fn, **options) -> Estimator:
  """For the chain-rule forms, which need the tail masses."""
  return lambda pos: fn(pos.logp_topk, pos.ref_logp_topk, pos.log_tail, pos.ref_log_tail, pos.logp, pos.ref_logp, pos.in_topk, **options)


def topk_without_mass(fn, **options) -> Estimator:
  """For the score and published forms."""
  return lambda pos: fn(pos.logp_topk, pos.ref_logp_topk, pos.logp, pos.ref_logp, pos.in_topk, **options)


def log_mass(logps: jax.Array, kept: jax.Array) -> jax.Array:
  """Log of the mass on `kept`; −inf with gradient 0 when that mass is exactly 0."""
  kept = kept & (logps > -jnp.inf)
  empty = ~kept.any(axis=-1)
  filled = jnp.where(kept, logps, -jnp.inf)
  return jnp.where(empty, -jnp.inf, jax.nn.logsumexp(jnp.where(empty[..., None], 0.0, filled), axis=-1))


def position(logits: jax.Array, ref_logits: jax.Array, token: jax.Array, ids: jax.Array) -> Position:
  """The statistics of one sampled token (a scalar id) under two rows of logits [V], for head ids [K]."""
  logps, ref_logps = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
  outside = jnp.ones(logits.shape, bool).at[ids].set(False)
  return Position(
    logp=logps[token],
    ref_logp=ref_logps[token],
    logp_topk=logps[ids],
    ref_logp_topk=ref_logps[ids],
    log_tail=log_mass(logps, outside),
    ref_log_tail=log_mass(ref_logps, outside),
    in_topk=~outside[token],
  )


def all_positions(logits: jax.Array, ref_logits: jax.Array, ids: jax.Array) -> Position:
  """Each token of the vocabulary in turn, [V] leaves."""
  return jax.vmap(lambda token: position(logits, ref_logits, token, ids))(jnp.arange(logits.shape[-1]))


def expectations(estimators: Sequence[Estimator], logits: jax.Array, ref_logits: jax.Array, sampling_logits: jax.Array, ids: jax.Array):
  """Expected head + s·tail, and its gradient wrt `logits`, of each estimator over tokens drawn from each row of `sampling_logits`.

  Args:
    estimators: N of them; they are differentiated together, which compiles several times faster than one by one.
    logits: [V], the policy.
    ref_logits: [V], the anchor.
    sampling_logits: [M, V].
    ids: int [K], the head.

  Returns:
    Values [N, M] and gradients [N, M, V].
  """
  probs = jax.nn.softmax(sampling_logits)

  def expected(logits):
    pos = all_positions(logits, ref_logits, ids)
    heads, tails = (jnp.stack(x) for x in zip(*(estimator(pos) for estimator in estimators)))
    # A token of probability 0 has no ratio; it is asked for all the same, with weight 0.
    drawn = probs > 0.0
    s = lax.stop_gradient(jnp.where(drawn, jnp.exp(pos.logp)[None] / jnp.where(drawn, probs, 1.0), 0.0))
    values = jnp.sum(probs[None] * (heads[:, None, :] + s[None] * tails[:, None, :]), axis=-1)
    return values, values

  gradients, values = jax.jacrev(expected, has_aux=True)(logits)
  return values, gradients


def _softmax(logits: np.ndarray) -> np.ndarray:
  e = np.exp(logits - logits.max())
  return e / e.sum()


def reverse_kl(logits, ref_logits) -> tuple[float, np.ndarray]:
  """KL(π‖ρ) and its gradient wrt `logits`, by hand in numpy: π_j·(u_j − KL)."""
  pi, rho = _softmax(np.asarray(logits)), _softmax(np.asarray(ref_logits))
  u = np.log(pi / rho)
  kl = np.sum(pi * u)
  return kl, pi * (u - kl)


def forward_kl(logits, ref_logits) -> tuple[float, np.ndarray]:
  """KL(ρ‖π) and its gradient wrt `logits`, by hand in numpy: π_j − ρ_j."""
  pi, rho = _softmax(np.asarray(logits)), _softmax(np.asarray(ref_logits))
  return np.sum(rho * np.log(rho / pi)), pi - rho


def mass_gradient(logits, ids) -> np.ndarray:
  """∇π(q) wrt `logits`, by hand in numpy: π_j·(1[j∈q] − π(q))."""
  pi = _softmax(np.asarray(logits))
  inside = np.zeros(pi.shape)
  inside[np.asarray(ids, int)] = 1.0
  return pi * (inside - np.sum(pi * inside))
