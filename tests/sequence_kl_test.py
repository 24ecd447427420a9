"""Sequence KL by enumeration: what is unbiased, what is not, and why the token level keeps own positions only."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import kl
from experiments import sequence_kl
from experiments.sequence_kl import FORMS, Config

VOCAB, LENGTH, TOPK = 3, 3, 1
COUNT = 15  # responses of V=3, L=3: EOS; 2 bodies and EOS; 4 bodies and any of 3 tokens
RIGHT = [form for form in FORMS if form[0] in ("reward", "token + reward") and form[1] not in ("k2", "k5")]
RIGHT += [("sequence", name) for name in ("k2", "k3pp", "k4")]
WRONG = [form for form in FORMS if form[0] == "reward, own v"]
OWN_POSITION = [("token", name) for name in ("k2", "k3pp", "k4", "exact", "topk")]


def policies(seed=0, distance=0.3):
  params = sequence_kl.init_policy(VOCAB, seed)
  return params, sequence_kl.perturb(params, distance, seed)


@pytest.fixture(scope="module")
def measured():
  with jax.enable_x64(True):
    result = sequence_kl.measure(*policies(), sequence_kl.enumerate_responses(VOCAB, LENGTH), TOPK)
    return dict(zip(FORMS, np.asarray(result.bias)))


def test_every_response_is_there_once(x64):
  responses = sequence_kl.enumerate_responses(VOCAB, LENGTH)
  rows = {tuple(t[m].tolist()) for t, m in zip(np.asarray(responses.tokens), np.asarray(responses.mask))}
  assert len(rows) == responses.tokens.shape[0] == COUNT
  logp = sequence_kl.response_logp(policies()[0], responses)
  np.testing.assert_allclose(jnp.exp(logp).sum(), 1.0, rtol=1e-12)


def test_the_target_is_the_gradient_of_the_exact_kl(x64):
  params, anchor = policies()
  responses = sequence_kl.enumerate_responses(VOCAB, LENGTH)
  slope = jax.jit(jax.grad(sequence_kl.sequence_kl))(params, anchor, responses)["bias"][1]
  step = 1e-6

  def at(change):
    return sequence_kl.sequence_kl(params | {"bias": params["bias"].at[1].add(change)}, anchor, responses)

  np.testing.assert_allclose(slope, (at(step) - at(-step)) / (2 * step), rtol=1e-7)


@pytest.mark.parametrize("form", RIGHT, ids=str)
def test_right_forms_are_unbiased(measured, form):
  assert measured[form] < 1e-9


@pytest.mark.parametrize("form", WRONG, ids=str)
def test_v_at_the_own_position_loses_the_gradient(measured, form):
  assert 0.5 < measured[form] < 2.0


@pytest.mark.parametrize("form", [("token", "k3"), ("sequence", "k3"), ("reward", "k2"), ("reward", "k5"), *OWN_POSITION], ids=str)
def test_other_forms_are_biased(measured, form):
  assert measured[form] > 0.01


def test_k1_as_a_loss_has_no_gradient(measured):
  np.testing.assert_allclose(measured["token", "k1"], 1.0, rtol=1e-9)


def test_token_level_is_the_gradient_at_fixed_prefixes(x64):
  """E[Σ_t ∇KL_t(prefix)], with the distribution of prefixes held, for every estimator with the reverse gradient."""
  params, anchor = policies()
  responses = sequence_kl.enumerate_responses(VOCAB, LENGTH)
  probs = jnp.exp(sequence_kl.response_logp(params, responses))

  def at_fixed_prefixes(params):
    per_token = kl.exact_reverse_kl(*(sequence_kl.policy_logits(p, responses.tokens) for p in (params, anchor)))
    return jnp.sum(probs[:, None] * jnp.where(responses.mask, per_token, 0.0))

  def expected(params):
    losses = sequence_kl.response_losses(params, anchor, responses, TOPK)
    return jnp.stack([jnp.sum(probs * losses[form]) for form in OWN_POSITION])

  want = jax.jit(jax.grad(at_fixed_prefixes))(params)
  for name, got in jax.jit(jax.jacrev(expected))(params).items():
    for row in got:
      np.testing.assert_allclose(row, want[name], rtol=1e-9, atol=1e-12)


def test_at_length_one_the_token_level_is_the_sequence_level(x64):
  responses = sequence_kl.pad(sequence_kl.enumerate_responses(VOCAB, 1), COUNT, LENGTH)
  result = sequence_kl.measure(*policies(), responses, TOPK)
  bias = dict(zip(FORMS, result.bias))
  assert max(bias[form] for form in OWN_POSITION) < 1e-9
  assert result.mean_length == 1.0


def test_deviation_is_that_of_one_response(x64):
  """Of one form by hand, from the gradient of one response after the other; measured in a padded array, which changes nothing."""
  params, anchor = policies()
  responses = sequence_kl.enumerate_responses(VOCAB, LENGTH - 1)
  measured = sequence_kl.measure(params, anchor, sequence_kl.pad(responses, COUNT, LENGTH), TOPK)
  probs = np.exp(np.asarray(sequence_kl.response_logp(params, responses)))
  rows = jax.jit(jax.jacrev(lambda p: sequence_kl.response_losses(p, anchor, responses, TOPK)["reward", "k3"]))(params)
  gradients = np.concatenate([np.asarray(x).reshape(len(probs), -1) for x in jax.tree.leaves(rows)], axis=-1)
  mean = probs @ gradients
  variance = probs @ np.sum((gradients - mean) ** 2, axis=-1)
  deviation = np.asarray(measured.deviation)[FORMS.index(("reward", "k3"))]
  np.testing.assert_allclose(deviation, np.sqrt(variance) / np.linalg.norm(mean), rtol=1e-9)
  np.testing.assert_allclose(measured.mean_length, probs @ np.asarray(responses.mask).sum(axis=-1), rtol=1e-12)


def test_run_writes_its_files(tmp_path, capsys):
  config = Config(vocab=VOCAB, max_length=LENGTH, topk=TOPK, seeds=1, out=str(tmp_path / "new" / "kl"))
  result = sequence_kl.run(config)
  assert json.loads((tmp_path / "new" / "kl.json").read_text()) == json.loads(json.dumps(result))
  table = (tmp_path / "new" / "kl.md").read_text()
  assert all(f"| {group} | {name} |" in table for group, name in FORMS) and table in capsys.readouterr().out
  assert (tmp_path / "new" / "kl.png").stat().st_size > 10_000
  assert [row["at"] for row in result["by_length"]] == [1, 2, 3]


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ({"vocab": 1}, "--vocab"),
    ({"max_length": 0}, "--max_length"),
    ({"vocab": 8, "max_length": 8}, "responses to enumerate"),
    ({"distance": 0.0}, "--distance"),
    ({"topk": 5}, "--topk"),
    ({"seeds": 0}, "--seeds"),
  ],
)
def test_bad_settings_are_named(change, says):
  with pytest.raises(ValueError, match=says):
    Config(**change)


def test_flags_reach_the_config():
  out = subprocess.run([sys.executable, "-m", "experiments.sequence_kl", "--vocab=1"], capture_output=True, text=True, timeout=120)
  assert out.returncode == 1 and out.stderr.startswith("error: --vocab is 1"), out.stderr
