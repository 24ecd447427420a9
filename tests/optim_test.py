import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emapg_jax import optim


def one_update(optimizer, params, grads):
  return optimizer.update(grads, optimizer.init(params), params)[0]


def test_first_adam_step():
  # The bias corrections undo (1 − b1) and (1 − b2): m̂ = g, v̂ = g², so m̂ / (√v̂ + eps) is the sign of g. ‖g‖ = 0.5 is not clipped.
  # Decay adds 0.01 · 2 = 0.02: −0.1 · (1 + 0.02) and −0.1 · (−1 + 0.02).
  updates = one_update(optim.make_optimizer(0.1), {"kernel": jnp.array([2.0, 2.0])}, {"kernel": jnp.array([0.3, -0.4])})
  np.testing.assert_allclose(updates["kernel"], [-0.102, 0.098], rtol=1e-5)


def test_second_adam_step():
  # b1 = 0.5, b2 = 0.75, gradients 0.5 then 0.25. m: 0.25, then 0.125 + 0.125 = 0.25, corrected by 1 − 0.25: 1/3.
  # v: 0.0625, then 0.046875 + 0.015625 = 0.0625, corrected by 1 − 0.5625: 1/7. (1/3) · √7 = 0.881917.
  optimizer = optim.make_optimizer(1.0, b1=0.5, b2=0.75, weight_decay=0.0)
  params = {"kernel": jnp.zeros(1)}
  _, state = optimizer.update({"kernel": jnp.array([0.5])}, optimizer.init(params), params)
  updates, _ = optimizer.update({"kernel": jnp.array([0.25])}, state, params)
  np.testing.assert_allclose(updates["kernel"], [-0.881917], rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
  # eps = 1 makes the first step −lr · g / (|g| + 1), which still shows the size of g. ‖(3, 4)‖ = 5, so (0.6, 0.8): 0.6/1.6 and 0.8/1.8.
  params, grads = {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
  updates = one_update(optim.make_optimizer(1.0, eps=1.0), params, grads)
  np.testing.assert_allclose([updates["a"], updates["b"]], [[-0.375], [-0.4444444]], rtol=1e-5)
  # At half the limit: (0.3, 0.4). Without a limit: 3/4 and 4/5.
  updates = one_update(optim.make_optimizer(1.0, eps=1.0, clip_norm=0.5), params, grads)
  np.testing.assert_allclose([updates["a"], updates["b"]], [[-0.3 / 1.3], [-0.4 / 1.4]], rtol=1e-5)
  updates = one_update(optim.make_optimizer(1.0, eps=1.0, clip_norm=None), params, grads)
  np.testing.assert_allclose([updates["a"], updates["b"]], [[-0.75], [-0.8]], rtol=1e-5)


def test_scales_and_biases_do_not_decay():
  params = {
    "embed": {"embedding": jnp.ones(2)},
    "layers": {"attn_norm": {"scale": jnp.ones(2)}, "attn": {"q": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}},
    "bias": {"kernel": jnp.ones(2)},  # only the last key says what a parameter is
  }
  updates = one_update(optim.make_optimizer(0.5, weight_decay=0.25), params, jax.tree.map(jnp.zeros_like, params))
  decay, none = np.full(2, -0.125), np.zeros(2)
  expected = {
    "embed": {"embedding": decay},
    "layers": {"attn_norm": {"scale": none}, "attn": {"q": {"kernel": decay, "bias": none}}},
    "bias": {"kernel": decay},
  }
  jax.tree.map(np.testing.assert_allclose, updates, expected)


def test_bfloat16_params_have_float32_moments_and_updates():
  optimizer = optim.make_optimizer(1e-3)
  params = {"kernel": jnp.ones(2, jnp.bfloat16), "bias": jnp.ones(2, jnp.bfloat16)}
  grads = jax.tree.map(lambda x: x * 0.01, params)
  state = optimizer.init(params)
  updates, after = jax.jit(optimizer.update)(grads, state, params)
  for tree in (state, updates, after):
    floating = [x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floating and all(dtype == jnp.float32 for dtype in floating)
  assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, after)
  assert optax.apply_updates(params, updates)["kernel"].dtype == jnp.bfloat16


def test_bfloat16_second_moment_keeps_moving():
  # After n equal gradients v = g² · (1 − 0.999ⁿ), and one of them moves v by less than bfloat16 resolves once v nears g².
  optimizer = optim.make_optimizer(1e-3, clip_norm=None)
  params = {"kernel": jnp.ones(1, jnp.bfloat16)}
  grads = {"kernel": jnp.ones(1, jnp.bfloat16)}
  state = jax.lax.fori_loop(0, 3000, lambda _, state: optimizer.update(grads, state, params)[1], optimizer.init(params))
  np.testing.assert_allclose(optax.tree.get(state, "nu")["kernel"], [1 - 0.999**3000], rtol=1e-3)  # 0.9503


def test_float32_norm_of_bfloat16_gradients():
  # 4096 entries of 1/32 have norm 2 and are clipped to 1/64 each: (1/64) / (1/64 + 1) = 1/65, which bfloat16 would round by 1e-3.
  params, grads = {"kernel": jnp.zeros(4096, jnp.bfloat16)}, {"kernel": jnp.full(4096, 2**-5, jnp.bfloat16)}
  updates = one_update(optim.make_optimizer(1.0, eps=1.0), params, grads)
  np.testing.assert_allclose(updates["kernel"], np.full(4096, -1 / 65), rtol=1e-5)


def test_clip_norm_must_be_positive():
  with pytest.raises(ValueError, match="clip_norm=0"):
    optim.make_optimizer(1e-3, clip_norm=0)


def test_warmup_is_linear_then_constant():
  assert [optim.warmup(step, 4) for step in (1, 2, 3, 4, 5, 100)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
  assert [optim.warmup(step, 0) for step in (1, 2)] == [1.0, 1.0]
  assert isinstance(optim.warmup(1, 0), float)
  with pytest.raises(ValueError, match="step=0"):
    optim.warmup(0, 4)
  with pytest.raises(ValueError, match="warmup_steps=-1"):
    optim.warmup(1, -1)
