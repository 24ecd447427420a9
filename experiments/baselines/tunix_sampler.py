"""Sampling with google-tunix's own sampler, random weights: `pip install google-tunix`.

`python -m experiments.baselines.tunix_sampler`. Temperature 1 over the whole vocabulary; the end token
is one that never comes, so each sequence has --new_tokens.
"""

import importlib.metadata

import jax
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig

from experiments.architectures import ARCHITECTURES
from experiments.baselines import sizes


class _Ids:
  """A tokenizer for text that is ids in decimal."""

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: list[int]) -> str:
    del ids
    return ""

  def bos_id(self) -> int:
    return 0  # the sampler then adds none

  def eos_id(self) -> int:
    return 0

  def pad_id(self) -> int:
    return 0


def _sampler(arch: dict, cache_size: int) -> Sampler:
  if arch.get("qkv_bias") or arch.get("rope_scaling"):
    raise SystemExit("error: this comparison builds Llama models without rope scaling: use --arch=smollm2-135m or tiny.")
  config = ModelConfig(
    num_layers=arch["num_layers"],
    vocab_size=arch["vocab_size"],
    embed_dim=arch["hidden_size"],
    hidden_dim=arch["intermediate_size"],
    num_heads=arch["num_heads"],
    head_dim=arch["head_dim"],
    num_kv_heads=arch["num_kv_heads"],
    rope_theta=int(arch.get("rope_theta", 10_000)),
    norm_eps=arch.get("rms_norm_eps", 1e-6),
    weight_tying=arch.get("tied", True),
  )
  cache = CacheConfig(cache_size=cache_size, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
  return Sampler(Llama3(config, rngs=nnx.Rngs(0)), _Ids(), cache)


def main() -> None:
  """Prints one line."""
  args = sizes.sampling_parser(__doc__).parse_args()
  arch = ARCHITECTURES[args.arch]
  rng = np.random.default_rng(0)
  batches = sizes.prompts(args, lambda count, length: rng.integers(1, arch["vocab_size"], size=(count, length)).tolist())
  texts = [[" ".join(map(str, ids)) for ids in batch] for batch in batches]
  steps, useful = sizes.steps_and_useful(args)
  longest = len(batches[0][0])
  sampler = _sampler(arch, longest + steps)

  def call() -> None:
    for batch in texts:
      out = sampler(batch, max_generation_steps=steps, max_prompt_length=longest, temperature=1.0, top_p=1.0, eos_tokens=[-1], seed=0)
      if [len(ids) for ids in out.tokens] != [steps] * len(batch):
        raise SystemExit(f"error: sequences of {[len(ids) for ids in out.tokens]} tokens came back where {steps} were asked for.")

  versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}
  sizes.report(
    f"tunix sampler, {args.case}", args, useful, sizes.median_seconds(call, args.repeats), versions | {"device": jax.default_backend()}
  )


if __name__ == "__main__":
  main()
