"""Teams: which processes sample together, and the policy's weights as they need them.

The processes that hold parts of the same row of the rollout mesh, its `tensor` axis, form a team; most often that is one process with its
own devices. A team samples on a mesh of its devices alone: no program of sampling spans teams, so that none waits for another's tokens.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax import sharding
from emapg_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Team:
  """Processes that sample together, in ascending order, and the mesh of their devices."""

  mesh: Mesh
  processes: tuple[int, ...]


def rollout_mesh(mesh: Mesh, tensor: int) -> Mesh:
  """The devices of a mesh, process by process, `tensor` of them next to each other for the model and the rest for rows.

  The order of a training mesh follows the wires of a machine and may alternate between processes; here it would make teams of many.
  """
  devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
  return _mesh(np.asarray(devices), tensor)


def _mesh(devices: np.ndarray, tensor: int) -> Mesh:
  return Mesh(devices.reshape(-1, 1, tensor), sharding.AXES, axis_types=(AxisType.Auto,) * len(sharding.AXES))


def team_of(mesh: Mesh, process: int) -> Team:
  """The team of a process, of a mesh that `rollout_mesh` made.

  Raises:
    ValueError: the process has no device in the mesh, or its team has more or fewer rows than its share.
  """
  rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
  owners = [{device.process_index for device in row} for row in rows]
  everyone, members = set().union(*owners), {process}
  while reached := set().union(*(owner for owner in owners if owner & members)) - members:
    members |= reached
  own = [i for i, owner in enumerate(owners) if owner & members]
  if len(own) * len(everyone) != len(rows) * len(members) or process not in everyone:
    raise ValueError(
      f"The {len(rows)} rows of the rollout mesh {dict(mesh.shape)} can't be shared evenly: processes {sorted(members)} of {len(everyone)} "
      f"hold {len(own)} of them. Choose a --rollout_mesh whose tensor axis is a multiple or a divisor of the devices of a process."
    )
  whole = len(own) == len(rows)
  return Team(mesh if whole else _mesh(rows[own], mesh.shape["tensor"]), tuple(sorted(members)))


def weight_shardings(mesh: Mesh, policy: PyTree) -> PyTree:
  """A NamedSharding for each leaf of the policy's weights as `slots.prepare` gives them, from the abstract policy."""
  stacked = sharding.tree_shardings(mesh, policy)
  count = jax.tree.leaves(policy["layers"])[0].shape[0]
  layer = jax.tree.map(lambda s: NamedSharding(mesh, P(*s.spec[1:])), stacked["layers"])
  return {**stacked, "layers": (layer,) * count}


def local_view(weights: PyTree, team: Team) -> PyTree:
  """Weights on the whole rollout mesh as arrays of the team's mesh: the same buffers."""
  if all(x.is_fully_addressable for x in jax.tree.leaves(weights)):
    return weights

  def one(x):
    layout = NamedSharding(team.mesh, x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, layout, [shard.data for shard in x.addressable_shards])

  return jax.tree.map(one, weights)
