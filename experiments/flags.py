"""Flags from a dataclass, RunConfig or another: absl flags in, the checked dataclass out, and back to a flagfile that repeats the run."""

import dataclasses
import pathlib
import sys
import typing
from typing import Any, TypeVar

from absl import flags

from emapg_jax.config import RunConfig

T = TypeVar("T")

QUICKSTART = pathlib.Path(__file__).parent / "flags" / "quickstart.flags"
_DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}


def field(default: Any, text: str) -> Any:
  """A dataclass field with the help text of its flag."""
  return dataclasses.field(default=default, metadata={"help": text})


def define(cls: type = RunConfig, flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Registers one flag per field of `cls`. A program calls it, not what it imports: experiments have flags of the same names.

  A field is a bool, int, float or str, one of these `| None` with default None, or a tuple of them: a flag with commas.
  """
  for f, kind, is_tuple in _fields(cls):
    text = f.metadata["help"]
    if f.metadata.get("choices"):
      text += " One of: " + ", ".join(f.metadata["choices"]) + "."
    register, default = (flags.DEFINE_list, [str(x) for x in f.default]) if is_tuple else (_DEFINE[kind], f.default)
    # Choices are checked by the dataclass, which knows the nearest valid name. --help shows the flags of the module named argv[0] only.
    register(f.name, default, text, flag_values=flag_values, module_name=sys.argv[0])


def read(cls: type[T] = RunConfig, flag_values: flags.FlagValues = flags.FLAGS) -> T:
  """The dataclass of the parsed flags.

  Raises:
    ValueError: something in a tuple of numbers is none, or the dataclass refuses a value.
  """
  values = {}
  for f, kind, is_tuple in _fields(cls):
    value = flag_values[f.name].value
    values[f.name] = _tuple(f.name, kind, value) if is_tuple else value
  return cls(**values)


def _fields(cls: type) -> list[tuple[dataclasses.Field, type, bool]]:
  """Each field, the type of a value, whether it holds a tuple of them: `float | None` is float, False; `tuple[int, ...]` is int, True."""
  hints, fields = typing.get_type_hints(cls), []
  for f in dataclasses.fields(cls):
    (kind,) = [x for x in typing.get_args(hints[f.name]) if x not in (type(None), ...)] or [hints[f.name]]
    fields.append((f, kind, typing.get_origin(hints[f.name]) is tuple))
  return fields


def _tuple(name: str, kind: type, values: list[str]) -> tuple:
  try:
    return tuple(kind(x) for x in values)
  except ValueError:
    raise ValueError(f"--{name}={','.join(values)} must be numbers with commas between them, for example 8,32.") from None


def as_strings(config: Any) -> dict[str, str]:
  """Each flag as it would be written on a command line; those that are None can't be."""
  commas = flags.CsvListSerializer(",")  # quotes what has commas itself
  return {name: commas.serialize(value) if isinstance(value, tuple) else str(value) for name, value in dataclasses.asdict(config).items()}


def write(config: Any, path: pathlib.Path) -> None:
  """Writes a flagfile that repeats the run, in whatever folder; with `--workdir` of this run it resumes it."""
  left_out = {"workdir", "override"} | {name for name, value in dataclasses.asdict(config).items() if value is None}
  path.write_text("".join(f"--{name}={value}\n" for name, value in as_strings(config).items() if name not in left_out))
