"""Sharding is data: a mesh from a flag, and one table from parameter path to PartitionSpec."""

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax.types import PyTree

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))

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


def make_mesh(spec: str, devices: list[jax.Device] | None = None) -> Mesh:
  """The mesh of a spec like `data:2,fsdp:-1`: axes of AXES, -1 at most once for what is left, axes not named have size 1.

  Raises:
    ValueError: an unknown or repeated axis, a size that is no positive number, or sizes that don't multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = dict.fromkeys(AXES, 1)
  seen = set()
  for item in spec.split(","):
    name, _, size = item.strip().partition(":")
    if name not in sizes or name in seen or not re.fullmatch(r"-1|[1-9]\d*", size):
      raise ValueError(
        f"--mesh={spec} is not understood at {item!r}: write AXIS:SIZE with AXIS one of {', '.join(AXES)}, each once, and SIZE a positive "
        "number or -1 for all that is left, as in data:2,fsdp:-1."
      )
    seen.add(name)
    sizes[name] = int(size)
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise ValueError(f"--mesh={spec} leaves {' and '.join(free)} open: only one axis can take what is left (-1).")
  used = int(np.prod([size for size in sizes.values() if size != -1]))
  if free and len(devices) % used == 0:
    sizes[free[0]] = len(devices) // used
  if int(np.prod(list(sizes.values()))) != len(devices):
    raise ValueError(f"--mesh={spec} does not fit {len(devices)} devices: the axis sizes must multiply to {len(devices)}.")
  return jax.make_mesh(tuple(sizes.values()), AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES))


def batch_devices(mesh: Mesh) -> int:
  """Over how many devices the rows of a batch are spread."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


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
    for size, axes in zip(leaf.shape, spec):
      parts = int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())]))
      if size % parts:
        raise ValueError(
          f"{name} of shape {leaf.shape} can't be laid out as {spec} on the mesh {dict(mesh.shape)}: {size} is not a multiple of {parts}. "
          "Choose smaller mesh axes."
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(one, abstract)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over data and fsdp, everything else whole."""
  return NamedSharding(mesh, BATCH)


def constrain_batch(mesh: Mesh, tree: PyTree) -> PyTree:
  """Within jit: lays the leading axis of every leaf over data and fsdp."""
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, batch_sharding(mesh)), tree)


def constrain_slots(mesh: Mesh, tree: PyTree) -> PyTree:
  """Within jit: as `constrain_batch`, and the heads of a KV cache [S, Hkv, C, Dh] over tensor, where there are enough of them."""

  def one(x):
    over_tensor = x.ndim == 4 and x.shape[1] % mesh.shape["tensor"] == 0
    spec = P(*BATCH, "tensor") if over_tensor else BATCH
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  return jax.tree.map(one, tree)
