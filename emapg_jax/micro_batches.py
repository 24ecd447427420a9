"""Which rows of a batch go through the model together, and how many of their response tokens are read: a `Plan`.

    mini-batches   the rows in the order of key(seed, step, epoch), cut into equal parts; without a plan cut again into micro-batches
    by_length      on the host: each mini-batch sorted by length and cut into micro-batches that hold about as many tokens each

A plan changes nothing but the order of summation: the rows of each update stay the same, an entry that only fills up trains nothing, and
what lies behind the last trained token of a row reaches no sum. Its shapes depend on those of the batch alone, so that nothing compiles
again while lengths change. Rows that share a prompt (`StepConfig.prompt_rows`) stay together; a unit is such rows, or one row.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from emapg_jax import streams
from emapg_jax.step_config import StepConfig, check_divides
from emapg_jax.types import MicroBatches, Plan, RolloutBatch

SHORTEST = 16  # response tokens; below this a forward costs its overhead


def count(part: MicroBatches) -> int | jax.Array:
  """How many micro-batches there are in `part`, of one update; a number that the compiler knows where it is always the same."""
  return part.rows.shape[0] if part.count is None else part.count


def take(batch: RolloutBatch, part: MicroBatches, index: jax.Array) -> RolloutBatch:
  """Micro-batch `index` of `part`, of one update; entries that only fill up are not real and have no token to train on."""
  rows, real = jnp.asarray(part.rows)[index], jnp.asarray(part.real)[index]
  unread = batch.mask.shape[1] - part.length
  taken = jax.tree.map(lambda x: x[rows] if x.ndim == 1 else x[rows, : x.shape[1] - unread], batch)
  return taken.replace(mask=taken.mask & real[:, None], real=taken.real & real)


def put(out: jax.Array, found: jax.Array, part: MicroBatches, index: jax.Array) -> jax.Array:
  """`out` [B, T, ...] with what was `found` [R, length, ...] for the rows that `take` gives."""
  return out.at[jnp.asarray(part.rows)[index], : part.length].set(found)  # what fills up are rows of the same micro-batch once more


@functools.partial(jax.jit, static_argnums=(1, 2))
def mini_batches(step: jax.Array, rows: int, config: StepConfig) -> jax.Array:
  """The units of each update of RL step `step` (steps completed), int32 [U, units / mini_batches].

  Drawn in blocks of `config.together` rows: which rows meet in an update is no matter of how many are read at a time.
  """
  together = max(config.together, config.prompt_rows)

  def order(epoch):
    return jax.random.permutation(streams.stream_key(config.seed, streams.MINI_BATCH, step, epoch), rows // together)

  blocks = jnp.concatenate([order(epoch) for epoch in range(config.epochs)]).reshape(config.updates, -1)
  return _rows(blocks, together // config.prompt_rows)


def _rows(units: np.ndarray | jax.Array, prompt_rows: int) -> np.ndarray | jax.Array:
  """The rows [..., N · prompt_rows] of units [..., N]."""
  within = np.arange(prompt_rows, dtype=np.int32)
  return (units[..., None] * prompt_rows + within.reshape((1,) * units.ndim + (-1,))).reshape(*units.shape[:-1], -1)


def _all_read(units: np.ndarray | jax.Array, batch: RolloutBatch, config: StepConfig) -> Plan:
  rows = _rows(units, config.prompt_rows).reshape(units.shape[0], -1, config.micro_batch)
  return (MicroBatches(rows=rows, real=np.ones(rows.shape, bool), count=None, length=batch.mask.shape[1]),)


def in_order(batch: RolloutBatch, step: jax.Array, config: StepConfig) -> Plan:
  """The plan of a training step that was given none: each mini-batch in the order drawn, every row read to the end."""
  rows = batch.tokens.shape[0]
  check_divides(rows, config)
  return _all_read(mini_batches(step, rows, config), batch, config)


def one_pass(batch: RolloutBatch, config: StepConfig) -> Plan:
  """The plan of a scoring pass that was given none, each micro-batch taking rows from all over: from every device."""
  rows, together = batch.tokens.shape[0], config.micro_batch
  check_divides(rows, dataclasses.replace(config, mini_batches=1))
  units = np.arange(rows // config.prompt_rows, dtype=np.int32).reshape(together // config.prompt_rows, -1).T
  return _all_read(units.reshape(1, -1), batch, config)


def read_lengths(longest: int) -> tuple[int, ...]:
  """To how many response tokens micro-batches are read where the batch holds `longest`: a quarter, a half and all of them."""
  return tuple(sorted({min(longest, max(SHORTEST, -(-longest // part))) for part in (4, 2, 1)}))


def rows_that_fit(prompt: int, response: int, micro_tokens: int, config: StepConfig, devices: int = 1) -> int:
  """How many rows of `prompt` and `response` tokens go through the model together: whole units, equally many on each device.

  Args:
    micro_tokens: tokens per device and forward; a unit has `prompt` tokens once and `response` tokens for each of its rows.
    devices: over how many the rows of a micro-batch are spread.

  Raises:
    ValueError: not even one unit fits.
  """
  tokens = prompt + config.prompt_rows * response
  if micro_tokens < tokens:
    raise ValueError(
      f"A budget of {micro_tokens} tokens per device and forward (micro_tokens) does not hold {config.prompt_rows} sequences of {prompt} "
      f"prompt tokens, read once, and {response} response tokens each: {tokens} are needed. Raise it, shorten prompts or responses, or let "
      "fewer sequences share a prompt."
    )
  return devices * (micro_tokens // tokens) * config.prompt_rows


def by_length(
  batch: RolloutBatch,
  micro_tokens: int,
  config: StepConfig,
  step: int | None = None,
  devices: int = 1,
  lengths: Sequence[int] | None = None,
) -> Plan:
  """A plan by length, on the host: the longest rows first, each micro-batch read as far as its longest needs.

  Args:
    batch: arrays of the host; the mask says how long rows are, since nothing behind the last trained token has to be read.
    micro_tokens: tokens per device and forward.
    step: RL steps completed, for `train_step`; None for one pass over all rows, for `score_step` and `value_step`.
    devices: over how many the rows of a micro-batch are spread.
    lengths: rising; one more compiled forward each. By default `read_lengths`.

  Raises:
    ValueError: a budget that does not hold one unit, rows that do not split into mini-batches of units, lengths that do not reach the end.
  """
  (rows, longest), group = batch.mask.shape, config.prompt_rows
  lengths = tuple(lengths or read_lengths(longest))
  if list(lengths) != sorted(set(lengths)) or lengths[-1] != longest:
    raise ValueError(f"Micro-batches can't be read to {lengths} tokens: lengths must rise and end at the {longest} that the batch holds.")
  parts = 1 if step is None else config.mini_batches
  check_divides(rows, dataclasses.replace(config, mini_batches=parts, micro_batch=group))
  units = rows // group
  updates = np.arange(units, dtype=np.int32)[None] if step is None else np.asarray(mini_batches(np.int32(step), rows, config))
  width = batch.tokens.shape[1] - longest
  whole = -(-units // (parts * devices)) * devices  # a mini-batch, filled up so that each device has as many
  sizes = {length: min(rows_that_fit(width, length, micro_tokens, config, devices) // group, whole) for length in lengths}
  of_units = trained_length(batch.mask).reshape(units, group).max(axis=1)
  packed = [_pack(chosen, of_units, sizes) for chosen in updates]
  return tuple(
    _stacked([[u for n, u in update if n == length] for update in packed], size, units // parts, length, group)
    for length, size in sizes.items()
  )


def trained_length(mask: np.ndarray) -> np.ndarray:
  """How far each row must be read: up to its last trained token, int [B]."""
  mask = np.asarray(mask)
  return np.where(mask.any(axis=1), mask.shape[1] - np.argmax(mask[:, ::-1], axis=1), 0)


def _pack(units: np.ndarray, of_units: np.ndarray, sizes: dict[int, int]) -> list[tuple[int, np.ndarray]]:
  """Each micro-batch as (length, units); only the last can be short of units."""
  rest, packed = units[np.argsort(-of_units[units], kind="stable")], []
  while rest.size:
    length = next(length for length in sizes if length >= of_units[rest[0]])
    packed.append((length, rest[: sizes[length]]))
    rest = rest[sizes[length] :]
  return packed


def _stacked(updates: list[list[np.ndarray]], size: int, units: int, length: int, prompt_rows: int) -> MicroBatches:
  """The micro-batches of one length, of all updates, in arrays that would hold them if all of the update's `units` were that long."""
  shape = len(updates), -(-units // size), size
  chosen, real = np.zeros(shape, np.int32), np.zeros(shape, bool)
  for update, found in enumerate(updates):
    for index, some in enumerate(found):
      chosen[update, index] = np.resize(some, size)
      real[update, index, : some.size] = True
  count = np.asarray([len(found) for found in updates], np.int32)
  return MicroBatches(rows=_rows(chosen, prompt_rows), real=np.repeat(real, prompt_rows, axis=-1), count=count, length=length)


def padded_fraction(batch: RolloutBatch, plan: Plan | None, config: StepConfig) -> float:
  """The share of what is computed that holds neither a prompt nor anything up to a row's last trained token; `plan` as it is trained by."""
  plan, group = plan or one_pass(batch, config), config.prompt_rows
  width = batch.tokens.shape[1] - batch.mask.shape[1]
  used = [part.rows.shape[0] * part.rows.shape[1] if part.count is None else part.count.sum() for part in plan]
  computed = sum(n * part.rows.shape[2] // group * (width + group * part.length) for n, part in zip(used, plan))
  passes = sum(part.real.sum() for part in plan) / len(batch.mask)
  return float(1 - passes * (batch.prompt_length[::group].sum() + trained_length(batch.mask).sum()) / computed)
