"""Slots: rows of one KV cache that sequences pass through. The pure functions that a sampler jits: prefill, insert, decode.

S slots of C cache positions, N prompts of up to P tokens, B tokens per decode block. A token at position p of its sequence lies in cache
position p of its slot; a query sees positions up to its own, so that what an earlier sequence left behind is overwritten before it is seen.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct

from emapg_jax.models import decoder
from emapg_jax.rollout.draw import Drawn, Sampling, next_token
from emapg_jax.types import PyTree


@struct.dataclass
class Slots:
  """What decoding carries from token to token."""

  cache: decoder.Cache  # per layer: keys and values [S, Hkv, C, Dh]
  token: jax.Array  # int32 [S], read next; its keys and values are not in the cache yet, or are written once more
  position: jax.Array  # int32 [S], of that token
  index: jax.Array  # int32 [S], of the response token that is drawn next
  limit: jax.Array  # int32 [S], response tokens at most
  keys: jax.Array  # PRNG keys [S]


@struct.dataclass
class Arrivals:
  """Sequences that enter slots; the first `count` of S entries."""

  count: jax.Array  # int32 []
  slot: jax.Array  # int32 [S], where to; S for entries beyond `count`
  prompt: jax.Array  # int32 [S], row of the prefilled prompts
  token: jax.Array  # int32 [S], last token of the prompt
  position: jax.Array  # int32 [S], of that token
  limit: jax.Array  # int32 [S]
  keys: jax.Array  # PRNG keys [S]


def prepare(config: decoder.DecoderConfig, params: PyTree) -> PyTree:
  """Parameters for decoding: each layer by itself, matmul weights in `config.dtype`; norm scales keep their precision, as in training."""
  return jax.tree.map(lambda a: a.astype(config.dtype) if a.ndim > 1 else a, decoder.unstack_layers(params))


def empty_slots(config: decoder.DecoderConfig, slots: int, size: int, key: jax.Array) -> Slots:
  """Slots that nothing has entered yet; `key` only says what kind of keys there will be."""
  zeros = jnp.zeros((slots,), jnp.int32)
  keys = jnp.broadcast_to(key, (slots,))
  return Slots(cache=decoder.empty_cache(config, slots, size), token=zeros, position=zeros, index=zeros, limit=zeros, keys=keys)


def prefill(config: decoder.DecoderConfig, params: PyTree, cache: decoder.Cache, tokens: jax.Array, start: jax.Array) -> decoder.Cache:
  """Writes the keys and values of prompt tokens [N, L], at positions start to start + L − 1, to a cache [N, Hkv, P, Dh]."""
  positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
  return decoder.apply_cached(config, params, tokens, positions, cache)[1]


def insert(slots: Slots, prompts: decoder.Cache, arrivals: Arrivals) -> Slots:
  """Copies prefilled prompts [N, Hkv, P, Dh] into slots: a prompt of several samples is copied for each."""

  def copy(i, cache):
    return jax.tree.map(
      lambda to, prompt: jax.lax.dynamic_update_slice(
        to, jax.lax.dynamic_slice_in_dim(prompt, arrivals.prompt[i], 1), (arrivals.slot[i], 0, 0, 0)
      ),
      cache,
      prompts,
    )

  def enter(now, new):
    return now.at[arrivals.slot].set(new, mode="drop")

  return Slots(
    cache=jax.lax.fori_loop(0, arrivals.count, copy, slots.cache),
    token=enter(slots.token, arrivals.token),
    position=enter(slots.position, arrivals.position),
    index=enter(slots.index, jnp.zeros_like(arrivals.limit)),
    limit=enter(slots.limit, arrivals.limit),
    keys=enter(slots.keys, arrivals.keys),
  )


def decode_block(
  config: decoder.DecoderConfig,
  params: PyTree,
  slots: Slots,
  alive: jax.Array,
  *,
  sampling: Sampling,
  eos_ids: Sequence[int],
  block: int,
  visible: int,
  constrain: Callable[[PyTree], PyTree] = lambda x: x,
) -> tuple[Slots, jax.Array, jax.Array, Drawn]:
  """Up to `block` tokens for each slot that is alive; ends early when none is.

  Args:
    params: as `prepare` makes them.
    alive: bool [S]; the others draw nothing and change nothing.
    eos_ids: a sequence ends with any of them.
    visible: cache positions that are read; at least the largest position that is reached, plus 1.
    constrain: lays slots out over the devices.

  Returns:
    The slots; alive [S], False where an end id was drawn or the limit reached; ended [S], True where an end id was drawn in this block;
    what was drawn, [B, S], of which slot s has the first `index after − index before` entries.
  """
  ends = jnp.asarray(tuple(eos_ids), jnp.int32)

  def unfinished(carry):
    step, _, alive, _, _ = carry
    return (step < block) & jnp.any(alive)

  def step(carry):
    number, slots, alive, ended, out = carry
    hidden, cache = decoder.apply_cached(config, params, slots.token[:, None], slots.position[:, None], slots.cache, visible)
    drawn = next_token(decoder.logits(params, hidden[:, 0]), jax.vmap(jax.random.fold_in)(slots.keys, slots.index), sampling)
    out = jax.tree.map(lambda all, one: all.at[number].set(one), out, drawn)
    index = slots.index + alive
    ended = ended | (alive & jnp.any(drawn.ids[:, None] == ends[None, :], axis=-1))
    slots = slots.replace(cache=cache, token=jnp.where(alive, drawn.ids, slots.token), position=slots.position + alive, index=index)
    return number + 1, constrain(slots), alive & ~ended & (index < slots.limit), ended, out

  one = jax.eval_shape(lambda: next_token(jnp.zeros((alive.shape[0], config.vocab_size), jnp.float32), slots.keys, sampling))
  out = jax.tree.map(lambda a: jnp.zeros((block, *a.shape), a.dtype), one)
  _, slots, alive, ended, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), slots, alive, jnp.zeros_like(alive), out))
  return constrain(slots), alive, ended, out
