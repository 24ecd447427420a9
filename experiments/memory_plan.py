"""The memory plan of a run."""

import math

import jax
import numpy as np

from emapg_jax import sharding
from emapg_jax.micro_batches import read_lengths, rows_that_fit
from emapg_jax.token_stats import LOGITS_PER_CHUNK
from experiments.build import Run

_LOGITS_COPIES = 4  # arrays as large as the logits that scoring them, its gradient, or a draw holds at once


def memory_plan(run: Run) -> dict[str, int]:
  """Bytes per device of what a run keeps or peaks at, from shapes alone: at its longest prompts and responses.

  What is kept is exact. Gradients, activations and logits are within a factor of 1.5 of what the compiled programs need, activations of the
  prefill within 2, where rows are spread over `data`. No program holds all of it at once.
  """

  def per_device(tree):
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))

  config, model, shards = run.config, run.model_config, sharding.batch_devices(run.mesh)
  width = 2 if model.dtype == "bfloat16" else 4
  on_cpu = run.mesh.devices.flat[0].platform == "cpu"  # there XLA computes in float32, and does not fuse the optimizer's update
  state = run.abstract_state
  return {
    "params": per_device(state.params),
    "anchor": per_device(state.ema_params),
    "initial model": per_device(state.policy) if run.keep_initial else 0,
    "optimizer": per_device(state.opt_state),
    "gradients": (4 if on_cpu else 2) * per_device(state.params),
    "activations": _activations(run) * (4 if on_cpu else width),
    "top-k": 3 * config.rows // shards * config.max_new_tokens * run.step_config.topk * 8,
    "logits": _LOGITS_COPIES * 4 * _logits(run),
    "rollout weights": per_device(state.policy) * width // np.dtype(model.param_dtype).itemsize,
    "kv cache": _cached(run) * width,
  }


def _forwards(run: Run) -> list[tuple[int, int]]:
  """(sequences, response tokens of each) on a device, for every size of a training step's forward."""
  config, step = run.config, run.step_config
  whole = math.ceil(step.micro_batch / (sharding.batch_devices(run.mesh) * step.prompt_rows)) * step.prompt_rows
  if not config.micro_tokens:
    return [(whole, config.max_new_tokens)]
  lengths = read_lengths(config.max_new_tokens)
  return [(min(whole, rows_that_fit(config.max_prompt_tokens, t, config.micro_tokens, step)), t) for t in lengths]


def _activations(run: Run) -> int:
  """Numbers: in the gradient of a forward, or where that is more, in the prefill."""
  config, model, tensor = run.config, run.model_config, run.mesh.shape["tensor"]
  # Of a token: what one layer works with in its gradient, and about what each keeps for it without remat; with remat, its input.
  layer = (16 * model.hidden_size + 6 * model.intermediate_size) // tensor
  kept = model.num_layers * (model.hidden_size if model.remat else layer)
  # The critic reads each sequence with a prompt of its own. One layer is worked on at a time.
  groups = (run.step_config.prompt_rows, 1) if config.uses_critic else (run.step_config.prompt_rows,)

  def trained(rows, response):
    tokens = [rows // prompt_rows * config.max_prompt_tokens + rows * response for prompt_rows in groups]
    return sum(tokens) * kept + max(tokens) * layer

  prompts = run.sampler.prompts // sharding.batch_devices(run.mesh)
  prefilled = prompts * min(config.prefill_chunk, config.max_prompt_tokens) * layer // 3
  return max(prefilled, *(trained(*forward) for forward in _forwards(run)))


def _logits(run: Run) -> int:
  """The logits that are held at a time: of a chunk in training, of a token of each slot in decoding."""
  vocab, slots = run.model_config.vocab_size, run.sampler.slots // sharding.batch_devices(run.mesh)
  columns = vocab // run.mesh.shape["tensor"]
  chunks = (max(rows, min(rows * response, LOGITS_PER_CHUNK // columns)) for rows, response in _forwards(run))
  return max(max(chunks) * columns, slots * vocab)  # a draw is from whole rows


def _cached(run: Run) -> int:
  """Numbers in the KV cache of the slots and in that of the prefilled prompts."""
  config, model = run.config, run.model_config
  heads = model.num_kv_heads // run.mesh.shape["tensor"]
  positions = run.sampler.slots * (config.max_prompt_tokens + config.max_new_tokens) + run.sampler.prompts * config.max_prompt_tokens
  return positions // sharding.batch_devices(run.mesh) * model.num_layers * 2 * heads * model.head_dim
