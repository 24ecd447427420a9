"""Token-level KL, sequence-level KL and KL in the reward against the exact gradient of the sequence KL, by enumeration.

  python -m experiments.sequence_kl [--out=PREFIX]

A tiny recurrent softmax policy writes responses of up to L tokens that end with an end-of-sequence token. Every response is enumerated in
float64, so expectation and variance of a gradient are exact sums. The loss of a response is the sum over its tokens; one response is one
sample. With u_t = log π(y_t) − log ρ(y_t) and v_t the value of an estimator at position t, the gradient estimates are those of

  token           Σ_t estimator_t                                  the own position only
  sequence        estimator(log π(y), log ρ(y))                    one log-ratio for the whole response
  reward          Σ_t sg(u_t + Σ_{j>t} v_j)·log π(y_t)             KL in the reward, reward-to-go, in its right form
  reward, own v   Σ_t sg(Σ_{j≥t} v_j)·log π(y_t)                   the wrong form
  token + reward  Σ_t estimator_t + sg(Σ_{j>t} v_j)·log π(y_t)     the own position in the loss, later ones in the reward

Writes PREFIX.md, PREFIX.json and PREFIX.png.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from flax import struct
from jax import lax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

from emapg_jax import kl
from emapg_jax.token_stats import stats_from_logits
from experiments import flags, report

Array = jax.Array
Form = tuple[str, str]  # (group, estimator)

EOS = 0
HIDDEN = 4
FORMS: tuple[Form, ...] = (
  *(("token", name) for name in ("k1", "k2", "k3", "k3pp", "k4", "exact", "topk", "published_topk")),
  *(("sequence", name) for name in ("k2", "k3", "k3pp", "k4")),
  *(("reward", name) for name in ("k1", "k3", "exact", "topk", "k2", "k5")),  # k3pp has the value of k3
  *(("reward, own v", name) for name in ("k3", "exact", "topk")),
  *(("token + reward", name) for name in ("k3pp", "k4", "exact", "topk")),
)
DISTANCES = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the experiment."""

  vocab: int = flags.field(4, "tokens of the vocabulary, the end of the sequence included")
  max_length: int = flags.field(6, "longest response, in tokens")
  distance: float = flags.field(0.3, "standard deviation of anchor minus policy, per weight")
  topk: int = flags.field(2, "K of the top-k estimators; the policy's own top-k")
  seeds: int = flags.field(5, "random policies to average over")
  out: str = flags.field("runs/sequence_kl", "prefix of the .md, .json and .png that are written")

  def __post_init__(self):
    if self.vocab < 2:
      raise ValueError(f"--vocab is {self.vocab}; the end-of-sequence token and at least one other are needed. Pass 2 or more.")
    if self.max_length < 1:
      raise ValueError(f"--max_length is {self.max_length}; a response has at least one token. Pass 1 or more.")
    count = (self.vocab - 1) ** (self.max_length - 1) * self.vocab
    if count > 20_000:
      raise ValueError(
        f"--vocab={self.vocab} and --max_length={self.max_length} make more than {count:,} responses to enumerate, and 20,000 is as many "
        "as fit in memory with a gradient each. Lower one of them."
      )
    if not self.distance > 0:
      raise ValueError(f"--distance is {self.distance}; at the anchor itself the KL has no gradient to compare with. Pass more than 0.")
    if not 0 <= self.topk <= self.vocab:
      raise ValueError(f"--topk is {self.topk}; it counts ids of a vocabulary of {self.vocab}. Pass a number between the two.")
    if self.seeds < 1:
      raise ValueError(f"--seeds is {self.seeds}; at least one policy is needed. Pass 1 or more.")


@struct.dataclass
class Responses:
  """Every response of at most L tokens: tokens int32 [S, L], padded behind the end, and which of them are real, bool [S, L]."""

  tokens: Array
  mask: Array


@struct.dataclass
class Measurement:
  """Of each form [F], relative to ‖∇KL‖: the bias of its gradient and the standard deviation of one response's; and the target itself."""

  bias: Array
  deviation: Array
  kl: Array
  gradient_norm: Array
  mean_length: Array


def enumerate_responses(vocab: int, max_length: int) -> Responses:
  """All responses that end with EOS at or before `max_length`, and those cut there."""
  rows = []
  for n in range(1, max_length + 1):
    last = range(vocab) if n == max_length else (EOS,)
    rows += [(*body, end) for body in itertools.product(range(1, vocab), repeat=n - 1) for end in last]
  tokens = [row + (EOS,) * (max_length - len(row)) for row in rows]
  mask = [[t < len(row) for t in range(max_length)] for row in rows]
  return Responses(tokens=jnp.asarray(tokens, jnp.int32), mask=jnp.asarray(mask))


def pad(responses: Responses, rows: int, columns: int) -> Responses:
  """The same responses in a larger array, so that every length shares one compilation; added rows have no real token."""
  widths = [(0, rows - responses.mask.shape[0]), (0, columns - responses.mask.shape[1])]
  return jax.tree.map(lambda x: jnp.pad(x, widths), responses)


def init_policy(vocab: int, seed: int) -> dict[str, Array]:
  """Weights of a random recurrent policy, float64; the end of the sequence is less likely than other tokens."""
  rng = np.random.default_rng(seed)
  params = {
    "embedding": rng.normal(size=(vocab, HIDDEN)),
    "recurrent": rng.normal(size=(HIDDEN, HIDDEN)) / HIDDEN**0.5,
    "unembedding": rng.normal(size=(HIDDEN, vocab)),
    "bias": np.where(np.arange(vocab) == EOS, -1.0, 0.0),
  }
  return jax.tree.map(jnp.asarray, params)


def perturb(params: dict[str, Array], distance: float, seed: int) -> dict[str, Array]:
  """params + distance · normal: the anchor."""
  rng = np.random.default_rng([seed, 1])
  return jax.tree.map(lambda p: p + distance * rng.normal(size=p.shape), params)


def policy_logits(params: dict[str, Array], tokens: Array) -> Array:
  """Logits [S, L, V] of each position of `tokens` [S, L], given the tokens before it."""

  def step(state, token):
    logits = state @ params["unembedding"] + params["bias"][None, :]
    return jnp.tanh(params["embedding"][token] + state @ params["recurrent"]), logits

  start = jnp.zeros((tokens.shape[0], HIDDEN), params["bias"].dtype)
  return jnp.swapaxes(lax.scan(step, start, tokens.T)[1], 0, 1)


def token_estimators(logits: Array, ref_logits: Array, tokens: Array, topk: int) -> tuple[dict[str, Array], Array, Array]:
  """Every estimator at every position, [S, L] each and with its gradient; and logp, ref_logp [S, L]."""
  stats = stats_from_logits(logits, tokens, topk=topk)
  ref = stats_from_logits(ref_logits, tokens, stats.topk_ids)
  in_topk = (stats.topk_ids == tokens[..., None]).any(axis=-1)
  pair = stats.logp, ref.logp
  head, tail = kl.topk_reverse_kl(stats.logp_topk, ref.logp_topk, stats.log_tail, ref.log_tail, *pair, in_topk, max_log_ratio=None)
  published = kl.published_topk_reverse_kl(stats.logp_topk, ref.logp_topk, *pair, in_topk, max_log_ratio=None)
  estimators = {
    "k1": kl.k1(*pair),
    "k2": kl.k2(*pair),
    "k3": kl.k3(*pair, max_log_ratio=None),
    "k3pp": kl.k3pp(*pair, max_log_ratio=None),
    "k4": kl.k4(*pair),
    "k5": kl.k5(*pair, max_log_ratio=None),
    "exact": kl.exact_reverse_kl(logits, ref_logits),
    "topk": head + tail,
    "published_topk": published[0] + published[1],
  }
  return estimators, stats.logp, ref.logp


def after(x: Array) -> Array:
  """Σ_{j>t} x_j along the last axis."""
  return jnp.cumsum(x[:, ::-1], axis=-1)[:, ::-1] - x


def response_losses(params: dict[str, Array], anchor: dict[str, Array], responses: Responses, topk: int) -> dict[Form, Array]:
  """The loss [S] of each response under every form; its gradient wrt `params` is what the form estimates ∇KL(π‖ρ) with."""
  mask, tokens = responses.mask, responses.tokens
  terms, logp, ref_logp = token_estimators(policy_logits(params, tokens), policy_logits(anchor, tokens), tokens, topk)
  terms, logp, ref_logp = jax.tree.map(lambda x: jnp.where(mask, x, 0.0), (terms, logp, ref_logp))
  values = lax.stop_gradient(terms)
  pair = logp.sum(axis=-1), ref_logp.sum(axis=-1)
  sequence = {
    "k2": kl.k2(*pair),
    "k3": kl.k3(*pair, max_log_ratio=None),
    "k3pp": kl.k3pp(*pair, max_log_ratio=None),
    "k4": kl.k4(*pair),
  }

  def loss(group, name):
    if group == "token":
      return terms[name].sum(axis=-1)
    if group == "sequence":
      return sequence[name]
    own = {"reward": values["k1"], "reward, own v": values[name], "token + reward": 0.0}[group]
    credited = jnp.sum((own + after(values[name])) * logp, axis=-1)
    return credited + (terms[name].sum(axis=-1) if group == "token + reward" else 0.0)

  return {form: loss(*form) for form in FORMS}


def sequence_kl(params: dict[str, Array], anchor: dict[str, Array], responses: Responses) -> Array:
  """Σ_y π(y)·(log π(y) − log ρ(y)) over all responses: the exact KL, with its exact gradient."""
  logp, ref_logp = (response_logp(p, responses) for p in (params, anchor))
  return jnp.sum(jnp.exp(logp) * (logp - ref_logp))


def response_logp(params: dict[str, Array], responses: Responses) -> Array:
  """log π(y) [S] of each response."""
  logps = jax.nn.log_softmax(policy_logits(params, responses.tokens))
  taken = jnp.take_along_axis(logps, responses.tokens[..., None], axis=-1)[..., 0]
  return jnp.sum(jnp.where(responses.mask, taken, 0.0), axis=-1)


@functools.partial(jax.jit, static_argnames="topk")
def measure(params: dict[str, Array], anchor: dict[str, Array], responses: Responses, topk: int) -> Measurement:
  """Bias and standard deviation of every form's gradient, by exact sums over the responses."""
  flat, unravel = ravel_pytree(params)

  def losses(flat):
    by_form = response_losses(unravel(flat), anchor, responses, topk)
    return jnp.stack([by_form[form] for form in FORMS])

  exact, target = jax.value_and_grad(lambda flat: sequence_kl(unravel(flat), anchor, responses))(flat)
  probs = jnp.where(responses.mask[:, 0], jnp.exp(response_logp(params, responses)), 0.0)
  gradients = jax.jacfwd(losses)(flat)  # [F, S, P]
  means = jnp.einsum("s,fsp->fp", probs, gradients)
  spread = jnp.einsum("s,fsp->f", probs, jnp.square(gradients - means[:, None, :]))
  size = jnp.linalg.norm(target)
  return Measurement(
    bias=jnp.linalg.norm(means - target[None, :], axis=-1) / size,
    deviation=jnp.sqrt(spread) / size,
    kl=exact,
    gradient_norm=size,
    mean_length=jnp.sum(probs * responses.mask.sum(axis=-1)),
  )


def over_seeds(config: Config, length: int, distance: float) -> Measurement:
  """Root mean square of each number over `config.seeds` random policies, as numpy float64."""
  largest = enumerate_responses(config.vocab, config.max_length).mask.shape
  responses = pad(enumerate_responses(config.vocab, length), *largest)
  runs = []
  for seed in range(config.seeds):
    params = init_policy(config.vocab, seed)
    runs.append(measure(params, perturb(params, distance, seed), responses, config.topk))
  return jax.tree.map(lambda *x: np.sqrt(np.mean(np.square(np.stack(x)), axis=0)), *runs)


def run(config: Config) -> dict:
  """Measures, writes the three files and returns what the JSON holds."""
  began = time.time()
  report.say(
    f"sequence KL by enumeration · vocabulary {config.vocab}, responses of up to {config.max_length} tokens, "
    f"anchor at {config.distance:g}, K={config.topk}, {config.seeds} policies, float64"
  )
  with jax.enable_x64(True):
    by_length = {}
    for length in range(1, config.max_length + 1):
      by_length[length] = over_seeds(config, length, config.distance)
      m = by_length[length]
      report.say(f"length {length}: KL {m.kl:.4f}, mean length {m.mean_length:.2f} ({time.time() - began:.0f} s)")
    by_distance = {distance: over_seeds(config, config.max_length, distance) for distance in DISTANCES}
  result = {"config": dataclasses.asdict(config), "by_length": _rows(by_length), "by_distance": _rows(by_distance)}
  table = markdown(by_length, by_distance)
  pathlib.Path(config.out).parent.mkdir(parents=True, exist_ok=True)
  pathlib.Path(f"{config.out}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
  pathlib.Path(f"{config.out}.md").write_text(table, encoding="utf-8")
  draw(by_length, by_distance, f"{config.out}.png")
  report.say(table)
  report.say(f"done in {time.time() - began:.0f} s: {config.out}.md, {config.out}.json, {config.out}.png")
  return result


def _rows(measurements: dict[float, Measurement]) -> list[dict]:
  return [
    {"at": at, "kl": float(m.kl), "gradient_norm": float(m.gradient_norm), "mean_length": float(m.mean_length)}
    | {
      "forms": [
        {"group": group, "estimator": name, "bias": float(b), "deviation": float(d)}
        for (group, name), b, d in zip(FORMS, m.bias, m.deviation)
      ]
    }
    for at, m in measurements.items()
  ]


def markdown(by_length: dict[int, Measurement], by_distance: dict[float, Measurement]) -> str:
  """Two tables, one row per form: bias at each length and deviation at the longest, and bias of the longest at each distance."""
  longest = max(by_length)
  first = [f"bias, L={n}" for n in by_length] + [f"deviation, L={longest}"]
  second = [f"bias, L={longest}, anchor at {d:g}" for d in by_distance]
  columns = [m.bias for m in by_length.values()] + [by_length[longest].deviation]
  return _table(first, columns) + "\n" + _table(second, [m.bias for m in by_distance.values()])


def _table(head: Sequence[str], columns: Sequence[np.ndarray]) -> str:
  lines = ["| " + " | ".join(["form", "estimator", *head]) + " |", "|" + "---|" * (len(head) + 2)]
  for i, (group, name) in enumerate(FORMS):
    lines.append("| " + " | ".join([group, name, *(_number(column[i]) for column in columns)]) + " |")
  return "\n".join(lines) + "\n"


def _number(x: float) -> str:
  return f"{x:.0e}" if x < 1e-9 else f"{x:.3g}"


def draw(by_length: dict[int, Measurement], by_distance: dict[float, Measurement], png_path: str) -> None:
  """Bias and deviation against the length, and bias against the distance of the anchor, for the forms worth telling apart."""
  shown = {
    ("token", "k3"): ("#8c6d46", "-."),
    ("token", "topk"): ("#e09f3e", "-"),
    ("reward, own v", "k3"): ("#d1495b", "-."),
    ("reward, own v", "topk"): ("#d1495b", "-"),
    ("sequence", "k4"): ("#2e8b57", "-"),
    ("reward", "k1"): ("#1f5fa8", "--"),
    ("reward", "topk"): ("#1f5fa8", "-"),
    ("token + reward", "topk"): ("#6a4c93", ":"),
  }
  figure = Figure(figsize=(13, 4.6), dpi=140, layout="constrained")
  panels = (
    ("Bias of the gradient", "longest response", by_length, "bias"),
    ("Standard deviation, one response", "longest response", by_length, "deviation"),
    ("Bias against the anchor's distance", "distance", by_distance, "bias"),
  )
  for ax, (title, label, measurements, field) in zip(figure.subplots(1, 3), panels):
    for form, (colour, style) in shown.items():
      y = [max(getattr(m, field)[FORMS.index(form)], 1e-17) for m in measurements.values()]
      ax.plot(list(measurements), y, style, color=colour, marker="o", markersize=3.5, label=f"{form[0]}: {form[1]}")
    ax.set_yscale("log")
    ax.set_xscale("log" if measurements is by_distance else "linear")
    ax.set_title(title, fontsize=11, loc="left")
    ax.set_xlabel(label)
    ax.set_ylabel("relative to ‖∇KL‖")
    ax.grid(True, color="#dddddd", linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)
  figure.legend(handles=figure.axes[0].lines, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
  figure.savefig(png_path)


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
