"""The memory plan of a run."""

import jax
import numpy as np

from emapg_jax import sharding
from emapg_jax.token_stats import LOGITS_PER_CHUNK
from experiments.build import Run


def memory_plan(run: Run) -> dict[str, int]:
  """Bytes per device of what a run keeps or peaks at, from shapes alone."""

  def per_device(tree):
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in jax.tree.leaves(tree))

  config, model, shards = run.config, run.model_config, sharding.batch_devices(run.mesh)
  width = 2 if model.dtype == "bfloat16" else 4
  tokens = config.max_prompt_tokens + config.max_new_tokens
  forward = config.micro_tokens or run.step_config.micro_batch // shards * tokens
  saved = model.num_layers * model.hidden_size if model.remat else model.num_layers * (8 * model.hidden_size + 3 * model.intermediate_size)
  per_token = model.num_layers * 2 * model.num_kv_heads * model.head_dim * width
  state = run.abstract_state
  return {
    "params": per_device(state.params),
    "anchor": per_device(state.ema_params),
    "initial model": per_device(state.policy) if run.keep_initial else 0,
    "optimizer": per_device(state.opt_state),
    "gradients": 2 * per_device(state.params),
    "activations": (2 if config.uses_critic else 1) * forward * saved * width,
    "top-k": 3 * config.rows // shards * config.max_new_tokens * run.step_config.topk * 8,
    "logits": 3 * 4 * min(LOGITS_PER_CHUNK, forward * model.vocab_size),
    "rollout weights": per_device(state.policy) * width // np.dtype(model.param_dtype).itemsize,
    "kv cache": (run.sampler.slots * tokens + run.sampler.prompts * config.max_prompt_tokens) // shards * per_token,
  }
