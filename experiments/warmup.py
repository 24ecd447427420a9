"""Supervised warm-up of an embedded task: next-token training on the task's own demonstrations, before the first RL step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from emapg_jax import distributed, masking, optim, sharding, streams
from emapg_jax.rollout import batching
from emapg_jax.rollout.draw import Sampling
from emapg_jax.score_step import response_stats
from emapg_jax.types import PyTree, RolloutBatch, TrainState
from experiments.build import Run, on_devices
from experiments.report import say
from experiments.rollouts import respond_and_score

CHECK_EVERY = 20  # supervised steps between looks at the greedy accuracy
CHECK_ROWS = 512


def _update(params, opt_state, batch: RolloutBatch, *, run: Run, optimizer: optax.GradientTransformation):
  def loss(params):
    stats = response_stats(run.model, params, (), batch, dataclasses.replace(run.step_config, temperature=1.0), batch.topk_ids)
    mean = masking.masked_mean(-stats.logp, batch.mask)
    return mean.sum / mean.weight

  value, grads = jax.value_and_grad(loss)(params)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, value


def _demonstrations(run: Run, rng: np.random.Generator) -> RolloutBatch:
  config, tokenizer = run.config, run.tokenizer
  rows = rng.integers(len(run.train.problems), size=config.warmup_batch)
  responses = [[*tokenizer.encode(run.task.demonstration(run.train.problems[i], rng)), tokenizer.eos_ids[0]] for i in rows]
  longest = max(map(len, responses))
  if longest > config.max_new_tokens:
    raise ValueError(f"A demonstration of task {config.task} has {longest} tokens, more than --max_new_tokens={config.max_new_tokens}.")
  prompts, prompt_length = batching.pad([run.train.tokens[i] for i in rows], config.max_prompt_tokens, tokenizer.pad_id)
  tokens = np.full((len(rows), config.max_new_tokens), tokenizer.pad_id, np.int32)
  for row, ids in zip(tokens, responses):
    row[: len(ids)] = ids
  zeros = np.zeros(tokens.shape, np.float32)
  length = np.asarray([len(ids) for ids in responses])
  return batching.assemble(prompts, prompt_length, tokens, length, zeros, zeros[:, 0], np.ones(len(rows), bool))


def greedy_accuracy(run: Run, params) -> float:
  """Greedy accuracy on some training problems: the evaluation problems must not decide when to stop."""
  rows = np.random.default_rng(0).permutation(len(run.train.problems))[:CHECK_ROWS]
  keys = streams.row_keys(run.config.seed, streams.WARMUP, 0, rows, np.zeros_like(rows))
  _, scores = respond_and_score(run, run.rollout_weights(params), run.train, rows, keys, Sampling(temperature=0.0))
  return float(np.mean(scores))


@jax.jit
def _finite(params: PyTree) -> jax.Array:
  return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def warm_up(run: Run, state: TrainState, stop) -> TrainState:
  """The state after the supervised steps: fresh optimizer, anchor a copy of the warmed-up policy, step 0. `stop.asked` ends the program."""
  config = run.config
  optimizer = optim.make_optimizer(config.warmup_learning_rate, weight_decay=0.0)
  shardings = jax.tree.map(lambda a: a.sharding, run.abstract_state)
  opt_shardings = sharding.tree_shardings(run.mesh, jax.eval_shape(optimizer.init, state.policy))
  update = jax.jit(
    functools.partial(_update, run=run, optimizer=optimizer),
    donate_argnums=(0, 1),
    out_shardings=(shardings.policy, opt_shardings, None),
  )
  rng = np.random.default_rng([config.seed, streams.WARMUP])
  params, opt_state, done, accuracy = state.policy, jax.jit(optimizer.init, out_shardings=opt_shardings)(state.policy), 0, None
  while done < config.warmup_steps:
    params, opt_state, loss = update(params, opt_state, on_devices(run, _demonstrations(run, rng)))
    jax.block_until_ready(loss)  # simulated devices on few cores abort when many collective programs wait for each other
    done += 1
    if stop.agreed():
      say("stopped in the supervised warm-up, of which nothing is kept")
      raise SystemExit(128 + stop.signal)
    if config.warmup_accuracy and done % CHECK_EVERY == 0:
      accuracy = greedy_accuracy(run, params)
      if accuracy >= config.warmup_accuracy:
        break
    if done % 100 == 0:
      say(f"warm-up step {done}: loss {float(loss):.3f}" + (f", greedy accuracy {accuracy:.3f}" if accuracy is not None else ""))
  if config.warmup_accuracy and (accuracy is None or accuracy < config.warmup_accuracy):
    say(f"warm-up ended at its limit of {done} steps below the greedy accuracy of {config.warmup_accuracy} that was asked for")
  if not distributed.from_first(bool(_finite(params))):
    raise ValueError(
      f"The supervised warm-up ended with weights that are not finite; lower --warmup_learning_rate={config.warmup_learning_rate}."
    )
  say(f"warm-up: {done} supervised steps, loss {float(loss):.3f}" + (f", greedy accuracy {accuracy:.3f}" if accuracy is not None else ""))
  return jax.jit(run.fresh_state, out_shardings=shardings, donate_argnums=0)(params)
