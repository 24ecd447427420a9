"""Every test sees 8 CPU devices, no silent rank promotion, and warnings as errors (pyproject.toml).

LLVM does not optimise, nor does XLA fuse by its newer emitters: the tests compile much and compute little, and each halves their time.
"""

import importlib.metadata
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones end the process over a flag they no longer know
  os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
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


@pytest.fixture(autouse=True, scope="module")
def forget_compiled():
  """Each compiled function holds memory maps, of which a process may have 65,530: past that, XLA ends it with a segmentation fault."""
  yield
  jax.clear_caches()


@pytest.fixture
def strict_dtypes():
  """Strict dtype promotion, for the modules whose maths is ours alone (optax.adamw and bf16 linen break under it)."""
  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield
