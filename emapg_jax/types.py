"""The pytrees that move between modules. B sequences, T response tokens, S = prompt + response, K top-k ids, V vocabulary."""

from typing import Any

import jax
from flax import struct

PyTree = Any


@struct.dataclass
class TrainState:
  """All that training changes on the devices; updated by `train_step` alone."""

  params: PyTree  # the policy, in the parameter dtype; with a critic {"policy": ..., "value": ...}
  ema_params: PyTree  # the anchor, float32, same tree as the policy; None when nothing would ever read it
  opt_state: PyTree  # optax state; its count counts optimizer updates
  step: jax.Array  # int32 [], RL steps completed

  @property
  def policy(self) -> PyTree:
    """The policy's parameters, with or without a critic beside them."""
    return policy_of(self.params)


def policy_of(params: PyTree) -> PyTree:
  """The policy's part of `TrainState.params`."""
  return params["policy"] if isinstance(params, dict) and params.keys() == {"policy", "value"} else params


@struct.dataclass
class Hyper:
  """Settings that are traced, so that changing them compiles nothing; float32 or int32."""

  kl_coef: jax.Array  # [], β
  ema_decay: jax.Array  # [], η, the weight kept
  ema_period: jax.Array  # [], RL steps between anchor updates
  lr_scale: jax.Array  # [] or [U], multiplies the optimizer's updates: all of them, or each of the U of an RL step
  baseline: jax.Array | float = 0.0  # [], subtracted from the reward-to-go; read by `credit_step` alone


@struct.dataclass
class TokenStats:
  """What one distribution says of each response token; log-probabilities are in nats, at the rollout temperature."""

  logp: jax.Array  # float32 [..., T], log-probability of the token at hand
  entropy: jax.Array  # float32 [..., T]
  logsumexp: jax.Array  # float32 [..., T], of the tempered logits
  topk_ids: jax.Array  # int32 [..., T, K]
  logp_topk: jax.Array  # float32 [..., T, K], log-probabilities of topk_ids, normalised over the full vocabulary
  log_tail: jax.Array  # float32 [..., T], log of the mass outside topk_ids; -inf when K = V


@struct.dataclass
class RolloutBatch:
  """One RL step's data. Entry t of every [B, T] array belongs to response token t, predicted from the position before it."""

  tokens: jax.Array  # int32 [B, S], prompt then response then padding, no gap between
  prompt_length: jax.Array  # int32 [B], at least 1
  mask: jax.Array  # bool [B, T], True where the token is trained on
  real: jax.Array  # bool [B], False for rows that only fill up the batch
  advantages: jax.Array  # float32 [B, T]
  sampling_logp: jax.Array  # float32 [B, T], of the distribution the token was drawn from
  old_logp: jax.Array  # float32 [B, T], of the policy at the start of the RL step, scored by the trainer
  topk_ids: jax.Array  # int32 [B, T, K], fixed for the whole RL step; K may be 0
  ref_logp: jax.Array  # float32 [B, T], of the anchor; like the next two, zeros when the KL is off
  ref_logp_topk: jax.Array  # float32 [B, T, K]
  ref_log_tail: jax.Array  # float32 [B, T]
  rewards: jax.Array | None = None  # float32 [B], of the whole response; read where the credit of a token is more than its row's advantage
  old_values: jax.Array | None = None  # float32 [B, T], of the critic at the start of the RL step; None without a critic
  returns: jax.Array | None = None  # float32 [B, T], what the critic is trained towards


@struct.dataclass
class Weighted:
  """A mean in the making: sums add up over micro-batches and devices, the division happens once. Value: sum / weight."""

  sum: jax.Array  # float32 []
  weight: jax.Array  # float32 []

  def __add__(self, other: "Weighted") -> "Weighted":
    return Weighted(self.sum + other.sum, self.weight + other.weight)


@struct.dataclass
class Max:
  """A maximum in the making."""

  value: jax.Array  # float32 []


@struct.dataclass
class MicroBatches:
  """The micro-batches in which the rows of a batch are read to one response length: at most C of R rows, for each of U updates."""

  rows: jax.Array  # int32 [U, C, R], rows of the batch
  real: jax.Array  # bool [U, C, R], False for entries that only fill up
  count: jax.Array | None  # int32 [U], how many of the C there are; None: all
  length: int = struct.field(pytree_node=False)  # response tokens that are read of each row


Plan = tuple[MicroBatches, ...]  # all rows of a batch, those of each update together; a scoring pass is one update
