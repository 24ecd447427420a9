"""`sampler`: prefill and decode timed apart, beside the same matmuls alone. No id ends a sequence: lengths are given.

Cases: `distinct`, a prompt for every sequence; `group`, a few long prompts with several samples each; `spread`, four times more sequences
than slots, of which a quarter is four times as long as the rest.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from emapg_jax.models import decoder
from emapg_jax.types import PyTree
from experiments.bench import models
from experiments.bench.matmuls import MatmulBound
from experiments.bench.measure import Cost, Machine, median_seconds
from experiments.bench.sampling import SamplerUnderTest, Work
from experiments.bench.settings import Settings
from experiments.bench.table import Ratio, Row, row

_IN_BATCHES = "ours, in batches"


def _work(case: str, settings: Settings, vocab: int) -> Work:
  rng, batch, new = np.random.default_rng(0), settings.batch or 16, settings.new_tokens

  def prompts(count: int, length: int) -> tuple:
    return tuple(map(tuple, rng.integers(1, vocab, size=(count, length)).tolist()))

  if case == "distinct":
    return Work(prompts(batch, settings.prompt), 1, (new,) * batch, batch)
  if case == "group":
    if batch % settings.group:
      raise ValueError(f"The sampler's case `group` needs --batch={batch} to be a multiple of --group={settings.group}.")
    return Work(prompts(batch // settings.group, 8 * settings.prompt), settings.group, (new,) * batch, batch)
  lengths = np.where(np.arange(4 * batch) % 4, new, 4 * new)
  return Work(prompts(4 * batch, settings.prompt), 1, tuple(rng.permutation(lengths).tolist()), batch)


def _longest(settings: Settings) -> int:
  lengths = {"distinct": (1, 1), "group": (8, 1), "spread": (1, 4)}
  return max(a * settings.prompt + b * settings.new_tokens for a, b in (lengths[case] for case in settings.sampler_case))


def _seconds(sampler: SamplerUnderTest, prepared: PyTree, works: Sequence[Work], repeats: int) -> float:
  expected = sum(sum(work.lengths) for work in works)

  def call():
    found = sum(sampler.run(prepared, work) for work in works)
    if found != expected:
      raise RuntimeError(f"The sampler returned {found} tokens where {expected} were asked for.")
    return ()

  return median_seconds(call, repeats)


def _phases(sampler: SamplerUnderTest, prepared: PyTree, works: Sequence[Work], repeats: int) -> dict[str, float | None]:
  """Seconds by phase: the prefill is the same work with one new token each, the decode is what the rest takes."""
  prefill = _seconds(sampler, prepared, [work.cut_to(1) for work in works], repeats)
  whole = _seconds(sampler, prepared, works, repeats)
  # Where the clock's noise exceeds the decode, nothing is known of it.
  return {"prefill": prefill, "decode": whole - prefill if whole > prefill else None, "whole": whole}


def _case(config: decoder.DecoderConfig, params: PyTree, work: Work, case: str, bound: MatmulBound, settings: Settings, machine: Machine):
  """Rows and ratios of one case."""
  weights, count, useful = models.weight_bytes(config), len(work.lengths), sum(work.lengths)
  waves = math.ceil(count / work.slots)
  steps = max(max(work.lengths) - 1, math.ceil((useful - count) / work.slots))
  alone = {
    "prefill": waves * bound.prefill(work.prompt_tokens // waves, len(work.prompts) // waves),
    "decode": steps * bound.decode_step(work.slots),
  }
  sampler = SamplerUnderTest(config, work, block=settings.decode_block, chunk=settings.prefill_chunk)
  prepare = median_seconds(functools.partial(sampler.prepare, params), settings.repeats)
  run = functools.partial(_phases, sampler, sampler.prepare(params), repeats=settings.repeats)
  seconds = {"ours": run(works=[work]), "matmuls alone": alone | {"whole": sum(alone.values())}}
  if case == "spread":
    seconds[_IN_BATCHES] = run(works=work.in_batches())
  prefill_flops = models.forward_flops(config, work.prompt_tokens, count)
  decode_flops = models.forward_flops(config, useful - count, useful - count)
  amounts = {
    "prefill": (work.prompt_tokens, prefill_flops, waves * weights),
    "decode": (useful - count, decode_flops, steps * weights),
    "whole": (useful, prefill_flops + decode_flops, (waves + steps) * weights),
  }
  rows = [row(("sampler", case, "ours", "weights, once a step"), useful, Cost(prepare, None), machine)]
  for variant, times in seconds.items():
    used = None if variant == "matmuls alone" else sampler.temporary_bytes
    for phase, (tokens, flops, moved) in amounts.items():
      rows.append(row(("sampler", case, variant, phase), tokens, Cost(times[phase], used), machine, flops, float(moved)))
  return rows, _ratios(case, seconds, steps, weights / machine.bandwidth)


def _ratios(case: str, seconds: dict[str, dict[str, float | None]], steps: int, weights_read: float) -> list[Ratio]:
  ours, alone = seconds["ours"], seconds["matmuls alone"]
  ratio = functools.partial(Ratio, "sampler", case)
  ratios = [ratio(f"{phase}: share of the matmul bound reached", alone[phase] / ours[phase]) for phase in alone if ours[phase]]
  if ours["decode"]:
    ratios.append(ratio("a decode step, ms", 1e3 * ours["decode"] / steps))
  ratios.append(ratio("its matmuls alone, ms", 1e3 * alone["decode"] / steps))
  ratios.append(ratio("its weights read once at the measured bandwidth, ms", 1e3 * weights_read))
  if _IN_BATCHES in seconds:
    ratios.append(ratio("useful tokens/s, refilled slots / batches", seconds[_IN_BATCHES]["whole"] / ours["whole"]))
  return ratios


def bench_sampler(settings: Settings, machine: Machine) -> tuple[list[Row], list[Ratio]]:
  """Rows for every --sampler_case: ours and the matmuls alone, prefill, decode and whole; and the shares reached."""
  config = models.decoder_config(settings, _longest(settings))
  works = {case: _work(case, settings, config.vocab_size) for case in settings.sampler_case}
  params = models.parameters(settings, config)
  bound = MatmulBound(config, params, settings.repeats)
  rows, ratios = [], []
  for case, work in works.items():
    more = _case(config, params, work, case, bound, settings, machine)
    rows, ratios = rows + more[0], ratios + more[1]
  return rows, ratios
