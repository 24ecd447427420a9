"""Causal attention over positions: one function for training, prefill, decoding and shared prompts.

Which form runs is decided by shape, and for long sequences by the platform that the program is lowered for:

- one query (decoding) and short sequences: the scores as a whole, fastest there;
- else `_chunked`, plain JAX, whose memory is linear in the length, forward and backward;
- on CUDA, for causal half-precision training: cuDNN's kernel. Its lowering is tested, its numbers have not been run on a GPU;
- on TPU, for causal training: the splash kernel that jax ships. The tests compile it for a TPU and run it in interpret mode, not on one.

Shapes: B sequences, S queries, C keys, H query heads, Hkv key/value heads (H a multiple: G = H/Hkv), Dh head, N chunks.
"""

import functools
import importlib.util
import math

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from emapg_jax.sharding import AXES, BATCH

UNSEEN = jnp.iinfo(jnp.int32).max  # the position of a key that no query may see

# Up to so many scores a head, holding them costs less than computing them twice: on CPU the forms are even between S = C = 96 and 128.
_DIRECT_SCORES = 96 * 96
# Chunks whose scores stay in the CPU's cache, all heads together; accelerators want large matrix products and few loop steps.
_CPU_CHUNK, _CPU_CHUNK_FEW_HEADS, _FEW_HEADS = 64, 128, 32
_ACCELERATOR_CHUNK = 512
_SPLASH_LANES, _SPLASH_BLOCK = 128, 512


def attention(
  q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array | None = None, kv_positions: jax.Array | None = None
) -> jax.Array:
  """softmax(q·kᵀ / √Dh)·v over the keys at positions up to the query's own, [B, S, H, Dh] in q's dtype.

  Scores, softmax and sums are float32 (float64 for float64). A query that sees no key gives 0, with zero gradient. Keys and values that a
  query doesn't see have no effect on its output, nor, where no query sees them, on any gradient, NaN included; a key or value that is not
  finite makes every output NaN that sees it.

  Args:
    q: [B, S, H, Dh].
    k, v: [B, C, Hkv, Dh].
    q_positions: int32 [B, S], and kv_positions: int32 [B, C] or [1, C]; a key at UNSEEN is seen by none. Both or neither: without them
      query i sees keys 0..i.
  """
  causal = q_positions is None
  if causal:
    q_positions, kv_positions = (jnp.arange(a.shape[1], dtype=jnp.int32)[None, :] for a in (q, k))
  q_positions = jnp.minimum(q_positions, UNSEEN - 1)
  if q.shape[1] == 1:
    return _one_query(q, k, v, q_positions, kv_positions)
  k, v, not_finite = _without_garbage(k, v, kv_positions)
  if q.shape[1] * k.shape[1] <= _DIRECT_SCORES:
    out = _direct(q, k, v, q_positions, kv_positions)
  elif causal:
    out = _by_platform(q, k, v, q_positions)
  else:
    out = _chunked(q, k, v, q_positions, kv_positions, *_chunk_lengths(q, k))
  reached = jnp.repeat(not_finite[:, None, :] <= q_positions[:, :, None], q.shape[2] // k.shape[2], axis=2)
  return out + jnp.where(reached, jnp.nan, 0.0).astype(out.dtype)[..., None]


def _without_garbage(k, v, kv_positions):
  """Keys and values with 0 where they are not finite, and the first position where a head's are not, [B, Hkv].

  A weight of 0 does not shut out a NaN. What a query sees is a prefix of the positions, so the first bad one says all.
  """
  bad = ~jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1)
  first = jnp.min(jnp.where(bad, kv_positions[..., None], UNSEEN), axis=1)
  k, v = (jnp.where(bad[..., None], jnp.zeros((), a.dtype), a) for a in (k, v))
  return k, v, first


def _wide(dtype):
  return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _scores(q, k, q_positions, kv_positions):
  """[B, Hkv, G, S, C] from q [B, Hkv, G, S, Dh] and k [B, Hkv, C, Dh]; the least finite number where the key is not seen."""
  dtype = _wide(q.dtype)
  scores = jnp.einsum("bhgsd,bhcd->bhgsc", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
  seen = kv_positions[:, None, :] <= q_positions[:, :, None]
  return jnp.where(seen[:, None, None], scores, jnp.finfo(dtype).min)


def _floor(dtype):
  """Below every real score and above the masked one, so that a query without keys has weights exp(min - floor) = 0."""
  return jnp.finfo(dtype).min / 2


def _heads_first(x, num_kv_heads=None):
  """[B, S, heads, Dh] to [B, Hkv, G, S, Dh], or to [B, Hkv, S, Dh] for keys and values."""
  if num_kv_heads is None:
    return x.transpose(0, 2, 1, 3)
  return x.reshape(*x.shape[:2], num_kv_heads, x.shape[2] // num_kv_heads, x.shape[3]).transpose(0, 2, 3, 1, 4)


def _direct(q, k, v, q_positions, kv_positions):
  """All scores at once, [B, S, H, Dh]."""
  scores = _scores(_heads_first(q, k.shape[2]), _heads_first(k), q_positions, kv_positions)
  top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), _floor(scores.dtype)))
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
  out = jnp.einsum("bhgsc,bhcd->bhgsd", weights, _heads_first(v), preferred_element_type=scores.dtype)
  return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _seen_only(x, q_positions, kv_positions):
  return jnp.where((kv_positions <= q_positions)[..., None, None], x, jnp.zeros((), x.dtype))


@jax.custom_vjp
def _one_query(q, k, v, q_positions, kv_positions):
  """`_direct` for S = 1: the select on v is part of the read that the product makes anyway, and k needs none before the backward pass."""
  return _direct(q, k, _seen_only(v, q_positions, kv_positions), q_positions, kv_positions)


def _one_query_backward(saved, grad):
  q, k, v, *positions = saved
  _, backward = jax.vjp(lambda q, k, v: _direct(q, _seen_only(k, *positions), _seen_only(v, *positions), *positions), q, k, v)
  return *backward(grad), None, None


_one_query.defvjp(lambda *args: (_one_query(*args), args), _one_query_backward)


def _chunk_lengths(q, k):
  """Of queries and of keys; only the speed hangs on the backend asked here."""
  if jax.default_backend() != "cpu":
    longest = _ACCELERATOR_CHUNK
  else:
    longest = _CPU_CHUNK_FEW_HEADS if q.shape[0] * q.shape[2] <= _FEW_HEADS else _CPU_CHUNK

  def even(length):  # rather equal chunks than a last one of padding
    return min(length, 8 * math.ceil(length / math.ceil(length / longest) / 8))

  return even(q.shape[1]), even(k.shape[1])


def _split(x, chunk, axis, fill=0):
  """[N, ...] with `axis` cut into N chunks; the last is filled up."""
  count = math.ceil(x.shape[axis] / chunk)
  widths = [(0, count * chunk - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
  x = jnp.pad(x, widths, constant_values=fill)
  return jnp.moveaxis(x.reshape(*x.shape[:axis], count, chunk, *x.shape[axis + 1 :]), axis, 0)


def _join(x, axis, length):
  """The inverse of `_split`."""
  x = jnp.moveaxis(x, 0, axis)
  x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
  return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _chunks(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk):
  """All cut along the sequence, heads first, and for each query chunk how many key chunks hold a key that it sees (up to the last such)."""
  queries = _split(_heads_first(q, k.shape[2]), q_chunk, 3), _split(q_positions, q_chunk, 1, fill=-1)
  keys = (*(_split(_heads_first(x), kv_chunk, 2) for x in (k, v)), _split(kv_positions, kv_chunk, 1, fill=UNSEEN))
  reach = jnp.min(keys[2], axis=(1, 2))[None, :] <= jnp.max(queries[1], axis=(1, 2))[:, None]
  visits = jnp.max(jnp.where(reach, jnp.arange(1, reach.shape[1] + 1, dtype=jnp.int32)[None, :], 0), axis=1)
  return queries, keys, visits


def _queries_first(x, length):
  """From [N, B, Hkv, G, chunk, Dh] back to [B, S, H, Dh]."""
  x = _join(x, 3, length).transpose(0, 3, 1, 2, 4)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _chunked_forward(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk):
  """The output and the log-normaliser of each query, [N, B, Hkv, G, chunk]: softmax over one chunk of keys after the other (Milakov and
  Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, Algorithm 1)."""
  dtype = _wide(q.dtype)
  queries, keys, visits = _chunks(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk)

  def query_chunk(_, chunk):
    (q, q_positions), visits = chunk

    def key_chunk(j, carry):
      out, top, total = carry
      k, v, kv_positions = (a[j] for a in keys)
      scores = _scores(q, k, q_positions, kv_positions)
      new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
      weights = jnp.exp(scores - new_top[..., None])
      shrink = jnp.exp(top - new_top)
      added = jnp.einsum("bhgsc,bhcd->bhgsd", weights.astype(v.dtype), v, preferred_element_type=dtype)
      return out * shrink[..., None] + added, new_top, total * shrink + jnp.sum(weights, axis=-1)

    empty = jnp.zeros(q.shape, dtype), jnp.full(q.shape[:-1], _floor(dtype), dtype), jnp.zeros(q.shape[:-1], dtype)
    out, top, total = jax.lax.fori_loop(0, visits, key_chunk, empty)
    total = jnp.where(total == 0, 1, total)
    return None, ((out / total[..., None]).astype(q.dtype), top + jnp.log(total))

  _, (out, log_total) = jax.lax.scan(query_chunk, None, (queries, visits))
  return _queries_first(out, q.shape[1]), log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunked(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk):
  """In chunks of queries and of keys; the backward pass computes the scores anew from the output and the log-normalisers."""
  return _chunked_forward(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk)[0]


def _chunked_save(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk):
  out, log_total = _chunked_forward(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk)
  return out, (q, k, v, q_positions, kv_positions, out, log_total)


def _chunked_backward(q_chunk, kv_chunk, saved, grad):
  q, k, v, q_positions, kv_positions, out, log_total = saved
  dtype, scale = _wide(q.dtype), q.shape[-1] ** -0.5
  queries, keys, visits = _chunks(q, k, v, q_positions, kv_positions, q_chunk, kv_chunk)
  shift = jnp.sum(grad.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)  # Σ weight · d weight, by way of the output
  grads, shifts = (_split(_heads_first(a, k.shape[2]), q_chunk, 3) for a in (grad, shift))

  def query_chunk(carry, chunk):
    (q, q_positions), visits, grad, shift, log_total = chunk

    def key_chunk(j, carry):
      dq, dk, dv = carry
      k, v, kv_positions = (a[j] for a in keys)
      weights = jnp.exp(_scores(q, k, q_positions, kv_positions) - log_total[..., None])
      d_weights = jnp.einsum("bhgsd,bhcd->bhgsc", grad, v, preferred_element_type=dtype)
      d_scores = (weights * (d_weights - shift) * scale).astype(q.dtype)
      dv = dv.at[j].add(jnp.einsum("bhgsc,bhgsd->bhcd", weights.astype(q.dtype), grad, preferred_element_type=dtype))
      dk = dk.at[j].add(jnp.einsum("bhgsc,bhgsd->bhcd", d_scores, q, preferred_element_type=dtype))
      return dq + jnp.einsum("bhgsc,bhcd->bhgsd", d_scores, k, preferred_element_type=dtype), dk, dv

    dq, *carry = jax.lax.fori_loop(0, visits, key_chunk, (jnp.zeros(q.shape, dtype), *carry))
    return tuple(carry), dq.astype(q.dtype)

  zeros = jnp.zeros(keys[0].shape, dtype)
  (dk, dv), dq = jax.lax.scan(query_chunk, (zeros, zeros), (queries, visits, grads, shifts, log_total))
  dk, dv = (_join(a, 2, k.shape[1]).transpose(0, 2, 1, 3).astype(k.dtype) for a in (dk, dv))
  return _queries_first(dq, q.shape[1]), dk, dv, None, None


_chunked.defvjp(_chunked_save, _chunked_backward)


def _by_platform(q, k, v, positions):
  """Causal attention of many queries, by what the program is lowered for: jit may compile for another platform than the default one."""
  kernels = {}
  if _splash_fits(q, k):
    kernels["tpu"] = _splash
  if _cudnn_fits(q):
    kernels["cuda"] = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

  def chunked(q, k, v):
    return _chunked(q, k, v, positions, positions, *_chunk_lengths(q, k))

  return jax.lax.platform_dependent(q, k, v, default=chunked, **kernels) if kernels else chunked(q, k, v)


def _cudnn_fits(q):
  """Whether jax would take cuDNN's kernel here: it asks the GPU at hand while it traces."""
  if jax.default_backend() != "gpu" or "cuda" not in jax.extend.backend.get_backend().platform_version:
    return False
  capability = tuple(int(part) for part in jax.local_devices()[0].compute_capability.split("."))
  widest = 256 if capability >= (9, 0) else 128
  return q.dtype in (jnp.bfloat16, jnp.float16) and capability >= (8, 0) and q.shape[-1] % 8 == 0 and q.shape[-1] <= widest


def _splash_specs(mesh):
  """How q, k and v lie on a mesh with the axes of this project: rows over data and fsdp, heads over tensor."""
  return P(*BATCH, None, "tensor", None) if mesh.axis_names == AXES and mesh.are_all_axes_auto else None


def _splash_fits(q, k):
  """Whether the splash kernel can run: without libtpu nothing is compiled for a TPU, and tracing the kernel would only cost time."""
  if importlib.util.find_spec("libtpu") is None or q.dtype not in (jnp.bfloat16, jnp.float32) or jax.config.jax_enable_x64:
    return False
  mesh = jax.typeof(q).sharding.mesh
  if mesh.size <= 1:
    return True
  if _splash_specs(mesh) is None:
    return False
  return q.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 and k.shape[2] % mesh.shape["tensor"] == 0


def _splash(q, k, v, interpret=False):
  """The splash kernel; on a mesh each device runs it on its rows and heads, since XLA can't partition it.

  The mesh is the one of q's type, which arguments laid out on a mesh, or a sharding constraint, bring with them. A program for several
  devices that shows no mesh is refused by jax with "Mosaic kernels cannot be automatically partitioned".
  """
  mesh = jax.typeof(q).sharding.mesh
  run = functools.partial(_splash_one_device, interpret=interpret)
  if mesh.size > 1:
    spec = _splash_specs(mesh)
    run = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
  return run(q, k, v)


def _splash_one_device(q, k, v, interpret):
  # Imported here: Pallas takes a second, and only TPU programs need it.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  length, heads = q.shape[1:3]
  block = min(_SPLASH_BLOCK, _SPLASH_LANES * math.ceil(length / _SPLASH_LANES))
  padded = block * math.ceil(length / block)
  q, k, v = (jnp.pad(a, [(0, 0), (0, padded - length), (0, 0), (0, 0)]).transpose(0, 2, 1, 3) for a in (q, k, v))
  names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
  kernel = splash.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((padded, padded))] * heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
    interpret=interpret,
  )
  out = jax.vmap(kernel)(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, v)
  return out[:, :, :length].transpose(0, 2, 1, 3).astype(q.dtype)
