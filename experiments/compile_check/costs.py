"""Operations and bytes that an RL step cannot do without, counted from its sizes, and the seconds they take at a datasheet's rates.

All prompts and responses at their longest. Operations are those of matrix products; what a rematerialised backward pass computes again
counts. Bytes are the weights, once for every time they are read, the train state, and the KV cache; activations are left out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from emapg_jax import sharding
from experiments.bench.models import causal_pairs, forward_flops
from experiments.compile_check.chips import Chip
from experiments.programs import Programs


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one part of an RL step, on one chip."""

  flops: float
  bytes: float  # of its memory
  runs: float  # of the program in an RL step

  def seconds(self, chip: Chip, sent: float) -> dict[str, float]:
    """At the chip's peak rates, each as if there were nothing else; `sent`: bytes to other chips."""
    return {"operations": self.flops / chip.flops, "memory": self.bytes / chip.bandwidth, "interconnect": sent / chip.interconnect}


def _forward(run: Programs) -> tuple[float, float]:
  """(operations of the layers, of the head) of all rows of an RL step, on all chips together."""
  config, model, shared = run.config, run.model_config, run.step_config.prompt_rows
  prompt, length, prompts = config.max_prompt_tokens, config.max_new_tokens, config.rows // shared
  tokens = prompts * prompt + config.rows * length
  pairs = prompts * causal_pairs(prompt) + config.rows * causal_pairs(length, prompt)
  layers = forward_flops(model, tokens, 0, pairs)
  return layers, forward_flops(model, tokens, config.rows * length, pairs) - layers


def _weights(run: Programs) -> int:
  """Bytes of a chip's share of the weights over `tensor`, as matrix products read them: gathered over fsdp."""
  count = sum(math.prod(a.shape) for a in jax.tree.leaves(run.abstract_state.policy))
  return count * jnp.dtype(run.model_config.dtype).itemsize // run.mesh.shape["tensor"]


def training(run: Programs, state_bytes: int) -> dict[str, Cost]:
  """`anchor_pass` and `train_step`; `state_bytes` of a chip."""
  layers, head = _forward(run)
  chips, config = run.mesh.size, run.config
  weights = _weights(run)
  forwards = config.rows / run.step_config.micro_batch
  again = {"full": layers, "none": 0.0}.get(config.remat, layers - _products(run))
  trained = config.epochs * (3 * (layers + head) + again + head)  # the head's gradient computes its logits anew
  return {
    "anchor_pass": Cost((layers + head) / chips, forwards * weights, 1),
    "train_step": Cost(trained / chips, config.epochs * forwards * 3 * weights + 2 * config.updates * state_bytes, 1),
  }


def _products(run: Programs) -> float:
  """Operations of the layers' products with weights, all rows."""
  config, shared = run.config, run.step_config.prompt_rows
  return forward_flops(run.model_config, config.rows // shared * config.max_prompt_tokens + config.rows * config.max_new_tokens, 0)


@dataclasses.dataclass(frozen=True)
class Decoding:
  """A token for every slot, on one chip."""

  weights: int  # bytes read
  cache: int  # bytes read, with prompt and response at their longest
  slots: int  # on all chips together

  def per_token(self, chips: int) -> float:
    """Bytes that all chips read, over the tokens drawn."""
    return (self.weights + self.cache) * chips / self.slots


def decoding(run: Programs, weights: int) -> Decoding:
  """What a decode step reads; `weights`: bytes of the rollout copy on a chip."""
  teams = run.rollout_mesh.size // run.team.mesh.size
  positions = run.config.max_prompt_tokens + run.config.max_new_tokens
  cache = run.sampler.slots // sharding.batch_devices(run.team.mesh) * positions * cache_bytes(run)
  return Decoding(weights, cache, run.sampler.slots * teams)


def cache_bytes(run: Programs) -> int:
  """Of one position of one sequence, on each chip that holds it."""
  model = run.sampler.config
  heads = model.num_kv_heads * model.kv_copies // run.team.mesh.shape["tensor"]
  return model.num_layers * 2 * heads * model.head_dim * jnp.dtype(model.dtype).itemsize


def sampling(run: Programs, weights: int) -> dict[str, Cost]:
  """`prefill` and `decode` of all responses of an RL step; bytes of the cache with the response at half its length on average."""
  config, model, chips = run.config, run.model_config, run.mesh.size
  step = decoding(run, weights)
  passes = math.ceil(config.rows / step.slots)
  prompts = passes * run.sampler.prompts * (run.rollout_mesh.size // run.team.mesh.size)
  chunks = math.ceil(config.max_prompt_tokens / config.prefill_chunk)
  prefill = forward_flops(model, prompts * config.max_prompt_tokens, 0, prompts * causal_pairs(config.max_prompt_tokens))
  tokens = config.rows * config.max_new_tokens
  decode = forward_flops(model, tokens, tokens, config.rows * causal_pairs(config.max_new_tokens, config.max_prompt_tokens))
  seen = (config.max_prompt_tokens + config.max_new_tokens / 2) / (config.max_prompt_tokens + config.max_new_tokens)
  steps = passes * config.max_new_tokens
  return {
    "prefill": Cost(prefill / chips, passes * chunks * weights, passes * chunks),
    "decode": Cost(decode / chips, steps * (weights + step.cache * seen), steps / config.decode_block),
  }
