"""The memory plan of a run."""

import math
from collections.abc import Iterator

import jax

from emapg_jax import sharding
from emapg_jax.micro_batches import read_lengths, rows_that_fit
from emapg_jax.token_stats import LOGITS_PER_CHUNK
from experiments.programs import Programs
from experiments.rollout_model import state_remedies
from experiments.units import of_bytes

_LOGITS_COPIES = 4  # arrays as large as the logits that scoring them, its gradient, or a draw holds at once
_UPDATING = ("gradients", "activations", "top-k", "logits", "gathered")
_SAMPLING = ("rollout weights", "kv cache")
_EITHER = ("prefill", "drawn logits")  # while sampling, never both


def memory_plan(run: Programs) -> dict[str, int]:
  """Bytes per device of what a run keeps or peaks at, from shapes alone: at its longest prompts and responses.

  What is kept is exact. Gradients, activations and logits are within a factor of 1.5 of what the compiled programs need, the prefill's
  within 2, where rows are spread over `data`. No program holds all of it at once, see `at_once`.
  """
  config, shards = run.config, sharding.batch_devices(run.mesh)
  on_cpu = run.mesh.devices.flat[0].platform == "cpu"  # there XLA computes in float32, and does not fuse the optimizer's update
  state, width = run.abstract_state, _width(run)
  numbers = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(state.params))
  return {
    "params": sharding.device_bytes(state.params),
    "anchor": sharding.device_bytes(state.ema_params),
    "initial model": sharding.device_bytes(state.policy) if run.keep_initial else 0,
    "optimizer": sharding.device_bytes(state.opt_state),
    # Summed in float32, beside those of a micro-batch.
    "gradients": 16 * numbers if on_cpu else 4 * numbers + sharding.device_bytes(state.params),
    "activations": _activations(run) * (4 if on_cpu else width),
    "top-k": 3 * config.rows // shards * config.max_new_tokens * run.step_config.topk * 8,
    "logits": _LOGITS_COPIES * 4 * _logits(run),
    "gathered": _gathered(run),
    "rollout weights": _rollout_weights(run),
    "kv cache": _cached(run) * width,
    "prefill": _prefill(run) * (4 if on_cpu else width),
    # A draw is from whole rows.
    "drawn logits": _LOGITS_COPIES * 4 * (run.sampler.slots // run.sampler.layout.devices) * run.model_config.vocab_size,
  }


def at_once(plan: dict[str, int]) -> int:
  """The most of a plan that is there at a time: what only sampling needs is freed before the update makes its own, and the other way round.

  An anchor on the host is on the device while it scores, and again once the gradients are gone, which take more.
  """
  return max(_phases(plan))


def _phases(plan: dict[str, int]) -> tuple[int, int]:
  """Bytes that are there while updating, and while sampling."""
  updating, sampling = (sum(plan[name] for name in names) for names in (_UPDATING, _SAMPLING))
  either = [plan[name] for name in _EITHER]
  kept = sum(plan.values()) - updating - sampling - sum(either)
  return kept + updating, kept + sampling + max(either)


def remarks(run: Programs) -> Iterator[str]:
  """What there is to say beside the plan, a line each."""
  plan = memory_plan(run)
  needed = at_once(plan)
  if run.device_bytes is not None and needed > run.device_bytes:
    yield (
      f"warning: {of_bytes(needed)} are planned at a time, but a device has {of_bytes(run.device_bytes)}: take "
      f"more devices, or set {', '.join(_remedies(run, plan))}"
    )
  for where, model in (("in training", run.model_config), ("in sampling", run.sampler.config)):
    if model.kv_copies > 1:
      yield f"{where}, each of the {model.num_kv_heads} key/value heads is on {model.kv_copies} devices of the mesh axis tensor"


def _remedies(run: Programs, plan: dict[str, int]) -> list[str]:
  """The flags that make less of what does not fit, and are not set as far as they go."""
  updating, sampling = (size > run.device_bytes for size in _phases(plan))
  layout = run.sampler.layout
  smaller = {
    "--micro_tokens" if run.config.micro_tokens else "--micro_batch": updating
    and max(rows for rows, _ in _forwards(run)) > run.step_config.prompt_rows,
    "--rollout_slots": sampling and run.sampler.slots > layout.devices,
    "--max_new_tokens": True,
  }
  return [
    *state_remedies(run.mesh, run.abstract_state),
    *(["--remat=full"] if updating and run.model_config.remat != "full" else []),
    *(["a larger tensor in --rollout_mesh"] if sampling and layout.mesh.shape["tensor"] < run.mesh.size else []),
    *(f"a smaller {flag}" for flag, helps in smaller.items() if helps),
  ]


def host_bytes(run: Programs) -> int:
  """What the host keeps for each of its devices: the anchor, or nothing."""
  return sharding.device_bytes(run.abstract_state.ema_params, "pinned_host")


def _width(run: Programs) -> int:
  return 2 if run.model_config.dtype == "bfloat16" else 4


def _forwards(run: Programs) -> list[tuple[int, int]]:
  """(sequences, response tokens of each) on a device, for every size of a training step's forward."""
  config, step = run.config, run.step_config
  whole = math.ceil(step.micro_batch / (sharding.batch_devices(run.mesh) * step.prompt_rows)) * step.prompt_rows
  if not config.micro_tokens:
    return [(whole, config.max_new_tokens)]
  lengths = read_lengths(config.max_new_tokens)
  return [(min(whole, rows_that_fit(config.max_prompt_tokens, t, config.micro_tokens, step)), t) for t in lengths]


def _activations(run: Programs) -> int:
  """Numbers in the gradient of a forward."""
  config, model, tensor = run.config, run.model_config, run.mesh.shape["tensor"]
  # Of a token: what one layer works with in its gradient, which is about what each keeps where nothing is computed again.
  working = (16 * model.hidden_size + 6 * model.intermediate_size) // tensor
  heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  products = (heads + model.hidden_size + 2 * model.intermediate_size) // tensor
  kept = model.num_layers * {"none": working, "dots": model.hidden_size + products, "full": model.hidden_size}[model.remat]
  # The critic reads each sequence with a prompt of its own. One layer is worked on at a time.
  groups = (run.step_config.prompt_rows, 1) if config.uses_critic else (run.step_config.prompt_rows,)

  def trained(rows, response):
    tokens = [rows // prompt_rows * config.max_prompt_tokens + rows * response for prompt_rows in groups]
    return sum(tokens) * kept + max(tokens) * working

  return max(trained(*forward) for forward in _forwards(run))


def _prefill(run: Programs) -> int:
  """Numbers that one layer works with while prompts are read."""
  config, model, layout = run.config, run.model_config, run.sampler.layout
  tokens = run.sampler.prompts // layout.shards * min(config.prefill_chunk, config.max_prompt_tokens)
  return tokens * (16 * model.hidden_size + 6 * model.intermediate_size) // (3 * layout.mesh.shape["tensor"])


def _logits(run: Programs) -> int:
  """The logits of a chunk, in training."""
  columns = run.model_config.vocab_size // run.mesh.shape["tensor"]
  chunks = (max(rows, min(rows * response, LOGITS_PER_CHUNK // columns)) for rows, response in _forwards(run))
  return max(chunks) * columns


def _rollout_weights(run: Programs) -> int:
  weights = jax.tree.leaves(run.prepare.shape(run.abstract_state.policy))
  layouts = jax.tree.leaves(run.rollout_shardings)
  return sum(math.prod(layout.shard_shape(a.shape)) * a.dtype.itemsize for a, layout in zip(weights, layouts, strict=True))


def _gathered(run: Programs) -> int:
  """Of parameters spread over fsdp: those of the head, or of a layer and their gradient, whole for the time they are used."""
  if run.mesh.shape["fsdp"] == 1:
    return 0
  model, policy = run.model_config, run.abstract_state.policy
  head = model.vocab_size * model.hidden_size
  layer = sum(a.size for a in jax.tree.leaves(policy["layers"])) // model.num_layers
  return max(head, 2 * layer) // run.mesh.shape["tensor"] * _width(run)


def _cached(run: Programs) -> int:
  """Numbers in the KV cache of the slots and in that of the prefilled prompts."""
  config, model, layout = run.config, run.sampler.config, run.sampler.layout
  positions = run.sampler.slots * (config.max_prompt_tokens + config.max_new_tokens) + run.sampler.prompts * config.max_prompt_tokens
  heads = model.num_kv_heads * model.kv_copies // layout.mesh.shape["tensor"]
  return positions // layout.shards * model.num_layers * 2 * heads * model.head_dim
