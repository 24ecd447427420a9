"""Advantages of whole responses from the rewards of their group or batch, and what is added to rewards. Host code: numpy, before sharding.

A group is the rows that share a `prompt_uid`; where they stand in the batch means nothing. The batch is all rows of one RL step, whatever
their group. All advantages take the same three arrays:

  rewards    [N], score plus shaping. A reward that is not finite is an unscored row.
  group_ids  int [N], the prompt_uid of each row.
  valid      bool [N], False for rows to leave out: padding rows, empty responses.

and return float32 [N], computed in float64. Rows that are not `scored` enter no statistic and get 0. A group, or batch, whose rewards are
all equal gives exactly 0.0 for each member, decided by max == min on the rewards as given: a computed standard deviation of equal numbers
is a rounding residue, and dividing by it turns nothing into thousands. One scored row gives 0. The standard deviation divides by n − 1.
"""

from collections.abc import Callable, Iterator

import numpy as np

STD_EPS = 1e-6


def group_normalized(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """The group-normalised advantage of GRPO: `(r − mean) / (std + 1e-6)`, mean and std over the scored rows of the group.

  Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2.

  Args:
    rewards: float [N].
    group_ids: int [N].
    valid: bool [N].

  Returns:
    float32 [N]; 0 for rows that are not scored and in groups without spread.

  Raises:
    ValueError: arrays that are not of one length, or group ids that are not integers.
  """
  return _by_group(_normalized, rewards, group_ids, valid)


def group_centred(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """The group-normalised advantage without its division: `r − mean`.

  Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO, arXiv 2503.20783), section 3.2.

  Args:
    rewards: float [N].
    group_ids: int [N].
    valid: bool [N].

  Returns:
    float32 [N]; 0 for rows that are not scored and in groups without spread.

  Raises:
    ValueError: arrays that are not of one length, or group ids that are not integers.
  """
  return _by_group(_centred, rewards, group_ids, valid)


def leave_one_out(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """The advantage over the other rows of the group: `r − mean of the others`, which is `n / (n − 1) · (r − mean)`.

  Not divided by any standard deviation: that of identical peers is 0. Ahmadian et al., "Back to Basics" (RLOO, arXiv 2402.14740).

  Args:
    rewards: float [N].
    group_ids: int [N].
    valid: bool [N].

  Returns:
    float32 [N]; 0 for rows that are not scored and in groups without spread.

  Raises:
    ValueError: arrays that are not of one length, or group ids that are not integers.
  """
  return _by_group(_left_out, rewards, group_ids, valid)


def batch_normalized(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """The batch-normalised advantage: `(r − mean) / (std + 1e-6)`, mean and std over the scored rows of the RL step.

  A KL in the reward is divided by the same number, `reward_scale`, so that its coefficient means what it means before the division.

  Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization", arXiv 2501.03262.

  Args:
    rewards: float [N], all rows of the RL step: of a part of them mean and std would be others.
    group_ids: int [N]; groups don't matter here.
    valid: bool [N].

  Returns:
    float32 [N]; 0 for rows that are not scored and in a batch without spread.

  Raises:
    ValueError: arrays that are not of one length, or group ids that are not integers.
  """
  return _by_group(_normalized, rewards, np.zeros_like(group_ids), valid)


def reward_scale(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> float:
  """What `batch_normalized` divides by: `std + 1e-6`, std over the scored rows of the RL step; 1 for a batch without spread.

  To be divided by, too: all else that is counted in units of reward, as the KL in the reward.
  Without spread there is no unit to divide by, and `batch_normalized` gives 0 at any; 1e-6 would turn the KL into millions.

  Args:
    rewards: float [N], all rows of the RL step.
    group_ids: int [N]; groups don't matter here.
    valid: bool [N].

  Returns:
    A positive number.

  Raises:
    ValueError: arrays that are not of one length, or group ids that are not integers.
  """
  rewards = np.asarray(rewards, np.float64)
  for rows in _groups(rewards, np.zeros_like(group_ids), valid):  # one group, or none
    if np.ptp(rewards[rows]) != 0:
      return float(_std(rewards[rows]) + STD_EPS)
  return 1.0


def overlong_penalty(length: np.ndarray, max_new_tokens: int, cache: int) -> np.ndarray:
  """The soft over-long penalty of DAPO, to be added to the scores before any statistic: 0, then linear over the last `cache` tokens.

    penalty = clip((max_new_tokens − cache − length) / cache, −1, 0)

  Yu et al. (DAPO), arXiv 2503.14476, section 3.4, equation 13, with L_max = max_new_tokens and L_cache = cache: 20480 and 4096 there.

  Args:
    length: int [N], response lengths in tokens, the end token included.
    max_new_tokens: the longest possible response, in tokens.
    cache: tokens before max_new_tokens at which the penalty begins, in [1, max_new_tokens].

  Returns:
    float64 [N] in [−1, 0]: 0 up to `max_new_tokens − cache`, −1 at `max_new_tokens` and past it.

  Raises:
    ValueError: a cache out of its range.
  """
  if not 1 <= cache <= max_new_tokens:
    raise ValueError(
      f"overlong_penalty got cache={cache} for max_new_tokens={max_new_tokens}: the penalty grows over the last `cache` tokens of the "
      "longest response, so cache must lie in [1, max_new_tokens]. Use a fifth of max_new_tokens, or leave the penalty out."
    )
  return np.clip((max_new_tokens - cache - np.asarray(length, np.float64)) / cache, -1.0, 0.0)


def has_spread(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """True, bool [N], for all rows of a group whose scored rewards are not all equal; arguments as above."""
  rewards = np.asarray(rewards, np.float64)
  useful = [group_ids[rows[0]] for rows in _groups(rewards, group_ids, valid) if np.ptp(rewards[rows]) != 0]
  return np.isin(group_ids, useful)


def scored(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """True for rows that enter group statistics: valid, with a finite reward. The others are not to be trained on, and to be counted."""
  return np.asarray(valid, bool) & np.isfinite(np.asarray(rewards, np.float64))


def group_metrics(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray, scores: np.ndarray | None = None) -> dict[str, float]:
  """Fractions of the groups that have at least one scored row; all 0 when there is no such group.

  Args:
    rewards: float [N].
    group_ids: int [N].
    valid: bool [N].
    scores: float [N] in [0, 1], the rewards before shaping; None when there was no shaping.

  Returns:
    solve_none, solve_all: every score is 0, every score is 1; solve_some: the remaining groups; degenerate: all rewards are equal, so the
    group trains nothing.

  Raises:
    ValueError: arrays that are not of one length, or group ids that are not integers.
  """
  rewards = np.asarray(rewards, np.float64)
  scores = rewards if scores is None else np.asarray(scores, np.float64)
  if scores.shape != rewards.shape:
    raise ValueError(f"group_metrics got scores of shape {scores.shape} for rewards of shape {rewards.shape}: pass one score per row.")
  groups = list(_groups(rewards, group_ids, valid))
  none = sum(np.all(scores[rows] == 0) for rows in groups)
  every = sum(np.all(scores[rows] == 1) for rows in groups)
  flat = sum(np.ptp(rewards[rows]) == 0 for rows in groups)
  counts = {"solve_none": none, "solve_all": every, "solve_some": len(groups) - none - every, "degenerate": flat}
  return {name: float(count) / max(len(groups), 1) for name, count in counts.items()}


def _normalized(r):
  return (r - r.mean()) / (_std(r) + STD_EPS)


def _std(r):
  # Two passes: the difference of a mean square and a squared mean keeps no digit when the rewards are close together.
  return np.sqrt(np.sum((r - r.mean()) ** 2) / (r.size - 1))


def _centred(r):
  return r - r.mean()


def _left_out(r):
  return (r - r.mean()) * (r.size / (r.size - 1))


def _by_group(advantage: Callable[[np.ndarray], np.ndarray], rewards, group_ids, valid) -> np.ndarray:
  rewards = np.asarray(rewards, np.float64)
  advantages = np.zeros(rewards.shape, np.float64)
  for rows in _groups(rewards, group_ids, valid):
    r = rewards[rows]
    if r.max() != r.min():
      advantages[rows] = advantage(r)
  return advantages.astype(np.float32)


def _groups(rewards, group_ids, valid) -> Iterator[np.ndarray]:
  """The scored rows of each group, in the order of the group ids; groups without such a row are left out."""
  group_ids, valid = np.asarray(group_ids), np.asarray(valid)
  if rewards.ndim != 1 or rewards.shape != group_ids.shape or rewards.shape != valid.shape:
    raise ValueError(
      f"Group statistics need one reward, one group id and one valid flag per row, but got shapes {rewards.shape}, {group_ids.shape} and "
      f"{valid.shape}. Pass three arrays of one length."
    )
  if not np.issubdtype(group_ids.dtype, np.integer):
    raise ValueError(
      f"Group ids have dtype {group_ids.dtype}, which can merge groups by rounding. Pass the integer prompt_uid of each row."
    )
  rows = np.flatnonzero(scored(rewards, valid))
  rows = rows[np.argsort(group_ids[rows], kind="stable")]
  starts = np.flatnonzero(np.diff(group_ids[rows])) + 1
  return iter(np.split(rows, starts) if rows.size else [])
