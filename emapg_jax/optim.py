"""The optimizer and its learning-rate scale."""

import jax
import jax.numpy as jnp
import optax

from emapg_jax.types import PyTree


def make_optimizer(
  learning_rate: float,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.01,
  clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
  """AdamW on gradients clipped by their global norm, with float32 moments and arithmetic whatever dtype the parameters have.

    g = grads · min(1, clip_norm / ‖grads‖)
    updates = −learning_rate · (m̂ / (√v̂ + eps) + weight_decay · params)

  Value: updates are float32; `optax.apply_updates` rounds once, after the addition. Norm scales and biases (last key `scale` or `bias`)
  do not decay.

  Args:
    learning_rate: the peak; a schedule multiplies the updates outside, so that its value is never traced into the state.
    b1: weight kept of the first moment.
    b2: weight kept of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled decay per unit of learning rate.
    clip_norm: largest global gradient norm; None for no clipping.

  Returns:
    An optax transformation; `update` needs the params.

  Raises:
    ValueError: a clip_norm that is not positive.

  Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2.
  """
  if clip_norm is not None and clip_norm <= 0:
    raise ValueError(f"make_optimizer got clip_norm={clip_norm}, which must be positive. Pass None to switch clipping off.")
  adamw = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decays)
  inner = adamw if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), adamw)

  # Cast around the whole chain: optax can fix the dtype of the first moment only, and a bf16 second moment stops moving at b2 = 0.999.
  def init(params):
    return inner.init(_to_float32(params))

  def update(grads, state, params):
    return inner.update(_to_float32(grads), state, _to_float32(params))

  return optax.GradientTransformation(init, update)


def warmup(step: int, warmup_steps: int) -> float:
  """The learning-rate scale of an RL step, counted from 1: `min(1, step / warmup_steps)`, and 1 without warm-up."""
  if step < 1 or warmup_steps < 0:
    raise ValueError(
      f"warmup got step={step} and warmup_steps={warmup_steps}: steps are counted from 1, and warmup_steps "
      "must be at least 0, where 0 means none."
    )
  return 1.0 if step >= warmup_steps else step / warmup_steps


def _decays(params: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(lambda path, _: not path or getattr(path[-1], "key", None) not in ("scale", "bias"), params)


def _to_float32(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), tree)
