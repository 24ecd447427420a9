"""What a compiled program says of itself in its text (HLO): collectives with how often they run, loops, and the largest arrays.

Counts are per run of the program. A collective in a loop counts as often as the loop turns: by `known_trip_count` where XLA wrote it down,
else by the start, the bound and the step of the counter that the loop's condition compares; loops inside loops multiply. A loop whose end
depends on data counts as often as the caller says, and is reported. All branches of a conditional count.
"""

import dataclasses
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "c128": 16}  # others: the number in their name, in bits
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^{}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "optimization-barrier")
_NO_ARRAY = ("parameter", "get-tuple-element", "tuple", "while", "conditional", "bitcast", "constant", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Array:
  """An array type; `space` is 0 in the device's main memory."""

  dtype: str
  shape: tuple[int, ...]
  space: int

  @property
  def bytes(self) -> int:
    """Without what a layout pads."""
    size = _BYTES.get(self.dtype) or int(re.search(r"\d+", self.dtype)[0]) / 8
    for length in self.shape:
      size *= length
    return int(size)

  def __str__(self):
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a computation."""

  name: str
  kind: str
  result: str  # its type
  operands: tuple[str, ...]  # names
  attributes: str  # the line from its operands on
  root: bool

  @property
  def arrays(self) -> list[Array]:
    """What it gives."""
    return arrays(self.result)

  def attribute(self, name: str) -> str | None:
    """The computation or number that an attribute holds."""
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
    return found and found[1]

  @property
  def op_name(self) -> str:
    """Where in the traced function it comes from."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
  """A parsed program."""

  computations: dict[str, dict[str, Instruction]]
  entry: str


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of one kind and type at one place of the program."""

  kind: str
  arrays: tuple[Array, ...]  # the result
  group: int  # devices that take part together
  count: int  # runs of it in a run of the program
  bytes: float  # a device sends, all runs together: what the cheapest algorithm on a ring needs
  op_name: str
  guessed: bool  # it is in a loop that ends by what the data says


def arrays(text: str) -> list[Array]:
  """The arrays of a type as HLO writes it, tuples flattened."""
  found = []
  for dtype, shape, layout in _ARRAY.findall(text):
    space = re.search(r"S\((\d+)\)", layout or "")
    found.append(Array(dtype, tuple(int(n) for n in shape.split(",") if n), int(space[1]) if space else 0))
  return found


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  raise ValueError(f"This line of a compiled program can't be read, a parenthesis does not close: {text[:200]}")


def parse(text: str) -> Module:
  """Reads the text of a compiled program."""
  computations, entry, current = {}, "", {}
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = computations[header[2]] = {}
      entry = header[2] if header[1] else entry
    elif begun := _INSTRUCTION.match(line):
      start = begun.end()
      end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
      opening = line.index("(", end)
      closing = _closing(line, opening)
      # Operands may carry their types; commas stand inside these too.
      operands = tuple(re.findall(r"%([\w.\-]+)", line[opening:closing]))
      name, kind = begun[2], line[end:opening].strip()
      current[name] = Instruction(name, kind, line[start:end], operands, line[opening:], bool(begun[1]))
  if not entry:
    raise ValueError("This is no text of a compiled program: it has no ENTRY.")
  return Module(computations, entry)


def _root(computation: dict[str, Instruction]) -> Instruction:
  return next(instruction for instruction in computation.values() if instruction.root)


def _number(instruction: Instruction) -> int | None:
  found = re.match(r"\((-?\d+)\)", instruction.attributes)
  return int(found[1]) if instruction.kind == "constant" and found else None


class _Tracer:
  """Follows values of a loop to constants and to the numbers that it carries from turn to turn."""

  def __init__(self, module: Module, computation: str, arguments: tuple = ()):
    self.module, self.computation, self.arguments = module, module.computations[computation], arguments

  def trace(self, name: str) -> int | tuple | None:
    """A number, or ("carry", index), or ("add", index, step), or None."""
    instruction = self.computation.get(name)
    if instruction is None:
      return None
    if instruction.kind in _SAME:
      return self.trace(instruction.operands[0])
    if instruction.kind == "constant":
      return _number(instruction)
    if instruction.kind == "parameter" and self.arguments:
      return self.arguments[int(re.match(r"\((\d+)\)", instruction.attributes)[1])]
    if instruction.kind == "get-tuple-element":
      source = self.computation[instruction.operands[0]]
      return ("carry", int(instruction.attribute("index"))) if source.kind == "parameter" and not self.arguments else None
    if instruction.kind == "add":
      return self._add([self.trace(operand) for operand in instruction.operands])
    if instruction.kind in ("fusion", "call"):
      inner = self.inside(instruction)
      return inner.trace(_root(inner.computation).name)
    return None

  def inside(self, call: Instruction) -> "_Tracer":
    """The tracer of what a fusion calls."""
    called = call.attribute("calls") or call.attribute("to_apply")
    return _Tracer(self.module, called, tuple(self.trace(operand) for operand in call.operands))

  @staticmethod
  def _add(values: list) -> tuple | None:
    numbers = [value for value in values if isinstance(value, int)]
    carried = [value for value in values if isinstance(value, tuple) and value[0] == "carry"]
    return ("add", carried[0][1], numbers[0]) if len(numbers) == len(carried) == 1 else None


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
  """How often a while loop of `computation` turns; None where that depends on data."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
    return int(known[1])
  condition = _Tracer(module, loop.attribute("condition"))
  compare = _root(condition.computation)
  while compare.kind in ("fusion", "call", *_SAME):
    if compare.kind in _SAME:
      compare = condition.computation[compare.operands[0]]
    else:
      condition = condition.inside(compare)
      compare = _root(condition.computation)
  if compare.kind != "compare" or "direction=LT" not in compare.attributes:
    return None
  counter, bound = (condition.trace(operand) for operand in compare.operands)
  if not isinstance(counter, tuple) or counter[0] != "carry" or not isinstance(bound, int):
    return None
  body = _Tracer(module, loop.attribute("body"))
  step = body.trace(_root(body.computation).operands[counter[1]])
  if not isinstance(step, tuple) or step[:2] != ("add", counter[1]) or step[2] < 1:
    return None
  outside = _Tracer(module, computation)
  initial = outside.computation[loop.operands[0]]
  start = outside.trace(initial.operands[counter[1]]) if initial.kind == "tuple" else None
  # Counters start at 0 wherever XLA has moved the constant out of sight.
  return -(-(bound - (start if isinstance(start, int) else 0)) // step[2])


def _group_size(attributes: str, devices: int) -> int:
  """Devices in a group, from any of the ways in which replica groups are written."""
  if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return found[1].count(",") + 1
  if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
    return int(found[2])
  if found := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", attributes):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    size = 1
    for axis in re.findall(r"'(\w+)'", found[2]):
      size *= int(sizes[axis])
    return size
  return devices


def _sent(kind: str, size: float, group: int) -> float:
  """Bytes that a device sends for a result of `size` bytes."""
  if kind in ("collective-permute", "collective-broadcast"):
    return size
  share = {"all-reduce": 2 * (group - 1) / group, "reduce-scatter": group - 1.0}
  return size * share.get(kind, (group - 1) / group)


def _collective_of(computation: dict[str, Instruction], instruction: Instruction) -> tuple[str, Instruction] | None:
  """(kind, the instruction with the attributes): of an asynchronous pair the end, which has the type of the result."""
  kind = instruction.kind.removesuffix("-done")
  if kind not in KINDS:
    return None
  return kind, computation[instruction.operands[0]] if instruction.kind.endswith("-done") else instruction


def _called(instruction: Instruction) -> list[str]:
  """Computations that run where the instruction stands, but for the bodies of loops."""
  if instruction.kind in ("fusion", "call", "async-start", "conditional"):
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    return _CALLED.findall(instruction.attributes) + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])
  return []


def _walk(module: Module, name: str, times: int, guessed: bool, unknown: int) -> Iterator[tuple[dict, Instruction, int, bool]]:
  """(its computation, instruction, times, whether these are guessed) of everything that runs."""
  pending = [name]
  while pending:
    part_of = pending.pop()
    computation = module.computations[part_of]
    for instruction in computation.values():
      yield computation, instruction, times, guessed
      pending += _called(instruction)
      if instruction.kind == "while":
        turns = trip_count(module, part_of, instruction)
        for part in (instruction.attribute("body"), instruction.attribute("condition")):
          yield from _walk(module, part, times * (unknown if turns is None else turns), guessed or turns is None, unknown)


def collectives(module: Module, devices: int, unknown_turns: int = 1) -> list[Collective]:
  """All collectives of a program on `devices` devices, the most bytes first.

  Args:
    unknown_turns: how often a loop turns whose end depends on data.
  """
  found: dict = {}
  for computation, instruction, times, guessed in _walk(module, module.entry, 1, False, unknown_turns):
    if not (match := _collective_of(computation, instruction)):
      continue
    kind, described = match
    # XLA spreads one collective over fusions that run beside it, also over those of loops between its start and its end: all of them name
    # its chain, and it runs as often as the outermost. Channels say nothing: all collectives of shard_map have the same.
    chain = re.search(r'chain_id="?(\d+)', described.attributes)
    key = ("chain", chain[1]) if chain else (id(computation), instruction.name)
    if key in found and found[key].count <= times:
      continue
    group = _group_size(described.attributes, devices)
    sent = times * _sent(kind, sum(array.bytes for array in instruction.arrays), group)
    found[key] = Collective(kind, tuple(instruction.arrays), group, times, sent, described.op_name or instruction.op_name, guessed)
  return sorted(found.values(), key=lambda collective: -collective.bytes)


def largest(module: Module, count: int) -> list[tuple[Array, str]]:
  """The largest arrays that a program makes in main memory, each type once, with where they come from."""
  found: dict[Array, str] = {}
  fused = {name for c in module.computations.values() for i in c.values() if i.kind == "fusion" for name in _called(i)}
  for name, computation in module.computations.items():
    for instruction in computation.values() if name not in fused else ():
      if instruction.kind not in _NO_ARRAY:
        for array in instruction.arrays:
          if array.space == 0:
            found.setdefault(array, instruction.op_name or instruction.name)
  return sorted(found.items(), key=lambda item: -item[0].bytes)[:count]
