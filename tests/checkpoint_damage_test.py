"""Checkpoints whose files are cut or gone: one paragraph with the step and what to do, never a wrong state."""

import jax
import jax.numpy as jnp
import pytest

from emapg_jax.checkpoint import Checkpointer
from tests.checkpoint_test import assert_same, make_state, write

# The reader ends at the first array that fails; the others still report to it from their own threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def damage(path, how):
  path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def data_file(folder):
  return next(path for path in (folder / "state" / "d").iterdir())


@pytest.mark.parametrize(
  ("part", "how"),
  [
    ("state/d", "cut"),
    ("state/d", "gone"),
    ("state/manifest.ocdbt", "cut"),
    ("state/manifest.ocdbt", "gone"),
    ("state/_METADATA", "cut"),
    ("state/_sharding", "cut"),
    ("state/array_metadatas/process_0", "cut"),
    ("host/metadata", "cut"),
  ],
)
def test_a_damaged_checkpoint_is_named_and_moving_it_away_helps(tmp_path, part, how):
  write(tmp_path, 3, 12)
  damage(data_file(tmp_path / "12") if part == "state/d" else tmp_path / "12" / part, how)
  message = rf"^Checkpoint 12 in \S+ is damaged \(.{{1,200}}\)\. Move {tmp_path}/12 away to resume from checkpoint 3\.$"
  with Checkpointer(str(tmp_path), 5) as checkpointer:
    with pytest.raises(ValueError, match=message):
      checkpointer.restore_latest(make_state())
    if part == "host/metadata":
      with pytest.raises(ValueError, match=message):
        checkpointer.flags_of_latest()
  (tmp_path / "12").rename(tmp_path / "away")
  with Checkpointer(str(tmp_path), 5) as checkpointer:
    assert_same(checkpointer.restore_latest(make_state())[0], make_state(seed=3))


def test_a_changed_number_and_a_folder_of_another_step_are_damage(tmp_path):
  write(tmp_path, 3, 12)
  host = tmp_path / "12" / "host" / "metadata"
  written = host.read_text()
  host.write_text(written.replace('"bad_total": ', '"bad_total": 1'))
  with Checkpointer(str(tmp_path), 5) as checkpointer:
    for read in (lambda: checkpointer.restore_latest(make_state()), checkpointer.flags_of_latest):
      with pytest.raises(ValueError, match=r"^Checkpoint 12 in \S+ is damaged \(host/metadata is not what was written\)"):
        read()
  host.write_text(written)
  (tmp_path / "12").rename(tmp_path / "15")
  (tmp_path / "016").mkdir()  # no name of a step
  with Checkpointer(str(tmp_path), 5) as checkpointer, pytest.raises(ValueError, match=r"^Checkpoint 15 in .* as checkpoint 12\)"):
    checkpointer.restore_latest(make_state())


def test_the_only_checkpoint_damaged_leaves_a_new_start(tmp_path):
  write(tmp_path, 3)
  damage(tmp_path / "3" / "state" / "manifest.ocdbt", "gone")
  with Checkpointer(str(tmp_path), 5) as checkpointer, pytest.raises(ValueError, match=rf"Move {tmp_path}/3 away to start anew\.$"):
    checkpointer.restore_latest(make_state())


def test_what_is_skipped_can_be_told(tmp_path):
  write(tmp_path, 3, 7)
  damage(tmp_path / "7" / "host" / "metadata", "gone")
  (tmp_path / "12").mkdir()
  with Checkpointer(str(tmp_path), 5) as checkpointer:
    assert checkpointer.latest_step() == 3
    assert checkpointer.skipped == ["7", "12"]
    checkpointer.save(4, make_state(), checkpointer.restore_latest(make_state())[1])
    assert checkpointer.skipped == []


def test_one_flipped_bit_is_damage(tmp_path):
  """Large arrays lie as raw bytes, which their reader takes as they are."""
  state = {"small": jnp.ones(3), "large": jax.random.normal(jax.random.key(0), (2**16,))}
  write(tmp_path, 3, 12, state=state)
  path = max((tmp_path / "12" / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  with (
    Checkpointer(str(tmp_path), 5) as checkpointer,
    pytest.raises(
      ValueError, match=rf"12 in \S+ is damaged \(not what was written: large\)\. Move {tmp_path}/12 away to resume from .* 3\.$"
    ),
  ):
    checkpointer.restore_latest(state)
