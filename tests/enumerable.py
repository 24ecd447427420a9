"""A policy whose responses can all be written down, and the training step in expectation over them. Run it in float64.

The vocabulary has three tokens, token 0 ends a response, and a response that has not ended after three tokens is cut: 15 responses to one
prompt. A batch is one of them, or several; `expected_change` is what the training step does to the weights, averaged over all batches by
the probability of each.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from emapg_jax import losses
from emapg_jax.presets import KL_EXACT, KL_SAMPLED, KL_TOPK
from emapg_jax.score_step import before_responses, credit_step, score_step, value_step
from emapg_jax.step_config import StepConfig
from emapg_jax.train_step import init_state, train_step
from emapg_jax.types import Hyper, PyTree, RolloutBatch, TrainState
from experiments.estimators import ESTIMATORS
from experiments.rl_step import score_batch
from experiments.sequence_kl import enumerate_responses

VOCAB, LENGTH, HIDDEN, PROMPT = 3, 3, 4, 2
TEMPERATURE = 0.8
KL_COEF, BASELINE = 0.5, 0.25  # float32 holds them exactly, as it does the rewards
TOKENS, MASK = (np.asarray(x) for x in (enumerate_responses(VOCAB, LENGTH).tokens, enumerate_responses(VOCAB, LENGTH).mask))
COUNT = len(TOKENS)
SEQUENCES = np.concatenate([np.full((COUNT, 1), PROMPT, np.int32), TOKENS], axis=1)
REWARDS = np.random.default_rng(7).integers(-8, 9, COUNT) / 8
SGD = optax.sgd(1.0)
SINGLES, PAIRS = (np.asarray(list(itertools.product(range(COUNT), repeat=rows))) for rows in (1, 2))  # all batches of one and of two rows


def weights(seed: int) -> dict[str, np.ndarray]:
  """Random weights, float64."""
  rng = np.random.default_rng(seed)
  shapes = {"embedding": (VOCAB, HIDDEN), "recurrent": (HIDDEN, HIDDEN), "unembedding": (HIDDEN, VOCAB), "bias": (VOCAB,)}
  return {name: rng.normal(size=shape) * 0.7 for name, shape in shapes.items()}


def perturbed(params: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
  """Weights at a distance of 0.3 each."""
  rng = np.random.default_rng(seed)
  return {name: p + 0.3 * rng.normal(size=p.shape) for name, p in params.items()}


POLICY = weights(11)
ANCHOR = perturbed(POLICY, 1)
SAMPLER = perturbed(POLICY, 2)  # writes the responses of the off-policy tests
CRITIC = weights(3)


def hidden_states(params: PyTree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A recurrent network; its last hidden feature is 1 and meets the bias."""
  state, states = jnp.zeros((tokens.shape[0], HIDDEN), jnp.float64), []
  for token in tokens.T:
    state = jnp.tanh(params["embedding"][token] + state @ params["recurrent"])
    states.append(state)
  hidden = jnp.stack(states, axis=1)
  return jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1), jnp.vstack([params["unembedding"], params["bias"][None]])


def model(params: PyTree, frozen: PyTree, batch: RolloutBatch) -> tuple[jax.Array, jax.Array]:
  """The network as the step reads it."""
  del frozen
  hidden, unembedding = hidden_states(params, batch.tokens)
  return before_responses(hidden, batch), unembedding


def critic(params: PyTree, frozen: PyTree, batch: RolloutBatch) -> jax.Array:
  """Values that depend on the tokens so far and on nothing else."""
  return model(params, frozen, batch)[0][..., 0]


@jax.jit
def response_logp(params: PyTree) -> jax.Array:
  """Log-probability [COUNT, LENGTH] of each token of each response, 0 after its end; written without the code under test."""
  hidden, unembedding = hidden_states(params, SEQUENCES)
  logps = jax.nn.log_softmax(hidden[:, :-1] @ unembedding / TEMPERATURE)
  return jnp.where(MASK, jnp.sum(logps * jax.nn.one_hot(TOKENS, VOCAB), axis=-1), 0.0)


@functools.cache
def sampling_logp(sampler: str) -> np.ndarray:
  """`response_logp` of the policy, or of the other sampler."""
  return np.asarray(response_logp({"policy": POLICY, "sampler": SAMPLER}[sampler]))


def probabilities(sampler: str) -> np.ndarray:
  """How likely each response is, [COUNT]."""
  return np.exp(sampling_logp(sampler).sum(axis=-1))


def config(**changes) -> StepConfig:
  """REINFORCE with the sum over the tokens of a response, without clip, in micro-batches of one row."""
  plain = {"policy_loss": losses.reinforce_with_aux, "aggregation": "sequence_sum", "max_new_tokens": LENGTH}
  return StepConfig(**({"micro_batch": 1, "mini_batches": 1, "temperature": TEMPERATURE} | plain | changes))


def hyper() -> Hyper:
  return Hyper(np.float32(KL_COEF), np.float32(1), np.int32(1), np.float32(1), np.float32(BASELINE))


def bare_batch(chosen: np.ndarray, advantages: np.ndarray, sampler: str) -> RolloutBatch:
  """All the batches `chosen` in one, [N · rows, ...], with the advantages of their rows: as a rollout hands them over, not yet scored."""
  rows = chosen.ravel()
  mask, zeros = MASK[rows], np.zeros((len(rows), LENGTH))
  no_ids = np.zeros((len(rows), LENGTH, 0))
  return RolloutBatch(
    tokens=SEQUENCES[rows],
    prompt_length=np.ones(len(rows), np.int32),
    mask=mask,
    real=np.ones(len(rows), bool),
    advantages=np.where(mask, advantages.reshape(-1, 1), np.nan),
    sampling_logp=np.where(mask, sampling_logp(sampler)[rows], np.nan),
    old_logp=zeros,
    topk_ids=no_ids.astype(np.int32),
    ref_logp=zeros,
    ref_logp_topk=no_ids,
    ref_log_tail=zeros,
    rewards=REWARDS[rows],
  )


@functools.cache
def _score(topk: int) -> Callable:
  return jax.jit(functools.partial(score_step, model=model, config=config(topk=topk)))


@functools.cache
def _value() -> Callable:
  return jax.jit(functools.partial(value_step, critic=critic, config=config()))


@functools.cache
def _credit(step_config: StepConfig) -> Callable:
  return jax.jit(functools.partial(credit_step, config=step_config))


@functools.cache
def _train(step_config: StepConfig, names: tuple[str, ...], with_critic: bool) -> Callable:
  """Which of the estimators `names` is the KL is traced, so that they share one compilation."""

  def mean_change(state, data, settings, likelihood, which):
    def chosen(*args):
      return lax.switch(which, [ESTIMATORS[name] for name in names], *args)

    step = functools.partial(
      train_step,
      model=model,
      optimizer=SGD,
      config=dataclasses.replace(step_config, kl=chosen if names else None),
      critic=critic if with_critic else None,
    )
    after = jax.vmap(lambda one: step(state, (), one, settings)[0].params)(data)
    return jax.tree.map(lambda new, old: jnp.tensordot(likelihood, new - old[None], axes=1), after, state.params)

  return jax.jit(mean_change)


def scored(batch: RolloutBatch, step_config: StepConfig, owner: str, with_values: bool) -> RolloutBatch:
  """The batch as the training loop completes it."""
  run = types.SimpleNamespace(
    config=types.SimpleNamespace(topk_owner=owner),
    step_config=step_config,
    needs_old_pass=True,
    score=_score(step_config.topk),
    value=_value() if with_values else None,
    credit=_credit(step_config) if step_config.credit else None,
  )
  # The anchor of a run is float32; here it is only ever read.
  state = TrainState(params={"policy": POLICY, "value": CRITIC}, ema_params=ANCHOR, opt_state=(), step=np.int32(0))
  return score_batch(run, state, None, batch, hyper())[0]


def expected_change(
  kl: str | None = None,
  topk: int = 0,
  *,
  owner: str = "policy",
  chosen: np.ndarray = SINGLES,
  advantages: np.ndarray = REWARDS,
  sampler: str = "policy",
  with_values: bool = False,
  with_critic: bool = False,
  **settings,
) -> np.ndarray | dict[str, np.ndarray]:
  """The mean of new weights − old weights over all batches, by their probability; flat; of policy and critic, where that is trained, too.

  Args:
    kl: the estimator's name.
    topk: its K.
    owner: of the top-k ids: "policy" or "anchor".
    chosen: the responses of each batch, [N, rows].
    advantages: of each row [N, rows]; not read where the credit is made from rewards.
    sampler: what wrote the responses, "policy" or "sampler".
    with_values: score the batch with the critic.
    with_critic: train the critic, too.
    **settings: of the step.
  """
  step_config = config(kl=ESTIMATORS[kl] if kl else None, topk=topk, **settings)
  batch = scored(bare_batch(chosen, advantages, sampler), step_config, owner, with_values)
  batch = jax.tree.map(lambda x: x.reshape(*chosen.shape, *x.shape[1:]), batch)
  params = jax.tree.map(jnp.asarray, {"policy": POLICY, "value": CRITIC} if with_critic else POLICY)
  names = next((family for family in (KL_SAMPLED, KL_EXACT, KL_TOPK) if kl in family), ())
  step = _train(dataclasses.replace(step_config, kl=None, credit=None), names, with_critic)
  likelihood = np.prod(probabilities(sampler)[chosen], axis=1)
  change = step(init_state(params, SGD, with_anchor=False), batch, hyper(), likelihood, names.index(kl) if kl else 0)
  assert all(x.dtype == np.float64 for x in jax.tree.leaves((change, batch.advantages, batch.ref_logp, batch.old_logp)))
  return {name: flat(part) for name, part in change.items()} if with_critic else flat(change)


def flat(tree: PyTree) -> np.ndarray:
  """All numbers of a tree in one vector."""
  return np.asarray(ravel_pytree(tree)[0])
