"""What an RL step computes once, before its first update: statistics of the old policy and of the anchor, values, credit. Pure functions.

Order of calls: `score_step` for each model whose log-probabilities are needed, `value_step` where there is a critic, `credit_step` where a
token's credit is more than the advantage of its row.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from emapg_jax import losses, masking, micro_batches
from emapg_jax.kl import importance_weight, k1, topk_reverse_kl
from emapg_jax.step_config import Critic, Metrics, Model, StepConfig
from emapg_jax.types import Hyper, Plan, PyTree, RolloutBatch, TokenStats, Weighted

_PER_TOKEN = ("advantages", "sampling_logp", "old_logp", "ref_logp", "ref_logp_topk", "ref_log_tail", "old_values", "returns")


def before_responses(states: jax.Array, batch: RolloutBatch) -> jax.Array:
  """What was known before each response token, [B, T, ...], of the states [B, S, ...] after each token of `batch.tokens`."""
  before = _response_positions(batch) - 1
  return jnp.take_along_axis(states, before.reshape(before.shape + (1,) * (states.ndim - 2)), axis=1)


def shared_prompts(batch: RolloutBatch, prompt_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Each prompt once, [B / prompt_rows, P], its length, and the responses [B, T]: what `decoder.apply_shared` reads."""
  width = batch.tokens.shape[1] - batch.mask.shape[1]
  return batch.tokens[::prompt_rows, :width], batch.prompt_length[::prompt_rows], _response_tokens(batch)


def _response_positions(batch: RolloutBatch) -> jax.Array:
  return batch.prompt_length[:, None] + jnp.arange(batch.mask.shape[1], dtype=jnp.int32)[None, :]


def _response_tokens(batch: RolloutBatch) -> jax.Array:
  return jnp.take_along_axis(batch.tokens, _response_positions(batch), axis=1)


def response_stats(
  model: Model, params: PyTree, frozen: PyTree, batch: RolloutBatch, config: StepConfig, topk_ids: jax.Array | None
) -> TokenStats:
  """TokenStats [B, T] of the response tokens: token t is scored from the hidden state at the position before it."""
  hidden, unembedding = model(params, frozen, batch)
  return config.stats(
    hidden,
    unembedding,
    _response_tokens(batch),
    topk_ids=topk_ids,
    topk=config.topk,
    approximate=config.topk_approximate,
    temperature=config.temperature,
    chunk=config.head_logits and max(1, config.head_logits // (batch.tokens.shape[0] * unembedding.shape[1])),
  )


def score_step(
  params: PyTree,
  frozen: PyTree,
  batch: RolloutBatch,
  ids: jax.Array | None = None,
  plan: Plan | None = None,
  *,
  model: Model,
  config: StepConfig,
  constrain: Callable[[PyTree], PyTree] = lambda x: x,
) -> TokenStats:
  """TokenStats of every response token under `params`, without gradient; micro-batch by micro-batch.

  Args:
    params: any model of the policy's shape: the policy at the start of the RL step, or the anchor.
    batch: only tokens, prompt_length and the width of mask are read.
    ids: int32 [B, T, K] to report log-probabilities of; the model's own `config.topk` most likely when None.
    plan: which rows to read together, and how far, in one pass; zeros stand behind that. By default `config.micro_batch` rows, to the end.
    constrain: lays rows out over the devices.
  """

  def score(micro):
    return response_stats(model, params, frozen, micro, config, None if ids is None else micro.topk_ids)

  return _by_micro_batch(score, batch if ids is None else batch.replace(topk_ids=ids), plan, config, constrain)


def value_step(
  params: PyTree,
  frozen: PyTree,
  batch: RolloutBatch,
  plan: Plan | None = None,
  *,
  critic: Critic,
  config: StepConfig,
  constrain: Callable[[PyTree], PyTree] = lambda x: x,
) -> jax.Array:
  """The critic's values [B, T] of every response token, without gradient; micro-batch by micro-batch, as `score_step`."""
  return _by_micro_batch(lambda micro: critic(params, frozen, micro), batch, plan, config, constrain)


def _by_micro_batch(function: Callable, batch: RolloutBatch, plan: Plan | None, config: StepConfig, constrain: Callable) -> PyTree:
  def score(part, index, out):
    found = function(constrain(micro_batches.take(batch, part, index)))
    return jax.tree.map(functools.partial(micro_batches.put, part=part, index=index), out, found)

  out = constrain(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, batch)))
  for part in jax.tree.map(lambda x: x[0], plan or micro_batches.one_pass(batch, config)):
    out = jax.lax.fori_loop(0, micro_batches.count(part), functools.partial(score, part), out)
  return out


def cleaned(stats: TokenStats, batch: RolloutBatch) -> tuple[TokenStats, RolloutBatch, jax.Array]:
  """What may be exponentiated, and whether each token is among its top-k ids: zeros stand where the mask is False, whatever was there."""
  mask = batch.mask
  in_topk = jnp.any(stats.topk_ids == _response_tokens(batch)[..., None], axis=-1)
  present = {name: getattr(batch, name) for name in _PER_TOKEN if getattr(batch, name) is not None}
  batch = batch.replace(**jax.tree.map(functools.partial(masking.clean, mask), present))
  return jax.tree.map(functools.partial(masking.clean, mask), stats), batch, in_topk


def tis_weight(batch: RolloutBatch, config: StepConfig) -> tuple[jax.Array, jax.Array, Metrics]:
  """Truncated importance sampling from the sampler to the old policy: weights [B, T], the mask without dropped sequences, metrics."""
  mask, metrics = batch.mask, {}
  weight = jnp.ones_like(batch.old_logp)
  if config.tis_sequence_bound is not None:
    kept = losses.within_sequence_ratio(batch.old_logp, batch.sampling_logp, mask, config.tis_sequence_bound)
    metrics["tis_masked"] = masking.masked_mean(~kept, jnp.any(mask, axis=-1))
    mask = mask & kept[:, None]
  if config.tis_cap is not None:
    weight, capped = losses.truncated_weight(batch.old_logp, batch.sampling_logp, config.tis_cap)
    metrics |= {"tis_weight": masking.masked_mean(weight, mask), "tis_capped": masking.masked_mean(capped, mask)}
  return weight, mask, metrics


def kl_terms(
  stats: TokenStats, batch: RolloutBatch, in_topk: jax.Array, weight: jax.Array, mask: jax.Array, config: StepConfig
) -> tuple[jax.Array, Metrics]:
  """The KL to the anchor per token [B, T], `head + weight · s · tail`, and its metrics; inputs cleaned.

  s = sg exp(logp − sampling_logp), within its bounds; under truncated importance sampling, which `weight` is, from old_logp
  """
  mean = functools.partial(masking.masked_mean, mask=mask)
  head, tail, clamped = config.kl(stats, batch, in_topk)
  drawn_from = batch.sampling_logp if config.tis_cap is None else batch.old_logp
  s = importance_weight(stats.logp, drawn_from, config.kl_iw_low, config.kl_iw_high)
  tail = weight * s * tail
  metrics = {
    "kl": mean(head + tail),
    "kl_head": mean(head),
    "kl_tail": mean(tail),
    "kl_weight": mean(s),
    "kl_weight_clipped": mean(s != importance_weight(stats.logp, drawn_from)),
    "kl_clamped": mean(clamped),
  }
  if batch.topk_ids.shape[-1]:
    metrics |= {"tail_hit_rate": mean(~in_topk), "topk_mass": mean(-jnp.expm1(stats.log_tail))}
  return head + tail, metrics


def credit_step(
  batch: RolloutBatch, stats: TokenStats | None, hyper: Hyper, *, config: StepConfig
) -> tuple[tuple[jax.Array, jax.Array | None], Metrics]:
  """The advantage of each token [B, T] and, for a critic, its return; and the KL's metrics where the KL is in the reward.

  Args:
    batch: with old_logp, topk_ids and the anchor's statistics; with rewards or old_values where `config.credit` reads them.
    stats: of the policy at the start of the RL step on `batch.topk_ids`; None unless `config.kl_in_reward`.
    hyper: kl_coef and baseline are read. For batch-normalised advantages kl_coef is divided by `advantages.reward_scale`.
  """
  own = later = jnp.zeros_like(batch.advantages)
  metrics = {}
  if config.kl_in_reward:
    stats, clean, in_topk = cleaned(stats, batch)
    weight, mask, _ = tis_weight(clean, config)
    later, metrics = kl_terms(stats, clean, in_topk, weight, mask, config)
    own = k1(stats.logp, clean.ref_logp)
  return config.credit(batch, own, later, hyper), metrics


def policy_kl(stats: TokenStats, ref: TokenStats, batch: RolloutBatch) -> Weighted:
  """KL of the policy that `stats` scored to the model that `ref` scored, mean over trained tokens; both on the same top-k ids."""
  stats, _, in_topk = cleaned(stats, batch)
  ref = jax.tree.map(functools.partial(masking.clean, batch.mask), ref)
  return masking.masked_mean(
    sum(topk_reverse_kl(stats.logp_topk, ref.logp_topk, stats.log_tail, ref.log_tail, stats.logp, ref.logp, in_topk)), batch.mask
  )
