import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from emapg_jax import losses

NAN = np.nan

# Old value 0, clip 0.5: (value, return, loss, gradient, clipped). Each stands for its mirror image, too.
CASES = [
  (0.25, 1.0, 0.28125, -0.75, False),  # inside: ½ · 0.75²
  (0.25, -1.0, 0.78125, 1.25, False),
  (0.5, 2.0, 1.125, -1.5, False),  # at the bound the gradient is whole: clip would halve it, and max halve it again
  (0.5, -2.0, 3.125, 2.5, False),
  (1.0, 2.0, 1.125, 0.0, True),  # past it, towards the return: max(1², 1.5²) / 2
  (1.0, 1.0, 0.125, 0.0, True),  # arrived at the return: max(0, 0.5²) / 2
  (1.0, -1.0, 2.0, 2.0, False),  # past it, away from the return: max(2², 1.5²) / 2
  (1.0, 0.25, 0.28125, 0.75, False),  # overshot a return inside the bounds: max(0.75², 0.25²) / 2
  (1.0, 0.625, 0.0703125, 0.375, False),  # the return is between bound and value, nearer to the bound: max(0.375², 0.125²) / 2
  (1.0, 0.875, 0.0703125, 0.0, True),  # nearer to the value: max(0.125², 0.375²) / 2
  (1.0, 0.75, 0.03125, 0.25, False),  # in the middle, where max would halve the gradient
]
MIRRORED = CASES + [(-value, -returns, loss, -grad, clipped) for value, returns, loss, grad, clipped in CASES]


def loss_grads_clipped(variant, values, old_values, returns, clip):
  """The loss, its gradients with respect to all three arrays, and where it is clipped."""

  def total(*arrays):
    loss, clipped = losses.value_loss(*arrays, clip)
    return jnp.sum(loss), (loss, clipped)

  grads, (loss, clipped) = variant(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(values, old_values, returns)
  return loss, grads, clipped


@pytest.mark.usefixtures("strict_dtypes")
class ValueLossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(0.0, 8.0, -3.0)
  def test_both_sides_of_both_bounds(self, old):
    values, returns, loss, grad, clipped = (np.array(column) for column in zip(*MIRRORED))
    arrays = [np.asarray(x, np.float32) for x in (old + values, np.full_like(values, old), old + returns)]
    actual_loss, grads, actual_clipped = loss_grads_clipped(self.variant, *arrays, 0.5)
    np.testing.assert_array_equal(actual_loss, loss)
    np.testing.assert_array_equal(grads[0], grad)
    np.testing.assert_array_equal(grads[1:], np.zeros((2, len(MIRRORED))))
    np.testing.assert_array_equal(actual_clipped, clipped)
    assert actual_clipped.dtype == bool

  @chex.variants(with_jit=True, without_jit=True)
  def test_without_a_bound_it_is_the_squared_error(self):
    values, old_values, returns = (np.array(x, np.float32) for x in ([1, -1, 3], [0, NAN, 100], [2, 2, 3]))
    for clip, old in ((None, old_values), (np.inf, np.zeros(3, np.float32))):
      loss, grads, clipped = loss_grads_clipped(self.variant, values, old, returns, clip)
      np.testing.assert_array_equal(loss, [0.5, 4.5, 0])
      np.testing.assert_array_equal(grads, [[-1, -3, 0], [0, 0, 0], [0, 0, 0]])
      np.testing.assert_array_equal(clipped, [False] * 3)
      assert clipped.dtype == bool

  @chex.variants(with_jit=True, without_jit=True)
  def test_at_the_old_value_nothing_is_clipped(self):
    values, returns = np.array([[0.1, -7], [1e4, 3]], np.float32), np.array([[1, 1], [1, 3]], np.float32)
    loss, grads, clipped = loss_grads_clipped(self.variant, values, values, returns, 1e-3)
    np.testing.assert_array_equal(loss, 0.5 * (values - returns) ** 2)
    np.testing.assert_array_equal(grads[0], values - returns)
    assert clipped.shape == (2, 2) and not np.any(clipped)

  @chex.variants(with_jit=True, without_jit=True)
  def test_a_broken_number_is_not_hidden(self):
    values, old_values, returns = np.ones((3, 3), np.float32) + np.diag([NAN, NAN, NAN]).astype(np.float32)
    loss, grads, _ = loss_grads_clipped(self.variant, values, old_values, returns, 0.5)
    np.testing.assert_array_equal(np.isnan([loss, grads[0]]), np.ones((2, 3)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("clip", [0.2, None])
def test_dtype_of_the_loss_is_that_of_the_values(dtype, clip, x64, strict_dtypes):
  arrays = [jnp.asarray(x, dtype) for x in ([1.3], [1.0], [2.0])]
  loss, clipped = losses.value_loss(*arrays, clip)
  assert loss.dtype == dtype and clipped.dtype == bool
  # ½ · (1.2 − 2)², and ½ · (1.3 − 2)²
  np.testing.assert_allclose(loss, [0.245 if clip is None else 0.32], rtol=1e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("clip", [0.0, -0.2, NAN])
def test_a_clip_out_of_its_range_is_an_error(clip):
  with pytest.raises(ValueError, match=f"value_loss got clip={clip}"):
    losses.value_loss(jnp.zeros(1), jnp.zeros(1), jnp.ones(1), clip)


@pytest.mark.parametrize(
  "call",
  [
    lambda: losses.value_loss(jnp.zeros((4, 4)), jnp.zeros((4, 4)), jnp.zeros(4), 0.2),
    lambda: losses.ppo_clip(jnp.zeros((4, 4)), jnp.zeros((4, 4)), jnp.zeros(4)),
    lambda: losses.cispo(jnp.zeros((4, 4)), jnp.zeros((4, 4)), jnp.zeros((4, 1)), 1.0, 4.0),
    lambda: losses.truncated_weight(jnp.zeros((4, 4)), jnp.zeros(4), 2.0),
    lambda: losses.within_sequence_ratio(jnp.zeros((4, 4)), jnp.zeros(4), jnp.ones((4, 4), bool), 2.0),
    lambda: losses.aggregate(jnp.zeros((2, 4)), jnp.ones((2, 4), bool), "fixed_length", jnp.ones(5, bool), 8),
  ],
)
def test_shapes_that_would_broadcast_are_refused(call):
  with pytest.raises(ValueError, match="they must be of one shape"):
    call()
