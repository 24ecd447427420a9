"""How the slots of a sampler lie on the devices of a mesh: rows over data and fsdp, the heads of a cache over tensor."""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax import sharding
from emapg_jax.rollout.draw import Drawn, Sampling, next_token
from emapg_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where rows are; without a mesh, or with one of a single device, on that device."""

  mesh: Mesh | None = None

  @property
  def shards(self) -> int:
    """Parts that the rows are in, each on devices of its own."""
    return 1 if self.mesh is None else sharding.batch_devices(self.mesh)

  @property
  def activations(self) -> sharding.Activations:
    """The same, for the model."""
    return sharding.Activations(self.mesh)

  @property
  def devices(self) -> int:
    """Devices in all, over which the rows of logits are spread for a draw."""
    return 1 if self.mesh is None else self.mesh.size

  def constrain(self, tree: PyTree) -> PyTree:
    """Within jit: lays the leading axis of every leaf over the shards, and the heads of a cache over tensor."""
    if self.mesh is None:
      return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, sharding.row_spec(x))), tree)

  def next_token(self, logits: jax.Array, keys: jax.Array, sampling: Sampling) -> Drawn:
    """`draw.next_token` with whole rows of logits on each device: what a vocabulary split over tensor costs is an all-to-all of them."""
    if self.devices == 1:
      return next_token(logits, keys, sampling)
    # Said of the logits as they come, or the unembedding would be gathered to make them whole.
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(self.mesh, P(*sharding.BATCH, "tensor")))
    rows = P(sharding.AXES)
    drawn = jax.shard_map(
      lambda logits, keys: next_token(logits, keys, sampling), mesh=self.mesh, in_specs=rows, out_specs=rows, check_vma=False
    )(logits, keys)
    return self.constrain(drawn)

  def fetched(self, tree: PyTree) -> PyTree:
    """Within jit: what the host reads; whole on each process, where several share the mesh."""
    if self.mesh is None or len({device.process_index for device in self.mesh.devices.flat}) == 1:
      return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P())), tree)


ONE_DEVICE = Layout()
