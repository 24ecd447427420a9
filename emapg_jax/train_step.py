"""One RL step: `train_step`, a pure function of the train state and a batch that `score_step` and its neighbours have completed.

The model, the optimizer and the settings are bound by `functools.partial`; what changes from step to step is traced.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from emapg_jax import anchor, losses, masking, micro_batches
from emapg_jax.kl import k3
from emapg_jax.score_step import cleaned, kl_terms, response_stats, tis_weight
from emapg_jax.step_config import Critic, Metrics, Model, StepConfig
from emapg_jax.types import Hyper, Max, Plan, PyTree, RolloutBatch, TrainState, Weighted, policy_of


def init_state(params: PyTree, optimizer: optax.GradientTransformation, with_anchor: bool) -> TrainState:
  """The state before the first RL step; the anchor is a float32 copy of the policy, or None."""
  return TrainState(
    params=params,
    ema_params=anchor.init_anchor(policy_of(params)) if with_anchor else None,
    opt_state=optimizer.init(params),
    step=jnp.zeros((), jnp.int32),
  )


def _loss(
  params: PyTree,
  frozen: PyTree,
  batch: RolloutBatch,
  hyper: Hyper,
  first: jax.Array,
  *,
  model: Model,
  critic: Critic | None,
  config: StepConfig,
):
  """(summed loss, (weight, metrics)) of one micro-batch; `first`: no update of this RL step came before."""
  stats = response_stats(model, policy_of(params), frozen, batch, config, batch.topk_ids)
  values = None if critic is None else masking.clean(batch.mask, critic(params["value"], frozen, batch))
  # Cleaned before anything is exponentiated: what lies at masked positions may be anything.
  stats, batch, in_topk = cleaned(stats, batch)
  if config.on_policy:
    batch = batch.replace(old_logp=jax.lax.stop_gradient(stats.logp))
  elif config.old_from_sampler:
    batch = batch.replace(old_logp=batch.sampling_logp)
  weight, mask, metrics = tis_weight(batch, config)
  mean = functools.partial(masking.masked_mean, mask=mask)
  aggregate = functools.partial(losses.aggregate, mask=mask, mode=config.aggregation, real=batch.real, max_new_tokens=config.max_new_tokens)

  policy, aux = config.policy_loss(stats.logp, batch.old_logp, batch.advantages, mask)
  per_token = weight * policy
  metrics |= {
    "policy_loss": mean(per_token),
    "entropy": mean(stats.entropy),
    "ratio": mean(aux.ratio),
    "ratio_max": _largest(aux.ratio, mask),
    "clip_fraction_low": mean(aux.clipped_low),
    "clip_fraction_high": mean(aux.clipped_high),
    "clip_fraction_dual": mean(aux.dual_clipped),
    **_mismatch(stats.logp, batch, first, config),
  }
  if config.kl is not None and not config.kl_in_reward:
    kl, kl_metrics = kl_terms(stats, batch, in_topk, weight, mask, config)
    per_token = per_token + hyper.kl_coef * kl
    metrics |= kl_metrics
  if config.entropy_coef:
    per_token = per_token - config.entropy_coef * stats.entropy
  total = aggregate(per_token)
  metrics["loss"] = total
  summed = total.sum
  if values is not None:
    value_loss, clipped = losses.value_loss(values, batch.old_values, batch.returns, config.value_clip)
    metrics |= {"value_loss": aggregate(value_loss), "value_clip_fraction": mean(clipped)}
    summed = summed + metrics["value_loss"].sum
  return summed, (total.weight, jax.lax.stop_gradient(metrics))


def _largest(x: jax.Array, mask: jax.Array) -> Max:
  return Max(jnp.max(jnp.where(mask, x, -jnp.inf)))


def _mismatch(logp: jax.Array, batch: RolloutBatch, first: jax.Array, config: StepConfig) -> Metrics:
  """How far trainer and sampler disagree on one policy, the one at the start of the RL step: the noise floor of every KL here."""
  old_logp, mask = batch.old_logp, batch.mask
  if config.old_from_sampler:  # then the trainer's own is known only before the first update
    old_logp, mask = jax.lax.stop_gradient(logp), mask & first
  ratio = jnp.exp(old_logp - batch.sampling_logp)
  return {
    "sampler_ratio": masking.masked_mean(ratio, mask),
    "sampler_ratio_max": _largest(ratio, mask),
    "sampler_kl": masking.masked_mean(k3(batch.sampling_logp, old_logp), mask),
  }


def _batch_metrics(batch: RolloutBatch) -> Metrics:
  """Of the advantages, and of how much of the returns the critic foresaw; over the whole batch."""

  def moments(x):
    count = jnp.maximum(masking.masked_count(batch.mask), 1.0)
    mean = masking.masked_sum(x, batch.mask) / count
    return mean, masking.masked_sum((x - mean) ** 2, batch.mask) / jnp.maximum(count - 1, 1.0)

  one = jnp.any(batch.mask).astype(jnp.float32)  # 0: nothing was trained on, nothing is reported
  advantages = masking.clean(batch.mask, batch.advantages)
  mean, variance = moments(advantages)
  metrics = {
    "advantage_mean": Weighted(mean * one, one),
    "advantage_std": Weighted(jnp.sqrt(variance) * one, one),
    "advantage_max": _largest(jnp.abs(advantages), batch.mask),
  }
  if batch.old_values is not None:
    values, returns = masking.clean(batch.mask, batch.old_values, batch.returns)
    unexplained, spread = moments(returns - values)[1], moments(returns)[1]
    # By comparison: the computed variance of equal numbers is rounding, and dividing by that gives anything.
    known = _largest(returns, batch.mask).value > -_largest(-returns, batch.mask).value
    explained = jnp.where(known, 1 - unexplained / jnp.where(known, spread, 1.0), 0.0)
    metrics["value_mean"] = masking.masked_mean(values, batch.mask)
    metrics["explained_variance"] = Weighted(explained, known.astype(jnp.float32))
  return metrics


def merge(stacked: Metrics) -> Metrics:
  """Adds up metrics along a leading axis, each by its type."""

  def one(metric):
    return Max(jnp.max(metric.value, axis=0)) if isinstance(metric, Max) else Weighted(jnp.sum(metric.sum, 0), jnp.sum(metric.weight, 0))

  return {name: one(metric) for name, metric in stacked.items()}


def _nothing(metrics: Metrics) -> Metrics:
  """What `merge` adds nothing by, in the shape of `metrics`."""

  def one(metric):
    return jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf if isinstance(metric, Max) else 0, x.dtype), metric)

  return {name: one(metric) for name, metric in metrics.items()}


def _gradient(loss: Callable, params: PyTree, frozen: PyTree, batch: RolloutBatch, plan: Plan, hyper: Hyper, first, constrain):
  """The gradient, in float32 at least, of the loss of one mini-batch, divided once; its metrics. `plan`: of this update alone."""
  grad_fn = jax.value_and_grad(loss, has_aux=True)

  def add(part, index, totals):
    micro = constrain(micro_batches.take(batch, part, index))
    (_, (weight, metrics)), grads = grad_fn(params, frozen, micro, hyper, first)
    grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), totals[0], grads)
    return grads, totals[1] + weight, merge(jax.tree.map(lambda *pair: jnp.stack(pair), totals[2], metrics))

  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, masking.wide(p.dtype)), params)
  totals = zeros, jnp.float32(0), _nothing(jax.eval_shape(loss, params, frozen, batch, hyper, first)[1][1])
  for part in plan:
    totals = jax.lax.fori_loop(0, micro_batches.count(part), functools.partial(add, part), totals)
  grads, weight, metrics = totals
  return jax.tree.map(lambda g: g / jnp.maximum(weight, 1.0).astype(g.dtype), grads), metrics


def _norms(grads: PyTree, updates: PyTree) -> dict[str, jax.Array]:
  """Global norms by name; the critic's by themselves."""
  norms = {"grad_norm": optax.tree.norm(policy_of(grads)), "update_norm": optax.tree.norm(policy_of(updates))}
  if policy_of(grads) is not grads:
    norms |= {"value_grad_norm": optax.tree.norm(grads["value"]), "value_update_norm": optax.tree.norm(updates["value"])}
  return norms


def train_step(
  state: TrainState,
  frozen: PyTree,
  batch: RolloutBatch,
  hyper: Hyper,
  plan: Plan | None = None,
  *,
  model: Model,
  optimizer: optax.GradientTransformation,
  config: StepConfig,
  critic: Critic | None = None,
  constrain: Callable[[PyTree], PyTree] = lambda x: x,
) -> tuple[TrainState, Metrics]:
  """One RL step: epochs × mini-batches of optimizer updates, then `step += 1` and the anchor update where the period says so.

    loss = aggregate(w · policy_loss + kl_coef · (head + w · s · tail) − entropy_coef · entropy),   s = sg exp(logp − sampling_logp)

  with w = 1, or the weight of truncated importance sampling, under which s = sg exp(logp − old_logp); and without its second term where
  the KL is in the reward. A critic's loss is aggregated in the same way, and its optimizer is its own. The loss of a mini-batch is divided
  once, over all its tokens: micro-batch size, row order, padding and device count change nothing but rounding. The KL is to the anchor as
  it stood before this step. A mini-batch whose loss, gradient or update is not finite leaves params and optimizer as they were and is
  counted in the metric `bad_updates`; so does one without a token to train on, in `empty_updates`.

  Args:
    state: donate it.
    frozen: arrays that never change and that the models read; `()` when there are none.
    batch: B rows; B a multiple of mini_batches · micro_batch. old_logp is not read when `config.on_policy` or `old_from_sampler`.
    hyper: traced scalars.
    plan: which rows go through the model together and how far they are read, see `micro_batches.by_length`; by default micro-batches of
      `config.micro_batch` rows, read to the end.
    critic: gives the values of `state.params["value"]`; None when there is no critic.
    constrain: lays a micro-batch out over the devices.

  Returns:
    The next state and metrics as sums and weights over the whole step.
  """
  loss = functools.partial(_loss, model=model, critic=critic, config=config)
  plan = plan or micro_batches.in_order(batch, state.step, config)
  scales = jnp.broadcast_to(hyper.lr_scale, (config.updates,))

  def update(carry, per_update):
    (params, opt_state), (number, plan, scale) = carry, per_update
    grads, metrics = _gradient(loss, params, frozen, batch, plan, hyper, number == 0, constrain)
    updates, next_opt_state = optimizer.update(grads, opt_state, params)
    updates = jax.tree.map(lambda u: u * scale, updates)
    norms = _norms(grads, updates)
    summed = metrics["loss"].sum + (0.0 if critic is None else metrics["value_loss"].sum)
    good = jnp.all(jnp.isfinite(jnp.stack([summed, *norms.values()])))
    trained = metrics["policy_loss"].weight > 0  # an update from no token at all would be momentum and weight decay alone
    one, weight = jnp.float32(1), (good & trained).astype(jnp.float32)
    metrics |= {name: Weighted(jnp.where(weight > 0, norm, 0.0), weight) for name, norm in norms.items()}
    metrics["bad_updates"] = Weighted(1.0 - good.astype(jnp.float32), one)
    metrics["empty_updates"] = Weighted(1.0 - trained.astype(jnp.float32), one)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(weight > 0, new, old))
    return (keep(optax.apply_updates(params, updates), params), keep(next_opt_state, opt_state)), metrics

  (params, opt_state), metrics = jax.lax.scan(update, (state.params, state.opt_state), (jnp.arange(config.updates), plan, scales))
  metrics = merge(metrics) | _batch_metrics(batch)
  step = state.step + 1
  ema_params = state.ema_params
  if ema_params is not None:
    policy = policy_of(params)
    ema_params = anchor.update_anchor(policy, ema_params, hyper.ema_decay, step, hyper.ema_period)
    metrics["anchor_distance"] = Weighted(anchor.anchor_distance(policy, ema_params), jnp.float32(1))
  return TrainState(params=params, ema_params=ema_params, opt_state=opt_state, step=step), metrics
