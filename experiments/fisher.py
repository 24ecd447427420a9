"""The Fisher matrix of a model's next-token distributions, without the matrix: products with vectors, Adam's metric, top eigenvalue.

  F = (1/n)·Σ_t J_tᵀ·(diag(p_t) − p_t·p_tᵀ)·J_t

over n positions, with p_t the softmax of the logits at t and J_t their Jacobian wrt the weights: the curvature at the anchor of the mean
KL per token, in either direction, exact over the vocabulary. Adam takes steps P⁻¹·gradient with P = diag(√v̂ + ε), and P⁻¹F has the
eigenvalues of the symmetric P^(−1/2)·F·P^(−1/2).

A model is a function `model(params, tokens) -> (hidden [B, T, D], unembedding [D, V])`; tokens are int32 [M, B, T], M parts that are
worked on one after the other.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax

from emapg_jax.token_stats import LOGITS_PER_CHUNK, token_stats
from emapg_jax.types import PyTree

Model = Callable[[PyTree, jax.Array], tuple[jax.Array, jax.Array]]
Product = Callable[[PyTree], PyTree]


@struct.dataclass
class Eigenvalue:
  """What a power iteration found: per iteration the Rayleigh quotient λ and ‖Av − λv‖/λ, and the last v.

  An eigenvalue lies within λ·residual of the quotient, which is itself never above the largest one.
  """

  quotients: tuple[float, ...]
  residuals: tuple[float, ...]
  vector: PyTree


@functools.partial(jax.jit, static_argnames=("model", "chunk"))
def fisher_vector_product(model: Model, params: PyTree, tokens: jax.Array, vector: PyTree, chunk: int | None = None) -> PyTree:
  """F·vector, a float32 tree like params.

  Logits are held for `chunk` positions of one part at a time, as many as fit LOGITS_PER_CHUNK by default.

  Args:
    tokens: int32 [M, B, T]; every position counts, none is padding.
    vector: a tree like params.
  """

  def of_part(total, part):
    run = functools.partial(model, tokens=part)
    (hidden, unembedding), tangents = jax.jvp(run, (params,), (vector,))
    _, pull = jax.vjp(run, params)
    (product,) = pull(_head_product(hidden, unembedding, *tangents, chunk))
    return jax.tree.map(jnp.add, total, product), None

  zeros = jax.tree.map(jnp.zeros_like, params)
  return jax.tree.map(lambda x: x / tokens.size, lax.scan(of_part, zeros, tokens)[0])


def _head_product(hidden, unembedding, hidden_dot, unembedding_dot, chunk):
  """The cotangents of (hidden, unembedding) that (diag(p) − p·pᵀ)·ż pulls back to, position chunk by position chunk."""
  batch, length, width = hidden.shape
  chunk = min(chunk or max(1, LOGITS_PER_CHUNK // (batch * unembedding.shape[1])), length)
  spare = -length % chunk

  def to_chunks(x):
    return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, spare), (0, 0))).reshape(batch, -1, chunk, width), 1, 0)

  def of_chunk(unembedding_bar, args):
    h, h_dot = args
    logits, pull = jax.vjp(lambda h, w: jnp.einsum("bcd,dv->bcv", h, w, preferred_element_type=jnp.float32), h, unembedding)
    logits_dot = jnp.einsum("bcd,dv->bcv", h_dot, unembedding) + jnp.einsum("bcd,dv->bcv", h, unembedding_dot)
    probs = jax.nn.softmax(logits)
    h_bar, w_bar = pull(probs * (logits_dot - jnp.sum(probs * logits_dot, axis=-1, keepdims=True)))
    return unembedding_bar + w_bar, h_bar

  # Zeros that fill the last chunk have logits_dot = 0 and add nothing.
  unembedding_bar, hidden_bar = lax.scan(of_chunk, jnp.zeros_like(unembedding), (to_chunks(hidden), to_chunks(hidden_dot)))
  return jnp.moveaxis(hidden_bar, 0, 1).reshape(batch, -1, width)[:, :length], unembedding_bar


def second_moments(model: Model, params: PyTree, batches: np.ndarray, key: jax.Array, watch: Callable[[int], None] | None = None) -> PyTree:
  """Adam's v̂ at a policy gradient without signal: the mean over mini-batches of the squared gradient.

    gradient = ∇ Σ_{b,t} A_b·log π(y_bt) / (B·T), y_bt ~ π after the text up to t, A_b = ±1 with equal odds

  The advantage of a row has mean 0 and variance 1, as a group-normalised one; the mean over batches is what Adam's bias-corrected average
  tends to when b2 is near 1.

  Args:
    batches: int32 [N, B, T], one mini-batch of text each.
    key: for the tokens and the advantages.
    watch: called with the number of batches done after each.
  """
  count = len(batches)
  total = jax.tree.map(jnp.zeros_like, params)
  for i, batch_key in enumerate(jax.random.split(key, count)):
    total = jax.block_until_ready(_add_squared_gradient(model, params, batches[i], batch_key, total))
    if watch is not None:
      watch(i + 1)
  return jax.tree.map(lambda x: x / count, total)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="total")
def _add_squared_gradient(model, params, batch, key, total):
  token_key, sign_key = jax.random.split(key)
  signs = jax.random.rademacher(sign_key, (batch.shape[0],), jnp.float32)

  def loss(params):
    hidden, unembedding = model(params, batch)
    targets = _sample(lax.stop_gradient(hidden), lax.stop_gradient(unembedding), token_key)
    return jnp.mean(signs[:, None] * token_stats(hidden, unembedding, targets).logp)

  return jax.tree.map(lambda t, g: t + jnp.square(g), total, jax.grad(loss)(params))


def _sample(hidden: jax.Array, unembedding: jax.Array, key: jax.Array) -> jax.Array:
  """One token per position, int32 [B, T]; the logits of one position are held at a time."""

  def at(args):
    h, key = args
    return jax.random.categorical(key, jnp.einsum("bd,dv->bv", h, unembedding, preferred_element_type=jnp.float32))

  length = hidden.shape[1]
  return lax.map(at, (jnp.moveaxis(hidden, 1, 0), jax.random.split(key, length))).T.astype(jnp.int32)


def preconditioned(product: Product, moments: PyTree, eps: float) -> Product:
  """v → P^(−1/2)·A·P^(−1/2)·v, with A·v = product(v) and P = diag(√moments + eps)."""

  @jax.jit
  def scaled(tree, moments):
    return jax.tree.map(lambda x, v: x * lax.rsqrt(jnp.sqrt(v) + eps), tree, moments)

  return lambda vector: scaled(product(scaled(vector, moments)), moments)


@jax.jit
def random_like(params: PyTree, key: jax.Array) -> PyTree:
  """A normal tree of unit norm, to start a power iteration from."""
  leaves, structure = jax.tree.flatten(params)
  tree = structure.unflatten([jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves)])
  return optax.tree.scale(1.0 / optax.tree.norm(tree), tree)


def power_iteration(
  product: Product, start: PyTree, iterations: int, tolerance: float = 1e-3, watch: Callable[[int, float, float], None] | None = None
) -> Eigenvalue:
  """The largest eigenvalue of a symmetric positive semi-definite A, given by `product(v) = A·v`.

    λ = vᵀAv, residual = ‖Av − λv‖/λ, v ← Av/‖Av‖

  Args:
    start: a tree of unit norm that is not orthogonal to the top eigenvector.
    iterations: at most so many products.
    tolerance: stops at a smaller residual.
    watch: called with (iteration, λ, residual) after each.

  Raises:
    ValueError: A·v is zero or not finite, so there is no eigenvalue to find.
  """
  vector, quotients, residuals = start, [], []
  for i in range(1, iterations + 1):
    vector, quotient, residual = _advance(vector, product(vector))
    quotients.append(float(quotient))
    residuals.append(float(residual))
    if not 0.0 < quotients[-1] < float("inf"):
      raise ValueError(
        f"power_iteration: the Rayleigh quotient is {quotients[-1]} at iteration {i}; a Fisher matrix has a positive, finite one. "
        "The weights may hold NaN or inf, or every distribution may be a single token: check the model on this text."
      )
    if watch is not None:
      watch(i, quotients[-1], residuals[-1])
    if residuals[-1] < tolerance:
      break
  return Eigenvalue(quotients=tuple(quotients), residuals=tuple(residuals), vector=vector)


@jax.jit
def _advance(vector: PyTree, product: PyTree) -> tuple[PyTree, jax.Array, jax.Array]:
  quotient = optax.tree.vdot(vector, product)
  residual = optax.tree.norm(jax.tree.map(lambda a, v: a - quotient * v, product, vector)) / quotient
  return optax.tree.scale(1.0 / optax.tree.norm(product), product), quotient, residual
