"""One RL step: roll out, score, update."""

import dataclasses
import time

import jax
import numpy as np

from emapg_jax import anchor, data, distributed, metrics, micro_batches
from emapg_jax.checkpoint import HostState
from emapg_jax.types import Hyper, Plan, PyTree, RolloutBatch, TrainState, Weighted
from experiments import rollouts
from experiments.build import Run, on_devices, plans


class Clock:
  """Wall-clock seconds by phase."""

  def __init__(self):
    self._last = time.perf_counter()
    self.seconds: dict[str, float] = {}

  def lap(self, phase: str) -> None:
    """Books the time since the last lap on `phase`."""
    now = time.perf_counter()
    self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
    self._last = now


def score_batch(
  run: Run, state: TrainState, initial: PyTree | None, batch: RolloutBatch, settings: Hyper, plan: Plan | None = None
) -> tuple[RolloutBatch, dict[str, Weighted]]:
  """Adds old log-probs, ids, the anchor's statistics, values and credit; and the KL to the initial model. Dispatched, not waited for."""
  sampled, old, ref = batch, None, None  # what is scored stays as it came: with other ids in it, scoring would compile again
  if run.step_config.kl is not None and run.config.topk_owner == "anchor":
    ref = run.score(anchor.on_device(state.ema_params), (), sampled, None, plan)
    batch = batch.replace(topk_ids=ref.topk_ids)
  if run.needs_old_pass:
    old = run.score(state.policy, (), sampled, None if ref is None else ref.topk_ids, plan)
    batch = batch.replace(old_logp=old.logp)
  numbers = {}
  if initial is not None:
    numbers["kl_initial"] = run.policy_kl(old, run.score(initial, (), sampled, old.topk_ids, plan), batch)
  if run.step_config.kl is not None:
    if ref is None:
      batch = batch.replace(topk_ids=batch.topk_ids if old is None else old.topk_ids)
      ref = run.score(anchor.on_device(state.ema_params), (), sampled, batch.topk_ids, plan)
    batch = batch.replace(ref_logp=ref.logp, ref_logp_topk=ref.logp_topk, ref_log_tail=ref.log_tail)
  if run.value is not None:
    batch = batch.replace(old_values=run.value(state.params["value"], (), batch, plan))
  if run.credit is not None:
    (advantages, returns), credited = run.credit(batch, old if run.step_config.kl_in_reward else None, settings)
    batch = batch.replace(advantages=advantages, returns=returns)
    numbers |= credited
  return batch, numbers


def hyper(run: Run, host: HostState, step: int) -> Hyper:
  """The traced settings of RL step `step`."""
  config = run.config
  return Hyper(
    kl_coef=np.float32(config.kl_coef if host.kl_coef is None else host.kl_coef),
    ema_decay=np.float32(config.ema_decay),
    ema_period=np.int32(config.ema_period),
    lr_scale=run.lr_scales(step),
    baseline=np.float32(host.baseline or 0.0),
  )


def rl_step(
  run: Run, state: TrainState, host: HostState, initial: PyTree | None, stream: data.PromptStream, step: int
) -> tuple[TrainState, HostState, dict, list[dict]]:
  """One RL step: the next states, metrics and sample rows. Each phase is waited for, so that its time is its own."""
  config, clock = run.config, Clock()
  groups = rollouts.sample_groups(run, state.policy, stream, step, clock.lap)
  batch, numbers = rollouts.to_batch(run, groups)
  scoring, training = plans(run, batch, step)
  if training is not None or run.step_config.prompt_rows > 1:
    numbers["padded_fraction"] = micro_batches.padded_fraction(batch, training, run.step_config)
  clock.lap("reward")
  settings = hyper(run, host, step)
  for_credit = settings.replace(kl_coef=np.float32(settings.kl_coef / numbers.get("reward_scale", 1.0)))
  batch, scored = jax.block_until_ready(score_batch(run, state, initial, on_devices(run, batch), for_credit, scoring))
  clock.lap("anchor")
  state, device_metrics = run.train_step(state, (), batch, settings, training)
  # What the host decides by them, it must decide alike on every process, whatever its own device's last bit is.
  numbers = distributed.from_first(numbers | metrics.reduce(device_metrics | scored))
  clock.lap("update")
  numbers["learning_rate"] = config.learning_rate * float(settings.lr_scale[-1])
  if config.kl_target:
    numbers["kl_coef"] = float(settings.kl_coef)
  if config.advantage == "reward_to_go":
    numbers["baseline"] = float(settings.baseline)
  numbers |= {f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()}
  numbers["tokens_per_second"] = float(groups.responses.length.sum()) / sum(clock.seconds.values())
  numbers |= {f"task_{name}" if name in numbers or name == "step" else name: value for name, value in rollouts.task_counters(run).items()}
  samples = rollouts.log_samples(run, groups.responses, groups.scores, "train", min(config.samples_logged, config.rows))
  return state, _next_host(run, host, numbers, stream.position), numbers, samples


def _next_host(run: Run, host: HostState, numbers: dict[str, float], position: int) -> HostState:
  """Books the skipped updates of a step and where the data stream is; adapts the KL coefficient and the baseline."""
  config, updates = run.config, run.config.updates
  skipped = round(numbers["bad_updates"] * updates)
  kl_coef, baseline, mean = host.kl_coef, host.baseline, numbers["reward_mean"]
  if config.kl_target and "kl" in numbers:
    kl_coef = anchor.adapted_kl_coef(config.kl_coef if kl_coef is None else kl_coef, numbers["kl"], config.kl_target, config.kl_gain)
  if config.advantage == "reward_to_go" and np.isfinite(mean):
    baseline = mean if baseline is None else config.baseline_decay * baseline + (1 - config.baseline_decay) * mean
  return dataclasses.replace(
    host,
    position=position,
    bad_in_row=host.bad_in_row + 1 if skipped == updates else 0,
    bad_total=host.bad_total + skipped,
    kl_coef=kl_coef,
    baseline=baseline,
  )
