"""The sampled and exact estimators, against enumeration in float64 and at the numbers and edges of float32."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import kl, topk_kl
from tests import kl_enumeration as enum

V = 11
NO_IDS = np.zeros((0,), int)


def logits_triple(seed=0, distance=1.2):
  """Policy, anchor and another sampling policy, float64 [V]."""
  rng = np.random.default_rng(seed)
  logits = 2.0 * rng.normal(size=V)
  return logits, logits + distance * rng.normal(size=V), logits + 0.5 * rng.normal(size=V)


def f32(*xs):
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in xs)
  return arrays if len(arrays) > 1 else arrays[0]


@pytest.mark.usefixtures("x64", "strict_dtypes")
class EnumerationTest(chex.TestCase):
  """Expected value and gradient of each estimator, on- and off-policy."""

  @chex.variants(with_jit=True, without_jit=True)
  def test_sampled(self):
    # estimator, KL that the value estimates, KL whose gradient it has in expectation
    cases = [
      (kl.k1, "reverse", None),
      (kl.k2, None, "reverse"),
      (kl.k3, "reverse", "forward"),
      (kl.k3pp, "reverse", "reverse"),
      (kl.k4, "reverse", "reverse"),
      (kl.k5, "forward", "forward"),
    ]
    logits, ref_logits, other = logits_triple()
    exact = {"reverse": enum.reverse_kl(logits, ref_logits), "forward": enum.forward_kl(logits, ref_logits)}
    # k2 estimates E[u²]/2, which is no KL.
    u = jax.nn.log_softmax(logits) - jax.nn.log_softmax(ref_logits)
    half_square = jnp.sum(jax.nn.softmax(logits) * u**2) / 2
    assert abs(half_square / exact["reverse"][0] - 1) > 0.02

    enumerate_all = self.variant(functools.partial(enum.expectations, [enum.sampled(fn) for fn, _, _ in cases]))
    values, gradients = enumerate_all(*map(jnp.asarray, (logits, ref_logits, np.stack([logits, other]), NO_IDS)))
    for (fn, value_of, gradient_of), on_and_off_values, on_and_off_gradients in zip(cases, values, gradients):
      want_value = exact[value_of][0] if value_of else half_square
      want_gradient = exact[gradient_of][1] if gradient_of else np.zeros(V)
      for policy, value, gradient in zip(("on", "off"), on_and_off_values, on_and_off_gradients):
        where = f"{fn.__name__} {policy}-policy"
        np.testing.assert_allclose(value, want_value, rtol=1e-9, err_msg=where)
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-9, atol=1e-13, err_msg=where)

  @chex.variants(with_jit=True, without_jit=True)
  def test_exact(self):
    logits, ref_logits, _ = logits_triple()
    for fn, by_hand in ((kl.exact_reverse_kl, enum.reverse_kl), (kl.exact_forward_kl, enum.forward_kl)):
      value, gradient = self.variant(jax.value_and_grad(fn))(jnp.asarray(logits), jnp.asarray(ref_logits))
      want_value, want_gradient = by_hand(logits, ref_logits)
      np.testing.assert_allclose(value, want_value, rtol=1e-12)
      np.testing.assert_allclose(gradient, want_gradient, rtol=1e-9, atol=1e-14)

  def test_the_two_directions_differ(self):
    logits, ref_logits, _ = logits_triple()
    assert abs(enum.reverse_kl(logits, ref_logits)[0] - enum.forward_kl(logits, ref_logits)[0]) > 0.005


# By hand: u = −1 gives ½ and e − 2; u = +1 gives ½ and 1/e.
@pytest.mark.parametrize("logp, ref_logp, want", [(-2.0, -1.0, (-1.0, 0.5, 0.718282)), (-1.0, -2.0, (1.0, 0.5, 0.367879))])
def test_direction_and_sign(strict_dtypes, logp, ref_logp, want):
  args = f32(logp, ref_logp)
  got = [fn(*args) for fn in (kl.k1, kl.k2, kl.k3)]
  assert all(x.dtype == jnp.float32 for x in got)
  np.testing.assert_allclose(got, want, rtol=2e-6)
  np.testing.assert_allclose([kl.k3pp(*args), kl.k4(*args)], [want[2], want[0]], rtol=2e-6)
  # k5 = w·log w
  u = want[0]
  np.testing.assert_allclose(kl.k5(*args), -u * np.exp(-u), rtol=2e-6)


def test_single_token_gradients(strict_dtypes):
  # d/dlogp at u = 0.7, w = e^−0.7: k1 1; k2 u; k3 1 − w; k3pp f(−u) + 1 − w = u; k4 u; k5 1 − w.
  logp, ref_logp = f32(-1.3, -2.0)
  w = np.exp(-0.7)
  for fn, want in ((kl.k1, 1.0), (kl.k2, 0.7), (kl.k3, 1 - w), (kl.k3pp, 0.7), (kl.k4, 0.7), (kl.k5, 1 - w)):
    np.testing.assert_allclose(jax.grad(fn)(logp, ref_logp), want, rtol=3e-6, err_msg=fn.__name__)


def test_small_log_ratios_keep_their_digits(strict_dtypes):
  for sign in (1.0, -1.0):
    u = f32(sign * 1e-4)
    for fn in (kl.k2, kl.k3, kl.k3pp):
      np.testing.assert_allclose(fn(u, f32(0.0)), 5.0e-9, rtol=0.01, err_msg=fn.__name__)
  u = jnp.linspace(-2e-3, 2e-3, 4001, dtype=jnp.float32)
  zero = jnp.zeros_like(u)
  for fn in (kl.k3, kl.k3pp):
    value = jax.jit(fn)(u, zero)
    assert (value >= 0).all()
    x = np.asarray(u, np.float64)
    np.testing.assert_allclose(value, x**2 / 2 - x**3 / 6 + x**4 / 24, rtol=1e-6, atol=1e-37)
    want = -np.expm1(-x) if fn is kl.k3 else x
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(fn)))(u, zero), want, rtol=1e-6, atol=1e-12)
  # The form written everywhere else does not survive the same sweep.
  assert (jnp.exp(-u) - 1 + u < 0).sum() > 100


def test_excess_at_all_sizes(strict_dtypes):
  x = np.concatenate([s * np.logspace(-15, 1.9, 400) for s in (1, -1)])
  got = jax.jit(topk_kl.excess)(jnp.asarray(x, jnp.float32))
  x = np.asarray(jnp.asarray(x, jnp.float32), np.float64)
  series = sum(x**n / np.prod(np.arange(1.0, n + 1)) for n in range(2, 16))
  want = np.where(np.abs(x) < 0.3, series, np.expm1(x) - x)
  np.testing.assert_allclose(got, want, rtol=2e-6)
  np.testing.assert_array_equal(topk_kl.excess(f32([0.0, np.inf, -np.inf])), [0.0, np.inf, np.inf])
  np.testing.assert_allclose(jax.grad(topk_kl.excess)(f32(1e-6)), 1e-6, rtol=1e-6)
  np.testing.assert_allclose(jax.grad(jax.grad(topk_kl.excess))(f32(0.5)), np.exp(0.5), rtol=1e-6)


# u = +1e3: k3 = e⁻²⁰ − 1 + 20; u = −1e3: k3 = e²⁰ − 1 − 20; k5 = −u·e⁻ᵘ at ±20.
@pytest.mark.parametrize("u, k3_value, k5_value", [(1e3, 19.0, -20 * np.exp(-20.0)), (-1e3, 4.8516517e8, 20 * np.exp(20.0))])
@pytest.mark.parametrize("through_ref", [False, True])
def test_huge_log_ratios(strict_dtypes, u, k3_value, k5_value, through_ref):
  args = f32(0.0, -u) if through_ref else f32(u, 0.0)
  np.testing.assert_allclose([kl.k1(*args), kl.k2(*args), kl.k4(*args)], [u, 5e5, u])
  np.testing.assert_allclose([jax.grad(fn)(*args) for fn in (kl.k1, kl.k2, kl.k4)], [1.0, u, u])
  np.testing.assert_allclose([kl.k3(*args), kl.k3pp(*args)], [k3_value] * 2, rtol=1e-6)
  np.testing.assert_allclose(kl.k5(*args), k5_value, rtol=2e-6)
  for fn in (kl.k3, kl.k3pp, kl.k5):
    assert jax.grad(fn)(*args) == 0.0


def test_without_the_clamp(strict_dtypes):
  big, zero = f32(1e3, 0.0)
  for fn in (kl.k3, kl.k3pp):
    np.testing.assert_allclose(fn(big, zero, max_log_ratio=None), 999.0)
    assert fn(-big, zero, max_log_ratio=None) == jnp.inf
  assert kl.k5(big, zero, max_log_ratio=None) == 0.0
  # Between 20 and 88 float32 still holds the number.
  np.testing.assert_allclose(kl.k3(f32(-30.0), zero, max_log_ratio=None), np.exp(30.0), rtol=1e-5)
  np.testing.assert_allclose(jax.grad(functools.partial(kl.k3pp, max_log_ratio=None))(f32(30.0), zero), 30.0, rtol=1e-6)
  # At the bound itself nothing is held back.
  np.testing.assert_allclose(jax.grad(kl.k3pp)(f32(20.0), zero), 20.0, rtol=1e-6)
  np.testing.assert_allclose(kl.k3(f32(5.0), zero, max_log_ratio=2.0), np.expm1(-2.0) + 2.0, rtol=1e-6)


def test_impossible_tokens(strict_dtypes):
  out, in_ = f32(-np.inf, -1.0)
  for fn in (kl.k1, kl.k2, kl.k3, kl.k3pp, kl.k4, kl.k5):
    value, gradient = jax.value_and_grad(fn)(out, out)
    assert value == 0.0 and jnp.isfinite(gradient), fn.__name__
  for fn in (kl.k3, kl.k3pp, kl.k5):
    for pair in ((out, in_), (in_, out)):
      value, gradient = jax.value_and_grad(fn)(*pair)
      assert jnp.isfinite(value) and gradient == 0.0, fn.__name__
  assert (kl.k1(in_, out), kl.k1(out, in_), kl.k4(in_, out)) == (jnp.inf, -jnp.inf, jnp.inf)
  assert kl.k5(in_, out, max_log_ratio=None) == 0.0
  assert kl.k3(in_, out, max_log_ratio=None) == jnp.inf


def test_exact_with_zero_probabilities(strict_dtypes):
  inf = np.inf
  # Both exclude token 2: the KL of (¼, ¾) and (½, ½).
  logits, ref_logits = f32([0.0, np.log(3.0), -inf], [0.0, 0.0, -inf])
  want = {kl.exact_reverse_kl: 0.25 * np.log(0.5) + 0.75 * np.log(1.5), kl.exact_forward_kl: -0.5 * np.log(0.75)}
  for fn, value in want.items():
    got, gradient = jax.value_and_grad(fn)(logits, ref_logits)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert jnp.isfinite(gradient).all() and gradient[2] == 0.0
  # Only one excludes token 2: infinite one way, and −log of the kept mass the other way.
  full = f32([0.0, 0.0, 0.0])
  cut = f32([0.0, 0.0, -inf])
  for first, second, infinite in ((full, cut, kl.exact_reverse_kl), (cut, full, kl.exact_forward_kl)):
    got, gradient = jax.value_and_grad(infinite)(first, second)
    assert got == jnp.inf and jnp.isfinite(gradient).all()
  for first, second, finite in ((cut, full, kl.exact_reverse_kl), (full, cut, kl.exact_forward_kl)):
    got, gradient = jax.value_and_grad(finite)(first, second)
    np.testing.assert_allclose(got, np.log(1.5), rtol=1e-6)
    assert jnp.isfinite(gradient).all()
  # (⅓, ⅓, ⅓) against (½, ½, 0): forward gradient π − ρ.
  np.testing.assert_allclose(jax.grad(kl.exact_forward_kl)(full, cut), [-1 / 6, -1 / 6, 1 / 3], rtol=1e-5)


def test_exact_is_never_negative_and_keeps_tiny_values(strict_dtypes):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(64, 500)) * 2
  ref_logits = logits + np.logspace(-6, 0, 64)[:, None] * rng.normal(size=(64, 500))
  # float32 logits are rounded once, before both the float64 and the float32 computation.
  logits, ref_logits = np.float32(logits), np.float32(ref_logits)
  for fn, by_hand in ((kl.exact_reverse_kl, enum.reverse_kl), (kl.exact_forward_kl, enum.forward_kl)):
    got = jax.jit(fn)(logits, ref_logits)
    want = np.array([by_hand(a, b)[0] for a, b in zip(logits.astype(np.float64), ref_logits.astype(np.float64))])
    assert (got >= 0).all()
    seen = want > 1e-10
    assert seen.sum() > 40
    np.testing.assert_allclose(got[seen], want[seen], rtol=2e-2)
    np.testing.assert_allclose(got[want > 1e-6], want[want > 1e-6], rtol=1e-3)


def test_the_anchor_gets_no_gradient(strict_dtypes):
  logp, ref_logp = f32([-1.0, -2.0], [-1.5, -0.5])
  for fn in (kl.k1, kl.k2, kl.k3, kl.k3pp, kl.k4, kl.k5):
    assert (jax.grad(lambda r, fn=fn: fn(logp, r).sum())(ref_logp) == 0).all(), fn.__name__
    # Traced through the policy as well: only the first argument's share arrives.
    both = jax.grad(lambda x, fn=fn: fn(x, 0.5 * x).sum())(logp)
    np.testing.assert_array_equal(both, jax.grad(lambda x, fn=fn: fn(x, 0.5 * logp).sum())(logp))
  for fn in (kl.exact_reverse_kl, kl.exact_forward_kl):
    assert (jax.grad(fn, argnums=1)(logp, ref_logp) == 0).all()


def test_importance_weight(strict_dtypes):
  logp, sampling_logp = f32([-1.0, -1.0, -3.0], [-1.0, -2.0, -1.0])
  np.testing.assert_allclose(kl.importance_weight(logp, sampling_logp), np.exp([0.0, 1.0, -2.0]), rtol=1e-6)
  np.testing.assert_allclose(kl.importance_weight(logp, sampling_logp, low=0.5), [1.0, np.e, 0.5], rtol=1e-6)
  np.testing.assert_allclose(kl.importance_weight(logp, sampling_logp, 0.5, 2.0), [1.0, 2.0, 0.5], rtol=1e-6)
  assert (jax.grad(lambda x: kl.importance_weight(x, sampling_logp).sum())(logp) == 0).all()
  # The log-ratio is held at ±20 before low and high; the token stays.
  far = f32([1e3, -1e3])
  np.testing.assert_allclose(kl.importance_weight(far, jnp.zeros_like(far)), np.exp([20.0, -20.0]), rtol=1e-5)
  np.testing.assert_allclose(kl.importance_weight(far, jnp.zeros_like(far), high=3.0), [3.0, np.exp(-20.0)], rtol=1e-5)
  np.testing.assert_allclose(kl.importance_weight(far, jnp.zeros_like(far), max_log_ratio=2.0), np.exp([2.0, -2.0]), rtol=1e-6)
  assert kl.importance_weight(far[0], f32(0.0), max_log_ratio=None) == jnp.inf


def test_batched_equals_one_by_one(strict_dtypes):
  rng = np.random.default_rng(1)
  logp, ref_logp = f32(-rng.exponential(size=(2, 3)), -rng.exponential(size=(2, 3)))
  for fn in (kl.k1, kl.k2, kl.k3, kl.k3pp, kl.k4, kl.k5, kl.importance_weight):
    got = jax.jit(fn)(logp, ref_logp)
    chex.assert_shape(got, (2, 3))
    np.testing.assert_allclose(got, jax.jit(jax.vmap(jax.vmap(fn)))(logp, ref_logp), rtol=1e-6)
    np.testing.assert_allclose(got[1, 2], fn(logp[1, 2], ref_logp[1, 2]), rtol=1e-6)
  logits, ref_logits = f32(rng.normal(size=(2, 3, V)), rng.normal(size=(2, 3, V)))
  for fn in (kl.exact_reverse_kl, kl.exact_forward_kl):
    got = jax.jit(fn)(logits, ref_logits)
    chex.assert_shape(got, (2, 3))
    np.testing.assert_allclose(got, jax.jit(jax.vmap(jax.vmap(fn)))(logits, ref_logits), rtol=1e-6)


def test_every_public_name_is_importable():
  assert all(callable(getattr(kl, name)) and getattr(kl, name).__doc__ for name in kl.__all__)
  assert len(kl.__all__) == 17
