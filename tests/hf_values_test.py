"""Wrong types and values in the JSON files of a model folder: a paragraph with the file and the key, whatever stands there."""

import json
import pathlib
import re

import pytest

from emapg_jax.models import hf
from tests.hf_test import copy_model, load, split

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("vocab_size", True),
    ("hidden_size", "32"),
    ("num_hidden_layers", 3.0),
    ("num_attention_heads", 0),
    ("max_position_embeddings", 10**90),
    ("num_key_value_heads", "2"),
    ("num_key_value_heads", -1),
    ("head_dim", "8"),
    ("head_dim", 0),
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", -1),
    ("rms_norm_eps", float("nan")),
    ("rope_scaling", "linear"),
    ("rope_parameters", [1]),
    ("attention_bias", "false"),
    ("tie_word_embeddings", "false"),
  ],
)
def test_a_wrong_value_names_file_and_key(tmp_path, key, value):
  with pytest.raises(ValueError, match=rf"config\.json: {key} is {re.escape(repr(value))}, but must be"):
    hf.read_config(copy_model(tmp_path, "tiny_llama", **{key: value}))


def test_an_eps_of_null_is_no_default(tmp_path):
  folder = copy_model(tmp_path, "tiny_llama")
  path = pathlib.Path(folder) / "config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": None, "head_dim": None}))
  with pytest.raises(ValueError, match=r"config\.json: rms_norm_eps is None, but must be a number above 0"):
    hf.read_config(folder)


@pytest.mark.parametrize(
  ("rope", "message"),
  [
    ({"rope_theta": "abc"}, "rope_theta is 'abc'"),
    ({"rope_theta": -1}, "rope_theta is -1"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({**LLAMA3, "factor": "8"}, "factor is '8'"),
    ({**LLAMA3, "original_max_position_embeddings": []}, r"original_max_position_embeddings is \[\]"),
    ({**LLAMA3, "low_freq_factor": 4.0}, r"low_freq_factor 4\.0 must be less than high_freq_factor 4\.0"),
  ],
)
def test_a_wrong_rope_setting_names_file_and_key(tmp_path, rope, message):
  with pytest.raises(ValueError, match=rf"config\.json: {message}"):
    hf.read_config(copy_model(tmp_path, "tiny_llama", rope_parameters=rope))
  if "rope_theta" in rope:
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
      hf.read_config(copy_model(tmp_path / "older", "tiny_llama", rope_parameters=None, **rope))


@pytest.mark.parametrize("change", [{"layer_types": 3}, {"use_sliding_window": True, "layer_types": None, "max_window_layers": "2"}])
def test_wrong_windows_name_file_and_key(tmp_path, change):
  key = list(change)[-1]
  with pytest.raises(ValueError, match=rf"config\.json: {key} is {change[key]!r}, but must be"):
    hf.read_config(copy_model(tmp_path, "tiny_qwen2", **change))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["</s>", "12", 1.5, True, [1, None], [[1]], -1, [1, 64]])
def test_an_end_that_is_no_id_of_the_model_names_file_and_key(tmp_path, file, value):
  folder = copy_model(tmp_path, "tiny_llama")
  path = pathlib.Path(folder) / file
  path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value}))
  bad = value[-1] if isinstance(value, list) else value
  with pytest.raises(ValueError, match=rf"/{file}: eos_token_id is {re.escape(repr(bad))}, but must be a whole number .* less than 64"):
    hf.eos_ids(folder)


@pytest.mark.parametrize("weight_map", [[], {}, None, "x", {"a": 3}])
def test_a_wrong_index_is_named(tmp_path, weight_map):
  folder = copy_model(tmp_path, "tiny_llama")
  split(folder)
  (pathlib.Path(folder) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
  with pytest.raises(ValueError, match=r"index\.json: weight_map must be an object of tensor names and file names, got "):
    hf.load_params(folder, load("tiny_llama")[0])


def test_json_too_deep_to_read_names_the_file(tmp_path):
  (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
  with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
    hf.read_config(str(tmp_path))
