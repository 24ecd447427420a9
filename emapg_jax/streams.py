"""Where every random draw comes from: `key(seed)` folded with a stream and indices, so no draw depends on batch order or process."""

import jax
import jax.numpy as jnp

INIT, ROLLOUT, EVAL, MINI_BATCH, WARMUP = range(1, 6)  # streams; their numbers are part of what a seed means. data.py has its own


def stream_key(seed: int, stream: int, *indices: jax.typing.ArrayLike) -> jax.Array:
  """`key(seed)` folded with `stream` and then with each index in turn (integers, traced or not)."""
  key = jax.random.fold_in(jax.random.key(seed), stream)
  for index in indices:
    key = jax.random.fold_in(key, index)
  return key


def row_keys(seed: int, stream: int, step: jax.typing.ArrayLike, uids: jax.Array, samples: jax.Array) -> jax.Array:
  """One key per sampled sequence, [B], from its prompt's uid [B] and its index within the group [B]; tokens fold in their index later."""
  base = stream_key(seed, stream, step)
  return jax.vmap(lambda uid, sample: jax.random.fold_in(jax.random.fold_in(base, uid), sample))(
    uids.astype(jnp.uint32), samples.astype(jnp.uint32)
  )
