"""Which token comes next: tempered, truncated and drawn from a row of logits; pure functions. S rows, V vocabulary, K reported ids."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

_CANDIDATES = 256  # ids that are sorted for top-p; all V only where a row's nucleus is larger


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn, in this order: temperature, the `top_k` most likely ids, the smallest set of those with mass `top_p`."""

  temperature: float = 1.0  # 0: greedy
  top_k: int = 0  # 0: all ids
  top_p: float = 1.0
  report_topk: int = 0  # K: ids and log-probabilities that are returned beside each token, before any truncation
  approximate: bool = False  # find those by `jax.lax.approx_max_k`

  def __post_init__(self):
    if not 0 <= self.temperature < float("inf"):
      raise ValueError(f"Sampling.temperature must be finite and at least 0 (0: greedy), got {self.temperature}.")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"Sampling.top_p must lie in (0, 1], got {self.top_p}: 1 keeps every id.")
    if self.top_k < 0 or self.report_topk < 0:
      raise ValueError(f"Sampling.top_k and report_topk must be at least 0, got {self.top_k} and {self.report_topk}.")
    if not self.temperature and self.truncated:
      raise ValueError(f"temperature 0 is greedy and ignores top_k ({self.top_k}) and top_p ({self.top_p}): leave them at 0 and 1.")

  @property
  def truncated(self) -> bool:
    """Whether some ids can't be drawn: then log-probabilities and sampling log-probabilities differ."""
    return self.top_k > 0 or self.top_p < 1


@struct.dataclass
class Drawn:
  """One token per row, or with a leading axis several. Log-probabilities at the sampling temperature; of the raw logits when greedy."""

  ids: jax.Array  # int32 [S]
  logp: jax.Array  # float32 [S], before truncation
  sampling_logp: jax.Array  # float32 [S], of the distribution the id was drawn from
  topk_ids: jax.Array  # int32 [S, K]
  topk_logp: jax.Array  # float32 [S, K]


def _smaller(weights: jax.Array) -> jax.Array:
  """[S, N]: of weights [S, N], the sum of those that are smaller than each, or equal and before it."""
  index = jnp.arange(weights.shape[1])
  own, other = weights[:, :, None], weights[:, None, :]
  counted = (other < own) | ((other == own) & (index[None, None, :] < index[None, :, None]))
  return jnp.sum(jnp.where(counted, other, 0.0), axis=-1)


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """Index drawn in proportion to weights [S, N] by its inverse CDF at uniform [S]; one of weight 0 only where all are.

  Summed from the smallest up: each weight keeps its own relative precision, where a sum in any other order loses the small ones.
  """
  smaller = _smaller(weights)
  reached = (weights > 0) & (smaller <= uniform[:, None] * jnp.max(smaller + weights, axis=-1, keepdims=True))
  return jnp.argmax(jnp.where(reached, smaller, -1.0), axis=-1).astype(jnp.int32)


def _uniforms(key: jax.Array) -> jax.Array:
  """Two uniforms of [0, 1], as fine near 0 as float32 is: a plain one has steps of 2⁻²³."""
  high, low = jax.random.uniform(key, (2, 2))
  return high + low * 2.0**-23


def block_size(vocab: int) -> int:
  """Ids per block of the two-level draw: the power of two next to √V, which makes it cheapest."""
  return 2 ** round(math.log2(vocab) / 2)


def draw(logits: jax.Array, keys: jax.Array) -> jax.Array:
  """One id per row, int32 [S], from softmax(logits [S, V]): inverse CDF over blocks of ids, then inside the block.

  A handful of uniforms per row instead of V Gumbels. Every id has its probability to float32's relative precision, however small it is and
  however large that of its neighbours; an id of logit -inf is never drawn.
  """
  batch, vocab = logits.shape
  block_ids = block_size(vocab)
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.pad(weights, ((0, 0), (0, -vocab % block_ids))).reshape(batch, -1, block_ids)
  uniforms = jax.vmap(_uniforms)(keys)
  block = _pick(jnp.sum(weights, axis=-1), uniforms[:, 0])
  inside = _pick(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], uniforms[:, 1])
  return block * block_ids + inside


def _nucleus(logits: jax.Array, keys: jax.Array, lse: jax.Array, top_p: float) -> tuple[jax.Array, jax.Array]:
  """(position [S], sampling log-probability [S]) drawn from rows of descending logits [S, N] with normaliser lse [S, 1]."""
  mass = jnp.exp(logits - lse)
  before = jnp.cumsum(mass, axis=-1) - mass
  kept = jnp.where((before < top_p) | (jnp.arange(logits.shape[1])[None, :] == 0), logits, -jnp.inf)
  chosen = draw(kept, keys)
  return chosen, jnp.take_along_axis(kept, chosen[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(kept, axis=-1)


def _draw_truncated(logits: jax.Array, keys: jax.Array, lse: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
  """(ids [S], sampling log-probabilities [S]); ids of equal logit are kept in ascending order."""
  vocab = logits.shape[1]

  def among(count):
    values, ids = jax.lax.top_k(logits, count)
    normaliser = jax.nn.logsumexp(values, axis=-1, keepdims=True) if sampling.top_k else lse[:, None]
    chosen, sampling_logp = _nucleus(values, keys, normaliser, sampling.top_p)
    return jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0], sampling_logp

  if sampling.top_k or vocab <= _CANDIDATES:
    return among(min(sampling.top_k or vocab, vocab))
  # Sorting the vocabulary costs more than the model: only where some row's nucleus is wider than the candidates.
  mass = jnp.exp(jax.nn.logsumexp(jax.lax.top_k(logits, _CANDIDATES)[0], axis=-1) - lse)
  fits, narrow = mass >= sampling.top_p, among(_CANDIDATES)
  # Rows that fit keep their draw: which id a key gives depends on how many ids are drawn from.
  return jax.lax.cond(
    jnp.all(fits), lambda: narrow, lambda: jax.tree.map(lambda few, all_: jnp.where(fits, few, all_), narrow, among(vocab))
  )


def next_token(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> Drawn:
  """Draws a token for each row of float32 logits [S, V] with keys [S]; the lowest of the most likely ids when greedy."""
  if sampling.report_topk > logits.shape[1]:
    raise ValueError(f"Sampling.report_topk={sampling.report_topk} exceeds the vocabulary of {logits.shape[1]} ids: use at most that many.")
  if sampling.temperature:
    logits = logits / sampling.temperature
  lse = jax.nn.logsumexp(logits, axis=-1)
  sampling_logp = None
  if not sampling.temperature:
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  elif sampling.truncated:
    ids, sampling_logp = _draw_truncated(logits, keys, lse, sampling)
  else:
    ids = draw(logits, keys)
  logp = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0] - lse
  find = jax.lax.approx_max_k if sampling.approximate and sampling.report_topk else jax.lax.top_k
  values, topk_ids = find(logits, sampling.report_topk)
  return Drawn(ids, logp, logp if sampling_logp is None else sampling_logp, topk_ids, values - lse[:, None])
