"""Compiles the programs of a run for devices that need not be there, and reads off what each needs."""

import dataclasses
import pathlib
import re
import tempfile
import time

import jax

from emapg_jax.sharding import device_bytes
from experiments.compile_check import hlo, inputs
from experiments.compile_check.chips import Topology, lowering_for
from experiments.compile_check.inputs import Call
from experiments.programs import Programs

NAMES = ("rollout_weights", "prefill", "decode", "anchor_pass", "train_step")
_LARGEST = 8  # arrays that are named


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program; bytes of one device. Of what the compiler refused, arguments and temporaries are known."""

  name: str
  arguments: int = 0
  outputs: int = 0
  aliased: int = 0  # of outputs: they take the place of donated arguments
  temporaries: int = 0
  code: int = 0  # with that of its variants
  beside: int = 0  # what else lies in memory while it runs
  collectives: tuple[hlo.Collective, ...] = ()  # of a run
  largest: tuple[tuple[str, int, str], ...] = ()  # type, bytes and origin of its largest arrays
  tokens: int = 0  # drawn in a run for each slot
  seconds: float = 0.0  # of compilation
  refusal: str = ""

  @property
  def hbm(self) -> int:
    """In all, but for the code of other programs."""
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code + self.beside

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a run."""
    return sum(collective.bytes for collective in self.collectives)

  def by_kind(self) -> dict[str, tuple[int, float]]:
    """(count, bytes sent) of each kind of collective in a run."""
    totals: dict[str, tuple[int, float]] = {}
    for collective in self.collectives:
      count, sent = totals.get(collective.kind, (0, 0.0))
      totals[collective.kind] = count + collective.count, sent + collective.bytes
    return totals


@dataclasses.dataclass(frozen=True)
class _Dump:
  """What libtpu writes beside a program, also where it refuses it: its text, and the bytes that are allocated for it in a device's HBM."""

  text: str
  allocated: int

  @classmethod
  def read(cls, folder: str) -> "_Dump":
    """Of the one program that was compiled with this folder for its dumps."""
    (report,) = pathlib.Path(folder).glob("*.after_optimizations-memory-usage-report.txt")
    (text,) = pathlib.Path(folder).glob("*.after_optimizations.txt")
    return cls(text.read_text(), int(re.search(r"Memory Space: default.*?Total bytes: (\d+)", report.read_text(), re.DOTALL)[1]))


def _compile(lowered: jax.stages.Lowered, topology: Topology) -> tuple[jax.stages.Compiled | None, _Dump | None, str]:
  """(compiled, what is written beside it for a TPU, why memory does not suffice)."""
  if topology.chip is None:
    return lowered.compile(), None, ""
  with tempfile.TemporaryDirectory() as folder:
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    try:
      return lowered.compile(compiler_options=options), _Dump.read(folder), ""
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      return None, _Dump.read(folder), str(error).splitlines()[0]


def _sizes(call: Call, compiled: jax.stages.Compiled | None, dump: _Dump | None) -> dict[str, int]:
  """Bytes by what they are for.

  Of a TPU's program, temporaries are what is allocated beyond arguments and outputs: `memory_analysis` counts more than that, by a half for
  the training step.
  """
  if compiled is None:
    arguments = device_bytes(call.args)
    return {"arguments": arguments, "temporaries": dump.allocated - arguments}
  memory = compiled.memory_analysis()
  kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  return {
    "arguments": memory.argument_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes if dump is None else max(0, dump.allocated - kept),
    "code": memory.generated_code_size_in_bytes * call.variants,
  }


def compile_call(name: str, call: Call, topology: Topology, hlo_folder: str = "") -> Program:
  """Compiles one call; `hlo_folder`: where its text is written, if anywhere."""
  began = time.perf_counter()
  with lowering_for(topology.platform):
    lowered = call.function.lower(*call.args, **call.named)
  compiled, dump, refusal = _compile(lowered, topology)
  seconds, text = time.perf_counter() - began, compiled.as_text() if dump is None else dump.text
  if hlo_folder:
    (pathlib.Path(hlo_folder) / f"{name}.hlo").write_text(text)
  module = hlo.parse(text)
  return Program(
    name,
    **_sizes(call, compiled, dump),
    beside=call.beside,
    collectives=tuple(hlo.collectives(module, len(topology.devices), max(1, call.tokens))),
    largest=tuple((str(array), array.bytes, origin) for array, origin in hlo.largest(module, _LARGEST)),
    tokens=call.tokens,
    seconds=seconds,
    refusal=refusal,
  )


def compile_all(run: Programs, topology: Topology, names: tuple[str, ...], hlo_folder: str = "", said=print) -> list[Program]:
  """Compiles the programs of `names` that the run has, in the order of an RL step; `said` is told of each before it is begun."""
  calls, found = inputs.calls(run), []
  for name in NAMES:
    if name in names and name in calls:
      said(name)
      found.append(compile_call(name, calls[name], topology, hlo_folder))
  return found
