"""Hugging Face folders of the Llama and Qwen2 architectures in: config.json, safetensors and end-of-sequence ids. Needs no torch."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from emapg_jax import distributed
from emapg_jax.models import decoder
from emapg_jax.models.decoder import DecoderConfig
from emapg_jax.types import PyTree

_AS_STORED = 0  # the other values: how many leading axes of our kernel are inputs; the file holds (outputs, inputs), flattened

_TENSORS = {
  "embed/embedding": ("model.embed_tokens.weight", _AS_STORED),
  "layers/attn_norm/scale": ("model.layers.{}.input_layernorm.weight", _AS_STORED),
  "layers/attn/q/kernel": ("model.layers.{}.self_attn.q_proj.weight", 1),
  "layers/attn/k/kernel": ("model.layers.{}.self_attn.k_proj.weight", 1),
  "layers/attn/v/kernel": ("model.layers.{}.self_attn.v_proj.weight", 1),
  "layers/attn/q/bias": ("model.layers.{}.self_attn.q_proj.bias", _AS_STORED),
  "layers/attn/k/bias": ("model.layers.{}.self_attn.k_proj.bias", _AS_STORED),
  "layers/attn/v/bias": ("model.layers.{}.self_attn.v_proj.bias", _AS_STORED),
  "layers/attn/o/kernel": ("model.layers.{}.self_attn.o_proj.weight", 2),
  "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", _AS_STORED),
  "layers/mlp/gate/kernel": ("model.layers.{}.mlp.gate_proj.weight", 1),
  "layers/mlp/up/kernel": ("model.layers.{}.mlp.up_proj.weight", 1),
  "layers/mlp/down/kernel": ("model.layers.{}.mlp.down_proj.weight", 1),
  "final_norm/scale": ("model.norm.weight", _AS_STORED),
  "lm_head/kernel": ("lm_head.weight", 1),
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _read_json(model_path: str, name: str) -> dict:
  """One JSON object of the folder."""
  path = os.path.join(model_path, name)
  try:
    with open(path, encoding="utf-8") as f:
      content = json.load(f)
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f"{path} cannot be read as JSON ({error}). Download the model folder again.") from error
  if not isinstance(content, dict):
    raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}. Download the model folder again.")
  return content


def read_model_json(model_path: str) -> dict:
  """The raw config.json of a model folder.

  Raises:
    ValueError: if the folder or its config.json is missing or unreadable.
  """
  if not os.path.isdir(model_path):
    raise ValueError(
      f"model_path {model_path!r} is not a folder on this machine. Give the path of a Hugging Face model folder (config.json, "
      "safetensors, tokenizer); `hf download NAME --local-dir DIR` makes one from a model's name on the hub."
    )
  if not os.path.isfile(os.path.join(model_path, "config.json")):
    raise ValueError(
      f"model_path {model_path!r} holds no config.json, so it is not a Hugging Face model folder. Give the folder that directly "
      "contains config.json, model.safetensors and tokenizer.json."
    )
  return _read_json(model_path, "config.json")


def _number(value: object, name: str, whole: bool = False, least: float = 0.0, below: float = 2.0**63) -> float | int:
  """`value` if it is a number above 0 (`whole`: an integer of at least `least`) and under `below`; `name` says file and key."""
  is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
  if not is_number or not (least <= value if whole else value > 0) or not value < below:
    wanted = f"a whole number of at least {least:.0f}" if whole else "a number above 0"
    raise ValueError(f"{name} is {value!r:.100}, but must be {wanted} and less than {below:.0f}: restore the file from the original model.")
  return value


def _size(raw: Mapping, key: str, path: str, default: int | None = None) -> int:
  """A dimension of the model; null means the default."""
  value = raw.get(key)
  return default if value is None and default is not None else _number(value, f"{path}: {key}", whole=True, least=1, below=2**31)


def _rope_settings(raw: Mapping, path: str) -> dict:
  """`rope_parameters` over `rope_scaling`."""
  rope = {}
  for key in ("rope_scaling", "rope_parameters"):
    settings = raw.get(key)
    if settings is not None and not isinstance(settings, dict):
      raise ValueError(f"{path}: {key} is {settings!r}, but must be a JSON object or null: restore the file from the original model.")
    rope.update(settings or {})
  return rope


def _rope(raw: Mapping, path: str) -> tuple[float, tuple[float, float, float, float] | None]:
  """(theta, llama3 scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
  rope = _rope_settings(raw, path)
  nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
  kind = rope.get("rope_type", rope.get("type", "default"))
  partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
  theta = next((values["rope_theta"] for values in (rope, raw) if values.get("rope_theta") is not None), 10_000.0)
  if nested or partial != 1.0 or kind not in ("default", "llama3"):
    what = f"rotary embeddings per layer type ({', '.join(nested)})" if nested else f"rope type {kind!r}"
    what = f"partial_rotary_factor {partial}" if partial != 1.0 else what
    raise ValueError(
      f"{path} asks for {what}, but only full rotary embeddings of type 'default' and 'llama3' exist here: use another model."
    )
  theta = float(_number(theta, f"{path}: rope_theta"))
  if kind == "default":
    return theta, None
  missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key not in rope]
  if missing:
    raise ValueError(f"{path} has rope type 'llama3' without {', '.join(missing)}: complete its rope settings from the original model.")
  key = "original_max_position_embeddings"
  original = next((values[key] for values in (raw, rope) if values.get(key) is not None), raw["max_position_embeddings"])
  factor, low, high = (float(_number(rope[name], f"{path}: {name}")) for name in ("factor", "low_freq_factor", "high_freq_factor"))
  if not low < high:
    raise ValueError(f"{path}: low_freq_factor {low} must be less than high_freq_factor {high}: restore the file from the original model.")
  return theta, (factor, low, high, float(_number(original, f"{path}: {key}")))


def _refuse_windows(raw: Mapping, path: str) -> None:
  """Raises where a layer would attend within a window: an explicit `layer_types` decides, else the flags."""
  types = raw.get("layer_types")
  if types is None:
    # The text of older configs says the opposite; in the code that trained the models, layers from max_window_layers on are windowed.
    first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None else None
    first = raw["num_hidden_layers"] if first is None else _number(first, f"{path}: max_window_layers", whole=True)
    windowed = list(range(first, raw["num_hidden_layers"]))
  elif not isinstance(types, list):
    raise ValueError(f"{path}: layer_types is {types!r}, but must be a list or null: restore the file from the original model.")
  else:
    windowed = [i for i, kind in enumerate(types) if kind != "full_attention"]
  if windowed:
    raise ValueError(
      f"{path} gives {len(windowed)} of {raw['num_hidden_layers']} layers something other than full attention (the first is layer "
      f"{windowed[0]}), which does not exist here. Use a model whose layers all attend fully, or set use_sliding_window to false if "
      "prompt and response together never exceed the window."
    )


def _refuse_unsupported(raw: Mapping, path: str) -> None:
  """Raises unless the sizes are all there and the switches ask for what the decoder does."""
  required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
  missing = [key for key in required if raw.get(key) is None]
  if missing:
    raise ValueError(f"{path} lacks the whole number(s) {', '.join(missing)}: restore the file from the original model.")
  for key in required:
    _size(raw, key, path)
  for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
    if raw.get(key) not in (None, False, True):  # "false" would count as true
      raise ValueError(f"{path}: {key} is {raw[key]!r}, but must be true, false or null: restore the file from the original model.")
  if raw["model_type"] == "llama" and raw.get("mlp_bias"):
    raise ValueError(f"{path} has mlp_bias true, but the MLP here has no biases: use another model.")
  if raw.get("hidden_act", "silu") not in ("silu", "swish"):
    raise ValueError(f"{path} has hidden_act {raw['hidden_act']!r}, but the MLP here is SwiGLU ('silu'): use another model.")


def read_config(model_path: str, dtype: str = "float32", param_dtype: str = "float32", remat: str = "full") -> DecoderConfig:
  """The DecoderConfig of a Llama or Qwen2 folder.

  Raises:
    ValueError: if the folder is not such a model, or asks for something the decoder does not do; the paragraph names it.
  """
  raw = read_model_json(model_path)
  path = os.path.join(model_path, "config.json")
  kind = raw.get("model_type")
  if kind not in ("llama", "qwen2"):
    raise ValueError(
      f"{path} has model_type {kind!r} (architectures {raw.get('architectures')}), which is not supported: use a model of type 'llama' "
      "or 'qwen2' (Llama, SmolLM2, Qwen2, Qwen2.5, R1-distilled Qwen or Llama)."
    )
  _refuse_unsupported(raw, path)
  heads = raw["num_attention_heads"]
  if raw.get("head_dim") is None and raw["hidden_size"] % heads:
    raise ValueError(
      f"{path} has no head_dim, and hidden_size {raw['hidden_size']} is no multiple of num_attention_heads {heads}: set head_dim."
    )
  if kind == "qwen2":
    _refuse_windows(raw, path)
  theta, scaling = _rope(raw, path)
  eps = _number(raw.get("rms_norm_eps", 1e-6), f"{path}: rms_norm_eps")
  sizes = {
    "num_kv_heads": _size(raw, "num_key_value_heads", path, heads),
    "head_dim": _size(raw, "head_dim", path, raw["hidden_size"] // heads),
  }
  try:
    return DecoderConfig(
      vocab_size=raw["vocab_size"],
      hidden_size=raw["hidden_size"],
      intermediate_size=raw["intermediate_size"],
      num_layers=raw["num_hidden_layers"],
      num_heads=heads,
      **sizes,
      max_positions=raw["max_position_embeddings"],
      rope_theta=theta,
      rope_scaling=scaling,
      rms_norm_eps=eps,
      qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias")),
      tied=bool(raw.get("tie_word_embeddings")),
      dtype=dtype,
      param_dtype=param_dtype,
      remat=remat,
    )
  except ValueError as error:
    raise ValueError(f"{path} does not describe a model: {error}") from error


def eos_ids(model_path: str, tokenizer_eos: int | Iterable[int] | None = None) -> tuple[int, ...]:
  """Every id that ends a response: the union of config.json, generation_config.json and the tokenizer's, ascending.

  Raises:
    ValueError: if none of the three names one, or one of the files something that is no id of the model.
  """
  raw = read_model_json(model_path)
  files = {"config.json": raw}
  if os.path.isfile(os.path.join(model_path, "generation_config.json")):
    files["generation_config.json"] = _read_json(model_path, "generation_config.json")
  rows = _size(raw, "vocab_size", os.path.join(model_path, "config.json"), 2**31)
  ids = set(() if tokenizer_eos is None else [tokenizer_eos] if isinstance(tokenizer_eos, int) else tokenizer_eos)
  for name, content in files.items():
    found = content.get("eos_token_id")
    where = f"{os.path.join(model_path, name)}: eos_token_id"
    for value in found if isinstance(found, list) else [] if found is None else [found]:
      ids.add(_number(value, where, whole=True, below=rows))
  if not ids:
    raise ValueError(
      f"No end-of-sequence id in {model_path!r}: neither config.json, generation_config.json nor the tokenizer has one, so every response "
      "would run to its length limit. Add eos_token_id to generation_config.json."
    )
  return tuple(sorted(int(i) for i in ids))


def _shards(model_path: str) -> list[str]:
  """The files that the index names."""
  weight_map = _read_json(model_path, _INDEX).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
    raise ValueError(
      f"{os.path.join(model_path, _INDEX)}: weight_map must be an object of tensor names and file names, got {str(weight_map)[:100]}. "
      "Download this file again."
    )
  return sorted(set(weight_map.values()))


@contextlib.contextmanager
def _open_tensors(model_path: str) -> Iterator[dict[str, tuple[str, safetensors.safe_open]]]:
  """{tensor name: (file, open handle)} over one or many files; the files are mapped, nothing is read yet."""
  if os.path.isfile(os.path.join(model_path, _WEIGHTS)):
    files = [_WEIGHTS]
  elif os.path.isfile(os.path.join(model_path, _INDEX)):
    files = _shards(model_path)
  else:
    present = sorted(name for name in os.listdir(model_path) if name.endswith((".bin", ".pt", ".pth", ".safetensors", ".gguf")))
    raise ValueError(
      f"model_path {model_path!r} holds neither {_WEIGHTS} nor {_INDEX} (weight files found: {', '.join(present) or 'none'}). Download the "
      "safetensors files of the model, or convert it: in transformers, `save_pretrained` writes safetensors."
    )
  with contextlib.ExitStack() as stack:
    tensors = {}
    for name in files:
      path = os.path.join(model_path, name)
      try:
        handle = stack.enter_context(safetensors.safe_open(path, framework="np"))
      except (safetensors.SafetensorError, OSError) as error:
        size = f"{os.path.getsize(path):,} bytes" if os.path.isfile(path) else "missing"
        raise ValueError(f"{path} ({size}) is truncated, corrupt or absent: {error}. Download this file again.") from error
      tensors.update({key: (path, handle) for key in handle.keys()})  # noqa: SIM118  a handle is not a dict
    yield tensors


def _file_shape(shape: tuple[int, ...], in_axes: int, is_bias: bool) -> tuple[int, ...]:
  """Shape in the file of one layer's array with our `shape`."""
  if in_axes == _AS_STORED:
    return (math.prod(shape),) if is_bias else shape
  return math.prod(shape[in_axes:]), math.prod(shape[:in_axes])


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """How one array of the parameter tree is read."""

  shape: tuple[int, ...]
  stacked: bool  # one tensor per layer, on axis 0
  names: tuple[str, ...]
  in_axes: int


def _plan(config: DecoderConfig) -> tuple[PyTree, dict[str, tuple[int, ...]]]:
  """The parameter tree with a `_Leaf` for each array, and the shape in the files of every tensor."""
  expected = {}

  def leaf(path, abstract):
    key = "/".join(entry.key for entry in path)
    template, in_axes = _TENSORS[key]
    stacked = key.startswith("layers/")
    names = tuple(template.format(i) for i in range(config.num_layers if stacked else 1))
    shape = abstract.shape[1:] if stacked else abstract.shape
    expected.update(dict.fromkeys(names, _file_shape(shape, in_axes, key.endswith("/bias"))))
    return _Leaf(abstract.shape, stacked, names, in_axes)

  abstract = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
  return jax.tree_util.tree_map_with_path(leaf, abstract), expected


def _check_tensors(model_path: str, config: DecoderConfig, tensors: Mapping, expected: Mapping) -> None:
  """Raises unless the files hold exactly the tensors that are expected, in their shapes and in a float type."""
  problems = [f"{name} is missing, expected shape {shape}" for name, shape in expected.items() if name not in tensors]
  for name, (_, handle) in tensors.items():
    stored = handle.get_slice(name)
    shape = tuple(stored.get_shape())
    if name in expected:
      if shape != expected[name]:
        problems.append(f"{name} has shape {shape}, expected {expected[name]}")
      if stored.get_dtype() not in _FLOATS:
        problems.append(f"{name} has type {stored.get_dtype()}, expected one of {', '.join(_FLOATS)}")
    elif name.endswith(".rotary_emb.inv_freq") or (name == _HEAD and config.tied):
      continue  # a constant that old Llama files carry along; a copy of the embedding, compared on its own
    elif name.endswith(".self_attn.o_proj.bias") and config.qkv_bias and not np.any(handle.get_tensor(name)):
      continue  # Llama with attention_bias: a zero bias on the attention output changes nothing
    else:
      problems.append(f"{name} with shape {shape} has no place in the decoder")
  if problems:
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise ValueError(
      f"The weights in {model_path!r} do not fit its config.json: {'; '.join(problems[:8])}{more}. Use the config.json and the "
      "safetensors files of one and the same unquantised Llama or Qwen2 model (a missing lm_head.weight may mean tie_word_embeddings)."
    )


def _check_tied(config: DecoderConfig, tensors: Mapping) -> None:
  """Raises if tied embeddings come with a head of their own."""
  if not config.tied or _HEAD not in tensors:
    return
  path, handle = tensors[_HEAD]
  head, embedding = handle.get_tensor(_HEAD), tensors[_EMBEDDING][1].get_tensor(_EMBEDDING)
  if not np.array_equal(head, embedding):
    raise ValueError(
      f"config.json has tie_word_embeddings true, but {_HEAD} {head.shape} in {path} differs from {_EMBEDDING} {embedding.shape}. Set "
      "tie_word_embeddings to false if the model was trained with a head of its own, or remove the head from the file."
    )


def load_params(model_path: str, config: DecoderConfig, shardings: PyTree | None = None) -> PyTree:
  """Parameters of `config` from a folder's safetensors, in `config.param_dtype`; layers stacked on axis 0.

  Every tensor is accounted for before the first is read. Beyond the result, memory holds one stacked array and one tensor at a time.

  Args:
    model_path: folder with model.safetensors, or model.safetensors.index.json and its shards.
    config: from `read_config` on the same folder.
    shardings: a tree like the parameters, of jax shardings; each array goes to its own. None: the default device.

  Raises:
    ValueError: if a file is absent or damaged, a tensor is missing, unused or of another shape, or a tied model has a different head.
  """
  dtype = jnp.dtype(config.param_dtype)
  plan, expected = _plan(config)

  def read(leaf, sharding=None):
    array = np.empty(leaf.shape, dtype)
    for view, name in zip(array if leaf.stacked else [array], leaf.names, strict=True):
      tensor = tensors[name][1].get_tensor(name)
      view[...] = (tensor if leaf.in_axes == _AS_STORED else tensor.T).reshape(view.shape)
    return distributed.place(array, sharding)

  with _open_tensors(model_path) as tensors:
    _check_tensors(model_path, config, tensors, expected)
    _check_tied(config, tensors)
    return jax.tree.map(read, plan) if shardings is None else jax.tree.map(read, plan, shardings)
