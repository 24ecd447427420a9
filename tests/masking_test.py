import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import masking

NAN, INF = np.nan, np.inf


@pytest.mark.usefixtures("strict_dtypes")
class MaskingVariantsTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_masked_sum_ignores_garbage_in_value_and_gradient(self):
    x = jnp.array([[1.0, NAN, 2.0], [INF, 4.0, -INF]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    value, grad = self.variant(jax.value_and_grad(lambda x: masking.masked_sum(x, mask)))(x)
    np.testing.assert_allclose(value, 1 + 2 + 4)
    np.testing.assert_array_equal(grad, mask)

  @chex.variants(with_jit=True, without_jit=True)
  def test_masked_mean_is_a_sum_and_a_weight(self):
    mean = self.variant(masking.masked_mean)(jnp.array([3.0, NAN, 5.0]), jnp.array([True, False, True]))
    np.testing.assert_array_equal([mean.sum, mean.weight], [8, 2])

  @chex.variants(with_jit=True, without_jit=True)
  def test_nothing_kept_gives_zero_and_finite_gradient(self):
    x, mask = jnp.array([NAN, 1.0]), jnp.zeros(2, bool)

    def loss(x):
      mean = masking.masked_mean(x, mask)
      return mean.sum, mean.weight

    (value, weight), grad = self.variant(jax.value_and_grad(loss, has_aux=True))(x)
    np.testing.assert_array_equal([value, weight], [0, 0])
    np.testing.assert_array_equal(grad, [0, 0])

  @chex.variants(with_jit=True, without_jit=True)
  def test_clean_before_exp_keeps_the_gradient_finite(self):
    mask = jnp.array([True, False, False])
    x = jnp.array([0.0, 1e3, NAN])
    grad = self.variant(jax.grad(lambda x: jnp.sum(jnp.exp(masking.clean(mask, x)))))(x)
    np.testing.assert_array_equal(grad, [1, 0, 0])

  @chex.variants(with_jit=True, without_jit=True)
  def test_sequence_mask(self):
    mask = self.variant(lambda lengths: masking.sequence_mask(lengths, 3))(jnp.array([0, 2, 3, 5]))
    np.testing.assert_array_equal(mask, [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    assert mask.dtype == bool


def test_cleaning_only_the_output_of_exp_gives_nan():
  """The reason why `clean` exists: the value is right, the gradient is not."""
  mask, x = jnp.array([True, False]), jnp.array([0.0, 1e3])
  value, grad = jax.value_and_grad(lambda x: masking.masked_sum(jnp.exp(x), mask))(x)
  assert value == 1
  assert np.isnan(grad[1])


def test_clean_broadcasts_over_trailing_axes_and_keeps_dtypes(strict_dtypes):
  mask = jnp.array([True, False])
  a, b = masking.clean(mask, jnp.array([[1, 2], [3, 4]]), jnp.array([1.0, NAN], jnp.bfloat16), fill=7)
  np.testing.assert_array_equal(a, [[1, 2], [7, 7]])
  assert a.dtype == jnp.int32
  np.testing.assert_array_equal(b.astype(jnp.float32), [1, 7])
  assert b.dtype == jnp.bfloat16
  assert masking.clean(mask, jnp.array([1, 2])).dtype == jnp.int32


def test_sums_are_float32_over_an_axis(strict_dtypes):
  # In bfloat16 256 + 1 is 256: the eight bits of its mantissa.
  x = jnp.array([[256, 1, 1], [1, 1, 1]], jnp.bfloat16)
  mask = jnp.array([[True, True, True], [True, False, False]])
  sums = masking.masked_sum(x, mask, axis=-1)
  assert sums.dtype == jnp.float32
  np.testing.assert_array_equal(sums, [258, 1])
  np.testing.assert_array_equal(masking.masked_count(mask, axis=-1), [3, 1])
  assert masking.masked_count(mask).dtype == jnp.float32


def test_shapes_that_do_not_fit_are_errors():
  # A mask [B] on [B, T] would count B in the weight and B · T in the sum.
  with pytest.raises(ValueError, match=r"\(2, 3\).*\(2,\)"):
    masking.masked_mean(jnp.ones((2, 3)), jnp.ones(2, bool))
  with pytest.raises(ValueError, match=r"\(2, 3\).*\(3,\)"):
    masking.masked_sum(jnp.ones((2, 3)), jnp.ones(3, bool))
  with pytest.raises(ValueError, match="leading axes"):
    masking.clean(jnp.ones((2, 3), bool), jnp.ones(2))
  with pytest.raises(ValueError, match="no array"):
    masking.clean(jnp.ones(2, bool))
