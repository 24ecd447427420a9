"""The top-k estimators, against enumeration in float64 and at the edges of float32."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from emapg_jax import kl
from tests import kl_enumeration as enum

V = 11
BY_HAND = {"reverse": enum.reverse_kl, "forward": enum.forward_kl}
CHAIN = {"reverse": kl.topk_reverse_kl, "forward": kl.topk_forward_kl}
SCORE = {"reverse": kl.score_topk_reverse_kl, "forward": kl.score_topk_forward_kl}
PUBLISHED = {"reverse": kl.published_topk_reverse_kl, "forward": kl.published_topk_forward_kl}
TRUNCATED = {"reverse": kl.truncated_reverse_kl, "forward": kl.truncated_forward_kl}
FORMS = ("chain", "score", "published")
DIRECTIONS = pytest.mark.parametrize("direction", ["reverse", "forward"])


def logits_triple(seed=0, distance=1.2):
  """Policy, anchor and another sampling policy, float64 [V]."""
  rng = np.random.default_rng(seed)
  logits = 2.0 * rng.normal(size=V)
  return logits, logits + distance * rng.normal(size=V), logits + 0.5 * rng.normal(size=V)


def estimators(direction):
  return [
    enum.topk(CHAIN[direction]),
    enum.topk_without_mass(SCORE[direction]),
    enum.topk_without_mass(PUBLISHED[direction]),
  ]


def f32(*xs):
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in xs)
  return arrays if len(arrays) > 1 else arrays[0]


@pytest.mark.usefixtures("x64", "strict_dtypes")
class EnumerationTest(chex.TestCase):
  """Expected value and gradient of every form, on- and off-policy, in both directions."""

  @chex.variants(with_jit=True)
  @parameterized.parameters(0, 1, 8, V - 1, V)
  def test_value_and_gradient(self, k):
    logits = logits_triple()[0]
    self.check_value_and_gradient(np.argsort(-logits)[:k])

  @chex.variants(without_jit=True)
  def test_any_head_will_do(self):
    self.check_value_and_gradient(np.random.default_rng(3).permutation(V)[:5])

  def check_value_and_gradient(self, ids):
    logits, ref_logits, other = logits_triple()
    k, ids = len(ids), jnp.asarray(ids, jnp.int32)

    forms = [(form, direction, e) for direction in BY_HAND for form, e in zip(FORMS, estimators(direction))]
    enumerate_all = self.variant(functools.partial(enum.expectations, [e for _, _, e in forms]))
    values, gradients = enumerate_all(*map(jnp.asarray, (logits, ref_logits, np.stack([logits, other]), ids)))
    bias = {"reverse": enum.mass_gradient(logits, ids), "forward": -enum.mass_gradient(logits, ids)}
    if 0 < k < V:
      assert np.abs(bias["reverse"]).max() > 1e-4
    for (form, direction, _), on_and_off_values, on_and_off_gradients in zip(forms, values, gradients):
      want_value, want_gradient = BY_HAND[direction](logits, ref_logits)
      if form == "published":
        want_gradient = want_gradient + bias[direction]
      for policy, value, gradient in zip(("on", "off"), on_and_off_values, on_and_off_gradients):
        where = f"{form} {direction} {policy}-policy"
        np.testing.assert_allclose(value, want_value, rtol=1e-9, err_msg=where)
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-9, atol=1e-13, err_msg=where)

  def test_identities(self):
    logits, ref_logits, _ = (jnp.asarray(x) for x in logits_triple())
    pos = functools.partial(jax.jit(enum.all_positions), logits, ref_logits)
    order = jnp.argsort(-logits).astype(jnp.int32)
    empty, all_but_one, full = pos(order[:0]), pos(order[: V - 1]), pos(order)
    exact = {"reverse": kl.exact_reverse_kl, "forward": kl.exact_forward_kl}
    for direction in BY_HAND:
      chain = jax.jit(enum.topk(CHAIN[direction]))
      for case in (all_but_one, full):
        head, tail = chain(case)
        np.testing.assert_allclose(head, jnp.full(V, exact[direction](logits, ref_logits)), rtol=1e-12)
        np.testing.assert_allclose(tail, jnp.zeros(V), atol=1e-24)
    head, tail = jax.jit(enum.topk(CHAIN["reverse"]))(empty)
    np.testing.assert_allclose(head, jnp.zeros(V), atol=1e-24)
    np.testing.assert_allclose(tail, kl.k3pp(empty.logp, empty.ref_logp), rtol=1e-12)
    # The other forms at K = 0 are k4 and k5.
    for direction, fn in (("reverse", kl.k4), ("forward", kl.k5)):
      for form in (SCORE, PUBLISHED):
        head, tail = enum.topk_without_mass(form[direction])(empty)
        np.testing.assert_array_equal(head, jnp.zeros(V))
        np.testing.assert_allclose(tail, fn(empty.logp, empty.ref_logp), rtol=1e-12)

  def test_chain_rule_by_hand(self):
    # π = (½, ¼, ¼), ρ = (¼, ½, ¼), q = {0}, p = 1: u = −ln 2, Δ = ln(½/¾); Δ − u = ln(4/3).
    logits, ref_logits = jnp.log(jnp.asarray([0.5, 0.25, 0.25])), jnp.log(jnp.asarray([0.25, 0.5, 0.25]))
    pos = jax.jit(enum.position)(logits, ref_logits, jnp.asarray(1), jnp.asarray([0]))
    head, tail = jax.jit(enum.topk(kl.topk_reverse_kl))(pos)
    np.testing.assert_allclose(head, 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-12)
    np.testing.assert_allclose(tail, 1 / 3 - np.log(4 / 3), rtol=1e-12)
    head, tail = jax.jit(enum.topk(kl.topk_forward_kl))(pos)
    np.testing.assert_allclose(head, 0.25 * np.log(0.5) + 0.75 * np.log(1.5), rtol=1e-12)
    np.testing.assert_allclose(tail, 2 * (3 / 4 - 1 + np.log(4 / 3)), rtol=1e-12)

  @parameterized.parameters("reverse", "forward")
  def test_truncated_is_the_published_head(self, direction):
    logits, ref_logits, _ = (jnp.asarray(x) for x in logits_triple())
    pos = jax.jit(enum.all_positions)(logits, ref_logits, jnp.arange(3))
    got = TRUNCATED[direction](pos.logp_topk, pos.ref_logp_topk)
    np.testing.assert_array_equal(got, enum.topk_without_mass(PUBLISHED[direction])(pos)[0])
    a, b = (logits, ref_logits) if direction == "reverse" else (ref_logits, logits)
    p, logs = jax.nn.softmax(a)[:3], (jax.nn.log_softmax(a) - jax.nn.log_softmax(b))[:3]
    np.testing.assert_allclose(got, jnp.full(V, jnp.sum(p * logs)), rtol=1e-12)
    # A truncated sum is no KL: this head is all on one side.
    low, high = jnp.asarray([-3.0]), jnp.asarray([-2.0])
    assert (kl.truncated_reverse_kl(low, high) if direction == "reverse" else kl.truncated_forward_kl(high, low)) < 0


@functools.partial(jax.jit, static_argnums=(2,))
def chain_heads_and_tails(logits, ref_logits, k):
  ids = jax.lax.top_k(logits, k)[1]
  pos = enum.all_positions(logits, ref_logits, ids)
  return {d: enum.topk(CHAIN[d])(pos) for d in CHAIN}, {d: enum.topk_without_mass(PUBLISHED[d])(pos) for d in CHAIN}


@settings(max_examples=150, deadline=None)
@given(
  seed=st.integers(0, 2**32 - 1),
  k=st.sampled_from([0, 4, 15]),
  scale=st.floats(0.0, 12.0),
  log10_distance=st.floats(-8.0, 1.5),
  holes=st.integers(0, 3),
)
def test_chain_rule_is_never_negative(seed, k, scale, log10_distance, holes):
  rng = np.random.default_rng(seed)
  logits = scale * rng.normal(size=16)
  ref_logits = logits + 10.0**log10_distance * rng.normal(size=16)
  hidden = rng.permutation(16)[:holes]
  logits[hidden] = ref_logits[hidden] = -np.inf
  with jax.numpy_dtype_promotion("strict"):
    heads_and_tails, _ = chain_heads_and_tails(*f32(logits, ref_logits), k)
  for direction, (head, tail) in heads_and_tails.items():
    assert jnp.isfinite(head).all() and (head >= 0).all(), direction
    assert jnp.isfinite(tail).all() and (tail >= 0).all(), direction


def test_tiny_heads_keep_their_digits(strict_dtypes):
  rng = np.random.default_rng(0)
  negative = 0
  for _ in range(20):
    # float32 logits are rounded once, before both the float32 and the float64 computation.
    logits = np.float32(2 * rng.normal(size=64))
    ref_logits = np.float32(logits + 3e-4 * rng.normal(size=64))
    chain, published = chain_heads_and_tails(logits, ref_logits, 8)
    with jax.enable_x64(True):
      want = chain_heads_and_tails(jnp.asarray(logits, float), jnp.asarray(ref_logits, float), 8)[0]
    for direction in CHAIN:
      exact = float(want[direction][0][0])
      assert 1e-10 < exact < 1e-6
      np.testing.assert_allclose(chain[direction][0][0], exact, rtol=0.02)
    negative += int(published["reverse"][0][0] < 0)
  # The plain sum carries first-order terms and takes either sign.
  assert 2 <= negative <= 18


def one_token(u, delta=0.0):
  """A tail token with log-ratio u, head (½), tails ½ and ½·e^−delta; float32."""
  half = np.log(0.5)
  return dict(logp_topk=f32([half]), ref_logp_topk=f32([half]), log_tail=f32(half), ref_log_tail=f32(half - delta), logp=f32(-3.0),
    ref_logp=f32(-3.0 - u), in_topk=jnp.asarray(False))  # fmt: skip


@functools.partial(jax.jit, static_argnames=("fn", "max_log_ratio"))
def tail_and_gradient(fn, args, max_log_ratio=20.0):
  """The tail, and its gradient wrt (logp_topk, log_tail, logp)."""
  taken = {name: args[name] for name in inspect.signature(fn).parameters if name in args}

  def tail(logp_topk, log_tail, logp):
    moved = {"logp_topk": logp_topk, "log_tail": log_tail, "logp": logp}
    return fn(**taken | {name: x for name, x in moved.items() if name in taken}, max_log_ratio=max_log_ratio)[1]

  return jax.value_and_grad(tail, argnums=(0, 1, 2))(args["logp_topk"], args["log_tail"], args["logp"])


@pytest.mark.parametrize("u", [1e-4, -1e-4])
def test_small_log_ratios(strict_dtypes, u):
  # f(±1e-4) = 5.0e-9, and so does e^∓1e-4·f(±1e-4); the derivative wrt logp is u in both directions.
  for direction, form in CHAIN.items():
    tail, gradient = tail_and_gradient(form, one_token(u))
    # At −3 a float32 log-prob is 2.4e-7 apart from the next: the log-ratio itself is only known to 0.2 %.
    np.testing.assert_allclose(tail, 5.0e-9, rtol=0.01, err_msg=direction)
    np.testing.assert_allclose(gradient[2], u, rtol=0.01, err_msg=direction)
    np.testing.assert_allclose(gradient[1], -u, rtol=0.01, err_msg=direction)


# At Δ = 0 by hand. Reverse: f(∓20), k4: ±20. Forward: e^−20·f(20) = 1 − 21·e^−20 and e²⁰·f(−20); k5: ∓20·e^∓20.
@pytest.mark.parametrize(
  "u, want",
  [
    (1e3, {kl.topk_reverse_kl: 19.0, kl.topk_forward_kl: 1.0, "reverse": 20.0, "forward": -20 * np.exp(-20.0)}),
    (-1e3, {kl.topk_reverse_kl: 4.8516517e8, kl.topk_forward_kl: 19 * np.exp(20.0), "reverse": -20.0, "forward": 20 * np.exp(20.0)}),
  ],
)
def test_huge_log_ratios(strict_dtypes, u, want):
  for form in CHAIN.values():
    tail, gradient = tail_and_gradient(form, one_token(u))
    np.testing.assert_allclose(tail, want[form], rtol=1e-5)
    assert all((g == 0).all() for g in gradient)
  for direction in BY_HAND:
    for form in (SCORE[direction], PUBLISHED[direction]):
      tail, gradient = tail_and_gradient(form, one_token(u))
      np.testing.assert_allclose(tail, want[direction], rtol=1e-5)
      assert gradient[2] == 0


def test_without_the_clamp(strict_dtypes):
  np.testing.assert_allclose(tail_and_gradient(kl.topk_reverse_kl, one_token(1e3), max_log_ratio=None)[0], 999.0)
  # w·f(u) tends to 1 as w·eᵘ does; the factors alone are 0 and inf.
  tail, gradient = tail_and_gradient(kl.topk_forward_kl, one_token(1e3), max_log_ratio=None)
  np.testing.assert_allclose(tail, 1.0)
  np.testing.assert_allclose(gradient[1:], [-1.0, 1.0])
  for form in (SCORE["reverse"], PUBLISHED["reverse"]):
    tail, gradient = tail_and_gradient(form, one_token(1e3), max_log_ratio=None)
    assert tail == gradient[2] == 1e3
  for form in (SCORE["forward"], PUBLISHED["forward"]):
    tail, gradient = tail_and_gradient(form, one_token(1e3), max_log_ratio=None)
    assert tail == 0 and gradient[2] == 1
  tail, gradient = tail_and_gradient(kl.topk_reverse_kl, one_token(3.0), max_log_ratio=2.0)
  np.testing.assert_allclose(tail, 1 + np.exp(-2), rtol=1e-6)
  assert gradient[2] == 0
  # The chain rule looks at the log-ratio inside the tail: the tail's own is exact in the head.
  np.testing.assert_allclose(tail_and_gradient(kl.topk_reverse_kl, one_token(25.0, delta=24.0))[0], np.exp(-1), rtol=1e-5)
  # Forward weighs it by w, which is held at e⁻²⁰: f(1) of it, and no gradient from either factor.
  tail, gradient = tail_and_gradient(kl.topk_forward_kl, one_token(25.0, delta=24.0))
  np.testing.assert_allclose(tail, np.exp(-20) * (np.e - 2), rtol=1e-5)
  assert all((g == 0).all() for g in gradient)


@DIRECTIONS
def test_excluded_by_both(strict_dtypes, direction):
  """Padded ids, in the head and in the tail: as if they were not there, gradients included."""
  triple = logits_triple()
  want_value, want_gradient = BY_HAND[direction](*triple[:2])
  padded = f32(*(np.append(x, [-np.inf] * 3) for x in triple))
  sign = 1 if direction == "reverse" else -1
  for ids in ([0, V, 1, V + 1], range(V + 2)):
    bias = sign * enum.mass_gradient(triple[0], [i for i in ids if i < V])
    enumerate_all = jax.jit(functools.partial(enum.expectations, estimators(direction)))
    values, gradients = enumerate_all(*padded[:2], jnp.stack([padded[0], padded[2]]), jnp.asarray(list(ids), jnp.int32))
    np.testing.assert_allclose(values, np.full((3, 2), want_value), rtol=1e-5)
    for form, gradient in zip(FORMS, gradients):
      want = want_gradient + bias if form == "published" else want_gradient
      np.testing.assert_allclose(gradient[:, :V], np.stack([want] * 2), rtol=1e-4, atol=1e-6, err_msg=form)
      np.testing.assert_array_equal(gradient[:, V:], np.zeros((2, 3)))


@functools.partial(jax.jit, static_argnames="direction")
def heads_tails_gradients(direction, logits, ref_logits):
  """Of each form, with the first three ids as head."""

  def totals(logits):
    pos = enum.all_positions(logits, ref_logits, jnp.arange(3))
    heads, tails = (jnp.stack(x) for x in zip(*(e(pos) for e in estimators(direction))))
    return jnp.sum(heads + tails, axis=-1), (heads, tails)

  gradients, (heads, tails) = jax.jacrev(totals, has_aux=True)(logits)
  return list(zip(heads, tails, gradients))


@DIRECTIONS
@pytest.mark.parametrize("where", ["head", "tail token", "whole tail"])
@pytest.mark.parametrize("excluded_by", ["policy", "anchor"])
def test_excluded_by_one(strict_dtypes, direction, where, excluded_by):
  """Mass that the other side cannot have makes the KL +inf; everything else, and every gradient, stays finite."""
  cut = np.log([0.3, 0.3, 0.2, 0.1, 0.1])
  cut[{"head": [0], "tail token": [4], "whole tail": [3, 4]}[where]] = -np.inf
  full = np.log([0.2, 0.3, 0.2, 0.2, 0.1])
  logits, ref_logits = f32(cut, full) if excluded_by == "policy" else f32(full, cut)
  # Reverse is infinite where the anchor excludes, forward where the policy does.
  infinite = (direction == "reverse") == (excluded_by == "anchor")
  results = heads_tails_gradients(direction, logits, ref_logits)
  for form, (head, tail, gradient) in zip(FORMS, results):
    # Only the chain rule knows the mass of the tail; a single excluded tail token is met by sampling alone, at the clamped value.
    seen = where == "head" or (where == "whole tail" and form == "chain")
    np.testing.assert_array_equal(head == jnp.inf, np.full(5, infinite and seen), err_msg=form)
    assert not jnp.isnan(head).any() and jnp.isfinite(tail).all() and jnp.isfinite(gradient).all(), form
  head, tail, _ = results[0]
  if where == "whole tail":
    np.testing.assert_array_equal(tail, np.zeros(5))
  if where != "tail token" and not infinite:
    first, second = (logits, ref_logits) if direction == "reverse" else (ref_logits, logits)
    mean = jnp.sum(jax.nn.softmax(logits) * (head + tail))
    np.testing.assert_allclose(mean, kl.exact_reverse_kl(first, second), rtol=1e-5)


@DIRECTIONS
def test_tail_mass_exactly_zero(strict_dtypes, direction):
  """A head that holds everything: the tail adds nothing, and −inf never turns into a NaN gradient."""
  logp_topk, ref_logp_topk = f32(np.log([0.25, 0.75]), np.log([0.5, 0.5]))
  nothing = f32(-np.inf)

  def loss(logp_topk, log_tail, logp, in_topk):
    head, tail = CHAIN[direction](logp_topk, ref_logp_topk, log_tail, nothing, logp, logp_topk[0], in_topk)
    return head + tail, (head, tail)

  loss_and_gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

  for logp, in_topk in ((logp_topk[0], True), (nothing, False), (f32(-3.0), False), (f32(np.nan), True)):
    (_, (head, tail)), gradients = loss_and_gradients(logp_topk, nothing, logp, jnp.asarray(in_topk))
    np.testing.assert_allclose(head, BY_HAND[direction](logp_topk, ref_logp_topk)[0], rtol=1e-5)
    assert tail == 0 and gradients[1] == 0 and gradients[2] == 0
    assert all(jnp.isfinite(g).all() for g in gradients)


@DIRECTIONS
def test_the_token_in_the_head_is_never_read(strict_dtypes, direction):
  args = one_token(0.5) | {"in_topk": jnp.asarray(True)}
  for garbage in (np.nan, np.inf, -np.inf, 1e30):
    for form in (CHAIN, SCORE, PUBLISHED):
      for name in ("logp", "ref_logp"):
        tail, gradient = tail_and_gradient(form[direction], args | {name: f32(garbage)})
        assert tail == 0 and all((g == 0).all() for g in gradient)


@DIRECTIONS
def test_the_anchor_gets_no_gradient(x64, strict_dtypes, direction):
  logits, ref_logits, _ = (jnp.asarray(x) for x in logits_triple())

  def total(logits, ref_logits):
    pos = enum.all_positions(logits, ref_logits, jnp.arange(4))
    truncated = TRUNCATED[direction](pos.logp_topk, pos.ref_logp_topk).sum()
    return jnp.stack([truncated, *(jnp.sum(head + tail) for head, tail in (e(pos) for e in estimators(direction)))])

  np.testing.assert_array_equal(jax.jit(jax.jacrev(total, argnums=1))(logits, ref_logits), np.zeros((4, V)))
  # Traced through the policy as well: only the first argument's share arrives.
  both = jax.jit(jax.jacrev(lambda x: total(x, x - 0.1 * jnp.square(x))))(logits)
  np.testing.assert_allclose(both, jax.jit(jax.jacrev(total))(logits, logits - 0.1 * jnp.square(logits)), rtol=1e-12, atol=1e-12)


@DIRECTIONS
def test_batched_equals_one_by_one(strict_dtypes, direction):
  rng = np.random.default_rng(1)
  logits, ref_logits = f32(rng.normal(size=(2, 3, V)), rng.normal(size=(2, 3, V)))
  tokens, ids = jnp.asarray(rng.integers(V, size=(2, 3))), jnp.asarray(np.argsort(-logits)[..., :4])
  pos = jax.jit(jax.vmap(jax.vmap(enum.position)))(logits, ref_logits, tokens, ids)
  assert 0 < pos.in_topk.sum() < 6
  for estimator in estimators(direction):
    got = jax.jit(estimator)(pos)
    chex.assert_shape(got, (2, 3))
    chex.assert_type(got, jnp.float32)
    chex.assert_trees_all_close(got, jax.jit(jax.vmap(jax.vmap(estimator)))(pos), rtol=1e-6)
    alone = jax.jit(estimator)(jax.tree.map(lambda x: x[1, 2], pos))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[1, 2], got), alone, rtol=1e-6)


@DIRECTIONS
def test_scanned_equals_batched(strict_dtypes, direction):
  """Value and gradient through `lax.scan`, as a chunked loss takes them."""
  rng = np.random.default_rng(2)
  logits, ref_logits = f32(rng.normal(size=(3, V)), rng.normal(size=(3, V)))
  tokens, ids = jnp.asarray(rng.integers(V, size=3)), jnp.asarray(np.argsort(-logits)[..., :4])
  for estimator in estimators(direction):

    def one(logits, ref_logits, token, ids, estimator=estimator):
      return sum(estimator(enum.position(logits, ref_logits, token, ids)))

    def batched(logits, one=one):
      return jnp.sum(jax.vmap(one)(logits, ref_logits, tokens, ids))

    def scanned(logits, one=one):
      return jax.lax.scan(lambda total, x: (total + one(*x), None), jnp.float32(0), (logits, ref_logits, tokens, ids))[0]

    found = jax.jit(jax.value_and_grad(scanned))(logits)
    chex.assert_trees_all_close(found, jax.jit(jax.value_and_grad(batched))(logits), rtol=1e-5, atol=1e-6)


def test_in_topk_may_be_integers():
  args = f32([0.0, 0.0], [0.0, 0.0], [-1.0, -1.0], [-2.0, -2.0])
  for form in (*CHAIN.values(), *SCORE.values(), *PUBLISHED.values()):
    given = ([f32([[-1.0], [-1.0]])] * 2 + list(args[2:]) if form in CHAIN.values() else [f32([[-1.0], [-1.0]])] * 2) + [
      f32([-1.5, -1.5]),
      f32([-0.5, -0.5]),
    ]
    chex.assert_trees_all_equal(form(*given, jnp.asarray([1, 0])), form(*given, jnp.asarray([True, False])))
