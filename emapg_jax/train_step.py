"""One RL step: `score_step` for the passes that need no gradient, `train_step` for the update. Pure functions, to be jitted once.

The model, the optimizer and the settings are bound by `functools.partial`; what changes from step to step is traced.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct

from emapg_jax import anchor, losses, masking, streams
from emapg_jax.kl import importance_weight, k3, topk_reverse_kl
from emapg_jax.token_stats import token_stats
from emapg_jax.types import Max, PyTree, RolloutBatch, TokenStats, TrainState, Weighted

Model = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, jax.Array]]  # (params, frozen, tokens) -> hidden [B, S, D], [D, V]
# (stats, batch, in_topk) -> per token [B, T]: head, tail, and whether the log-ratio was beyond the estimator's bound
KL = Callable[[TokenStats, RolloutBatch, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
Metrics = dict[str, Weighted | Max]

_PER_TOKEN = ("advantages", "sampling_logp", "old_logp", "ref_logp", "ref_logp_topk", "ref_log_tail")


@struct.dataclass
class Hyper:
  """Settings that are traced, so that changing them compiles nothing; float32 or int32 scalars."""

  kl_coef: jax.Array  # β
  ema_decay: jax.Array  # η, the weight kept
  ema_period: jax.Array  # RL steps between anchor updates
  lr_scale: jax.Array  # multiplies the optimizer's updates


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """Settings that are compiled in."""

  micro_batch: int  # rows per forward, all devices together
  mini_batches: int  # optimizer updates per epoch
  epochs: int = 1
  temperature: float = 1.0
  kl: KL | None = None  # None: no anchor is read
  head_chunk: int | None = None  # positions of which the logits are held at a time; None: as `token_stats` chooses for one device
  topk: int = 0  # ids that `score_step` reports when it is given none
  topk_approximate: bool = False  # find them by approx_max_k
  kl_iw_low: float | None = None
  kl_iw_high: float | None = None
  clip_low: float = 0.2
  clip_high: float = 0.28
  dual_clip: float | None = None
  aggregation: str = "token_mean"
  max_new_tokens: int | None = None  # read by the aggregation `fixed_length`
  seed: int = 0  # of the order of rows in mini-batches


def init_state(params: PyTree, optimizer: optax.GradientTransformation, with_anchor: bool) -> TrainState:
  """The state before the first RL step; the anchor is a float32 copy of the policy, or None."""
  return TrainState(
    params=params,
    ema_params=anchor.init_anchor(params) if with_anchor else None,
    opt_state=optimizer.init(params),
    step=jnp.zeros((), jnp.int32),
  )


def check_divides(rows: int, config: StepConfig) -> None:
  """Raises ValueError unless `rows` split into whole mini-batches of whole micro-batches."""
  if rows % (config.mini_batches * config.micro_batch):
    raise ValueError(
      f"A batch of {rows} sequences does not split into {config.mini_batches} mini-batches of micro-batches of {config.micro_batch} "
      f"(micro_batch rows per device times the devices that share the batch): {rows} must be a multiple of "
      f"{config.mini_batches * config.micro_batch}. Change prompts_per_step, group_size, mini_batches, micro_batch or the mesh."
    )


def response_stats(
  model: Model, params: PyTree, frozen: PyTree, batch: RolloutBatch, config: StepConfig, topk_ids: jax.Array | None
) -> TokenStats:
  """TokenStats [B, T] of the response tokens: token t is scored from the hidden state at the position before it."""
  hidden, unembedding = model(params, frozen, batch.tokens)
  hidden = jnp.take_along_axis(hidden, _response_positions(batch)[..., None] - 1, axis=1)
  return token_stats(
    hidden,
    unembedding,
    _response_tokens(batch),
    topk_ids=topk_ids,
    topk=config.topk,
    approximate=config.topk_approximate,
    temperature=config.temperature,
    chunk=config.head_chunk,
  )


def _response_positions(batch: RolloutBatch) -> jax.Array:
  return batch.prompt_length[:, None] + jnp.arange(batch.mask.shape[1], dtype=jnp.int32)[None, :]


def _response_tokens(batch: RolloutBatch) -> jax.Array:
  return jnp.take_along_axis(batch.tokens, _response_positions(batch), axis=1)


def score_step(
  params: PyTree, frozen: PyTree, batch: RolloutBatch, ids: jax.Array | None = None, *, model: Model, config: StepConfig
) -> TokenStats:
  """TokenStats of every response token under `params`, without gradient; micro-batch by micro-batch.

  Args:
    params: any model of the policy's shape: the policy at the start of the RL step, or the anchor.
    batch: only tokens, prompt_length and the width of mask are read.
    ids: int32 [B, T, K] to report log-probabilities of; the model's own `config.topk` most likely when None.
  """
  rows = batch.tokens.shape[0]
  check_divides(rows, dataclasses.replace(config, mini_batches=1))
  split = functools.partial(jax.tree.map, lambda x: _split(x, config.micro_batch))

  def score(args):
    micro, ids = args
    return response_stats(model, params, frozen, micro, config, ids)

  stats = jax.lax.map(score, (split(batch), split(ids)))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0).reshape(rows, *x.shape[2:]), stats)


def _split(x, micro_batch):
  """[B, ...] -> [B / micro_batch, micro_batch, ...], each micro-batch taking rows from all over the batch: from every device."""
  return jnp.moveaxis(x.reshape(micro_batch, x.shape[0] // micro_batch, *x.shape[1:]), 0, 1)


def _loss(params: PyTree, frozen: PyTree, batch: RolloutBatch, hyper: Hyper, *, model: Model, config: StepConfig):
  """(summed loss, (weight, metrics)) of one micro-batch."""
  stats = response_stats(model, params, frozen, batch, config, batch.topk_ids)
  in_topk = jnp.any(stats.topk_ids == _response_tokens(batch)[..., None], axis=-1)
  # Cleaned before anything is exponentiated: what lies at masked positions may be anything.
  mask = batch.mask
  stats = jax.tree.map(functools.partial(masking.clean, mask), stats)
  batch = batch.replace(**{name: masking.clean(mask, getattr(batch, name)) for name in _PER_TOKEN})
  aggregate = functools.partial(losses.aggregate, mask=mask, mode=config.aggregation, real=batch.real, max_new_tokens=config.max_new_tokens)
  mean = functools.partial(masking.masked_mean, mask=mask)

  policy, aux = losses.ppo_clip(stats.logp, batch.old_logp, batch.advantages, config.clip_low, config.clip_high, config.dual_clip)
  per_token = policy
  mismatch = jnp.exp(batch.old_logp - batch.sampling_logp)
  metrics = {
    "policy_loss": mean(policy),
    "entropy": mean(stats.entropy),
    "ratio": mean(aux.ratio),
    "ratio_max": Max(jnp.max(jnp.where(mask, aux.ratio, 0.0))),
    "clip_fraction_low": mean(aux.clipped_low),
    "clip_fraction_high": mean(aux.clipped_high),
    "sampler_ratio": mean(mismatch),
    "sampler_ratio_max": Max(jnp.max(jnp.where(mask, mismatch, 0.0))),
    "sampler_kl": mean(k3(batch.sampling_logp, batch.old_logp)),  # of one policy, computed in two ways: the noise floor of every KL here
  }
  if config.kl is not None:
    head, tail, clamped = config.kl(stats, batch, in_topk)
    weight = importance_weight(stats.logp, batch.sampling_logp, config.kl_iw_low, config.kl_iw_high)
    unbounded = importance_weight(stats.logp, batch.sampling_logp)
    kl = head + weight * tail
    per_token = policy + hyper.kl_coef * kl
    metrics |= {
      "kl": mean(kl),
      "kl_head": mean(head),
      "kl_tail": mean(weight * tail),
      "kl_weight": mean(weight),
      "kl_weight_clipped": mean(weight != unbounded),
      "kl_clamped": mean(clamped),
    }
    if batch.topk_ids.shape[-1]:
      metrics["tail_hit_rate"] = mean(~in_topk)
      metrics["topk_mass"] = mean(-jnp.expm1(stats.log_tail))
  total = aggregate(per_token)
  metrics["loss"] = total
  return total.sum, (total.weight, jax.lax.stop_gradient(metrics))


def policy_kl(stats: TokenStats, ref: TokenStats, batch: RolloutBatch) -> Weighted:
  """KL of the policy that `stats` scored to the model that `ref` scored, mean over trained tokens; both on the same top-k ids."""
  mask = batch.mask
  in_topk = jnp.any(stats.topk_ids == _response_tokens(batch)[..., None], axis=-1)
  stats, ref = jax.tree.map(functools.partial(masking.clean, mask), (stats, ref))
  return masking.masked_mean(
    sum(topk_reverse_kl(stats.logp_topk, ref.logp_topk, stats.log_tail, ref.log_tail, stats.logp, ref.logp, in_topk)), mask
  )


def merge(stacked: Metrics) -> Metrics:
  """Adds up metrics along a leading axis, each by its type."""

  def one(metric):
    return Max(jnp.max(metric.value, axis=0)) if isinstance(metric, Max) else Weighted(jnp.sum(metric.sum, 0), jnp.sum(metric.weight, 0))

  return {name: one(metric) for name, metric in stacked.items()}


def _gradient(params, frozen, batch, rows, hyper, model, config, constrain):
  """The gradient, float32, of the loss of one mini-batch (rows: [micro-batches, micro_batch] indices), divided once; its metrics."""
  grad_fn = jax.value_and_grad(functools.partial(_loss, model=model, config=config), has_aux=True)

  def micro_step(carry, rows):
    micro = constrain(jax.tree.map(lambda x: x[rows], batch))
    (_, (weight, metrics)), grads = grad_fn(params, frozen, micro, hyper)
    grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), carry[0], grads)
    return (grads, carry[1] + weight), metrics

  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
  (grads, weight), metrics = jax.lax.scan(micro_step, (zeros, jnp.float32(0)), rows)
  return jax.tree.map(lambda g: g / jnp.maximum(weight, 1.0), grads), merge(metrics)


def train_step(
  state: TrainState,
  frozen: PyTree,
  batch: RolloutBatch,
  hyper: Hyper,
  *,
  model: Model,
  optimizer: optax.GradientTransformation,
  config: StepConfig,
  constrain: Callable[[PyTree], PyTree] = lambda x: x,
) -> tuple[TrainState, Metrics]:
  """One RL step: epochs × mini-batches of optimizer updates, then `step += 1` and the anchor update where the period says so.

    loss = aggregate(policy + kl_coef · (head + s · tail)),   s = sg exp(logp − sampling_logp)

  The loss of a mini-batch is divided once, over all its tokens: micro-batch size, row order, padding and device count change nothing but
  rounding. The KL is to the anchor as it stood before this step. A mini-batch whose loss, gradient or update is not finite leaves params
  and optimizer as they were and is counted in the metric `bad_updates`.

  Args:
    state: donate it.
    frozen: arrays that never change and that the model reads; `()` when there are none.
    batch: B rows; B a multiple of mini_batches · micro_batch.
    hyper: traced scalars.
    constrain: lays a micro-batch out over the devices.

  Returns:
    The next state and metrics as sums and weights over the whole step.
  """
  rows = batch.tokens.shape[0]
  check_divides(rows, config)

  def order(epoch):
    return jax.random.permutation(streams.stream_key(config.seed, streams.MINI_BATCH, state.step, epoch), rows)

  indices = jnp.concatenate([order(epoch) for epoch in range(config.epochs)])
  indices = indices.reshape(config.epochs * config.mini_batches, -1, config.micro_batch)

  def update(carry, rows):
    params, opt_state = carry
    grads, metrics = _gradient(params, frozen, batch, rows, hyper, model, config, constrain)
    updates, next_opt_state = optimizer.update(grads, opt_state, params)
    updates = jax.tree.map(lambda u: u * hyper.lr_scale, updates)
    grad_norm = optax.tree.norm(grads)
    update_norm = optax.tree.norm(updates)
    good = jnp.isfinite(grad_norm) & jnp.isfinite(update_norm) & jnp.isfinite(metrics["loss"].sum)
    one, weight = jnp.float32(1), good.astype(jnp.float32)
    metrics["grad_norm"] = Weighted(jnp.where(good, grad_norm, 0.0), weight)
    metrics["update_norm"] = Weighted(jnp.where(good, update_norm, 0.0), weight)
    metrics["bad_updates"] = Weighted(1.0 - weight, one)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    return (keep(optax.apply_updates(params, updates), params), keep(next_opt_state, opt_state)), metrics

  (params, opt_state), metrics = jax.lax.scan(update, (state.params, state.opt_state), indices)
  metrics = merge(metrics)
  step = state.step + 1
  ema_params = state.ema_params
  if ema_params is not None:
    ema_params = anchor.update_anchor(params, ema_params, hyper.ema_decay, step, hyper.ema_period)
    metrics["anchor_distance"] = Weighted(anchor.anchor_distance(params, ema_params), jnp.float32(1))
  return TrainState(params=params, ema_params=ema_params, opt_state=opt_state, step=step), metrics
