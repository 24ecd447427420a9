"""Eight devices give the numbers of one: the update, the scores and the sampled ids."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from emapg_jax import losses, micro_batches, optim, sharding, streams
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.layout import Layout
from emapg_jax.rollout.sampler import Sampler
from emapg_jax.rollout.stop import StopStrings
from emapg_jax.score_step import score_step
from emapg_jax.train_step import init_state, train_step
from experiments.compiled_once import CompiledOnce
from tests import tiny

pytestmark = pytest.mark.multi_device


def laid_out(mesh, state):
  return jax.device_put(state, sharding.tree_shardings(mesh, state))


@functools.cache
def after_steps(spec, devices, by_length=False):
  """Params, anchor, optimizer state and metrics after two RL steps of two mini-batches of two micro-batches of four rows."""
  mesh = sharding.make_mesh(spec, jax.devices()[:devices])
  optimizer = optim.make_optimizer(1e-2)
  state = laid_out(mesh, tiny.state(optimizer))
  shardings = jax.tree.map(lambda a: a.sharding, state)
  step_config = tiny.config(mini_batches=2, micro_batch=4)
  step = jax.jit(
    functools.partial(
      train_step,
      model=tiny.model,
      optimizer=optimizer,
      config=step_config,
      constrain=functools.partial(sharding.constrain_batch, mesh),
    ),
    donate_argnums=0,
    out_shardings=(shardings, None),
  )
  counts = []
  for seed in (0, 1):
    data, plan = jax.device_get(tiny.batch(rows=16, seed=seed)), None
    if by_length:  # a device's budget of 16 tokens is two rows of 4 + 4 or one of 4 + 6
      plan = micro_batches.by_length(data, 16, step_config, seed, sharding.batch_devices(mesh), lengths=(4, 6))
      counts.append([part.count.tolist() for part in plan])
    state, metrics = step(state, (), jax.device_put(data, sharding.batch_sharding(mesh)), tiny.hyper(), plan)
  assert not by_length or counts == [[[1, 0], [1, 2]]] * 2, "one update needs other micro-batches than the next"
  assert step._cache_size() == 1
  return jax.device_get(state), jax.device_get(metrics), jax.tree.map(lambda a: a.sharding, state) == shardings


@pytest.mark.parametrize(
  ("spec", "by_length"), [("data:2,fsdp:2,tensor:2", False), ("data:2,fsdp:2,tensor:2", True), ("fsdp:4,tensor:2", False)]
)
def test_training_step(spec, by_length):
  one, one_metrics, _ = after_steps("data:1", 1)
  many, many_metrics, kept_layout = after_steps(spec, 8, by_length)
  assert kept_layout
  # Adam divides by the root of the second moment: rounding differences of tiny gradients are magnified at first.
  chex.assert_trees_all_close(many.ema_params, one.ema_params, atol=3e-4)
  chex.assert_trees_all_close(many.params, one.params, atol=3e-4)
  chex.assert_trees_all_close(many_metrics, one_metrics, rtol=1e-3, atol=1e-4)
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one.params, tiny.params())
  assert max(jax.tree.leaves(moved)) > 1e-2, "the step moved the weights by far more than the tolerance"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _toy_step(step_config, mesh, state, data, which):
  def policy_loss(*arrays):  # one compilation for all
    return jax.lax.switch(which, tuple(tiny.POLICY_LOSSES.values()), *arrays)

  constrain = functools.partial(sharding.constrain_batch, mesh)
  bound = {"model": tiny.toy_model, "critic": tiny.toy_critic, "optimizer": tiny.FAST_SGD, "constrain": constrain}
  return train_step(state, (), data, tiny.hyper(), config=dataclasses.replace(step_config, policy_loss=policy_loss), **bound)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_every_policy_loss_in_float64(aggregation, x64):
  """Loss and summed gradient, off-policy and with a critic; the weights on every device, the rows spread over them."""
  step_config = tiny.off_policy_config(aggregation)
  before = tiny.toy_params(critic=True)
  for which, name in enumerate(tiny.POLICY_LOSSES):
    found = []
    for devices in (1, 8):
      mesh = sharding.make_mesh("data:-1", jax.devices()[:devices])
      state = jax.device_put(init_state(before, tiny.FAST_SGD, False), NamedSharding(mesh, PartitionSpec()))
      data = jax.device_put(jax.device_get(tiny.toy_batch(rows=16)), sharding.batch_sharding(mesh))
      after, metrics = jax.device_get(_toy_step(step_config, mesh, state, data, which))
      assert metrics["bad_updates"].sum == 0
      found.append((tiny.change(before, after.params), tiny.values(metrics)))
    (one, one_metrics), (many, many_metrics) = found
    tiny.assert_same_gradient(many, one, rtol=1e-12)
    for key in ("loss", "value_loss"):
      assert many_metrics[key] == pytest.approx(one_metrics[key], rel=1e-12, abs=1e-12), (name, key)


@pytest.mark.parametrize("spec", ["data:8", "data:2,fsdp:2,tensor:2"])
def test_scores(spec):
  mesh = sharding.make_mesh(spec)
  params = jax.device_put(tiny.params(), sharding.tree_shardings(mesh, tiny.params()))
  data = tiny.batch()
  sharded = jax.device_put(jax.device_get(data), sharding.batch_sharding(mesh))
  step_config, constrain = tiny.config(micro_batch=8, topk=tiny.TOPK), functools.partial(sharding.constrain_batch, mesh)
  score = jax.jit(functools.partial(score_step, model=tiny.model, config=step_config, constrain=constrain))
  found = score(params, (), sharded, sharded.topk_ids)
  lowered = score.lower(params, (), sharded, sharded.topk_ids)
  assert lowered.compile().cost_analysis()["flops"] < lowered.cost_analysis()["flops"] / 4, "each device has rows of its own"
  assert found.logp.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)
  chex.assert_trees_all_close(jax.device_get(found).logp, data.old_logp, atol=1e-5)
  plan = micro_batches.by_length(jax.device_get(data), 10, step_config, devices=sharding.batch_devices(mesh), lengths=(3, 6))
  found = jax.device_get(score(params, (), sharded, sharded.topk_ids, plan))
  np.testing.assert_allclose(found.logp[data.mask], data.old_logp[data.mask], atol=1e-5)


@pytest.mark.parametrize("spec", ["data:8", "data:2,fsdp:2,tensor:2"])
@pytest.mark.parametrize("slots", [16, 8])
def test_samples(spec, slots):
  mesh = sharding.make_mesh(spec)
  params = jax.device_put(tiny.params(), sharding.tree_shardings(mesh, tiny.params()))
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 16, n).tolist() for n in rng.integers(1, tiny.PROMPT + 1, 10)]
  owner, keys = np.repeat(np.arange(10), 2), streams.row_keys(0, streams.ROLLOUT, 1, np.arange(20), np.zeros(20, int))

  def generate(params, **changes):
    sizes = {"slots": slots, "group": 2, "block": 3, "max_prompt_tokens": tiny.PROMPT, "max_new_tokens": 6}
    made = Sampler(tiny.CONFIG, **sizes | changes, eos_ids=(3,), pad_id=0, jit=CompiledOnce)
    return made.generate(made.prepare(params), prompts, owner, keys, Sampling(report_topk=4))

  one = generate(tiny.params())
  many = generate(params, layout=Layout(mesh))
  np.testing.assert_array_equal(many.tokens, one.tokens)
  np.testing.assert_array_equal(many.reason, one.reason)
  np.testing.assert_allclose(many.logp, one.logp, atol=1e-5)
  np.testing.assert_allclose(many.topk_logp, one.topk_logp, atol=1e-5)


def _letters(ids):
  return "".join(chr(97 + int(i)) for i in ids)


def _watch(made, monkeypatch, mesh):
  """Counts calls of `_decode`, each with slots, and of `_insert`, each with prompts, laid out by rows and heads."""
  calls = []
  layout = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))

  def checked(name, function):
    def call(*args, **named):
      for cache in (args[0].cache, args[1]) if name == "_insert" else (args[1].cache,):
        for array in jax.tree.leaves(cache):
          assert array.sharding.is_equivalent_to(layout, 4), (name, array.sharding)
      out = function(*args, **named)
      slots = out if name == "_insert" else out[0]
      assert all(array.sharding.is_equivalent_to(layout, 4) for array in jax.tree.leaves(slots.cache)), name
      calls.append(name)
      return out

    return call

  for name in ("_insert", "_decode"):
    monkeypatch.setattr(made, name, checked(name, getattr(made, name)))
  return calls


@pytest.mark.parametrize(("spec", "copies"), [("data:2,fsdp:2,tensor:2", 1), ("data:2,tensor:4", 2)])
def test_cut_samples_and_the_layout_of_the_cache(spec, copies, monkeypatch):
  """Truncated, with stop strings; 2 key/value heads are spread over 2 devices, and copied to be over 4."""
  mesh = sharding.make_mesh(spec)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 16, n).tolist() for n in rng.integers(1, tiny.PROMPT + 1, 10)]
  owner, keys = np.repeat(np.arange(10), 2), streams.row_keys(0, streams.ROLLOUT, 1, np.arange(20), np.zeros(20, int))
  sizes = {"slots": 8, "group": 2, "block": 3, "max_prompt_tokens": tiny.PROMPT, "max_new_tokens": 6}

  def make(copies=1, **changes):
    return Sampler(
      dataclasses.replace(tiny.CONFIG, kv_copies=copies),
      **sizes | changes,
      eos_ids=(3,),
      pad_id=0,
      stop=StopStrings(_letters, ("a", "gh")),
      jit=CompiledOnce,
    )

  def generate(made, params):
    return made.generate(made.prepare(params), prompts, owner, keys, Sampling(top_p=0.8))

  one = generate(make(), tiny.params())
  assert set(one.reason) == {"eos", "stop", "length"}
  assert np.all(one.sampling_logp >= one.logp) and np.any(one.sampling_logp > one.logp + 0.1)
  spread = make(copies, layout=Layout(mesh))
  calls = _watch(spread, monkeypatch, mesh)
  many = generate(spread, jax.device_put(tiny.params(), sharding.tree_shardings(mesh, tiny.params())))
  assert calls.count("_decode") > 2 and calls.count("_insert") > 1
  for name in ("tokens", "length", "reason"):
    np.testing.assert_array_equal(getattr(many, name), getattr(one, name))
  for name in ("logp", "sampling_logp"):
    np.testing.assert_allclose(getattr(many, name), getattr(one, name), atol=1e-5)
