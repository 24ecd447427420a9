"""Rows of a benchmark as a table on the screen, and all of it as JSON of a fixed schema."""

import dataclasses
import json
import pathlib
import platform
import sys

import flax
import jax
import jaxlib
import numpy as np

from experiments.bench.measure import Cost, Machine
from experiments.bench.settings import Settings

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Row:
  """One measurement; None where it does not apply."""

  benchmark: str
  case: str
  variant: str
  phase: str
  tokens: int | None = None
  seconds: float | None = None
  tokens_per_s: float | None = None
  temporary_bytes: int | None = None
  output_bytes: int | None = None
  flops: float | None = None  # of the matmuls that are needed; what is computed twice counts once
  flop_share: float | None = None  # flops / seconds over the machine's matmul FLOP/s
  bytes: float | None = None  # at least to be moved: each weight and large array once for every time it is needed
  bandwidth_share: float | None = None


@dataclasses.dataclass(frozen=True)
class Ratio:
  """Two measurements over each other, or over a bound."""

  benchmark: str
  case: str
  what: str
  value: float


def row(
  names: tuple[str, str, str, str],
  tokens: int,
  cost: Cost,
  machine: Machine | None,
  flops: float | None = None,
  moved: float | None = None,
) -> Row:
  """The row of (benchmark, case, variant, phase), with the shares that its cost makes of the machine's rates."""
  seconds = cost.seconds

  def share(amount, rate):
    return None if seconds is None or amount is None or machine is None else amount / seconds / rate(machine)

  return Row(
    *names,
    tokens=tokens,
    seconds=seconds,
    tokens_per_s=None if seconds is None else tokens / seconds,
    temporary_bytes=cost.temporary_bytes,
    output_bytes=cost.output_bytes,
    flops=flops,
    flop_share=share(flops, lambda m: m.matmul_flops),
    bytes=moved,
    bandwidth_share=share(moved, lambda m: m.bandwidth),
  )


def header(settings: Settings, machine: Machine | None) -> str:
  """The lines above the tables."""
  device = f"{jax.devices()[0].device_kind} ({jax.default_backend()})"
  first = f"{device}, jax {jax.__version__}, {settings.dtype}, median of {settings.repeats} after a warm-up"
  if machine is None:
    return f"{first}; compiled only"
  return (
    f"{first}\nthis machine: {machine.matmul_flops / 1e9:.0f} GFLOP/s ({machine.dtype} matmul of side {machine.matmul_size}), "
    f"{machine.bandwidth / 1e9:.1f} GB/s ({machine.bandwidth_from})"
  )


def format_rows(rows: list[Row]) -> str:
  """A table of one benchmark."""

  def number(value, form, scale=1.0):
    return "-" if value is None else format(value * scale, form)

  lines = [("case", "variant", "phase", "seconds", "tokens/s", "temp MiB", "FLOP/s", "bandwidth")]
  for r in rows:
    lines.append(
      (
        r.case,
        r.variant,
        r.phase,
        number(r.seconds, ".4g"),
        number(r.tokens_per_s, ".4g"),
        number(r.temporary_bytes, ".1f", 2**-20),
        number(r.flop_share, ".1%"),
        number(r.bandwidth_share, ".1%"),
      )
    )
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  return "\n".join(
    "  ".join(text.ljust(width) if i < 3 else text.rjust(width) for i, (text, width) in enumerate(zip(line, widths))) for line in lines
  )


def format_ratios(ratios: list[Ratio]) -> str:
  """A line per ratio."""
  width = max((len(r.case) for r in ratios), default=0)
  return "\n".join(f"{r.case.ljust(width)}  {r.what}: {r.value:.4g}" for r in ratios)


def results(settings: Settings, machine: Machine | None, rows: list[Row], ratios: list[Ratio]) -> dict:
  """Everything, as JSON takes it."""
  device = jax.devices()[0]
  return {
    "schema": SCHEMA,
    "command": list(sys.argv),
    "device": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
    "versions": {
      "jax": jax.__version__,
      "jaxlib": jaxlib.__version__,
      "flax": flax.__version__,
      "numpy": np.__version__,
      "python": platform.python_version(),
    },
    "settings": dataclasses.asdict(settings),
    "machine": None if machine is None else dataclasses.asdict(machine),
    "rows": [dataclasses.asdict(r) for r in rows],
    "ratios": [dataclasses.asdict(r) for r in ratios],
  }


def check_writable(path: str) -> None:
  """Raises ValueError that names --json; what is in the file stays there."""
  _write(path, "a", "")


def write_json(path: str, content: dict) -> None:
  """Writes the file, or raises ValueError that names --json."""
  _write(path, "w", json.dumps(content, indent=1) + "\n")


def _write(path: str, mode: str, text: str) -> None:
  try:
    with pathlib.Path(path).open(mode, encoding="utf-8") as file:
      file.write(text)
  except OSError as error:
    raise ValueError(f"--json={path} can't be written ({error.strerror}): name a file in a folder that exists.") from error
