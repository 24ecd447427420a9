"""`attention`: causal self-attention as the decoder does it, against the form that holds every score. Forward and gradient."""

import functools

import jax
import jax.numpy as jnp

from emapg_jax.models.attention import attention
from experiments.bench import models
from experiments.bench.measure import Machine, measure
from experiments.bench.settings import Settings
from experiments.bench.table import Ratio, Row, row


def _naive(q, k, v):
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("bshd,bchd->bhsc", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
  return jnp.einsum("bhsc,bchd->bshd", weights, v)


def _loss(q, k, v, *, function):
  return jnp.sum(function(q, k, v).astype(jnp.float32) ** 2)


def _inputs(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 3)
  return tuple(jax.random.normal(key, (batch, seq, count, head_dim), dtype) for key, count in zip(keys, (heads, kv_heads, kv_heads)))


def bench_attention(settings: Settings, machine: Machine | None) -> tuple[list[Row], list[Ratio]]:
  """Rows for every length of --seq: ours and naive, forward and gradient; and their ratios."""
  config = models.decoder_config(settings, max(settings.seq))
  batch = settings.batch or 2
  heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
  rows, ratios = [], []
  for seq in settings.seq:
    case = f"{batch} x {seq}, {heads}/{kv_heads} heads of {head_dim}"
    make = functools.partial(_inputs, batch, seq, heads, kv_heads, head_dim, settings.dtype)
    args = jax.eval_shape(make) if settings.compile_only else make()
    flops = 4.0 * batch * models.causal_pairs(seq) * heads * head_dim
    moved = float(2 * batch * seq * (heads + kv_heads) * head_dim * jnp.dtype(settings.dtype).itemsize)
    for phase, passes in (("forward", 1), ("gradient", 3)):
      found = {}
      for variant, function in (("ours", attention), ("naive", _naive)):
        timed = function if phase == "forward" else jax.grad(functools.partial(_loss, function=function), argnums=(0, 1, 2))
        cost = measure(timed, args, settings.repeats, settings.compile_only)
        found[variant] = row(("attention", case, variant, phase), batch * seq, cost, machine, passes * flops, passes * moved)
      rows += found.values()
      ours, naive = found["ours"], found["naive"]
      if ours.seconds is not None:
        ratios.append(Ratio("attention", case, f"{phase}: seconds, ours / naive", ours.seconds / naive.seconds))
      if ours.temporary_bytes is not None and naive.temporary_bytes:
        ratios.append(Ratio("attention", case, f"{phase}: temporary bytes, ours / naive", ours.temporary_bytes / naive.temporary_bytes))
  return rows, ratios
