"""Slots: rows of one KV cache that sequences pass through. The pure functions that a sampler jits: prefill, insert, decode.

Slots and prefilled prompts are in equal shards, each on devices of its own (`Layout`); a prompt is prefilled where its sequences are.

S slots of C cache positions, N prompts of up to P tokens, B tokens per decode block. A token at position p of its sequence lies in cache
position p of its slot; a query sees positions up to its own, so that what an earlier sequence left behind is overwritten before it is seen.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from emapg_jax.models import decoder
from emapg_jax.rollout.draw import Drawn, Sampling
from emapg_jax.rollout.layout import ONE_DEVICE, Layout
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
  """Sequences that enter slots: of each shard's part of the S entries the first `count`. Slots and prompts are numbered within a shard."""

  count: jax.Array  # int32 [shards]
  slot: jax.Array  # int32 [S], where to; for entries beyond `count`, a number that no slot has
  prompt: jax.Array  # int32 [S], row of the prefilled prompts
  token: jax.Array  # int32 [S], last token of the prompt
  position: jax.Array  # int32 [S], of that token
  limit: jax.Array  # int32 [S]
  keys: jax.Array  # uint32 [S, ...], the data of PRNG keys


def prepare(config: decoder.DecoderConfig, params: PyTree) -> PyTree:
  """Parameters for decoding: each layer by itself, matmul weights in `config.dtype`; norm scales keep their precision, as in training."""
  return jax.tree.map(lambda a: a.astype(config.dtype) if a.ndim > 1 else a, decoder.unstack_layers(params))


def empty_slots(config: decoder.DecoderConfig, slots: int, size: int, impl: str) -> Slots:
  """Slots that nothing has entered yet; `impl` is that of the keys there will be."""
  zeros = jnp.zeros((slots,), jnp.int32)
  keys = jnp.broadcast_to(jax.random.key(0, impl=impl), (slots,))
  return Slots(cache=decoder.empty_cache(config, slots, size), token=zeros, position=zeros, index=zeros, limit=zeros, keys=keys)


def prefill(
  config: decoder.DecoderConfig, params: PyTree, cache: decoder.Cache, tokens: jax.Array, start: jax.Array, layout: Layout
) -> decoder.Cache:
  """Writes the keys and values of prompt tokens [N, L], at positions start to start + L − 1, to a cache [N, Hkv, P, Dh].

  start: int32 [N]; a row that starts behind the cache leaves it as it was.
  """
  positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
  return layout.constrain(decoder.apply_cached(config, params, tokens, positions, cache, placed=layout.activations)[1])


def insert(slots: Slots, prompts: decoder.Cache, arrivals: Arrivals, layout: Layout) -> Slots:
  """Copies prefilled prompts [N, Hkv, P, Dh] into slots: a prompt of several samples is copied for each. No shard sees another's."""
  return layout.constrain(layout.activations.by_shard(_insert, slots, prompts, arrivals))


def _insert(slots: Slots, prompts: decoder.Cache, arrivals: Arrivals) -> Slots:
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
    cache=jax.lax.fori_loop(0, arrivals.count[0], copy, slots.cache),
    token=enter(slots.token, arrivals.token),
    position=enter(slots.position, arrivals.position),
    index=enter(slots.index, jnp.zeros_like(arrivals.limit)),
    limit=enter(slots.limit, arrivals.limit),
    keys=enter(slots.keys, jax.random.wrap_key_data(arrivals.keys, impl=jax.random.key_impl(slots.keys))),
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
  layout: Layout = ONE_DEVICE,
) -> tuple[Slots, tuple[jax.Array, jax.Array, jax.Array, Drawn]]:
  """Up to `block` tokens for each slot that is alive; ends early when none is.

  Args:
    params: as `prepare` makes them.
    alive: bool [S]; the others draw nothing and change nothing.
    eos_ids: a sequence ends with any of them.
    visible: cache positions that are read; at least the largest position that is reached, plus 1.

  Returns:
    The slots; and for the host: their index [S]; alive [S], False where an end id was drawn or the limit reached; ended [S], True where
    an end id was drawn in this block; what was drawn, [B, S], of which slot s has the first `index after − index before` entries.
  """
  ends = jnp.asarray(tuple(eos_ids), jnp.int32)

  def unfinished(carry):
    step, _, alive, _, _ = carry
    return (step < block) & jnp.any(alive)

  def step(carry):
    number, slots, alive, ended, out = carry
    hidden, cache = decoder.apply_cached(
      config, params, slots.token[:, None], slots.position[:, None], slots.cache, visible, layout.activations
    )
    drawn = layout.next_token(decoder.logits(params, hidden[:, 0]), jax.vmap(jax.random.fold_in)(slots.keys, slots.index), sampling)
    out = jax.tree.map(lambda all, one: all.at[number].set(one), out, drawn)
    index = slots.index + alive
    ended = ended | (alive & jnp.any(drawn.ids[:, None] == ends[None, :], axis=-1))
    slots = slots.replace(cache=cache, token=jnp.where(alive, drawn.ids, slots.token), position=slots.position + alive, index=index)
    return number + 1, layout.constrain(slots), alive & ~ended & (index < slots.limit), ended, out

  one = jax.eval_shape(lambda: layout.next_token(jnp.zeros((alive.shape[0], config.vocab_size), jnp.float32), slots.keys, sampling))
  out = jax.tree.map(lambda a: jnp.zeros((block, *a.shape), a.dtype), one)
  _, slots, alive, ended, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), slots, alive, jnp.zeros_like(alive), out))
  return layout.constrain(slots), layout.fetched((slots.index, alive, ended, out))
