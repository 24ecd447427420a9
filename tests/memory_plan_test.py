"""The memory plan against the arrays that a run makes and the temporaries of the programs that it compiles."""

import functools
import types

import jax
import numpy as np
import pytest

from emapg_jax import streams
from emapg_jax.config import RunConfig
from emapg_jax.data import Problem
from emapg_jax.envs.embedded import SymbolTokenizer
from emapg_jax.rollout import batching
from emapg_jax.types import Hyper
from experiments import build
from experiments.memory_plan import memory_plan


def task(vocab):
  return types.SimpleNamespace(
    chat=False,
    prompts=lambda: [Problem("x0")],
    score=lambda problem, response: 0.0,
    tokenizer=SymbolTokenizer(f"x{i}" for i in range(vocab - 3)),
  )


def narrow():
  return task(16)


def wide():
  return task(4096)


def make(task="narrow", mesh="data:8", prompts_per_step=8, **changes):
  sizes = {"group_size": 4, "mini_batches": 1, "max_prompt_tokens": 128, "max_new_tokens": 128, "hidden_size": 64, "kl_topk": 4}
  fixed = {"shared_prefix": "off", "keep_initial": "off", "dtype": "float32", "eval_every": 0}
  name = f"tests.memory_plan_test:{task}"
  return build.build(RunConfig(task=name, mesh=mesh, prompts_per_step=prompts_per_step, **(sizes | fixed | changes)))


def step_temporaries(run):
  """Bytes that the training step needs beside what it is given and gives back."""
  config = run.config
  shape, rows = (config.rows, config.max_new_tokens), np.ones(config.rows, np.int32)
  zeros, topk = np.zeros(shape, np.float32), (*shape, run.step_config.topk)
  prompts, responses = np.zeros((config.rows, config.max_prompt_tokens), np.int32), np.zeros(shape, np.int32)
  batch = batching.assemble(prompts, rows, responses, rows * config.max_new_tokens, zeros, zeros[:, 0], rows > 0)
  batch = batch.replace(topk_ids=np.zeros(topk, np.int32), ref_logp_topk=np.zeros(topk, np.float32))
  if config.uses_critic:
    batch = batch.replace(old_values=zeros, returns=zeros)
  plan = build.plans(run, batch, 1)[1]
  hyper = Hyper(np.float32(0.1), np.float32(0.9), np.int32(1), np.float32(1))
  lowered = run.train_step._jitted.lower(run.abstract_state, (), build.on_devices(run, batch), hyper, plan)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def check(run, name, beside=0):
  """The plan of the training step's temporaries is within a factor of 1.5; `beside`: what else they hold."""
  assert 1 / 1.5 < (step_temporaries(run) - beside) / memory_plan(run)[name] < 1.5


# 1024 or 4096 tokens a device, fewer where a forward takes less or prompts are shared.
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"num_layers": 8, "micro_batch": 2},
    {"remat": False, "dtype": "bfloat16"},
    {"shared_prefix": "on", "remat": False},
    {"advantage": "gae", "shared_prefix": "on", "remat": False},
    {"micro_tokens": 600, "prompts_per_step": 32},
    {"mesh": "data:4,tensor:2", "remat": False},
  ],
  ids=str,
)
def test_activations_of_the_training_step(changes):
  run = make(**changes)
  check(run, "activations", beside=2 * memory_plan(run)["params"])  # the gradient, and that of a micro-batch


# 4 rows of 64 tokens a device have 2^20 logits; 32 of 256 have two chunks' worth; over two devices each has half.
@pytest.mark.parametrize(
  "changes",
  [{}, {"prompts_per_step": 64, "max_new_tokens": 256}, {"mesh": "data:4,tensor:2"}],
  ids=str,
)
def test_logits_of_the_training_step(changes):
  run = make("wide", hidden_size=16, num_layers=1, max_prompt_tokens=16, **({"max_new_tokens": 64} | changes))
  check(run, "logits")


def test_gradients_of_the_training_step():
  check(make(hidden_size=256, max_prompt_tokens=8, max_new_tokens=2), "gradients")


def key():
  return streams.stream_key(0, streams.INIT)


def sampler_arrays(run):
  """Parameters as sampling reads them, empty slots, and the empty cache of prompts, at their longest."""
  config = run.config
  slots = run.sampler._empty_slots(config.max_prompt_tokens + config.max_new_tokens, key())
  return run.sampler.prepare(build.new_state(run).policy), slots, run.sampler._empty_prompts(config.max_prompt_tokens)


def test_logits_of_decoding():
  sizes = {"hidden_size": 16, "num_layers": 1, "max_prompt_tokens": 16, "max_new_tokens": 2, "micro_batch": 1}
  run = make("wide", prompts_per_step=16, kl_topk_ids="anchor", **sizes)
  params, slots, _ = sampler_arrays(run)
  decode = functools.partial(run.sampler._decode._jitted.lower, sampling=run.sampling, visible=18)
  temporaries = decode(params, slots, np.ones(64, bool)).compile().memory_analysis().temp_size_in_bytes
  # 8 slots a device; in training, 2 tokens of one row.
  assert memory_plan(run)["logits"] == 4 * 4 * 8 * 4096
  assert 1 / 1.5 < temporaries / memory_plan(run)["logits"] < 1.5


def test_activations_of_the_prefill():
  run = make(prompts_per_step=64, group_size=2, max_new_tokens=2, micro_batch=1, prefill_chunk=64)
  params, _, cache = sampler_arrays(run)
  lowered = run.sampler._prefill._jitted.lower(params, cache, np.zeros((64, 64), np.int32), np.int32(0))
  assert 1 / 2 < lowered.compile().memory_analysis().temp_size_in_bytes / memory_plan(run)["activations"] < 2


def test_what_is_kept_is_exact():
  run = make(mesh="data:2,fsdp:2,tensor:2", keep_initial="on", advantage="gae")
  plan, state = memory_plan(run), build.new_state(run)
  params, slots, prompts = sampler_arrays(run)

  def held(tree):
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))

  found = {"params": held(state.params), "anchor": held(state.ema_params), "optimizer": held(state.opt_state)}
  found |= {"initial model": held(state.policy), "rollout weights": held(params), "kv cache": held((slots.cache, prompts))}
  assert {name: plan[name] for name in found} == found


def test_what_a_run_lacks_takes_nothing():
  plan = memory_plan(make(kl_coef=0.0, ema_decay=1.0))
  assert plan["anchor"] == plan["initial model"] == plan["top-k"] == 0
