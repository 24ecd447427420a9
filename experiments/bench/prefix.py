"""`prefix`: hidden states of a group's responses with the prompt read once for all of them, against once for each. Forward and gradient."""

import functools

import jax
import jax.numpy as jnp

from emapg_jax.models import decoder
from experiments.bench import models
from experiments.bench.measure import Machine, measure
from experiments.bench.settings import Settings
from experiments.bench.table import Ratio, Row, row


def _shared(params, prompts, responses, *, config):
  lengths = jnp.full(prompts.shape[:1], prompts.shape[1], jnp.int32)
  return decoder.apply_shared(config, params, prompts, lengths, responses)


def _plain(params, prompts, responses, *, config):
  repeated = jnp.repeat(prompts, responses.shape[0] // prompts.shape[0], axis=0)
  hidden = decoder.apply(config, params, jnp.concatenate([repeated, responses], axis=1))
  return hidden[:, prompts.shape[1] - 1 : -1]


def _loss(params, prompts, responses, *, function):
  return jnp.mean(function(params, prompts, responses).astype(jnp.float32) ** 2)


def _flops(config: decoder.DecoderConfig, variant: str, prompts: int, group: int, prompt: int, response: int) -> float:
  if variant == "plain":
    rows = prompts * group
    return models.forward_flops(config, rows * (prompt + response), 0, rows * models.causal_pairs(prompt + response))
  pairs = prompts * (models.causal_pairs(prompt) + group * models.causal_pairs(response, prompt))
  return models.forward_flops(config, prompts * (prompt + group * response), 0, pairs)


def bench_prefix(settings: Settings, machine: Machine | None) -> tuple[list[Row], list[Ratio]]:
  """Rows for every length of --prompts: shared and plain, forward and gradient; and how much faster sharing is."""
  group, response, prompts = settings.group, settings.new_tokens, settings.batch or 1
  config = models.decoder_config(settings, max(settings.prompts) + response)
  make_params = functools.partial(models.parameters, settings, config)
  params = jax.eval_shape(make_params) if settings.compile_only else make_params()
  weights = models.layer_weights(config) * jnp.dtype(config.dtype).itemsize
  rows, ratios = [], []
  for prompt in settings.prompts:
    case = f"{prompts} x {group}, prompt {prompt}, response {response}"
    keys = jax.random.split(jax.random.key(1))
    args = (
      params,
      jax.random.randint(keys[0], (prompts, prompt), 0, config.vocab_size),
      jax.random.randint(keys[1], (prompts * group, response), 0, config.vocab_size),
    )
    tokens = prompts * group * (prompt + response)
    for phase, passes in (("forward", 1), ("gradient", 3)):
      found = {}
      for variant, function in (("shared", _shared), ("plain", _plain)):
        bound = functools.partial(function, config=config)
        timed = bound if phase == "forward" else jax.grad(functools.partial(_loss, function=bound))
        cost = measure(timed, args, settings.repeats, settings.compile_only)
        flops = passes * _flops(config, variant, prompts, group, prompt, response)
        found[variant] = row(("prefix", case, variant, phase), tokens, cost, machine, flops, float(passes * weights))
      rows += found.values()
      shared, plain = found["shared"], found["plain"]
      ratios.append(Ratio("prefix", case, f"{phase}: operations, plain / shared", plain.flops / shared.flops))
      if shared.seconds is not None:
        ratios.append(Ratio("prefix", case, f"{phase}: seconds, plain / shared (above 1: sharing pays)", plain.seconds / shared.seconds))
      if shared.temporary_bytes and plain.temporary_bytes:
        ratios.append(Ratio("prefix", case, f"{phase}: temporary bytes, shared / plain", shared.temporary_bytes / plain.temporary_bytes))
  return rows, ratios
