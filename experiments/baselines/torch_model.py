"""A Hugging Face Llama or Qwen2 in torch with random weights, for the comparisons."""

import importlib.metadata

import torch
import transformers

from experiments.architectures import ARCHITECTURES


def build(arch_name: str, longest: int) -> torch.nn.Module:
  """The model in float32."""
  arch = ARCHITECTURES[arch_name]
  qwen = arch.get("qkv_bias", False)
  if arch.get("rope_scaling"):
    raise SystemExit("error: this comparison builds models without rope scaling: choose another --arch.")
  fields = {
    "vocab_size": arch["vocab_size"],
    "hidden_size": arch["hidden_size"],
    "intermediate_size": arch["intermediate_size"],
    "num_hidden_layers": arch["num_layers"],
    "num_attention_heads": arch["num_heads"],
    "num_key_value_heads": arch["num_kv_heads"],
    "max_position_embeddings": max(longest, arch["max_positions"]),
    "rms_norm_eps": arch.get("rms_norm_eps", 1e-6),
    "rope_parameters": {"rope_type": "default", "rope_theta": arch.get("rope_theta", 10_000.0)},
    "tie_word_embeddings": arch.get("tied", True),
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
  }
  config = transformers.Qwen2Config(**fields) if qwen else transformers.LlamaConfig(**fields, head_dim=arch["head_dim"])
  torch.manual_seed(0)
  return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def versions() -> dict[str, str]:
  """Of what is compared with."""
  return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
