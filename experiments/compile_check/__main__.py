"""Compiles what a run consists of for a topology, without its hardware, and says whether it fits.

python -m experiments.compile_check --topology=v5e:4x4 --arch=qwen2.5-1.5b --mesh=fsdp:16 --flagfile=experiments/flags/math_paper_8k.flags

Takes the flags of experiments.math_grpo; exits with 1 where something does not fit or is refused.
"""

import dataclasses
import pathlib
import sys

from absl import app
from absl import flags as absl_flags

from emapg_jax import sharding
from emapg_jax.config import RunConfig
from emapg_jax.models.decoder import DecoderConfig
from experiments import flags
from experiments.architectures import ARCHITECTURES
from experiments.bench import table
from experiments.bench.settings import check_known
from experiments.compile_check import chips, compiled, report
from experiments.flags import field
from experiments.programs import Programs, programs


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is compiled, beside the settings of the run."""

  topology: str = field("v5e:4x4", f"CHIP:SHAPE with CHIP one of {', '.join(chips.CHIPS)}, as v5e:4x4 or v5p:2x2x2; cpu:N: simulated.")
  arch: str = field("qwen2.5-1.5b", f"Architecture: {', '.join(ARCHITECTURES)}.")
  programs: tuple[str, ...] = field(compiled.NAMES, f"Which programs: {', '.join(compiled.NAMES)}.")
  hbm_gib: float = field(0.0, "Memory of a chip, in GiB, instead of its own; for simulated devices, a limit.")
  json: str = field("", "File for the results.")
  hlo: str = field("", "Folder for the text of the compiled programs.")

  def __post_init__(self):
    check_known("Architecture", self.arch, ARCHITECTURES)
    for name in self.programs:
      check_known("Program", name, compiled.NAMES)
    if not 0 <= self.hbm_gib < float("inf"):
      raise ValueError(f"--hbm_gib={self.hbm_gib} must be a number of GiB, or 0 for the chip's own.")


def _model(config: RunConfig, settings: Settings) -> DecoderConfig:
  fields = ARCHITECTURES[settings.arch]
  longest = config.max_prompt_tokens + config.max_new_tokens
  if longest > fields["max_positions"]:
    raise ValueError(
      f"--max_prompt_tokens={config.max_prompt_tokens} + --max_new_tokens={config.max_new_tokens} = {longest} exceeds the "
      f"{fields['max_positions']} positions of {settings.arch}: lower one of them."
    )
  return DecoderConfig(**fields, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat)


def run_on(config: RunConfig, settings: Settings, topology: chips.Topology, limit: int | None) -> Programs:
  """The run whose programs are compiled; ValueError for settings that can't be."""
  if config.micro_tokens:
    raise ValueError(
      f"--micro_tokens={config.micro_tokens} makes the number of forwards depend on the lengths of responses: compile with --micro_batch "
      "and --micro_tokens=0. A micro-batch of as many tokens needs as much memory."
    )
  if config.dtype == "auto":
    config = dataclasses.replace(config, dtype="float32" if topology.chip is None else "bfloat16")
  return programs(
    config,
    _model(config, settings),
    sharding.make_mesh(config.mesh, topology.devices),
    longest_prompt=config.max_prompt_tokens,
    eos_ids=(0,),
    pad_id=0,
    keep_initial=config.keep_initial == "on",
    # libtpu mistakes the devices of the first process, where they are alone in a program, for all that there are.
    process=topology.devices[-1].process_index,
    device_bytes=limit,
  )


def check(config: RunConfig, settings: Settings) -> report.Report:
  """Compiles; ValueError for settings that can't be."""
  if settings.json:
    table.check_writable(settings.json)
  if settings.hlo:
    pathlib.Path(settings.hlo).mkdir(parents=True, exist_ok=True)
  topology = chips.topology(settings.topology)
  limit = int(settings.hbm_gib * 2**30) if settings.hbm_gib else topology.chip and topology.chip.usable
  run = run_on(config, settings, topology, limit)
  found = compiled.compile_all(run, topology, settings.programs, settings.hlo, lambda name: print(f"compiling {name}", file=sys.stderr))
  if not found:
    raise ValueError(
      f"A run with these flags has none of --programs={','.join(settings.programs)}: name others of {', '.join(compiled.NAMES)}."
    )
  return report.Report(run, topology, settings.arch, limit, found)


def check_and_say(config: RunConfig, settings: Settings) -> int:
  """Compiles, prints, writes; 1 where something does not fit, else 0."""
  found = check(config, settings)
  print(report.text(found))
  if settings.json:
    table.write_json(settings.json, report.as_json(found))
  return 1 if found.too_large() else 0


def main(argv: list[str]) -> None:
  """Does so with the flags; what it is refused for is one line."""
  try:
    if len(argv) > 1:
      raise ValueError(f"{argv[1]!r} is not a flag: write --name=value.")
    code = check_and_say(flags.read(), flags.read(Settings))
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
  raise SystemExit(code)


if __name__ == "__main__":
  flags.define(RunConfig, absl_flags.FLAGS)
  flags.define(Settings, absl_flags.FLAGS)
  app.run(main)
