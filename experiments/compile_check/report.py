"""What was found, as a table on the screen and as JSON."""

import dataclasses
import importlib.metadata
import sys

from emapg_jax.sharding import device_bytes
from experiments.compile_check import costs, inputs
from experiments.compile_check.chips import Chip, Topology
from experiments.compile_check.compiled import Program
from experiments.memory_plan import at_once, memory_plan
from experiments.programs import Programs

SCHEMA = 1
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Report:
  """Of one architecture on one topology."""

  run: Programs
  topology: Topology
  arch: str
  limit: int | None  # bytes of a device
  programs: list[Program]

  @property
  def code(self) -> int:
    """Of all programs, which stay loaded."""
    return sum(program.code for program in self.programs)

  def hbm(self, program: Program) -> int:
    """What a device holds while a program runs."""
    return program.hbm + self.code - program.code

  def too_large(self) -> list[Program]:
    """Programs that do not fit."""
    return [p for p in self.programs if p.refusal or (self.limit is not None and self.hbm(p) > self.limit)]

  @property
  def planned(self) -> int:
    """What the memory plan of the run says of a device at its fullest, without compiling anything."""
    return at_once(memory_plan(self.run))

  def costs(self) -> dict[str, costs.Cost]:
    """Of the programs that were compiled."""
    found = costs.training(self.run, device_bytes(self.run.abstract_state)) | costs.sampling(self.run, self.weights)
    return {p.name: found[p.name] for p in self.programs if p.name in found}

  @property
  def weights(self) -> int:
    """Bytes of the rollout copy on a device."""
    return device_bytes(inputs.copied_weights(self.run))


def _size(count: float) -> str:
  return f"{count / _GIB:.2f}" if count >= 10 * 2**20 else f"{count / _GIB:.4f}"


def _aligned(lines: list[tuple[str, ...]]) -> str:
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  rows = ("  ".join(text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(line, widths))) for line in lines)
  return "\n".join(row.rstrip() for row in rows)


def _memory(report: Report) -> str:
  lines = [("GiB of a chip", "arguments", "outputs", "of them in place", "temporaries", "code", "beside", "in all")]
  for p in report.programs:
    parts = (p.arguments, p.outputs, p.aliased, p.temporaries, p.code, p.beside, report.hbm(p))
    lines.append((p.name, *map(_size, parts)))
  return _aligned(lines)


def _collectives(report: Report) -> str:
  lines = [("collectives of a run", "kind", "count", "GiB sent by a chip")]
  for p in report.programs:
    for kind, (count, sent) in sorted(p.by_kind().items(), key=lambda item: -item[1][1]):
      lines.append((p.name, kind, str(count), _size(sent)))
  return _aligned(lines) if len(lines) > 1 else "no collectives"


def _bounds(report: Report) -> str:
  chip = report.topology.chip
  lines = [("an RL step, of a chip", "runs", "TFLOP", "GiB read and written", "GiB sent", "s by FLOP/s", "s by HBM", "s by links")]
  for name, cost in report.costs().items():
    sent = next(p.sent for p in report.programs if p.name == name) * cost.runs
    seconds = [f"{s:.1f}" for s in cost.seconds(chip, sent).values()] if chip else ["-"] * 3
    lines.append((name, f"{cost.runs:.0f}", f"{cost.flops / 1e12:.1f}", f"{cost.bytes / _GIB:.0f}", _size(sent), *seconds))
  return _aligned(lines) if len(lines) > 1 else ""


def _decoding(report: Report) -> str:
  if not any(p.name == "decode" for p in report.programs):
    return ""
  step = costs.decoding(report.run, report.weights)
  return (
    f"decode, prompt and response at their longest: {_size(step.weights)} GiB of weights and {_size(step.cache)} of cache a chip and step; "
    f"{step.per_token(report.run.rollout_mesh.size) / 2**20:.1f} MiB a token, of all chips"
  )


def _limit(report: Report) -> str:
  chip = report.topology.chip
  if report.limit is None:
    return "no limit: simulated devices"
  usable = f" (datasheet: {chip.hbm / _GIB:.0f})" if chip and report.limit == chip.usable else ""
  return f"{_size(report.limit)} GiB a chip can be used{usable}"


def _misfits(report: Report) -> str:
  parts = []
  for p in report.too_large():
    what = p.refusal or f"{_size(report.hbm(p))} GiB are needed"
    arrays = [(name, _size(size), origin[-100:]) for name, size, origin in p.largest]
    parts.append(f"{p.name} DOES NOT FIT: {what}\n" + (_aligned([("  largest arrays", "GiB", "from"), *arrays]) if arrays else ""))
  return "\n".join(parts)


def text(report: Report) -> str:
  """The tables."""
  run, chip = report.run, report.topology.chip
  where = f"{len(report.topology.devices)} × {chip.name if chip else 'simulated device'} ({report.topology.name})"
  meshes = f"mesh {dict(run.mesh.shape)}, rollouts {dict(run.rollout_mesh.shape)}"
  config = run.config
  sizes = (
    f"{config.rows} sequences of {config.max_prompt_tokens} + {config.max_new_tokens} tokens, {run.step_config.micro_batch} in a forward, "
    f"{costs.decoding(run, 0).slots} decoded at a time; {run.model_config.dtype}, remat {config.remat}"
  )
  rates = (
    f"datasheet: {chip.flops / 1e12:.0f} TFLOP/s, {chip.bandwidth / 1e9:.0f} GB/s of HBM, {chip.interconnect / 1e9:.0f} GB/s to other chips"
    if chip
    else ""
  )
  verdict = "DOES NOT FIT" if report.too_large() else "fits"
  peak = max(map(report.hbm, report.programs))
  parts = (
    f"{report.arch} on {where}, {meshes}\n{sizes}",
    _memory(report),
    _collectives(report),
    _bounds(report) + (f"\n{rates}" if rates else ""),
    _decoding(report),
    _misfits(report),
    f"{verdict}: {_size(peak)} GiB at most, {_size(report.planned)} by the memory plan; {_limit(report)}. "
    "Compiled only: nothing was run on such a device.",
  )
  return "\n\n".join(part for part in parts if part)


def _program(report: Report, program: Program) -> dict:
  kinds = {kind: {"count": count, "bytes_sent": int(sent)} for kind, (count, sent) in program.by_kind().items()}
  found = {f.name: getattr(program, f.name) for f in dataclasses.fields(program) if f.name not in ("collectives", "largest", "seconds")}
  largest = [{"array": array, "bytes": size, "from": origin} for array, size, origin in program.largest]
  return found | {"hbm": report.hbm(program), "collectives": kinds, "bytes_sent": int(program.sent), "largest": largest}


def as_json(report: Report) -> dict:
  """All of it."""
  run, chip = report.run, report.topology.chip
  step = costs.decoding(run, report.weights)
  sent = {p.name: p.sent for p in report.programs}
  return {
    "schema": SCHEMA,
    "command": ["python", "-m", "experiments.compile_check", *sys.argv[1:]],
    "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *(("libtpu",) if chip else ()))},
    "arch": report.arch,
    "topology": report.topology.name,
    "chips": len(report.topology.devices),
    "chip": dataclasses.asdict(chip) if chip else None,
    "mesh": dict(run.mesh.shape),
    "rollout_mesh": dict(run.rollout_mesh.shape),
    "rows": run.config.rows,
    "prompt": run.config.max_prompt_tokens,
    "response": run.config.max_new_tokens,
    "micro_batch": run.step_config.micro_batch,
    "slots": step.slots,
    "fits": not report.too_large(),
    "limit": report.limit,
    "hbm": max(map(report.hbm, report.programs)),
    "planned": report.planned,
    "bytes_per_decoded_token": step.per_token(run.rollout_mesh.size),
    "programs": [_program(report, p) for p in report.programs],
    "rl_step": {name: _cost(cost, chip, sent[name] * cost.runs) for name, cost in report.costs().items()},
  }


def _cost(cost: costs.Cost, chip: Chip | None, sent: float) -> dict:
  return dataclasses.asdict(cost) | {"bytes_sent": int(sent)} | ({"seconds": cost.seconds(chip, sent)} if chip else {})
