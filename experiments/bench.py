"""Benchmarks: `python -m experiments.bench token_stats` prints a table, and writes JSON with --json.

`token_stats`: log-probability, entropy, top-k and tail mass of T tokens, forward and with the gradient to hidden states and unembedding,
against the same from whole logits. Seconds are medians after a warm-up; bytes are the compiled program's temporaries and outputs.
"""

import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from emapg_jax.token_stats import stats_from_logits, token_stats

_FLAGS = flags.FLAGS
_CASES = ("vocab=49152,hidden=576,topk=32", "vocab=151936,hidden=1536,topk=32", "vocab=151936,hidden=1536,topk=1024")


def define() -> None:
  """The flags of this program."""
  flags.DEFINE_multi_string("case", list(_CASES), "Sizes, as vocab=V,hidden=D,topk=K; may be repeated.")
  flags.DEFINE_integer("tokens", 1024, "Tokens scored in a call, T.", lower_bound=1)
  flags.DEFINE_integer("repeats", 1, "Timed calls; the median counts.", lower_bound=1)
  flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Of hidden states and unembedding.")
  flags.DEFINE_string("json", "", "File for the results.")


def _whole(hidden, unembedding, targets, *, topk):
  logits = jnp.einsum("btd,dv->btv", hidden, unembedding, preferred_element_type=jnp.float32)
  return stats_from_logits(logits, targets, topk=topk)


def _loss(hidden, unembedding, targets, *, stats):
  out = stats(hidden, unembedding, targets)
  return jnp.sum(out.logp + out.entropy + out.log_tail) + jnp.sum(out.logp_topk)


def measure(function, args: tuple, repeats: int) -> dict[str, float]:
  """Median seconds of a call, and the bytes of the compiled program."""
  compiled = jax.jit(function).lower(*args).compile()
  memory = compiled.memory_analysis()
  jax.block_until_ready(compiled(*args))
  seconds = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    seconds.append(time.perf_counter() - began)
  return {
    "seconds": statistics.median(seconds),
    "temporary_mib": memory.temp_size_in_bytes / 2**20,
    "output_mib": memory.output_size_in_bytes / 2**20,
  }


def bench_token_stats(case: str) -> list[dict]:
  """Rows for one case: chunked and whole, forward and with gradient."""
  try:
    sizes = {name: int(value) for name, value in (item.split("=") for item in case.split(","))}
    vocab, width, topk = sizes["vocab"], sizes["hidden"], sizes["topk"]
  except (ValueError, KeyError) as error:
    raise ValueError(f"--case={case} is not understood: write vocab=V,hidden=D,topk=K with whole numbers.") from error
  keys = jax.random.split(jax.random.key(0), 3)
  args = (
    jax.random.normal(keys[0], (1, _FLAGS.tokens, width), _FLAGS.dtype),
    jax.random.normal(keys[1], (width, vocab), _FLAGS.dtype) * width**-0.5,
    jax.random.randint(keys[2], (1, _FLAGS.tokens), 0, vocab),
  )
  rows = []
  for name, stats in (("chunked", functools.partial(token_stats, topk=topk)), ("whole", functools.partial(_whole, topk=topk))):
    for kind, function in (
      ("forward", stats),
      ("gradient", jax.grad(functools.partial(_loss, stats=stats), argnums=(0, 1))),
    ):
      rows.append({"case": case, "head": name, "pass": kind, **measure(function, args, _FLAGS.repeats)})
      print(f"{case:38} {name:8} {kind:9} {rows[-1]['seconds']:8.3f} s {rows[-1]['temporary_mib']:9.1f} MiB", flush=True)
  return rows


def main(argv: list[str]) -> None:
  """Runs the benchmarks that are named."""
  try:
    if argv[1:] != ["token_stats"]:
      raise ValueError(f"name a benchmark: token_stats (got {' '.join(argv[1:]) or 'nothing'}).")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {_FLAGS.tokens} tokens, {_FLAGS.dtype}, median of {_FLAGS.repeats}")
    rows = [row for case in _FLAGS.case for row in bench_token_stats(case)]
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
  if _FLAGS.json:
    with open(_FLAGS.json, "w", encoding="utf-8") as file:
      json.dump({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "command": sys.argv, "rows": rows}, file, indent=1)


if __name__ == "__main__":
  define()
  app.run(main)
