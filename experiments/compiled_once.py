"""A watch over jitted functions: each compiles once for the shapes it is called with."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

_compiled = 0  # programs, by this process


def _count(event: str, seconds: float, **_: Any) -> None:
  del seconds
  global _compiled
  _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


class CompiledOnce:
  """A jitted function that warns when it compiles for shapes it has already seen: something that should be traced is not."""

  def __init__(self, function: Callable, name: str = "", **options: Any):
    """`options` are those of `jax.jit`; static arguments must be hashable."""
    self._name = name or getattr(function, "func", function).__name__
    self._jitted = jax.jit(function, **options)
    self.shapes: set = set()

  def __call__(self, *args: Any, **named: Any) -> Any:
    """Calls the function."""
    shapes = tuple((leaf.shape, str(leaf.dtype)) if hasattr(leaf, "shape") else leaf for leaf in jax.tree.leaves((args, named)))
    before = _compiled
    result = self._jitted(*args, **named)
    if shapes in self.shapes and _compiled > before:
      warnings.warn(f"{self._name} was compiled again for shapes it had been compiled for", RuntimeWarning, stacklevel=2)
    self.shapes.add(shapes)
    return result

  def lower(self, *args: Any, **named: Any) -> jax.stages.Lowered:
    """What `jax.jit` gives by this name: to compile for devices that are not there."""
    return self._jitted.lower(*args, **named)

  def shape(self, *args: Any, **named: Any) -> Any:
    """Shapes of the result."""
    return self._jitted.eval_shape(*args, **named)
