"""Draws against their distribution, their intervals in float64, and truncation against a sort in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax.rollout import draw
from emapg_jax.rollout.draw import Sampling


@functools.cache
def next_tokens(sampling):
  return jax.jit(functools.partial(draw.next_token, sampling=sampling))


def softmax(logits):
  weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return weights / weights.sum()


PLAIN = Sampling()


def drawn(logits, count, sampling=PLAIN, seed=0):
  """`count` draws from one row of logits."""
  keys = jax.random.split(jax.random.key(seed), count)
  return jax.device_get(next_tokens(sampling)(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits))), keys))


def kept(logits, temperature=1.0, top_k=0, top_p=1.0):
  """The probabilities that are left, float64 [V]: the ids of a stable sort, each while the mass before it is below top_p."""
  logits = np.asarray(logits, np.float64) / temperature
  order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
  mass = softmax(logits[order])
  order = order[(np.cumsum(mass) - mass < top_p) & (mass > 0)]
  found = np.zeros(len(logits))
  found[order] = softmax(logits[order])
  return found


def intervals(weights):
  """The width of each weight's interval among those of its row, float64 [N]: what a uniform hits."""
  smaller = np.asarray(draw._smaller(jnp.asarray(weights[None], jnp.float32)))[0].astype(np.float64)
  present = np.flatnonzero(weights > 0)
  order = present[np.argsort(smaller[present], kind="stable")]
  ends = np.append(smaller[order[1:]], np.max(smaller[present] + weights[present]))
  found = np.zeros(len(weights))
  found[order] = (ends - smaller[order]) / ends[-1]
  return found


@pytest.mark.parametrize("peak", [0.0, 25.0])
def test_every_id_has_its_width(peak):
  vocab = 49_152
  logits = np.asarray(3 * jax.random.normal(jax.random.key(0), (vocab,))).copy()
  logits[7] += peak  # then nearly all the mass is one id's, in one block
  logits[[5, 300]] = -np.inf
  weights = np.asarray(jnp.exp(jnp.asarray(logits) - logits.max()))
  size = draw.block_size(vocab)
  blocks = weights.reshape(-1, size)
  width = np.concatenate([w * intervals(block) for w, block in zip(intervals(blocks.sum(1, dtype=np.float32)), blocks)])
  p = softmax(logits)
  rare = p >= 1e-9
  assert rare.sum() > (1000 if peak else 40_000)
  np.testing.assert_allclose(width[rare], p[rare], rtol=1e-3)
  np.testing.assert_array_equal(width[[5, 300]], 0)
  # Of what is rarer still nothing is lost either, but for what float32 holds as 0.
  assert np.all(width[(p > 1e-30) & (weights > 1e-37)] > 0)


def test_uniforms_are_fine_near_zero_and_uniform():
  found = np.asarray(jax.jit(jax.vmap(draw._uniforms))(jax.random.split(jax.random.key(0), 200_000))).ravel().astype(np.float64)
  # 400,000 draws: the standard error of the mean is 4.6e-4, and the smallest expected 2.5e-6, where steps of 2⁻²³ leave a digit and a half.
  assert abs(found.mean() - 0.5) < 5 * 4.6e-4
  small = found[found < 1e-3]
  assert np.mean(np.modf(small * 2.0**23)[0] != 0) > 0.9, "between the steps of a single uniform"
  assert found.min() >= 0 and found.max() <= 1


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_the_ends_of_the_uniform_draw_something_possible(uniform):
  weights = jnp.array([[0.0, 0.2, 0.0, 0.5, 0.1, 0.0]])
  found = int(draw._pick(weights, jnp.array([uniform]))[0])
  assert found == (4 if uniform == 0 else 3)  # the smallest comes first, the largest last


def test_follows_the_distribution():
  vocab, count = 700, 100_000  # blocks of 32, the last one partly filled
  logits = (2 * jax.random.normal(jax.random.key(3), (vocab,))).at[5].set(-jnp.inf)
  counts = np.bincount(drawn(logits, count).ids, minlength=vocab)
  p = softmax(logits)
  assert counts[5] == 0
  common = count * p > 25
  z = (counts - count * p)[common] / np.sqrt(count * p * (1 - p))[common]
  # Some 500 ids, each within 5 standard errors.
  assert np.abs(z).max() < 5
  assert 0.85 < z.std() < 1.15


def test_a_rare_block_beside_a_common_one_is_drawn_at_its_rate():
  # Blocks of 16; the whole second block has mass 2⁻¹⁰.
  logits = np.full(256, -np.inf)
  logits[0], logits[16:20] = np.log(1 - 2.0**-10), np.log(2.0**-12)
  ids = drawn(logits, 200_000).ids
  expected = 200_000 * 2.0**-12
  # 48.8 each; 5 standard errors are 35.
  assert np.all(np.abs(np.bincount(ids, minlength=32)[16:20] - expected) < 5 * np.sqrt(expected))


TIES = [1.0, 2.0, 2.0, 0.5, 2.0, -np.inf, 1.0, 0.0]  # e² three times: .2443 each; e .0899 twice, √e .0545, 1 .0331


@pytest.mark.parametrize(
  ("top_k", "top_p", "expected"),
  [
    (1, 1.0, [1]),
    (2, 1.0, [1, 2]),  # of equals the lower id
    (4, 1.0, [0, 1, 2, 4]),
    (99, 1.0, [0, 1, 2, 3, 4, 6, 7]),
    (0, 1e-6, [1]),  # the first is always kept
    (0, 0.244, [1]),
    (0, 0.26, [1, 2]),
    (0, 0.80, [0, 1, 2, 4]),  # three are .733, the lower of the next two makes .823
    (0, 0.9999999, [0, 1, 2, 3, 4, 6, 7]),
    (3, 0.6, [1, 2]),  # of a third each
    (3, 0.7, [1, 2, 4]),
  ],
)
def test_what_truncation_keeps(top_k, top_p, expected):
  np.testing.assert_array_equal(np.flatnonzero(kept(TIES, 1.0, top_k, top_p)), expected)
  out = drawn(TIES, 4000, Sampling(top_k=top_k, top_p=top_p))
  np.testing.assert_array_equal(np.unique(out.ids), expected)
  np.testing.assert_allclose(out.sampling_logp, np.log(kept(TIES, 1.0, top_k, top_p)[out.ids]), atol=1e-5)
  np.testing.assert_allclose(out.logp, np.log(softmax(TIES)[out.ids]), atol=1e-5)


def test_temperature_comes_before_top_k_and_top_k_before_top_p():
  logits = 2 * np.random.default_rng(0).normal(size=40)
  out = drawn(logits, 20_000, Sampling(temperature=1.5, top_k=12, top_p=0.8))
  p = kept(logits, 1.5, 12, 0.8)
  assert np.sum(p > 0) < np.sum(kept(logits, 1.5, 12) > 0) == 12
  np.testing.assert_allclose(out.sampling_logp, np.log(p[out.ids]), atol=1e-5)
  counts = np.bincount(out.ids, minlength=40)
  assert np.all(np.abs(counts - 20_000 * p) <= 5 * np.sqrt(20_000 * p * (1 - p)))  # 0 where p is 0


@pytest.mark.parametrize(("spread", "wide"), [(8.0, False), (0.1, True)])
def test_a_nucleus_wider_than_the_candidates(spread, wide):
  logits = spread * np.random.default_rng(0).normal(size=1000)
  p = kept(logits, top_p=0.9)
  assert (np.sum(p > 0) > draw._CANDIDATES) == wide
  out = drawn(logits, 20_000, Sampling(top_p=0.9))
  # The last id kept may fall on either side of the bound in float32.
  border = np.min(p[p > 0])
  np.testing.assert_allclose(np.exp(out.sampling_logp), p[out.ids], atol=1.01 * border)
  assert np.mean(p[out.ids] > 0) > 1 - 5 * border
  assert len(np.unique(out.ids)) > 0.8 * np.sum(p > 1e-3)


def test_one_wide_row_does_not_change_the_others():
  spread = np.append(np.full(40, 2.5), 0.1)
  rows = jnp.asarray(np.random.default_rng(0).normal(size=(41, 1000)) * spread[:, None], jnp.float32)
  keys = jax.random.split(jax.random.key(0), 41)
  sampling = Sampling(top_p=0.9)
  both = next_tokens(sampling)(rows, keys)
  alone = next_tokens(sampling)(rows[:40], keys[:40])
  np.testing.assert_array_equal(both.ids[:40], alone.ids)
  np.testing.assert_allclose(both.sampling_logp[:40], alone.sampling_logp, atol=1e-6)
  assert len(np.unique(alone.ids)) > 20


def test_greedy_takes_the_lowest_of_the_largest():
  out = drawn(TIES, 1, Sampling(temperature=0.0))
  assert out.ids[0] == 1
  np.testing.assert_allclose(out.logp, np.log(softmax(TIES)[1]), atol=1e-6)
  np.testing.assert_array_equal(out.sampling_logp, out.logp)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_reported_ids_are_of_the_whole_distribution(temperature):
  out = drawn(TIES, 1, Sampling(temperature=temperature, top_k=1, report_topk=4))
  assert out.topk_ids[0].tolist() == [1, 2, 4, 0]
  np.testing.assert_allclose(out.topk_logp[0], np.log(softmax(np.array(TIES) / temperature)[[1, 2, 4, 0]]), atol=1e-6)
  assert drawn(TIES, 1).topk_ids.shape == (1, 0)


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"temperature": -1.0}, "at least 0"),
    ({"temperature": float("nan")}, "must be finite"),
    ({"top_p": 0.0}, r"\(0, 1\]"),
    ({"top_p": 1.5}, r"\(0, 1\]"),
    ({"top_k": -1}, "at least 0"),
    ({"report_topk": -1}, "at least 0"),
    ({"temperature": 0.0, "top_k": 2}, "greedy and ignores"),
  ],
)
def test_refused(changes, text):
  with pytest.raises(ValueError, match=text):
    Sampling(**changes)


def test_no_more_ids_than_there_are_can_be_reported():
  with pytest.raises(ValueError, match=r"report_topk=9 exceeds the vocabulary of 8"):
    drawn(TIES, 1, Sampling(report_topk=9))
