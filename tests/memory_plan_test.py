"""The memory plan against the arrays that a run makes and the temporaries of the programs that it compiles."""

import dataclasses
import types
import weakref

import jax
import numpy as np
import pytest

from emapg_jax import data, sharding, streams
from emapg_jax.checkpoint import HostState
from emapg_jax.config import RunConfig
from emapg_jax.data import Problem
from emapg_jax.envs.embedded import SymbolTokenizer
from emapg_jax.models import decoder
from emapg_jax.rollout import batching
from emapg_jax.types import Hyper
from experiments import build, report, rl_step
from experiments.memory_plan import at_once, host_bytes, memory_plan, remarks
from experiments.programs import Programs, programs
from experiments.units import of_bytes
from tests.crash_test import CONFIG


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
    {"remat": "none"},
    {"num_layers": 8, "shared_prefix": "on", "remat": "dots"},
    {"advantage": "gae", "shared_prefix": "on", "remat": "none"},
    {"micro_tokens": 600, "prompts_per_step": 32},
    {"mesh": "data:4,tensor:2", "remat": "none"},
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


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_gradients_of_the_training_step(param_dtype):
  check(make(hidden_size=256, max_prompt_tokens=8, max_new_tokens=2, param_dtype=param_dtype), "gradients")


def few_kv_heads(mesh="data:2,fsdp:2,tensor:2", device_bytes=2**30, **changes):
  """Programs of a model whose two key/value heads are fewer than the devices for a row of samples."""
  sizes = {"prompts_per_step": 8, "group_size": 4, "max_prompt_tokens": 16, "max_new_tokens": 16, "mini_batches": 1, "kl_topk": 4}
  config = RunConfig(task="add", **({"rollout_mesh": "data:2,tensor:4", "dtype": "bfloat16"} | sizes | changes))
  shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4}
  model = decoder.DecoderConfig(**shape, max_positions=32, dtype="bfloat16", param_dtype=config.param_dtype)
  model = dataclasses.replace(model, remat=config.remat)
  mesh = sharding.make_mesh(mesh)
  return programs(config, model, mesh, longest_prompt=16, eos_ids=(3,), pad_id=0, keep_initial=True, device_bytes=device_bytes)


def key():
  return streams.stream_key(0, streams.INIT)


def new_state(run):
  shardings = jax.tree.map(lambda a: a.sharding, run.abstract_state)
  return jax.jit(lambda key: run.fresh_state(decoder.init_params(run.model_config, key)), out_shardings=shardings)(key())


def sampler_arrays(run):
  """Parameters as sampling reads them, empty slots, and the empty cache of prompts, at their longest."""
  config, sampler = run.config, run.sampler
  slots = sampler._empty_slots(config.max_prompt_tokens + config.max_new_tokens, str(jax.random.key_impl(key())))
  return run.rollout_weights(new_state(run).policy), slots, sampler._empty_prompts(config.max_prompt_tokens)


def test_logits_of_decoding():
  sizes = {"hidden_size": 16, "num_layers": 1, "max_prompt_tokens": 16, "max_new_tokens": 2, "micro_batch": 1}
  run = make("wide", prompts_per_step=16, kl_topk_ids="anchor", **sizes)
  params, slots, _ = sampler_arrays(run)
  decode = run.sampler._decode.lower(params, slots, np.ones(64, bool), sampling=run.sampling, visible=18)
  temporaries = decode.compile().memory_analysis().temp_size_in_bytes
  assert memory_plan(run)["drawn logits"] == 4 * 4 * 8 * 4096  # 8 slots a device
  assert memory_plan(run)["logits"] == 4 * 4 * 2 * 4096  # in training, 2 tokens of one row
  assert 1 / 1.5 < temporaries / memory_plan(run)["drawn logits"] < 1.5


def test_activations_of_the_prefill():
  run = make(prompts_per_step=64, group_size=2, max_new_tokens=2, micro_batch=1, prefill_chunk=64)
  params, _, cache = sampler_arrays(run)
  lowered = run.sampler._prefill.lower(params, cache, np.zeros((64, 64), np.int32), np.zeros(64, np.int32))
  assert 1 / 2 < lowered.compile().memory_analysis().temp_size_in_bytes / memory_plan(run)["prefill"] < 2


@pytest.mark.parametrize("changes", [{"advantage": "gae"}, {"param_dtype": "bfloat16", "anchor_memory": "pinned_host"}], ids=str)
def test_what_is_kept_is_exact(changes):
  run = few_kv_heads(**changes)
  plan, state = memory_plan(run), new_state(run)
  params, slots, prompts = sampler_arrays(run)

  def held(tree, memory="device"):
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree) if a.sharding.memory_kind == memory)

  found = {"params": held(state.params), "anchor": held(state.ema_params), "optimizer": held(state.opt_state)}
  found |= {"initial model": held(state.policy), "rollout weights": held(params), "kv cache": held((slots.cache, prompts))}
  assert {name: plan[name] for name in found} == found
  assert host_bytes(run) == held(state, "pinned_host")
  assert (plan["anchor"] == 0) == (host_bytes(run) > 0) == ("anchor_memory" in changes)


def test_what_a_run_lacks_takes_nothing():
  plan = memory_plan(make(kl_coef=0.0, ema_decay=1.0))
  assert plan["anchor"] == plan["initial model"] == plan["top-k"] == plan["gathered"] == 0


def test_what_is_never_there_at_a_time():
  kept = {"params": 1, "optimizer": 2}
  updating = {"gradients": 10, "activations": 10, "gathered": 20, "top-k": 20, "logits": 10}
  sampling = {"rollout weights": 30, "kv cache": 10, "prefill": 20, "drawn logits": 25}
  assert at_once(kept | updating | sampling) == 3 + 70
  assert at_once(kept | updating | sampling | {"kv cache": 70}) == 3 + 30 + 70 + 25


def test_remarks_beside_the_plan():
  run = few_kv_heads()
  copied = "in sampling, each of the 2 key/value heads is on 2 devices of the mesh axis tensor"
  assert list(remarks(run)) == [copied], "in training there is a head for each of the two devices"
  needed = at_once(memory_plan(run))
  assert list(remarks(dataclasses.replace(run, device_bytes=needed))) == [copied]
  beyond, _ = remarks(dataclasses.replace(run, device_bytes=needed - 1))
  assert beyond.startswith(
    f"warning: {of_bytes(needed)} are planned at a time, but a device has {of_bytes(needed - 1)}: take more devices, or"
  )


SPREAD = {"mesh": "fsdp:8", "anchor_memory": "pinned_host"}


@pytest.mark.parametrize(
  ("changes", "remedies"),
  [
    ({}, "--mesh=fsdp:-1,tensor:2, --anchor_memory=pinned_host, a smaller --micro_batch, "),
    (SPREAD, "a smaller --micro_batch, "),
    (SPREAD | {"remat": "dots", "micro_tokens": 64}, "--remat=full, a smaller --micro_tokens, "),
    (SPREAD | {"micro_batch": 1}, ""),
    (SPREAD | {"micro_batch": 1, "prompts_per_step": 64}, "a larger tensor in --rollout_mesh, a smaller --rollout_slots, "),
  ],
  ids=str,
)
def test_remedies_that_help_and_are_not_set_yet(changes, remedies):
  run = few_kv_heads(**({"prompts_per_step": 32} | changes))
  warning = next(remarks(dataclasses.replace(run, device_bytes=at_once(memory_plan(run)) - 1)))
  assert warning.endswith(f": take more devices, or set {remedies}a smaller --max_new_tokens")


@pytest.mark.parametrize(
  ("device_bytes", "changes", "advice"),
  [
    (100_000, {}, r"Most of that is the train state: set --mesh=fsdp:-1,tensor:2 or --anchor_memory=pinned_host\. Lower"),
    (400_000, {"mesh": "data:8"}, r"set --mesh=fsdp:-1 or --anchor_memory=pinned_host\. Lower"),
    (50_000, {"mesh": "fsdp:8"}, r"set --anchor_memory=pinned_host\. Lower"),
    (40_000, SPREAD, r" 0 slots fit\. Lower"),
    (300_000, {"max_prompt_tokens": 4096}, r" 0 slots fit\. Lower"),
  ],
  ids=str,
)
def test_what_helps_where_the_train_state_leaves_no_room_to_sample(device_bytes, changes, advice):
  with pytest.raises(ValueError, match=advice):
    few_kv_heads(device_bytes=device_bytes, **changes)


@pytest.mark.parametrize(
  ("size", "text"),
  [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102_400, "100 KiB"), (2**20 - 1, "1.0 MiB"), (14.7 * 2**30, "14.7 GiB")],
)
def test_sizes_in_words(size, text):
  assert of_bytes(size) == text


@pytest.mark.parametrize(
  ("changes", "lines"),
  [
    (
      {"micro_batch": 2, "anchor_memory": "pinned_host"},
      ("2 sequences per device; computed again in the backward pass: each layer", "KiB for the anchor"),
    ),
    ({"micro_tokens": 600, "remat": "none"}, ("600 tokens per device; computed again in the backward pass: nothing",)),
  ],
  ids=str,
)
def test_what_the_header_says(changes, lines, tmp_path, capsys):
  report.header(make(**changes), tmp_path)
  said = capsys.readouterr().out.splitlines()
  for line in lines:
    assert sum(text.endswith(line) for text in said) == 1


def test_devices_without_pinned_memory_are_refused_at_once(monkeypatch):
  monkeypatch.setattr(type(jax.devices()[0]), "addressable_memories", lambda device: device.default_memory() and [device.default_memory()])
  with pytest.raises(ValueError, match=r"--anchor_memory=pinned_host\): cpu devices \(cpu\) only have device\. Use --anchor_memory=device"):
    make(anchor_memory="pinned_host")


def test_the_copy_for_sampling_is_gone_before_the_update(monkeypatch):
  run = build.build(dataclasses.replace(CONFIG, mesh="fsdp:4,tensor:2", eval_every=0, keep_best=0))
  copies, alive, rollout_weights = [], [], Programs.rollout_weights

  def recorded(run, policy):
    weights = rollout_weights(run, policy)
    copies.extend(map(weakref.ref, jax.tree.leaves(weights)))
    return weights

  def train_step(*args):
    alive.append(sum(copy() is not None for copy in copies))
    return run.train_step(*args)

  monkeypatch.setattr(Programs, "rollout_weights", recorded)
  stream = data.PromptStream(len(run.train.problems), run.config.seed)
  rl_step.rl_step(dataclasses.replace(run, train_step=train_step), build.new_state(run), HostState(), None, stream, 1)
  assert len(copies) > 5 and alive == [0]
