"""From `--kl` to a function: every estimator behind one signature, (stats, batch, in_topk) -> (head, tail, clamped) per token."""

import jax.numpy as jnp

from emapg_jax import kl
from emapg_jax.step_config import KL

MAX_LOG_RATIO = 20.0  # the default bound of the estimators that have one


def _beyond(log_ratio):
  return jnp.abs(log_ratio) > MAX_LOG_RATIO


def _sampled(estimator, bounded: bool) -> KL:
  def terms(stats, batch, in_topk):
    del in_topk
    tail = estimator(stats.logp, batch.ref_logp)
    return jnp.zeros_like(tail), tail, bounded & _beyond(stats.logp - batch.ref_logp)

  return terms


def _listed(estimator) -> KL:
  def terms(stats, batch, in_topk):
    head, tail = estimator(stats.logp_topk, batch.ref_logp_topk, stats.logp, batch.ref_logp, in_topk)
    return head, tail, ~in_topk & _beyond(stats.logp - batch.ref_logp)

  return terms


def _chain_rule(estimator) -> KL:
  def terms(stats, batch, in_topk):
    head, tail = estimator(stats.logp_topk, batch.ref_logp_topk, stats.log_tail, batch.ref_log_tail, stats.logp, batch.ref_logp, in_topk)
    within_tail = stats.logp - stats.log_tail - batch.ref_logp + batch.ref_log_tail
    return head, tail, ~in_topk & _beyond(within_tail)

  return terms


ESTIMATORS: dict[str, KL] = {
  "k1": _sampled(kl.k1, bounded=False),
  "k2": _sampled(kl.k2, bounded=False),
  "k3": _sampled(kl.k3, bounded=True),
  "k3pp": _sampled(kl.k3pp, bounded=True),
  "k4": _sampled(kl.k4, bounded=False),
  "k5": _sampled(kl.k5, bounded=True),
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
