"""The policy as sampling sees it: which mesh it lies on, and how its weights come there."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from emapg_jax import sharding
from emapg_jax.config import RunConfig
from emapg_jax.models import decoder
from emapg_jax.rollout.team import rollout_mesh, weight_shardings
from emapg_jax.types import TrainState
from experiments.units import of_bytes

_SPARE = 0.1  # of a device's memory, for what decoding works with


@dataclasses.dataclass(frozen=True)
class RolloutModel:
  """What `rollout_model` finds."""

  mesh: Mesh
  slots: int  # on all devices, a multiple of their number
  config: decoder.DecoderConfig


def rollout_model(
  config: RunConfig,
  model_config: decoder.DecoderConfig,
  mesh: Mesh,
  state: TrainState,
  device_bytes: int | None = None,
  keep_initial: bool = False,
) -> RolloutModel:
  """The model on the mesh of `--rollout_mesh`; by default with as few devices for each copy of weights and cache as hold them.

  Args:
    mesh: of training, whose devices it takes in their order.
    state: abstract, with the layout that the weights come from and that stays where it is.
    device_bytes: memory of a device; None, where it is not known, stands for enough.
    keep_initial: whether a copy of the policy as it began is kept as well.

  Raises:
    ValueError: a mesh that does not fit, or over whose axis `fsdp` each token would gather every weight; slots that memory does not hold.
  """
  if config.rollout_slots % mesh.size:
    raise ValueError(
      f"--rollout_slots={config.rollout_slots} can't be spread over {mesh.size} devices: make it a multiple of {mesh.size}, or 0."
    )
  if config.rollout_mesh == "auto":
    candidates = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0]
  else:
    sizes = sharding.mesh_sizes(config.rollout_mesh, mesh.size, "rollout_mesh")
    if sizes["fsdp"] > 1:
      raise ValueError(
        f"--rollout_mesh={config.rollout_mesh} spreads weights over fsdp, where every token would gather all of them: use data and tensor."
      )
    candidates = [sizes["tensor"]]
  kept = sharding.device_bytes(state) + (sharding.device_bytes(state.policy) if keep_initial else 0)
  tensor, slots = _choose(config, model_config, mesh, state, kept, device_bytes, candidates)
  made, model_config = rollout_mesh(mesh, tensor), _with_copies(model_config, tensor)
  return RolloutModel(made, slots, model_config)


def _with_copies(model_config: decoder.DecoderConfig, tensor: int) -> decoder.DecoderConfig:
  copies = sharding.kv_copies(model_config.num_kv_heads, model_config.num_heads, tensor)
  return dataclasses.replace(model_config, kv_copies=copies)


def _choose(
  config: RunConfig,
  model_config: decoder.DecoderConfig,
  mesh: Mesh,
  state: TrainState,
  kept: int,
  device_bytes: int | None,
  candidates: list[int],
) -> tuple[int, int]:
  """The first `tensor` of the candidates with which the slots that are asked for fit, or the one with most slots; and how many."""
  wanted = mesh.size * -(-(config.rollout_slots or config.rows) // mesh.size)
  found = []
  for tensor in candidates:
    try:
      model = _with_copies(model_config, tensor)
      weight_shardings(rollout_mesh(mesh, tensor), state.policy)
    except ValueError:
      if len(candidates) == 1:
        raise
      continue
    weights, slot = _sampling_bytes(config, model, state, tensor)
    free = math.inf if device_bytes is None else (1 - _SPARE) * device_bytes - kept - weights
    fitting = max(0, wanted if free == math.inf else mesh.size * int(free // slot))
    if fitting >= wanted:
      return tensor, wanted
    found.append((fitting, tensor, weights, slot))
  slots, tensor, weights, slot = max(found, key=lambda one: one[:2])
  if slots < (config.rollout_slots or mesh.size):
    asked = f"--rollout_slots={config.rollout_slots}" if config.rollout_slots else "one slot per device"
    state_less = state_remedies(mesh, state) if kept > device_bytes / 2 else []
    first = f"Most of that is the train state: set {' or '.join(state_less)}. " if state_less else ""
    raise ValueError(
      f"Sampling needs {of_bytes(weights)} per device for weights and {of_bytes(slot)} per slot and device for {asked}, beside the "
      f"{of_bytes(kept)} of the train state, with tensor:{tensor} of {dict(mesh.shape)}; a device has {of_bytes(device_bytes)}, so that "
      f"{slots} slots fit. {first}Lower --rollout_slots, --max_new_tokens or --max_prompt_tokens, take more devices, or a larger tensor in "
      "--rollout_mesh."
    )
  return tensor, slots


def state_remedies(mesh: Mesh, state: TrainState) -> list[str]:
  """The flags, not set yet, with which a device holds less of the train state."""
  spread = "--mesh=fsdp:-1" + (f",tensor:{mesh.shape['tensor']}" if mesh.shape["tensor"] > 1 else "")
  found = {spread: mesh.shape["data"] > 1, "--anchor_memory=pinned_host": sharding.device_bytes(state.ema_params) > 0}
  return [flag for flag, helps in found.items() if helps]


def _sampling_bytes(config: RunConfig, model: decoder.DecoderConfig, state: TrainState, tensor: int) -> tuple[float, float]:
  """Per device, of the weights; and of the cache of one slot for each device, with its part of a prompt that a group shares."""
  width = jnp.dtype(model.dtype).itemsize
  weights = width * sum(a.size for a in jax.tree.leaves(state.policy)) / tensor
  positions = config.max_prompt_tokens * (1 + 1 / config.group_size) + config.max_new_tokens
  return weights, positions * model.num_layers * 2 * model.num_kv_heads * model.kv_copies * model.head_dim * width
