"""A tiny decoder and a batch for it, shared by the tests of the training step; and a toy model that compiles faster, in any float dtype."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from emapg_jax import losses
from emapg_jax.models import decoder
from emapg_jax.score_step import before_responses, score_step
from emapg_jax.step_config import StepConfig
from emapg_jax.train_step import init_state, train_step
from emapg_jax.types import Hyper, Max, RolloutBatch, TrainState
from experiments.estimators import ESTIMATORS

CONFIG = decoder.DecoderConfig(
  vocab_size=16, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
ROWS, PROMPT, RESPONSE, TOPK = 8, 4, 6, 4


def hidden_states(params, tokens):
  """After each token [B, S, D], and the unembedding."""
  return decoder.apply(CONFIG, params, tokens), decoder.unembedding(params)


def model(params, frozen, batch):
  del frozen
  hidden, unembedding = hidden_states(params, batch.tokens)
  return before_responses(hidden, batch), unembedding


def params(seed=0):
  return decoder.init_params(CONFIG, jax.random.key(seed))


def hyper(kl_coef=0.1, ema_decay=0.9, ema_period=1, lr_scale=1.0) -> Hyper:
  return Hyper(np.float32(kl_coef), np.float32(ema_decay), np.int32(ema_period), np.float32(lr_scale))


def config(**changes) -> StepConfig:
  return StepConfig(**({"micro_batch": ROWS, "mini_batches": 1, "kl": ESTIMATORS["topk_reverse"], "max_new_tokens": RESPONSE} | changes))


def state(optimizer=None, with_anchor=True, seed=0) -> TrainState:
  return init_state(params(seed), optimizer or SGD, with_anchor)


@functools.cache
def _score(rows, topk):
  return jax.jit(functools.partial(score_step, model=model, config=config(micro_batch=rows, topk=topk)))


@functools.cache
def batch(rows=ROWS, seed=0, extra_columns=0) -> RolloutBatch:
  """Random prompts and responses of uneven length, one row without any trained token, scored by params(0) and, as anchor, params(1)."""
  rng = np.random.default_rng(seed)
  size = RESPONSE + extra_columns
  prompt_length = rng.integers(1, PROMPT + 1, rows)
  length = rng.integers(1, RESPONSE + 1, rows)
  length[-1] = RESPONSE
  tokens = rng.integers(0, 16, (rows, PROMPT + RESPONSE))
  mask = np.arange(size)[None, :] < length[:, None]
  mask[1] = False
  zeros = jnp.zeros((rows, size), jnp.float32)
  bare = RolloutBatch(
    tokens=jnp.asarray(np.pad(tokens, ((0, 0), (0, extra_columns))), jnp.int32),
    prompt_length=jnp.asarray(prompt_length, jnp.int32),
    mask=jnp.asarray(mask),
    real=jnp.ones((rows,), bool),
    advantages=jnp.asarray(np.tile(rng.normal(size=(rows, 1)), (1, size)), jnp.float32),
    sampling_logp=zeros,
    old_logp=zeros,
    topk_ids=jnp.zeros((rows, size, 0), jnp.int32),
    ref_logp=zeros,
    ref_logp_topk=jnp.zeros((rows, size, 0), jnp.float32),
    ref_log_tail=zeros,
  )
  old = _score(rows, TOPK)(params(), (), bare)
  ref = _score(rows, TOPK)(params(1), (), bare, old.topk_ids)
  return bare.replace(
    old_logp=old.logp,
    sampling_logp=old.logp,
    topk_ids=old.topk_ids,
    ref_logp=ref.logp,
    ref_logp_topk=ref.logp_topk,
    ref_log_tail=ref.log_tail,
  )


SGD = optax.sgd(1.0)  # the change of the weights is minus the gradient


@functools.cache
def _step_fn(step_config, optimizer):
  return jax.jit(functools.partial(train_step, model=model, optimizer=optimizer, config=step_config), donate_argnums=0)


def step_fn(step_config=None, optimizer=SGD):
  """train_step on the tiny model, jitted and donating; compiled once per setting."""
  return _step_fn(step_config or config(), optimizer)


def gradient(data: RolloutBatch, step_config=None, **hypers):
  """The gradient that `train_step` applies to the tiny model, and its metrics."""
  before = params()
  after, metrics = step_fn(step_config)(state(), (), data, hyper(**hypers))
  return jax.tree.map(lambda a, b: a - b, before, after.params), metrics


def off_policy_config(aggregation="token_mean", micro_batch=ROWS) -> StepConfig:
  """The old policy is the sampler's; every bound, the KL and the entropy bonus are on."""
  bounds = {"kl_iw_low": 0.9, "kl_iw_high": 1.1, "value_clip": 0.3}
  return config(micro_batch=micro_batch, aggregation=aggregation, old_from_sampler=True, entropy_coef=0.1, **bounds)


# Bounds so close to 1 that each is active for some tokens of `toy_batch` and idle for others.
POLICY_LOSSES = {
  "ppo_clip": losses.token_level(functools.partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=1.4)),
  "cispo": losses.token_level(functools.partial(losses.cispo, clip_low=0.2, clip_high=0.28)),
  "gspo": functools.partial(losses.gspo, clip_low=0.05, clip_high=0.1),
  "reinforce": losses.reinforce_with_aux,
}

# The toy model: any float dtype from end to end, where the decoder computes its norms in float32; and a tenth of its compile time.
TOY_WIDTH = 5
FAST_RATE = 1024.0  # with a large step little of the gradient is rounded away in the weights, and none in a division by a power of two
FAST_SGD = optax.sgd(FAST_RATE)


def toy_params(seed=0, critic=False):
  """In float64 under x64, else in float32; with a critic, {"policy": ..., "value": ...}."""
  rng = np.random.default_rng(seed)
  shapes = {"embedding": (16, TOY_WIDTH), "mix": (TOY_WIDTH, TOY_WIDTH), "unembedding": (TOY_WIDTH, 16)}
  policy = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
  return {"policy": policy, "value": {"table": jnp.asarray(rng.normal(size=16))}} if critic else policy


def toy_states(params, tokens):
  """After each token, and the unembedding. Causal: the hidden state depends on the token and on the mean of all up to it."""
  x = params["embedding"][tokens]
  return jnp.tanh(x + _running_mean(x) @ params["mix"]), params["unembedding"]


def toy_values(params, tokens):
  """After each token."""
  return _running_mean(params["table"][tokens][..., None])[..., 0]


def toy_model(params, frozen, batch):
  del frozen
  hidden, unembedding = toy_states(params, batch.tokens)
  return before_responses(hidden, batch), unembedding


def toy_critic(params, frozen, batch):
  del frozen
  return before_responses(toy_values(params, batch.tokens), batch)


def _running_mean(x):
  return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]


def toy_stats(params, data, topk=TOPK, ids=None, **changes):
  """score_step of the toy model."""
  return _toy_score(params, data, ids, config(micro_batch=data.tokens.shape[0], topk=topk, **changes))


@functools.partial(jax.jit, static_argnums=3)
def _toy_score(params, data, ids, step_config):
  return score_step(params, (), data, ids, model=toy_model, config=step_config)


def toy_batch(rows=ROWS, seed=4, spread=0.3) -> RolloutBatch:
  """Off-policy by `spread`, with uneven lengths, a row without a trained token, one with a masked span, and what a critic needs."""
  return _toy_batch(rows, seed, spread, jnp.result_type(float))


@functools.cache
def _toy_batch(rows, seed, spread, dtype):
  rng = np.random.default_rng(seed)
  shape = (rows, RESPONSE)
  length = np.resize([3, 0, 6, 5, 1, 2, 6, 4], rows)
  mask = np.arange(RESPONSE)[None, :] < length[:, None]
  mask[2, 2:4] = False
  draws = {
    name: jnp.asarray(rng.normal(size=shape), dtype) for name in ("advantages", "sampling_logp", "old_logp", "old_values", "returns")
  }
  ids = jnp.asarray(rng.integers(0, 15, (rows, PROMPT + RESPONSE)), jnp.int32)  # 15 is for what must not be read
  nothing = jnp.zeros((*shape, 0), dtype)
  bare = RolloutBatch(
    tokens=ids,
    prompt_length=jnp.asarray(rng.integers(1, PROMPT + 1, rows), jnp.int32),
    mask=jnp.asarray(mask),
    real=jnp.ones((rows,), bool),
    topk_ids=nothing.astype(jnp.int32),
    ref_logp=nothing.sum(-1),
    ref_logp_topk=nothing,
    ref_log_tail=nothing.sum(-1),
    rewards=jnp.asarray(rng.normal(size=rows), dtype),
    **draws,
  )
  old = toy_stats(toy_params(), bare)
  ref = toy_stats(toy_params(1), bare, ids=old.topk_ids)
  return bare.replace(
    old_logp=old.logp + spread * bare.old_logp,
    sampling_logp=old.logp + spread * bare.sampling_logp,
    topk_ids=old.topk_ids,
    ref_logp=ref.logp,
    ref_logp_topk=ref.logp_topk,
    ref_log_tail=ref.log_tail,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _toy_step(step_config, optimizer, critic, before, data, hypers):
  return train_step(
    before, (), data, hypers, model=toy_model, optimizer=optimizer, config=step_config, critic=toy_critic if critic else None
  )


def toy_step(before: TrainState, data: RolloutBatch, step_config=None, optimizer=SGD, **hypers):
  """train_step on the toy model; with a critic where the state has one."""
  critic = before.policy is not before.params
  return _toy_step(step_config or config(), optimizer, critic, before, data, hyper(**hypers))


def toy_gradient(data: RolloutBatch, step_config=None, critic=False, **hypers):
  """The gradient that `train_step` applies to the toy model, and its metrics."""
  before = toy_params(critic=critic)
  after, metrics = toy_step(init_state(before, FAST_SGD, False), data, step_config, FAST_SGD, **hypers)
  return change(before, after.params), metrics


def change(before, after):
  """The gradient behind a step of FAST_SGD."""
  return jax.tree.map(lambda a, b: (a - b) / FAST_RATE, before, after)


def values(metrics):
  """Each metric as a number."""
  return {k: float(m.value) if isinstance(m, Max) else float(m.sum / jnp.maximum(m.weight, 1)) for k, m in metrics.items()}


def assert_same_gradient(found, expected, rtol=1e-6):
  """Equal to rounding: relative to the largest entry, as the summands are."""
  largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected))
  assert largest > 0
  chex.assert_trees_all_close(found, expected, atol=2 * rtol * largest, rtol=rtol)
