"""Anchor stability: each limit from both sides, the lag, Fisher products against the matrix, power iteration against numpy."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from emapg_jax.models import decoder
from experiments import anchor_stability, fisher
from experiments.anchor_stability import KINDS, Config

# Two RL steps of three updates: N = 6, so an anchor that counts the wrong steps is found out.
CONFIG = Config(learning_rate=0.1, kl_coef=0.5, ema_decay=0.7, ema_period=2, mini_batches=3)
TINY = decoder.DecoderConfig(
  vocab_size=7,
  hidden_size=4,
  intermediate_size=6,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=2,
  max_positions=16,
  remat="none",
)


def model(params, tokens):
  return decoder.apply(TINY, params, tokens), decoder.unembedding(params)


@pytest.fixture(scope="module")
def tiny():
  """Weights, tokens [2, 1, 5] and the Fisher matrix by its definition, from the Jacobian of the logits."""
  params = jax.jit(decoder.init_params, static_argnums=0)(TINY, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 1, 5), 0, TINY.vocab_size)
  flat, unravel = ravel_pytree(params)

  def logits(flat):
    hidden, unembedding = model(unravel(flat), tokens[:, 0])
    z = (hidden @ unembedding).reshape(-1, TINY.vocab_size)
    return z, jax.nn.softmax(z)

  jacobian, probs = (np.asarray(x, np.float64) for x in jax.jit(jax.jacrev(logits, has_aux=True))(flat))
  curvature = np.stack([np.diag(p) - np.outer(p, p) for p in probs])
  return params, tokens, np.einsum("tvp,tvw,twq->pq", jacobian, curvature, jacobian) / len(probs), unravel


def moments_like(params):
  """Second moments that span four orders of magnitude."""
  return jax.tree.map(lambda p: 10.0 ** jax.random.uniform(jax.random.key(2), p.shape, minval=-8.0, maxval=-4.0), params)


def diagonal(values):
  return lambda v: jax.tree.map(jnp.multiply, values, v)


@pytest.mark.parametrize("kind", KINDS)
def test_stable_below_and_divergent_above_each_limit(kind):
  below, above = (row for row in anchor_stability.check_limits(CONFIG) if row["kind"] == kind)
  assert below["growth"] < 1.0 < above["growth"] and below["stable"] and not above["stable"]
  assert below["delta"] < 0.1 and above["delta"] > 10.0
  for row in (below, above):
    np.testing.assert_allclose(row["growth"], row["formula"], rtol=1e-3)


def test_limits_by_hand():
  # 2, 1 + 0.7, 1 + 1/0.7, 1 + 0.7^(−1/6).
  limits = {row["kind"]: row["limit"] for row in anchor_stability.check_limits(CONFIG)}
  np.testing.assert_allclose([limits[kind] for kind in KINDS], [2.0, 1.7, 2.428571, 2.061248], rtol=1e-6)


def test_curves_cross_one_at_the_limits():
  for kind, (x, growth) in anchor_stability.growth_curves(CONFIG).items():
    limit = CONFIG.limit(kind)
    np.testing.assert_allclose(np.interp(limit, x, growth), 1.0, atol=1e-3)
    assert all((g < 1.0) == (at < limit) for at, g in zip(x, growth))


def test_copying_after_every_step_has_no_limit():
  config = dataclasses.replace(CONFIG, ema_decay=0.0)
  assert {row["kind"] for row in anchor_stability.check_limits(config)} == {"fixed", "pre_update"}
  deltas = anchor_stability.simulate("post_update", config, jnp.array([1e4]), 5)
  np.testing.assert_array_equal(deltas, np.zeros((5, 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ema_decay", [0.7, 1.0])
def test_lag_of_the_simulation_is_that_of_the_formula(kind, ema_decay):
  rows = [row for row in anchor_stability.check_lag(dataclasses.replace(CONFIG, ema_decay=ema_decay)) if row["kind"] == kind]
  assert len(rows) == 4
  for row in rows:
    np.testing.assert_allclose(row["simulated"], row["formula"], rtol=1e-3)


def test_lag_formula_by_hand():
  # η·αg/(1 − η + η·αβλ) = 0.9·2/(0.1 + 0.9·0.5) = 1.8/0.55; two steps between updates: 0.9·2·(1 + 0.5)/(1 − 0.9·0.25).
  np.testing.assert_allclose(anchor_stability.steady_lag("post_update", 0.5, 0.9, 1, 2.0), 1.8 / 0.55)
  np.testing.assert_allclose(anchor_stability.steady_lag("periodic", 0.5, 0.9, 1, 2.0), 1.8 / 0.55)
  np.testing.assert_allclose(anchor_stability.steady_lag("periodic", 0.5, 0.9, 2, 2.0), 2.7 / 0.775)


@pytest.mark.parametrize("chunk", [(), (2,)])
def test_fisher_vector_product_against_the_matrix(tiny, chunk):
  params, tokens, matrix, unravel = tiny
  vector = np.asarray(jax.random.normal(jax.random.key(3), (matrix.shape[0],)))
  got = ravel_pytree(fisher.fisher_vector_product(model, params, tokens, unravel(vector), *chunk))[0]
  want = matrix @ vector
  # float32 against float64.
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("adam", [False, True])
def test_power_iteration_finds_the_top_eigenvalue(tiny, adam):
  params, tokens, matrix, _ = tiny
  product = functools.partial(fisher.fisher_vector_product, model, params, tokens)
  if adam:
    moments = moments_like(params)
    scale = (np.sqrt(np.asarray(ravel_pytree(moments)[0], np.float64)) + 1e-3) ** -0.5
    matrix, product = scale[:, None] * matrix * scale[None, :], fisher.preconditioned(product, moments, 1e-3)
  found = fisher.power_iteration(product, fisher.random_like(params, jax.random.key(4)), 200, 1e-3)
  assert found.residuals[-1] < 1e-3 and len(found.quotients) < 200
  # The quotient's error is of the order of the residual squared.
  np.testing.assert_allclose(found.quotients[-1], np.linalg.eigvalsh(matrix)[-1], rtol=1e-4)


def test_residual_and_quotient_by_hand():
  # A = diag(3, 1), v = (0.6, 0.8): λ = 3·0.36 + 0.64 = 1.72; Av − λv = (0.768, −0.576), of norm 0.96.
  start = {"a": jnp.array([0.6, 0.8])}
  seen = []
  found = fisher.power_iteration(diagonal({"a": jnp.array([3.0, 1.0])}), start, 2, watch=lambda *x: seen.append(x))
  np.testing.assert_allclose((found.quotients[0], found.residuals[0]), (1.72, 0.96 / 1.72), rtol=1e-5)
  assert [x[0] for x in seen] == [1, 2] and seen[1][1] == found.quotients[1] > found.quotients[0]


def test_a_matrix_of_zeros_is_refused():
  with pytest.raises(ValueError, match="Rayleigh quotient is 0"):
    fisher.power_iteration(diagonal({"a": jnp.zeros(2)}), {"a": jnp.array([0.6, 0.8])}, 2)


def test_second_moments_tend_to_the_diagonal_of_the_fisher_matrix(tiny):
  """The scores of n positions are independent with mean 0, whatever the signs of the rows: E[gradient²] is diag(F)/n.

  1,000 draws; the bound is 8 standard errors of the mean of a squared normal.
  """
  params, tokens, matrix, _ = tiny
  draws = 1000
  batches = np.broadcast_to(np.asarray(tokens[:, 0]), (draws, 2, 5))
  seen = []
  moments = np.asarray(ravel_pytree(fisher.second_moments(model, params, batches, jax.random.key(5), seen.append))[0])
  assert seen == list(range(1, draws + 1))
  np.testing.assert_allclose(10 * moments, np.diag(matrix), rtol=8 * (2 / draws) ** 0.5, atol=1e-6)


def test_distance_is_a_fraction_of_each_limit():
  rows = anchor_stability.distances(CONFIG, {"plain": 8.0})
  # αβλ = 0.1·0.5·8 = 0.4; of the fixed anchor's 2 that is 0.2, and α = 2/(0.5·8) would reach it.
  assert [row["kind"] for row in rows] == list(KINDS)
  np.testing.assert_allclose([rows[0][key] for key in ("x", "fraction", "largest_learning_rate")], [0.4, 0.2, 0.5])
  np.testing.assert_allclose(rows[1]["fraction"], 0.4 / 1.7)


def test_run_writes_its_files(tmp_path, capsys):
  result = anchor_stability.run(dataclasses.replace(CONFIG, ema_decay=0.0, out=str(tmp_path / "new" / "a")))
  written = json.loads((tmp_path / "new" / "a.json").read_text())
  assert written["limits"] == json.loads(json.dumps(result["limits"])) and "model" not in written
  assert (tmp_path / "new" / "a.png").stat().st_size > 10_000
  shown = capsys.readouterr().out
  assert shown.count("divergent") == 2 and shown.count("no limit") == 2


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ({"learning_rate": 0.0}, "--learning_rate is 0"),
    ({"kl_coef": float("nan")}, "--kl_coef is nan"),
    ({"ema_decay": 1.5}, "--ema_decay is 1.5"),
    ({"mini_batches": 0}, "--mini_batches is 0"),
    ({"text": "story.txt"}, "no --model_path"),
  ],
)
def test_bad_settings_are_named(change, says):
  with pytest.raises(ValueError, match=says):
    Config(**change)


def test_flags_reach_the_config():
  command = [sys.executable, "-m", "experiments.anchor_stability", "--ema_decay=2"]
  out = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert out.returncode == 1 and out.stderr.startswith("error: --ema_decay is 2"), out.stderr
