"""Checkpoints: bit-exact, atomic, safe against donation and kill, on any mesh, with errors that name what differs."""

import contextlib
import errno
import logging
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging as absl_logging
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from emapg_jax.checkpoint import Checkpointer, CheckpointError, HostState, flags_difference
from emapg_jax.types import TrainState

HOST = HostState(position=12, bad_in_row=1, bad_total=3, flags={"seed": "0", "kl": "k4"})
ROOT = pathlib.Path(__file__).parent.parent


def make_mesh(shape):
  return jax.make_mesh(shape, ("data", "fsdp"), devices=jax.devices()[: shape[0] * shape[1]], axis_types=(AxisType.Auto,) * 2)


def make_state(mesh_shape=(1, 1), seed=0, anchor=True):
  """Two kernels of a size that every mesh here divides, in bfloat16 and float32, with float32 moments and anchor."""
  keys = jax.random.split(jax.random.key(seed), 4)
  params = {
    "dense": {"kernel": jax.random.normal(keys[0], (8, 16), jnp.bfloat16), "bias": jax.random.normal(keys[1], (16,))},
    "layers": {str(i): jax.random.normal(keys[2], (3,)) * i for i in range(12)},
  }
  opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.float32)).init(params)
  opt_state = jax.tree.map(lambda x: x + 1 if x.ndim == 0 else jax.random.normal(keys[3], x.shape, x.dtype), opt_state)
  ema_params = jax.tree.map(lambda x: x.astype(jnp.float32) * 0.5, params) if anchor else None
  return place(TrainState(params=params, ema_params=ema_params, opt_state=opt_state, step=jnp.asarray(7, jnp.int32)), make_mesh(mesh_shape))


def shardings(state, mesh):
  return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec("data", "fsdp") if x.shape == (8, 16) else PartitionSpec()), state)


def place(state, mesh):
  return jax.device_put(state, shardings(state, mesh))


def abstract(state, mesh):
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings(state, mesh))


def assert_same(actual, expected):
  """Same structure (so also the optimizer's NamedTuples), dtypes and bits."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), path
    assert a.tobytes() == b.tobytes(), path


def write(directory, *steps, state=None, keep_last=5):
  with Checkpointer(str(directory), keep_last) as checkpointer:
    for step in steps:
      checkpointer.save(step, make_state(seed=step) if state is None else state, HostState(position=step))


@contextlib.contextmanager
def full_disk(limit):
  """Writes past `limit` bytes per file fail, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("anchor", [True, False])
def test_restores_bit_for_bit(tmp_path, anchor):
  state = make_state(anchor=anchor)
  assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(d) for d in ("bfloat16", "float32", "int32")}
  with Checkpointer(str(tmp_path), 2) as checkpointer:
    checkpointer.save(7, state, HOST)
  with Checkpointer(str(tmp_path), 2) as checkpointer:
    restored, host = checkpointer.restore_latest(make_state(seed=1, anchor=anchor))
    assert checkpointer.flags_of_latest() == HOST.flags
  assert host == HOST
  assert_same(restored, state)
  assert (tmp_path / "7").is_dir()


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
  with Checkpointer(str(tmp_path / "new" / "checkpoints"), 1) as checkpointer:
    assert checkpointer.latest_step() is None
    assert checkpointer.flags_of_latest() is None
    assert checkpointer.restore_latest(make_state()) is None


def test_a_donated_step_right_after_save_does_not_reach_the_checkpoint(tmp_path):
  # 16 MB per leaf, so that the write is still going on while the next steps run in place.
  mesh = make_mesh((2, 4))
  state = {
    "sharded": jax.device_put(jnp.arange(2**22, dtype=jnp.float32).reshape(2048, 2048), NamedSharding(mesh, PartitionSpec("data", "fsdp"))),
    "replicated": jax.device_put(jnp.arange(2**22, dtype=jnp.int32), NamedSharding(mesh, PartitionSpec())),
  }
  step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  before = jax.tree.map(np.array, state)
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    checkpointer.save(1, state, HOST)
    for _ in range(3):
      state = step(state)
    jax.block_until_ready(state)
    restored, _ = checkpointer.restore_latest(state)
    assert_same(restored, before)
    # What was restored can be donated in turn, although replicas may come from one host buffer.
    stepped = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(restored)
  for shard in stepped["replicated"].addressable_shards:
    np.testing.assert_array_equal(shard.data, before["replicated"] + 1)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (4, 2)])
def test_restores_on_another_mesh(tmp_path, mesh_shape):
  state = make_state((2, 4))
  write(tmp_path, 3, state=state)
  mesh = make_mesh(mesh_shape)
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    restored, _ = checkpointer.restore_latest(abstract(state, mesh))
  assert_same(restored, state)
  kernel = restored.params["dense"]["kernel"]
  assert kernel.sharding == NamedSharding(mesh, PartitionSpec("data", "fsdp"))
  assert kernel.addressable_shards[0].data.shape == (8 // mesh_shape[0], 16 // mesh_shape[1])


def run_python(code, *args, **env):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"} | env
  command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args]
  return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_eight_devices_save_and_a_machine_with_one_restores(tmp_path):
  state = make_state((2, 4))
  write(tmp_path, 3, state=state)
  code = """
    import sys, jax, numpy as np
    from checkpoint_test import Checkpointer, make_state
    assert jax.device_count() == 1
    with Checkpointer(sys.argv[1], 1) as checkpointer:
      assert checkpointer.flags_of_latest() == {}
      restored, host = checkpointer.restore_latest(make_state(seed=5))
    print(host.position, *(np.asarray(x).tobytes().hex() for x in jax.tree.leaves(restored)))
  """
  done = run_python(code, str(tmp_path), XLA_FLAGS="")
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["3", *(np.asarray(x).tobytes().hex() for x in jax.tree.leaves(state))]
  assert done.stderr == ""


def test_a_run_killed_before_the_commit_leaves_the_checkpoint_before(tmp_path):
  # The rename that commits step 2 never returns; the process is killed while it waits there.
  code = """
    import os, signal, sys, time
    from checkpoint_test import Checkpointer, HostState, make_state
    checkpointer = Checkpointer(sys.argv[1], 1)
    checkpointer.save(1, make_state(seed=1), HostState(position=1))
    checkpointer.wait()
    rename = os.rename
    def blocked(source, target, **options):
      if os.path.basename(str(target)) == "2":
        os.kill(os.getpid(), signal.SIGKILL)
      return rename(source, target, **options)
    os.rename = os.replace = blocked
    checkpointer.save(2, make_state(seed=2), HostState(position=2))
    checkpointer.wait()
  """
  done = run_python(code, str(tmp_path))
  assert done.returncode == -signal.SIGKILL, done.stderr
  left = {path.name for path in tmp_path.iterdir()}
  assert "1" in left and "2" not in left and len(left) == 2  # the other one is step 2 under its temporary name
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    assert checkpointer.latest_step() == 1
    restored, host = checkpointer.restore_latest(make_state())
    assert_same(restored, make_state(seed=1))
    assert host.position == 1
    assert {path.name for path in tmp_path.iterdir()} == left  # reading changes nothing: the files may belong to a live run
    checkpointer.save(3, make_state(seed=3), HOST)
  assert {path.name for path in tmp_path.iterdir()} == {"3"}


def test_a_numbered_directory_that_lacks_a_part_is_no_checkpoint(tmp_path):
  write(tmp_path, 4)
  (tmp_path / "9").mkdir()
  for step, part in (("6", "host"), ("7", "state"), ("8", "_CHECKPOINT_METADATA")):
    shutil.copytree(tmp_path / "4", tmp_path / step)
    path = tmp_path / step / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  (tmp_path / "notes").mkdir()
  with Checkpointer(str(tmp_path), 2) as checkpointer:
    assert checkpointer.latest_step() == 4
    assert_same(checkpointer.restore_latest(make_state())[0], make_state(seed=4))
    checkpointer.save(5, make_state(seed=5), HOST)
  # Of the two that are kept none is 6 to 9; those are set aside, not deleted.
  assert {path.name for path in tmp_path.iterdir()} == {"4", "5", "notes", *(f"{step}.incomplete" for step in (6, 7, 8, 9))}
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    assert checkpointer.latest_step() == 5
    checkpointer.save(6, make_state(seed=6), HOST)
    assert_same(checkpointer.restore_latest(make_state())[0], make_state(seed=6))


def test_retention_keeps_the_newest(tmp_path):
  write(tmp_path, 0, 1, 3, keep_last=2)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
  write(tmp_path, 10, keep_last=2)  # 10 is newer than 3, although not as text
  assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "3"]
  with pytest.raises(ValueError, match="keep_last is 0"):
    Checkpointer(str(tmp_path), 0)


def test_step_zero_is_a_checkpoint(tmp_path):
  write(tmp_path, 0)
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    assert checkpointer.latest_step() == 0
    assert_same(checkpointer.restore_latest(make_state(seed=1))[0], make_state(seed=0))


def test_a_failed_write_raises_and_keeps_the_only_good_checkpoint(tmp_path):
  big = {"x": jax.random.normal(jax.random.key(0), (2**18,))}  # 1 MB
  checkpointer = Checkpointer(str(tmp_path), 1)
  checkpointer.save(1, big, HOST)
  checkpointer.wait()
  with full_disk(10_000):
    with pytest.raises(CheckpointError, match=r"Checkpoint 2 could not be written to .*Checkpoint 1 is whole"):
      checkpointer.save(2, big, HOST)
      checkpointer.wait()
    assert checkpointer.latest_step() == 1
    checkpointer.save(3, big, HOST)
    with pytest.raises(CheckpointError, match="Checkpoint 3 could not be written"):
      checkpointer.close()
    checkpointer.close()
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    assert_same(checkpointer.restore_latest(big)[0], big)
    checkpointer.save(2, big, HOST)
  assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_failure_at_the_end_gives_an_exit_code(tmp_path):
  code = """
    import resource, sys
    from checkpoint_test import Checkpointer, HOST, full_disk, jax
    with full_disk(10_000), Checkpointer(sys.argv[1], 1) as checkpointer:
      checkpointer.save(1, {"x": jax.random.normal(jax.random.key(0), (2**18,))}, HOST)
  """
  done = run_python(code, str(tmp_path), XLA_FLAGS="", JAX_ENABLE_COMPILATION_CACHE="false")
  assert done.returncode == 1
  assert "CheckpointError: Checkpoint 1 could not be written" in done.stderr


def test_a_step_is_saved_once_and_never_behind_a_later_one(tmp_path):
  write(tmp_path, 4)
  with Checkpointer(str(tmp_path), 3) as checkpointer:
    checkpointer.save(4, make_state(seed=1), HOST)  # an interrupt right after a periodic save asks for this
    assert_same(checkpointer.restore_latest(make_state())[0], make_state(seed=4))
    with pytest.raises(ValueError, match=r"Checkpoint 3 can't be written .* checkpoint 4 is already there"):
      checkpointer.save(3, make_state(), HOST)


def test_a_missing_anchor_is_refused(tmp_path):
  write(tmp_path, 2, state=make_state(anchor=False))
  with (
    Checkpointer(str(tmp_path), 1) as checkpointer,
    pytest.raises(ValueError, match=r"ema_params/dense/bias: checkpoint nothing, run float32\[16\]"),
  ):
    checkpointer.restore_latest(make_state())


def test_an_anchor_that_would_be_dropped_is_refused(tmp_path):
  write(tmp_path, 2)
  message = r"14 of its arrays: ema_params/dense/bias: checkpoint float32\[16\], run nothing.*; and 6 more"
  with Checkpointer(str(tmp_path), 1) as checkpointer, pytest.raises(ValueError, match=message):
    checkpointer.restore_latest(make_state(anchor=False))


@pytest.mark.parametrize(
  ("leaf", "message"),
  [
    (jnp.zeros((16, 8), jnp.bfloat16), r"checkpoint bfloat16\[8, 16\], run bfloat16\[16, 8\]"),
    (jnp.zeros((8, 16), jnp.float32), r"checkpoint bfloat16\[8, 16\], run float32\[8, 16\]"),
    (jnp.zeros((8, 17), jnp.bfloat16), r"checkpoint bfloat16\[8, 16\], run bfloat16\[8, 17\]"),
  ],
)
def test_another_shape_or_dtype_is_refused(tmp_path, leaf, message):
  write(tmp_path, 2)
  wanted = make_state()
  wanted.params["dense"]["kernel"] = leaf
  with Checkpointer(str(tmp_path), 1) as checkpointer, pytest.raises(ValueError, match=f"params/dense/kernel: {message}"):
    checkpointer.restore_latest(wanted)


def test_a_leaf_without_sharding_is_refused(tmp_path):
  write(tmp_path, 2)
  with Checkpointer(str(tmp_path), 1) as checkpointer, pytest.raises(ValueError, match="No sharding is given for params/dense/bias"):
    checkpointer.restore_latest(jax.eval_shape(make_state))


def test_integer_keys_stay_integers(tmp_path):
  state = {i: jnp.full((2,), i, jnp.int32) for i in range(12)}
  write(tmp_path, 1, state=state)
  with Checkpointer(str(tmp_path), 1) as checkpointer:
    assert_same(checkpointer.restore_latest(jax.tree.map(jnp.zeros_like, state))[0], state)


def test_a_host_state_of_another_version_is_refused(tmp_path):
  write(tmp_path, 1)
  path = tmp_path / "1" / "host" / "metadata"
  path.write_text(path.read_text().replace("bad_total", "bad_sum"))
  with Checkpointer(str(tmp_path), 1) as checkpointer, pytest.raises(ValueError, match=r"another version.*bad_sum.*bad_total"):
    checkpointer.restore_latest(make_state())


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match=r"can't be written to .*Choose a --workdir"):
    Checkpointer(str(tmp_path / "file" / "checkpoints"), 1)


def test_a_read_only_directory_is_refused(tmp_path, monkeypatch):
  def refuse(path, _):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

  monkeypatch.setattr(type(epath.Path(tmp_path)), "write_text", refuse)  # the superuser, who runs many CIs, may write anywhere
  with pytest.raises(ValueError, match=r"can't be written to .*Read-only file system.*Choose a --workdir"):
    Checkpointer(str(tmp_path), 1)


def test_orbax_does_not_write_to_the_log(tmp_path, capfd):
  before = absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.INFO)
  handler = logging.StreamHandler(sys.stderr)
  logging.getLogger("absl").addHandler(handler)
  try:
    write(tmp_path, 1)
    with Checkpointer(str(tmp_path), 1) as checkpointer:
      checkpointer.restore_latest(make_state())
    assert capfd.readouterr().err == ""
    absl_logging.info("a record of our own")
    assert "a record of our own" in capfd.readouterr().err
  finally:
    logging.getLogger("absl").removeHandler(handler)
    absl_logging.set_verbosity(before)


OLD = {"learning_rate": "0.001", "steps": "10", "seed": "0", "kl": "k4"}
RUNTIME = frozenset({"steps", "mesh"})


def test_equal_and_runtime_flags_may_resume():
  assert flags_difference(OLD, OLD, RUNTIME, []) == {}
  assert flags_difference(OLD, OLD | {"steps": "20", "mesh": "data:8"}, RUNTIME, []) == {}


def test_every_other_difference_is_listed_with_the_remedy():
  new = {"learning_rate": "0.01", "steps": "20", "seed": "0", "ema_decay": "0.9"}
  with pytest.raises(ValueError) as error:
    flags_difference(OLD, new, RUNTIME, [])
  message = str(error.value)
  assert "--ema_decay was not set, is now '0.9'; --kl was 'k4', is now not set; --learning_rate was '0.001', is now '0.01'" in message
  assert "--override=ema_decay,kl,learning_rate" in message
  assert "seed" not in message and "steps" not in message


def test_override_accepts_what_it_names_and_only_that():
  new = OLD | {"learning_rate": "0.01", "seed": "1"}
  with pytest.raises(ValueError, match=r"--seed was '0', is now '1'.*--override=learning_rate,seed\."):
    flags_difference(OLD, new, RUNTIME, ["learning_rate"])
  accepted = {"learning_rate": ("0.001", "0.01"), "seed": ("0", "1")}
  assert flags_difference(OLD, new, RUNTIME, ["seed", "learning_rate"]) == accepted
  assert flags_difference(new, new, RUNTIME, ["seed"]) == {}  # the same command a second time
  with pytest.raises(ValueError, match=r"'learning_rat', which is no flag of this run. Did you mean 'learning_rate'"):
    flags_difference(OLD, new, RUNTIME, ["learning_rat"])
