"""The jitted functions of a run and the layout of its state: all that follows from its settings and the architecture, without any data."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from emapg_jax import anchor, micro_batches, sharding
from emapg_jax.config import RunConfig
from emapg_jax.models import critic, decoder
from emapg_jax.presets import KL_EXACT, KL_TOPK
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.layout import Layout
from emapg_jax.rollout.sampler import Sampler
from emapg_jax.rollout.slots import prepare
from emapg_jax.rollout.stop import StopStrings
from emapg_jax.rollout.team import Team, local_view, team_of, weight_shardings
from emapg_jax.score_step import before_responses, credit_step, policy_kl, score_step, shared_prompts, value_step
from emapg_jax.sharded_token_stats import sharded_token_stats
from emapg_jax.step_config import StepConfig, check_divides
from emapg_jax.token_stats import LOGITS_PER_CHUNK
from emapg_jax.train_step import init_state, train_step
from emapg_jax.types import PyTree, RolloutBatch, TrainState
from experiments import algorithms
from experiments.compiled_once import CompiledOnce
from experiments.estimators import ESTIMATORS
from experiments.rollout_model import rollout_model

LARGEST_EXACT = 8192
SHARING_PAYS = 128  # tokens of the longest prompt there is


@dataclasses.dataclass(frozen=True)
class Programs:
  """What a run computes with."""

  config: RunConfig
  model_config: decoder.DecoderConfig
  mesh: jax.sharding.Mesh
  device_bytes: int | None  # memory of a device, where it is known
  optimizer: optax.GradientTransformation
  lr_scales: Callable[[int], np.ndarray]  # of the updates of an RL step
  model: Callable
  step_config: StepConfig
  abstract_state: TrainState  # with shardings
  fresh_state: Callable[[PyTree], TrainState]  # from the policy's parameters
  keep_initial: bool
  rollout_mesh: jax.sharding.Mesh  # the devices of `mesh`, as sampling uses them
  team: Team  # the part of it that this process samples on
  prepare: Callable  # (policy) -> its weights as sampling needs them, where they lie in training
  rollout_shardings: PyTree  # of these weights on the rollout mesh
  sampler: Sampler
  sampling: Sampling  # in training
  eval_sampling: dict[str, Sampling]  # by kind of evaluation
  score: Callable  # (params, frozen, batch, ids, plan) -> TokenStats
  policy_kl: Callable  # (stats, ref, batch) -> Weighted
  value: Callable | None  # (params, frozen, batch, plan) -> values; None without a critic
  credit: Callable | None  # (batch, stats, hyper) -> batch, metrics; None where a token's credit is the advantage of its row
  train_step: Callable

  def rollout_weights(self, policy: PyTree) -> PyTree:
    """The policy's weights as `sampler.generate` takes them: cast, laid out once for sampling, and of this team's devices."""
    return local_view(jax.device_put(self.prepare(policy), self.rollout_shardings), self.team)

  @property
  def needs_old_pass(self) -> bool:
    """Whether the policy at the start of an RL step is scored: for old log-probabilities, ids, or a KL that is known before the update."""
    owns_ids = self.step_config.topk > 0 and self.config.topk_owner == "policy" and not self.sampling.report_topk
    return owns_ids or _scores_policy(self.step_config, self.keep_initial)


def _topk(config: RunConfig, vocab_size: int) -> int:
  if config.kl_coef == 0:
    return 0
  if config.kl in KL_EXACT:
    if vocab_size > LARGEST_EXACT:
      raise ValueError(
        f"--kl={config.kl} holds a number per token and vocabulary entry, {vocab_size} here; it is for up to {LARGEST_EXACT} entries. "
        f"Use --kl=topk_{config.kl.removeprefix('exact_')}, which is unbiased for any --kl_topk."
      )
    return vocab_size
  if config.kl not in KL_TOPK:
    return 0
  if config.kl_topk > vocab_size:
    raise ValueError(f"--kl_topk={config.kl_topk} exceeds the vocabulary of {vocab_size} tokens: use at most {vocab_size}.")
  return config.kl_topk


def _sharing(config: RunConfig, longest_prompt: int, micro_batch: int, shards: int) -> dict[str, int]:
  """`prompt_rows` and `together`: how many responses to a prompt are read with it, and how many stay in one mini-batch for that."""
  if config.shared_prefix == "off" or (config.shared_prefix == "auto" and longest_prompt < SHARING_PAYS):
    return {}
  together = math.gcd(config.group_size, config.rows // config.mini_batches)
  fitting = math.gcd(together, micro_batch // shards)
  if config.micro_tokens:  # which a critic reads without sharing
    most = 1 if config.uses_critic else (config.micro_tokens - config.max_prompt_tokens) // config.max_new_tokens
    fitting = max((rows for rows in range(1, together + 1) if together % rows == 0 and rows <= most), default=1)
  if config.shared_prefix == "on" and fitting == 1:
    raise ValueError(
      f"--shared_prefix=on has no effect: with --group_size={config.group_size}, --mini_batches={config.mini_batches}, "
      f"--micro_batch={config.micro_batch}, --micro_tokens={config.micro_tokens} and --advantage={config.advantage} no two responses of a "
      "group can be read with one prompt. Change these, or leave it out."
    )
  return {"prompt_rows": fitting, "together": together}


def _step_config(config: RunConfig, mesh: jax.sharding.Mesh, model: decoder.DecoderConfig, longest_prompt: int) -> StepConfig:
  shards = sharding.batch_devices(mesh)
  if config.rows % shards:
    raise ValueError(
      f"--prompts_per_step={config.prompts_per_step} × --group_size={config.group_size} = {config.rows} sequences can't be spread over "
      f"{shards} devices (--mesh={config.mesh}): make them a multiple of {shards}."
    )
  micro_batch = config.micro_batch * shards or config.rows // config.mini_batches
  if micro_batch % shards and not config.micro_tokens:
    raise ValueError(
      f"A mini-batch of {micro_batch} sequences can't be spread over {shards} devices (--mesh={config.mesh}): change --mini_batches, "
      "--prompts_per_step or --group_size, so that each device gets the same number."
    )
  if config.warmup_steps and config.warmup_batch % shards:
    raise ValueError(f"--warmup_batch={config.warmup_batch} can't be spread over {shards} devices: make it a multiple of {shards}.")
  step_config = StepConfig(
    micro_batch=micro_batch,
    **_sharing(config, longest_prompt, micro_batch, shards),
    mini_batches=config.mini_batches,
    epochs=config.epochs,
    temperature=config.temperature,
    policy_loss=algorithms.policy_loss(config),
    credit=algorithms.token_credit(config),
    kl_in_reward=config.kl_in_reward,
    entropy_coef=config.entropy_coef,
    value_clip=config.value_clip or None,
    old_from_sampler=config.old_logp == "sampler",
    tis_cap=config.tis_cap or None,
    tis_sequence_bound=config.tis_sequence_bound or None,
    kl=ESTIMATORS[config.kl] if config.kl_coef > 0 else None,
    head_logits=LOGITS_PER_CHUNK * mesh.size,
    stats=functools.partial(sharded_token_stats(mesh), tied=model.tied),
    topk=_topk(config, model.vocab_size),
    topk_approximate=config.kl_topk_approximate,
    kl_iw_low=config.kl_iw_low or None,
    kl_iw_high=config.kl_iw_high or None,
    aggregation=config.aggregation,
    max_new_tokens=config.max_new_tokens,
    seed=config.seed,
  )
  check_divides(
    config.rows, step_config if not config.micro_tokens else dataclasses.replace(step_config, micro_batch=step_config.prompt_rows)
  )
  if config.micro_tokens:
    micro_batches.rows_that_fit(config.max_prompt_tokens, config.max_new_tokens, config.micro_tokens, step_config, shards)
  return step_config


def _models(
  config: RunConfig, model_config: decoder.DecoderConfig, prompt_rows: int, placed: sharding.Activations
) -> tuple[Callable, Callable | None]:
  """The policy and, where there is one, the critic, as functions of their parameters; `prompt_rows` are read with one prompt."""

  def model(params: PyTree, frozen: PyTree, batch: RolloutBatch) -> tuple[jax.Array, jax.Array]:
    del frozen
    if prompt_rows > 1:
      hidden = decoder.apply_shared(model_config, params, *shared_prompts(batch, prompt_rows), placed)
    else:
      hidden = before_responses(decoder.apply(model_config, params, batch.tokens, placed), batch)
    return hidden, decoder.unembedding(params)

  def value(params: PyTree, frozen: PyTree, batch: RolloutBatch) -> jax.Array:
    del frozen
    return before_responses(critic.apply_critic(model_config, params, batch.tokens, placed), batch)

  return model, value if config.uses_critic else None


def _scores_policy(step: StepConfig, keep_initial: bool) -> bool:
  """Whether the policy at the start of an RL step is scored for more than its top-k ids, which the sampler can give."""
  return step.kl_in_reward or keep_initial or not (step.on_policy or step.old_from_sampler)


def _functions(step_config: StepConfig, models: tuple, constrain: Callable) -> dict[str, Callable | None]:
  """The jitted functions of a run but for sampling and the training step, by their name in Run."""
  model, value = models
  functions = {
    "score": functools.partial(score_step, model=model, config=step_config, constrain=constrain),
    "policy_kl": policy_kl,
    "value": functools.partial(value_step, critic=value, config=step_config, constrain=constrain) if value else None,
    "credit": functools.partial(credit_step, config=step_config) if step_config.credit else None,
  }
  return {name: function and CompiledOnce(function, name) for name, function in functions.items()}


def _sampler(
  config: RunConfig,
  model_config: decoder.DecoderConfig,
  team: Team,
  slots: int,
  eos_ids: Sequence[int],
  pad_id: int,
  stop: StopStrings | None,
) -> Sampler:
  return Sampler(
    model_config,
    slots=slots,
    max_prompt_tokens=config.max_prompt_tokens,
    max_new_tokens=config.max_new_tokens,
    eos_ids=eos_ids,
    pad_id=pad_id,
    group=config.group_size,
    layout=Layout(team.mesh),
    block=config.decode_block,
    chunk=config.prefill_chunk,
    stop=stop,
    jit=CompiledOnce,
  )


def _samplings(config: RunConfig, step_config: StepConfig, keep_initial: bool) -> dict[str, Any]:
  """`sampling` and `eval_sampling` of a run."""
  own_ids = config.kl in KL_TOPK and config.topk_owner == "policy" and not _scores_policy(step_config, keep_initial)
  evaluated = Sampling(
    config.temperature if config.eval_temperature is None else config.eval_temperature, config.eval_top_k, config.eval_top_p
  )
  return {
    "sampling": Sampling(
      config.temperature, config.top_k, config.top_p, step_config.topk if own_ids else 0, own_ids and config.kl_topk_approximate
    ),
    "eval_sampling": {"sampled": evaluated, "greedy": Sampling(temperature=0.0)},
  }


def programs(
  config: RunConfig,
  model_config: decoder.DecoderConfig,
  mesh: jax.sharding.Mesh,
  *,
  longest_prompt: int,
  eos_ids: Sequence[int],
  pad_id: int,
  stop: StopStrings | None = None,
  keep_initial: bool = False,
  process: int = 0,
  device_bytes: int | None = None,
) -> Programs:
  """Builds and checks all that can be checked without a compile.

  Args:
    mesh: of devices that need not be there: nothing is put on them.
    longest_prompt: of any problem there is, in tokens.
    eos_ids: a response ends with any of them; pad_id: what stands behind it.
    keep_initial: whether the KL to the initial model is logged.
    process: whose part of the rollout mesh is sampled on.
    device_bytes: memory of a device, where it is known.
  """
  model_config = dataclasses.replace(
    model_config, kv_copies=sharding.kv_copies(model_config.num_kv_heads, model_config.num_heads, mesh.shape["tensor"])
  )
  step_config = _step_config(config, mesh, model_config, longest_prompt)
  for name in ("top_k", "eval_top_k"):
    if getattr(config, name) > model_config.vocab_size:
      raise ValueError(
        f"--{name}={getattr(config, name)} exceeds the vocabulary of {model_config.vocab_size} tokens: use at most that, or 0."
      )
  optimizer = algorithms.optimizer(config)
  constrain = functools.partial(sharding.constrain_batch, mesh)
  placed = sharding.Activations(mesh)
  models = _models(config, model_config, step_config.prompt_rows, placed)

  def fresh_state(policy: PyTree) -> TrainState:
    params = {"policy": policy, "value": critic.init_critic(policy)} if config.uses_critic else policy
    return init_state(params, optimizer, config.uses_anchor)

  abstract = jax.eval_shape(lambda key: fresh_state(decoder.init_params(model_config, key)), jax.random.key(0))
  shardings = sharding.tree_shardings(mesh, abstract)
  if config.anchor_memory == "pinned_host":
    shardings = shardings.replace(ema_params=anchor.host_shardings(shardings.ema_params))
  abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
  rollouts = rollout_model(config, model_config, mesh, abstract, device_bytes, keep_initial)
  team = team_of(rollouts.mesh, process)
  step = functools.partial(train_step, model=models[0], critic=models[1], optimizer=optimizer, config=step_config, constrain=constrain)
  return Programs(
    config=config,
    model_config=model_config,
    mesh=mesh,
    device_bytes=device_bytes,
    optimizer=optimizer,
    lr_scales=algorithms.lr_scales(config),
    model=_models(config, model_config, 1, placed)[0],  # for rows in any order
    step_config=step_config,
    abstract_state=abstract,
    fresh_state=fresh_state,
    keep_initial=keep_initial,
    train_step=CompiledOnce(step, donate_argnums=0, out_shardings=(shardings, None)),
    rollout_mesh=rollouts.mesh,
    team=team,
    prepare=CompiledOnce(functools.partial(prepare, rollouts.config), "prepare", out_shardings=weight_shardings(mesh, abstract.policy)),
    rollout_shardings=weight_shardings(rollouts.mesh, abstract.policy),
    sampler=_sampler(config, rollouts.config, team, rollouts.slots * team.mesh.size // mesh.size, eos_ids, pad_id, stop),
    **_samplings(config, step_config, keep_initial),
    **_functions(step_config, models, constrain),
  )
