import numpy as np
import pytest

from emapg_jax import advantages

METHODS = (advantages.group_normalized, advantages.group_centred, advantages.leave_one_out)
ALL = (*METHODS, advantages.batch_normalized)
NAN = np.nan


def one_group(method, rewards, dtype=np.float32):
  rewards = np.array(rewards, dtype)
  return method(rewards, np.full(rewards.shape, 7), np.ones(rewards.shape, bool))


@pytest.mark.parametrize(
  "rewards, expected",
  [
    # mean 1/4, sum of squares 9/16 + 3/16 = 3/4, std sqrt(3/4 / 3) = 1/2: (3/4)/(1/2), (-1/4)/(1/2).
    ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    # mean 4/3, sum of squares 2/3, std sqrt(2/3 / 2) = 0.57735: -0.33333/0.57735, 0.66667/0.57735.
    ([1, 1, 2], [-0.57735027, -0.57735027, 1.15470054]),
  ],
)
def test_group_normalized_divides_by_the_sample_std(rewards, expected):
  # The 1e-6 next to a std of about 1/2 moves a number by 2e-6 of itself; n instead of n − 1 would move it by 15 %.
  result = one_group(advantages.group_normalized, rewards)
  np.testing.assert_allclose(result, expected, rtol=3e-6)
  assert result.dtype == np.float32


def test_eps_is_a_millionth_of_reward():
  # Rewards 0 and 2e-6: mean 1e-6, std sqrt(2e-12) = 1.41421e-6, 1e-6 / 2.41421e-6 = 0.414214.
  np.testing.assert_allclose(one_group(advantages.group_normalized, [0, 2e-6], np.float64), [-0.41421356, 0.41421356], rtol=1e-6)


def test_group_centred():
  np.testing.assert_allclose(one_group(advantages.group_centred, [1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25], rtol=1e-7)


def test_leave_one_out_singleton():
  # Against seven peers at 0.35 the loser is 0.35 below; each peer is 0.35 − 6 · 0.35 / 7 = 0.05 above its own.
  expected = [-0.35] + [0.05] * 7
  np.testing.assert_allclose(one_group(advantages.leave_one_out, [0] + [0.35] * 7), expected, rtol=1e-6)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.35, 0.95, 1.0, -1e6])
def test_equal_rewards_give_exactly_zero(method, reward):
  # The float64 mean of seven times 0.1 is not 0.1.
  np.testing.assert_array_equal(one_group(method, [reward] * 7, np.float64), np.zeros(7))


@pytest.mark.parametrize("method", ALL)
def test_close_rewards_keep_their_digits(method):
  # Next to 1000 float32 resolves 2⁻¹⁴, four times the smallest difference here; E[x²] − E[x]² would keep none even at 2⁻⁸.
  spread = np.array([0, 2**-16, 2**-15, 0])
  np.testing.assert_allclose(one_group(method, 1000 + spread, np.float64), one_group(method, spread, np.float64), rtol=1e-6)


@pytest.mark.parametrize("method", ALL)
def test_group_of_one_is_zero(method):
  np.testing.assert_array_equal(one_group(method, [0.7]), [0])


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf])
def test_unscored_rewards_are_left_out(method, bad):
  result = one_group(method, [1, bad, 0, 1])
  alone = one_group(method, [1, 0, 1])
  np.testing.assert_array_equal(result, [alone[0], 0, alone[1], alone[2]])
  np.testing.assert_array_equal(one_group(method, [bad] * 7 + [0.5]), np.zeros(8))
  np.testing.assert_array_equal(one_group(method, [bad] * 3), np.zeros(3))


def test_baseline_of_three_scored_rows():
  # mean 2/3 over three: 1/3, −2/3, 1/3.
  np.testing.assert_allclose(one_group(advantages.group_centred, [1, NAN, 0, 1]), [1 / 3, 0, -2 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("method", ALL)
def test_rows_that_are_not_valid_are_left_out(method):
  rewards, valid = np.array([1.0, 5.0, 0.0]), np.array([True, False, True])
  alone = one_group(method, [1, 0])
  np.testing.assert_array_equal(method(rewards, np.zeros(3, int), valid), [alone[0], 0, alone[1]])
  np.testing.assert_array_equal(advantages.scored(np.array([1.0, NAN, 0.0]), valid), [True, False, True])
  np.testing.assert_array_equal(advantages.scored(np.array([NAN, 1.0, 0.0]), valid), [False, False, True])


@pytest.mark.parametrize("method", METHODS)
def test_groups_are_keyed_by_uid_not_by_position(method):
  rng = np.random.default_rng(1)
  uids = np.repeat([2**40 + 5, 5, 0, 2**40 + 1], [4, 2, 3, 4])  # unequal sizes, and ids that int32 and float32 would merge
  rewards = rng.uniform(size=uids.size)
  valid = rng.uniform(size=uids.size) < 0.8
  by_hand = np.concatenate([method(rewards[uids == u], uids[uids == u], valid[uids == u]) for u in dict.fromkeys(uids)])
  assert np.count_nonzero(by_hand) > 4
  np.testing.assert_array_equal(method(rewards, uids, valid), by_hand)
  order = rng.permutation(uids.size)
  # A permuted float64 sum may differ in its last digit, which float32 rounds away but for a rare tie.
  np.testing.assert_allclose(method(rewards[order], uids[order], valid[order]), by_hand[order], rtol=2e-7)


def test_batch_normalized_sees_no_groups():
  # Mean 1/4 and std 1/2 over all four, as for one group; by groups it would be ±0.7071 and 0.
  result = advantages.batch_normalized(np.array([1.0, 0, 0, 0]), np.array([3, 3, 5, 5]), np.ones(4, bool))
  np.testing.assert_allclose(result, [1.5, -0.5, -0.5, -0.5], rtol=3e-6)
  assert result.dtype == np.float32
  # Equal within each group, not over the batch: mean 1/2, sum of squares 1, std sqrt(1/3) = 0.57735, ±0.5/0.57735.
  result = advantages.batch_normalized(np.array([1.0, 1, 0, 0]), np.array([3, 3, 5, 5]), np.ones(4, bool))
  np.testing.assert_allclose(result, np.array([1, 1, -1, -1]) * 0.8660254, rtol=3e-6)


def test_reward_scale_is_what_batch_normalized_divides_by():
  # Rows 1, 0, 0, 0 are scored: std 1/2. Rewards 0 and 2e-6: 1.41421e-6 + 1e-6.
  rewards, valid = np.array([1, NAN, 0, 0, 9, 0]), np.array([1, 1, 1, 1, 0, 1], bool)
  groups = np.array([3, 3, 3, 5, 5, 5])
  np.testing.assert_allclose(advantages.reward_scale(rewards, groups, valid), 0.500001, rtol=1e-12)
  np.testing.assert_allclose(advantages.reward_scale(np.array([0, 2e-6]), np.array([0, 1]), np.ones(2, bool)), 2.41421356e-6, rtol=1e-6)
  result = advantages.batch_normalized(rewards, groups, valid) * advantages.reward_scale(rewards, groups, valid)
  np.testing.assert_allclose(result, [0.75, 0, -0.25, -0.25, 0, -0.25], rtol=1e-6)


@pytest.mark.parametrize(
  ("rewards", "spread"),
  [
    ([0.0] + [0.95] * 7, True),
    ([0.1] * 7, False),  # the float64 mean of which is not 0.1
    ([1.0, np.nextafter(1.0, 2.0)], True),
    ([NAN, 1.0, 1.0], False),
    ([NAN, 1.0, 0.0], True),
    ([np.inf, 1.0, 1.0], False),
    ([NAN, 1.0], False),
    ([1.0], False),
    ([NAN, NAN], False),
    ([], False),
  ],
)
def test_spread_is_among_the_scored_rows_and_said_of_all(rewards, spread):
  result = one_group(advantages.has_spread, rewards, np.float64)
  assert result.dtype == bool
  assert result.tolist() == [spread] * len(rewards)


def test_spread_is_by_group_wherever_its_rows_stand():
  rewards = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.5])
  groups = np.array([9, 2**40, 9, 2**40 + 1, 3, 3])
  assert advantages.has_spread(rewards, groups, np.ones(6, bool)).tolist() == [True, False, True, False, True, True]
  # Without its row 0 group 9 has one reward left; the row that is left out belongs to it all the same.
  valid = np.array([False, True, True, True, True, True])
  assert advantages.has_spread(rewards, groups, valid).tolist() == [False, False, False, False, True, True]
  with pytest.raises(ValueError, match="one length"):
    advantages.has_spread(rewards, groups[:5], valid)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.7], [0.7, NAN], [NAN, NAN], []])
def test_reward_scale_without_spread_is_one(rewards):
  # Not 1e-6, nor the rounding residue of seven times 0.1: the KL would be multiplied by a million.
  assert one_group(advantages.reward_scale, rewards, np.float64) == 1.0


def test_overlong_penalty():
  # Longest 10, cache 4: free up to 6, then a quarter for each token; −1 at the limit and past it.
  penalty = advantages.overlong_penalty(np.array([0, 5, 6, 7, 8, 9, 10, 11, 1000]), 10, 4)
  np.testing.assert_array_equal(penalty, [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1])
  # The paper's numbers: 16384 tokens expected, 4096 more allowed.
  np.testing.assert_array_equal(advantages.overlong_penalty(np.array([16384, 18432, 20480]), 20480, 4096), [0, -0.5, -1])
  np.testing.assert_array_equal(advantages.overlong_penalty(np.array([0, 1, 4]), 4, 4), [0, -0.25, -1])


@pytest.mark.parametrize("cache", [0, -1, 11])
def test_overlong_cache_out_of_range_is_an_error(cache):
  with pytest.raises(ValueError, match=f"cache={cache} for max_new_tokens=10"):
    advantages.overlong_penalty(np.array([1]), 10, cache)


def test_group_metrics():
  rewards = np.array([0, 0, 1, 1, 0, 1, 0.5, 0.5, NAN, NAN, 1, NAN])
  groups = np.repeat([10, 11, 12, 13, 14, 15], 2)
  # Scored groups: 10 (none), 11 (all), 12 (some), 13 (some, flat), 15 (all, one row); 14 has no scored row.
  metrics = advantages.group_metrics(rewards, groups, np.ones(12, bool))
  assert metrics == {"solve_none": 1 / 5, "solve_all": 2 / 5, "solve_some": 2 / 5, "degenerate": 4 / 5}


def test_group_metrics_take_solved_from_scores_and_degenerate_from_shaped_rewards():
  scores = np.array([1.0, 1.0, 0.0, 0.0])
  rewards = scores + np.array([0.0, -0.5, 0.0, 0.0])
  metrics = advantages.group_metrics(rewards, np.array([0, 0, 1, 1]), np.ones(4, bool), scores)
  assert metrics == {"solve_none": 0.5, "solve_all": 0.5, "solve_some": 0.0, "degenerate": 0.5}


def test_group_metrics_without_a_scored_group_are_zero():
  metrics = advantages.group_metrics(np.array([NAN]), np.array([0]), np.ones(1, bool))
  assert metrics == {"solve_none": 0.0, "solve_all": 0.0, "solve_some": 0.0, "degenerate": 0.0}


def test_bad_arrays_are_errors():
  with pytest.raises(ValueError, match="one length"):
    advantages.group_normalized(np.ones(4), np.zeros(3, int), np.ones(4, bool))
  with pytest.raises(ValueError, match="one length"):
    advantages.group_normalized(np.ones((2, 2)), np.zeros((2, 2), int), np.ones((2, 2), bool))
  with pytest.raises(ValueError, match="float64"):
    advantages.group_normalized(np.ones(4), np.zeros(4), np.ones(4, bool))
  for batch_statistic in (advantages.batch_normalized, advantages.reward_scale):
    with pytest.raises(ValueError, match="one length"):
      batch_statistic(np.ones(4), np.zeros(3, int), np.ones(4, bool))
  with pytest.raises(ValueError, match="one score per row"):
    advantages.group_metrics(np.ones(4), np.zeros(4, int), np.ones(4, bool), np.ones(3))
