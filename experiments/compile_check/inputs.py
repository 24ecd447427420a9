"""What the programs of an RL step are called with, as shapes: every prompt and every response at its longest, all slots taken."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from emapg_jax import sharding
from emapg_jax.rollout import batching
from emapg_jax.sharding import device_bytes
from emapg_jax.types import Hyper, PyTree, RolloutBatch
from experiments.algorithms import ROW_ADVANTAGES
from experiments.compiled_once import CompiledOnce
from experiments.programs import Programs


@dataclasses.dataclass(frozen=True)
class Call:
  """A program with its arguments, and what else lies in memory while it runs."""

  function: CompiledOnce
  args: tuple
  named: dict[str, Any] = dataclasses.field(default_factory=dict)
  beside: int = 0  # bytes of a device
  variants: int = 1  # programs of about this size that stay loaded: decoding compiles once per power of two of positions
  tokens: int = 0  # drawn in a run for each slot, 0 where none are


def batch(run: Programs, topk: int, scored: bool) -> RolloutBatch:
  """A batch of `topk` ids; `scored`: as the training step takes it, or as it comes from sampling."""
  config, rows, length = run.config, run.config.rows, run.config.max_new_tokens
  layout = sharding.batch_sharding(run.mesh)

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=layout)

  def per_token(*shape):
    return array(np.float32, length, *shape)

  kl = run.step_config.kl is not None and scored
  critic = run.value is not None and scored
  return RolloutBatch(
    tokens=array(np.int32, config.max_prompt_tokens + length),
    prompt_length=array(np.int32),
    mask=array(bool, length),
    real=array(bool),
    advantages=per_token(),
    sampling_logp=per_token(),
    old_logp=per_token(),
    topk_ids=array(np.int32, length, topk),
    ref_logp=per_token(),
    ref_logp_topk=per_token(topk if kl else 0),
    ref_log_tail=per_token(),
    rewards=None if config.advantage in ROW_ADVANTAGES else array(np.float32),
    old_values=per_token() if critic else None,
    returns=per_token() if critic else None,
  )


def _kept(run: Programs) -> int:
  """Bytes of a device that stay from step to step: the train state and, where it is kept, the model before the first."""
  state = run.abstract_state
  return device_bytes(state) + (device_bytes(state.policy) if run.keep_initial else 0)


def scoring(run: Programs) -> dict[str, Call]:
  """The anchor's pass, where there is one, and the training step."""
  state, topk = run.abstract_state, run.step_config.topk
  hyper = Hyper(np.float32(0), np.float32(0), np.int32(1), np.zeros(run.config.updates, np.float32), np.float32(0))
  calls = {}
  if run.step_config.kl is not None:
    sampled = batch(run, run.sampling.report_topk, False)
    ids = None if run.config.topk_owner == "anchor" else batch(run, topk, True).topk_ids
    anchor = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding.with_memory_kind("device")), state.ema_params
    )
    calls["anchor_pass"] = Call(run.score, (anchor, (), sampled, ids, None), beside=_kept(run) - device_bytes(state.ema_params))
  calls["train_step"] = Call(run.train_step, (state, (), batch(run, topk, True), hyper, None), beside=_kept(run) - device_bytes(state))
  return calls


def copied_weights(run: Programs) -> PyTree:
  """The copy of the policy that sampling reads, on the whole rollout mesh."""
  shapes = run.prepare.shape(run.abstract_state.policy)
  return jax.tree.map(lambda a, layout: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout), shapes, run.rollout_shardings)


def rollout_weights(run: Programs) -> Call:
  """The cast of the policy for sampling; the copy that it is moved to stands beside it."""
  state = run.abstract_state
  return Call(run.prepare, (state.policy,), beside=_kept(run) - device_bytes(state.policy) + device_bytes(copied_weights(run)))


def sampling(run: Programs) -> dict[str, Call]:
  """Prefill and decode."""
  sampler, config, mesh = run.sampler, run.config, run.team.mesh
  size = config.max_prompt_tokens + config.max_new_tokens

  def on_team(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, a.sharding.spec))

  def rows(function: Callable, *args):
    return jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, sharding.row_spec(a))), function.shape(*args)
    )

  weights = jax.tree.map(on_team, copied_weights(run))
  prompts = rows(sampler._empty_prompts, config.max_prompt_tokens)
  slots = rows(sampler._empty_slots, size, str(jax.random.key_impl(jax.random.key(0))))
  tokens = np.zeros((sampler.prompts, min(config.prefill_chunk, config.max_prompt_tokens)), np.int32)
  starts = np.zeros(sampler.prompts, np.int32)
  return {
    "prefill": Call(sampler._prefill, (weights, prompts, tokens, starts), beside=_kept(run) + device_bytes(slots)),
    "decode": Call(
      sampler._decode,
      (weights, slots, np.ones(sampler.slots, bool)),
      {"sampling": run.sampling, "visible": size},
      beside=_kept(run) + device_bytes(prompts),
      variants=sum(length >= 256 for length in batching.buckets(size)),
      tokens=config.decode_block,
    ),
  }


def calls(run: Programs) -> dict[str, Call]:
  """All of them by name."""
  return {"rollout_weights": rollout_weights(run), **sampling(run), **scoring(run)}
