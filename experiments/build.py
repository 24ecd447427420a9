"""From a RunConfig to everything a run holds."""

import dataclasses
import functools
import re
from typing import Any

import jax

from emapg_jax import distributed, micro_batches, sharding, streams
from emapg_jax.config import RunConfig
from emapg_jax.envs.task import Task, ask
from emapg_jax.models import decoder, hf
from emapg_jax.rollout.stop import StopStrings
from emapg_jax.types import Plan, PyTree, RolloutBatch, TrainState
from experiments.programs import Programs, programs
from experiments.prompts import Prompts, build_task, encoded, eval_problems, tokenizer_and_model


@dataclasses.dataclass(frozen=True)
class Run(Programs):
  """Everything that stays the same from step to step."""

  task: Task
  tokenizer: Any
  train: Prompts
  eval: Prompts | None


def _unescaped(text: str) -> str:
  """A stop string as a flag holds it: \\n is a line break, and two backslashes are one."""
  return re.sub(r"\\([n\\])", lambda found: "\n" if found[1] == "n" else "\\", text)


def _device_bytes() -> int | None:
  """Memory of the smallest device of all processes; None where one does not say."""
  own = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
  known = [limit for limits in distributed.gathered(own) for limit in limits]
  return None if None in known else min(known)


def build(config: RunConfig) -> Run:
  """Builds and checks all that can be checked without a compile."""
  if config.prompts_per_step % distributed.count():
    raise ValueError(
      f"--prompts_per_step={config.prompts_per_step} can't be shared out over {distributed.count()} processes, each of which samples whole "
      f"groups: make it a multiple of {distributed.count()}."
    )
  mesh = sharding.make_mesh(config.mesh)
  task = build_task(config)
  tokenizer, model_config = tokenizer_and_model(config, task)
  if config.warmup_steps and not (hasattr(task, "demonstration") and hasattr(task, "tokenizer")):
    raise ValueError(
      f"--warmup_steps={config.warmup_steps} needs a task with demonstrations and a tokenizer of its own, which {config.task} is not: "
      "set it to 0."
    )
  train = encoded(config, task, tokenizer, list(ask(task, "prompts")))
  if hasattr(task, "prompt_opens_think"):
    task.prompt_opens_think = tokenizer.opens_think(train.problems[0].prompt, getattr(task, "chat", True))
  evaluated = eval_problems(config, task)
  for name in () if evaluated else ("eval_temperature", "eval_top_p", "eval_top_k", "keep_best"):
    if getattr(config, name) != getattr(RunConfig(), name):
      raise ValueError(f"--{name}={getattr(config, name)} has no effect: there are no problems to evaluate on. Leave it out.")
  compiled = programs(
    config,
    model_config,
    mesh,
    longest_prompt=max(map(len, train.tokens)),
    eos_ids=tokenizer.eos_ids,
    pad_id=tokenizer.pad_id,
    stop=StopStrings(tokenizer.decode, [_unescaped(text) for text in config.stop_strings]) if config.stop_strings else None,
    keep_initial=config.keep_initial == "on" or (config.keep_initial == "auto" and hasattr(task, "tokenizer")),
    process=jax.process_index(),
    device_bytes=_device_bytes(),
  )
  return Run(
    **vars(compiled),
    task=task,
    tokenizer=tokenizer,
    train=train,
    eval=encoded(config, task, tokenizer, evaluated) if evaluated else None,
  )


def new_state(run: Run) -> TrainState:
  """The state of a fresh run: weights of `--model_path`, or random ones from the seed."""
  shardings = jax.tree.map(lambda a: a.sharding, run.abstract_state)
  if run.config.model_path:
    params = hf.load_params(run.config.model_path, run.model_config, shardings.policy)
    return jax.jit(run.fresh_state, out_shardings=shardings, donate_argnums=0)(params)
  key = streams.stream_key(run.config.seed, streams.INIT)
  return jax.jit(lambda key: run.fresh_state(decoder.init_params(run.model_config, key)), out_shardings=shardings)(key)


def on_devices(run: Run, tree: PyTree) -> PyTree:
  """Lays rows out over the devices."""
  layout = sharding.batch_sharding(run.mesh)
  return jax.device_put(tree, layout) if distributed.count() == 1 else jax.tree.map(lambda x: distributed.place(x, layout), tree)


def plans(run: Run, batch: RolloutBatch, step: int) -> tuple[Plan | None, Plan | None]:
  """Which rows go through the model together in the scoring passes and in the updates of RL step `step`; None: `micro_batch` rows."""
  if not run.config.micro_tokens:
    return None, None
  by_length = functools.partial(
    micro_batches.by_length, batch, run.config.micro_tokens, run.step_config, devices=sharding.batch_devices(run.mesh)
  )
  return by_length(), by_length(step - 1)
