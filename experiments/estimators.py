"""From `--kl` to a function: every estimator behind one signature, (stats, batch, in_topk) -> (head, tail) per token."""

import jax
import jax.numpy as jnp

from emapg_jax import kl
from emapg_jax.train_step import KL
from emapg_jax.types import RolloutBatch, TokenStats


def _sampled(estimator) -> KL:
  def terms(stats: TokenStats, batch: RolloutBatch, in_topk: jax.Array):
    tail = estimator(stats.logp, batch.ref_logp)
    return jnp.zeros_like(tail), tail

  return terms


def _listed(estimator) -> KL:
  def terms(stats: TokenStats, batch: RolloutBatch, in_topk: jax.Array):
    return estimator(stats.logp_topk, batch.ref_logp_topk, stats.logp, batch.ref_logp, in_topk)

  return terms


def _chain_rule(estimator) -> KL:
  def terms(stats: TokenStats, batch: RolloutBatch, in_topk: jax.Array):
    return estimator(stats.logp_topk, batch.ref_logp_topk, stats.log_tail, batch.ref_log_tail, stats.logp, batch.ref_logp, in_topk)

  return terms


ESTIMATORS: dict[str, KL] = {
  "k1": _sampled(kl.k1),
  "k2": _sampled(kl.k2),
  "k3": _sampled(kl.k3),
  "k3pp": _sampled(kl.k3pp),
  "k4": _sampled(kl.k4),
  "k5": _sampled(kl.k5),
  # With every id in the list the tail is empty and the chain rule is the exact KL.
  "exact_reverse": _chain_rule(kl.topk_reverse_kl),
  "exact_forward": _chain_rule(kl.topk_forward_kl),
  "topk_reverse": _chain_rule(kl.topk_reverse_kl),
  "topk_forward": _chain_rule(kl.topk_forward_kl),
  "score_topk_reverse": _listed(kl.score_topk_reverse_kl),
  "score_topk_forward": _listed(kl.score_topk_forward_kl),
  "published_topk_reverse": _listed(kl.published_topk_reverse_kl),
  "published_topk_forward": _listed(kl.published_topk_forward_kl),
}
