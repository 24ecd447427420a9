"""The task that a run is about, its problems as token ids, and the tokenizer and architecture that go with it."""

import dataclasses
import hashlib
import os
from typing import Any

from emapg_jax import data
from emapg_jax.config import RunConfig
from emapg_jax.envs.arithmetic import ArithmeticTask
from emapg_jax.envs.embedded import AddTask, BetweenTask
from emapg_jax.envs.math import MathTask
from emapg_jax.envs.task import Problem, Task, ask, load_task
from emapg_jax.models import decoder, hf
from emapg_jax.models.tokenizer import ChatTokenizer

TASKS = ("add", "between", "arithmetic", "math")


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Problems that fit, with their token ids."""

  problems: list[Problem]
  tokens: list[list[int]]
  dropped: int  # longer than the limit

  def fingerprint(self) -> str:
    """Changes when a prompt, an answer or their order does."""
    return hashlib.sha256(repr(self.problems).encode(errors="backslashreplace")).hexdigest()[:16]


def build_task(config: RunConfig) -> Task:
  """The task that `--task` names."""
  if config.task == "add":
    return AddTask(config.digits, config.demonstration_noise)
  if config.task == "between":
    return BetweenTask()
  if config.task == "arithmetic":
    return ArithmeticTask(config.digits)
  if config.task == "math":
    if not config.train_data:
      raise ValueError(
        "--task=math needs --train_data: JSONL or parquet files with rows of {problem, answer}. (For the quickstart with other settings, "
        "start from its flagfile: --flagfile=experiments/flags/quickstart.flags.)"
      )
    return MathTask(
      data.load_problems(config.train_data),
      eval_problems=data.load_problems(config.eval_data) if config.eval_data else None,
      answer_mode=config.answer_mode,
      box_instruction=config.box_instruction,
      workers=config.grading_workers or min(8, os.cpu_count() or 1),
      time_limit=config.grading_seconds,
    )
  if ":" in config.task:
    return load_task(config.task)
  raise ValueError(f"--task={config.task} is unknown. Use one of {', '.join(TASKS)}, or module:function for a task of your own.")


def encoded(config: RunConfig, task: Task, tokenizer: Any, problems: list[Problem]) -> Prompts:
  """The problems whose prompts fit."""
  chat = getattr(task, "chat", True)
  tokens = [tokenizer.encode_prompt(problem.prompt, chat) for problem in problems]
  kept, dropped = data.filter_long(tokens, config.max_prompt_tokens, config.overlong_prompts)
  return Prompts([problems[i] for i in kept], [tokens[i] for i in kept], dropped)


def eval_problems(config: RunConfig, task: Task) -> list[Problem]:
  """What the run evaluates on; none where it does not, or the task has nothing for it."""
  if not config.eval_every or not hasattr(task, "eval_prompts"):
    return []
  return list(ask(task, "eval_prompts"))[: config.eval_problems]


def tokenizer_and_model(config: RunConfig, task: Task) -> tuple[Any, decoder.DecoderConfig]:
  """Those of `--model_path`, or the task's own and a small random model's."""
  dtype = config.dtype
  if config.model_path:
    if hasattr(task, "tokenizer"):
      raise ValueError(f"--task={config.task} brings its own tokenizer and can't use --model_path={config.model_path}: leave that out.")
    model_config = hf.read_config(config.model_path, dtype=dtype, param_dtype=config.param_dtype, remat=config.remat)
    longest = config.max_prompt_tokens + config.max_new_tokens
    if longest > model_config.max_positions:
      raise ValueError(
        f"--max_prompt_tokens={config.max_prompt_tokens} + --max_new_tokens={config.max_new_tokens} = {longest} exceeds the "
        f"{model_config.max_positions} positions of {config.model_path}: lower one of them."
      )
    return ChatTokenizer(config.model_path, chat_template=config.chat_template or None), model_config
  if not hasattr(task, "tokenizer"):
    raise ValueError(f"--task={config.task} needs --model_path: a Hugging Face folder with config, safetensors and tokenizer.")
  if config.hidden_size % config.num_heads:
    raise ValueError(f"--hidden_size={config.hidden_size} is not a multiple of --num_heads={config.num_heads}.")
  return task.tokenizer, decoder.DecoderConfig(
    vocab_size=task.tokenizer.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=config.hidden_size * 8 // 3,
    num_layers=config.num_layers,
    num_heads=config.num_heads,
    num_kv_heads=config.num_heads,
    head_dim=config.hidden_size // config.num_heads,
    max_positions=config.max_prompt_tokens + config.max_new_tokens,
    dtype=dtype,
    param_dtype=config.param_dtype,
    remat=config.remat,
  )
