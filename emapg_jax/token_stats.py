"""From hidden states to log-probability, entropy, logsumexp, top-k and tail mass, in chunks that never hold [B, T, V]."""

import functools

import jax
import jax.numpy as jnp

from emapg_jax.types import TokenStats

LOGITS_PER_CHUNK = 2**24  # 64 MiB of float32


def _log(x: jax.Array) -> jax.Array:
  """log, with gradient 0 (not NaN) where x is 0."""
  positive = x > 0
  return jnp.where(positive, jnp.log(jnp.where(positive, x, 1.0)), -jnp.inf)


def stats_from_logits(logits: jax.Array, targets: jax.Array, topk_ids: jax.Array | None = None, topk: int = 0) -> TokenStats:
  """TokenStats of float32 logits [..., V], already tempered; `-inf` logits are ids of probability 0.

  `logp = logits[target] − logsumexp`, `entropy = logsumexp − Σ p·logits`, `log_tail = log Σ_{j∉topk_ids} p_j`, computed as a logsumexp
  without the ids: `log1p(−Σ p_topk)` has no digits left when the head holds nearly all the mass. Gradient flows through every field but
  the ids, and is 0 (not NaN) through fields that are `-inf`.

  Args:
    logits: float32 [..., V].
    targets: int32 [...].
    topk_ids: int32 [..., K], distinct; the ids with the largest logits when None.
    topk: K for own ids; ignored when `topk_ids` is given.
  """
  if topk_ids is None:
    topk_ids = jax.lax.top_k(jax.lax.stop_gradient(logits), topk)[1]
  highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
  weights = jnp.exp(logits - highest)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  log_total = jnp.log(total)
  take = functools.partial(jnp.take_along_axis, logits, axis=-1)
  possible = jnp.isfinite(logits)
  mean_logit = jnp.sum(jnp.where(possible, weights * jnp.where(possible, logits - highest, 0.0), 0.0), axis=-1, keepdims=True) / total
  kept = jnp.put_along_axis(weights, topk_ids, 0.0, axis=-1, inplace=False) if topk_ids.shape[-1] else weights
  lse = highest + log_total
  return TokenStats(
    logp=(take(targets[..., None]) - lse)[..., 0],
    entropy=(log_total - mean_logit)[..., 0],
    logsumexp=lse[..., 0],
    topk_ids=topk_ids,
    logp_topk=take(topk_ids) - lse,
    log_tail=(_log(jnp.sum(kept, axis=-1, keepdims=True)) - log_total)[..., 0],
  )


def token_stats(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  topk_ids: jax.Array | None = None,
  topk: int = 0,
  temperature: float = 1.0,
  chunk: int | None = None,
) -> TokenStats:
  """TokenStats of `softmax(hidden @ unembedding / temperature)`, `chunk` positions at a time.

  Forward and backward hold the logits of one chunk, float32 [B, chunk, V]; the backward pass computes them again. The matmul returns
  float32 whatever its inputs are: bf16 logits would be wrong by more than a small KL.

  Args:
    hidden: [B, T, D]; position t predicts targets[:, t].
    unembedding: [D, V].
    targets: int32 [B, T].
    topk_ids: int32 [B, T, K] to report on, or None for the `topk` most likely.
    temperature: > 0; all fields are of the tempered distribution.
    chunk: positions per chunk; by default as many as keep a chunk's logits at LOGITS_PER_CHUNK.

  Raises:
    ValueError: if temperature is not positive or K exceeds V.
  """
  batch, length, _ = hidden.shape
  vocab = unembedding.shape[1]
  k = topk if topk_ids is None else topk_ids.shape[-1]
  if not temperature > 0:
    raise ValueError(f"token_stats needs temperature > 0, got {temperature}: greedy decoding has no log-probabilities to train on.")
  if k > vocab:
    raise ValueError(f"top-k of {k} ids was asked for, but the vocabulary has {vocab}: use at most {vocab}.")
  chunk = min(chunk or max(1, LOGITS_PER_CHUNK // (batch * vocab)), length)

  @jax.checkpoint
  def of_chunk(hidden, targets, ids):
    logits = jnp.einsum("bcd,dv->bcv", hidden, unembedding.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return stats_from_logits(logits / temperature, targets, ids, topk)

  if chunk == length:
    return of_chunk(hidden, targets, topk_ids)

  def to_chunks(x):
    x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

  def from_chunks(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(batch, -1, *x.shape[3:])[:, :length]

  chunks = jax.tree.map(to_chunks, (hidden, targets, topk_ids))
  return jax.tree.map(from_chunks, jax.lax.map(lambda args: of_chunk(*args), chunks))
