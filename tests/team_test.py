"""Who samples with whom, on which mesh, and with how many slots: from devices that need not be there."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from emapg_jax import sharding
from emapg_jax.config import RunConfig
from emapg_jax.models import decoder
from emapg_jax.rollout import team
from experiments.programs import programs


def grid(owners, tensor):
  """A rollout mesh of stand-ins for devices, by the process of each."""
  devices = np.empty(len(owners), object)
  devices[:] = [types.SimpleNamespace(process_index=process, id=i) for i, process in enumerate(owners)]
  return types.SimpleNamespace(devices=devices.reshape(-1, 1, tensor), shape={"data": len(owners) // tensor, "fsdp": 1, "tensor": tensor})


@pytest.fixture
def bare_meshes(monkeypatch):
  monkeypatch.setattr(team, "_mesh", lambda devices, tensor: grid([device.process_index for device in devices.ravel()], tensor))


@pytest.mark.parametrize(
  ("owners", "tensor", "process", "processes", "rows"),
  [
    ([0] * 8, 2, 0, (0,), 4),
    ([0] * 4 + [1] * 4, 1, 1, (1,), 4),
    ([0] * 4 + [1] * 4, 4, 1, (1,), 1),
    ([0] * 4 + [1] * 4, 8, 1, (0, 1), 1),  # a row over two processes
    ([0, 0, 1, 1, 2, 2, 3, 3], 4, 3, (2, 3), 1),
    ([0, 0, 1, 1, 2, 2, 3, 3], 8, 0, (0, 1, 2, 3), 1),
  ],
)
def test_teams(owners, tensor, process, processes, rows, bare_meshes):
  found = team.team_of(grid(owners, tensor), process)
  assert found.processes == processes
  assert found.mesh.shape == {"data": rows, "fsdp": 1, "tensor": tensor}
  assert {device.process_index for device in found.mesh.devices.flat} == set(processes)


def test_a_process_with_more_rows_than_its_share(bare_meshes):
  with pytest.raises(ValueError, match=r"can't be shared evenly: processes \[0\] of 2 hold 3 of them"):
    team.team_of(grid([0, 0, 0, 1], 1), 0)


def test_devices_of_a_process_lie_next_to_each_other(bare_meshes):
  """The order of a v5e:4x4, along its rings."""
  training = grid([0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0], 1)
  assert team.team_of(team.rollout_mesh(training, 4), 2).processes == (2,)


MODEL = decoder.DecoderConfig(
  vocab_size=96, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, max_positions=256
)


def made(mesh="fsdp:8", device_bytes=None, model=MODEL, **changes):
  sizes = {"prompts_per_step": 16, "group_size": 4, "max_prompt_tokens": 64, "max_new_tokens": 64, "kl_topk": 4, "task": "add"}
  config = RunConfig(**sizes | changes)
  return programs(config, model, sharding.make_mesh(mesh), longest_prompt=64, eos_ids=(3,), pad_id=0, device_bytes=device_bytes)


def slot_bytes(copies=1):
  return (64 + 16 + 64) * 2 * 2 * 2 * copies * 8 * 4  # positions (a prompt for four), layers, keys and values, heads, width, float32


def state_and_weights(run):
  weights = sum(a.size * 4 for a in jax.tree.leaves(run.abstract_state.policy))
  state = sum(np.prod(a.sharding.shard_shape(a.shape)) * 4 for a in jax.tree.leaves(run.abstract_state))
  return state, weights


def test_the_smallest_tensor_that_fits():
  """64 sequences on 8 devices, of which each has 8 with one key/value head, or two that are copies of two over 4."""
  state, weights = state_and_weights(made())
  for tensor, per_device in ((1, weights + 8 * slot_bytes()), (2, weights / 2 + 8 * slot_bytes()), (4, weights / 4 + 8 * slot_bytes(2))):
    run = made(device_bytes=int((state + per_device) / 0.9) + 100)
    if tensor < 4:  # for 4, copies of heads take more than smaller shares of the weights give
      assert run.rollout_mesh.shape["tensor"] == tensor
    assert run.sampler.slots == 64
  assert made().rollout_mesh.shape["tensor"] == 1, "where the memory is not known"
  assert made(device_bytes=1 << 40).rollout_mesh.shape["tensor"] == 1


def test_as_many_slots_as_fit():
  state, weights = state_and_weights(made())
  room = int((state + weights / 2 + 3.5 * slot_bytes()) / 0.9)
  run = made(device_bytes=room)
  assert run.rollout_mesh.shape["tensor"] == 2
  assert run.sampler.slots == 24
  assert made(device_bytes=room, rollout_slots=16).sampler.slots == 16
  with pytest.raises(ValueError, match=r"for --rollout_slots=32, .*so that 24 slots fit. Lower --rollout_slots"):
    made(device_bytes=room, rollout_slots=32)
  small = r"Sampling needs \d+\.\d KiB per .* and \d+ KiB per slot and .* for one slot per device.*has \d+ KiB, so that 0 slots fit"
  with pytest.raises(ValueError, match=small):
    made(device_bytes=int(state))


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"rollout_mesh": "data:2,fsdp:4"}, "where every token would gather all of them"),
    ({"rollout_mesh": "data:3,tensor:2"}, r"--rollout_mesh=data:3,tensor:2 does not fit 8 devices"),
    ({"rollout_mesh": "tensor"}, "--rollout_mesh=tensor is not understood"),
    ({"rollout_slots": 12}, r"--rollout_slots=12 can't be spread over 8 devices"),
    (
      {"rollout_mesh": "tensor:8", "model": dataclasses.replace(MODEL, num_heads=4)},
      r"4 heads that share 2 key/value heads can't be spread over 8",
    ),
  ],
)
def test_refused(changes, text):
  with pytest.raises(ValueError, match=text):
    made(**changes)
