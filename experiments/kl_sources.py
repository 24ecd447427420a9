"""Where the two distributions come from: synthetic logits, or the next-token logits of a model and of a second one near it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from emapg_jax import kl
from emapg_jax.models import decoder, hf, tokenizer
from emapg_jax.models.decoder import DecoderConfig
from emapg_jax.types import PyTree

SYNTHETIC = {"normal × 2": np.random.Generator.normal, "Gumbel × 2": np.random.Generator.gumbel}

# Tokens scored in one pass; a text is cut here, which is far more than the positions need.
MAX_TEXT_TOKENS = 1024

TEXT = """The river had been low all summer, and the children walked across it on the stones without getting their feet wet. On the other
bank stood an old mill. Nobody had worked in it for forty years, but its wheel still turned a little after rain. "If three sacks of grain
make two sacks of flour," the teacher asked, "how many sacks of grain did the miller need for a day when he sold fourteen?" Anna wrote: two
sacks of flour come from three of grain, so one comes from 3 / 2 = 1.5, and fourteen come from 14 * 1.5 = 21. The answer is 21. Then she
looked out of the window again. To measure how fast water flows, she thought, one could drop a leaf at the bridge, count the seconds until
it passed the mill, and divide the distance by the time.
""".replace("\n", " ")


def synthetic(kind: str, distance: float, vocab: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
  """Logits [seeds, V] of a policy, and of an anchor: the same plus distance times a normal draw, the same draw at every distance."""
  pairs = []
  for seed in range(seeds):
    rng = np.random.default_rng(seed)
    logits = 2.0 * SYNTHETIC[kind](rng, size=vocab)
    pairs.append((logits, logits + distance * rng.normal(size=vocab)))
  policy, anchor = zip(*pairs)
  return np.stack(policy), np.stack(anchor)


@dataclasses.dataclass(frozen=True)
class ModelText:
  """A model, another one towards which its anchor is moved, and a text with the positions to look at."""

  config: DecoderConfig
  params: PyTree
  other: PyTree
  tokens: np.ndarray  # int32 [1, S]
  positions: np.ndarray  # int [N], ascending


def load(model_path: str, ref_model_path: str, text: str, positions: int, seed: int) -> ModelText:
  """The model in float32, and its second one: that of `ref_model_path`, or if empty the weights plus Gaussian noise of their own size.

  Raises:
    ValueError: if a folder is not a usable model, the two differ in shape or not at all, or the text has fewer tokens than `positions`.
  """
  config = hf.read_config(model_path, remat="none")
  if ref_model_path:
    _check_same(model_path, config, ref_model_path, hf.read_config(ref_model_path, remat="none"))
  ids = tokenizer.ChatTokenizer(model_path).encode_prompt(text, chat=False)[: min(MAX_TEXT_TOKENS, config.max_positions)]
  if len(ids) < positions:
    raise ValueError(
      f"The text has {len(ids)} tokens (of a longer text the first {MAX_TEXT_TOKENS} at most are read, and never more than the model's "
      f"{config.max_positions} positions), but --positions={positions} are to be measured: give a longer --text or fewer --positions."
    )
  params = hf.load_params(model_path, config)
  other = hf.load_params(ref_model_path, config) if ref_model_path else jax.jit(_noisy)(params, jax.random.key(seed))
  if all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other))):
    raise ValueError(
      f"The weights in {ref_model_path!r} are those of {model_path!r}, so there is no KL to measure: give another checkpoint."
    )
  chosen = np.unique(np.linspace(0, len(ids) - 1, positions).round().astype(int))
  return ModelText(config, params, other, np.asarray([ids], np.int32), chosen)


def _check_same(model_path: str, config: DecoderConfig, ref_model_path: str, ref_config: DecoderConfig) -> None:
  sizes, ref_sizes = (
    jax.tree.leaves_with_path(jax.eval_shape(functools.partial(decoder.init_params, c), jax.random.key(0))) for c in (config, ref_config)
  )
  if [(path, a.shape) for path, a in sizes] != [(path, a.shape) for path, a in ref_sizes] or config != ref_config:
    raise ValueError(
      f"--ref_model_path={ref_model_path!r} (vocabulary {ref_config.vocab_size}, width {ref_config.hidden_size}, {ref_config.num_layers} "
      f"layers) is not another checkpoint of --model_path={model_path!r} (vocabulary {config.vocab_size}, width {config.hidden_size}, "
      f"{config.num_layers} layers), so their weights cannot be mixed: give two checkpoints with the same config.json."
    )


def _noisy(params: PyTree, key: jax.Array) -> PyTree:
  """Each array plus a normal draw with the array's own root mean square: at relative distance 1."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(key, len(leaves))
  noisy = [a + jnp.sqrt(jnp.mean(jnp.square(a))) * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys)]
  return jax.tree.unflatten(tree, noisy)


def _logits(config: DecoderConfig, params: PyTree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
  """float32 next-token logits [N, V] of the first row; the head matmul is the one of `token_stats`."""
  hidden = decoder.apply(config, params, tokens)[0, positions]
  return jnp.einsum("nd,dv->nv", hidden, decoder.unembedding(params).astype(hidden.dtype), preferred_element_type=jnp.float32)


@functools.cache
def _compiled(config: DecoderConfig):
  return jax.jit(functools.partial(_logits, config))


def policy_logits(source: ModelText) -> np.ndarray:
  """float32 [N, V]."""
  return np.asarray(_compiled(source.config)(source.params, source.tokens, source.positions))


def anchor_logits(source: ModelText, distance: float) -> np.ndarray:
  """float32 [N, V] of the weights θ + distance·(θ_other − θ)."""
  mixed = jax.jit(lambda a, b: jax.tree.map(lambda x, y: x + distance * (y - x), a, b))(source.params, source.other)
  return np.asarray(_compiled(source.config)(mixed, source.tokens, source.positions))


def noise_floor(source: ModelText, dtype: str) -> dict[str, float]:
  """KL(π‖π′) in nats, π′ the same model scoring the same text as one of 4 rows of twice the length; mean and largest over the positions.

  Args:
    dtype: of the body, its activations and matmul inputs; the logits are float32 either way.
  """
  score = _compiled(dataclasses.replace(source.config, dtype=dtype))
  alone = score(source.params, source.tokens, source.positions)
  length = source.tokens.shape[1]
  padded = np.pad(np.repeat(source.tokens, 4, axis=0), ((0, 0), (0, min(length, source.config.max_positions - length))))
  together = score(source.params, padded, source.positions)
  with jax.enable_x64(True):
    values = np.asarray(jax.vmap(kl.exact_reverse_kl)(*(jnp.asarray(np.asarray(x), jnp.float64) for x in (alone, together))))
  return {"mean": float(values.mean()), "largest": float(values.max())}
