"""All flags, made from RunConfig: absl flags in, a checked RunConfig out, and back to a flagfile that repeats the run."""

import dataclasses
import pathlib

from absl import flags

from emapg_jax.config import RunConfig

_FLAGS = flags.FLAGS
QUICKSTART = pathlib.Path(__file__).parent / "flags" / "quickstart.flags"


def define() -> None:
  """Registers one flag per field of RunConfig."""
  for field in dataclasses.fields(RunConfig):
    text = field.metadata["help"]
    if field.metadata["choices"]:
      text += " One of: " + ", ".join(field.metadata["choices"]) + "."
    # Choices are checked by RunConfig, which knows the nearest valid name.
    {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string, tuple: flags.DEFINE_list}[
      type(field.default)
    ](field.name, list(field.default) if isinstance(field.default, tuple) else field.default, text)


def read() -> RunConfig:
  """The RunConfig of the parsed flags."""
  values = {field.name: _FLAGS[field.name].value for field in dataclasses.fields(RunConfig)}
  return RunConfig(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def as_strings(config: RunConfig) -> dict[str, str]:
  """Each flag as it would be written on a command line."""
  return {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in dataclasses.asdict(config).items()}


def write(config: RunConfig, path: pathlib.Path) -> None:
  """Writes a flagfile that repeats the run, in whatever folder; with `--workdir` of this run it resumes it."""
  path.write_text("".join(f"--{name}={value}\n" for name, value in as_strings(config).items() if name not in ("workdir", "override")))
