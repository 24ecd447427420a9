"""How large a step on β·KL(policy‖anchor) may be: the four limits by simulation, and how far a real model is from them.

  python -m experiments.anchor_stability [--out=PREFIX]
  python -m experiments.anchor_stability --model_path=DIR [--text=FILE] [--learning_rate=1e-6 --kl_coef=0.001 ...]

Near the anchor the KL is a quadratic of curvature λ. One optimizer step is θ ← θ − α(βλ(θ − θ_ema) − g), and the anchor is moved by
`anchor.update_anchor`: never (fixed), with the weights before each step (pre_update), after each step (post_update), or after the last of
`mini_batches` steps of every `ema_period`-th RL step (periodic, what training does). The simulation steps just below and just above each
limit, and lets a constant reward gradient g pull until the lag δ = θ − θ_ema is steady.

With a model, λ is the top eigenvalue of its Fisher matrix on a text, plain and in Adam's metric (`experiments/fisher.py`).
Writes PREFIX.json and PREFIX.png.
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax import lax

from emapg_jax import anchor
from experiments import anchor_stability_plot, fisher, flags, report

KINDS = ("fixed", "pre_update", "post_update", "periodic")
SAMPLE_TEXT = (pathlib.Path(__file__).parent / "anchor_stability_text.txt").read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the experiment."""

  learning_rate: float = flags.field(1e-6, "α, the optimizer's step size")
  kl_coef: float = flags.field(0.001, "β, the weight of the KL to the anchor")
  ema_decay: float = flags.field(0.95, "η, the weight the anchor keeps")
  ema_period: int = flags.field(10, "RL steps between anchor updates")
  mini_batches: int = flags.field(2, "optimizer updates per RL step")
  model_path: str = flags.field("", "Hugging Face folder of a model to measure; empty: simulate only")
  text: str = flags.field("", "file whose tokens the model is measured on; empty: a built-in text of word problems")
  rows: int = flags.field(2, "rows of text in a batch")
  tokens: int = flags.field(64, "tokens per row")
  iterations: int = flags.field(15, "most power iterations, for each of the two matrices")
  tolerance: float = flags.field(0.001, "residual ‖Av − λv‖/λ at which a power iteration stops")
  moment_batches: int = flags.field(16, "mini-batches that Adam's second moment is estimated on")
  adam_eps: float = flags.field(1e-8, "ε of P = diag(√v̂ + ε)")
  seed: int = flags.field(0, "of the power iteration's start and of the tokens sampled for v̂")
  out: str = flags.field("runs/anchor_stability", "prefix of the .json and .png that are written")

  def __post_init__(self):
    for name in ("learning_rate", "kl_coef", "tolerance", "adam_eps"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(f"--{name} is {getattr(self, name)}; it must be positive and finite. Pass a value above 0.")
    for name in ("ema_period", "mini_batches", "rows", "tokens", "iterations", "moment_batches"):
      if getattr(self, name) < 1:
        raise ValueError(f"--{name} is {getattr(self, name)}; it counts something there must be one of. Pass 1 or more.")
    if not 0 <= self.ema_decay <= 1:
      raise ValueError(f"--ema_decay is {self.ema_decay}; it is the weight the anchor keeps. Pass a value in [0, 1].")
    if self.text and not self.model_path:
      raise ValueError(f"--text={self.text!r} is read by a model's tokenizer only, and there is no --model_path. Pass both, or neither.")

  def cycle(self, kind: str) -> int:
    """Optimizer steps between two anchor updates."""
    return self.ema_period * self.mini_batches if kind == "periodic" else 1

  def limit(self, kind: str) -> float:
    """The bound on αβλ."""
    return anchor.stability_limit(kind, self.ema_decay, self.cycle(kind))


@functools.partial(jax.jit, static_argnames=("kind", "config", "cycles", "start"))
def simulate(kind: str, config: Config, curvature: jax.Array, cycles: int, push: float = 0.0, start: float = 1.0) -> jax.Array:
  """δ = θ − θ_ema after each cycle of optimizer steps, float32 [cycles, n], for n independent curvatures [n]; the anchor starts at 0.

    θ ← θ − α(β·curvature·(θ − θ_ema) − push)

  A cycle ends with the anchor update, if the kind has one.
  """
  decay, period, mini_batches = config.ema_decay, 1, 1
  if kind == "fixed":
    decay = 1.0
  elif kind == "periodic":
    period, mini_batches = config.ema_period, config.mini_batches

  def rl_step(carry, step):
    params, ema_params = carry
    before = params
    for _ in range(mini_batches):
      params = params - config.learning_rate * (config.kl_coef * curvature * (params - ema_params) - push)
    averaged = before if kind == "pre_update" else params
    return (params, anchor.update_anchor(averaged, ema_params, decay, step, period)), None

  def cycle(carry, first):
    carry, _ = lax.scan(rl_step, carry, first + jnp.arange(period, dtype=jnp.int32))
    return carry, carry[0] - carry[1]

  params = jnp.full(curvature.shape, start, jnp.float32)
  firsts = 1 + period * jnp.arange(cycles, dtype=jnp.int32)
  return lax.scan(cycle, (params, jnp.zeros_like(params)), firsts)[1]


def cycle_factor(kind: str, x: float, ema_decay: float, cycle: int) -> float:
  """What one cycle multiplies δ by, at x = αβλ: 1 − x, η − x, η(1 − x), η(1 − x)^N."""
  if kind == "fixed":
    return 1.0 - x
  return ema_decay - x if kind == "pre_update" else ema_decay * (1.0 - x) ** cycle


def steady_lag(kind: str, x: float, ema_decay: float, cycle: int, push: float) -> float:
  """δ* after the anchor update under a constant `push` = αg per optimizer step.

  fixed: push/x; pre_update: push/(1 − η + x); post_update: η·push/(1 − η + ηx);
  periodic: η·push·s/(1 − η(1 − x)^N), s = Σ_{n<N} (1 − x)^n.
  """
  if kind == "fixed":
    return push / x
  if kind == "pre_update":
    return push / (1.0 - ema_decay + x)
  pushes = sum((1.0 - x) ** n for n in range(cycle))
  return ema_decay * push * pushes / (1.0 - ema_decay * (1.0 - x) ** cycle)


def check_limits(config: Config, least_steps: int = 600) -> list[dict]:
  """Steps at 0.99 and 1.01 times each limit: |δ| at the end (it starts at 1), its mean growth per cycle and the formula's."""
  rows = []
  for kind in KINDS:
    limit, cycle = config.limit(kind), config.cycle(kind)
    if math.isinf(limit):
      continue
    x = limit * np.array([0.99, 1.01])
    cycles = max(4, -(-least_steps // cycle))
    deltas = np.abs(simulate(kind, config, jnp.asarray(x / (config.learning_rate * config.kl_coef), jnp.float32), cycles))
    for i, times in enumerate((0.99, 1.01)):
      growth = float(deltas[-1, i] ** (1.0 / cycles))
      rows.append(
        {"kind": kind, "limit": limit, "times": times, "x": float(x[i]), "cycle": cycle, "growth": growth, "stable": growth < 1.0}
        | {"formula": abs(cycle_factor(kind, x[i], config.ema_decay, cycle)), "steps": cycles * cycle, "delta": float(deltas[-1, i])}
      )
  return rows


def growth_curves(config: Config) -> dict[str, tuple[list[float], list[float]]]:
  """By the formula, αβλ around the limits and the growth of |δ| per optimizer step."""
  limits = [config.limit(kind) for kind in KINDS if math.isfinite(config.limit(kind))]
  xs = np.linspace(0.8 * min(limits), 1.08 * max(limits), 200).tolist()
  curves = {}
  for kind in KINDS:
    cycle = config.cycle(kind)
    curves[kind] = xs, [abs(cycle_factor(kind, x, config.ema_decay, cycle)) ** (1.0 / cycle) for x in xs]
  return curves


def check_lag(config: Config, xs: Sequence[float] = (0.01, 0.1, 0.5, 1.5)) -> list[dict]:
  """The lag of each kind under a constant gradient g = 1, run until it is steady, beside its formula, in units of αg.

  Only at those αβλ of `xs` that lie below the kind's limit.
  """
  rows = []
  alpha = config.learning_rate
  for kind in KINDS:
    cycle = config.cycle(kind)
    stable = [x for x in xs if x < config.limit(kind)]
    slowest = max(0.1, *(abs(cycle_factor(kind, x, config.ema_decay, cycle)) for x in stable))
    cycles = math.ceil(math.log(1e-7) / math.log(slowest))
    curvature = jnp.asarray(np.array(stable) / (alpha * config.kl_coef), jnp.float32)
    lags = simulate(kind, config, curvature, cycles, push=1.0, start=0.0)[-1] / alpha
    for x, lag in zip(stable, lags):
      rows.append({"kind": kind, "x": x, "simulated": float(lag), "formula": steady_lag(kind, x, config.ema_decay, cycle, 1.0)})
  return rows


def read_rows(config: Config) -> np.ndarray:
  """The text as int32 [n, tokens], n full rows, at least `rows`."""
  from emapg_jax.models.tokenizer import ChatTokenizer  # transformers takes seconds to import, and a simulation needs none

  text = pathlib.Path(config.text).read_text(encoding="utf-8") if config.text else SAMPLE_TEXT
  ids = np.asarray(ChatTokenizer(config.model_path).encode_prompt(text, chat=False), np.int32)
  n = len(ids) // config.tokens
  if n < config.rows:
    raise ValueError(
      f"The text has {len(ids)} tokens, which fill {n} rows of --tokens={config.tokens}, but --rows is {config.rows}. "
      "Give a longer --text, or lower one of them."
    )
  return ids[: n * config.tokens].reshape(n, config.tokens)


def measure_model(config: Config) -> dict:
  """The top eigenvalue of the model's Fisher matrix, plain and in Adam's metric, with each iteration's quotient and residual."""
  from emapg_jax.models import decoder, hf

  model_config = hf.read_config(config.model_path)
  rows = read_rows(config)
  report.say(f"reading {config.model_path}: {config.rows} × {config.tokens} tokens for F, from a text of {len(rows)} such rows")
  params = hf.load_params(config.model_path, model_config)

  def model(params, tokens):
    return decoder.apply(model_config, params, tokens), decoder.unembedding(params)

  report.say(f"{decoder.count_params(params):,} weights, vocabulary {model_config.vocab_size:,}; {config.moment_batches} batches for v̂")
  start_key, moment_key = jax.random.split(jax.random.key(config.seed))
  picks = np.arange(config.moment_batches * config.rows).reshape(config.moment_batches, config.rows) % len(rows)

  def count(done):
    if done % max(1, config.moment_batches // 4) == 0:
      report.say(f"second moments: {done}/{config.moment_batches} batches")

  moments = fisher.second_moments(model, params, rows[picks], moment_key, count)
  tokens = jnp.asarray(rows[: config.rows, None, :])
  plain = functools.partial(fisher.fisher_vector_product, model, params, tokens)
  result = {"parameters": decoder.count_params(params)}
  for name, product in (("plain", plain), ("adam", fisher.preconditioned(plain, moments, config.adam_eps))):
    began = time.time()

    def watch(i, quotient, residual, name=name, began=began):
      report.say(f"{name} power iteration {i}/{config.iterations}: λ {quotient:.5g}, residual {residual:.1e} ({time.time() - began:.0f} s)")

    found = fisher.power_iteration(product, fisher.random_like(params, start_key), config.iterations, config.tolerance, watch)
    result[name] = {"quotients": found.quotients, "residuals": found.residuals, "eigenvalue": found.quotients[-1]}
  return result


def distances(config: Config, eigenvalues: dict[str, float]) -> list[dict]:
  """αβλ beside each limit, and the learning rate that would reach it."""
  rows = []
  for name, eigenvalue in eigenvalues.items():
    x = config.learning_rate * config.kl_coef * eigenvalue
    for kind in KINDS:
      limit = config.limit(kind)
      rows.append({"metric": name, "eigenvalue": eigenvalue, "kind": kind, "x": x, "limit": limit, "fraction": x / limit})
      rows[-1]["largest_learning_rate"] = limit / (config.kl_coef * eigenvalue)
  return rows


def run(config: Config) -> dict:
  """Simulates, measures the model if there is one, writes the two files and returns what the JSON holds."""
  began = time.time()
  life = anchor.half_life(config.ema_decay, config.ema_period)
  report.say(
    f"anchor stability · α={config.learning_rate:g}, β={config.kl_coef:g}, η={config.ema_decay:g} every {config.ema_period} RL steps of "
    f"{config.mini_batches} updates (N={config.cycle('periodic')}), half-life {life:.1f} RL steps · {jax.devices()[0].platform}"
  )
  result = {"config": dataclasses.asdict(config), "limits": check_limits(config), "lag": check_lag(config)}
  report.say("\nsteps just below and above each limit of αβλ\n" + limits_table(result["limits"]))
  for kind in KINDS:
    if math.isinf(config.limit(kind)):
      report.say(f"{kind:<12} no limit: at η=0 every step is stable, for the anchor is the policy itself after each update")
  report.say("\nsteady lag δ* under a constant gradient, in units of αg, after the anchor update\n" + lag_table(result["lag"]))
  if config.model_path:
    result["model"] = measure_model(config)
    result["distances"] = distances(config, {name: result["model"][name]["eigenvalue"] for name in ("plain", "adam")})
    report.say("\nhow far this model is from each limit\n" + distance_table(result["distances"]))
  pathlib.Path(config.out).parent.mkdir(parents=True, exist_ok=True)
  pathlib.Path(f"{config.out}.json").write_text(json.dumps(_finite(result), indent=1) + "\n", encoding="utf-8")
  anchor_stability_plot.draw(result, growth_curves(config), f"{config.out}.png")
  report.say(f"\ndone in {time.time() - began:.0f} s: {config.out}.json, {config.out}.png")
  return result


def _finite(x):
  """The same, with None for the infinite limits of ema_decay=0, which JSON has no word for."""
  if isinstance(x, dict):
    return {key: _finite(value) for key, value in x.items()}
  if isinstance(x, list | tuple):
    return [_finite(value) for value in x]
  return None if isinstance(x, float) and not math.isfinite(x) else x


def limits_table(rows: Sequence[dict]) -> str:
  """One line per kind and step size."""
  lines = [f"{'anchor':<12} {'limit':>8} {'αβλ':>8}  {'growth of δ per cycle':>22} {'formula':>9}"]
  for r in rows:
    verdict = "stable" if r["stable"] else "divergent"
    lines.append(f"{r['kind']:<12} {r['limit']:>8.4f} {r['times']:>7.2f}×  {r['growth']:>22.4f} {r['formula']:>9.4f}  {verdict}")
  return "\n".join(lines)


def lag_table(rows: Sequence[dict]) -> str:
  """One line per kind and αβλ."""
  lines = [f"{'anchor':<12} {'αβλ':>6} {'simulated':>11} {'formula':>11}"]
  lines += [f"{r['kind']:<12} {r['x']:>6.2f} {r['simulated']:>11.5g} {r['formula']:>11.5g}" for r in rows]
  return "\n".join(lines)


def distance_table(rows: Sequence[dict]) -> str:
  """One line per metric and kind."""
  lines = [f"{'metric':<7} {'λ':>10} {'αβλ':>10} {'anchor':<12} {'limit':>8} {'αβλ/limit':>10} {'largest α':>10}"]
  for r in rows:
    lines.append(
      f"{r['metric']:<7} {r['eigenvalue']:>10.4g} {r['x']:>10.3g} {r['kind']:<12} {r['limit']:>8.4f} {r['fraction']:>10.2g} "
      f"{r['largest_learning_rate']:>10.3g}"
    )
  return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
  """Reads the flags and runs."""
  try:
    if len(argv) > 1:
      raise ValueError(f"{argv[1]!r} is not a flag: write --name=value.")
    run(flags.read(Config))
  except (ValueError, OSError) as error:
    report.fail(error)


if __name__ == "__main__":
  flags.define(Config)
  app.run(main)
