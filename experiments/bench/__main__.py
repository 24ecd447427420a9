"""Benchmarks: `python -m experiments.bench NAME...` prints a table for each and writes JSON with --json. `--help` lists the sizes."""

import sys

from absl import app, flags

from experiments.bench import settings as bench_settings
from experiments.bench import table
from experiments.bench.attention import bench_attention
from experiments.bench.measure import measure_machine
from experiments.bench.prefix import bench_prefix
from experiments.bench.sampler import bench_sampler
from experiments.bench.settings import Settings
from experiments.bench.token_stats import bench_token_stats
from experiments.bench.train_step import bench_train_step

BENCHMARKS = {
  "sampler": bench_sampler,
  "token_stats": bench_token_stats,
  "attention": bench_attention,
  "train_step": bench_train_step,
  "prefix": bench_prefix,
}
_COMPILE_ONLY = ("token_stats", "attention", "prefix")


def check_names(names: list[str], settings: Settings) -> None:
  """Raises ValueError unless every name is that of a benchmark that can do what the settings ask."""
  if not names:
    raise ValueError(f"Name one or more benchmarks: {', '.join(BENCHMARKS)}.")
  for name in names:
    bench_settings.check_known("Benchmark", name, BENCHMARKS)
    if settings.compile_only and name not in _COMPILE_ONLY:
      raise ValueError(f"--compile_only is for {', '.join(_COMPILE_ONLY)}; {name} can only be run: leave one of the two out.")


def run(names: list[str], settings: Settings) -> dict:
  """Runs the benchmarks, prints their tables as they come, and returns (with --json also writes) everything."""
  check_names(names, settings)
  if settings.json:
    table.check_writable(settings.json)  # known before the work is done
  machine = None if settings.compile_only else measure_machine(settings.dtype, settings.matmul_size, settings.bandwidth_mib)
  print(table.header(settings, machine), flush=True)
  rows, ratios = [], []
  for name in dict.fromkeys(names):
    new_rows, new_ratios = BENCHMARKS[name](settings, machine)
    print(f"\n{name}\n{table.format_rows(new_rows)}\n\n{table.format_ratios(new_ratios)}", flush=True)
    rows, ratios = rows + new_rows, ratios + new_ratios
  content = table.results(settings, machine, rows, ratios)
  if settings.json:
    table.write_json(settings.json, content)
  return content


def main(argv: list[str]) -> None:
  """Runs the benchmarks that are named."""
  try:
    run(argv[1:], bench_settings.read(flags.FLAGS))
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from None


if __name__ == "__main__":
  bench_settings.define()
  app.run(main)
