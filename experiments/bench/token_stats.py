"""`token_stats`: log-probability, entropy, top-k and tail mass of T tokens, in chunks, against the same from whole logits.

Forward, and with the gradient to hidden states and unembedding.
"""

import functools

import jax
import jax.numpy as jnp

from emapg_jax.token_stats import stats_from_logits, token_stats
from experiments.bench.measure import Machine, measure
from experiments.bench.settings import Settings
from experiments.bench.table import Ratio, Row, row


def _whole(hidden, unembedding, targets, *, topk):
  logits = jnp.einsum("btd,dv->btv", hidden, unembedding, preferred_element_type=jnp.float32)
  return stats_from_logits(logits, targets, topk=topk)


def _loss(hidden, unembedding, targets, *, stats):
  out = stats(hidden, unembedding, targets)
  return jnp.sum(out.logp + out.entropy + out.log_tail) + jnp.sum(out.logp_topk)


def _sizes(case: str) -> tuple[int, int, int]:
  try:
    sizes = {name: int(value) for name, value in (item.split("=") for item in case.split(","))}
    vocab, width, topk = sizes.pop("vocab"), sizes.pop("hidden"), sizes.pop("topk")
    if sizes or min(vocab, width) < 1 or not 0 <= topk < vocab:
      raise ValueError
  except (ValueError, KeyError):
    raise ValueError(f"--case={case} is not understood: write vocab=V,hidden=D,topk=K with whole numbers, K below V.") from None
  return vocab, width, topk


def _inputs(tokens: int, width: int, vocab: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 3)
  return (
    jax.random.normal(keys[0], (1, tokens, width), dtype),
    jax.random.normal(keys[1], (width, vocab), dtype) * jnp.asarray(width**-0.5, dtype),
    jax.random.randint(keys[2], (1, tokens), 0, vocab),
  )


def _ratios(case: str, chunked: Row, whole: Row) -> list[Ratio]:
  ratios = []
  if chunked.seconds is not None:
    ratios.append(Ratio("token_stats", case, f"{chunked.phase}: seconds, chunked / whole", chunked.seconds / whole.seconds))
  if chunked.temporary_bytes is not None and whole.temporary_bytes:
    # The gradient of the unembedding is a result of the program, and so not among its temporaries.
    share = chunked.temporary_bytes / whole.temporary_bytes
    ratios.append(Ratio("token_stats", case, f"{chunked.phase}: temporary bytes, chunked / whole", share))
  return ratios


def bench_token_stats(settings: Settings, machine: Machine | None) -> tuple[list[Row], list[Ratio]]:
  """Rows for every --case: chunked and whole, forward and gradient; and their ratios."""
  sizes = {case: _sizes(case) for case in settings.case}
  rows, ratios = [], []
  for case, (vocab, width, topk) in sizes.items():
    make = functools.partial(_inputs, settings.tokens, width, vocab, settings.dtype)
    args = jax.eval_shape(make) if settings.compile_only else make()
    weights = vocab * width
    itemsize = jnp.dtype(settings.dtype).itemsize
    for phase, passes in (("forward", 1), ("gradient", 3)):
      found = {}
      for variant, function in (("chunked", token_stats), ("whole", _whole)):
        stats = functools.partial(function, topk=topk)
        timed = stats if phase == "forward" else jax.grad(functools.partial(_loss, stats=stats), argnums=(0, 1))
        cost = measure(timed, args, settings.repeats, settings.compile_only)
        flops, moved = 2.0 * passes * weights * settings.tokens, float(passes * weights * itemsize)
        found[variant] = row(("token_stats", case, variant, phase), settings.tokens, cost, machine, flops, moved)
      rows += found.values()
      ratios += _ratios(case, found["chunked"], found["whole"])
  return rows, ratios
