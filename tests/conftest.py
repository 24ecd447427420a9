"""Every test sees 8 CPU devices, no silent rank promotion, and warnings as errors (pyproject.toml).

LLVM does not optimise: the tests compile much and compute little, and this halves their time.
"""

import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
# One compilation cache for the run, shared by workers and by the subprocesses that tests start.
_OWN_CACHE = os.path.join(tempfile.gettempdir(), f"emapg_jax_cache_{os.getpid()}")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _OWN_CACHE)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure(config):
  if not hasattr(config, "workerinput"):
    shutil.rmtree(_OWN_CACHE, ignore_errors=True)


@pytest.fixture
def strict_dtypes():
  """Strict dtype promotion, for the modules whose maths is ours alone (optax.adamw and bf16 linen break under it)."""
  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield
