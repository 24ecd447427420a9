"""From token lists to right-padded arrays of bucketed shape, and from sampled responses to a RolloutBatch. Host code: numpy."""

from collections.abc import Sequence

import numpy as np

from emapg_jax.types import RolloutBatch

SMALLEST_BUCKET = 16


def buckets(limit: int) -> tuple[int, ...]:
  """The lengths that arrays are padded to: powers of two from SMALLEST_BUCKET below `limit`, and `limit`."""
  sizes, size = [], SMALLEST_BUCKET
  while size < limit:
    sizes.append(size)
    size *= 2
  return (*sizes, limit)


def fit(length: int, limit: int) -> int:
  """The smallest bucket that holds `length`."""
  return next(size for size in buckets(limit) if size >= length)


def pad(token_lists: Sequence[Sequence[int]], limit: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """(tokens int32 [B, P], lengths int32 [B]), right-padded, P the bucket of the longest."""
  lengths = np.asarray([len(tokens) for tokens in token_lists], np.int32)
  tokens = np.full((len(token_lists), fit(int(lengths.max(initial=1)), limit)), pad_id, np.int32)
  for row, ids in zip(tokens, token_lists):
    row[: len(ids)] = ids
  return tokens, lengths


def assemble(
  prompts: np.ndarray,
  prompt_length: np.ndarray,
  responses: np.ndarray,
  length: np.ndarray,
  sampling_logp: np.ndarray,
  advantages: np.ndarray,
  trained: np.ndarray,
  rewards: np.ndarray | None = None,
) -> RolloutBatch:
  """The batch of an RL step before any scoring: old_logp and the anchor's fields are zeros, K is 0.

  Args:
    prompts: int32 [B, P], right-padded; prompt_length: int32 [B].
    responses: int32 [B, T], padded; length: int32 [B], the end token included; sampling_logp: float32 [B, T]. T is a bucket.
    advantages: float32 [B], one per response.
    trained: bool [B], False for responses that are left out of the loss.
    rewards: float [B], where the credit of a token is made from it.
  """
  batch, size = responses.shape
  width = prompts.shape[1]
  tokens = np.concatenate([prompts, np.zeros_like(responses)], axis=1)
  tokens[:, width:] = responses[:, -1:]  # any id will do behind the response; this one exists
  tokens[np.arange(batch)[:, None], prompt_length[:, None] + np.arange(size)] = responses
  zeros = np.zeros((batch, size), np.float32)
  return RolloutBatch(
    tokens=tokens,
    prompt_length=prompt_length.astype(np.int32),
    mask=(np.arange(size) < length[:, None]) & trained[:, None],
    real=np.ones((batch,), bool),
    advantages=np.broadcast_to(advantages[:, None], (batch, size)).astype(np.float32),
    sampling_logp=sampling_logp.astype(np.float32),
    old_logp=zeros,
    topk_ids=np.zeros((batch, size, 0), np.int32),
    ref_logp=zeros,
    ref_logp_topk=np.zeros((batch, size, 0), np.float32),
    ref_log_tail=zeros,
    rewards=None if rewards is None else rewards.astype(np.float32),
  )
