import numpy as np
import pytest

from emapg_jax.rollout import batching


@pytest.mark.parametrize(("limit", "sizes"), [(16, (16,)), (7, (7,)), (17, (16, 17)), (100, (16, 32, 64, 100)), (128, (16, 32, 64, 128))])
def test_buckets(limit, sizes):
  assert batching.buckets(limit) == sizes
  assert all(batching.fit(n, limit) >= n for n in range(1, limit + 1))
  assert batching.fit(limit, limit) == limit


def test_pad():
  tokens, lengths = batching.pad([[4, 5], [6]], 3, pad_id=9)
  np.testing.assert_array_equal(tokens, [[4, 5, 9], [6, 9, 9]])
  np.testing.assert_array_equal(lengths, [2, 1])


def test_assemble_puts_the_response_right_behind_the_prompt():
  batch = batching.assemble(
    prompts=np.array([[10, 11, 0, 0], [20, 21, 22, 23]], np.int32),
    prompt_length=np.array([2, 4], np.int32),
    responses=np.array([[1, 2, 7], [3, 7, 7]], np.int32),
    length=np.array([3, 1], np.int32),
    sampling_logp=np.zeros((2, 3), np.float32),
    advantages=np.array([0.5, -1.0], np.float32),
    trained=np.array([True, True]),
  )
  assert batch.tokens[0, :5].tolist() == [10, 11, 1, 2, 7]
  assert batch.tokens[1, :5].tolist() == [20, 21, 22, 23, 3]
  # The mask comes from the lengths: the end token (7) is trained on, the padding (also 7) is not.
  assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
  assert batch.advantages.tolist() == [[0.5] * 3, [-1.0] * 3]


def test_rows_left_out_of_the_loss_have_no_mask():
  ones, two = np.ones((2, 2), np.int32), np.array([2, 2])
  batch = batching.assemble(ones, np.array([1, 2]), ones, two, np.zeros((2, 2)), np.ones(2), np.array([True, False]))
  assert batch.mask.tolist() == [[True, True], [False, False]]
  assert batch.real.all()


def test_rewards_are_there_when_they_are_given():
  ones, two = np.ones((2, 2), np.int32), np.array([2, 2])
  rows = (ones, np.array([1, 2]), ones, two, np.zeros((2, 2)), np.zeros(2), np.array([True, False]))
  assert batching.assemble(*rows).rewards is None
  rewards = batching.assemble(*rows, np.array([0.5, np.nan])).rewards  # of the row that is not trained on, too
  assert rewards.dtype == np.float32
  np.testing.assert_array_equal(rewards, [0.5, np.nan])
