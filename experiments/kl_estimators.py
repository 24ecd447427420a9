"""What every KL estimator gets right and wrong: value and gradient, bias and deviation, against K and against the anchor's distance.

python -m experiments.kl_estimators                                      synthetic logits, about half a minute
python -m experiments.kl_estimators --model_path=DIR --text=FILE         next-token logits of a model; anchor: its weights plus noise
python -m experiments.kl_estimators --model_path=DIR --ref_model_path=DIR2             … or a second checkpoint (--distances: its share)

Nothing is sampled: every expectation is an exact sum over the vocabulary (experiments/kl_measure.py). Writes OUT.md, OUT.json and OUT.png.
"""

import dataclasses
import datetime
import os
import pathlib
import platform
import time

import jax
from absl import app
from tqdm import tqdm

from experiments import flags, kl_measure, kl_report, kl_sources
from experiments.report import fail, say

_DISTANCES = {
  "synthetic": ((0.1, 0.5), (0.02, 0.05, 0.2, 1.0)),
  "noise": ((0.001, 0.003, 0.03), (0.01, 0.1, 0.3)),
  "checkpoint": ((1.0,), (0.25, 0.5)),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to measure. Field names are the names of the flags."""

  out: str = flags.field(
    "runs/kl_estimators", "Prefix of the .md, .json and .png to write, or a folder (existing, or with a / at the end)."
  )
  topk: tuple[int, ...] = flags.field((0, 1, 8, 32, 128, 512), "Values of K, ids with exact treatment.")
  distances: tuple[float, ...] = flags.field(
    (),
    "How far the anchor is. Synthetic: standard deviation of the normal added to the logits (default 0.1,0.5). Second checkpoint: its "
    "share in the mixture of weights (default 1).",
  )
  perturbation: tuple[float, ...] = flags.field(
    (),
    "Model without a second checkpoint: size of the noise in the anchor's weights, relative to each array's own (default "
    "0.001,0.003,0.03).",
  )
  curve_distances: tuple[float, ...] = flags.field(
    (), "Further distances, in the JSON and the figure only. Empty: some, where the table's are the default."
  )
  vocab_size: int = flags.field(1500, "Synthetic: tokens in the vocabulary.")
  seeds: int = flags.field(5, "Synthetic: draws of each kind of logits.")
  model_path: str = flags.field("", "Hugging Face folder (Llama or Qwen2) whose next-token logits to use. Empty: synthetic logits.")
  ref_model_path: str = flags.field("", "Folder of a second checkpoint of the same architecture, for the anchor.")
  text: str = flags.field("", "Text file for the model. Empty: a short built-in text.")
  positions: int = flags.field(64, "Model: positions of the text, evenly spaced.")
  seed: int = flags.field(0, "Model: seed of the noise.")

  def __post_init__(self):
    idle = ("vocab_size", "seeds") if self.model_path else ("ref_model_path", "text", "perturbation", "positions", "seed")
    for name in idle:
      if getattr(self, name) != getattr(type(self), name):
        here, other = ("the logits of a model", "synthetic logits") if self.model_path else ("synthetic logits", "the logits of a model")
        raise ValueError(f"--{name} is for {other} and changes nothing for {here}: leave it out, or see --model_path.")
    noise = bool(self.model_path) and not self.ref_model_path
    if noise and self.distances:
      raise ValueError("--distances is for synthetic logits and for a second checkpoint (--ref_model_path): here it is --perturbation.")
    if self.perturbation and not noise:
      raise ValueError("--perturbation is the distance of an anchor made by noise: it does not go with --ref_model_path. Use --distances.")
    if not self.topk or min(self.topk) < 0 or len(set(self.topk)) < len(self.topk):
      raise ValueError(f"--topk={self.topk}: give different whole numbers, each at least 0 and at most the vocabulary size.")
    for name, least in (("vocab_size", 2), ("seeds", 1), ("positions", 1), ("seed", 0)):
      if getattr(self, name) < least:
        raise ValueError(f"--{name}={getattr(self, name)} must be at least {least}.")
    wrong = [x for x in (*self.distances, *self.perturbation, *self.curve_distances) if not 0 < x < float("inf")]
    if wrong:
      raise ValueError(f"A distance of {wrong[0]:g}: distances must be finite and above 0 (at 0 both KLs and their gradients are 0).")
    if not self.model_path:
      self.check_topk(self.vocab_size)

  def check_topk(self, vocab: int) -> None:
    """Raises if a K exceeds the vocabulary."""
    if max(self.topk) > vocab:
      raise ValueError(f"--topk has K = {max(self.topk)}, but the vocabulary has {vocab} tokens: use at most {vocab}.")

  def all_distances(self) -> dict[float, bool]:
    """Each distance, ascending, and whether it is one of the table's."""
    kind = "synthetic" if not self.model_path else "checkpoint" if self.ref_model_path else "noise"
    shown = self.distances or self.perturbation
    shown, further = (shown, self.curve_distances) if shown else (_DISTANCES[kind][0], self.curve_distances or _DISTANCES[kind][1])
    return {x: x in shown for x in sorted({*shown, *further})}


def _out_prefix(out: str) -> pathlib.Path:
  path = pathlib.Path(out)
  path = path / "kl_estimators" if out.endswith("/") or path.is_dir() else path
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


def _measure_all(settings: Settings) -> tuple[list[kl_report.Case], dict[str, dict[str, float]]]:
  """Every case, and the noise floor of a model."""
  distances, floors = settings.all_distances(), {}
  if settings.model_path:
    text = pathlib.Path(settings.text).read_text(encoding="utf-8") if settings.text else kl_sources.TEXT
    source = kl_sources.load(settings.model_path, settings.ref_model_path, text, settings.positions, settings.seed)
    settings.check_topk(source.config.vocab_size)
    say(f"{source.tokens.shape[1]} tokens of text, {len(source.positions)} positions, vocabulary {source.config.vocab_size:,}")
    for dtype in ("float32", "bfloat16"):
      floors[dtype] = kl_sources.noise_floor(source, dtype)
      mean, largest = floors[dtype]["mean"], floors[dtype]["largest"]
      say(f"noise floor, {dtype} body: KL of the model with itself in another batch shape: mean {mean:.1e}, largest {largest:.1e} nats")
    policy = kl_sources.policy_logits(source)
    vocab = policy.shape[1]
    # One pair of logits at a time: at a vocabulary of 150,000 they are large.
    model = pathlib.Path(settings.model_path).absolute().name
    make = {(model, x): lambda x=x: (policy, kl_sources.anchor_logits(source, x)) for x in distances}
  else:
    vocab = settings.vocab_size
    make = {
      (kind, x): lambda kind=kind, x=x: kl_sources.synthetic(kind, x, vocab, settings.seeds)
      for kind in kl_sources.SYNTHETIC
      for x in distances
    }
  total = len(make) * len(kl_measure.jobs(settings.topk, vocab))
  cases = []
  with tqdm(total=total, desc="measuring (each first use compiles)", unit="job", dynamic_ncols=True) as bar:
    for (name, distance), pair in make.items():
      logits, ref_logits = pair()
      rows = kl_measure.measure(logits, ref_logits, settings.topk, bar.update)
      cases.append(kl_report.Case(name, distance, distances[distance], rows))
  return cases, floors


def run(settings: Settings) -> list[kl_report.Case]:
  """Measures, writes the three files, and prints what matters most.

  Raises:
    ValueError: if the settings, the model or the text cannot be used.
  """
  began = time.time()
  prefix = _out_prefix(settings.out)
  values = dataclasses.asdict(settings) | {"distances": [x for x, shown in settings.all_distances().items() if shown]}
  values["curve_distances"] = [x for x, shown in settings.all_distances().items() if not shown]
  versions = f"jax {jax.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
  say(f"kl_estimators · {jax.device_count()} {jax.devices()[0].platform} device(s) · {versions}")
  say("settings: " + " ".join(f"{name}={value}" for name, value in values.items()))
  cases, floors = _measure_all(settings)
  seconds = time.time() - began
  facts = {"settings": values, "versions": versions, "date": f"{datetime.date.today()}", "seconds": round(seconds, 1)}
  header = [f"Versions: {versions}; {seconds:.0f} s.", "Settings: " + ", ".join(f"{k} {v}" for k, v in values.items() if k != "out") + "."]
  kl_report.write_markdown(prefix.with_name(prefix.name + ".md"), cases, header, floors)
  kl_report.write_json(prefix.with_name(prefix.name + ".json"), cases, facts, floors)
  kl_report.write_figure(prefix.with_name(prefix.name + ".png"), cases)
  for line in _summary(cases):
    say(line)
  say(f"{prefix}.md, .json and .png written after {time.time() - began:.0f} s")
  return cases


def _summary(cases: list[kl_report.Case]) -> list[str]:
  """The two claims of docs/estimators.md, as measured here."""
  lines = []
  for clamped, where in ((False, "no token clamped"), (True, "some tokens clamped (|log-ratio| beyond max_log_ratio)")):
    unbiased = [row for case in cases for row in case.rows if row.estimator in kl_measure.UNBIASED and (row.clamped > 0) == clamped]
    if unbiased:
      worst = max(unbiased, key=lambda row: row.gradient_bias_worst)
      of = worst.estimator if worst.topk is None else f"{worst.estimator}, K={worst.topk}"
      lines.append(f"forms called unbiased, {where}: largest gradient bias of a position {worst.gradient_bias_worst:.1e} ({of})")
  for case in cases:
    rows = {(row.estimator, row.topk): row for row in case.rows}
    for topk in (k for k in (8, 32) if ("topk_reverse", k) in rows and case.table):
      for direction in kl_measure.DIRECTIONS:
        published, chain = (rows[f"{form}topk_{direction}", topk] for form in ("published_", ""))
        lines.append(
          f"{case.source}, distance {case.distance:g}, {direction}, K={topk}: published gradient bias {published.gradient_bias:.2g}; value "
          f"deviation {published.value_std:.2g} published, {chain.value_std:.2g} chain rule ({published.value_std / chain.value_std:.1f}×)"
        )
  return lines


def main(argv: list[str]) -> None:
  """Flags in, three files out."""
  try:
    if len(argv) > 1:
      raise ValueError(f"{argv[1]!r} is not a flag: write --name=value.")
    run(flags.read(Settings))
  except (ValueError, OSError) as error:
    fail(error)


if __name__ == "__main__":
  flags.define(Settings)
  app.run(main)
