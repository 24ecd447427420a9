"""What a run says on the screen: header, remarks, evaluations, summary. Of several processes the first speaks, and any that fails."""

import contextlib
import dataclasses
import pathlib
import sys

import jax

from emapg_jax import anchor, distributed
from emapg_jax.config import RunConfig
from emapg_jax.rollout import batching
from emapg_jax.sharding import batch_devices
from experiments.build import Run
from experiments.memory_plan import at_once, host_bytes, memory_plan, remarks
from experiments.units import of_bytes

_REMAT = {"full": "each layer", "dots": "each layer but its products with weights", "none": "nothing"}


def say(text: str) -> None:
  """A line of its own, on standard output."""
  if not distributed.is_first():
    return
  with contextlib.suppress(BrokenPipeError):  # a reader that went away (`| head`) is no reason to stop
    print(text, flush=True)


def header(run: Run, workdir: pathlib.Path) -> None:
  """Effective settings, sizes, memory, buckets, anchor."""
  config = run.config
  devices = f"{jax.device_count()} {jax.devices()[0].platform} device(s)"
  held = f" of {distributed.count()} processes" if distributed.count() > 1 else ""
  say(f"emapg_jax · task {config.task} · {devices}{held}, mesh {dict(run.mesh.shape)}")
  defaults = type(config)()
  changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(defaults, f.name)}
  say("settings (the rest are defaults, all in flags.txt): " + " ".join(f"{k}={v}" for k, v in changed.items()))
  say("policy gradient: " + _policy_gradient(config))
  plan = memory_plan(run)
  sizes = ", ".join(f"{name} {of_bytes(size)}" for name, size in plan.items())
  policy, all_params = (sum(a.size for a in jax.tree.leaves(tree)) for tree in (run.abstract_state.policy, run.abstract_state.params))
  critic = f" + {all_params - policy:,} of the critic" if config.uses_critic else ""
  say(f"parameters: {policy:,}{critic} · vocabulary {run.model_config.vocab_size:,} · compute in {run.model_config.dtype}")
  on_host = f"; of the host, {of_bytes(host_bytes(run))} for the anchor" if host_bytes(run) else ""
  say(f"memory per device, planned: {sizes}; at most {of_bytes(at_once(plan))} at a time{on_host}")
  for remark in remarks(run):
    say(remark)
  say(f"prompts: {len(run.train.problems):,} ({run.train.dropped} longer than {config.max_prompt_tokens} tokens left out)")
  if run.eval:
    say(f"evaluation: {len(run.eval.problems):,} problems ({run.eval.dropped} too long left out), every {config.eval_every} steps")
  _rollouts(run)
  say(f"length buckets: prompt {batching.buckets(config.max_prompt_tokens)}, response {batching.buckets(config.max_new_tokens)}")
  if config.kl_coef > 0:
    life = anchor.half_life(config.ema_decay, config.ema_period)
    kind = "fixed anchor" if config.ema_decay == 1 else f"EMA anchor, half-life {life:.1f} RL steps"
    kind += ", in the reward" if config.kl_in_reward else ""
    of = f", K={run.step_config.topk} of {run.model_config.vocab_size} ids" if run.step_config.topk else ""
    adapted = f" at first, adapted to {config.kl_target:g} nats" if config.kl_target else ""
    coefficient = f"coefficient {config.kl_coef:g}{adapted}"
    say(f"KL: {config.kl}{of}, {coefficient}, {kind} (η={config.ema_decay:g} every {config.ema_period} steps)")
    if config.kl == "k1" and not config.kl_in_reward:
      say("warning: k1 in the loss has an expected gradient of zero: it adds noise and no pull. Use topk_reverse or k3pp.")
  else:
    say("KL: off" + (f"; an EMA anchor is kept (η={config.ema_decay:g})" if run.config.uses_anchor else ""))
  say(f"workdir: {workdir}")


def _rollouts(run: Run) -> None:
  config, made = run.config, run.sampler
  cut = f" · top_p {config.top_p:g}, top_k {config.top_k}: ratios and KL assume full support" if config.truncated_sampling else ""
  rows = run.step_config.prompt_rows
  shared = f" · training reads a prompt once for {rows} responses" if rows > 1 else ""
  teams = run.rollout_mesh.size // run.team.mesh.size
  where = f" in each of {teams} teams of processes" if teams > 1 else ""
  sizes = f"{made.slots} slots, {made.prompts} prompts prefilled at a time{where}, blocks of {config.decode_block} tokens"
  say(f"rollouts: {sizes}{cut}{shared}")
  read = f"{config.micro_tokens} tokens" if config.micro_tokens else f"{run.step_config.micro_batch // batch_devices(run.mesh)} sequences"
  say(f"a forward in training: {read} per device; computed again in the backward pass: {_REMAT[config.remat]}")
  for text in run.sampler.stop.strings if run.sampler.stop else ():
    try:
      spelled = text in run.tokenizer.decode(run.tokenizer.encode_prompt(text, False))
    except ValueError:
      spelled = False
    if not spelled:
      say(f"warning: the tokenizer does not show the stop string {text!r} in what it decodes, so it may never end a response")


def _policy_gradient(config: RunConfig) -> str:
  """The effective choices behind `--algorithm`."""
  bounds = "" if config.clip_low is None else f" (1 − {config.clip_low:g} to 1 + {config.clip_high:g})"
  parts = [f"advantage {config.advantage}", f"loss {config.policy_loss}{bounds}", f"aggregation {config.aggregation}"]
  parts.append(f"{config.epochs} × {config.mini_batches} updates per RL step")
  if config.dynamic_sampling:
    parts.append(f"dynamic sampling, at most {config.max_refills} more batches")
  if config.overlong_share:
    parts.append(f"over-long penalty on the last {config.overlong_share:.0%} of {config.max_new_tokens} tokens")
  if config.uses_critic:
    parts.append(f"critic at rate {config.critic_learning_rate:g}, γ {config.discount:g}, λ {config.gae_lambda:g}")
  preset = dataclasses.asdict(RunConfig(algorithm=config.algorithm))
  choices = ("advantage", "policy_loss", "aggregation", "clip_low", "clip_high", "dynamic_sampling", "overlong_share")
  changed = [name for name in choices if getattr(config, name) != preset[name]]
  return config.algorithm + (f", changed in {', '.join(changed)}" if changed else "") + ": " + " · ".join(parts)


def evaluation(step: int, numbers: dict[str, float]) -> None:
  """One line for an evaluation, if there was one."""
  found = [f"{kind} accuracy {numbers[f'eval_{kind}']:.3f}" for kind in ("sampled", "greedy") if f"eval_{kind}" in numbers]
  if found:
    say(f"step {step}: " + ", ".join(found))


def summary(first: dict[str, float], last: dict[str, float], workdir: pathlib.Path, seconds: float) -> None:
  """What came out, and where it lies."""
  for kind in ("sampled", "greedy"):
    if first.get(f"eval_{kind}") is not None and last.get(f"eval_{kind}") is not None:
      before, after = first[f"eval_{kind}"], last[f"eval_{kind}"]
      say(f"{kind} accuracy: {before:.3f} before, {after:.3f} after ({after - before:+.3f})")
  kept = "checkpoints/, " if any(path.name.isdecimal() for path in (workdir / "checkpoints").iterdir()) else ""
  say(f"done in {seconds:.0f} s; in {workdir}: metrics.jsonl, samples.jsonl, curves.png, tensorboard/, {kept}flags.txt")


def fail(error: Exception) -> None:
  """An error the user can mend: one paragraph, exit code 1."""
  where = f" in process {distributed.index()} of {distributed.count()}" if distributed.count() > 1 else ""
  print(f"error{where}: {error}", file=sys.stderr, flush=True)
  raise SystemExit(1)
