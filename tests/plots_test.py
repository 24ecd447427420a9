"""Curves: what is drawn where, from whole, partial and missing logs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from experiments import plots

KEYS = ("score_mean", "kl", "entropy", "response_length")


def write_run(folder, steps=60, keys=KEYS, evals=True):
  folder.mkdir()
  lines = []
  for step in range(steps + 1):
    line = {"step": step} | ({key: (i + 1) * step for i, key in enumerate(keys)} if step else {})
    if evals and step % 20 == 0:
      line |= {"eval_sampled": 0.1 * step, "eval_greedy": 0.2 * step}
    lines.append(json.dumps(line))
  (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  return folder


@pytest.fixture
def drawn(monkeypatch):
  """The figure that was saved last."""
  saved = []
  save = Figure.savefig
  monkeypatch.setattr(Figure, "savefig", lambda figure, path: (saved.append(figure), save(figure, path)))
  return saved


def series(ax):
  return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines]


def test_a_run_fills_four_panels_with_points_mean_and_evaluations(tmp_path, drawn):
  run = write_run(tmp_path / "run7")
  plots.plot_curves(str(run / "metrics.jsonl"), str(tmp_path / "out.png"))
  image = imread(tmp_path / "out.png")
  assert image.shape[0] > 600 and image.shape[1] > 1000 and image.std() > 0.01
  figure = drawn[-1]
  assert figure.get_suptitle() == "run7"
  assert [ax.get_title(loc="left") for ax in figure.axes] == ["Reward", "KL to the run's own anchor", "Entropy", "Response length"]
  assert [ax.get_ylabel() for ax in figure.axes] == ["mean score", "nats per token", "nats per token", "tokens"]
  assert [ax.get_xlabel() for ax in figure.axes[2:]] == ["RL step", "RL step"]
  steps = list(range(1, 61))
  for i, ax in enumerate(figure.axes):
    points, mean = series(ax)[:2]
    assert points == (steps, [(i + 1) * step for step in steps])
    # A straight line is its own centred mean, but for the half window (1 of 60 points) that is cut off at each end.
    assert mean[1][1:-1] == points[1][1:-1]
    assert mean[1][0] == (i + 1) * 1.5
  assert series(figure.axes[0])[2:] == [([0, 20, 40, 60], [0.0, 2.0, 4.0, 6.0]), ([0, 20, 40, 60], [0.0, 4.0, 8.0, 12.0])]
  assert len(figure.axes[1].lines) == 2


def test_a_series_that_was_not_logged_is_said_so(tmp_path, drawn):
  run = write_run(tmp_path / "run", keys=("score_mean", "entropy"), evals=False)
  plots.plot_curves(str(run / "metrics.jsonl"), str(tmp_path / "out.png"))
  assert [[text.get_text() for text in ax.texts] for ax in drawn[-1].axes] == [[], ["not logged"], [], ["not logged"]]


def test_nulls_and_half_a_last_line_are_passed_over(tmp_path, drawn):
  run = tmp_path / "run"
  run.mkdir()
  (run / "metrics.jsonl").write_text('{"step": 1, "kl": 1.0}\n{"step": 2, "kl": null}\n{"step": 3, "kl": 2.0}\n{"step": 4, "k')
  plots.plot_curves(str(run / "metrics.jsonl"), str(tmp_path / "out.png"))
  assert series(drawn[-1].axes[1])[0] == ([1, 3], [1.0, 2.0])


def test_running_mean_is_centred_and_cut_at_the_ends():
  values = np.zeros(80)  # half window 2
  values[40] = 5.0
  values[0] = 3.0
  mean = plots._running_mean(values)
  np.testing.assert_allclose(mean[37:44], [0, 1, 1, 1, 1, 1, 0], atol=1e-12)
  np.testing.assert_allclose(mean[:4], [1.0, 0.75, 0.6, 0.0], atol=1e-12)


def test_several_runs_lie_over_each_other(tmp_path, drawn):
  runs = [write_run(tmp_path / "a", evals=False), write_run(tmp_path / "b", steps=30, evals=False)]
  plots.main(["plots", *map(str, runs), str(tmp_path / "both.png")])
  assert (tmp_path / "both.png").exists()
  figure = drawn[-1]
  assert [len(x) for x, _ in series(figure.axes[2])] == [60, 60, 30, 30]
  colours = [line.get_color() for line in figure.axes[2].lines]
  assert colours[0] == colours[1] != colours[2] == colours[3]
  assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "training, running mean", "training, each step"]


def test_the_command_draws_into_the_workdir(tmp_path):
  run = write_run(tmp_path / "run")
  done = subprocess.run([sys.executable, "-m", "experiments.plots", str(run)], capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == str(run / "curves.png")
  assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_log_is_an_error_that_names_it(tmp_path):
  with pytest.raises(SystemExit, match=r"There is no .*nowhere/metrics.jsonl"):
    plots.main(["plots", str(tmp_path / "nowhere")])
  empty = tmp_path / "metrics.jsonl"
  empty.write_text("")
  with pytest.raises(ValueError, match="no readable line"):
    plots.plot_curves(str(empty), str(tmp_path / "out.png"))
