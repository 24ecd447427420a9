"""The optimizer, alone or with the critic's own beside it, and the scale of the learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from emapg_jax.types import PyTree

LR_SCHEDULES = ("constant", "cosine", "linear")
MU_DTYPES = ("float32", "bfloat16")


def make_optimizer(
  learning_rate: float,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.01,
  clip_norm: float | None = 1.0,
  mu_dtype: str = "float32",
) -> optax.GradientTransformation:
  """AdamW on gradients clipped by their global norm, in float32 arithmetic whatever dtype the parameters have.

    g = grads · min(1, clip_norm / ‖grads‖)
    updates = −learning_rate · (m̂ / (√v̂ + eps) + weight_decay · params)

  Value: updates are float32; `optax.apply_updates` rounds once, after the addition. Norm scales and biases (last key `scale` or `bias`)
  do not decay. The second moment is stored in float32 always: at b2 = 0.999 a step changes it by 0.1 % or less once it is near g², and
  bfloat16 resolves 0.4 %, so that it would stop moving. The first moves by up to 10 % a step at b1 = 0.9, and bears bfloat16.

  Args:
    learning_rate: the peak; a schedule multiplies the updates outside, so that its value is never traced into the state.
    b1: weight kept of the first moment.
    b2: weight kept of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled decay per unit of learning rate.
    clip_norm: largest global gradient norm; None for no clipping.
    mu_dtype: "float32", or "bfloat16" to store the first moment in half the memory; meant for b1 up to about 0.9.

  Returns:
    An optax transformation; `update` needs the params.

  Raises:
    ValueError: a clip_norm that is not positive, or an unknown mu_dtype.

  Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2.
  """
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(f"make_optimizer got clip_norm={clip_norm}, which must be positive. Pass None to switch clipping off.")
  if mu_dtype not in MU_DTYPES:
    raise ValueError(f"make_optimizer got mu_dtype={mu_dtype!r}: the first moment is stored as one of {', '.join(MU_DTYPES)}.")
  adamw = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decays)
  inner = adamw if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), adamw)

  # Cast around the whole chain: optax's own mu_dtype leaves the second moment in the dtype of the params, and multiplies in bfloat16,
  # where b1 = 0.99 is 0.988.
  def init(params):
    return _with_mu(inner.init(_to_float32(params)), mu_dtype)

  def update(grads, state, params):
    updates, state = inner.update(_to_float32(grads), _with_mu(state, "float32"), _to_float32(params))
    return updates, _with_mu(state, mu_dtype)

  return optax.GradientTransformation(init, update)


def with_critic(policy: optax.GradientTransformation, value: optax.GradientTransformation) -> optax.GradientTransformation:
  """An optimizer for params {"policy": ..., "value": ...}: each part by its own, as if the other did not exist.

  Neither's global norm, moments or count ever see the other part; norm scales and biases of the critic don't decay either.

  Args:
    policy: the optimizer of params["policy"], as `make_optimizer` makes it.
    value: the optimizer of params["value"], the critic.

  Returns:
    An optax transformation; `update` needs the params. Its `init` raises ValueError on other top-level keys.
  """
  return optax.partition({"policy": policy, "value": value}, {"policy": "policy", "value": "value"})


def lr_schedule(kind: str, warmup: int, decay_steps: int | None = None) -> Callable[[int], float]:
  """The learning-rate scale of the count-th step, counts from 1: a linear warm-up, then one of LR_SCHEDULES.

    scale(count) = count / warmup                                                            count ≤ warmup
                 = 1,  (1 + cos πx) / 2  or  1 − x,   x = (count − 1 − warmup) / (decay_steps − warmup)    after it

  Value: a Python float, rounded as float32. 1 at count = warmup and again at warmup + 1, the first step of the decay; the last step that
  moves anything is count = decay_steps, and from decay_steps + 1 on the scale is 0.

  Args:
    kind: "constant", "cosine" or "linear".
    warmup: steps of warm-up; 0 for none.
    decay_steps: steps until the scale is 0, warm-up included; 0 or None for "constant".

  Returns:
    count → scale. What a step is, an RL step or an optimizer update, is up to who counts. It raises ValueError on a count below 1.

  Raises:
    ValueError: an unknown kind, a negative warmup, or decay_steps that do not fit the kind.
  """
  _check_schedule(kind, warmup, decay_steps)
  if kind == "constant":
    after = optax.constant_schedule(1.0)
  elif kind == "cosine":
    after = optax.cosine_decay_schedule(1.0, decay_steps - warmup)
  else:
    after = optax.linear_schedule(1.0, 0.0, decay_steps - warmup)
  # Without a warm-up no count is below the boundary, and the first schedule is never read.
  schedule = optax.join_schedules([optax.linear_schedule(0.0, 1.0, max(warmup, 1)), after], [warmup + 1])

  def scale(count: int) -> float:
    if count < 1:
      raise ValueError(
        f"lr_schedule was asked for the scale at count={count}: steps are counted from 1. Pass the number of the step to do."
      )
    return float(schedule(count))

  return scale


def _check_schedule(kind: str, warmup: int, decay_steps: int | None) -> None:
  if kind not in LR_SCHEDULES:
    raise ValueError(f"lr_schedule got kind={kind!r}, which must be one of {', '.join(LR_SCHEDULES)}.")
  if warmup < 0:
    raise ValueError(f"lr_schedule got warmup={warmup}: steps of warm-up must be at least 0, where 0 means none.")
  if kind == "constant" and decay_steps:
    raise ValueError(f"lr_schedule got decay_steps={decay_steps} with kind='constant', which never decays: pass 0, or another kind.")
  if kind != "constant" and (decay_steps is None or decay_steps <= warmup):
    raise ValueError(
      f"lr_schedule got decay_steps={decay_steps} with kind={kind!r} and warmup={warmup}: decay_steps count from the first step, warm-up "
      f"included, and must be more than {warmup}. Pass the steps of the whole run."
    )


def _decays(params: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(lambda path, _: not path or getattr(path[-1], "key", None) not in ("scale", "bias"), params)


def _to_float32(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), tree)


def _with_mu(state: PyTree, dtype: str) -> PyTree:
  """The optimizer state with its first moment in another dtype."""

  def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)

  return jax.tree.map(lambda x: x._replace(mu=optax.tree.cast(x.mu, dtype)) if is_adam(x) else x, state, is_leaf=is_adam)
