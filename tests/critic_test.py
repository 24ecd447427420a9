"""The critic: what it is made of, what it returns, what it learns from, and whose memory it owns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax.models import critic, decoder

CONFIG = decoder.DecoderConfig(
  vocab_size=20,
  hidden_size=12,
  intermediate_size=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=6,
  max_positions=32,
  qkv_bias=True,
  tied=False,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 7)), jnp.int32)

apply_critic = jax.jit(critic.apply_critic, static_argnums=0)


@functools.cache
def policy(config=CONFIG):
  return jax.jit(decoder.init_params, static_argnums=0)(config, jax.random.key(0))


def trained(config=CONFIG):
  """A critic whose head is not zeros any more."""
  params = critic.init_critic(policy(config))
  kernel = jnp.asarray(np.random.default_rng(1).normal(size=(12, 1)), params["head"]["kernel"].dtype)
  return {**params, "head": {"kernel": kernel, "bias": params["head"]["bias"] + 0.3}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_without_logits_and_a_head_of_zeros(dtype, tied):
  params = policy(dataclasses.replace(CONFIG, param_dtype=dtype, tied=tied))
  made = critic.init_critic(params)
  assert set(made) == {"decoder", "head"}
  jax.tree.map(np.testing.assert_array_equal, made["decoder"], {k: v for k, v in params.items() if k != "lm_head"})
  np.testing.assert_array_equal(made["head"]["kernel"], np.zeros((12, 1)))
  np.testing.assert_array_equal(made["head"]["bias"], np.zeros(1))
  assert {x.dtype for x in jax.tree.leaves(made)} == {jnp.dtype(dtype)}
  assert "lm_head" in params or tied  # the policy keeps its own


def test_first_value_is_zero_and_its_gradient_is_in_the_head():
  params = critic.init_critic(policy())
  np.testing.assert_array_equal(apply_critic(CONFIG, params, TOKENS), np.zeros((2, 7)))
  grads = jax.grad(lambda p: jnp.sum(critic.apply_critic(CONFIG, p, TOKENS)))(params)
  hidden = decoder.apply(CONFIG, policy(), TOKENS)
  np.testing.assert_allclose(grads["head"]["kernel"][:, 0], np.sum(hidden, axis=(0, 1)), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(grads["head"]["bias"], [14.0])
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, np.zeros(g.shape)), grads["decoder"])


def test_value_is_linear_in_the_hidden_state_of_its_own_decoder():
  params = trained()
  params["decoder"] = jax.tree.map(lambda a: a * 1.5, params["decoder"])
  hidden = decoder.apply(CONFIG, params["decoder"], TOKENS)
  value = apply_critic(CONFIG, params, TOKENS)
  assert value.shape == (2, 7) and value.dtype == jnp.float32
  np.testing.assert_allclose(value, (np.float64(hidden) @ np.float64(params["head"]["kernel"]))[..., 0] + 0.3, rtol=1e-5, atol=1e-6)


def test_value_is_after_its_token():
  changed = apply_critic(CONFIG, trained(), TOKENS.at[:, 4].add(1) % 20)
  value = apply_critic(CONFIG, trained(), TOKENS)
  np.testing.assert_array_equal(changed[:, :4], value[:, :4])
  assert np.min(np.abs(changed[:, 4] - value[:, 4])) > 1e-3


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_head_is_float32_under_bfloat16_activations(param_dtype):
  config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype=param_dtype)
  params = trained(config)
  value = apply_critic(config, params, TOKENS)
  assert value.dtype == jnp.float32
  hidden = jax.jit(decoder.apply, static_argnums=0)(config, params["decoder"], TOKENS)
  assert hidden.dtype == jnp.bfloat16
  # A kernel, a product or a sum in bfloat16 would be off by 0.4 %.
  kernel, bias = (np.asarray(params["head"][name], np.float64) for name in ("kernel", "bias"))
  np.testing.assert_allclose(value, (np.asarray(hidden, np.float64) @ kernel)[..., 0] + bias, rtol=1e-5, atol=1e-5)


def test_every_parameter_learns():
  grads = jax.jit(jax.grad(lambda p: jnp.sum(critic.apply_critic(CONFIG, p, TOKENS) ** 2)))(trained())
  still = [jax.tree_util.keystr(path) for path, g in jax.tree_util.tree_leaves_with_path(grads) if not jnp.any(g != 0)]
  assert still == []


def pointers(tree):
  return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["eager", "jitted, both out", "made inside jit"])
def test_critic_never_shares_memory_with_the_policy(dtype, how):
  config = dataclasses.replace(CONFIG, param_dtype=dtype)
  params = jax.tree.map(jnp.copy, policy(config))
  if how == "eager":
    value = critic.init_critic(params)
  elif how == "jitted, both out":
    params, value = jax.jit(lambda p: (p, critic.init_critic(p)))(params)
  else:
    params, value = jax.jit(lambda key: ((p := decoder.init_params(config, key)), critic.init_critic(p)))(jax.random.key(0))
  assert not set(pointers(params)) & set(pointers(value))

  halve = jax.jit(lambda both: jax.tree.map(lambda p: p / 2, both), donate_argnums=0)
  new_params, new_value = halve((params, value))
  assert all(x.is_deleted() for x in jax.tree.leaves((params, value)))
  assert not set(pointers(new_params)) & set(pointers(new_value))
  # Gone is the policy alone, and the critic stays.
  jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(new_params)
  np.testing.assert_array_equal(new_value["decoder"]["embed"]["embedding"], policy(config)["embed"]["embedding"] / 2)
