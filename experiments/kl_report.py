"""The table, the JSON and the figure of `experiments.kl_estimators`."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.kl_measure import Row

_FORMS = {"published_topk": ("published", "#d1495b"), "score_topk": ("score", "#e09f3e"), "topk": ("chain rule", "#1f5fa8")}
_LINES = {"reverse": "-", "forward": "--"}
_SAMPLED = {"k4": ("K4 (reverse)", ":"), "k3pp": ("K3++ (reverse)", "-.")}
_PANELS = (
  ("gradient_bias", "‖E g − ∇KL‖ / ‖∇KL‖"),
  ("value_std", "value deviation / KL"),
  ("gradient_std", "gradient deviation / ‖∇KL‖"),
)
_SMALLEST_DRAWN = 1e-17
_HEADER = (
  "| estimator | K | stored | π(q̄) | value bias | value deviation | gradient bias | gradient deviation | smallest value |\n"
  "|---|---|---|---|---|---|---|---|---|\n"
)
_EXPLANATION = """
Expectations are exact sums over the sampled token, on-policy, in float64. Value bias and deviation are relative to the mean KL, gradient
bias and deviation (2-norms wrt the logits) to the root mean square of ‖∇KL‖; biases and deviations are root mean squares over positions.
"Smallest value" is the smallest per-token estimate, in nats. q is the policy's top-k for the reverse KL and the anchor's for the forward,
as in training by default; π(q̄) is the mass outside it. "Stored" counts the numbers kept per token from the anchor's pass until the loss.
Errors around 1e-12 and below are rounding. A token whose log-ratio lies beyond max_log_ratio is clamped: its estimate has no gradient.
"""


@dataclasses.dataclass(frozen=True)
class Case:
  """The measurements of one source at one distance; `table` says whether the Markdown shows it."""

  source: str
  distance: float
  table: bool
  rows: list[Row]


def write_markdown(path: pathlib.Path, cases: Sequence[Case], header: Sequence[str], floors: dict[str, dict[str, float]]) -> None:
  """One table per case, under the settings and the noise floor."""
  parts = ["# KL estimators, measured\n", *(f"{line}  " for line in header), _EXPLANATION]
  for dtype, floor in floors.items():
    parts.append(
      f"Noise floor, {dtype} body: KL of the model with itself in another batch shape: mean {floor['mean']:.1e}, largest "
      f"{floor['largest']:.1e} nats.  "
    )
  for case in cases:
    if case.table:
      kls = {row.direction: row.kl for row in case.rows}
      parts.append(f"\n## {case.source}, distance {case.distance:g}\n")
      parts.append(f"Mean KL: reverse {kls['reverse']:.3e}, forward {kls['forward']:.3e} nats.")
      parts.append(f"Largest mass of clamped tokens: {max(row.clamped for row in case.rows):.1e}.\n")
      parts.append(_HEADER + "\n".join(map(_line, case.rows)))
  path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _line(row: Row) -> str:
  mass = "" if row.topk is None else f"{row.tail_mass:.2g}"
  topk = "" if row.topk is None else str(row.topk)
  numbers = " | ".join(f"{x:.1e}" for x in (row.value_bias, row.value_std, row.gradient_bias, row.gradient_std, row.smallest))
  return f"| {row.estimator} | {topk} | {row.stored:,} | {mass} | {numbers} |"


def write_json(path: pathlib.Path, cases: Sequence[Case], facts: dict, floors: dict[str, dict[str, float]]) -> None:
  """Everything measured, to six digits, a line per row."""
  content = _rounded(facts | {"noise_floor": floors, "cases": [dataclasses.asdict(case) for case in cases]})
  text = json.dumps(content, ensure_ascii=False)
  path.write_text(text.replace('{"estimator"', '\n{"estimator"').replace('{"source"', '\n{"source"') + "\n", encoding="utf-8")


def _rounded(x):
  if isinstance(x, dict):
    return {key: _rounded(value) for key, value in x.items()}
  if isinstance(x, list | tuple):
    return [_rounded(value) for value in x]
  return float(f"{x:.6g}") if isinstance(x, float) else x


def write_figure(path: pathlib.Path, cases: Sequence[Case]) -> None:
  """For each source a row of panels against K and one against the distance: gradient bias, value deviation, gradient deviation."""
  sources = list(dict.fromkeys(case.source for case in cases))
  figure = Figure(figsize=(12.5, 3.1 * 2 * len(sources) + 0.6), dpi=110, layout="constrained")
  axes = figure.subplots(2 * len(sources), len(_PANELS), squeeze=False)
  for i, source in enumerate(sources):
    own = sorted((case for case in cases if case.source == source), key=lambda case: case.distance)
    shown = [case for case in own if case.table]
    fixed = shown[(len(shown) - 1) // 2]
    topks = sorted({row.topk for row in fixed.rows if row.topk is not None})
    topk = 32 if 32 in topks else topks[len(topks) // 2]
    for j, (key, label) in enumerate(_PANELS):
      _draw(axes[2 * i, j], [(row.topk, row) for row in fixed.rows], key)
      _draw_sampled(axes[2 * i, j], fixed.rows, key)
      axes[2 * i, j].set(xlabel="K", ylabel=label, xscale="symlog", xlim=(0, None), xticks=topks, xticklabels=topks)
      axes[2 * i, j].set_title(f"{source}, distance {fixed.distance:g}", fontsize=10, loc="left")
      _draw(axes[2 * i + 1, j], [(case.distance, row) for case in own for row in case.rows if row.topk == topk], key)
      axes[2 * i + 1, j].set(xlabel="distance of the anchor", ylabel=label, xscale="log")
      axes[2 * i + 1, j].set_title(f"{source}, K = {topk}", fontsize=10, loc="left")
  marks = [Line2D([], [], color=colour, label=label) for label, colour in _FORMS.values()]
  marks += [Line2D([], [], color="#666666", linestyle=style, label=name) for name, style in _LINES.items()]
  marks += [Line2D([], [], color="#2e8b57", linestyle=style, label=label) for label, style in _SAMPLED.values()]
  figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9)
  figure.savefig(path)


def _draw(ax: Axes, points: Sequence[tuple[float, Row]], key: str) -> None:
  for form, (_, colour) in _FORMS.items():
    for direction, style in _LINES.items():
      own = [(x, getattr(row, key)) for x, row in points if row.estimator == f"{form}_{direction}"]
      x, y = zip(*own)
      # Two forms may coincide: the earlier one is wider, and shows on both sides of the later.
      width = 1.6 if form == "topk" else 3.2 if form == "published_topk" else 1.9
      ax.plot(x, np.maximum(y, _SMALLEST_DRAWN), linestyle=style, color=colour, linewidth=width, marker=".")
  ax.set_yscale("log")
  ax.grid(True, color="#dddddd", linewidth=0.7)
  ax.spines[["top", "right"]].set_visible(False)


def _draw_sampled(ax: Axes, rows: Sequence[Row], key: str) -> None:
  """What a sampled estimator, which has no K, reaches."""
  for row in rows:
    if row.estimator in _SAMPLED:
      ax.axhline(max(getattr(row, key), _SMALLEST_DRAWN), color="#2e8b57", linestyle=_SAMPLED[row.estimator][1], linewidth=1.0)
