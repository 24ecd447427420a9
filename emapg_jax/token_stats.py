"""From hidden states to log-probability, entropy, logsumexp, top-k and tail mass, in chunks that never hold [B, T, V]."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from emapg_jax import masking
from emapg_jax.types import TokenStats

LOGITS_PER_CHUNK = 2**24  # 64 MiB of float32
WEIGHTS_PER_BLOCK = 2**23  # of the unembedding, and as many of its gradient, in a step of the backward pass
_LANES = 128  # columns of the narrowest such step, and a divisor of those of all others

# To logp, entropy, logsumexp, logp_topk, log_tail, shaped like them.
FieldGrads = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def _log(x: jax.Array) -> jax.Array:
  """log, with gradient 0 (not NaN) where x is 0."""
  positive = x > 0
  return jnp.where(positive, jnp.log(jnp.where(positive, x, 1.0)), -jnp.inf)


def _finite(x: jax.Array) -> jax.Array:
  """x, with 0 for -inf: 0·log 0 = 0."""
  return jnp.where(x == -jnp.inf, 0.0, x)


def _minus(x: jax.Array, lse: jax.Array) -> jax.Array:
  """x − lse, with gradient 0 to both where x is -inf."""
  return jnp.where(x == -jnp.inf, -jnp.inf, x - lse)


def _put(x: jax.Array, ids: jax.Array, values: jax.Array, first: jax.Array | int) -> jax.Array:
  """x [..., V] with `values` at ids [..., K], where column 0 is the id `first`; ids that have no column here change nothing."""
  if not ids.shape[-1]:
    return x
  columns = ids - jnp.asarray(first, ids.dtype)
  columns = jnp.where(columns >= 0, columns, x.shape[-1])  # a negative one would count from the end

  def row(x, columns, values):
    return x.at[columns].set(values, mode="drop")

  for _ in range(x.ndim - 1):  # mapped, so that rows on many devices are known to be apart; `put_along_axis` gathers their indices
    row = jax.vmap(row)
  return row(x, columns, values)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Reductions over the last axis of logits [..., V]: all ids or, within `shard_map`, this device's share, equal and in order of the ids.

  With an axis they are not for differentiation: the transpose of a `psum` depends on what surrounds it.
  """

  axis: str | None = None  # the mesh axis that the ids are split over

  def sum(self, x: jax.Array) -> jax.Array:
    """[..., V] -> [..., 1]."""
    x = jnp.sum(x, axis=-1, keepdims=True)
    return x if self.axis is None else jax.lax.psum(x, self.axis)

  def max(self, x: jax.Array) -> jax.Array:
    """[..., V] -> [..., 1]."""
    x = jnp.max(x, axis=-1, keepdims=True)
    return x if self.axis is None else jax.lax.pmax(x, self.axis)

  def first(self, size: int) -> jax.Array | int:
    """The id of column 0, with `size` columns here."""
    return 0 if self.axis is None else jax.lax.axis_index(self.axis) * size

  def take(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
    """The logits [..., K] of ids [..., K] of the whole vocabulary."""
    if self.axis is None:
      return jnp.take_along_axis(logits, ids, axis=-1)
    size = logits.shape[-1]
    columns = ids - jnp.asarray(self.first(size), ids.dtype)
    here = (columns >= 0) & (columns < size)
    found = jnp.take_along_axis(logits, jnp.where(here, columns, 0), axis=-1)
    return jax.lax.psum(jnp.where(here, found, 0.0), self.axis)

  def largest(self, logits: jax.Array, k: int, approximate: bool) -> jax.Array:
    """The ids [..., K] of the largest logits, of equal ones the lower id first: each share's own, and the best of those."""
    find = jax.lax.approx_max_k if approximate and k else jax.lax.top_k
    if self.axis is None or not k:
      return find(logits, k)[1]
    size = logits.shape[-1]
    values, ids = find(logits, min(k, size))
    values = jax.lax.all_gather(values, self.axis, axis=values.ndim - 1, tiled=True)
    ids = jax.lax.all_gather(ids + self.first(size), self.axis, axis=ids.ndim - 1, tiled=True)
    return jnp.take_along_axis(ids, jax.lax.top_k(values, k)[1], axis=-1)


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
  return _stats(logits, targets, topk_ids, topk, approximate, Vocabulary())


def _stats(
  logits: jax.Array, targets: jax.Array, topk_ids: jax.Array | None, topk: int, approximate: bool, vocabulary: Vocabulary
) -> TokenStats:
  if topk_ids is None:
    topk_ids = vocabulary.largest(jax.lax.stop_gradient(logits), topk, approximate)
  head = vocabulary.take(logits, topk_ids) if topk_ids.shape[-1] else jnp.zeros(topk_ids.shape, logits.dtype)
  tail = _put(logits, topk_ids, jnp.full_like(head, -jnp.inf), vocabulary.first(logits.shape[-1]))
  highest = vocabulary.max(jax.lax.stop_gradient(tail))
  highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
  shifted = tail - highest
  weights = jnp.exp(shifted)
  tail_lse = highest + _log(vocabulary.sum(weights))
  lse = jnp.logaddexp(tail_lse, jax.nn.logsumexp(head, axis=-1, keepdims=True)) if topk_ids.shape[-1] else tail_lse
  log_tail, logp_topk = _minus(tail_lse, lse), _minus(head, lse)
  highest = jnp.where(tail_lse == -jnp.inf, jax.lax.stop_gradient(lse), highest)  # exp(0 − lse) overflows where all logits are low
  # Σ p·log p of the tail, with log p = shifted + (highest − lse).
  spread = vocabulary.sum(weights * _finite(shifted)) * jnp.exp(highest - lse)
  entropy = -spread - jnp.exp(log_tail) * (highest - lse) - jnp.sum(jnp.exp(logp_topk) * _finite(logp_topk), axis=-1, keepdims=True)
  return TokenStats(
    logp=_minus(vocabulary.take(logits, targets[..., None]), lse)[..., 0],
    entropy=entropy[..., 0],
    logsumexp=lse[..., 0],
    topk_ids=topk_ids,
    logp_topk=logp_topk,
    log_tail=log_tail[..., 0],
  )


def _logits_gradient(stats: TokenStats, targets: jax.Array, grads: FieldGrads) -> Callable[[jax.Array, jax.Array | int], jax.Array]:
  """The gradient to logits [B, T, C], of the ids from `first` on, as a function of both; p the softmax, q the top-k ids, H entropy:

    ∂logp/∂x_j = 1[j=target] − p_j     ∂logp_k/∂x_j = 1[j=k] − p_j     ∂logsumexp/∂x_j = p_j
    ∂entropy/∂x_j = −p_j·(log p_j + H)     ∂log_tail/∂x_j = 1[j∉q]·p_j/p(q̄) − p_j

  Where a field is -inf, nothing flows. One exp per logit: p_j/p(q̄) outside q, where p_j is p(q̄) times that; in q it may be infinite and
  is replaced by what the K log-probabilities give.
  """

  def flowing(field, grad):
    return jnp.where(field == -jnp.inf, 0.0, grad)

  column = jax.tree.map(lambda x: x[..., None], (stats.entropy, stats.logsumexp, stats.log_tail, grads[1], grads[2]))
  entropy, lse, log_tail, entropy_grad, lse_grad = column
  logp_grad = flowing(stats.logp, grads[0])[..., None]
  topk_grad = flowing(stats.logp_topk, grads[3])
  tail_grad = flowing(stats.log_tail, grads[4])[..., None]
  shared = lse_grad - logp_grad - jnp.sum(topk_grad, axis=-1, keepdims=True) - tail_grad - entropy_grad * entropy
  in_topk = jnp.exp(stats.logp_topk) * (shared - entropy_grad * _finite(stats.logp_topk)) + topk_grad
  in_topk += jnp.where(stats.topk_ids == targets[..., None], logp_grad, 0.0)
  tail_lse, tail_mass = _finite(log_tail + lse), jnp.exp(log_tail)

  def of(logits, first):
    weights = jnp.exp(logits - tail_lse)
    dlogits = weights * (tail_mass * (shared - entropy_grad * _finite(logits - lse)) + tail_grad)
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) + jnp.asarray(first, targets.dtype)
    return _put(dlogits + jnp.where(ids == targets[..., None], logp_grad, 0.0), stats.topk_ids, in_topk, first)

  return of


@dataclasses.dataclass(frozen=True)
class Head:
  """What `token_stats` does on one device: the two passes, with the settings that are compiled in."""

  topk: int
  approximate: bool
  temperature: float
  chunk: int | None
  tied: bool = False  # the unembedding comes as the embedding [V, D]
  vocabulary: Vocabulary = Vocabulary()

  @property
  def _dims(self) -> str:
    return "vd" if self.tied else "dv"

  def forward(self, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, topk_ids: jax.Array | None) -> TokenStats:
    """TokenStats, `chunk` positions at a time."""
    batch, length, _ = hidden.shape
    unembedding = unembedding.astype(hidden.dtype)
    size = unembedding.shape[self._dims.index("v")]
    chunk = min(self.chunk or max(1, LOGITS_PER_CHUNK // max(1, batch * size)), length)

    def of_chunk(args):
      hidden, targets, ids = args
      logits = jnp.einsum(f"bcd,{self._dims}->bcv", hidden, unembedding, preferred_element_type=masking.wide(hidden.dtype))
      return _stats(logits / self.temperature, targets, ids, self.topk, self.approximate, self.vocabulary)

    if chunk == length or not batch:
      return of_chunk((hidden, targets, topk_ids))

    chunks = -(-length // chunk)

    def to_chunks(x):
      x = jnp.pad(x, [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2))
      return jnp.moveaxis(x.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)

    def from_chunks(x):
      x = jnp.moveaxis(x, 0, 1)
      return x.reshape(batch, chunks * chunk, *x.shape[3:])[:, :length]

    return jax.tree.map(from_chunks, jax.lax.map(of_chunk, jax.tree.map(to_chunks, (hidden, targets, topk_ids))))

  def backward(
    self,
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    stats: TokenStats,
    grads: FieldGrads,
    dtype: Any = None,
    reduce: Callable[[jax.Array], jax.Array] = lambda columns: columns,
  ) -> tuple[jax.Array, jax.Array]:
    """The gradients to hidden states (float32 at least) and unembedding (`dtype`, or its own): what this device's columns and rows give.

    `reduce` sums columns over devices, and may keep a part of their width, before they are written.

    In blocks of columns, each for all positions: so every part of the larger gradient is written once, where a loop over positions
    reads and writes the whole of it in each step.
    """
    wide, dims, dtype = masking.wide(hidden.dtype), self._dims, dtype or unembedding.dtype
    axis = dims.index("v")
    size = unembedding.shape[axis]
    width = self._width(hidden, size)
    first = self.vocabulary.first(size)
    gradient = _logits_gradient(stats, targets, jax.tree.map(lambda g: g / self.temperature, grads))

    def block(carry, start, width):
      dhidden, dunembedding = carry
      columns = jax.lax.dynamic_slice_in_dim(unembedding, start, width, axis).astype(hidden.dtype)
      logits = jnp.einsum(f"btd,{dims}->btv", hidden, columns, preferred_element_type=wide) / self.temperature
      dlogits = gradient(logits, first + start).astype(hidden.dtype)
      dhidden += jnp.einsum(f"btv,{dims}->btd", dlogits, columns, preferred_element_type=wide)
      dcolumns = jnp.einsum(f"btd,btv->{dims}", hidden, dlogits, preferred_element_type=wide).astype(dtype)
      return dhidden, jax.lax.dynamic_update_slice_in_dim(dunembedding, reduce(dcolumns), start, axis)

    carry = jnp.zeros(hidden.shape, wide), jnp.zeros(jax.eval_shape(reduce, unembedding).shape, dtype)
    if width == size:
      return block(carry, 0, size)
    carry = jax.lax.fori_loop(0, size // width, lambda i, carry: block(carry, i * width, width), carry)
    return block(carry, size - size % width, size % width) if size % width else carry

  def _width(self, hidden: jax.Array, size: int) -> int:
    """Columns of a block: at all positions they have as many logits as all columns at `chunk` positions, where that isn't too narrow."""
    batch, length, width = hidden.shape
    logits = LOGITS_PER_CHUNK if self.chunk is None else batch * self.chunk * size
    columns = min(logits // max(1, batch * length), WEIGHTS_PER_BLOCK // width)
    return min(size, max(1, columns // _LANES) * _LANES)


def with_gradient(forward: Callable, backward: Callable) -> Callable:
  """`forward` (hidden, unembedding, targets, topk_ids) -> TokenStats, differentiable in the first two by `backward`, as in Head."""

  def forward_and_saved(hidden, unembedding, targets, topk_ids):
    stats = forward(hidden, unembedding, targets, topk_ids)
    return stats, (hidden, unembedding, targets, stats)

  def gradients(saved, grads):
    dhidden, dunembedding = backward(*saved, (grads.logp, grads.entropy, grads.logsumexp, grads.logp_topk, grads.log_tail))
    return dhidden.astype(saved[0].dtype), dunembedding, None, None

  function = jax.custom_vjp(forward)
  function.defvjp(forward_and_saved, gradients)
  return function


def check_shapes(hidden: jax.Array, unembedding: jax.Array, k: int, temperature: float, chunk: int | None) -> None:
  """Raises the ValueErrors of `token_stats`."""
  vocab = unembedding.shape[1]
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
  tied: bool = False,
) -> TokenStats:
  """TokenStats of `softmax(hidden @ unembedding / temperature)`, `chunk` positions at a time.

  No pass holds more logits than a chunk has, float32 [B, chunk, V]; the backward pass computes them again, a block of the vocabulary at a
  time. The matmul returns float32 (float64 for float64) whatever its inputs are: bf16 logits would be wrong by more than a small KL. The
  gradient to the logits is float32 too, rounded to the dtype of `hidden` only for the matmuls it enters. First derivatives, reverse mode:
  `jax.jvp` is for `stats_from_logits`.

  Args:
    hidden: [B, T, D]; position t predicts targets[:, t].
    unembedding: [D, V].
    targets: int32 [B, T], each in [0, V).
    topk_ids: int32 [B, T, K] to report on, in [0, V) and distinct at each position, or None for the `topk` most likely, found exactly or by
      `approximate` search.
    temperature: > 0; all fields are of the tempered distribution.
    chunk: positions per chunk; by default as many as keep a chunk's logits at LOGITS_PER_CHUNK.
    tied: `unembedding` is a transposed embedding; it is then worked on as it lies in memory, where a loop would keep a transposed copy.

  Raises:
    ValueError: if temperature is not positive, K exceeds V or chunk is below 1.
  """
  check_shapes(hidden, unembedding, topk if topk_ids is None else topk_ids.shape[-1], temperature, chunk)
  head = Head(topk, approximate, temperature, chunk, tied)
  return with_gradient(head.forward, head.backward)(hidden, unembedding.T if tied else unembedding, targets, topk_ids)
