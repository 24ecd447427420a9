"""Sharding is data: a mesh from a flag, and one table from parameter path to PartitionSpec."""

import dataclasses
import math
import re
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax.types import PyTree

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))

# Key/value heads fewer than the devices of `tensor` are on each of them: attention copies them there (`kv_copies`).
_KV_HEADS = r"attn/[kv]/(kernel|bias)$"

# Matched against the end of a leaf's path, so that the anchor and the optimizer's moments lie like the parameters they belong to.
TABLE = (
  (r"embed/embedding", P("tensor", "fsdp")),
  (r"attn/[qkv]/kernel", P(None, "fsdp", "tensor", None)),
  (r"attn/[qkv]/bias", P(None, "tensor", None)),
  (r"attn/o/kernel", P(None, "tensor", None, "fsdp")),
  (r"mlp/(gate|up)/kernel", P(None, "fsdp", "tensor")),
  (r"mlp/down/kernel", P(None, "tensor", "fsdp")),
  (r"(attn_norm|mlp_norm|final_norm)/scale", P()),
  (r"lm_head/kernel", P("fsdp", "tensor")),
  (r"head/kernel", P("fsdp", None)),  # the critic's: its one column can't be split
  (r"head/bias", P()),
  (r"count|step", P()),
)


def mesh_sizes(spec: str, count: int, flag: str = "mesh") -> dict[str, int]:
  """The size of each axis of AXES in a spec like `data:2,fsdp:-1` for `count` devices; -1 at most once for what is left, 1 if not named.

  Raises:
    ValueError: an unknown or repeated axis, a size that is no positive number, or sizes that don't multiply to `count`.
  """
  sizes = dict.fromkeys(AXES, 1)
  seen = set()
  for item in spec.split(","):
    name, _, size = item.strip().partition(":")
    if name not in sizes or name in seen or not re.fullmatch(r"-1|[1-9]\d*", size):
      raise ValueError(
        f"--{flag}={spec} is not understood at {item!r}: write AXIS:SIZE with AXIS one of {', '.join(AXES)}, each once, and SIZE a "
        "positive number or -1 for all that is left, as in data:2,fsdp:-1."
      )
    seen.add(name)
    sizes[name] = int(size)
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise ValueError(f"--{flag}={spec} leaves {' and '.join(free)} open: only one axis can take what is left (-1).")
  used = int(np.prod([size for size in sizes.values() if size != -1]))
  if free and count % used == 0:
    sizes[free[0]] = count // used
  if int(np.prod(list(sizes.values()))) != count:
    raise ValueError(f"--{flag}={spec} does not fit {count} devices: the axis sizes must multiply to {count}.")
  return sizes


def make_mesh(spec: str, devices: list[jax.Device] | None = None) -> Mesh:
  """The mesh of a spec, see `mesh_sizes`."""
  devices = jax.devices() if devices is None else devices
  sizes = mesh_sizes(spec, len(devices))
  shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(AXES)
  try:
    return jax.make_mesh(shape, AXES, devices=devices, axis_types=types)
  except NotImplementedError:  # an axis is only a part of one of a TPU slice: tensor:2 on v6e:4x4
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES, axis_types=types)


def batch_devices(mesh: Mesh) -> int:
  """Over how many devices the rows of a batch are spread."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def kv_copies(num_kv_heads: int, num_heads: int, devices: int) -> int:
  """How many copies of each key/value head attention makes so that each of the `devices` of the axis tensor has heads of its own.

  Raises:
    ValueError: the heads, or the copies of the key/value heads, can't be spread evenly.
  """
  copies = devices // math.gcd(num_kv_heads, devices)
  if num_heads % devices or num_heads % (num_kv_heads * copies):
    raise ValueError(
      f"{num_heads} heads that share {num_kv_heads} key/value heads can't be spread over {devices} devices of the mesh axis tensor: choose "
      f"a size of it that divides {num_heads}, and that divides {num_kv_heads} or is a multiple of it."
    )
  return copies


def path_name(path: tuple) -> str:
  """`opt_state/1/0/mu/layers/attn/q/kernel` from a jax key path."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def tree_shardings(mesh: Mesh, abstract: PyTree) -> PyTree:
  """A NamedSharding for every leaf, from TABLE.

  Raises:
    ValueError: a leaf that no pattern matches, or a dimension that its mesh axes don't divide; with path, shape and spec.
  """

  def one(path, leaf):
    name = path_name(path)
    spec = next((spec for pattern, spec in TABLE if re.search(rf"(^|/)({pattern})$", name)), None)
    if spec is None:
      raise ValueError(f"No sharding is given for {name} of shape {leaf.shape}: add its pattern to TABLE in emapg_jax/sharding.py.")
    if re.search(_KV_HEADS, name) and leaf.shape[-2] % mesh.shape["tensor"]:
      spec = P(*(None if axes == "tensor" else axes for axes in spec))
    for size, axes in zip(leaf.shape, spec):
      parts = int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())]))
      if size % parts:
        raise ValueError(
          f"{name} of shape {leaf.shape} can't be laid out as {spec} on the mesh {dict(mesh.shape)}: {size} is not a multiple of {parts}. "
          "Choose smaller mesh axes."
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(one, abstract)


def device_bytes(tree: PyTree, memory: str = "device") -> int:
  """Bytes that arrays, or shapes with a layout, take of the memory of each device; of its host's with memory="pinned_host"."""

  def one(a) -> int:
    layout = getattr(a, "sharding", None)  # None: of the host, and whole on each device that computes with it
    if ((layout and layout.memory_kind) or "device") != memory:
      return 0
    return math.prod(layout.shard_shape(a.shape) if layout else a.shape) * a.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over data and fsdp, everything else whole."""
  return NamedSharding(mesh, BATCH)


def constrain_batch(mesh: Mesh, tree: PyTree) -> PyTree:
  """Within jit: lays the leading axis of every leaf over data and fsdp."""
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, batch_sharding(mesh)), tree)


def row_spec(x: jax.Array) -> P:
  """Rows over data and fsdp; of keys, values and caches of them [B, Hkv, S, Dh] also the heads over tensor."""
  return P(*BATCH, "tensor") if x.ndim == 4 else BATCH


@dataclasses.dataclass(frozen=True)
class Activations:
  """How activations lie on a mesh, their rows over data and fsdp; without a mesh, or with one of a single device, on that device."""

  mesh: Mesh | None = None

  def _on(self, x: jax.Array, spec: P) -> jax.Array:
    if self.mesh is None or self.mesh.size == 1:
      return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def constrain(self, x: jax.Array) -> jax.Array:
    """Within jit: at the borders of blocks, where XLA may otherwise divide by width and leave all rows on every device."""
    return self._on(x, BATCH)

  def lookup(self, embedding: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """Within jit: rows of an embedding [V, D], in `dtype`, for tokens [B, S].

    Each device looks up its share of the width for the rows of all devices of `fsdp`, which then exchange rows for widths. Left to itself
    XLA gathers the embedding.
    """
    found = embedding[self._on(tokens, P("data"))].astype(dtype)
    return self.constrain(self._on(found, P("data", None, "fsdp")))

  def by_shard(self, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Within jit: `function` of each device's part of the arguments, laid out as `row_spec` says, and of nothing else."""
    if self.mesh is None or self.mesh.size == 1:
      return function(*args)
    in_specs, out_specs = (jax.tree.map(row_spec, tree) for tree in (args, jax.eval_shape(function, *args)))
    return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)


ANYWHERE = Activations()
