"""The devices of a topology that need not be there, and what their datasheets say."""

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from unittest import mock

import jax


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip, as documented at cloud.google.com/tpu/docs (v5e, v5p, v6e); none of it was measured."""

  name: str
  hbm: int  # bytes
  usable: int  # bytes of it that XLA gives to programs: what it says when it refuses one
  flops: float  # bfloat16, per second
  bandwidth: float  # of the HBM, bytes per second
  interconnect: float  # bytes per second that a chip sends to others, all links: half of the documented number of both ways


_GIB = 2**30
# Otherwise libtpu looks for the TPU's host, complains that there is none, and lets one process in at a time. It compiles the same.
_NO_HOST = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-16",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
CHIPS = {
  "v5e": Chip("TPU v5e", 16 * _GIB, int(15.75 * _GIB), 197e12, 819e9, 200e9),
  "v5p": Chip("TPU v5p", 95 * _GIB, int(95.73 * _GIB), 459e12, 2765e9, 600e9),
  "v6e": Chip("TPU v6e", 32 * _GIB, int(31.24 * _GIB), 918e12, 1640e9, 400e9),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices to compile for."""

  name: str
  devices: list[jax.Device]
  chip: Chip | None  # None for simulated ones, which have no limits

  @property
  def platform(self) -> str:
    """What a program is lowered for."""
    return self.devices[0].platform


def topology(name: str) -> Topology:
  """That of a name like v5e:4x4, v5p:2x2x2 or, for simulated devices, cpu:8.

  Raises:
    ValueError: an unknown name, no libtpu, or an environment that it does not bear.
  """
  jax.config.update("jax_platforms", "cpu")  # a device that is there is not needed, and may be in use
  kind, _, shape = name.partition(":")
  if kind == "cpu" and re.fullmatch(r"[1-9]\d*", shape):
    return Topology(name, _simulated(name, int(shape)), None)
  if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
    raise ValueError(
      f"--topology={name} is not understood: write CHIP:SHAPE with CHIP one of {', '.join(CHIPS)} and SHAPE the chips along each axis, as "
      "in v5e:4x4 or v5p:2x2x2; or cpu:N for N simulated devices."
    )
  return Topology(name, _described(name), CHIPS[kind])


def _simulated(name: str, count: int) -> list[jax.Device]:
  with contextlib.suppress(RuntimeError):  # a process that has computed already keeps the devices it has
    jax.config.update("jax_num_cpu_devices", count)
  devices = jax.devices("cpu")
  if len(devices) < count:
    raise ValueError(
      f"--topology={name} needs {count} simulated devices, but this process has begun with {len(devices)}: start another one."
    )
  return devices[:count]


def _described(name: str) -> list[jax.Device]:
  from jax.experimental import topologies  # Not needed for simulated devices.

  if importlib.util.find_spec("libtpu") is None:
    raise ValueError(
      f"--topology={name} is compiled by libtpu, which is not installed: pip install -r requirements-tpu.txt (no TPU is needed)."
    )
  if os.environ.get("XLA_FLAGS"):
    raise ValueError(
      f"XLA_FLAGS={os.environ['XLA_FLAGS']} is set, and libtpu ends a process over a flag that it doesn't know: unset it for "
      f"--topology={name}."
    )
  for variable, value in _NO_HOST.items():
    os.environ.setdefault(variable, value)
  try:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(f"--topology={name} is refused by libtpu: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
  """Within it, code that asks for the default backend, to choose chunk lengths for example, is told of the one that is compiled for."""
  with mock.patch.object(jax, "default_backend", lambda: platform):
    yield
