"""Measured KL estimators: the closed-form moments against brute force, the promises of the table, and the command."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from experiments import kl_measure, kl_sources
from experiments.kl_estimators import Settings, run
from tests.kl_enumeration import all_positions, forward_kl, mass_gradient, reverse_kl

MODEL = str(pathlib.Path(__file__).parent / "data" / "tiny_llama")
VOCAB = 11
EXACT_BY_HAND = {"reverse": reverse_kl, "forward": forward_kl}


def command(*arguments):
  return subprocess.run([sys.executable, "-m", "experiments.kl_estimators", *arguments], capture_output=True, text=True, timeout=300)


def names_of(direction):
  return tuple(name for name in kl_measure.ALL if kl_measure.direction_of(name) == direction)


@pytest.fixture(scope="module")
def logits():
  rng = np.random.default_rng(3)
  policy = 2.0 * rng.normal(size=(2, VOCAB))
  return policy, policy + 0.7 * rng.normal(size=policy.shape)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
  """The command on small synthetic logits: the prefix of its files, what it printed, and its JSON."""
  prefix = tmp_path_factory.mktemp("synthetic") / "out"
  done = command(f"--out={prefix}", "--vocab_size=64", "--seeds=5", "--topk=4", "--distances=0.05", "--curve_distances=0.2")
  assert done.returncode == 0, done.stderr
  return prefix, done, json.loads(prefix.with_name("out.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("direction, topk", [("reverse", 3), ("forward", 3), ("reverse", 0), ("forward", VOCAB)])
def test_moments_equal_brute_force_over_every_token(logits, direction, topk, x64):
  names = tuple(name for name in names_of(direction) if topk == 3 or name.startswith(("topk", "published", "truncated")))
  ids = [np.argsort(-row)[:topk] for row in logits[0 if direction == "reverse" else 1]]

  @jax.jit
  def enumerate_tokens(policy, anchor, ids):
    def values(policy):
      pos = all_positions(policy, anchor, ids)
      return jnp.stack([sum(kl_measure.ALL[name](pos, pos, pos.in_topk)[:2]) for name in names])

    return values(policy), jax.jacrev(values)(policy)  # [names, V] and [names, V, V]

  measured = kl_measure.measure_positions(*map(jnp.asarray, logits), names=names, topk=topk)
  for n, (policy, anchor) in enumerate(zip(*logits)):
    values, gradients = map(np.asarray, enumerate_tokens(policy, anchor, ids[n]))
    pi = np.exp(policy) / np.exp(policy).sum()
    exact, exact_gradient = EXACT_BY_HAND[direction](policy, anchor)
    for i, name in enumerate(names):
      got = kl_measure.Measured(*(float(x[n]) for x in measured[name]))
      mean, mean_gradient = pi @ values[i], pi @ gradients[i]
      spread = np.sqrt(pi @ np.sum(np.square(gradients[i] - mean_gradient), axis=1))
      wanted = {
        "kl": exact,
        "kl_gradient": np.linalg.norm(exact_gradient),
        "value_bias": mean - exact,
        "value_std": np.sqrt(pi @ np.square(values[i] - mean)),
        "gradient_bias": np.linalg.norm(mean_gradient - exact_gradient),
        "gradient_std": spread,
        "smallest": values[i].min(),
        "clamped": 0.0,
        "log_tail": np.log(np.sum(np.delete(pi, ids[n]))) if topk < VOCAB else -np.inf,
      }
      for key, value in wanted.items():
        # Square roots of rounding: an exact estimator has a deviation of 1e-9 or so.
        atol = 1e-7 if key.endswith("std") and value < 1e-7 else 1e-13
        np.testing.assert_allclose(getattr(got, key), value, rtol=1e-9, atol=atol, err_msg=f"{name}, {key}")


def test_an_estimator_whose_head_weights_depend_on_the_token_is_refused(logits, monkeypatch):
  monkeypatch.setitem(
    kl_measure.ALL,
    "topk_reverse",
    lambda stats, batch, in_topk: (stats.logp_topk.sum() * batch.ref_logp, jnp.zeros_like(stats.logp), in_topk),
  )
  with pytest.raises(ValueError, match="vmap"):
    jax.eval_shape(lambda a, b: kl_measure.measure_positions(a, b, names=("topk_reverse",), topk=3), *logits)


def test_published_bias_is_the_gradient_of_the_head_mass(logits, x64):
  for direction, row in (("reverse", 0), ("forward", 1)):
    name = f"published_topk_{direction}"
    measured = kl_measure.measure_positions(*map(jnp.asarray, logits), names=names_of(direction), topk=3)[name]
    for n in range(2):
      wanted = np.linalg.norm(mass_gradient(logits[0][n], np.argsort(-logits[row][n])[:3]))
      np.testing.assert_allclose(measured.gradient_bias[n], wanted, rtol=1e-9)


def test_promises_of_the_table(synthetic):
  _, _, content = synthetic
  assert [(case["source"], case["distance"], case["table"]) for case in content["cases"]] == [
    (kind, x, x == 0.05) for kind in ("normal × 2", "Gumbel × 2") for x in (0.05, 0.2)
  ]
  for case in content["cases"]:
    rows = {(row["estimator"], row["topk"]): row for row in case["rows"]}
    assert {name for name, _ in rows} == set(kl_measure.ALL)
    assert {topk for name, topk in rows if name.startswith("topk")} == {4}
    unbiased = [row for (name, _), row in rows.items() if name in kl_measure.UNBIASED]
    assert len(unbiased) == 10
    assert max(row["gradient_bias_worst"] for row in unbiased) < 1e-9
    biased_value = {name for (name, _), row in rows.items() if row["value_bias"] > 1e-9}
    assert biased_value == {"k2", "truncated_reverse", "truncated_forward"}
    assert rows["k1", None]["gradient_bias"] == pytest.approx(1)
    assert rows["k3", None]["gradient_bias"] > 1e-3
    for direction in kl_measure.DIRECTIONS:
      chain, published, score = (rows[f"{form}topk_{direction}", 4] for form in ("", "published_", "score_"))
      assert published["gradient_bias"] > 0.1
      assert chain["smallest"] > 0 > published["smallest"]
      assert published["value_std"] == pytest.approx(score["value_std"], rel=1e-5)
      assert published["gradient_std"] == pytest.approx(score["gradient_std"], rel=1e-5)
      if case["distance"] == 0.05:
        assert chain["value_std"] < published["value_std"] / 5
      assert rows[f"exact_{direction}", None]["value_std"] < 1e-9
      assert (chain["stored"], published["stored"], rows[f"exact_{direction}", None]["stored"]) == (10, 9, 64)


def test_the_command_writes_table_figure_and_settings(synthetic):
  prefix, done, content = synthetic
  table = prefix.with_name("out.md").read_text(encoding="utf-8")
  assert "normal × 2, distance 0.05" in table
  assert "distance 0.2\n" not in table, "curve_distances are not tabulated"
  lines = [line for line in table.splitlines() if line.startswith("| published_topk_forward | 4 |")]
  assert len(lines) == 2
  row = next(row for row in content["cases"][0]["rows"] if (row["estimator"], row["topk"]) == ("published_topk_forward", 4))
  assert [float(x) for x in lines[0].split("|")[5:10]] == pytest.approx(
    [row[key] for key in ("value_bias", "value_std", "gradient_bias", "gradient_std", "smallest")], rel=0.06
  )
  wanted = Settings(out=str(prefix), vocab_size=64, seeds=5, topk=(4,), distances=(0.05,), curve_distances=(0.2,))
  assert content["settings"] == json.loads(json.dumps(dataclasses.asdict(wanted)))
  assert imread(prefix.with_name("out.png")).std() > 0.01
  assert "distances=[0.05]" in done.stdout and "largest gradient bias" in done.stdout


def test_a_model_on_a_text(tmp_path, capsys):
  (tmp_path / "text.txt").write_text("One and one are two. Two and two are four. Four and four are eight.")
  settings = Settings(
    out=f"{tmp_path}/",
    model_path=MODEL,
    text=str(tmp_path / "text.txt"),
    positions=5,
    topk=(4,),
    perturbation=(0.01,),
    curve_distances=(0.03,),
  )
  near, far = run(settings)
  assert (near.source, near.distance, far.distance) == ("tiny_llama", 0.01, 0.03)
  kls = [next(row.kl for row in case.rows if row.estimator == "exact_reverse") for case in (near, far)]
  assert 2 < kls[1] / kls[0] < 20, "at a small distance the KL grows with its square"
  for case in (near, far):
    assert max(row.gradient_bias_worst for row in case.rows if row.estimator in kl_measure.UNBIASED) < 1e-9
  floors = json.loads((tmp_path / "kl_estimators.json").read_text(encoding="utf-8"))["noise_floor"]
  assert 0 <= floors["float32"]["mean"] < 1e-9 and floors["float32"]["largest"] < kls[0]
  assert (tmp_path / "kl_estimators.png").exists() and "bfloat16 body" in (tmp_path / "kl_estimators.md").read_text(encoding="utf-8")
  assert "5 positions" in capsys.readouterr().out


def test_the_anchor_lies_between_the_two_checkpoints():
  source = kl_sources.load(MODEL, "", "One and one are two.", 4, seed=0)
  np.testing.assert_array_equal(kl_sources.anchor_logits(source, 0.0), kl_sources.policy_logits(source))
  other = dataclasses.replace(source, params=source.other)
  np.testing.assert_allclose(kl_sources.anchor_logits(source, 1.0), kl_sources.policy_logits(other), rtol=1e-4, atol=1e-4)
  for mine, theirs in zip(jax.tree.leaves(source.params), jax.tree.leaves(source.other)):
    size = np.sqrt(np.mean(np.square(mine)))
    # The root mean square of n normal draws is within 5/√(2n) of 1 (five standard errors).
    assert np.sqrt(np.mean(np.square(theirs - mine))) == pytest.approx(size, rel=5 / np.sqrt(2 * mine.size))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"topk": (8, 8)}, "--topk"),
    ({"topk": (-1,)}, "--topk"),
    ({"topk": (2000,)}, "use at most 1500"),
    ({"distances": (0.0,)}, "above 0"),
    ({"distances": (float("nan"),)}, "finite"),
    ({"seeds": 0}, "--seeds=0 must be at least 1"),
    ({"perturbation": (0.1,)}, "--perturbation is for the logits of a model"),
    ({"text": "x.txt"}, "--text is for the logits of a model"),
    ({"model_path": MODEL, "seeds": 3}, "--seeds is for synthetic logits"),
    ({"model_path": MODEL, "distances": (0.1,)}, "here it is --perturbation"),
    ({"model_path": MODEL, "ref_model_path": MODEL, "perturbation": (0.1,)}, "does not go with --ref_model_path"),
  ],
)
def test_contradictory_settings_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Settings(**changes)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model_path": "no/such/folder"}, "is not a folder"),
    ({"model_path": MODEL, "ref_model_path": MODEL.replace("llama", "qwen2")}, "is not another checkpoint"),
    ({"model_path": MODEL, "ref_model_path": MODEL, "topk": (4,), "positions": 4}, "no KL to measure"),
    ({"model_path": MODEL, "positions": 5000}, "--positions=5000"),
    ({"model_path": MODEL, "topk": (65,), "positions": 4}, "has 64 tokens"),
  ],
)
def test_an_unusable_model_or_text_is_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    run(Settings(out=str(tmp_path / "out"), **changes))


def test_the_command_reports_a_bad_flag_in_one_line(tmp_path):
  done = command(f"--out={tmp_path}/x", "--topk=8,many")
  assert done.returncode == 1
  assert "error: --topk=8,many must be numbers" in done.stderr and "Traceback" not in done.stderr
