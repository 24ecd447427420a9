"""The matmuls of sampling and nothing else, measured: what no sampler on this machine and these libraries can beat."""

import functools

import jax
import jax.numpy as jnp

from emapg_jax.models import decoder
from emapg_jax.types import PyTree
from experiments.bench.measure import best_seconds

_STEPS = 8  # decode steps in a call, so that the call itself costs next to nothing


def _layer(x: jax.Array, weights: PyTree) -> jax.Array:
  """Every matmul of a layer, each result used; x [T, D]."""
  attn, mlp = weights["attn"], weights["mlp"]
  q = jnp.einsum("td,dhe->the", x, attn["q"]["kernel"])
  k, v = (jnp.einsum("td,dhe->the", x, attn[name]["kernel"]) for name in ("k", "v"))
  q = q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1)
  x = x + jnp.einsum("the,hed->td", q, attn["o"]["kernel"])
  return x + (x @ mlp["gate"]["kernel"] * (x @ mlp["up"]["kernel"])) @ mlp["down"]["kernel"]


def _best_logit(params: PyTree, x: jax.Array) -> jax.Array:
  return jnp.max(decoder.logits(params, x), axis=-1, keepdims=True)


def _prefill(params: PyTree, x: jax.Array, *, rows: int) -> jax.Array:
  x, _ = jax.lax.scan(lambda x, weights: (_layer(x, weights), None), x, params["layers"])
  return _best_logit(params, x[:rows])


def _decode(params: PyTree, x: jax.Array) -> jax.Array:
  def step(_, x):
    for weights in params["layers"]:
      x = _layer(x, weights)
    return x * (1.0 / (1.0 + jnp.abs(_best_logit(params, x)))).astype(x.dtype)

  return jax.lax.fori_loop(0, _STEPS, step, x)


class MatmulBound:
  """Seconds of the matmuls of one model; each size is measured once."""

  def __init__(self, config: decoder.DecoderConfig, params: PyTree, repeats: int):
    self._config, self._repeats = config, max(5, repeats)
    self._params = jax.tree.map(lambda a: a.astype(config.dtype), params)
    self._unstacked = jax.jit(decoder.unstack_layers)(self._params)
    self.prefill = functools.cache(self._measure_prefill)
    self.decode_step = functools.cache(self._measure_decode_step)

  def _input(self, tokens: int) -> jax.Array:
    return jnp.ones((tokens, self._config.hidden_size), self._config.dtype)

  def _measure_prefill(self, tokens: int, rows: int) -> float:
    """`tokens` prompt tokens through every layer, the last ones of `rows` prompts through the head."""
    call = jax.jit(functools.partial(_prefill, rows=rows))
    return best_seconds(functools.partial(call, self._params, self._input(tokens)), self._repeats)

  def _measure_decode_step(self, rows: int) -> float:
    """One token of each of `rows` sequences through every layer, each an array of its own, and the head."""
    return best_seconds(functools.partial(jax.jit(_decode), self._unstacked, self._input(rows)), self._repeats) / _STEPS
