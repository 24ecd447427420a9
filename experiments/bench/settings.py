"""Sizes of the benchmarks: one flag per field."""

import dataclasses
import difflib
from collections.abc import Iterable

from absl import flags as absl_flags

from experiments import flags
from experiments.architectures import ARCHITECTURES
from experiments.flags import field

TOKEN_STATS_CASES = ("vocab=49152,hidden=576,topk=32", "vocab=151936,hidden=1536,topk=32", "vocab=151936,hidden=1536,topk=1024")
SAMPLER_CASES = ("distinct", "group", "spread")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
  """Raises ValueError, with the nearest valid name, unless `name` is one of `known`."""
  known = tuple(known)
  if name not in known:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ValueError(f"{what} {name!r} is unknown. {hint}Use one of {', '.join(known)}.")


@dataclasses.dataclass(frozen=True)
class _Flags:
  arch: str = field("smollm2-135m", f"Architecture with random weights: {', '.join(ARCHITECTURES)}.")
  model_path: str = field("", "A Hugging Face folder to take instead of --arch.")
  layers: int = field(0, "Layers of --arch, to make it smaller; 0: all.")
  dtype: str = field("float32", "Of activations and matmul inputs: float32 or bfloat16.")
  repeats: int = field(1, "Timed calls after a warm-up; the median counts.")
  json: str = field("", "File for the results.")
  compile_only: bool = field(False, "token_stats, attention, prefix: bytes of the compiled programs, without running them.")
  tokens: int = field(1024, "token_stats: tokens scored in a call.")
  batch: int = field(0, "Sequences: 0 means 16 for sampler, 8 for train_step, 2 for attention, and 1 prompt for prefix.")
  prompt: int = field(64, "sampler, train_step: tokens of a prompt; the sampler's case `group` has prompts 8 times as long.")
  new_tokens: int = field(64, "sampler, train_step, prefix: tokens of a response.")
  group: int = field(8, "prefix, and the sampler's case `group`: responses to a prompt.")
  prompts: tuple[int, ...] = field((64, 256, 1024), "prefix: prompt lengths to compare at.")
  seq: tuple[int, ...] = field((512, 2048), "attention: sequence lengths.")
  sampler_case: tuple[str, ...] = field(SAMPLER_CASES, f"sampler: which cases of {', '.join(SAMPLER_CASES)}.")
  decode_block: int = field(32, "sampler: tokens decoded between looks at the slots.")
  prefill_chunk: int = field(512, "sampler: prompt tokens of a row that are prefilled at a time.")
  topk: int = field(32, "train_step: ids in the top-k KL.")
  micro_batch: int = field(0, "train_step: sequences per forward; 0: all.")
  remat: bool = field(False, "train_step, prefix: compute activations again in the backward pass.")
  matmul_size: int = field(0, "Side of the matmul that the machine's FLOP/s are measured on; 0: the fastest of several.")
  bandwidth_mib: int = field(0, "MiB of the array that the memory bandwidth is measured on; 0: 256 on a CPU, 1024 elsewhere.")


@dataclasses.dataclass(frozen=True)
class Settings(_Flags):
  """Settings of a benchmark run, checked."""

  case: tuple[str, ...] = TOKEN_STATS_CASES

  def __post_init__(self):
    check_known("--arch", self.arch, ARCHITECTURES)
    check_known("--dtype", self.dtype, ("float32", "bfloat16"))
    for case in self.sampler_case:
      check_known("--sampler_case", case, SAMPLER_CASES)
    for name in ("repeats", "tokens", "prompt", "new_tokens", "group", "topk", "prompts", "seq", "decode_block", "prefill_chunk"):
      values = getattr(self, name)
      for value in values if isinstance(values, tuple) else (values,):
        if value < 1:
          raise ValueError(f"--{name}={value} must be at least 1.")
    for name in ("layers", "batch", "micro_batch", "matmul_size", "bandwidth_mib"):
      if getattr(self, name) < 0:
        raise ValueError(f"--{name}={getattr(self, name)} must be 0 or more; 0 leaves the choice to the benchmark.")
    if self.model_path and self.layers:
      raise ValueError(f"--layers={self.layers} makes a random model smaller and can't be used with --model_path={self.model_path}.")


def define(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
  """Registers the flags."""
  flags.define(_Flags, flag_values)
  absl_flags.DEFINE_multi_string(
    "case",
    list(TOKEN_STATS_CASES),
    "token_stats: sizes, as vocab=V,hidden=D,topk=K; may be repeated.",
    flag_values=flag_values,
    module_name="experiments.bench",
  )


def read(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> Settings:
  """The settings of the parsed flags; ValueError names the flag that is wrong."""
  settings = Settings(**dataclasses.asdict(flags.read(_Flags, flag_values)), case=tuple(flag_values["case"].value))
  if settings.model_path and flag_values["arch"].present:
    raise ValueError(f"--arch={settings.arch} names a random model and can't be used with --model_path={settings.model_path}.")
  return settings
