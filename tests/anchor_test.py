"""The anchor: its numbers, its precision, when it moves, whose memory it owns, how stable it is, and how its coefficient adapts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax import anchor


def tree(value, dtype=jnp.float32):
  return {"a": jnp.full((8, 4), value, dtype), "b": {"c": jnp.full((4,), value, dtype)}}


def pointers(tree):
  return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


def mesh_2x4():
  return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_rate_is_one_minus_decay(strict_dtypes, on_mesh):
  # Anchor 0, policy 1, kept 0.95: 0.05, 0.0975, 1 − 0.95ⁿ.
  params, ema_params = tree(1.0), tree(0.0)
  if on_mesh:
    shardings = {"a": NamedSharding(mesh_2x4(), P("data", "fsdp")), "b": {"c": NamedSharding(mesh_2x4(), P("fsdp"))}}
    params, ema_params = jax.device_put(params, shardings), jax.device_put(ema_params, shardings)
  update = jax.jit(anchor.update_anchor)
  for n in range(1, 21):
    ema_params = update(params, ema_params, 0.95, n, 1)
    want = {1: 0.05, 2: 0.0975}.get(n, 1 - 0.95**n)
    for leaf in jax.tree.leaves(ema_params):
      np.testing.assert_allclose(leaf, np.full(leaf.shape, want), rtol=1e-5)
  if on_mesh:
    for leaf, sharding in zip(jax.tree.leaves(ema_params), jax.tree.leaves(shardings)):
      assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_host_memory_changes_no_bit(dtype):
  shardings = {"a": NamedSharding(mesh_2x4(), P("data", "fsdp")), "b": {"c": NamedSharding(mesh_2x4(), P("fsdp"))}}
  on_host = anchor.host_shardings(shardings)
  keys = iter(jax.random.split(jax.random.key(0), 4))
  params = jax.device_put(jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, dtype), tree(0.0)), shardings)
  ema_params = jax.device_put(jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), tree(0.0)), shardings)

  def step(params, ema_params, n):
    ema_params = anchor.update_anchor(params, ema_params, jnp.float32(0.7), n, 2)
    return ema_params, anchor.anchor_distance(params, ema_params)

  moved = jax.device_put(ema_params, on_host)
  assert all(sharding.memory_kind == "pinned_host" for sharding in jax.tree.leaves(on_host)), "else both would be donated the same arrays"
  update, update_on_host = (jax.jit(step, out_shardings=(layout, None), donate_argnums=1) for layout in (shardings, on_host))
  for n in (1, 2, 3):
    ema_params, distance = update(params, ema_params, n)
    moved, distance_on_host = update_on_host(params, moved, n)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moved)} == {"pinned_host"}
    found = anchor.on_device(moved)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(ema_params)):
      assert x.sharding == y.sharding
      np.testing.assert_array_equal(x, y)
    assert distance_on_host == distance
  assert all(x is y for x, y in zip(jax.tree.leaves(anchor.on_device(found)), jax.tree.leaves(found))), "nothing is copied twice"


def test_bf16_policy_keeps_a_float32_anchor(strict_dtypes):
  # 2 − 0.999¹⁰⁰⁰ = 1.6323. In bf16 the step of 0.001 is below half the spacing of 1/128 and the anchor would stay at 1.
  params, ema_params = tree(2.0, jnp.bfloat16), anchor.init_anchor(tree(1.0, jnp.bfloat16))
  ema_params = jax.jit(lambda ema: jax.lax.fori_loop(1, 1001, lambda n, ema: anchor.update_anchor(params, ema, 0.999, n, 1), ema))(
    ema_params
  )
  for leaf in jax.tree.leaves(ema_params):
    assert leaf.dtype == jnp.float32
    np.testing.assert_allclose(leaf, np.full(leaf.shape, 1.6323), atol=5e-5)


def test_period_counts_rl_steps_from_one(strict_dtypes):
  update = jax.jit(anchor.update_anchor)
  ema_params, moved = tree(0.0), []
  for step in range(1, 13):
    before, ema_params = ema_params, update(tree(1.0), ema_params, 0.9, step, 5)
    moved.append(bool(ema_params["b"]["c"][0] != before["b"]["c"][0]))
  assert [i + 1 for i, x in enumerate(moved) if x] == [5, 10]
  np.testing.assert_allclose(ema_params["a"], np.full((8, 4), 0.19), rtol=1e-5)


def test_the_ends_of_the_range(strict_dtypes):
  params, ema_params = tree(1 / 3), tree(0.7)
  copy = anchor.update_anchor(params, ema_params, 0.0, 4, 2)
  jax.tree.map(np.testing.assert_array_equal, copy, params)
  # Neither a decay of 1 nor a step between updates reads the policy, not even a broken one.
  broken = tree(np.nan)
  for decay, step in ((1.0, 4), (0.5, 3)):
    kept = anchor.update_anchor(broken, ema_params, decay, step, 2)
    jax.tree.map(np.testing.assert_array_equal, kept, ema_params)


def test_traced_settings_compile_once(strict_dtypes):
  traces = []

  @jax.jit
  def update(*args):
    traces.append(args)
    return anchor.update_anchor(*args)

  for decay, period, want in ((0.9, 1, 0.1), (0.5, 2, 0.5), (0.5, 4, 0.0), (1.0, 1, 0.0)):
    args = jnp.float32(decay), jnp.int32(2), jnp.int32(period)
    np.testing.assert_allclose(update(tree(1.0), tree(0.0), *args)["a"], np.full((8, 4), want), rtol=1e-5)
  assert len(traces) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("how", ["eager", "jitted, both out", "made inside jit", "sharded"])
def test_anchor_never_shares_memory_with_the_policy(strict_dtypes, dtype, how):
  params = tree(1.5, dtype)
  if how == "sharded":
    params = jax.device_put(params, NamedSharding(mesh_2x4(), P()))
  if how in ("eager", "sharded"):
    ema_params = anchor.init_anchor(params)
  elif how == "jitted, both out":
    params, ema_params = jax.jit(lambda p: (p, anchor.init_anchor(p)))(params)
  else:
    params, ema_params = jax.jit(lambda x: ((p := jax.tree.map(lambda y: y * 2, x)), anchor.init_anchor(p)))(tree(0.75, dtype))
  assert not set(pointers(params)) & set(pointers(ema_params))

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(state):
    # Weight decay on the policy, no anchor update at this step.
    params, ema_params = state
    return jax.tree.map(lambda p: p - p / 2, params), anchor.update_anchor(params, ema_params, 0.9, 1, 10)

  new_params, new_ema = train_step((params, ema_params))
  assert all(x.is_deleted() for x in jax.tree.leaves(params))
  for leaf, ema_leaf in zip(jax.tree.leaves(new_params), jax.tree.leaves(new_ema)):
    assert ema_leaf.dtype == jnp.float32
    np.testing.assert_array_equal(leaf, np.full(leaf.shape, 0.75))
    np.testing.assert_array_equal(ema_leaf, np.full(leaf.shape, 1.5))
  assert not set(pointers(new_params)) & set(pointers(new_ema))


def test_no_alias_even_when_the_update_copies(strict_dtypes):
  params, ema_params = tree(1.0), tree(0.0)
  update = jax.jit(lambda p, e: (p, anchor.update_anchor(p, e, 0.0, 1, 1)), donate_argnums=(0, 1))
  params, ema_params = update(params, ema_params)
  assert not set(pointers(params)) & set(pointers(ema_params))


def test_half_life():
  # 10·ln 2/−ln 0.9 and 10·ln 2/−ln 0.95.
  assert round(anchor.half_life(0.9, 10), 1) == 65.8
  assert round(anchor.half_life(0.95, 10), 1) == 135.1
  assert anchor.half_life(1.0, 10) == math.inf and anchor.half_life(0.0, 10) == 0.0
  # It is what the update does: η = ½ halves the gap each period.
  assert anchor.half_life(0.5, 3) == pytest.approx(3.0)


def test_distance(strict_dtypes):
  # 36 entries: ‖2 − 1.5‖/‖2‖ = ¼ whatever their number.
  distance = jax.jit(anchor.anchor_distance)(tree(2.0, jnp.bfloat16), tree(1.5))
  assert distance.dtype == jnp.float32 and distance.shape == ()
  np.testing.assert_allclose(distance, 0.25, rtol=1e-6)
  # Over all leaves together: (0, 3) against (4, 3).
  got = anchor.anchor_distance({"x": jnp.float32([4.0]), "y": jnp.float32([3.0])}, {"x": jnp.float32([0.0]), "y": jnp.float32([3.0])})
  np.testing.assert_allclose(got, 0.8, rtol=1e-6)


def gap_after(kind, x, decay, period, updates=4000):
  """|θ − θ_ema| of plain gradient descent on a KL of curvature λ, with x = αβλ and a start at distance 1."""
  theta, ema = 1.0, 0.0
  for n in range(1, updates + 1):
    before, theta = theta, theta - x * (theta - ema)
    if kind == "pre_update":
      ema = decay * ema + (1 - decay) * before
    elif kind == "post_update" or (kind == "periodic" and n % period == 0):
      ema = decay * ema + (1 - decay) * theta
    if abs(theta - ema) > 1e6:
      break
  return abs(theta - ema)


@pytest.mark.parametrize(
  "kind, decay, period, limit",
  [
    ("fixed", 0.9, 1, 2.0),
    ("pre_update", 0.9, 1, 1.9),
    ("pre_update", 0.5, 1, 1.5),
    ("post_update", 0.9, 1, 1 + 1 / 0.9),
    ("post_update", 0.5, 1, 3.0),
    ("periodic", 0.5, 1, 3.0),
    ("periodic", 0.9, 20, 1 + 0.9**-0.05),
    ("periodic", 0.25, 2, 3.0),
  ],
)
def test_stability_limits_hold_in_simulation(kind, decay, period, limit):
  assert anchor.stability_limit(kind, decay, period) == pytest.approx(limit, rel=1e-12)
  assert gap_after(kind, 0.99 * limit, decay, period) < 1e-3
  assert gap_after(kind, 1.01 * limit, decay, period) > 1e3


def test_a_hard_copy_is_always_stable():
  assert anchor.stability_limit("post_update", 0.0) == math.inf == anchor.stability_limit("periodic", 0.0, 5)
  assert gap_after("periodic", 5.0, 0.0, 5) == 0.0
  assert anchor.stability_limit("post_update", 5e-324) == math.inf


@pytest.mark.parametrize(
  "kl, factor",
  [
    (0.05, 1.0),  # on target
    (0.055, 1.01),  # 10 % above: 1 + 0.1 · 0.1
    (0.0475, 0.995),  # 5 % below
    (0.06, 1.02),  # 20 %: the bounds of the clip, and beyond
    (0.04, 0.98),
    (0.0601, 1.02),
    (5.0, 1.02),
    (0.0, 0.98),
    (-0.3, 0.98),  # a sampled KL can be negative
    (math.nan, 1.0),
    (math.inf, 1.0),
    (-math.inf, 1.0),
  ],
)
def test_adapted_kl_coef(kl, factor):
  assert anchor.adapted_kl_coef(0.3, kl, 0.05) == pytest.approx(0.3 * factor, rel=1e-12)
  adapted = anchor.adapted_kl_coef(np.float32(0.3), np.float32(kl), 0.05)
  assert type(adapted) is float and adapted == pytest.approx(0.3 * factor, rel=1e-6)


def test_gain_of_the_kl_coef():
  # Inside the clip 1 + 2 · 0.1, at its bounds 1 ± 2 · 0.2; a coefficient of 0 stays.
  assert anchor.adapted_kl_coef(0.5, 1.1, 1.0, gain=2.0) == pytest.approx(0.6)
  assert anchor.adapted_kl_coef(0.5, 3.0, 1.0, gain=2.0) == pytest.approx(0.7)
  assert anchor.adapted_kl_coef(0.5, 0.0, 1.0, gain=2.0) == pytest.approx(0.3)
  assert anchor.adapted_kl_coef(0.5, 0.0, 1.0, gain=4.999) > 0.0
  assert anchor.adapted_kl_coef(0.0, 3.0, 1.0) == 0.0


@pytest.mark.parametrize(
  "call, named",
  [
    (lambda: anchor.half_life(1.5, 10), "1.5"),
    (lambda: anchor.half_life(float("nan"), 10), "nan"),
    (lambda: anchor.half_life(0.9, 0), "0"),
    (lambda: anchor.stability_limit("fixed", -0.1), "-0.1"),
    (lambda: anchor.stability_limit("periodic", 0.9, 0), "0"),
    (lambda: anchor.stability_limit("ema", 0.9), "pre_update"),
    (lambda: anchor.adapted_kl_coef(0.1, 0.1, 0.0), "target is 0.0"),
    (lambda: anchor.adapted_kl_coef(0.1, math.nan, -1.0), "target is -1.0"),
    (lambda: anchor.adapted_kl_coef(0.1, 0.1, math.inf), "target is inf"),
    (lambda: anchor.adapted_kl_coef(0.1, 0.1, math.nan), "target is nan"),
    (lambda: anchor.adapted_kl_coef(0.1, 0.1, 1.0, gain=0.0), "gain is 0.0"),
    (lambda: anchor.adapted_kl_coef(0.1, 0.1, 1.0, gain=5.0), "gain is 5.0"),
    (lambda: anchor.update_anchor(tree(1.0), tree(0.0), 1.5, 1, 1), "1.5"),
    (lambda: anchor.update_anchor(tree(1.0), tree(0.0), float("nan"), 1, 1), "nan"),
    (lambda: anchor.update_anchor(tree(1.0), {**tree(0.0), "b": {"c": jnp.zeros(4, jnp.bfloat16)}}, 0.9, 1, 1), "'c'.*bfloat16.*float32"),
    (lambda: jax.jit(anchor.update_anchor)(tree(1.0), tree(0.0, jnp.bfloat16), 0.9, 1, 1), "bfloat16"),
  ],
)
def test_bad_settings_are_named(call, named):
  with pytest.raises(ValueError, match=named):
    call()
