"""Import of Hugging Face folders: equal to torch on two tiny models, and a paragraph for each thing that can be wrong with a folder."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from emapg_jax.models import decoder, hf
from emapg_jax.token_stats import token_stats

DATA = pathlib.Path(__file__).parent / "data"
NAMES = ("tiny_llama", "tiny_qwen2")
SIZE = 96  # every prompt with its 16 new tokens, padded


@functools.cache
def load(name):
  config = hf.read_config(str(DATA / name))
  return config, hf.load_params(str(DATA / name), config)


def cases(name):
  return json.loads((DATA / name / "reference.json").read_text())["cases"]


def padded(rows):
  return jnp.asarray([row + [0] * (SIZE - len(row)) for row in rows], jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
  return jnp.einsum("bsd,dv->bsv", decoder.apply(config, params, tokens), decoder.unembedding(params))


def copy_model(folder, name, tensors=None, **config):
  """A copy of a tiny model in `folder`, its config changed by `config` (None removes a key) and its tensors by `tensors(dict)`."""
  folder = folder / "model"
  shutil.copytree(DATA / name, folder)
  raw = {**json.loads((folder / "config.json").read_text()), **config}
  (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
  if tensors is not None:
    content = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors(content)
    safetensors.numpy.save_file(content, folder / "model.safetensors")
  return str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_equal_torch(name):
  config, params = load(name)
  tokens = padded([case["input_ids"] for case in cases(name)])

  @jax.jit
  def score(params, tokens):
    hidden = decoder.apply(config, params, tokens)
    return token_stats(hidden, decoder.unembedding(params), jnp.roll(tokens, -1, axis=1))

  stats = score(params, tokens)
  for row, case in enumerate(cases(name)):
    size = len(case["input_ids"])
    np.testing.assert_allclose(stats.logp[row, : size - 1], case["logp"], atol=1e-4)
    np.testing.assert_allclose(stats.logsumexp[row, :size], case["logsumexp"], atol=1e-4)
    np.testing.assert_allclose(stats.entropy[row, :size], case["entropy"], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_torch_without_a_cache(name):
  config, params = load(name)
  # Teacher forcing with torch's tokens: if each argmax is torch's next token, so is the greedy sequence.
  best = jnp.argmax(logits(config, params, padded([case["input_ids"] + case["greedy_ids"] for case in cases(name)])), axis=-1)
  for row, case in enumerate(cases(name)):
    start = len(case["input_ids"]) - 1
    assert best[row, start : start + 16].tolist() == case["greedy_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_torch_with_a_cache(name):
  config, params = load(name)
  lengths = jnp.asarray([len(case["input_ids"]) for case in cases(name)])
  head = decoder.unembedding(params)

  @jax.jit
  def generate(params, tokens):
    unstacked, rows, size = decoder.unstack_layers(params), *tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size)[None, :], tokens.shape)
    hidden, cache = decoder.apply_cached(config, unstacked, tokens, positions, decoder.empty_cache(config, rows, size))
    first = jnp.argmax(jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0] @ head, axis=-1)

    def step(carry, offset):
      token, cache = carry
      hidden, cache = decoder.apply_cached(config, unstacked, token[:, None], (lengths + offset)[:, None], cache)
      return (jnp.argmax(hidden[:, 0] @ head, axis=-1), cache), token

    return jax.lax.scan(step, (first, cache), jnp.arange(16))[1].T

  generated = generate(params, padded([case["input_ids"] for case in cases(name)]))
  assert generated.tolist() == [case["greedy_ids"] for case in cases(name)]


def test_config_of_each_architecture():
  assert load("tiny_llama")[0] == decoder.DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
    rope_theta=10_000.0,
    rope_scaling=(8.0, 1.0, 4.0, 32.0),
    rms_norm_eps=1e-5,
    qkv_bias=False,
    tied=False,
  )
  qwen2 = load("tiny_qwen2")[0]
  assert (qwen2.head_dim, qwen2.qkv_bias, qwen2.tied, qwen2.rope_theta, qwen2.rope_scaling) == (8, True, True, 1000.0, None)
  chosen = hf.read_config(str(DATA / "tiny_qwen2"), dtype="bfloat16", param_dtype="bfloat16", remat="none")
  assert chosen == dataclasses.replace(qwen2, dtype="bfloat16", param_dtype="bfloat16", remat="none")


@pytest.mark.parametrize("name", NAMES)
def test_rope_settings_may_be_spelled_the_older_way(tmp_path, name):
  rope = json.loads((DATA / name / "config.json").read_text())["rope_parameters"]
  theta = rope.pop("rope_theta")
  kind = rope.pop("rope_type")
  older = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": {**rope, "type": kind}}
  assert hf.read_config(copy_model(tmp_path, name, **older)) == load(name)[0]
  if kind == "default":
    del older["rope_scaling"]
    assert hf.read_config(copy_model(tmp_path / "without", name, **older)) == load(name)[0]


def test_rope_scaling_shows_in_the_logits():
  config, params = load("tiny_llama")
  tokens = padded([case["input_ids"] for case in cases("tiny_llama")])
  plain = logits(dataclasses.replace(config, rope_scaling=None), params, tokens)
  assert jnp.max(jnp.abs(plain - logits(config, params, tokens))) > 0.1


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_each_qwen2_bias_shows_in_the_logits(which):
  config, params = load("tiny_qwen2")
  attn = params["layers"]["attn"]
  zeroed = {**attn, which: {**attn[which], "bias": jnp.zeros_like(attn[which]["bias"])}}
  changed = {**params, "layers": {**params["layers"], "attn": zeroed}}
  tokens = padded([case["input_ids"] for case in cases("tiny_qwen2")])
  assert jnp.max(jnp.abs(logits(config, changed, tokens) - logits(config, params, tokens))) > 0.1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_tree_is_the_decoders_own(name, param_dtype):
  config = dataclasses.replace(load(name)[0], param_dtype=param_dtype)
  wanted = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
  loaded = hf.load_params(str(DATA / name), config)
  assert jax.tree.map(lambda a: (a.shape, a.dtype), loaded) == jax.tree.map(lambda a: (a.shape, a.dtype), wanted)


def test_bfloat16_file_is_read_exactly():
  stored = safetensors.numpy.load_file(DATA / "tiny_qwen2" / "model.safetensors")
  assert stored["model.norm.weight"].dtype == jnp.bfloat16
  _, params = load("tiny_qwen2")
  np.testing.assert_array_equal(
    params["layers"]["mlp"]["up"]["kernel"][2], stored["model.layers.2.mlp.up_proj.weight"].T.astype(np.float32)
  )


def test_float16_file_is_read(tmp_path):
  def to_half(tensors):
    tensors.update({name: tensor.astype(np.float16) for name, tensor in tensors.items()})

  config, params = load("tiny_llama")
  half = hf.load_params(copy_model(tmp_path, "tiny_llama", to_half), config)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.float16).astype(jnp.float32)), half, params)


def test_arrays_go_to_their_shardings():
  config, params = load("tiny_llama")
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  shardings = jax.tree.map(lambda a: NamedSharding(mesh, PartitionSpec("fsdp" if a.shape[0] % 8 == 0 else None)), params)
  sharded = hf.load_params(str(DATA / "tiny_llama"), config, shardings)
  assert sharded["embed"]["embedding"].addressable_shards[0].data.shape == (8, 32)
  assert jax.tree.map(lambda a: a.sharding, sharded) == shardings
  jax.tree.map(np.testing.assert_array_equal, sharded, params)


def split(folder):
  """The model's tensors over two files, as large models are stored."""
  folder = pathlib.Path(folder)
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
  for file in set(weight_map.values()):
    safetensors.numpy.save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_several_files_are_one_model(tmp_path):
  folder = copy_model(tmp_path, "tiny_llama")
  split(folder)
  config, params = load("tiny_llama")
  jax.tree.map(np.testing.assert_array_equal, hf.load_params(folder, config), params)
  (pathlib.Path(folder) / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors \(missing\) is truncated, corrupt or absent"):
    hf.load_params(folder, config)


def test_llama_with_attention_bias(tmp_path):
  def add_output_bias(value, tensors):
    tensors["model.layers.1.self_attn.o_proj.bias"] = np.full(32, value, np.float32)

  changes = {"model_type": "llama", "attention_bias": True}
  folder = copy_model(tmp_path, "tiny_qwen2", functools.partial(add_output_bias, 0.0), **changes)
  config, params = load("tiny_qwen2")
  assert hf.read_config(folder) == config
  jax.tree.map(np.testing.assert_array_equal, hf.load_params(folder, config), params)
  folder = copy_model(tmp_path / "other", "tiny_qwen2", functools.partial(add_output_bias, 0.5), **changes)
  with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj\.bias with shape \(32,\) has no place in the decoder"):
    hf.load_params(folder, config)


def test_tied_model_with_a_copy_of_its_embedding(tmp_path):
  def add_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

  config, params = load("tiny_qwen2")
  loaded = hf.load_params(copy_model(tmp_path, "tiny_qwen2", add_head), config)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_tied_model_with_another_head_is_refused(tmp_path):
  def add_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

  with pytest.raises(ValueError, match=r"tie_word_embeddings true, but lm_head\.weight \(64, 32\) .* differs from model\.embed_tokens"):
    hf.load_params(copy_model(tmp_path, "tiny_qwen2", add_head), load("tiny_qwen2")[0])


def test_untied_head_differs_from_the_embedding():
  _, params = load("tiny_llama")
  assert not np.array_equal(params["lm_head"]["kernel"], params["embed"]["embedding"].T)
  assert decoder.unembedding(params) is params["lm_head"]["kernel"]


def test_constant_of_old_llama_files_is_passed_over(tmp_path):
  def add(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

  config, params = load("tiny_llama")
  jax.tree.map(np.testing.assert_array_equal, hf.load_params(copy_model(tmp_path, "tiny_llama", add), config), params)


def remove(name):
  return lambda tensors: tensors.pop(name)


def put(name, array):
  return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (remove("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing, expected shape \(24, 32\)"),
    (remove("lm_head.weight"), r"lm_head\.weight is missing, expected shape \(64, 32\).*tie_word_embeddings"),
    (put("model.extra", np.ones((2, 3), np.float32)), r"model\.extra with shape \(2, 3\) has no place in the decoder"),
    (
      put("model.layers.3.input_layernorm.weight", np.ones(32, np.float32)),
      r"model\.layers\.3\.input_layernorm\.weight with shape \(32,\)",
    ),
    (
      put("model.layers.2.self_attn.o_proj.weight", np.ones((64, 32), np.float32)),
      r"o_proj\.weight has shape \(64, 32\), expected \(32, 64\)",
    ),
    (put("model.layers.0.self_attn.k_proj.weight", np.ones((32, 32), np.int8)), r"k_proj\.weight has type I8, expected one of F64, F32"),
  ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    hf.load_params(copy_model(tmp_path, "tiny_llama", change), load("tiny_llama")[0])


def test_missing_qwen2_bias_is_named(tmp_path):
  with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj\.bias is missing, expected shape \(16,\)"):
    hf.load_params(copy_model(tmp_path, "tiny_qwen2", remove("model.layers.0.self_attn.k_proj.bias")), load("tiny_qwen2")[0])


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_file_is_named(tmp_path, kept):
  folder = copy_model(tmp_path, "tiny_llama")
  path = pathlib.Path(folder) / "model.safetensors"
  path.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match=r"model\.safetensors \([0-9,]+ bytes\) is truncated, corrupt or absent"):
    hf.load_params(folder, load("tiny_llama")[0])


def test_folder_without_safetensors_is_refused(tmp_path):
  folder = copy_model(tmp_path, "tiny_llama")
  weights = pathlib.Path(folder) / "model.safetensors"
  weights.rename(weights.with_name("pytorch_model.bin"))
  with pytest.raises(ValueError, match=r"holds neither .* \(weight files found: pytorch_model\.bin\).*save_pretrained"):
    hf.load_params(folder, load("tiny_llama")[0])


def test_missing_folder_and_missing_config(tmp_path):
  with pytest.raises(ValueError, match=r"'some-org/some-model' is not a folder on this machine.*hf download"):
    hf.read_config("some-org/some-model")
  with pytest.raises(ValueError, match=r"holds no config\.json"):
    hf.read_config(str(tmp_path))
  (tmp_path / "config.json").write_text('{"model_type": "lla')
  with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
    hf.read_config(str(tmp_path))
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(ValueError, match=r"must hold a JSON object, got a list"):
    hf.read_config(str(tmp_path))


@pytest.mark.parametrize(
  ("name", "change", "message"),
  [
    ("tiny_llama", {"model_type": "mistral"}, "model_type 'mistral'.*not supported"),
    ("tiny_llama", {"hidden_size": None}, "lacks the whole number.* hidden_size"),
    ("tiny_llama", {"mlp_bias": True}, "mlp_bias true"),
    ("tiny_llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("tiny_llama", {"head_dim": None, "num_attention_heads": 5}, "no head_dim, and hidden_size 32"),
    ("tiny_llama", {"num_key_value_heads": 3}, r"config\.json does not describe a model: num_heads \(4\) must be a multiple"),
    ("tiny_llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ("tiny_llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
    ("tiny_llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' without low_freq_factor, high_freq_factor"),
    ("tiny_llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"per layer type \(full_attention\)"),
    ("tiny_llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
  ],
)
def test_what_the_decoder_does_not_do_is_named(tmp_path, name, change, message):
  with pytest.raises(ValueError, match=message):
    hf.read_config(copy_model(tmp_path, name, **change))


def test_head_dim_defaults_to_hidden_over_heads(tmp_path):
  assert hf.read_config(copy_model(tmp_path, "tiny_llama", head_dim=None)).head_dim == 8


FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
  ("change", "windowed"),
  [
    ({"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}, None),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "layer_types": None}, (1, 2)),  # of 3 layers, the last
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "layer_types": None}, None),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}, (3, 0)),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "layer_types": [FULL, FULL, FULL]}, None),
    ({"use_sliding_window": False, "layer_types": [FULL, WINDOW, FULL]}, (1, 1)),
  ],
)
def test_sliding_windows_are_off_or_refused(tmp_path, change, windowed):
  folder = copy_model(tmp_path, "tiny_qwen2", **change)
  if windowed is None:
    assert hf.read_config(folder) == load("tiny_qwen2")[0]
  else:
    with pytest.raises(ValueError, match=rf"gives {windowed[0]} of 3 layers something other .* layer {windowed[1]}\)"):
      hf.read_config(folder)


def test_eos_ids_are_the_union_of_both_configs_and_the_tokenizer(tmp_path):
  folder = copy_model(tmp_path, "tiny_llama", eos_token_id=9)  # generation_config.json has [3, 1]
  assert hf.eos_ids(folder) == (1, 3, 9)
  assert hf.eos_ids(folder, 20) == (1, 3, 9, 20)
  assert hf.eos_ids(folder, [0, 3]) == (0, 1, 3, 9)
  (pathlib.Path(folder) / "generation_config.json").unlink()
  assert hf.eos_ids(folder, None) == (9,)


def test_model_without_any_eos_id_is_refused(tmp_path):
  folder = copy_model(tmp_path, "tiny_llama", eos_token_id=None)
  (pathlib.Path(folder) / "generation_config.json").write_text("{}")
  with pytest.raises(ValueError, match="No end-of-sequence id"):
    hf.eos_ids(folder)
