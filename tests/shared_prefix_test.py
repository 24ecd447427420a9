"""Prompts read once for all their responses: the same loss, gradient, metrics and scores as with a prompt for each, for fewer tokens."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import losses, micro_batches
from emapg_jax.models import decoder
from emapg_jax.score_step import score_step, shared_prompts
from emapg_jax.train_step import train_step
from tests import tiny
from tests.tiny import assert_same_gradient, values

GROUP = 4


def shared(rows):
  """The tiny model, each prompt read once for so many rows."""

  def model(params, frozen, batch):
    del frozen
    return decoder.apply_shared(tiny.CONFIG, params, *shared_prompts(batch, rows)), decoder.unembedding(params)

  return model


SHARED = {1: tiny.model, 2: shared(2), GROUP: shared(GROUP)}


@functools.cache
def grouped():
  """tiny.batch() with one prompt for each four rows, of 2 and of 4 tokens, off-policy; row 1 trains nothing."""
  data = jax.tree.map(np.asarray, tiny.batch())
  length = np.repeat([2, tiny.PROMPT], GROUP).astype(np.int32)
  tokens = np.zeros_like(data.tokens)
  for row, leader in enumerate(np.repeat([0, GROUP], GROUP)):
    response = data.tokens[row, data.prompt_length[row] :][: tiny.RESPONSE]
    tokens[row, : length[row]] = data.tokens[leader, : length[row]]
    tokens[row, length[row] :][: tiny.RESPONSE] = response
  data = data.replace(tokens=tokens, prompt_length=length)
  noise = np.random.default_rng(2).normal(size=(2, *data.mask.shape)).astype(np.float32) * 0.2
  old = score(1, tiny.TOPK)(tiny.params(), (), data.replace(topk_ids=data.topk_ids[..., :0]))
  ref = score(1, tiny.TOPK)(tiny.params(1), (), data, old.topk_ids)
  return data.replace(
    old_logp=old.logp + noise[0],
    sampling_logp=old.logp + noise[1],
    topk_ids=old.topk_ids,
    ref_logp=ref.logp,
    ref_logp_topk=ref.logp_topk,
    ref_log_tail=ref.log_tail,
  )


@functools.cache
def score(rows, topk=0):
  return jax.jit(functools.partial(score_step, model=SHARED[rows], config=tiny.config(prompt_rows=rows, micro_batch=4, topk=topk)))


@functools.cache
def step(step_config, rows):
  bound = {"model": SHARED[rows], "optimizer": tiny.SGD, "config": step_config}
  return jax.jit(functools.partial(train_step, **bound))


def stepped(step_config, rows, plan=None):
  after, metrics = step(step_config, rows)(tiny.state(), (), grouped(), tiny.hyper(kl_coef=0.5), plan)
  return jax.tree.map(lambda a, b: a - b, tiny.params(), after.params), metrics


def assert_same(found, expected):
  assert_same_gradient(found[0], expected[0], 1e-5)
  one, other = values(found[1]), values(expected[1])
  assert one.keys() == other.keys()
  for name in other:
    assert one[name] == pytest.approx(other[name], rel=2e-5, abs=2e-6), name
  assert other["grad_norm"] > 0.1 and other["bad_updates"] == 0


def test_the_batch_is_what_it_should_be():
  data = grouped()
  prompts, length, responses = shared_prompts(data, GROUP)
  assert prompts.shape == (2, tiny.PROMPT) and length.tolist() == [2, 4] and responses.shape == data.mask.shape
  assert prompts[0, :2].tolist() == data.tokens[3, :2].tolist() and prompts[0].tolist() == data.tokens[0, :4].tolist()
  assert responses[3].tolist() == data.tokens[3, 2:8].tolist() and responses[7].tolist() == data.tokens[7, 4:10].tolist()


@pytest.mark.parametrize("rows", [2, GROUP])
def test_scores(rows):
  """All positions of all rows, trained or not: what one response says reaches no other."""
  data = grouped()
  found, expected = (score(n)(tiny.params(1), (), data, data.topk_ids) for n in (rows, 1))
  chex.assert_trees_all_close(found, expected, atol=2e-6, rtol=1e-5)


BOUNDS = {"kl_iw_low": 0.8, "kl_iw_high": 1.2}
# By aggregation, each with the KL in the loss: settings, and a metric that says that they are at work.
SETTINGS = {
  "token_mean": ({"old_from_sampler": True, "entropy_coef": 0.1, **BOUNDS}, "kl_weight_clipped"),
  "sequence_mean": ({"tis_cap": 1.1, "mini_batches": 2}, "tis_capped"),
  "sequence_sum": ({"policy_loss": tiny.POLICY_LOSSES["gspo"], "tis_sequence_bound": 1.05, "epochs": 2}, "tis_masked"),
  "fixed_length": ({"policy_loss": tiny.POLICY_LOSSES["cispo"], "epochs": 2}, "clip_fraction_high"),
}


def config(aggregation):
  return tiny.config(aggregation=aggregation, micro_batch=GROUP, prompt_rows=GROUP, **SETTINGS[aggregation][0])


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_gradient_and_metrics(aggregation):
  found = stepped(config(aggregation), GROUP)
  assert_same(found, stepped(config(aggregation), 1))
  assert 0 < values(found[1])[SETTINGS[aggregation][1]] < 1


def test_by_length_too():
  """Pairs of a group of four, read as far as the longer of two."""
  step_config = dataclasses.replace(config("token_mean"), prompt_rows=2)
  plan = micro_batches.by_length(grouped(), 36, step_config, step=0, lengths=(4, 6))
  assert all(part.count.sum() for part in plan) and not all(part.real[0, : part.count[0]].all() for part in plan)
  assert_same(stepped(step_config, 2, plan), stepped(config("token_mean"), 1))


def test_a_prompt_costs_once():
  """24 prompt and 4 response tokens, 8 rows in pairs of 2 and groups of 4: 8 · 28 = 224 tokens against 4 · 24 + 8 · 4 = 128 and 80."""
  zeros = jnp.zeros((8, 4), jnp.float32)
  data = grouped().replace(tokens=jnp.zeros((8, 28), jnp.int32), mask=zeros > 0, topk_ids=jnp.zeros((8, 4, 0), jnp.int32))
  data = data.replace(**{name: zeros for name in ("advantages", "sampling_logp", "old_logp", "ref_logp", "ref_log_tail")})
  data = data.replace(ref_logp_topk=zeros[..., None][..., :0])

  def flops(rows):
    function = functools.partial(score_step, model=SHARED[rows], config=tiny.config(prompt_rows=rows))
    return jax.jit(function).lower(tiny.params(), (), data).cost_analysis()["flops"]

  whole = flops(1)
  assert flops(2) / whole == pytest.approx(128 / 224, abs=0.06)
  assert flops(GROUP) / whole == pytest.approx(80 / 224, abs=0.06)
