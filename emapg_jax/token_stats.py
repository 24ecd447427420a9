"""From hidden states to log-probability, entropy, logsumexp, top-k and tail mass, in chunks that never hold [B, T, V]."""

import jax
import jax.numpy as jnp

from emapg_jax import masking
from emapg_jax.types import TokenStats

LOGITS_PER_CHUNK = 2**24  # 64 MiB of float32


def _log(x: jax.Array) -> jax.Array:
  """log, with gradient 0 (not NaN) where x is 0."""
  positive = x > 0
  return jnp.where(positive, jnp.log(jnp.where(positive, x, 1.0)), -jnp.inf)


def _finite(x: jax.Array) -> jax.Array:
  """x, with 0 for -inf: 0·log 0 = 0."""
  return jnp.where(x == -jnp.inf, 0.0, x)


def stats_from_logits(
  logits: jax.Array, targets: jax.Array, topk_ids: jax.Array | None = None, topk: int = 0, approximate: bool = False
) -> TokenStats:
  """TokenStats of float32 logits [..., V], already tempered; `-inf` logits are ids of probability 0.

    log_tail + logsumexp = logsumexp over the ids that are not in topk_ids
    logsumexp = logaddexp(that, logsumexp over topk_ids)
    logp = logits[target] − logsumexp
    entropy = −Σ p·log p

  The tail is summed by itself, relative to its own largest logit: `log1p(−Σ p_topk)` has no digits left when the head holds nearly all the
  mass. Gradient flows through every field but the ids, and is 0 (not NaN) through a field that is `-inf`.

  Args:
    logits: float32 [..., V].
    targets: int32 [...], each in [0, V); another id is not refused, and its numbers mean nothing.
    topk_ids: int32 [..., K], in [0, V) and distinct, which is not checked either; the ids with the largest logits when None.
    topk: K for own ids; ignored when `topk_ids` is given.
    approximate: take own ids from `jax.lax.approx_max_k` (recall 0.95, fast on TPU): any ids keep the top-k KL unbiased.
  """
  if topk_ids is None:
    find = jax.lax.approx_max_k if approximate and topk else jax.lax.top_k
    topk_ids = find(jax.lax.stop_gradient(logits), topk)[1]
  head = jnp.take_along_axis(logits, topk_ids, axis=-1)
  tail = jnp.put_along_axis(logits, topk_ids, -jnp.inf, axis=-1, inplace=False) if topk_ids.shape[-1] else logits
  highest = jax.lax.stop_gradient(jnp.max(tail, axis=-1, keepdims=True))
  highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
  shifted = tail - highest
  weights = jnp.exp(shifted)
  tail_lse = highest + _log(jnp.sum(weights, axis=-1, keepdims=True))
  lse = jnp.logaddexp(tail_lse, jax.nn.logsumexp(head, axis=-1, keepdims=True)) if topk_ids.shape[-1] else tail_lse
  log_tail, logp_topk = tail_lse - lse, head - lse
  # Σ p·log p of the tail, with log p = shifted + (highest − lse).
  spread = jnp.sum(weights * _finite(shifted), axis=-1, keepdims=True) * jnp.exp(highest - lse)
  entropy = -spread - jnp.exp(log_tail) * (highest - lse) - jnp.sum(jnp.exp(logp_topk) * _finite(logp_topk), axis=-1, keepdims=True)
  return TokenStats(
    logp=(jnp.take_along_axis(logits, targets[..., None], axis=-1) - lse)[..., 0],
    entropy=entropy[..., 0],
    logsumexp=lse[..., 0],
    topk_ids=topk_ids,
    logp_topk=logp_topk,
    log_tail=log_tail[..., 0],
  )


def token_stats(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  topk_ids: jax.Array | None = None,
  topk: int = 0,
  approximate: bool = False,
  temperature: float = 1.0,
  chunk: int | None = None,
) -> TokenStats:
  """TokenStats of `softmax(hidden @ unembedding / temperature)`, `chunk` positions at a time.

  Forward and backward hold the logits of one chunk, float32 [B, chunk, V]; the backward pass computes them again. The matmul returns
  float32 (float64 for float64) whatever its inputs are: bf16 logits would be wrong by more than a small KL.

  Args:
    hidden: [B, T, D]; position t predicts targets[:, t].
    unembedding: [D, V].
    targets: int32 [B, T], each in [0, V).
    topk_ids: int32 [B, T, K] to report on, in [0, V) and distinct at each position, or None for the `topk` most likely, found exactly or by
      `approximate` search.
    temperature: > 0; all fields are of the tempered distribution.
    chunk: positions per chunk; by default as many as keep a chunk's logits at LOGITS_PER_CHUNK.

  Raises:
    ValueError: if temperature is not positive, K exceeds V or chunk is below 1.
  """
  batch, length, _ = hidden.shape
  vocab = unembedding.shape[1]
  k = topk if topk_ids is None else topk_ids.shape[-1]
  if hidden.shape[-1] != unembedding.shape[0]:
    raise ValueError(
      f"token_stats got hidden states of width {hidden.shape[-1]} and an unembedding of shape {unembedding.shape}: it must be [width, "
      "vocabulary]; transpose a matrix that is stored the other way round."
    )
  if not temperature > 0:
    raise ValueError(f"token_stats needs temperature > 0, got {temperature}: greedy decoding has no log-probabilities to train on.")
  if k > vocab:
    raise ValueError(f"top-k of {k} ids was asked for, but the vocabulary has {vocab}: use at most {vocab}.")
  if chunk is not None and chunk < 1:
    raise ValueError(f"token_stats was given chunk {chunk}, but a chunk holds at least 1 position: use None for a size that fits.")
  chunk = min(chunk or max(1, LOGITS_PER_CHUNK // max(1, batch * vocab)), length)

  @jax.checkpoint
  def of_chunk(hidden, targets, ids):
    logits = jnp.einsum("bcd,dv->bcv", hidden, unembedding.astype(hidden.dtype), preferred_element_type=masking.wide(hidden.dtype))
    return stats_from_logits(logits / temperature, targets, ids, topk, approximate)

  if chunk == length or not batch:
    return of_chunk(hidden, targets, topk_ids)

  def to_chunks(x):
    x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

  def from_chunks(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(batch, -1, *x.shape[3:])[:, :length]

  chunks = jax.tree.map(to_chunks, (hidden, targets, topk_ids))
  return jax.tree.map(from_chunks, jax.lax.map(lambda args: of_chunk(*args), chunks))
