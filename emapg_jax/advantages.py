"""Advantages of whole responses from the rewards of their group. Host code: numpy, before anything is sharded.

A group is the rows that share a `prompt_uid`; where they stand in the batch means nothing. All functions take the same three arrays:

  rewards    [N], score plus shaping. A reward that is not finite is an unscored row.
  group_ids  int [N], the prompt_uid of each row.
  valid      bool [N], False for rows to leave out: padding rows, empty responses.

and return float32 [N], computed in float64. Rows that are not `scored` enter no statistic and get 0. A group whose rewards are all equal
gives exactly 0.0 for each member, decided by max == min on the rewards as given: a computed standard deviation of equal numbers is a
rounding residue, and dividing by it turns nothing into thousands. A group with one scored row gives 0. The standard deviation divides
by n − 1.
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
  centred = r - r.mean()
  # Two passes: the difference of a mean square and a squared mean keeps no digit when the rewards are close together.
  std = np.sqrt(np.sum(centred**2) / (r.size - 1))
  return centred / (std + STD_EPS)


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
