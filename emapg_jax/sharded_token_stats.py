"""`token_stats` where the vocabulary is split over devices: what travels is per position, or per candidate for the top k."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax import sharding
from emapg_jax.token_stats import FieldGrads, Head, Vocabulary, check_shapes, token_stats, with_gradient
from emapg_jax.types import TokenStats

_AXIS = "tensor"


@functools.cache
def sharded_token_stats(mesh: Mesh) -> Callable[..., TokenStats]:
  """`token_stats` for a mesh: the same arguments and the same numbers, for hidden states with rows over data and fsdp.

  Over `tensor`, on which each device has an equal share of the vocabulary, go K candidates of each share, one number of each position
  for every sum and maximum, and the gradient to hidden states: never logits, nor columns of the unembedding. Its width is gathered over
  fsdp, and its gradient summed over data and fsdp, as for any weight. `chunk` counts positions of the rows on one device; by default as
  many as keep their logits for that device's share of the vocabulary at LOGITS_PER_CHUNK.

  Args:
    mesh: with the axes of `sharding.AXES`. For one device the result is `token_stats` itself. Where `tensor` is 1, each device finds the
      top k of its own rows, for which XLA would gather the logits of all.

  Returns:
    A function, always the same one for the same mesh. It raises ValueError as `token_stats` does, and where the vocabulary is not a
    multiple of `tensor`, the rows one of data · fsdp, or the width one of fsdp.
  """
  return token_stats if mesh.size == 1 else functools.partial(_token_stats, mesh)


def _check_divides(mesh: Mesh, hidden: jax.Array, unembedding: jax.Array) -> None:
  vocab, shares = unembedding.shape[1], mesh.shape[_AXIS]
  if vocab % shares:
    raise ValueError(
      f"The vocabulary of {vocab} ids can't be split into equal shares over the {shares} devices of the mesh axis tensor: choose a size of "
      f"that axis that divides {vocab}, or pad the unembedding."
    )
  if hidden.shape[0] % sharding.batch_devices(mesh):
    raise ValueError(
      f"{hidden.shape[0]} rows can't be spread over the {sharding.batch_devices(mesh)} devices of the mesh axes data and fsdp: pass a "
      "multiple of that, or choose a smaller mesh."
    )
  if hidden.shape[-1] % mesh.shape["fsdp"]:
    raise ValueError(
      f"The unembedding of shape {unembedding.shape} can't be laid out with its {hidden.shape[-1]} rows over the {mesh.shape['fsdp']} "
      "devices of the mesh axis fsdp: choose a size of that axis that divides them."
    )


def _token_stats(
  mesh: Mesh,
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  topk_ids: jax.Array | None = None,
  topk: int = 0,
  approximate: bool = False,
  temperature: float = 1.0,
  chunk: int | None = None,
  tied: bool = False,
) -> TokenStats:
  check_shapes(hidden, unembedding, topk if topk_ids is None else topk_ids.shape[-1], temperature, chunk)
  _check_divides(mesh, hidden, unembedding)
  shares = mesh.shape[_AXIS]
  head = Head(topk, approximate, temperature, chunk, tied, Vocabulary(_AXIS if shares > 1 else None))
  rows, share, shared_gradient = sharding.BATCH, P(None, _AXIS), P("fsdp", _AXIS)
  if tied:
    unembedding, share, shared_gradient = unembedding.T, P(_AXIS, None), P(_AXIS, "fsdp")

  dtype = unembedding.dtype

  def reduce(columns: jax.Array) -> jax.Array:
    if mesh.shape["fsdp"] == 1:  # XLA keeps a sum over one device
      return columns
    return jax.lax.psum_scatter(columns, "fsdp", scatter_dimension=1 if tied else 0, tiled=True)

  def backward(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, stats: TokenStats, grads: FieldGrads):
    dhidden, dunembedding = head.backward(hidden, unembedding, targets, stats, grads, dtype, reduce)
    if mesh.shape["data"] > 1:
      dunembedding = jax.lax.psum(dunembedding, "data")
    return jax.lax.psum(dhidden, _AXIS) if shares > 1 else dhidden, dunembedding

  def cast(unembedding):
    # Where it lies: what is gathered over fsdp is then no wider than what the products take.
    return jax.lax.with_sharding_constraint(unembedding.astype(hidden.dtype), NamedSharding(mesh, shared_gradient))

  # Both passes are mapped, and neither is differentiated: the sums over devices in one are not the transposes of those in the other.
  mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  forward = mapped(head.forward, in_specs=(rows, share, rows, rows), out_specs=rows)
  whole = shares == mesh.shape["fsdp"] == 1  # each device has all of the unembedding: XLA needs no telling, and no copy of it
  mapped_backward = mapped(backward, in_specs=(rows, share, rows, rows, rows), out_specs=(rows, shared_gradient))
  return with_gradient(
    lambda hidden, unembedding, *rest: forward(hidden, cast(unembedding), *rest),
    head.backward if whole else lambda hidden, unembedding, *rest: mapped_backward(hidden, cast(unembedding), *rest),
  )(hidden, unembedding, targets, topk_ids)
