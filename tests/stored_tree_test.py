"""What a checkpoint makes of a tree: typed keys, integer keys, tuples and dtypes come back, and each array with its checksum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from emapg_jax import stored_tree
from emapg_jax.checkpoint import Checkpointer, HostState
from tests.checkpoint_test import abstract, assert_same, make_mesh, make_state, write


def test_a_tree_of_everything_comes_back(tmp_path):
  layers = {i: {"kernel": jnp.full((2, 3), i, jnp.bfloat16), "bias": jnp.full((3,), -i, jnp.float32)} for i in range(12)}
  state = {
    "layers": layers,
    "optimizer": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(layers),
    "keys": (jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 5)),
    "pair": (jnp.int32(7), jnp.asarray([True, False])),
  }
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    checkpointer.save(1, state, HostState())
    other = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros_like(x), state)
    restored = checkpointer.restore_latest(other)[0]
  assert list(restored["layers"]) == list(range(12))
  assert [key.dtype for key in restored["keys"]] == [key.dtype for key in state["keys"]]
  assert (jax.random.bits(restored["keys"][0]) == jax.random.bits(state["keys"][0])).all()
  assert_same(stored_tree.plain(restored), stored_tree.plain(state))
  # The next update meets every leaf, by its own name.
  grads = jax.tree.map(jnp.ones_like, restored["layers"])
  updates, _ = optax.chain(optax.clip(1.0), optax.adam(1e-3)).update(grads, restored["optimizer"], restored["layers"])
  assert all((np.asarray(leaf, np.float32) < 0).all() for leaf in jax.tree.leaves(updates))


def test_a_key_is_no_array_of_its_numbers(tmp_path):
  write(tmp_path, 1, state={"key": jax.random.key(0)})
  with Checkpointer(str(tmp_path), 1) as checkpointer, pytest.raises(ValueError, match=r"key: checkpoint uint32\[2\], run uint32\[4\]"):
    checkpointer.restore_latest({"key": jax.random.key(0, impl="rbg")})


def test_an_impossible_layout_is_no_damage(tmp_path):
  state = make_state((2, 4))
  write(tmp_path, 3, state=state)
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    with pytest.raises(ValueError, match=r"^params/dense/kernel of shape \(8, 16\) can't be laid out as .*'fsdp': 6.*another mesh"):
      checkpointer.restore_latest(abstract(state, make_mesh((1, 6))))
    assert_same(checkpointer.restore_latest(abstract(state, make_mesh((4, 1))))[0], state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool"])
def test_one_bit_changes_the_checksum(dtype):
  numbers = np.random.default_rng(0).integers(0, 2, 24)
  x = np.asarray(numbers, dtype=jnp.dtype(dtype)).reshape(4, 6)
  assert stored_tree.changed({"x": jnp.asarray(x)}, stored_tree.checksums({"x": jnp.asarray(x)})) == ""
  for bit in range(1 if dtype == "bool" else 8 * x.dtype.itemsize):
    flipped = x.copy()
    flipped.reshape(-1).view(np.uint8)[x.dtype.itemsize * 7 + bit // 8] ^= 1 << bit % 8
    assert stored_tree.changed({"x": jnp.asarray(flipped)}, stored_tree.checksums({"x": jnp.asarray(x)})) == "x"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_changed_places_and_signs_change_the_checksum(dtype):
  x = np.arange(2**17, dtype=np.float32).reshape(2, 256, 256) % 127
  sums = stored_tree.checksums({"x": jnp.asarray(x, dtype)})
  for other in (x[::-1], x[:, ::-1], x[:, :, ::-1], x.swapaxes(1, 2), np.roll(x, 1), -x, np.where(x < 2, -x, x)):
    assert stored_tree.changed({"x": jnp.asarray(other, dtype)}, sums) == "x"


def test_a_checksum_is_that_of_the_numbers_and_not_of_their_layout(monkeypatch):
  x = jax.random.normal(jax.random.key(0), (8, 16))
  bits = np.asarray(x).view(np.uint32)
  mixed = bits ^ (np.arange(bits.size, dtype=np.uint32).reshape(bits.shape) * np.uint32(0x9E3779B1))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
  expected = int((mixed ^ (mixed >> 16)).sum(dtype=np.uint32))
  for shape, spec in (((1, 1), ("data", "fsdp")), ((2, 4), ("data", "fsdp")), ((4, 2), ("fsdp", "data")), ((2, 4), ())):
    placed = jax.device_put(x, NamedSharding(make_mesh(shape), PartitionSpec(*spec)))
    assert stored_tree.checksums({"a": {"b": placed}}) == {"a/b": expected}
  on_host = jax.device_put(x, NamedSharding(make_mesh((2, 4)), PartitionSpec("data"), memory_kind="pinned_host"))
  assert on_host.sharding.memory_kind == "pinned_host"
  assert stored_tree.checksums({"x": on_host}) == {"x": expected}
  # An accelerator computes on nothing that lies in the host's memory, while a CPU does.
  seen = []
  monkeypatch.setattr(stored_tree, "_sum_of_bits", lambda x: seen.append(x.sharding.memory_kind) or 0)
  stored_tree.checksums({"x": on_host})
  assert seen == ["device"]
