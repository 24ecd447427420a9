"""Every setting that is compiled in or traced does something: each is changed once, and loss, gradient or state must change with it.

The tables are checked against the dataclasses, so that a new field without an entry fails. For the flags of a run see flag_effect_test.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from emapg_jax import credit, losses
from emapg_jax.score_step import credit_step, score_step, value_step
from emapg_jax.step_config import StepConfig
from emapg_jax.token_stats import token_stats
from emapg_jax.train_step import init_state, train_step
from emapg_jax.types import Hyper
from experiments.estimators import ESTIMATORS
from tests import tiny

# Two mini-batches, off-policy, with everything on, so that each setting is at work without another's help.
BASE = StepConfig(
  micro_batch=2,
  mini_batches=2,
  epochs=1,
  temperature=1.0,
  policy_loss=losses.token_level(functools.partial(losses.ppo_clip, clip_low=0.05, clip_high=0.05)),
  credit=functools.partial(credit.gae_advantages, discount=0.9, gae_lambda=0.8),
  aggregation="fixed_length",
  max_new_tokens=tiny.RESPONSE,
  kl=ESTIMATORS["topk_reverse"],
  kl_in_reward=False,
  kl_iw_low=0.9,
  kl_iw_high=1.1,
  topk=3,
  topk_approximate=False,
  entropy_coef=0.1,
  value_clip=0.01,
  old_from_sampler=False,
  tis_cap=1.1,
  tis_sequence_bound=1.3,
  prompt_rows=1,
  stats=token_stats,
  head_logits=None,
  seed=0,
)


def _sharper(*args, **settings):
  return token_stats(*args, **settings | {"temperature": 0.9})


OVER_BASELINE = functools.partial(credit.reward_to_go_advantages, discount=0.9)

# Field: the value it is changed to.
PERTURBED = {
  "mini_batches": 1,
  "epochs": 2,
  "prompt_rows": 2,  # pairs of rows stay together, in the same mini-batch
  "temperature": 0.9,
  "policy_loss": losses.token_level(functools.partial(losses.cispo, clip_low=0.05, clip_high=0.05)),
  "credit": functools.partial(credit.gae_advantages, discount=0.9, gae_lambda=0.7),
  "aggregation": "token_mean",
  "max_new_tokens": tiny.RESPONSE + 1,
  "kl": ESTIMATORS["k3pp"],
  "kl_in_reward": True,
  "kl_iw_low": 0.95,
  "kl_iw_high": 1.05,
  "topk": 2,
  "entropy_coef": 0.2,
  "value_clip": 0.05,
  "old_from_sampler": True,
  "tis_cap": 1.05,
  "tis_sequence_bound": 1.1,
  "stats": _sharper,
  "seed": 1,
  "together": 2,
}
# These must change nothing but rounding.
UNCHANGED = {
  "micro_batch": 4,  # the rows of a mini-batch are only taken in other portions
  "head_logits": 64,  # and the positions of a row, two at a time
  "topk_approximate": True,  # on CPU the search is exact
}
# Field: what else it takes, and the value.
HYPERS = {
  "kl_coef": ({}, 0.4),
  "ema_decay": ({}, 0.8),
  "ema_period": ({}, 2),
  "lr_scale": ({}, 0.5),
  "baseline": ({"credit": OVER_BASELINE}, 0.5),
}
SGD = optax.sgd(4.0)  # so far that the second update meets the bounds on ratio, weight and value


@functools.partial(jax.jit, static_argnums=0)
def _rl_step(step_config, data, hyper):
  params = tiny.toy_params(critic=True)
  stats = score_step(params["policy"], (), data, model=tiny.toy_model, config=step_config)
  ref = score_step(tiny.toy_params(1), (), data, stats.topk_ids, model=tiny.toy_model, config=step_config)
  data = data.replace(
    old_logp=stats.logp,
    topk_ids=stats.topk_ids,
    ref_logp=ref.logp,
    ref_logp_topk=ref.logp_topk,
    ref_log_tail=ref.log_tail,
    old_values=value_step(params["value"], (), data, critic=tiny.toy_critic, config=step_config),
  )
  (advantages, returns), _ = credit_step(data, stats, hyper, config=step_config)
  data = data.replace(advantages=advantages, returns=returns)
  data = data.replace(returns=jnp.zeros_like(data.advantages) if data.returns is None else data.returns)
  state = init_state(params, SGD, True)
  state, metrics = train_step(state, (), data, hyper, model=tiny.toy_model, optimizer=SGD, config=step_config, critic=tiny.toy_critic)
  return (state.params, state.ema_params), metrics["bad_updates"].sum


@functools.cache
def after_step(step_config, **hypers):
  """Policy, critic and anchor after one whole RL step, scoring and credit included."""
  hyper = (
    tiny.hyper(kl_coef=0.5, ema_decay=0.7).replace(baseline=jnp.float32(0.1)).replace(**{k: jnp.asarray(v) for k, v in hypers.items()})
  )
  state, bad_updates = _rl_step(step_config, tiny.toy_batch(), hyper)
  assert bad_updates == 0
  return state


def largest_change(found, expected):
  return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)))


def test_tables_are_complete():
  assert PERTURBED.keys() | UNCHANGED.keys() == {field.name for field in dataclasses.fields(StepConfig)}
  assert not PERTURBED.keys() & UNCHANGED.keys()
  assert HYPERS.keys() == {field.name for field in dataclasses.fields(Hyper)}


@pytest.mark.parametrize("name", PERTURBED)
def test_step_config(name):
  assert largest_change(after_step(dataclasses.replace(BASE, **{name: PERTURBED[name]})), after_step(BASE)) > 1e-4


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing(name):
  found = after_step(dataclasses.replace(BASE, **{name: UNCHANGED[name]}))
  chex.assert_trees_all_close(found, after_step(BASE), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("name", HYPERS)
def test_hyper(name):
  companions, value = HYPERS[name]
  step_config = dataclasses.replace(BASE, **companions)
  assert largest_change(after_step(step_config, **{name: value}), after_step(step_config)) > 1e-4
