"""Learning curves of one run, or of several over each other.

  python -m experiments.plots WORKDIR [WORKDIR ...] [OUT.png]

Without OUT.png one run's picture goes to WORKDIR/curves.png and the picture of several to curves.png in the current folder.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_COLOURS = ("#1f5fa8", "#d1495b", "#2e8b57", "#e09f3e", "#6a4c93", "#3aa6b9", "#8c6d46", "#5c5c5c")
_PANELS = (
  ("score_mean", "Reward", "mean score"),
  ("kl", "KL to the run's own anchor", "nats per token"),
  ("entropy", "Entropy", "nats per token"),
  ("response_length", "Response length", "tokens"),
)
_EVALS = {"eval_sampled": ("evaluation, sampled", "o", False), "eval_greedy": ("evaluation, greedy", "D", True)}  # label, marker, filled
_POINT_ALPHA = 0.32


def plot_curves(metrics_jsonl_path: str, png_path: str) -> None:
  """Draws reward, KL, entropy and response length of one run against its RL steps."""
  plot_runs({os.path.basename(os.path.dirname(os.path.abspath(metrics_jsonl_path))): metrics_jsonl_path}, png_path)


def plot_runs(runs: dict[str, str], png_path: str) -> None:
  """Draws several runs over each other; `runs` maps a label to a metrics.jsonl. A quantity that no run logged leaves its panel empty.

  Raises:
    ValueError: a file is missing or has no readable line.
  """
  records = {label: _read(path) for label, path in runs.items()}
  figure = Figure(figsize=(10, 6.4), dpi=140, layout="constrained")
  figure.suptitle(next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs", fontsize=13, fontweight="bold")
  for ax, panel in zip(figure.subplots(2, 2, sharex=True).flat, _PANELS):
    _draw_panel(ax, panel, records)
  for ax in figure.axes[2:]:
    ax.set_xlabel("RL step")
  _add_legend(figure, records)
  figure.savefig(png_path)


def _draw_panel(ax: Axes, panel: tuple[str, str, str], records: dict[str, list[dict]]) -> None:
  key, title, unit = panel
  drawn = False
  for i, lines in enumerate(records.values()):
    colour = _COLOURS[i % len(_COLOURS)]
    steps, values = _series(lines, key)
    if len(steps):
      drawn = True
      ax.plot(steps, values, ".", color=colour, alpha=_POINT_ALPHA, markersize=4, markeredgewidth=0)
      ax.plot(steps, _running_mean(values), color=colour, linewidth=1.9)
    if key == "score_mean":
      drawn |= _draw_evals(ax, lines, colour)
  ax.set_title(title, fontsize=11, loc="left")
  ax.set_ylabel(unit)
  ax.grid(True, color="#dddddd", linewidth=0.7)
  ax.spines[["top", "right"]].set_visible(False)
  ax.tick_params(labelbottom=True)
  if not drawn:
    ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", va="center", color="#888888")
    ax.set_yticks([])


def _draw_evals(ax: Axes, lines: list[dict], colour: str) -> bool:
  drawn = False
  for key in _EVALS:
    steps, values = _series(lines, key)
    if len(steps):
      drawn = True
      ax.plot(steps, values, color=colour, **_eval_style(key, colour))
  return drawn


def _eval_style(key: str, colour: str) -> dict[str, Any]:
  _, marker, filled = _EVALS[key]
  face = colour if filled else "white"
  return {"marker": marker, "markersize": 6, "markerfacecolor": face, "linestyle": ":", "linewidth": 1, "zorder": 3}


def _add_legend(figure: Figure, records: dict[str, list[dict]]) -> None:
  """How a run is drawn and, when there are several, which colour is which run."""
  alone = len(records) == 1
  grey = _COLOURS[0] if alone else "#666666"
  runs = [] if alone else [Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linewidth=4, label=label) for i, label in enumerate(records)]
  marks = [Line2D([], [], color=grey, linewidth=1.9, label="training, running mean")]
  marks.append(Line2D([], [], color=grey, alpha=_POINT_ALPHA, linestyle="", marker=".", label="training, each step"))
  for key, (label, _, _) in _EVALS.items():
    if any(len(_series(lines, key)[0]) for lines in records.values()):
      marks.append(Line2D([], [], color=grey, label=label, **_eval_style(key, grey)))
  figure.legend(handles=runs + marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _running_mean(values: np.ndarray) -> np.ndarray:
  """Mean over a window of about a twentieth of the run around each point, cut at the ends."""
  half = min(25, len(values) // 40)
  total = np.concatenate([[0.0], np.cumsum(values)])
  index = np.arange(len(values))
  low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
  return (total[high] - total[low]) / (high - low)


def _series(lines: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
  points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
  steps, values = zip(*points) if points else ((), ())
  return np.asarray(steps, np.int64), np.asarray(values, np.float64)


def _read(path: str) -> list[dict]:
  """The lines of a metrics.jsonl; the last one may be half written while the run goes on."""
  if not os.path.exists(path):
    raise ValueError(f"There is no {path}: no step of this run has been logged, or its folder is not the --workdir of a run. Name one.")
  lines = []
  with open(path, encoding="utf-8") as file:
    for line in file:
      try:
        lines.append(json.loads(line))
      except ValueError:
        continue
  if not lines:
    raise ValueError(f"{path} has no readable line, so there is nothing to draw. Wait for the run's first step.")
  return lines


def main(argv: Sequence[str]) -> None:
  """Draws the runs whose workdirs are the arguments."""
  folders = [name for name in argv[1:] if not name.endswith(".png")]
  pictures = [name for name in argv[1:] if name.endswith(".png")]
  if not folders or len(pictures) > 1:
    raise app.UsageError("Usage: python -m experiments.plots WORKDIR [WORKDIR ...] [OUT.png]")
  default = os.path.join(folders[0], "curves.png") if len(folders) == 1 else "curves.png"
  png_path = pictures[0] if pictures else default
  names = [os.path.basename(os.path.abspath(folder)) for folder in folders]
  labels = names if len(set(names)) == len(names) else folders
  try:
    plot_runs({label: os.path.join(folder, "metrics.jsonl") for label, folder in zip(labels, folders)}, png_path)
  except (ValueError, OSError) as error:
    sys.exit(str(error))
  print(png_path)


if __name__ == "__main__":
  app.run(main)
