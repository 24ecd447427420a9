"""Sampling: sequences pass through the slots of a KV cache, and one that ends makes room for the next. Host code around rollout/slots.py.

Prompts are prefilled once, however many samples each has, in batches and in chunks; tokens are decoded in blocks, between which the host
looks for stop strings and refills slots. Every draw depends on its sequence's key and index alone: not on slot, order or neighbours.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from emapg_jax.models import decoder
from emapg_jax.rollout import batching
from emapg_jax.rollout import slots as device
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.stop import StopStrings
from emapg_jax.types import PyTree

EOS, STOP, LENGTH = "eos", "stop", "length"  # why a sequence ended
_VISIBLE = 256  # cache positions read at least; decoding compiles once per power of two from there


@dataclasses.dataclass
class Rollout:
  """N responses on the host; beyond a row's length, ids are `pad_id` and log-probabilities 0. T: the largest limit there can be."""

  tokens: np.ndarray  # int32 [N, T], as sampled, the end token included
  length: np.ndarray  # int32 [N]; 0 only where the context was full, or the limit 0
  logp: np.ndarray  # float32 [N, T], at the sampling temperature, before truncation; of the raw logits when greedy
  sampling_logp: np.ndarray  # float32 [N, T], of the distribution the token was drawn from
  reason: np.ndarray  # str [N]: eos, stop or length
  topk_ids: np.ndarray  # int32 [N, T, K], of the sampling policy; K is Sampling.report_topk
  topk_logp: np.ndarray  # float32 [N, T, K]


class Sampler:
  """Generates from any number of prompts through a fixed number of slots; compiles once per shape and `Sampling`."""

  def __init__(
    self,
    config: decoder.DecoderConfig,
    *,
    slots: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    pad_id: int,
    group: int = 1,
    shards: int = 1,
    block: int = 32,
    chunk: int = 512,
    stop: StopStrings | None = None,
    constrain: Callable[[PyTree], PyTree] = lambda x: x,
    jit: Callable[..., Callable] = jax.jit,
  ):
    """Compiles nothing yet.

    Args:
      slots: sequences that are decoded at a time, S.
      max_prompt_tokens, max_new_tokens: of any sequence; together at most `config.max_positions` are used, and a sequence that would need
        more ends with reason `length`.
      group: samples a prompt usually has; S / group prompts are prefilled at a time.
      shards: devices over which `constrain` lays rows; divides `slots`.
      block: tokens decoded between looks at the slots.
      chunk: prompt tokens of a row that are prefilled at a time.
      constrain: within jit, lays the leading axis of every leaf over the devices.
      jit: `jax.jit`, or something that watches over it.
    """
    for name, value in {"slots": slots, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}.items():
      _check_positive(name, value)
    for name, value in {"group": group, "shards": shards, "block": block, "chunk": chunk}.items():
      _check_positive(name, value)
    if slots % shards:
      raise ValueError(f"{slots} slots can't be laid out over {shards} devices: make them a multiple of {shards}.")
    self.config, self.slots, self.stop, self.pad_id = config, slots, stop, pad_id
    self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
    self._block, self._chunk = min(block, max_new_tokens), chunk
    self.prompts = -(-slots // (group * shards)) * shards

    def empty_slots(size, key):
      return constrain(device.empty_slots(config, slots, size, key))

    def empty_prompts(size):
      return constrain(decoder.empty_cache(config, self.prompts, size))

    def prefill(params, cache, tokens, start):
      return constrain(device.prefill(config, params, cache, tokens, start))

    def insert(slots, prompts, arrivals):
      return constrain(device.insert(slots, prompts, arrivals))

    decode = functools.partial(device.decode_block, config, eos_ids=tuple(eos_ids), block=self._block, constrain=constrain)
    self.prepare = jit(functools.partial(device.prepare, config))
    self._empty_slots, self._empty_prompts = jit(empty_slots, static_argnums=0), jit(empty_prompts, static_argnums=0)
    self._prefill, self._insert = jit(prefill, donate_argnums=1), jit(insert, donate_argnums=0)
    self._decode = jit(decode, static_argnames=("sampling", "visible"), donate_argnums=1)

  def generate(
    self, params: PyTree, prompts: Sequence[Sequence[int]], owner: np.ndarray, keys: jax.Array, sampling: Sampling, limits: Any = None
  ) -> Rollout:
    """Continues prompts[owner[i]] for each i until an end id, a stop string or its limit.

    Args:
      params: from `prepare`.
      prompts: ids of each prompt, 1 to `max_prompt_tokens`.
      owner: int [N], the prompt of each sequence; samples of a prompt next to each other are cheapest.
      keys: typed PRNG keys [N]; token t of sequence i is drawn with fold_in(keys[i], t).
      limits: int [N], response tokens at most, 0 for an empty response; `max_new_tokens` for all when None.

    Raises:
      ValueError: for prompts, owners or limits out of bounds.
    """
    owner = np.asarray(owner)
    lengths = np.asarray([len(prompt) for prompt in prompts])
    limits = self._limits(lengths, owner, keys, limits)
    work = _Work(self, params, prompts, owner, keys, sampling, limits)
    while work.step():
      pass
    return work.out

  def _limits(self, lengths: np.ndarray, owner: np.ndarray, keys: jax.Array, limits: Any) -> np.ndarray:
    if (
      owner.dtype.kind not in "iu"
      or owner.ndim != 1
      or owner.shape != keys.shape
      or (owner.size and not 0 <= owner.min() <= owner.max() < len(lengths))
    ):
      raise ValueError(
        f"generate got owners {owner.dtype} of shape {owner.shape} and keys of shape {keys.shape}: one prompt index from 0 to "
        f"{len(lengths) - 1} and one key per sequence are needed."
      )
    if owner.size and not 1 <= lengths.min() <= lengths.max() <= self.max_prompt_tokens:
      raise ValueError(
        f"generate got prompts of {lengths.min()} to {lengths.max()} tokens, but this sampler takes 1 to {self.max_prompt_tokens} "
        "(max_prompt_tokens)."
      )
    limits = np.broadcast_to(self.max_new_tokens if limits is None else np.asarray(limits), owner.shape)
    if owner.size and not 0 <= limits.min() <= limits.max() <= self.max_new_tokens:
      raise ValueError(f"generate got limits of {limits.min()} to {limits.max()} tokens: they must lie in 0 to {self.max_new_tokens}.")
    return np.minimum(limits, self.config.max_positions - lengths[owner]).astype(np.int32).clip(0)


def _check_positive(name: str, value: int) -> None:
  if value < 1:
    raise ValueError(f"Sampler.{name} must be at least 1, got {value}.")


class _Work:
  """The state of one `generate`: who is in which slot, who waits, and what has been drawn."""

  def __init__(self, sampler, params, prompts, owner, keys, sampling, limits):
    self.sampler, self.params, self.prompts, self.owner, self.sampling, self.limits = sampler, params, prompts, owner, sampling, limits
    self.keys = keys
    count, size = len(owner), sampler.max_new_tokens
    self.out = Rollout(
      tokens=np.full((count, size), sampler.pad_id, np.int32),
      length=np.zeros(count, np.int32),
      logp=np.zeros((count, size), np.float32),
      sampling_logp=np.zeros((count, size), np.float32),
      reason=np.full(count, LENGTH, "<U6"),
      topk_ids=np.zeros((count, size, sampling.report_topk), np.int32),
      topk_logp=np.zeros((count, size, sampling.report_topk), np.float32),
    )
    self.waiting = [i for i in range(count) if limits[i] > 0][::-1]  # the next one last
    self.sequence = np.full(sampler.slots, -1)  # in each slot
    self.position = np.zeros(sampler.slots, np.int64)  # next in each slot's cache
    self.loaded: dict[int, int] = {}  # prompt -> row of the prefilled ones
    self.width = batching.fit(max((len(prompts[p]) for p in set(owner.tolist())), default=1), sampler.max_prompt_tokens)
    self.slots = self.cache = None

  def step(self) -> bool:
    """Refills slots and decodes a block; False when nothing is left to do."""
    self._refill()
    alive = self.sequence >= 0
    if not alive.any():
      return False
    before = np.where(alive, self.out.length[self.sequence], 0)
    furthest = int(self.position[alive].max()) + self.sampler._block
    visible = batching.fit(min(max(furthest, _VISIBLE), self._size()), self._size())
    self.slots, still, ended, drawn = self.sampler._decode(self.params, self.slots, alive, sampling=self.sampling, visible=visible)
    index, still, ended, drawn = jax.device_get((self.slots.index, still, ended, drawn))
    for slot in np.flatnonzero(alive):
      self._collect(int(slot), int(before[slot]), int(index[slot]), bool(still[slot]), bool(ended[slot]), drawn)
    return True

  def _size(self) -> int:
    return min(self.width + self.sampler.max_new_tokens, max(self.sampler.config.max_positions, self.width))

  def _collect(self, slot: int, start: int, end: int, still: bool, ended: bool, drawn: Any) -> None:
    out, row, count = self.out, self.sequence[slot], end - start
    for name, field in (("tokens", "ids"), ("logp", "logp"), ("sampling_logp", "sampling_logp"), ("topk_ids",) * 2, ("topk_logp",) * 2):
      getattr(out, name)[row, start:end] = getattr(drawn, field)[:count, slot]
    out.length[row] = end
    self.position[slot] += count
    if ended:
      out.reason[row] = EOS
    stopped = self.sampler.stop and self.sampler.stop.find(out.tokens[row, :end], start)
    if stopped:
      self._cut(row, stopped)
    if stopped or not still:
      self.sequence[slot] = -1

  def _cut(self, row: int, length: int) -> None:
    """Drops what was drawn behind a stop string."""
    out = self.out
    out.length[row], out.reason[row] = length, STOP
    out.tokens[row, length:] = self.sampler.pad_id
    for array in (out.logp, out.sampling_logp, out.topk_ids, out.topk_logp):
      array[row, length:] = 0

  def _refill(self) -> None:
    free = np.flatnonzero(self.sequence < 0).tolist()[::-1]
    entering: list[tuple[int, int]] = []
    while self.waiting and free:
      if int(self.owner[self.waiting[-1]]) not in self.loaded:
        self._enter(entering)  # they need the prompts that the next prefill replaces
        entering = []
        self._load()
      entering.append((free.pop(), self.waiting.pop()))
    self._enter(entering)

  def _load(self) -> None:
    """Prefills the prompts that are needed next."""
    sampler = self.sampler
    chosen = list(dict.fromkeys(self.owner[self.waiting[::-1]].tolist()))[: sampler.prompts]
    tokens = np.full((sampler.prompts, self.width), sampler.pad_id, np.int32)
    for row, prompt in zip(tokens, chosen):
      row[: len(self.prompts[prompt])] = self.prompts[prompt]
    if self.cache is None:
      self.cache = sampler._empty_prompts(self.width)
    longest = max(len(self.prompts[prompt]) for prompt in chosen)
    for start in range(0, longest, sampler._chunk):
      self.cache = sampler._prefill(self.params, self.cache, tokens[:, start : start + sampler._chunk], np.int32(start))
    self.loaded = {prompt: row for row, prompt in enumerate(chosen)}

  def _enter(self, entering: list[tuple[int, int]]) -> None:
    if not entering:
      return
    count = len(entering)
    slots, rows = np.asarray(entering).T
    last = np.asarray([len(self.prompts[self.owner[row]]) - 1 for row in rows])

    def filled(values, fill=0):
      return np.concatenate([values, np.full(self.sampler.slots - count, fill)]).astype(np.int32)

    arrivals = device.Arrivals(
      count=np.int32(count),
      slot=filled(slots, self.sampler.slots),
      prompt=filled([self.loaded[int(self.owner[row])] for row in rows]),
      token=filled([self.prompts[self.owner[row]][-1] for row in rows]),
      position=filled(last),
      limit=filled(self.limits[rows]),
      keys=self.keys[filled(rows, rows[0])],
    )
    if self.slots is None:
      self.slots = self.sampler._empty_slots(self._size(), self.keys[0])
    self.slots = self.sampler._insert(self.slots, self.cache, arrivals)
    self.sequence[slots], self.position[slots] = rows, last
