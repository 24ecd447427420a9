"""The decoder: cache, padding, causality, rotary scaling, ties and dtypes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax.models import decoder

CONFIG = decoder.DecoderConfig(
  vocab_size=40,
  hidden_size=24,
  intermediate_size=40,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  max_positions=64,
  rope_scaling=(4.0, 1.0, 4.0, 16.0),
  qkv_bias=True,
  tied=False,
)

init_params = jax.jit(decoder.init_params, static_argnums=0)
apply = jax.jit(decoder.apply, static_argnums=0)
apply_cached = jax.jit(decoder.apply_cached, static_argnums=0, static_argnames="visible")


@functools.cache
def random_params(config=CONFIG):
  """Random everywhere: fresh biases are zeros and fresh scales ones, and would hide what they are for."""
  params = init_params(config, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return jax.tree.unflatten(tree, [a + 0.3 * jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, leaves)])


def random_tokens(shape, seed=2):
  return jax.random.randint(jax.random.key(seed), shape, 0, CONFIG.vocab_size)


def test_tree_and_count():
  params = jax.eval_shape(lambda: decoder.init_params(CONFIG, jax.random.key(0)))
  shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): a.shape for path, a in jax.tree_util.tree_leaves_with_path(params)}
  assert shapes == {
    "embed/embedding": (40, 24),
    "layers/attn_norm/scale": (2, 24),
    "layers/attn/q/kernel": (2, 24, 4, 8),
    "layers/attn/k/kernel": (2, 24, 2, 8),
    "layers/attn/v/kernel": (2, 24, 2, 8),
    "layers/attn/q/bias": (2, 4, 8),
    "layers/attn/k/bias": (2, 2, 8),
    "layers/attn/v/bias": (2, 2, 8),
    "layers/attn/o/kernel": (2, 4, 8, 24),
    "layers/mlp_norm/scale": (2, 24),
    "layers/mlp/gate/kernel": (2, 24, 40),
    "layers/mlp/up/kernel": (2, 24, 40),
    "layers/mlp/down/kernel": (2, 40, 24),
    "final_norm/scale": (24,),
    "lm_head/kernel": (24, 40),
  }
  # Per layer 2·24 (norms) + 24·64 (q, k, v) + 64 (biases) + 32·24 (o) + 3·24·40 (MLP) = 5296; then 24 + 2·40·24 outside.
  assert decoder.count_params(params) == 2 * 5296 + 24 + 2 * 960
  without = dataclasses.replace(CONFIG, tied=True, qkv_bias=False)
  tied = jax.eval_shape(lambda: decoder.init_params(without, jax.random.key(0)))
  assert decoder.count_params(tied) == 2 * (5296 - 64) + 24 + 960
  assert "lm_head" not in tied and "bias" not in tied["layers"]["attn"]["q"]


def test_initial_layers_differ():
  kernel = init_params(CONFIG, jax.random.key(0))["layers"]["mlp"]["up"]["kernel"]
  assert not np.array_equal(kernel[0], kernel[1])


def prefilled(tokens):
  """Hidden states and the cache of whole prompts [B, S]."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
  return apply_cached(CONFIG, decoder.unstack_layers(random_params()), tokens, positions, decoder.empty_cache(CONFIG, *tokens.shape))


def test_prefill_and_decode_equal_full_forward():
  tokens = random_tokens((2, 12))
  prompt_lengths = jnp.array([3, 6])  # rows write at positions of their own
  full = apply(CONFIG, random_params(), tokens)
  prompt = jnp.where(jnp.arange(12)[None, :] < prompt_lengths[:, None], tokens, 0)
  hidden, cache = prefilled(prompt)
  for row, length in enumerate([3, 6]):
    np.testing.assert_allclose(hidden[row, :length], full[row, :length], atol=1e-5)
  unstacked = decoder.unstack_layers(random_params())
  for offset in range(6):
    positions = (prompt_lengths + offset)[:, None]
    hidden, cache = apply_cached(CONFIG, unstacked, jnp.take_along_axis(tokens, positions, axis=1), positions, cache)
    np.testing.assert_allclose(hidden, jnp.take_along_axis(full, positions[..., None], axis=1), atol=1e-5)


def test_several_tokens_at_once_into_the_cache_equal_full_forward():
  tokens = random_tokens((2, 12))
  full = apply(CONFIG, random_params(), tokens)
  _, cache = prefilled(tokens.at[:, 5:].set(0))
  positions = jnp.broadcast_to(jnp.arange(5, 12)[None, :], (2, 7))
  hidden, _ = apply_cached(CONFIG, decoder.unstack_layers(random_params()), tokens[:, 5:], positions, cache)
  np.testing.assert_allclose(hidden, full[:, 5:], atol=1e-5)


def test_cache_is_keys_and_values_per_layer():
  _, cache = prefilled(random_tokens((2, 12)))
  assert [[a.shape for a in layer] for layer in cache] == [[(2, 2, 12, 8)] * 2] * 2


def test_only_visible_slots_are_read():
  tokens = random_tokens((2, 12))
  _, cache = prefilled(tokens)
  spoilt = jax.tree.map(lambda a: a.at[:, :, 6:].set(jnp.nan), cache)
  arguments = CONFIG, decoder.unstack_layers(random_params()), tokens[:, 5:6], jnp.full((2, 1), 5)
  expected = apply(CONFIG, random_params(), tokens)[:, 5:6]
  for size in (6, 9, None):
    np.testing.assert_allclose(apply_cached(*arguments, spoilt, visible=size)[0], expected, atol=1e-5)
  assert not np.allclose(apply_cached(*arguments, cache, visible=5)[0], expected, atol=1e-3)


def test_token_beyond_the_cache_is_dropped_and_never_overwrites_the_last_slot():
  _, cache = prefilled(random_tokens((2, 12)))
  _, after = apply_cached(CONFIG, decoder.unstack_layers(random_params()), random_tokens((2, 1)), jnp.full((2, 1), 12), cache)
  jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_later_tokens_and_padding_change_nothing_before_them():
  tokens = random_tokens((2, 12))
  full = apply(CONFIG, random_params(), tokens)
  changed = apply(CONFIG, random_params(), tokens.at[:, 8:].set(random_tokens((2, 4), seed=3)))
  np.testing.assert_array_equal(changed[:, :8], full[:, :8])
  assert np.max(np.abs(changed[:, 8:] - full[:, 8:])) > 0.1
  longer = apply(CONFIG, random_params(), jnp.pad(tokens, [(0, 0), (0, 20)]))
  np.testing.assert_allclose(longer[:, :12], full, atol=1e-5)


def test_rows_do_not_see_each_other():
  tokens = random_tokens((2, 12))
  alone = apply(CONFIG, random_params(), tokens[1:])
  np.testing.assert_allclose(alone, apply(CONFIG, random_params(), tokens)[1:], atol=1e-5)


def test_rotations_act_only_by_the_difference_of_positions():
  q, k = (jax.random.normal(jax.random.key(i), (1, 6, 1, 8)) for i in (0, 1))

  def products(positions):
    return jnp.einsum("bihd,bjhd->bij", *(decoder._rotate(x, positions, CONFIG) for x in (q, k)))

  positions = jnp.arange(6)[None, :]
  np.testing.assert_allclose(products(positions + 7), products(positions), atol=1e-4)
  assert np.max(np.abs(products(2 * positions) - products(positions))) > 0.1


def test_llama3_frequencies_by_hand():
  # theta 100, head_dim 8: frequencies 1, 100^-1/4, 0.1, 100^-3/4. In a context of 32 they turn 5.09, 1.61, 0.51, 0.16 times.
  config = dataclasses.replace(CONFIG, rope_theta=100.0, rope_scaling=(8.0, 1.0, 4.0, 32.0))
  second = 100**-0.25
  share = (32 * second / (2 * math.pi) - 1) / 3  # between 1 turn (divided by 8) and 4 turns (kept)
  expected = [1.0, second * (share + (1 - share) / 8), 0.1 / 8, 100**-0.75 / 8]
  np.testing.assert_allclose(decoder._inverse_frequencies(config), expected, rtol=1e-6)


def test_remat_changes_memory_and_neither_value_nor_gradient():
  tokens = random_tokens((8, 40))

  def loss(params, config):
    return jnp.sum(decoder.apply(config, params, tokens) ** 3)

  def compiled(remat):
    config = dataclasses.replace(CONFIG, num_layers=4, remat=remat)
    return jax.jit(jax.value_and_grad(loss), static_argnums=1).lower(params, config).compile()

  params = random_params(dataclasses.replace(CONFIG, num_layers=4))
  programs = {remat: compiled(remat) for remat in decoder.REMAT}
  value, grads = programs["none"](params)
  scale = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))
  for remat in ("full", "dots"):
    again, grads_again = programs[remat](params)
    np.testing.assert_allclose(again, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), grads_again, grads)
  # The head is not part of `apply`; everything else acts on the loss.
  acts = {jax.tree_util.keystr(path): bool(jnp.any(g != 0)) for path, g in jax.tree_util.tree_leaves_with_path(grads)}
  assert [path for path, act in acts.items() if not act] == ["['lm_head']['kernel']"]
  full, dots, none = (programs[remat].memory_analysis().temp_size_in_bytes for remat in ("full", "dots", "none"))
  assert full < 0.8 * dots
  assert dots < 0.8 * none


def test_tied_gradient_is_the_sum_of_both_uses():
  config = dataclasses.replace(CONFIG, tied=True, remat="none")
  params = random_params(config)
  tokens = random_tokens((2, 12))

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1))
  def grads(params, head):
    logits = decoder.apply(config, params, tokens) @ (decoder.unembedding(params) if head is None else head)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1, axis=1)[..., None], axis=-1))

  both, _ = grads(params, None)
  as_input, as_head = grads(params, decoder.unembedding(params))
  np.testing.assert_allclose(both["embed"]["embedding"], as_input["embed"]["embedding"] + as_head.T, atol=1e-6)


def test_bfloat16_activations_stay_near_float32():
  tokens = random_tokens((2, 12))
  full = apply(CONFIG, random_params(), tokens)
  low = apply(dataclasses.replace(CONFIG, dtype="bfloat16"), random_params(), tokens)
  assert low.dtype == jnp.bfloat16
  error = jnp.linalg.norm(low.astype(jnp.float32) - full) / jnp.linalg.norm(full)
  assert error < 0.03  # 8 bits of mantissa are 0.4 % per operation; a wrong branch gives errors near 1


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"vocab_size": -1}, "vocab_size must be at least 1"),
    ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads × kv_copies \(3 × 1\)"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"remat": "half"}, "remat is 'half', but must be one of full, dots, none"),
  ],
)
def test_impossible_architecture_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_written_to_a_cache(tokens):
  rng = np.random.default_rng(tokens)
  old, new = (rng.normal(size=(5, 2, size, 3)).astype(np.float32) for size in (7, tokens))
  positions = np.array([0, 4, 5, 7, 100], np.int32)[:, None] + np.arange(tokens, dtype=np.int32)  # partly beyond the cache
  expected = old.copy()
  for row, token in np.ndindex(positions.shape):
    if positions[row, token] < 7:
      expected[row, :, positions[row, token]] = new[row, :, token]
  np.testing.assert_array_equal(jax.jit(decoder.write)(old, positions, new), expected)
