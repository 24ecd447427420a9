"""Sampling with a KV cache: right-padded prompts, a write position per row, one jitted loop that stops when every row has ended."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from emapg_jax.models import decoder
from emapg_jax.types import PyTree

_BLOCK = 256  # ids per block of the two-level draw


@struct.dataclass
class Rollout:
  """Responses of up to T tokens; beyond a row's length, tokens are `pad_id` and log-probabilities 0."""

  tokens: jax.Array  # int32 [B, T], as sampled, the end token included
  length: jax.Array  # int32 [B], at least 1
  logp: jax.Array  # float32 [B, T], log-probability of each token at the sampling temperature; of the raw logits when greedy
  ended: jax.Array  # bool [B], True: reason `eos`; False: reason `length`


def draw(logits: jax.Array, keys: jax.Array) -> jax.Array:
  """One id per row, int32 [B], from softmax(logits [B, V]): inverse CDF over blocks of ids, then inside the block.

  Two uniforms per row instead of V Gumbels; the second keeps ids of probability below float32's resolution of a uniform reachable.
  An id of logit -inf is never drawn.
  """
  batch, vocab = logits.shape
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(batch, -1, _BLOCK)
  uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)

  def pick(masses, uniform):
    cumulative = jnp.cumsum(masses, axis=-1)
    return jnp.sum(cumulative <= uniform[:, None] * cumulative[:, -1:], axis=-1)

  block = pick(jnp.sum(weights, axis=-1), uniforms[:, 0])
  inside = pick(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], uniforms[:, 1])
  return jnp.minimum(block * _BLOCK + inside, vocab - 1).astype(jnp.int32)


def _next_token(hidden, head, keys, index, temperature):
  """(ids [B], log-probabilities [B]) of token `index` from hidden [B, D]; greedy, lower id first, at temperature 0."""
  logits = jnp.einsum("bd,dv->bv", hidden, head, preferred_element_type=jnp.float32)
  if temperature:
    logits = logits / temperature
    ids = draw(logits, jax.vmap(lambda key: jax.random.fold_in(key, index))(keys))
  else:
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logp = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
  return ids, logp


def sample(
  config: decoder.DecoderConfig,
  params: PyTree,
  prompts: jax.Array,
  prompt_length: jax.Array,
  keys: jax.Array,
  *,
  max_new_tokens: int,
  temperature: float,
  eos_ids: Sequence[int],
  pad_id: int,
) -> Rollout:
  """Continues each prompt until an id of `eos_ids` has been sampled or `max_new_tokens` are there.

  Args:
    prompts: int32 [B, P], right-padded.
    prompt_length: int32 [B], 1 to P.
    keys: typed PRNG keys [B]; token t of a row is drawn with fold_in(key, t).
    temperature: > 0, or 0 for greedy. Static, like all keyword arguments.
  """
  batch = prompts.shape[0]
  rows = jnp.arange(batch)
  ends = jnp.asarray(tuple(eos_ids), jnp.int32)
  hidden, cache = decoder.apply(config, params, prompts, return_cache=True)
  hidden = jnp.take_along_axis(hidden, (prompt_length - 1)[:, None, None], axis=1)[:, 0]
  cache = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, max_new_tokens), (0, 0), (0, 0))), cache)
  # Matmul weights are cast once; norm scales keep their precision, as in training.
  params = jax.tree.map(lambda a: a.astype(config.dtype) if a.ndim > 1 else a, decoder.unstack_layers(params))
  head = decoder.unembedding(params)

  def record(out, index, token, logp):
    alive = ~out.ended
    return Rollout(
      tokens=out.tokens.at[:, index].set(jnp.where(alive, token, pad_id)),
      length=out.length + alive,
      logp=out.logp.at[:, index].set(jnp.where(alive, logp, 0.0)),
      ended=out.ended | jnp.any(token[:, None] == ends[None, :], axis=-1),
    )

  def unfinished(carry):
    index, out, _ = carry
    return (index < max_new_tokens) & ~jnp.all(out.ended)

  def step(carry):
    index, out, cache = carry
    hidden, cache = decoder.apply(config, params, out.tokens[rows, index - 1][:, None], (prompt_length + index - 1)[:, None], cache)
    out = record(out, index, *_next_token(hidden[:, 0], head, keys, index, temperature))
    return index + 1, out, cache

  out = Rollout(
    tokens=jnp.full((batch, max_new_tokens), pad_id, jnp.int32),
    length=jnp.zeros((batch,), jnp.int32),
    logp=jnp.zeros((batch, max_new_tokens), jnp.float32),
    ended=jnp.zeros((batch,), bool),
  )
  out = record(out, 0, *_next_token(hidden, head, keys, 0, temperature))
  return jax.lax.while_loop(unfinished, step, (jnp.int32(1), out, cache))[1]
