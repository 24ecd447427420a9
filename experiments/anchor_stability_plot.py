"""The figure of `experiments.anchor_stability`."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = {"fixed": "#5c5c5c", "pre_update": "#d1495b", "post_update": "#1f5fa8", "periodic": "#2e8b57"}


def draw(result: dict, curves: dict[str, tuple[list[float], list[float]]], png_path: str) -> None:
  """Growth of δ around each limit, the steady lag beside its formula, and the power iterations if a model was measured."""
  with_model = "model" in result
  figure = Figure(figsize=(14 if with_model else 9.5, 4.4), dpi=140, layout="constrained")
  axes = figure.subplots(1, 3 if with_model else 2)
  _draw_limits(axes[0], result["limits"], curves)
  _draw_lag(axes[1], result["lag"])
  if with_model:
    _draw_iterations(axes[2], result["model"])
  for ax in axes:
    ax.grid(True, color="#dddddd", linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
  figure.savefig(png_path)


def _draw_limits(ax: Axes, rows: list[dict], curves: dict[str, tuple[list[float], list[float]]]) -> None:
  limits = {r["kind"]: r["limit"] for r in rows}
  for kind, (x, growth) in curves.items():
    label = f"{kind}, limit {limits[kind]:.3f}" if kind in limits else f"{kind}, no limit"
    ax.plot(x, growth, color=_COLOURS[kind], label=label)
  for r in rows:
    face = "white" if r["stable"] else _COLOURS[r["kind"]]
    ax.plot(r["x"], r["growth"] ** (1.0 / r["cycle"]), "o", color=_COLOURS[r["kind"]], markerfacecolor=face)
  ax.axhline(1.0, color="black", linewidth=0.8)
  ax.set_title("Growth of |δ|: formula, simulated at 0.99× (○), 1.01× (●)", fontsize=10, loc="left")
  ax.set_xlabel("αβλ")
  ax.set_ylabel("factor per optimizer step")


def _draw_lag(ax: Axes, rows: list[dict]) -> None:
  for kind, colour in _COLOURS.items():
    points = [r for r in rows if r["kind"] == kind]
    x = [r["x"] for r in points]
    ax.plot(x, [r["formula"] for r in points], "-", color=colour, label=f"{kind}, formula")
    ax.plot(x, [r["simulated"] for r in points], "o", color=colour, markerfacecolor="white")
  ax.set_xscale("log")
  ax.set_yscale("log")
  ax.set_title("Steady lag: simulation (points) and formula", fontsize=10, loc="left")
  ax.set_xlabel("αβλ")
  ax.set_ylabel("δ* / αg")


def _draw_iterations(ax: Axes, model: dict) -> None:
  for name, colour in (("plain", "#1f5fa8"), ("adam", "#e09f3e")):
    found = model[name]
    steps = range(1, 1 + len(found["quotients"]))
    ax.plot(steps, found["quotients"], "-", marker="o", markersize=3, color=colour, label=f"λ, {name}: {found['eigenvalue']:.3g}")
    ax.plot(steps, found["residuals"], ":", marker="o", markersize=3, color=colour, label=f"residual, {name}")
  ax.set_yscale("log")
  ax.set_title("Top eigenvalue of the Fisher matrix", fontsize=10, loc="left")
  ax.set_xlabel("power iteration")
