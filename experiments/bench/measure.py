"""Seconds and bytes of a compiled function, and what this machine can do at most: matmul FLOP/s and memory bandwidth."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

_SLOW = 0.2  # seconds of a matmul beyond which no larger one is tried
_LARGEST = 16_384


@dataclasses.dataclass(frozen=True)
class Cost:
  """Median seconds of a call (None when it was only compiled) and the bytes of the compiled program (None where it does not say)."""

  seconds: float | None
  temporary_bytes: int | None
  output_bytes: int | None = None


def _timings(call: Callable[[], object], repeats: int) -> list[float]:
  """Seconds of each of `repeats` calls, each waited for, after one that is not counted."""
  jax.block_until_ready(call())
  seconds = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - began)
  return seconds


def median_seconds(call: Callable[[], object], repeats: int) -> float:
  """Median over `repeats` calls after a warm-up: of what is measured."""
  return statistics.median(_timings(call, repeats))


def best_seconds(call: Callable[[], object], repeats: int) -> float:
  """The fastest of `repeats` calls after a warm-up: of a bound, which other work on the machine must not loosen."""
  return min(_timings(call, repeats))


def program_bytes(compiled) -> tuple[int | None, int | None]:
  """(temporaries, outputs) of a compiled function, by `memory_analysis()`."""
  memory = compiled.memory_analysis()
  return (None, None) if memory is None else (memory.temp_size_in_bytes, memory.output_size_in_bytes)


def measure(function: Callable, args: tuple, repeats: int, compile_only: bool = False) -> Cost:
  """The cost of `function(*args)`, jitted; with `compile_only` args may be shapes."""
  compiled = jax.jit(function).lower(*args).compile()
  temporary, output = program_bytes(compiled)
  return Cost(None if compile_only else median_seconds(lambda: compiled(*args), repeats), temporary, output)


@dataclasses.dataclass(frozen=True)
class Machine:
  """What the default device reached here."""

  dtype: str
  matmul_flops: float  # per second: the best square matmul of the dtype, 2·n³ operations
  matmul_size: int  # its n
  bandwidth: float  # bytes per second: the best of `bandwidth_from`
  bandwidth_from: str


def _matmul_seconds(size: int, dtype: str) -> float:
  a, b = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
  return best_seconds(functools.partial(jax.jit(jnp.dot), a, b), 5)


def _bandwidths(mib: int, dtype: str) -> dict[str, float]:
  """Bytes per second of a copy (read and written), and of a product of 16 rows with a matrix (read), each of `mib` MiB."""
  itemsize = jnp.dtype(dtype).itemsize
  matrix = jnp.ones((1024, mib * 1024 // itemsize), dtype)
  copied = best_seconds(functools.partial(jax.jit(lambda x: x + jnp.ones((), x.dtype)), matrix), 5)
  read = best_seconds(functools.partial(jax.jit(jnp.dot), jnp.ones((16, 1024), dtype), matrix), 5)
  return {"copy": 2 * matrix.nbytes / copied, "weights": matrix.nbytes / read}


@functools.cache
def measure_machine(dtype: str, matmul_size: int = 0, bandwidth_mib: int = 0) -> Machine:
  """Measures once per process and setting; 0 as in the flags."""
  best, best_size, size = 0.0, 0, matmul_size or 512
  while True:
    seconds = _matmul_seconds(size, dtype)
    if 2 * size**3 / seconds > best:
      best, best_size = 2 * size**3 / seconds, size
    if matmul_size or seconds > _SLOW or size >= _LARGEST:
      break
    size *= 2
  rates = _bandwidths(bandwidth_mib or (256 if jax.default_backend() == "cpu" else 1024), dtype)
  fastest = max(rates, key=rates.get)
  return Machine(dtype, best, best_size, rates[fastest], fastest)
