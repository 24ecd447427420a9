"""A tiny model and a batch for it, shared by the tests of the training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from emapg_jax.models import decoder
from emapg_jax.train_step import Hyper, StepConfig, init_state, score_step, train_step
from emapg_jax.types import RolloutBatch, TrainState
from experiments.estimators import ESTIMATORS

CONFIG = decoder.DecoderConfig(
  vocab_size=16, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
ROWS, PROMPT, RESPONSE, TOPK = 8, 4, 6, 4


def model(params, frozen, tokens):
  del frozen
  return decoder.apply(CONFIG, params, tokens), decoder.unembedding(params)


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
