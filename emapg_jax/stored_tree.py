"""The arrays of a train state as a checkpoint holds them: by name, typed keys as their data, each with a checksum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emapg_jax.types import PyTree

_SHOWN = 8  # mismatching leaves named in an error; a whole missing subtree would fill the screen
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes; of eight, both halves


def leaves(tree: PyTree) -> dict[str, Any]:
  """Each leaf by its path, as in `params/layers/attn/q/kernel`."""
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(tree: PyTree) -> PyTree:
  """The tree with the data of typed PRNG keys in their place: files know no such type."""
  return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def typed(tree: PyTree, like: PyTree) -> PyTree:
  """The inverse of `plain`; `like` says where keys were, and of which kind."""
  return jax.tree.map(lambda x, y: jax.random.wrap_key_data(x, impl=jax.random.key_impl(y)) if _is_key(y) else x, tree, like)


def targets(abstract: PyTree) -> PyTree:
  """What a restored tree must look like, `plain`: shapes, dtypes and shardings.

  Raises:
    ValueError: a leaf has no sharding, or one whose devices don't divide its shape.
  """
  named = leaves(abstract)
  missing = [name for name, leaf in named.items() if getattr(leaf, "sharding", None) is None]
  if missing:
    raise ValueError(
      f"No sharding is given for {', '.join(missing[:_SHOWN])}: a restored array has to know its devices. Set it on the abstract state."
    )
  for name, leaf in named.items():
    try:
      leaf.sharding.shard_shape(leaf.shape)
    except ValueError as error:
      raise ValueError(
        f"{name} of shape {leaf.shape} can't be laid out as {leaf.sharding}: its devices don't divide that. Choose another mesh."
      ) from error

  def target(leaf):
    shape = jax.eval_shape(plain, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)

  return jax.tree.map(target, abstract)


def require_same_leaves(saved: PyTree, wanted: PyTree, where: str, remedy: str) -> None:
  """Refuses a tree with other leaves, shapes or dtypes.

  Raises:
    ValueError: with the name of each leaf that differs; `where` says what holds the saved tree, `remedy` what to do.
  """

  def describe(found: dict[str, Any], name: str) -> str:
    return f"{jnp.dtype(found[name].dtype).name}{list(found[name].shape)}" if name in found else "nothing"

  has, wants = leaves(saved), leaves(wanted)
  bad = [name for name in sorted(has.keys() | wants.keys()) if describe(has, name) != describe(wants, name)]
  if bad:
    lines = [f"{name}: checkpoint {describe(has, name)}, run {describe(wants, name)}" for name in bad[:_SHOWN]]
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    raise ValueError(
      f"{where} does not fit this run in {len(bad)} of its arrays: {'; '.join(lines)}{more}. {remedy}, or use another --workdir."
    )


def _place(shape: tuple[int, ...]) -> jax.Array:
  """The number of each place of an array, modulo 2³²."""
  place = jnp.zeros(shape, jnp.uint32)
  for axis, size in enumerate(shape):
    place = place * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  return place


@jax.jit
def _sum_of_bits(x: jax.Array) -> jax.Array:
  bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
  # Each step can be undone, so that no two values of a word become the same; MurmurHash3 ends with these.
  mixed = bits.astype(jnp.uint32) ^ (_place(bits.shape) * np.uint32(0x9E3779B1))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
  return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def checksums(tree: PyTree) -> dict[str, int]:
  """For each leaf the sum of its words, each mixed with its place, modulo 2³².

  One flipped bit always changes it; several, or parts that changed places, all but once in 2³²; another mesh never does.

  It is computed where the arrays are. What stores them checks its own tables, but not the bytes of large arrays.
  """

  def one(x):
    devices_own = next(iter(x.sharding.addressable_devices)).default_memory().kind
    if x.sharding.memory_kind not in (None, devices_own):
      x = jax.device_put(x, x.sharding.with_memory_kind(devices_own))
    return int(_sum_of_bits(x))  # waited for: simulated devices on few cores abort when many collective programs are in flight

  return {name: one(leaf) for name, leaf in leaves(plain(tree)).items()}


def changed(tree: PyTree, sums: dict[str, int]) -> str:
  """Names the leaves of a restored tree whose checksum is not that in `sums`, which may hold more; empty when none."""
  found = checksums(tree)
  bad = [name for name, value in found.items() if sums.get(name) != value]
  return ", ".join(bad[:_SHOWN]) + (f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
