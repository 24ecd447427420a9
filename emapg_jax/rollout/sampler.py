"""Sampling: sequences pass through the slots of a KV cache, and one that ends makes room for the next. Host code around rollout/slots.py.

Prompts are prefilled once, however many samples each has (on several shards of devices: once on each that samples it), in batches and in
chunks; tokens are decoded in blocks, between which the host looks for stop strings and refills slots. Every draw depends on its sequence's
key and index alone: not on slot, order or neighbours.
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
from emapg_jax.rollout.layout import ONE_DEVICE, Layout
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
    layout: Layout = ONE_DEVICE,
    block: int = 32,
    chunk: int = 512,
    stop: StopStrings | None = None,
    jit: Callable[..., Callable] = jax.jit,
  ):
    """Compiles nothing yet.

    Args:
      slots: sequences that are decoded at a time, S.
      max_prompt_tokens, max_new_tokens: of any sequence; together at most `config.max_positions` are used, and a sequence that would need
        more ends with reason `length`.
      group: samples a prompt usually has; S / group prompts are prefilled at a time.
      layout: where the slots are; its devices divide `slots`.
      block: tokens decoded between looks at the slots.
      chunk: prompt tokens of a row that are prefilled at a time.
      jit: `jax.jit`, or something that watches over it.
    """
    for name, value in {"slots": slots, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}.items():
      _check_positive(name, value)
    for name, value in {"group": group, "block": block, "chunk": chunk}.items():
      _check_positive(name, value)
    if slots % layout.devices:
      raise ValueError(f"{slots} slots can't be laid out over {layout.devices} devices: make them a multiple of {layout.devices}.")
    self.config, self.slots, self.layout, self.stop, self.pad_id = config, slots, layout, stop, pad_id
    self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
    self._block, self._chunk = min(block, max_new_tokens), chunk
    self.between_blocks: Callable[[], None] = lambda: None  # called there; may raise to leave `generate`
    self.prompts = -(-slots // (layout.shards * group)) * layout.shards

    def empty_slots(size, impl):
      return layout.constrain(device.empty_slots(config, slots, size, impl))

    def empty_prompts(size):
      return layout.constrain(decoder.empty_cache(config, self.prompts, size))

    decode = functools.partial(device.decode_block, config, eos_ids=tuple(eos_ids), block=self._block, layout=layout)
    self.prepare = jit(functools.partial(device.prepare, config))
    self._empty_slots, self._empty_prompts = jit(empty_slots, static_argnums=(0, 1)), jit(empty_prompts, static_argnums=0)
    self._prefill = jit(functools.partial(device.prefill, config, layout=layout), donate_argnums=1)
    self._insert = jit(functools.partial(device.insert, layout=layout), donate_argnums=0)
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
      self.between_blocks()
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
    self.impl, self.keys = jax.random.key_impl(keys), np.asarray(jax.random.key_data(keys))
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
    self.units = _units(owner, limits, sampler.layout.shards)[::-1]  # the next one last
    self.sequence = np.full(sampler.slots, -1)  # in each slot
    self.position = np.zeros(sampler.slots, np.int64)  # next in each slot's cache
    self.waiting: list[list[int]] = [[] for _ in range(sampler.prompts)]  # for each prefilled prompt: sequences, the next one last
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
    self.slots, out = self.sampler._decode(self.params, self.slots, alive, sampling=self.sampling, visible=visible)
    index, still, ended, drawn = jax.device_get(out)
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
    """Gives free slots to sequences whose prompts are prefilled on the same shard, and prefills where a shard has no more of them."""
    while True:
      self._enter()
      free = self._by_shard(self.sequence < 0).any(axis=1)
      if not self.units or not free.any():
        return
      self._load(free)

  def _by_shard(self, of_rows: np.ndarray) -> np.ndarray:
    return of_rows.reshape(self.sampler.layout.shards, -1)

  def _load(self, free: np.ndarray) -> None:
    """Prefills the prompts that are needed next: one for each shard with free slots, then another, while there is room."""
    sampler = self.sampler
    exhausted = self._by_shard(np.asarray([not waiting for waiting in self.waiting]))
    if exhausted.sum() > len(self.units):  # the last ones go where they can begin at once
      exhausted &= free[:, None]
    shards, places = np.nonzero(exhausted)
    in_turn = np.lexsort((shards, ~free[shards], np.cumsum(exhausted, axis=1)[shards, places]))
    chosen = [int(shards[i] * exhausted.shape[1] + places[i]) for i in in_turn[: len(self.units)]]
    tokens = np.full((sampler.prompts, self.width), sampler.pad_id, np.int32)
    longest, loading = 0, np.zeros(sampler.prompts, bool)
    for row in chosen:
      sequences = self.units.pop()
      prompt = self.prompts[self.owner[sequences[0]]]
      tokens[row, : len(prompt)] = prompt
      longest, loading[row] = max(longest, len(prompt)), True
      self.waiting[row] = sequences[::-1]
    if self.cache is None:
      self.cache = sampler._empty_prompts(self.width)
    for start in range(0, longest, sampler._chunk):
      starts = np.where(loading, start, self.width).astype(np.int32)
      self.cache = sampler._prefill(self.params, self.cache, tokens[:, start : start + sampler._chunk], starts)

  def _enter(self) -> None:
    """Puts waiting sequences into free slots of their shard."""
    sampler = self.sampler
    size, prompts = sampler.slots // sampler.layout.shards, sampler.prompts // sampler.layout.shards
    fields = ("slot", "prompt", "token", "position", "limit")
    arrivals = {name: np.full(sampler.slots, size if name == "slot" else 0, np.int32) for name in fields}
    count = np.zeros(sampler.layout.shards, np.int32)
    keys = np.zeros((sampler.slots, *self.keys.shape[1:]), self.keys.dtype)
    for row, waiting in enumerate(self.waiting):
      shard, prompt = divmod(row, prompts)
      for slot in np.flatnonzero(self._by_shard(self.sequence)[shard] < 0)[: len(waiting)].tolist():
        sequence, place = waiting.pop(), shard * size + count[shard]
        tokens = self.prompts[self.owner[sequence]]
        for name, value in zip(fields, (slot, prompt, tokens[-1], len(tokens) - 1, self.limits[sequence])):
          arrivals[name][place] = value
        keys[place] = self.keys[sequence]
        count[shard] += 1
        self.sequence[shard * size + slot], self.position[shard * size + slot] = sequence, len(tokens) - 1
    if not count.any():
      return
    if self.slots is None:
      self.slots = sampler._empty_slots(self._size(), self.impl)
    self.slots = sampler._insert(self.slots, self.cache, device.Arrivals(count=count, keys=keys, **arrivals))


def _units(owner: np.ndarray, limits: np.ndarray, shards: int) -> list[list[int]]:
  """The sequences that have something to draw, those of a prompt together but for what it takes to give work to all shards."""
  of_prompt: dict[int, list[int]] = {}
  for sequence in np.flatnonzero(limits > 0).tolist():
    of_prompt.setdefault(int(owner[sequence]), []).append(sequence)
  fair = max(1, int((limits > 0).sum()) // shards)
  return [part.tolist() for all_ in of_prompt.values() for part in np.array_split(all_, -(-len(all_) // fair))]
