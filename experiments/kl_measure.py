"""Exact mean and deviation, in value and gradient, of every KL estimator over all tokens that could have been sampled.

The gradient is the one wrt the logits. A brute-force enumeration needs V of them, of V entries each; none is formed here. An estimator sees
the logits z only through logp = log π(p), the K numbers logp_topk and log_tail, so for the sampled token p

  g_p = a_p·(e_p − π) + Σ_j b_j·(e_{q_j} − π) + c_p·(t − π)

where a, b, c are its derivatives by those three, taken by `jax.grad` from the functions that a training run uses, e is a unit vector, and
t is π within the tail, normalised: ∇_z log π(j) = e_j − π, ∇_z log π(q̄) = t − π. Only the tail term of an estimator knows p and it does not
look at logp_topk, so b has no p (`vmap` refuses to run an estimator where it does). Mean and mean square of g_p are then sums over V:
O(V + K) work and memory per position, no sampling, no V×V array.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from emapg_jax import kl
from emapg_jax.token_stats import stats_from_logits
from emapg_jax.types import TokenStats
from experiments.estimators import ESTIMATORS

Array = jax.Array

DIRECTIONS = ("reverse", "forward")


class _Anchor(NamedTuple):
  """The anchor's numbers, under the names that an estimator reads from a RolloutBatch."""

  ref_logp: Array
  ref_logp_topk: Array
  ref_log_tail: Array


class Measured(NamedTuple):
  """One estimator at each of N positions; all [N]. Gradients as 2-norms over the vocabulary, deviations as roots of E‖·‖²."""

  kl: Array
  kl_gradient: Array
  value_bias: Array
  value_std: Array
  gradient_bias: Array
  gradient_std: Array
  smallest: Array
  log_tail: Array
  clamped: Array  # the mass of the tokens that max_log_ratio takes out of the gradient


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table: an estimator over all positions of a case; root mean squares over positions, relative to the exact KL.

  Values are divided by the mean KL, gradients by the root mean square of ‖∇KL‖: positions where the KL is small count little, as in a
  batch. The `*_each` are root mean squares of the ratios of each position, in which those positions count most.
  """

  estimator: str
  direction: str
  kl: float  # mean over positions, nats
  topk: int | None  # None: the estimator has no K
  stored: int
  tail_mass: float | None  # mean π(q̄)
  value_bias: float
  value_std: float
  value_std_each: float
  gradient_bias: float
  gradient_bias_each: float
  gradient_bias_worst: float  # the largest ratio of any one position
  gradient_std: float
  smallest: float  # nats
  clamped: float  # mean mass


def _truncated(estimator) -> Callable:
  return lambda stats, batch, in_topk: (estimator(stats.logp_topk, batch.ref_logp_topk), jnp.zeros_like(stats.logp), jnp.zeros((), bool))


ALL: dict[str, Callable] = ESTIMATORS | {
  "truncated_reverse": _truncated(kl.truncated_reverse_kl),
  "truncated_forward": _truncated(kl.truncated_forward_kl),
}
_EXACT = {"reverse": kl.exact_reverse_kl, "forward": kl.exact_forward_kl}
# Those whose docstring promises the gradient of the KL, as long as no token is clamped.
UNBIASED = ("k2", "k3pp", "k4", "k5", *(name for name in ESTIMATORS if name.startswith(("exact_", "topk_", "score_"))))


def direction_of(name: str) -> str:
  """The KL that an estimator estimates."""
  return "forward" if name == "k5" or name.endswith("forward") else "reverse"


def has_topk(name: str) -> bool:
  """Whether an estimator depends on K."""
  return "topk" in name or name.startswith("truncated")


def stored_numbers(name: str, topk: int, vocab: int) -> int:
  """Numbers kept per token from the anchor's pass until the loss: log-probabilities, ids and log tail masses."""
  if name.startswith("exact"):
    return vocab
  if name.startswith("truncated"):
    return 2 * topk
  return 1 + (2 * topk if "topk" in name else 0) + (1 if name.startswith("topk") else 0)


def _gradient_moments(a: Array, b: Array, c: Array, ids: Array, logps: Array, log_tail: Array) -> tuple[Array, Array]:
  """Mean [V] and total variance [] of g_p over p ~ π, from the derivatives a [V], b [K], c [V] of the module docstring."""
  pi = jnp.exp(logps)
  has_tail = log_tail > -jnp.inf
  in_tail = jnp.ones(pi.shape, bool).at[ids].set(False) & has_tail
  t = jnp.where(in_tail, jnp.exp(logps - jnp.where(has_tail, log_tail, 0.0)), 0.0)
  toward_tail = t - pi  # without a tail c is 0
  scored = pi * a
  a_mean, c_mean = jnp.sum(scored), jnp.sum(pi * c)
  mean = scored - a_mean * pi + jnp.zeros_like(pi).at[ids].add(b) - jnp.sum(b) * pi + c_mean * toward_tail
  # g_p − mean = a_p·e_p + coefficients_p · basis
  basis = jnp.stack([scored, toward_tail, pi])
  coefficients = jnp.stack([-jnp.ones_like(a), c - c_mean, -(a - a_mean)])
  square = jnp.sum(coefficients * ((basis @ basis.T) @ coefficients), axis=0)
  cross = a * jnp.sum(coefficients * basis, axis=0)
  return mean, jnp.maximum(jnp.sum(pi * (jnp.square(a) + 2.0 * cross + square)), 0.0)


def _measure_position(logits: Array, ref_logits: Array, names: Sequence[str], topk: int) -> dict[str, Measured]:
  """Every estimator of one direction on two rows of logits [V]."""
  direction = direction_of(names[0])
  # As in training by default: the ids are the policy's own top-k for the reverse KL, the anchor's for the forward.
  ids = lax.top_k(logits if direction == "reverse" else ref_logits, topk)[1]
  now, ref = (stats_from_logits(x, jnp.int32(0), ids) for x in (logits, ref_logits))
  logps, ref_logps = logits - now.logsumexp, ref_logits - ref.logsumexp
  in_topk = jnp.zeros(logits.shape, bool).at[ids].set(True)
  pi = jnp.exp(logps)
  exact, exact_gradient = jax.value_and_grad(_EXACT[direction])(logits, ref_logits)

  def measure(name):
    def value(logp, logp_topk, log_tail, ref_logp, in_topk):
      stats = TokenStats(logp, now.entropy, now.logsumexp, ids, logp_topk, log_tail)
      head, tail, clamped = ALL[name](stats, _Anchor(ref_logp, ref.logp_topk, ref.log_tail), in_topk)
      return head + tail, clamped

    one_token = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)
    each_token = jax.vmap(one_token, in_axes=(0, None, None, 0, 0), out_axes=(0, (0, None, 0)))
    (values, clamped), (a, b, c) = each_token(logps, now.logp_topk, now.log_tail, ref_logps, in_topk)
    mean = jnp.sum(pi * values)
    gradient, variance = _gradient_moments(a, b, c, ids, logps, now.log_tail)
    return Measured(
      kl=exact,
      kl_gradient=jnp.linalg.norm(exact_gradient),
      value_bias=mean - exact,
      value_std=jnp.sqrt(jnp.sum(pi * jnp.square(values - mean))),
      gradient_bias=jnp.linalg.norm(gradient - exact_gradient),
      gradient_std=jnp.sqrt(variance),
      smallest=jnp.min(jnp.where(pi > 0.0, values, jnp.inf)),
      log_tail=now.log_tail,
      clamped=jnp.sum(jnp.where(clamped, pi, 0.0)),
    )

  return {name: measure(name) for name in names}


@functools.partial(jax.jit, static_argnames=("names", "topk"))
def measure_positions(logits: Array, ref_logits: Array, names: tuple[str, ...], topk: int) -> dict[str, Measured]:
  """Exact moments over p ~ π of estimators of one direction, at every position.

  Args:
    logits: [N, V], the policy; call it in float64 (`jax.enable_x64`) to tell a bias from rounding.
    ref_logits: [N, V], the anchor.
    names: keys of ALL, all of one direction.
    topk: K; what has no K ignores it.

  Returns:
    A `Measured` per name, [N] leaves.
  """
  return lax.map(lambda pair: _measure_position(*pair, names, topk), (logits, ref_logits))


def _rms(x: np.ndarray) -> float:
  return float(np.sqrt(np.mean(np.square(x))))


def summarise(name: str, topk: int, vocab: int, measured: Measured) -> Row:
  """A `Row` from the positions of one case."""
  m = Measured(*(np.asarray(x) for x in measured))
  mean_kl = float(np.mean(m.kl))
  return Row(
    estimator=name,
    direction=direction_of(name),
    kl=mean_kl,
    topk=topk if has_topk(name) else None,
    stored=stored_numbers(name, topk, vocab),
    tail_mass=float(np.mean(np.exp(m.log_tail))) if has_topk(name) else None,
    value_bias=_rms(m.value_bias) / mean_kl,
    value_std=_rms(m.value_std) / mean_kl,
    value_std_each=_rms(m.value_std / m.kl),
    gradient_bias=_rms(m.gradient_bias) / _rms(m.kl_gradient),
    gradient_bias_each=_rms(m.gradient_bias / m.kl_gradient),
    gradient_bias_worst=float(np.max(m.gradient_bias / m.kl_gradient)),
    gradient_std=_rms(m.gradient_std) / _rms(m.kl_gradient),
    smallest=float(np.min(m.smallest)),
    clamped=float(np.mean(m.clamped)),
  )


def jobs(topks: Sequence[int], vocab: int) -> list[tuple[tuple[str, ...], int]]:
  """(names, K) of everything to measure, each compiled once: what has no K (the exact forms read K = V ids), then each K."""
  result = []
  for wanted in DIRECTIONS:
    names = [name for name in ALL if direction_of(name) == wanted]
    result.append((tuple(name for name in names if not has_topk(name)), vocab))
    result.extend((tuple(name for name in names if has_topk(name)), topk) for topk in topks)
  return result


def measure(logits: np.ndarray, ref_logits: np.ndarray, topks: Sequence[int], step: Callable[[], Any]) -> list[Row]:
  """The whole table of one case, in float64: `step` is called after each of the `jobs`.

  Args:
    logits: [N, V], the policy at N positions; what is given is taken as exact.
    ref_logits: [N, V], the anchor.
    topks: values of K, each at most V.
    step: for a progress bar.
  """
  vocab = logits.shape[1]
  rows = []
  with jax.enable_x64(True):
    pair = jnp.asarray(logits, jnp.float64), jnp.asarray(ref_logits, jnp.float64)
    for names, topk in jobs(topks, vocab):
      measured = measure_positions(*pair, names=names, topk=topk)
      rows.extend(summarise(name, topk, vocab, measured[name]) for name in names)
      step()
  return rows
