"""A Llama/Qwen2-style decoder in flax.linen, behind `init_params` and `apply` and its kin; parameters are a plain dict of arrays.

Shapes: B sequences, S tokens, C cache slots, D model, H query heads, Hkv key/value heads, Dh head, F MLP, L layers, V vocabulary.
Sequences are right-padded, so causal attention alone keeps padding out of every real position.
"""

import dataclasses
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from emapg_jax.models.attention import UNSEEN, attention
from emapg_jax.sharding import ANYWHERE, Activations
from emapg_jax.types import PyTree

# Per layer: keys and values [B, Hkv · kv_copies, C, Dh]; a token at position p is in slot p.
Cache = tuple[tuple[jax.Array, jax.Array], ...]

REMAT = ("full", "dots", "none")  # all but a layer's input, all but the products with its weights, nothing


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The architecture. `rope_scaling` is Llama 3's (factor, low_freq_factor, high_freq_factor, original_max_positions) or None."""

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int
  rope_theta: float = 10_000.0
  rope_scaling: tuple[float, float, float, float] | None = None
  rms_norm_eps: float = 1e-6
  qkv_bias: bool = False
  tied: bool = True
  dtype: str = "float32"  # of activations and matmul inputs; norms, softmax and log-probabilities stay float32
  param_dtype: str = "float32"
  remat: str = "full"  # what of a layer the backward pass computes again, of REMAT
  kv_copies: int = 1  # of each key/value head in attention and in the cache: as many as it takes to spread them over devices

  def __post_init__(self):
    for field in (
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "max_positions",
      "kv_copies",
    ):
      if getattr(self, field) < 1:
        raise ValueError(f"DecoderConfig.{field} must be at least 1, got {getattr(self, field)}.")
    if self.num_heads % (self.num_kv_heads * self.kv_copies):
      raise ValueError(
        f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads × kv_copies ({self.num_kv_heads} × {self.kv_copies})."
      )
    if self.remat not in REMAT:
      raise ValueError(f"DecoderConfig.remat is {self.remat!r}, but must be one of {', '.join(REMAT)}.")
    if self.head_dim % 2:
      raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")


def _inverse_frequencies(config: DecoderConfig) -> jax.Array:
  """float32 [Dh/2], with Llama 3's stretching of the long wavelengths where the config asks for it."""
  freqs = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
  if config.rope_scaling is None:
    return freqs
  factor, low, high, original = config.rope_scaling
  turns = original * freqs / (2 * math.pi)  # rotations within the original context
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return freqs * (kept + (1.0 - kept) / factor)


def _rotate(x: jax.Array, positions: jax.Array, config: DecoderConfig) -> jax.Array:
  """Rotary embedding in the split-half layout of Hugging Face. x [B, S, heads, Dh], positions [B, S]."""
  angles = positions[..., None, None].astype(jnp.float32) * _inverse_frequencies(config)[None, None, None, :]
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _flat(x: jax.Array) -> jax.Array:
  """[B, S, ...] to [B·S, ...]: for the gradient of a product of three axes XLA's CPU backend transposes copies, twice an MLP's time."""
  return x.reshape(-1, *x.shape[2:])


@jax.vmap  # over rows: where they are an index, XLA gathers those of other devices
def write(cache: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
  """A cache [B, Hkv, C, Dh] with `new` [B, Hkv, S, Dh] at positions int32 [B, S]; one beyond the cache writes nothing."""
  # Heads are an index too: with all of them in a window XLA's TPU backend turns the whole cache to another layout and back.
  # mode="drop": a position beyond the cache must never land in the last slot.
  return cache.at[jnp.arange(cache.shape[0])[:, None], positions[None, :]].set(new, mode="drop")


class Attention(nn.Module):
  """Grouped-query attention; returns the output and the layer's keys and values (the updated cache, if there is one).

  `prefix` is ((keys, values) [N, P, Hkv, Dh], positions [N, P]) of prompts, each shared by B/N consecutive rows.
  """

  config: DecoderConfig

  @nn.compact
  def __call__(self, x, positions, cache=None, prefix=None, visible=None, placed=ANYWHERE):
    config = self.config

    def project(name, heads):
      dense = nn.DenseGeneral(
        (heads, config.head_dim), use_bias=config.qkv_bias, dtype=config.dtype, param_dtype=config.param_dtype, name=name
      )
      return dense(_flat(x)).reshape(*x.shape[:2], heads, config.head_dim)

    q = _rotate(project("q", config.num_heads), positions, config)
    k = _rotate(project("k", config.num_kv_heads), positions, config)
    v = project("v", config.num_kv_heads)
    k, v = (jnp.repeat(a, config.kv_copies, axis=2) for a in (k, v))
    if cache is not None:
      k, v = (placed.by_shard(write, old, positions, new.swapaxes(1, 2)) for old, new in zip(cache, (k, v)))
      seen = tuple(a[:, :, :visible].swapaxes(1, 2) for a in (k, v))
      out = attention(q, *seen, positions, jnp.arange(seen[0].shape[1], dtype=jnp.int32)[None, :])
    elif prefix is not None:
      (prefix_k, prefix_v), prefix_positions = jax.tree.map(lambda a: jnp.repeat(a, x.shape[0] // a.shape[0], axis=0), prefix)
      kv_positions = jnp.concatenate([prefix_positions, positions], axis=1)
      out = attention(q, jnp.concatenate([prefix_k, k], axis=1), jnp.concatenate([prefix_v, v], axis=1), positions, kv_positions)
    else:
      out = attention(q, k, v)
    dense = nn.DenseGeneral(config.hidden_size, axis=(-2, -1), use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, name="o")
    out = dense(_flat(out)).reshape(x.shape)
    return out, (k, v)


class Mlp(nn.Module):
  """SwiGLU."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x):
    def dense(features, name):
      return nn.Dense(features, use_bias=False, dtype=self.config.dtype, param_dtype=self.config.param_dtype, name=name)

    flat = _flat(x)
    gate = nn.silu(dense(self.config.intermediate_size, "gate")(flat))
    return dense(self.config.hidden_size, "down")(gate * dense(self.config.intermediate_size, "up")(flat)).reshape(x.shape)


def _norm(config: DecoderConfig, name: str | None = None) -> nn.RMSNorm:
  return nn.RMSNorm(epsilon=config.rms_norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, name=name)


class Block(nn.Module):
  """Pre-norm residual block."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x, positions, cache=None, prefix=None, visible=None, placed=ANYWHERE):
    attended, cache = Attention(self.config, name="attn")(_norm(self.config, "attn_norm")(x), positions, cache, prefix, visible, placed)
    x = x + attended
    return x + Mlp(self.config, name="mlp")(_norm(self.config, "mlp_norm")(x)), cache


def init_params(config: DecoderConfig, key: jax.Array) -> PyTree:
  """Random parameters: a nested dict, the layers stacked on axis 0 of every leaf under `layers`."""
  embed_key, head_key, *layer_keys = jax.random.split(key, 2 + config.num_layers)
  x = jnp.zeros((1, 1, config.hidden_size), config.dtype)
  positions = jnp.zeros((1, 1), jnp.int32)
  embed_init = nn.initializers.normal(config.hidden_size**-0.5)
  params = {
    "embed": {"embedding": embed_init(embed_key, (config.vocab_size, config.hidden_size), config.param_dtype)},
    "layers": jax.vmap(lambda k: Block(config).init(k, x, positions)["params"])(jnp.stack(layer_keys)),
    "final_norm": {"scale": jnp.ones((config.hidden_size,), config.param_dtype)},
  }
  if not config.tied:
    head_init = nn.initializers.lecun_normal()
    params["lm_head"] = {"kernel": head_init(head_key, (config.hidden_size, config.vocab_size), config.param_dtype)}
  return params


def unstack_layers(params: PyTree) -> PyTree:
  """The same parameters with `layers` as a tuple of per-layer dicts: decoding then reads each layer in place."""
  layers = params["layers"]
  count = jax.tree.leaves(layers)[0].shape[0]
  return {**params, "layers": tuple(jax.tree.map(lambda a, i=i: a[i], layers) for i in range(count))}


def empty_cache(config: DecoderConfig, rows: int, size: int) -> Cache:
  """Zeros [rows, Hkv · kv_copies, size, Dh] for the keys and the values of each layer."""
  zeros = jnp.zeros((rows, config.num_kv_heads * config.kv_copies, size, config.head_dim), config.dtype)
  return ((zeros, zeros),) * config.num_layers


def _rematerialized(config: DecoderConfig, layer: Callable) -> Callable:
  """`layer`, as the body of a scan whose backward pass keeps what `config.remat` says."""
  if config.remat == "none":
    return layer
  return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None)


def apply(config: DecoderConfig, params: PyTree, tokens: jax.Array, placed: Activations = ANYWHERE) -> jax.Array:
  """Hidden states [B, S, D] after the final norm, in `config.dtype`, of tokens int32 [B, S]; `unembedding` turns them into logits."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
  block = Block(config)

  def layer(x, layer_params):
    return placed.constrain(block.apply({"params": layer_params}, x, positions)[0]), None

  x = placed.lookup(params["embed"]["embedding"], tokens, config.dtype)
  x, _ = jax.lax.scan(_rematerialized(config, layer), x, params["layers"])
  return _norm(config).apply({"params": params["final_norm"]}, x)


def apply_cached(
  config: DecoderConfig,
  params: PyTree,
  tokens: jax.Array,
  positions: jax.Array,
  cache: Cache,
  visible: int | None = None,
  placed: Activations = ANYWHERE,
) -> tuple[jax.Array, Cache]:
  """Hidden states after the final norm, and the cache with the tokens' keys and values.

  Args:
    params: as `unstack_layers` makes them.
    tokens: int32 [B, S].
    positions: int32 [B, S], also the slots that are written; one beyond the cache writes nothing.
    cache: C slots; each token sees those up to its own position, whatever is in the others.
    visible: how many of its slots are read; all when None.

  Returns:
    hidden [B, S, D] in `config.dtype`, and the cache.
  """
  x = placed.lookup(params["embed"]["embedding"], tokens, config.dtype)
  block, written = Block(config), []
  for layer_params, kv in zip(params["layers"], cache, strict=True):
    x, kv = block.apply({"params": layer_params}, x, positions, kv, visible=visible, placed=placed)
    x = placed.constrain(x)
    written.append(kv)
  return _norm(config).apply({"params": params["final_norm"]}, x), tuple(written)


def apply_shared(
  config: DecoderConfig,
  params: PyTree,
  prompts: jax.Array,
  prompt_length: jax.Array,
  responses: jax.Array,
  placed: Activations = ANYWHERE,
) -> jax.Array:
  """Hidden states after the final norm at the position before each response token, each prompt read once for all its responses.

  As `apply` on every prompt with each of its responses behind it, for P + G·T tokens a prompt instead of G·(P + T).

  Args:
    prompts: int32 [N, P], right-padded; prompt_length: int32 [N], 1 to P.
    responses: int32 [N·G, T], right-padded; G consecutive rows answer a prompt.

  Returns:
    [N·G, T, D] in `config.dtype`.
  """
  group = responses.shape[0] // prompts.shape[0]
  slots = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32)[None, :], prompts.shape)
  seen = jnp.where(slots < prompt_length[:, None], slots, UNSEEN)
  positions = jnp.repeat(prompt_length, group)[:, None] + jnp.arange(responses.shape[1], dtype=jnp.int32)[None, :]
  block = Block(config)

  def layer(x, layer_params):
    prompt, kv = block.apply({"params": layer_params}, x[0], slots)
    response, _ = block.apply({"params": layer_params}, x[1], positions, prefix=(kv, seen))
    return (placed.constrain(prompt), placed.constrain(response)), None

  x = tuple(placed.lookup(params["embed"]["embedding"], tokens, config.dtype) for tokens in (prompts, responses))
  (prompt, response), _ = jax.lax.scan(_rematerialized(config, layer), x, params["layers"])
  last = jnp.take_along_axis(prompt, (prompt_length - 1)[:, None, None], axis=1)
  before = jnp.concatenate([jnp.repeat(last, group, axis=0), response[:, :-1]], axis=1)
  return _norm(config).apply({"params": params["final_norm"]}, before)


def unembedding(params: PyTree) -> jax.Array:
  """[D, V]: `hidden @ unembedding(params)` are the logits; the transposed embedding when tied."""
  return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"].T


def logits(params: PyTree, hidden: jax.Array) -> jax.Array:
  """float32 [..., V] of hidden states [..., D]. Where tied, without the transposed copy of the embedding that a loop would make."""
  if "lm_head" in params:
    return jnp.einsum("...d,dv->...v", hidden, params["lm_head"]["kernel"], preferred_element_type=jnp.float32)
  return jnp.einsum("...d,vd->...v", hidden, params["embed"]["embedding"], preferred_element_type=jnp.float32)


def count_params(params: PyTree) -> int:
  """Number of scalars, each tied array once."""
  return sum(a.size for a in jax.tree.leaves(params))
