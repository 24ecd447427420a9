"""The only place where a mask meets a reduction. A mask is boolean and says what it keeps.

What lies at a masked position may be anything, NaN and infinity included: neither a value nor a gradient depends on it. That takes
two steps. `clean` replaces the *inputs* of a computation, because the derivative of `exp` at a garbage log-ratio is infinite, and
0 · inf is NaN in the gradient although the loss looks fine. The sums here replace the *outputs*.
"""

import jax
import jax.numpy as jnp

from emapg_jax.types import Weighted


def clean(mask: jax.Array, *arrays: jax.Array, fill: float = 0.0) -> jax.Array | tuple[jax.Array, ...]:
  """Replaces what a computation must not see: `where(mask, x, fill)` for each array.

  Value: x where the mask is True, `fill` elsewhere. Gradient: 1 where the mask is True, exactly 0 elsewhere.

  Args:
    mask: bool [...], True for what is kept.
    *arrays: each of shape [..., *trailing]; the mask holds for all of the trailing axes. Dtypes are kept.
    fill: what to put at the other places; choose a value at which the computation is smooth.

  Returns:
    One array for one array, else a tuple.

  Raises:
    ValueError: no array, or an array whose leading shape is not the mask's.
  """
  if not arrays:
    raise ValueError("clean got a mask and no array: pass the arrays to clean after the mask.")
  cleaned = tuple(_clean_one(mask, x, fill) for x in arrays)
  return cleaned[0] if len(cleaned) == 1 else cleaned


def masked_sum(x: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
  """Sums what the mask keeps, in float32, or float64 where x is: `Σ_{mask} x`.

  Value: 0 where nothing is kept. Gradient: 1 where the mask is True, exactly 0 elsewhere, whatever x holds there.

  Args:
    x: [...], any real dtype.
    mask: bool, the shape of x.
    axis: the axis to sum over; None for all.

  Returns:
    float32 (float64 for float64), a scalar for axis None.

  Raises:
    ValueError: x and mask differ in shape.
  """
  _check_same_shape("masked_sum", x, mask)
  return jnp.sum(_clean_one(mask, x, 0), axis=axis, dtype=wide(jnp.asarray(x).dtype))


def masked_mean(x: jax.Array, mask: jax.Array) -> Weighted:
  """The mean over what the mask keeps, in the making: `(Σ_{mask} x, Σ mask)`.

  Value: sum 0 and weight 0 where nothing is kept. Gradient: that of `masked_sum`; the weight has none.

  Args:
    x: [...], any real dtype.
    mask: bool, the shape of x.

  Returns:
    Weighted of two float32 scalars.

  Raises:
    ValueError: x and mask differ in shape.
  """
  _check_same_shape("masked_mean", x, mask)
  return Weighted(masked_sum(x, mask), masked_count(mask))


def masked_count(mask: jax.Array, axis: int | None = None) -> jax.Array:
  """The number of True entries as float32, counted in int32: a float32 count of ones stops at 2**24."""
  return jnp.sum(jnp.asarray(mask).astype(bool), axis=axis, dtype=jnp.int32).astype(jnp.float32)


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """The dtype to add up in: float64 for float64, float32 for all else."""
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def sequence_mask(lengths: jax.Array, size: int) -> jax.Array:
  """True at positions before each length: int [B] -> bool [B, size]. Lengths beyond `size` keep the whole row."""
  return jnp.arange(size, dtype=jnp.int32)[None, :] < jnp.asarray(lengths).astype(jnp.int32)[:, None]


def _clean_one(mask, x, fill):
  mask, x = jnp.asarray(mask).astype(bool), jnp.asarray(x)
  if x.shape[: mask.ndim] != mask.shape:
    raise ValueError(
      f"clean got a mask of shape {mask.shape} and an array of shape {x.shape}: the array's leading axes must be the mask's. "
      "Index or broadcast one of them first."
    )
  mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
  return jnp.where(mask, x, jnp.asarray(fill, x.dtype))


def _check_same_shape(name, x, mask):
  if jnp.shape(x) != jnp.shape(mask):
    raise ValueError(
      f"{name} got values of shape {jnp.shape(x)} and a mask of shape {jnp.shape(mask)}: they must be equal. Broadcast the mask "
      "explicitly, so that the weight counts what the sum adds."
    )
