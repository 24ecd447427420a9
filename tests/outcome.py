"""What a run ends with, for comparing an interrupted one with one that nobody disturbed."""

import dataclasses
import json
import pathlib

import jax
import numpy as np

from emapg_jax.checkpoint import Checkpointer

TIMES = ("seconds_", "tokens_per_second")


@dataclasses.dataclass
class Outcome:
  """Everything but what a clock measured; two of them are equal bit for bit or not at all."""

  arrays: dict[str, tuple[str, bytes]]  # of the last checkpoint: params, anchor, optimizer, step
  host: dict  # its counters, without the flags, which name the folder
  checkpoints: list[str]  # the folder, so that nothing half-written stays
  metrics: list[dict]
  samples: list[dict]

  def differences(self, other: "Outcome") -> list[str]:
    """The parts that are not equal; of the arrays, which."""
    arrays = [name for name in self.arrays if self.arrays[name] != other.arrays.get(name)]
    parts = ("host", "checkpoints", "metrics", "samples")
    return arrays + [name for name in parts if getattr(self, name) != getattr(other, name)]


def lines(path: pathlib.Path) -> list[dict]:
  """The lines of a JSONL file without what a clock measured; none where there is no file."""
  rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def outcome(workdir: pathlib.Path, abstract_state) -> Outcome:
  """Reads it from the folder of a run."""
  with Checkpointer(str(workdir / "checkpoints"), 1) as checkpointer:
    state, host = checkpointer.restore_latest(abstract_state)
  found = [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
  return Outcome(
    arrays={name: (str(leaf.dtype), leaf.tobytes()) for name, leaf in found},
    host=dataclasses.asdict(host) | {"flags": None},
    checkpoints=sorted(path.name for path in (workdir / "checkpoints").iterdir()),
    metrics=lines(workdir / "metrics.jsonl"),
    samples=lines(workdir / "samples.jsonl"),
  )


def step_without_training(run, state, host, initial, stream, step):
  """In place of `rl_step`, where only what stands around it matters: compiles nothing."""
  del initial, step
  stream.take(run.config.prompts_per_step)
  return state.replace(step=state.step + 1), dataclasses.replace(host, position=stream.position), {"score_mean": 0.5}, []
