"""`train_step`: an RL step as a run does it: anchor forward, policy forward and backward with a top-k KL, AdamW, EMA; and its bound."""

import functools

import jax
import numpy as np

from emapg_jax import optim
from emapg_jax.models import decoder
from emapg_jax.rollout import batching
from emapg_jax.score_step import before_responses, score_step
from emapg_jax.step_config import StepConfig
from emapg_jax.token_stats import token_stats
from emapg_jax.train_step import init_state, train_step
from emapg_jax.types import Hyper, RolloutBatch
from experiments.bench import models
from experiments.bench.measure import Cost, Machine, median_seconds, program_bytes
from experiments.bench.settings import Settings
from experiments.bench.table import Ratio, Row, row
from experiments.estimators import ESTIMATORS


def _batch(rows: int, settings: Settings, vocab: int) -> RolloutBatch:
  rng = np.random.default_rng(0)
  prompts = rng.integers(vocab, size=(rows, settings.prompt), dtype=np.int32)
  responses = rng.integers(vocab, size=(rows, settings.new_tokens), dtype=np.int32)
  length, prompt_length = np.full(rows, settings.new_tokens), np.full(rows, settings.prompt)
  sampling_logp = np.full(responses.shape, -np.log(vocab))
  return batching.assemble(prompts, prompt_length, responses, length, sampling_logp, rng.normal(size=rows), np.ones(rows, bool))


def _step_config(rows: int, settings: Settings, model: decoder.DecoderConfig) -> StepConfig:
  micro_batch = settings.micro_batch or rows
  if rows % micro_batch:
    raise ValueError(f"--micro_batch={micro_batch} does not divide the {rows} sequences of train_step: use a divisor, or 0 for all.")
  if settings.topk > model.vocab_size:
    raise ValueError(f"--topk={settings.topk} exceeds the vocabulary of {model.vocab_size}.")
  return StepConfig(
    micro_batch=micro_batch,
    mini_batches=1,
    kl=ESTIMATORS["topk_reverse"],
    topk=settings.topk,
    stats=functools.partial(token_stats, tied=model.tied),
  )


def bench_train_step(settings: Settings, machine: Machine) -> tuple[list[Row], list[Ratio]]:
  """Rows: the anchor's pass, the update, and both; ratios: the bounds and the share reached."""
  rows, length = settings.batch or 8, settings.prompt + settings.new_tokens
  config = models.decoder_config(settings, length)
  step_config = _step_config(rows, settings, config)
  optimizer = optim.make_optimizer(1e-6)

  def model(params, frozen, batch):
    del frozen
    return before_responses(decoder.apply(config, params, batch.tokens), batch), decoder.unembedding(params)

  score = jax.jit(functools.partial(score_step, model=model, config=step_config))
  step = jax.jit(functools.partial(train_step, model=model, optimizer=optimizer, config=step_config), donate_argnums=0)
  state = jax.jit(lambda params: init_state(params, optimizer, True))(models.parameters(settings, config))
  batch = jax.device_put(_batch(rows, settings, config.vocab_size))
  hyper = Hyper(np.float32(0.01), np.float32(0.9), np.int32(1), np.float32(1))

  def scored(ref):
    return batch.replace(topk_ids=ref.topk_ids, ref_logp=ref.logp, ref_logp_topk=ref.logp_topk, ref_log_tail=ref.log_tail)

  score = score.lower(state.ema_params, (), batch).compile()
  first = scored(score(state.ema_params, (), batch))
  step = step.lower(state, (), first, hyper).compile()
  anchor_s = median_seconds(lambda: score(state.ema_params, (), batch), settings.repeats)

  def update(data):
    nonlocal state
    state, metrics = step(state, (), data, hyper)
    return state, metrics

  update_s = median_seconds(lambda: update(first), settings.repeats)
  whole_s = median_seconds(lambda: update(scored(score(state.ema_params, (), batch))), settings.repeats)
  anchor_bytes, update_bytes = program_bytes(score)[0], program_bytes(step)[0]
  whole_bytes = None if anchor_bytes is None or update_bytes is None else max(anchor_bytes, update_bytes)
  case, tokens = f"{rows} x ({settings.prompt} + {settings.new_tokens})", rows * length
  count = decoder.count_params(state.params)
  forward = models.forward_flops(config, tokens, rows * settings.new_tokens, rows * models.causal_pairs(length))
  traffic = 36.0 * count  # float32: parameters, two moments, anchor read and written, gradient read
  reads = models.weight_bytes(config)
  return [
    row(("train_step", case, "ours", phase), tokens, Cost(seconds, used), machine, passes * forward, moved)
    for phase, seconds, used, passes, moved in (
      ("anchor", anchor_s, anchor_bytes, 1, reads),
      ("update", update_s, update_bytes, 3, 2 * reads + traffic),
      ("whole", whole_s, whole_bytes, 4, 3 * reads + traffic),
    )
  ], _bounds(case, tokens, count, 4 * forward, traffic, whole_s, machine)


def _bounds(case: str, tokens: int, count: int, flops: float, traffic: float, seconds: float, machine: Machine) -> list[Ratio]:
  optimizer = traffic / machine.bandwidth
  simple = tokens / (8.0 * count * tokens / machine.matmul_flops + optimizer)
  exact = tokens / (flops / machine.matmul_flops + optimizer)
  return [
    Ratio("train_step", case, "bound, tokens/s: 8·N operations a token, and the optimizer's traffic", simple),
    Ratio("train_step", case, "bound, tokens/s: operations counted (head on responses only, attention), and the traffic", exact),
    Ratio("train_step", case, "share reached of the latter", tokens / seconds / exact),
  ]
