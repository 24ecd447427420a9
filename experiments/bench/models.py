"""The model that is measured, and the operations and bytes it cannot do without."""

import jax
import jax.numpy as jnp

from emapg_jax.models import decoder, hf
from emapg_jax.types import PyTree
from experiments.architectures import ARCHITECTURES
from experiments.bench.settings import Settings


def decoder_config(settings: Settings, longest: int) -> decoder.DecoderConfig:
  """The architecture of --arch or --model_path; ValueError when it has fewer positions than `longest`."""
  if settings.model_path:
    config = hf.read_config(settings.model_path, dtype=settings.dtype, remat="full" if settings.remat else "none")
  else:
    fields = ARCHITECTURES[settings.arch] | ({"num_layers": settings.layers} if settings.layers else {})
    config = decoder.DecoderConfig(**fields, dtype=settings.dtype, remat="full" if settings.remat else "none")
  if longest > config.max_positions:
    raise ValueError(
      f"Sequences of {longest} tokens were asked for, but {settings.model_path or settings.arch} has {config.max_positions} positions: "
      "lower --prompt, --prompts, --seq or --new_tokens."
    )
  return config


def parameters(settings: Settings, config: decoder.DecoderConfig) -> PyTree:
  """Weights of --model_path, or random ones."""
  if settings.model_path:
    return hf.load_params(settings.model_path, config)
  return jax.jit(lambda key: decoder.init_params(config, key))(jax.random.key(0))


def layer_weights(config: decoder.DecoderConfig) -> int:
  """Entries of the matrices of all layers."""
  attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
  return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def head_weights(config: decoder.DecoderConfig) -> int:
  """Entries of the unembedding."""
  return config.hidden_size * config.vocab_size


def weight_bytes(config: decoder.DecoderConfig) -> int:
  """Bytes of all matrices, as matmuls read them."""
  return (layer_weights(config) + head_weights(config)) * jnp.dtype(config.dtype).itemsize


def forward_flops(config: decoder.DecoderConfig, tokens: int, head_tokens: int, pairs: int = 0) -> float:
  """Matmul operations of a forward pass: `tokens` through the layers, `head_tokens` through the head, `pairs` of a query and a seen key."""
  attention = 4.0 * pairs * config.num_layers * config.num_heads * config.head_dim
  return 2.0 * (layer_weights(config) * tokens + head_weights(config) * head_tokens) + attention


def causal_pairs(length: int, before: int = 0) -> int:
  """Pairs of a query and a key it sees: `length` queries, the keys up to each, and `before` keys that all of them see."""
  return length * (length + 1) // 2 + length * before
