"""The sampler against the trainer's own scoring, its stops, and its draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from emapg_jax import streams
from emapg_jax.models import decoder
from emapg_jax.rollout import sampler
from emapg_jax.token_stats import token_stats

CONFIG = decoder.DecoderConfig(
  vocab_size=16, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
EOS, PAD, NEW = (3, 5), 5, 12  # the pad id is one of the end ids: masks must not look at token values
PARAMS = decoder.init_params(CONFIG, jax.random.key(0))


def prompts(rows=24, width=8):
  tokens = jax.random.randint(jax.random.key(1), (rows, width), 0, 16)
  return tokens, jax.random.randint(jax.random.key(2), (rows,), 1, width + 1)


def keys_for(rows, step=1):
  return streams.row_keys(0, streams.ROLLOUT, step, np.arange(rows), np.zeros(rows, int))


@functools.cache
def sampling(temperature=0.7, new=NEW, eos=EOS):
  return jax.jit(functools.partial(sampler.sample, CONFIG, max_new_tokens=new, temperature=temperature, eos_ids=eos, pad_id=PAD))


def scored(tokens, lengths, out, temperature):
  """What the trainer says of the sampled tokens."""
  full = jnp.pad(tokens, ((0, 0), (0, NEW)))
  full = jax.vmap(lambda row, length, ids: jax.lax.dynamic_update_slice(row, ids, (length,)))(full, lengths, out.tokens)
  before = lengths[:, None] - 1 + jnp.arange(NEW)[None, :]
  hidden = jnp.take_along_axis(decoder.apply(CONFIG, PARAMS, full), before[..., None], axis=1)
  return hidden, token_stats(hidden, decoder.unembedding(PARAMS), out.tokens, temperature=temperature)


def test_log_probs_are_the_trainers():
  tokens, lengths = prompts()
  out = sampling()(PARAMS, tokens, lengths, keys_for(24))
  _, stats = scored(tokens, lengths, out, 0.7)
  inside = np.arange(NEW) < np.asarray(out.length)[:, None]
  np.testing.assert_allclose(np.where(inside, out.logp, 0), np.where(inside, stats.logp, 0), atol=1e-5)
  assert np.all(np.asarray(out.logp)[~inside] == 0)
  assert np.all(np.asarray(out.tokens)[~inside] == PAD)


def test_ends():
  tokens, lengths = prompts()
  out = jax.device_get(sampling()(PARAMS, tokens, lengths, keys_for(24)))
  assert len(set(out.length.tolist())) > 3, "rows of different length are what this test is about"
  for ids, length, ended in zip(out.tokens, out.length, out.ended):
    first = next((i for i, token in enumerate(ids[:length]) if token in EOS), None)
    # An end id is kept, once; without one the row is full.
    assert first == length - 1 if ended else first is None and length == NEW


def test_one_row_ending_does_not_end_the_others():
  tokens, lengths = prompts()
  out = jax.device_get(sampling()(PARAMS, tokens, lengths, keys_for(24)))
  assert out.length.min() < 4
  assert out.length.max() == NEW


def test_draws_depend_on_the_row_alone():
  tokens, lengths = prompts()
  keys = keys_for(24)
  out = jax.device_get(sampling()(PARAMS, tokens, lengths, keys))
  order = np.random.default_rng(0).permutation(24)
  permuted = jax.device_get(sampling()(PARAMS, tokens[order], lengths[order], keys[order]))
  np.testing.assert_array_equal(permuted.tokens, out.tokens[order])
  # More padding and fewer rows change nothing either.
  wider = jnp.pad(tokens[:5], ((0, 0), (0, 4)), constant_values=9)
  np.testing.assert_array_equal(jax.device_get(sampling()(PARAMS, wider, lengths[:5], keys[:5])).tokens, out.tokens[:5])


def test_other_step_sample_or_seed_draws_otherwise():
  base = jax.random.key_data(streams.row_keys(0, streams.ROLLOUT, 1, np.array([7]), np.array([0])))
  others = [
    streams.row_keys(1, streams.ROLLOUT, 1, np.array([7]), np.array([0])),
    streams.row_keys(0, streams.EVAL, 1, np.array([7]), np.array([0])),
    streams.row_keys(0, streams.ROLLOUT, 2, np.array([7]), np.array([0])),
    streams.row_keys(0, streams.ROLLOUT, 1, np.array([8]), np.array([0])),
    streams.row_keys(0, streams.ROLLOUT, 1, np.array([7]), np.array([1])),
  ]
  assert all(np.any(np.asarray(jax.random.key_data(other)) != np.asarray(base)) for other in others)


def test_greedy_is_the_argmax_of_the_full_forward():
  tokens, lengths = prompts()
  out = sampling(temperature=0.0)(PARAMS, tokens, lengths, keys_for(24))
  hidden, stats = scored(tokens, lengths, out, 1.0)
  best = jnp.argmax(hidden @ decoder.unembedding(PARAMS), axis=-1)
  inside = np.arange(NEW) < np.asarray(out.length)[:, None]
  np.testing.assert_array_equal(np.where(inside, out.tokens, 0), np.where(inside, best, 0))
  np.testing.assert_allclose(np.where(inside, out.logp, 0), np.where(inside, stats.logp, 0), atol=1e-5)


def test_draw_follows_the_distribution():
  vocab, count = 700, 100_000  # three blocks of 256, the last one partly filled
  logits = (2 * jax.random.normal(jax.random.key(3), (vocab,))).at[5].set(-jnp.inf)
  keys = jax.random.split(jax.random.key(4), count)
  ids = jax.jit(jax.vmap(lambda key: sampler.draw(logits[None, :], key[None])[0]))(keys)
  p = np.asarray(jax.nn.softmax(logits), np.float64)
  counts = np.bincount(np.asarray(ids), minlength=vocab)
  assert counts[5] == 0
  common = count * p > 25
  z = (counts - count * p)[common] / np.sqrt(count * p * (1 - p))[common]
  # Some 500 ids, each within 5 standard errors.
  assert np.abs(z).max() < 5
  assert 0.85 < z.std() < 1.15


def test_a_token_rarer_than_the_grid_of_uniforms_is_drawn_at_its_rate_within_its_block():
  # Block 1 has mass 1/2, of which id 256 holds 2⁻¹⁰: one uniform over the whole would do here, and two must not break it.
  logits = jnp.full((512,), -jnp.inf).at[0].set(0.0).at[256].set(np.log(2.0**-10)).at[257].set(np.log(1 - 2.0**-10))
  keys = jax.random.split(jax.random.key(5), 100_000)
  ids = np.asarray(jax.jit(jax.vmap(lambda key: sampler.draw(logits[None, :], key[None])[0]))(keys))
  expected = 100_000 * 2.0**-11
  # 48.8 expected; 5 standard errors are 35.
  assert abs(np.sum(ids == 256) - expected) < 5 * np.sqrt(expected)


def test_compiles_once_per_shape():
  tokens, lengths = prompts()
  fn = jax.jit(functools.partial(sampler.sample, CONFIG, max_new_tokens=4, temperature=1.0, eos_ids=EOS, pad_id=PAD))
  for step in (1, 2, 3):
    fn(PARAMS, tokens, lengths, keys_for(24, step))
  assert fn._cache_size() == 1
