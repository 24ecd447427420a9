"""What is to be sampled, and a sampler that does it: the one place of the benchmarks that knows the sampler's interface."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from emapg_jax.models import decoder
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.sampler import Sampler
from emapg_jax.types import PyTree
from experiments.bench.measure import program_bytes


@dataclasses.dataclass(frozen=True)
class Work:
  """`samples` sequences of each prompt, one after another, `lengths` tokens each; `slots` of them in flight at a time."""

  prompts: tuple[tuple[int, ...], ...]
  samples: int
  lengths: tuple[int, ...]
  slots: int

  @property
  def prompt_tokens(self) -> int:
    """Tokens of all prompts, each prompt once."""
    return sum(map(len, self.prompts))

  def cut_to(self, length: int) -> "Work":
    """The same with all sequences of one length."""
    return dataclasses.replace(self, lengths=(length,) * len(self.lengths))

  def in_batches(self) -> list["Work"]:
    """As many sequences at a time as there are slots, in order: the next batch begins when the last sequence has ended."""
    count = self.slots // self.samples
    return [
      dataclasses.replace(
        self,
        prompts=self.prompts[start : start + count],
        lengths=self.lengths[start * self.samples : (start + count) * self.samples],
      )
      for start in range(0, len(self.prompts), count)
    ]


class Weighed:
  """In place of `jax.jit`: compiles ahead of time, so that the bytes of each program are known; `bytes` collects them."""

  def __init__(self):
    self.bytes: list[int | None] = []

  def jit(self, function: Callable, static_argnums=(), static_argnames=(), **options: Any) -> Callable:
    """The compiled function; static arguments as `jax.jit` takes them."""
    numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
    jitted = jax.jit(function, static_argnums=numbers, static_argnames=names, **options)
    compiled = {}

    def call(*args, **named):
      dynamic = [a for i, a in enumerate(args) if i not in numbers], {k: v for k, v in named.items() if k not in names}
      static = [a for i, a in enumerate(args) if i in numbers], [named[k] for k in names if k in named]
      key = (repr(static), *((jax.numpy.shape(a), jax.dtypes.result_type(a)) for a in jax.tree.leaves(dynamic)))
      if key not in compiled:
        compiled[key] = jitted.lower(*args, **named).compile()
        self.bytes.append(program_bytes(compiled[key])[0])
      return compiled[key](*dynamic[0], **dynamic[1])

    return call


class SamplerUnderTest:
  """The sampler for one kind of work; sampling is from the whole distribution at temperature 1, and no id ends a sequence."""

  def __init__(self, config: decoder.DecoderConfig, work: Work, *, block: int, chunk: int):
    self._weighed = Weighed()
    self._sampler = Sampler(
      config,
      slots=work.slots,
      max_prompt_tokens=max(map(len, work.prompts)),
      max_new_tokens=max(work.lengths),
      eos_ids=(),
      pad_id=0,
      group=work.samples,
      block=block,
      chunk=chunk,
      jit=self._weighed.jit,
    )

  @property
  def temporary_bytes(self) -> int | None:
    """The largest of what has been compiled; None where a program does not say."""
    return None if None in self._weighed.bytes else max(self._weighed.bytes, default=None)

  def prepare(self, params: PyTree) -> PyTree:
    """Parameters as sampling reads them; once per RL step."""
    return self._sampler.prepare(params)

  def run(self, prepared: PyTree, work: Work) -> int:
    """Samples the work, waits for it, and returns the number of tokens."""
    owner = np.repeat(np.arange(len(work.prompts)), work.samples)
    keys = jax.random.split(jax.random.key(0), len(owner))
    rollout = self._sampler.generate(prepared, work.prompts, owner, keys, Sampling(), np.asarray(work.lengths))
    return int(rollout.length.sum())
