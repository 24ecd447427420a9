"""The anchor: an exponential moving average of the policy's weights, in float32; how fast and how stably it follows; how hard it pulls.

  θ_ema ← η·θ_ema + (1 − η)·θ

η is `ema_decay`, the weight KEPT. The update fires after the last optimizer update of an RL step whose number is a multiple of
`ema_period`, so the KL of RL step t uses the anchor as it stood before step t. η = 1 is a fixed anchor, η = 0 a hard copy every period.

The anchor may lie in the devices' memory or in that of their host; every function here takes either.

The pull is β·KL(policy‖anchor); β, `kl_coef`, is fixed, or follows a target KL by `adapted_kl_coef`.

Source: Zhang and Ba, "EMA Policy Gradient", arXiv 2602.04417.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Array = jax.Array
PyTree = Any

_PINNED = "pinned_host"


def init_anchor(params: PyTree) -> PyTree:
  """A float32 copy of the policy, whatever the dtype of `params`; it shares no buffer with them, so that a donated step can't free it."""
  return jax.tree.map(lambda p: jnp.array(p, dtype=jnp.float32, copy=True), params)


def host_shardings(shardings: PyTree) -> PyTree:
  """The same shardings, in pinned memory of the devices' hosts: an array laid out so takes no device memory.

  Raises:
    ValueError: the devices can't read such memory.
  """

  def one(sharding):
    # One of this process, where it has any: of others' not every backend knows the memories.
    device = next(iter(sharding.addressable_devices or sharding.device_set))
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _PINNED not in kinds:
      raise ValueError(
        f"The anchor can't be kept in {_PINNED} memory (--anchor_memory={_PINNED}): {device.platform} devices ({device.device_kind}) only "
        f"have {', '.join(kinds) or 'no memory that they name'}. Use --anchor_memory=device."
      )
    return sharding.with_memory_kind(_PINNED)

  return jax.tree.map(one, shardings)


def _in_memory(x: Array, space: Any) -> Array:
  # An array that is put where it lies is bound to its device by that, and a program called with it is compiled anew.
  return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def on_device(tree: PyTree) -> PyTree:
  """Copies of the arrays that lie in host memory, and the others themselves; traced or not."""
  return jax.tree.map(lambda x: _in_memory(x, jax.memory.Space.Device), tree)


def update_anchor(params: PyTree, ema_params: PyTree, ema_decay: Array | float, step: Array | int, ema_period: Array | int) -> PyTree:
  """The anchor after RL step `step`.

  η·ema_params + (1 − η)·params with η = ema_decay if step % ema_period == 0, else ema_params, bit for bit.

  Args:
    params: The policy after its last optimizer update of the RL step, any float dtype.
    ema_params: The anchor before the update, float32, same tree as params; in whichever memory.
    ema_decay: η in [0, 1], the weight kept; may be traced, and is checked only as a Python number. At 1 the anchor is left alone,
      at 0 it becomes params.
    step: RL steps done, this one included (the first is 1); may be traced.
    ema_period: RL steps between updates, at least 1; may be traced.

  Returns:
    The next anchor, float32, same tree, in the same memory.

  Raises:
    ValueError: a leaf of ema_params is not float32, or ema_decay is a Python number outside [0, 1].
  """
  if not isinstance(ema_decay, jax.Array):
    _check_decay(ema_decay)
  for path, leaf in jax.tree_util.tree_leaves_with_path(ema_params):
    if jnp.result_type(leaf) != jnp.float32:
      raise ValueError(
        f"anchor: ema_params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}; the anchor must be float32, since a shorter "
        "type rounds its small steps away. Make it with init_anchor."
      )
  rate = 1.0 - jnp.asarray(ema_decay, jnp.float32)
  fires = (jnp.asarray(step, jnp.int32) % jnp.asarray(ema_period, jnp.int32) == 0) & (rate > 0.0)

  def blend(ema_params):
    # In bf16 the increment is less than half a step and the anchor would never move.
    blended = optax.incremental_update(jax.tree.map(lambda p: p.astype(jnp.float32), params), on_device(ema_params), rate)
    return jax.tree.map(lambda new, old: _in_memory(new, jax.typeof(old).memory_space), blended, ema_params)

  # Copied within the branch, which needs the updated params: a copy before it would be scheduled to the start of the program, and the
  # device would hold it through the gradients.
  return lax.cond(fires, blend, lambda ema_params: ema_params, ema_params)


def anchor_distance(params: PyTree, ema_params: PyTree) -> Array:
  """‖params − ema_params‖ / ‖params‖ over all leaves, a float32 scalar."""
  params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
  return optax.tree.norm(optax.tree.sub(params, on_device(ema_params))) / optax.tree.norm(params)


def half_life(ema_decay: float, ema_period: int) -> float:
  """RL steps until half of the anchor's content has been replaced: ema_period·ln 2 / −ln ema_decay; inf at 1, 0 at 0."""
  _check_decay(ema_decay)
  _check_period(ema_period)
  if ema_decay in (0.0, 1.0):
    return math.inf if ema_decay == 1.0 else 0.0
  return ema_period * math.log(2.0) / -math.log(ema_decay)


def stability_limit(kind: str, ema_decay: float, period: int = 1) -> float:
  """The bound on αβλ below which a plain gradient step on β·KL(policy‖anchor) is stable.

  fixed: 2; pre_update: 1 + η; post_update: 1 + 1/η; periodic: 1 + η^(−1/N).

  α is the learning rate, β the KL coefficient, λ the top eigenvalue of the KL's curvature (the Fisher matrix), η = ema_decay, N = period.
  With x = αβλ and δ = θ − θ_ema, one cycle multiplies δ by 1 − x, η − x, η(1 − x) and η(1 − x)^N.

  Args:
    kind: "fixed" (the anchor never moves), "pre_update" (averages the weights before each step, the paper's analysis), "post_update"
      (averages the weights after each step) or "periodic" (after every N-th step, what `update_anchor` does).
    ema_decay: η in [0, 1], the weight kept; not used by "fixed".
    period: N, OPTIMIZER updates between anchor updates (ema_period times the updates of an RL step); used by "periodic" only.

  Returns:
    The bound; inf where every step is stable (η = 0).

  Raises:
    ValueError: an unknown kind, ema_decay outside [0, 1], or period < 1.
  """
  _check_decay(ema_decay)
  _check_period(period)
  if kind == "fixed":
    return 2.0
  if kind == "pre_update":
    return 1.0 + ema_decay
  if kind in ("post_update", "periodic"):
    cycle = period if kind == "periodic" else 1
    return 1.0 + 1.0 / ema_decay ** (1.0 / cycle) if ema_decay > 0.0 else math.inf  # a negative power would overflow with an error
  raise ValueError(
    f"stability_limit: kind is {kind!r}; it must be one of 'fixed', 'pre_update', 'post_update', 'periodic'. Pass one of those."
  )


def adapted_kl_coef(kl_coef: float, kl: float, target: float, gain: float = 0.1) -> float:
  """The KL coefficient of the next RL step: more after a KL above its target, less after one below it.

    kl_coef · (1 + gain · e),   e = clip(kl / target − 1, −0.2, 0.2)

  Value: a Python float, on the host, once an RL step; it moves by a share of at most 0.2·gain and never changes its sign. A kl that is not
  finite says nothing and leaves the coefficient as it was.

  Args:
    kl_coef: β of the RL step that is over.
    kl: the KL measured in it, in nats, of the kind and the unit (per token or per sequence) of target.
    target: the KL to hold, in nats, positive.
    gain: in (0, 5), beyond which the coefficient could reach 0 in one step.

  Returns:
    β of the next RL step.

  Raises:
    ValueError: target is not a positive number, or gain is outside (0, 5).

  Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2, where gain is K_β = 0.1.
  """
  kl_coef, kl = float(kl_coef), float(kl)
  if not 0.0 < target < math.inf:
    raise ValueError(
      f"adapted_kl_coef: target is {target}; the KL to hold must be a positive, finite number of nats. For no target, keep kl_coef fixed."
    )
  if not 0.0 < gain < 5.0:
    raise ValueError(
      f"adapted_kl_coef: gain is {gain}; it must lie in (0, 5), since the error is clipped at −0.2 and the factor must stay positive. "
      "The usual value is 0.1."
    )
  if not math.isfinite(kl):
    return kl_coef
  error = min(max(kl / target - 1.0, -0.2), 0.2)
  return kl_coef * (1.0 + gain * error)


def _check_decay(ema_decay: float) -> None:
  if not 0.0 <= ema_decay <= 1.0:
    raise ValueError(
      f"anchor: ema_decay is {ema_decay}; it is the weight the anchor keeps and must lie in [0, 1]. "
      f"If you meant the rate of the policy, pass 1 minus that rate."
    )


def _check_period(period: int) -> None:
  if period < 1:
    raise ValueError(
      f"anchor: the period is {period}; it counts steps between anchor updates and must be at least 1. For no updates, set ema_decay=1."
    )
