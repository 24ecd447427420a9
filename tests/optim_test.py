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


def test_first_moment_in_bfloat16():
  params = {"kernel": jnp.ones(3, jnp.bfloat16), "bias": jnp.ones(3)}
  grads = {"kernel": jnp.array([0.1, -0.2, 0.3], jnp.bfloat16), "bias": jnp.array([1e-3, 0.0, 7.0])}
  optimizer = optim.make_optimizer(1e-3, mu_dtype="bfloat16")
  state = optimizer.init(params)
  updates, after = jax.jit(optimizer.update)(grads, state, params)
  for tree in (state, after):
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(tree, "mu"))} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(optax.tree.get(tree, "nu"))} == {jnp.dtype(jnp.float32)}
  assert jax.tree.structure(state) == jax.tree.structure(after) == jax.tree.structure(optim.make_optimizer(1e-3).init(params))
  # The moment is rounded after it has been used, so that the first update is the one of float32.
  plain = one_update(optim.make_optimizer(1e-3), params, grads)
  for name in params:
    assert updates[name].dtype == jnp.float32
    np.testing.assert_allclose(updates[name], plain[name], rtol=1e-6)


def test_bfloat16_is_for_storage_not_for_arithmetic():
  # b1 = 0.9, b2 = 0.75, gradients 0.625 then 0. m: 0.0625, which bfloat16 holds, then 0.05625, corrected by 1 − 0.81: 0.296053.
  # v: 0.0976563, then 0.0732422, corrected by 1 − 0.5625: 0.167411, root 0.409159. The ratio is 0.723563.
  # In bfloat16 b1 would be 0.8984.
  optimizer = optim.make_optimizer(1.0, b1=0.9, b2=0.75, weight_decay=0.0, mu_dtype="bfloat16")
  params = {"kernel": jnp.zeros(1)}
  _, state = optimizer.update({"kernel": jnp.array([0.625])}, optimizer.init(params), params)
  updates, _ = optimizer.update({"kernel": jnp.zeros(1)}, state, params)
  np.testing.assert_allclose(updates["kernel"], [-0.723563], rtol=1e-5)


def test_unknown_mu_dtype():
  with pytest.raises(ValueError, match="mu_dtype='float16'"):
    optim.make_optimizer(1e-3, mu_dtype="float16")


def parts(policy, value):
  return {"policy": {"kernel": jnp.asarray(policy)}, "value": {"kernel": jnp.asarray(value)}}


def test_policy_and_critic_do_not_see_each_other():
  # eps = 1, rates 1 and 10, as in the test of the clip: (0.6, 0.8) after clipping (3, 4), and the critic's 1e6 clipped to 1 and 0.5.
  optimizer = optim.with_critic(
    optim.make_optimizer(1.0, eps=1.0, weight_decay=0.0), optim.make_optimizer(10.0, eps=1.0, weight_decay=0.0, clip_norm=0.5)
  )
  params = parts([0.0, 0.0], [0.0])
  updates = one_update(optimizer, params, parts([3.0, 4.0], [1e6]))
  np.testing.assert_allclose(updates["policy"]["kernel"], [-0.375, -0.4444444], rtol=1e-5)
  np.testing.assert_allclose(updates["value"]["kernel"], [-10 * 0.5 / 1.5], rtol=1e-5)
  # Nor over several updates: each part is what its optimizer alone would make of it.
  rng = np.random.default_rng(0)
  alone = optim.make_optimizer(1.0, eps=1.0, weight_decay=0.0)
  state, alone_state = optimizer.init(params), alone.init(params["policy"])
  for size in (1e6, 0.0, np.nan):
    grads = parts(rng.normal(size=2).astype(np.float32), [np.float32(size)])
    updates, state = jax.jit(optimizer.update)(grads, state, params)
    expected, alone_state = jax.jit(alone.update)(grads["policy"], alone_state, params["policy"])
    np.testing.assert_allclose(updates["policy"]["kernel"], expected["kernel"], rtol=1e-6)


def test_each_part_has_its_own_decay_and_mask():
  optimizer = optim.with_critic(optim.make_optimizer(0.5, weight_decay=0.25), optim.make_optimizer(0.5, weight_decay=0.5))
  head = {"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}
  params = {"policy": {"norm": {"scale": jnp.ones(2)}, "kernel": jnp.ones(2)}, "value": {"norm": {"scale": jnp.ones(2)}, "head": head}}
  updates = one_update(optimizer, params, jax.tree.map(jnp.zeros_like, params))
  expected = {
    "policy": {"norm": {"scale": np.zeros(2)}, "kernel": np.full(2, -0.125)},
    "value": {"norm": {"scale": np.zeros(2)}, "head": {"kernel": np.full((2, 1), -0.25), "bias": np.zeros(1)}},
  }
  jax.tree.map(np.testing.assert_allclose, updates, expected)


def test_with_critic_wants_both_parts():
  optimizer = optim.with_critic(optax.sgd(1.0), optax.sgd(1.0))
  with pytest.raises(ValueError, match="value"):
    optimizer.init({"policy": jnp.zeros(1)})


def scales(kind, warmup, decay_steps, counts):
  schedule = optim.lr_schedule(kind, warmup, decay_steps)
  values = [schedule(count) for count in counts]
  assert all(type(value) is float for value in values)
  return values


def test_warmup_is_linear_then_constant():
  assert scales("constant", 4, 0, (1, 2, 3, 4, 5, 100)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
  assert scales("constant", 1, None, (1, 2)) == [1.0, 1.0]
  assert scales("constant", 0, 0, (1, 2, 1000)) == [1.0, 1.0, 1.0]
  assert optim.lr_schedule("constant", 2)(1) == 0.5


def test_decay_begins_at_one_after_the_warmup_and_ends_at_zero():
  # Four steps of decay after two of warm-up: x = 0, 1/4, 1/2, 3/4 at counts 3 to 6, then 1. (1 + cos(π/4)) / 2 = 0.853553.
  counts = (1, 2, 3, 4, 5, 6, 7, 8, 1000)
  assert scales("linear", 2, 6, counts) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
  cosine = scales("cosine", 2, 6, counts)
  np.testing.assert_allclose(cosine, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0, 0.0], atol=1e-6)
  assert cosine[2] == 1.0 and cosine[-3:] == [0.0, 0.0, 0.0]
  assert scales("linear", 0, 4, (1, 2, 3, 4, 5, 6)) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
  assert scales("linear", 3, 4, (3, 4, 5)) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
  ("args", "text"),
  [
    (("exponential", 0, 10), "kind='exponential'"),
    (("constant", -1, 0), "warmup=-1"),
    (("constant", 0, 10), "decay_steps=10 with kind='constant'"),
    (("cosine", 5, 5), "decay_steps=5 .*more than 5"),
    (("linear", 5, 0), "decay_steps=0"),
    (("linear", 0, 0), "decay_steps=0"),
    (("cosine", 0, None), "decay_steps=None"),
  ],
)
def test_impossible_schedule(args, text):
  with pytest.raises(ValueError, match=text):
    optim.lr_schedule(*args)


@pytest.mark.parametrize("kind", optim.LR_SCHEDULES)
def test_steps_are_counted_from_one(kind):
  with pytest.raises(ValueError, match="count=0"):
    optim.lr_schedule(kind, 0, 0 if kind == "constant" else 4)(0)
