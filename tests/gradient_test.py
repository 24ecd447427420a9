"""EMA-PG's gradient is right: what the training step does to the weights, in expectation over every batch, against exact gradients.

Plain SGD of rate 1 turns the change of the weights into a gradient. The expectation is a sum over all responses, or all pairs, that an
enumerable policy can write, in float64; the exact gradients are written here, with log_softmax and none of the code under test.

  KL in the loss    ∇E[R] − β·E_prefix[Σ_t ∇KL_t], the distribution of the prefixes held fixed
  KL in the reward  ∇(E[R] − β·KL of whole responses)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import advantages, credit, losses
from emapg_jax.presets import KL_IN_REWARD, KL_TOPK
from tests import enumerable
from tests.enumerable import ANCHOR, COUNT, CRITIC, KL_COEF, MASK, PAIRS, POLICY, REWARDS, SEQUENCES, VOCAB, expected_change

pytestmark = pytest.mark.usefixtures("x64")

NO_ADVANTAGE = np.zeros(COUNT)
LENGTHS = MASK.sum(axis=1)


def ids_of(name):
  """Every K to try: proper subsets of the vocabulary for a top-k form, all of it for an exact one, none for one that reads a token."""
  return (1, 2) if name in KL_TOPK else (VOCAB if name.startswith("exact") else 0,)


def cases(*names):
  return [(name, k) for name in names for k in ids_of(name)]


UNBIASED = cases(
  *("k2", "k3pp", "k4", "k5", "exact_reverse", "exact_forward"),
  *("topk_reverse", "topk_forward", "score_topk_reverse", "score_topk_forward"),
)
BIASED = cases("k1", "k3", "published_topk_reverse", "published_topk_forward")


def direction(name):
  return "forward" if name == "k5" or name.endswith("forward") else "reverse"


def owner(name):
  """Of the top-k ids, as by default: the distribution that comes first in the KL."""
  return "anchor" if direction(name) == "forward" else "policy"


def logps(params):
  """Log-probabilities [COUNT, T, V] of every token at every position."""
  hidden, unembedding = enumerable.hidden_states(params, SEQUENCES)
  return jax.nn.log_softmax(hidden[:, :-1] @ unembedding / enumerable.TEMPERATURE)


def mass(params, of, k):
  """Policy mass [COUNT, T] of the k most likely tokens of policy or anchor."""
  ids = np.argsort(logps({"policy": POLICY, "anchor": ANCHOR}[of]), axis=-1)[..., VOCAB - k :]
  return jnp.take_along_axis(jnp.exp(logps(params)), ids, axis=-1).sum(axis=-1)


PER_POSITION = {
  "reverse": lambda params: jnp.sum(jnp.exp(logps(params)) * (logps(params) - logps(ANCHOR)), axis=-1),
  "forward": lambda params: jnp.sum(jnp.exp(logps(ANCHOR)) * (logps(ANCHOR) - logps(params)), axis=-1),
  "entropy": lambda params: -jnp.sum(jnp.exp(logps(params)) * logps(params), axis=-1),
  **{(of, k): functools.partial(mass, of=of, k=k) for of in ("policy", "anchor") for k in (1, 2)},
}


@functools.cache
def position_gradient(kind, sampler="policy"):
  """E_prefix[Σ_t ∇x_t]: x of PER_POSITION, prefixes as `sampler` writes them, whose distribution has no gradient."""
  weight = enumerable.probabilities(sampler)[:, None] * MASK
  return enumerable.flat(jax.grad(lambda params: jnp.sum(weight * PER_POSITION[kind](params)))(POLICY))


@functools.cache
def response_gradient(kind):
  """∇E[x] over whole responses, through their probabilities, too."""

  def objective(params):
    logp, ref_logp = (enumerable.response_logp(p).sum(axis=-1) for p in (params, ANCHOR))
    return jnp.sum(jnp.exp(logp) * {"reward": REWARDS, "reward per token": REWARDS / LENGTHS, "kl": logp - ref_logp}[kind])

  return enumerable.flat(jax.grad(objective)(POLICY))


def predicted_kl_gradient(name, k, sampler="policy"):
  if name == "k1":
    return np.zeros_like(position_gradient("reverse"))
  if name == "k3":
    return position_gradient("forward", sampler)
  sign = {"published_topk_reverse": 1, "published_topk_forward": -1}.get(name, 0)
  bias = sign * position_gradient((owner(name), k), sampler) if sign else 0.0
  return position_gradient(direction(name), sampler) + bias


def assert_equal(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def assert_far(found, expected, least=0.1):
  """Further apart than that part of the expected size."""
  assert np.linalg.norm(found - expected) > least * np.linalg.norm(expected)


def assert_other_direction(found, expected):
  """Not a mere multiple, which a learning rate would undo."""
  assert_far(found / np.linalg.norm(found), expected / np.linalg.norm(expected), 0.02)


def test_what_is_told_apart_is_apart():
  reward, reverse, forward = response_gradient("reward"), position_gradient("reverse"), position_gradient("forward")
  for found, expected in ((forward, reverse), (response_gradient("kl"), reverse), (position_gradient("reverse", "sampler"), reverse)):
    assert_far(found, expected, 0.05)
  assert all(np.linalg.norm(x) > 0.1 for x in (reward, reverse, forward, *map(position_gradient, PER_POSITION)))
  probabilities = enumerable.probabilities("policy")
  np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-14)
  assert min(probabilities[length == LENGTHS].sum() for length in (1, 2, 3)) > 0.1


@pytest.mark.parametrize("name, k", UNBIASED)
def test_kl_in_the_loss(name, k):
  found = expected_change(name, k, owner=owner(name))
  assert_equal(found, response_gradient("reward") - KL_COEF * position_gradient(direction(name)))


@pytest.mark.parametrize("name, k", BIASED)
def test_kl_in_the_loss_is_off_by_what_the_biased_forms_are_known_for(name, k):
  """k1 has no gradient in expectation, k3 that of the forward KL; the published forms add ±∇π(q)."""
  found = expected_change(name, k, owner=owner(name))
  assert_equal(found, response_gradient("reward") - KL_COEF * predicted_kl_gradient(name, k))
  assert_far(response_gradient("reward") - found, KL_COEF * position_gradient(direction(name)))


@pytest.mark.parametrize("name, k", UNBIASED + BIASED)
def test_kl_in_the_loss_of_responses_from_another_sampler(name, k):
  """The weight of a token corrects its own draw; the prefixes stay those of the sampler, and the advantages are not corrected at all."""
  found = expected_change(name, k, owner=owner(name), sampler="sampler", advantages=NO_ADVANTAGE)
  assert_equal(found, -KL_COEF * predicted_kl_gradient(name, k, "sampler"))


@pytest.mark.parametrize("name, k", [case for case in UNBIASED + BIASED if case[1] < 2])
def test_truncated_importance_sampling_takes_the_place_of_the_weight(name, k):
  """As long as its cap does not bind: the mismatch counts once, not twice."""
  found = expected_change(name, k, owner=owner(name), sampler="sampler", advantages=NO_ADVANTAGE, tis_cap=1e9)
  assert_equal(found, -KL_COEF * predicted_kl_gradient(name, k, "sampler"))


@pytest.mark.parametrize("name, k", cases(*KL_IN_REWARD))
def test_kl_in_the_reward(name, k):
  """Whatever stands after the token needs the right value only, so that the published form will do."""
  found = expected_change(name, k, kl_in_reward=True, credit=credit.response_advantages)
  assert_equal(found, response_gradient("reward") - KL_COEF * response_gradient("kl"))


def own_value(batch, own, later, hyper):
  del own
  return credit.response_advantages(batch, later, later, hyper)


@pytest.mark.parametrize("name, k", cases("k3", "exact_reverse", "topk_reverse", "score_topk_reverse"))
def test_kl_in_the_reward_is_wrong_with_the_value_of_another_estimator_at_the_own_token(name, k):
  found = expected_change(name, k, kl_in_reward=True, credit=own_value, advantages=NO_ADVANTAGE)
  assert_far(found, -KL_COEF * response_gradient("kl"), 0.3)


def leave_one_out(function=advantages.leave_one_out):
  """Advantages [N, 2] of all pairs, each a group; the rewards are such that float32 holds these exactly."""
  groups = np.repeat(np.arange(len(PAIRS)), 2)
  return function(REWARDS[PAIRS.ravel()], groups, np.ones(PAIRS.size, bool)).reshape(PAIRS.shape).astype(np.float64)


def test_leave_one_out():
  found = expected_change("topk_reverse", 1, chosen=PAIRS, advantages=leave_one_out())
  assert_equal(found, response_gradient("reward") - KL_COEF * position_gradient("reverse"))


def test_leave_one_out_with_the_kl_in_the_reward():
  settings = {"kl_in_reward": True, "credit": credit.response_advantages}
  found = expected_change("topk_reverse", 1, chosen=PAIRS, advantages=leave_one_out(), **settings)
  assert_equal(found, response_gradient("reward") - KL_COEF * response_gradient("kl"))


def test_group_normalized_is_another_gradient():
  """The standard deviation depends on the response itself, so that it is no constant of the expectation; and each group has its own."""
  found = expected_change("topk_reverse", 1, chosen=PAIRS, advantages=leave_one_out(advantages.group_normalized))
  assert_other_direction(found + KL_COEF * position_gradient("reverse"), response_gradient("reward"))


def test_token_mean_is_another_gradient():
  """The length in its denominator depends on the tokens: for a batch of one it is the gradient of the reward per token.

  The KL at a token, too, then weighs more where the response is to end soon.
  """
  found = expected_change(aggregation="token_mean")
  assert_equal(found, response_gradient("reward per token"))
  assert_other_direction(found, response_gradient("reward"))
  found = expected_change("topk_reverse", 1, aggregation="token_mean", advantages=NO_ADVANTAGE)
  assert_other_direction(found, -position_gradient("reverse"))


OVER_BASELINE = functools.partial(credit.reward_to_go_advantages, discount=1.0)
OVER_VALUES = functools.partial(credit.gae_advantages, discount=1.0, gae_lambda=1.0)
SHORT_SIGHTED = functools.partial(credit.gae_advantages, discount=1.0, gae_lambda=0.5)


@pytest.mark.parametrize("token_credit", [OVER_BASELINE, OVER_VALUES], ids=["reward_to_go", "gae"])
@pytest.mark.parametrize("name, k", [(None, 0), ("k3", 0), ("topk_reverse", 1)])
def test_a_baseline_changes_no_expectation(token_credit, name, k):
  found = expected_change(name, k, credit=token_credit, kl_in_reward=name is not None, with_values=token_credit is OVER_VALUES)
  assert_equal(found, response_gradient("reward") - (KL_COEF * response_gradient("kl") if name else 0.0))


def test_gae_lambda_below_1_trusts_the_values():
  found = expected_change(credit=SHORT_SIGHTED, with_values=True)
  assert_other_direction(found, response_gradient("reward"))


@pytest.mark.parametrize("in_reward", [False, True], ids=["kl_in_loss", "kl_in_reward"])
def test_policy_beside_a_critic(in_reward):
  """The policy's gradient is as without, and the critic's that of half its squared error, of rewards that hold the KL where it is there."""
  found = expected_change("topk_reverse", 1, credit=OVER_VALUES, kl_in_reward=in_reward, with_values=True, with_critic=True)
  kl_gradient = response_gradient("kl") if in_reward else position_gradient("reverse")
  assert_equal(found["policy"], response_gradient("reward") - KL_COEF * kl_gradient)
  log_ratio = enumerable.response_logp(POLICY) - enumerable.response_logp(ANCHOR)
  kl_to_go = np.cumsum(log_ratio[:, ::-1], axis=1)[:, ::-1]
  returns = REWARDS[:, None] - KL_COEF * in_reward * kl_to_go

  def half_squared_error(params):
    errors = enumerable.hidden_states(params, SEQUENCES)[0][:, :-1, 0] - returns
    return jnp.sum(enumerable.probabilities("policy")[:, None] * MASK * 0.5 * jnp.square(errors))

  assert_equal(found["value"], -enumerable.flat(jax.grad(half_squared_error)(CRITIC)))


POLICY_LOSSES = {
  "reinforce": losses.reinforce_with_aux,
  "ppo_clip": losses.token_level(losses.ppo_clip),
  "cispo": losses.token_level(functools.partial(losses.cispo, clip_low=1.0, clip_high=4.0)),
  "gspo": functools.partial(losses.gspo, clip_low=3e-4, clip_high=4e-4),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_at_ratio_1(name):
  assert_equal(expected_change(policy_loss=POLICY_LOSSES[name]), response_gradient("reward"))


def test_entropy_bonus():
  found = expected_change(entropy_coef=0.3)
  assert_equal(found, response_gradient("reward") + 0.3 * position_gradient("entropy"))
