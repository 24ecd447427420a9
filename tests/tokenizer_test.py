"""The tokenizer of a folder: its own chat template, raw text, end ids, and what can be wrong."""

import json
import pathlib
import shutil

import pytest

from emapg_jax.models.tokenizer import ChatTokenizer

DATA = pathlib.Path(__file__).parent / "data"
LLAMA, QWEN2 = str(DATA / "tiny_llama"), str(DATA / "tiny_qwen2")
IM_START, IM_END, THINK, END_THINK = 2, 3, 5, 6


def copy_tokenizer(folder, name, **config):
  folder = folder / "model"
  shutil.copytree(DATA / name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
  raw = {**json.loads((folder / "config.json").read_text()), **config}
  (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
  return folder


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
def test_raw_ids_are_those_of_the_file(name):
  # AutoTokenizer gives other ids for the Qwen2 folder: it rebuilds the tokenizer by model type.
  tokenizer = ChatTokenizer(str(DATA / name))
  for case in json.loads((DATA / name / "reference.json").read_text())["cases"]:
    assert tokenizer.encode_prompt(case["prompt"], chat=False) == case["input_ids"]


def test_raw_text_has_bos_only_where_the_tokenizer_adds_it():
  assert ChatTokenizer(LLAMA).encode_prompt("1", chat=False) == [0, 9]
  assert ChatTokenizer(QWEN2).encode_prompt("1", chat=False) == [9]


def test_chat_is_the_prompt_as_only_user_message():
  tokenizer = ChatTokenizer(LLAMA)
  assert tokenizer.render("1+1") == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
  ids = tokenizer.encode_prompt("1+1", chat=True)
  # The template writes every special token itself: no <s> (id 0) is put before it, and the marks are single ids.
  assert ids[0] == IM_START and ids.count(IM_START) == 2 and ids.count(IM_END) == 1 and 0 not in ids
  assert len(ids) == 2 + len("user\n") + len("1+1") + 1 + len("\n") + len("assistant\n")
  assert tokenizer.decode(ids) == "user\n1+1\nassistant\n"


def test_template_that_opens_the_reasoning_is_seen():
  llama, qwen2 = ChatTokenizer(LLAMA), ChatTokenizer(QWEN2)
  assert qwen2.opens_think("1+1", chat=True)
  assert qwen2.encode_prompt("1+1", chat=True)[-2] == THINK
  assert not llama.opens_think("1+1", chat=True)
  assert not llama.opens_think("think within <think> and </think>", chat=True)
  assert not qwen2.opens_think("1+1", chat=False)
  assert qwen2.opens_think("1+1 <think>\n", chat=False)


def test_special_tokens_are_left_out_of_the_text_but_reasoning_marks_stay():
  assert ChatTokenizer(LLAMA).decode([9, 10, IM_END, 4, 4]) == "12"
  assert ChatTokenizer(QWEN2).decode([THINK, 9, END_THINK, 10, IM_END]) == "<think>1</think>2"
  assert ChatTokenizer(LLAMA).decode([]) == ""


def test_text_is_not_tidied_even_where_the_tokenizer_would(tmp_path):
  folder = copy_tokenizer(tmp_path, "tiny_llama")
  raw = json.loads((folder / "tokenizer_config.json").read_text())
  tidy = "clean_up_tokenization_spaces"
  raw.update({tidy: True, f"{tidy}_for_bpe_even_though_it_will_corrupt_output": True})
  (folder / "tokenizer_config.json").write_text(json.dumps(raw))
  tokenizer = ChatTokenizer(str(folder))
  text = "so 1 , 2 . it 's 3 !"
  assert tokenizer.decode(tokenizer.encode_prompt(text, chat=False)) == text


def test_ids_beyond_the_tokenizer_decode_to_nothing():
  assert ChatTokenizer(LLAMA).decode([9, 5000]) == "1"  # rows of an embedding padded to a round number can be sampled


def test_ends_and_padding(tmp_path):
  llama, qwen2 = ChatTokenizer(LLAMA), ChatTokenizer(QWEN2)
  assert llama.eos_ids == (1, 3) and llama.pad_id == 4 and llama.vocab_size == 64
  assert qwen2.eos_ids == (1, 3) and qwen2.pad_id == 1 and qwen2.vocab_size == 64  # no padding token: an end id serves
  folder = copy_tokenizer(tmp_path, "tiny_llama", eos_token_id=9)
  assert ChatTokenizer(str(folder)).eos_ids == (1, 3, 9)
  (folder / "generation_config.json").unlink()
  assert ChatTokenizer(str(folder)).eos_ids == (3, 9)  # 3 is the tokenizer's


def test_padding_id_without_a_row_in_the_model_is_not_used(tmp_path):
  assert ChatTokenizer(str(copy_tokenizer(tmp_path, "tiny_llama", vocab_size=4))).pad_id == 1


def test_template_may_be_given_as_text_or_as_a_file(tmp_path):
  template = "q: {{ messages[0]['content'] }}\nA:"
  (tmp_path / "qa.jinja").write_text(template)
  for given in (template, str(tmp_path / "qa.jinja")):
    tokenizer = ChatTokenizer(LLAMA, given)
    assert tokenizer.render("1+1") == "q: 1+1\nA:"
    assert tokenizer.decode(tokenizer.encode_prompt("1+1", chat=True)) == "q: 1+1\nA:"


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("no/such/file.jinja", r"--chat_template='no/such/file\.jinja' is neither an existing file nor a template"),
    ("{{ prompt }}", "leaves out the user's message"),
    ("{% for m in messages %}{{ m['content'] }}", "chat template of --chat_template does not render"),
    ("{{ 1/0 }}", r"chat template of --chat_template does not render a user message \(ZeroDivisionError: division by zero\)"),
    ("{{ messages[0].content + 1 }}", r"does not render a user message \(TypeError"),
    ("{% for i in range(10**9) %}{% endfor %}", r"does not render a user message \(OverflowError"),
  ],
)
def test_unusable_template_is_refused_at_once(template, message):
  with pytest.raises(ValueError, match=message):
    ChatTokenizer(LLAMA, template)


def test_without_a_template_raw_works_and_chat_says_what_to_do(tmp_path):
  folder = copy_tokenizer(tmp_path, "tiny_llama")
  (folder / "chat_template.jinja").unlink()
  tokenizer = ChatTokenizer(str(folder))
  assert tokenizer.encode_prompt("1+1=", chat=False) == ChatTokenizer(LLAMA).encode_prompt("1+1=", chat=False)
  for call in (tokenizer.encode_prompt, tokenizer.opens_think):
    with pytest.raises(ValueError, match=r"has no chat template.*--chat_template.*raw prompts"):
      call("1+1=", chat=True)


def test_broken_template_of_the_folder_is_named(tmp_path):
  folder = copy_tokenizer(tmp_path, "tiny_llama")
  (folder / "chat_template.jinja").write_text("{{ raise_exception('system role needed') }}")
  with pytest.raises(ValueError, match=r"template of the tokenizer in .* does not render a user message \(TemplateError: system role"):
    ChatTokenizer(str(folder)).render("1+1")


def test_binary_template_file_is_named(tmp_path):
  (tmp_path / "weights.jinja").write_bytes(b"{{\xff\xfe")
  with pytest.raises(ValueError, match=r"--chat_template='.*weights\.jinja' cannot be read as text"):
    ChatTokenizer(LLAMA, str(tmp_path / "weights.jinja"))


def test_template_of_the_folder_that_leaves_out_the_message_is_refused_for_chats(tmp_path):
  folder = copy_tokenizer(tmp_path, "tiny_llama")
  (folder / "chat_template.jinja").write_text("user: {{ messages[0]['text'] }}")
  tokenizer = ChatTokenizer(str(folder))
  assert tokenizer.encode_prompt("1", chat=False) == [0, 9]
  for call in (tokenizer.encode_prompt, tokenizer.opens_think):
    with pytest.raises(ValueError, match=r"chat template of the tokenizer in .* leaves out the user's message"):
      call("1+1", chat=True)


def test_prompt_the_model_cannot_read_is_refused(tmp_path):
  tokenizer = ChatTokenizer(str(copy_tokenizer(tmp_path, "tiny_llama", vocab_size=12)))
  assert tokenizer.encode_prompt("12", chat=False) == [0, 9, 10]
  with pytest.raises(ValueError, match=r"gives id 13 \('5'\), but config\.json has vocab_size 12"):
    tokenizer.encode_prompt("12345", chat=False)
  with pytest.raises(ValueError, match="has no tokens"):
    ChatTokenizer(QWEN2).encode_prompt("", chat=False)


def test_folder_without_a_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match="is not a folder on this machine"):
    ChatTokenizer(str(tmp_path / "nowhere"))
  folder = copy_tokenizer(tmp_path, "tiny_llama")
  (folder / "tokenizer.json").write_text("{")
  with pytest.raises(ValueError, match=r"No tokenizer could be read from .*tokenizer\.json"):
    ChatTokenizer(str(folder))
  (folder / "tokenizer.json").unlink()
  with pytest.raises(ValueError, match=r"No tokenizer could be read from .*tokenizer\.json"):
    ChatTokenizer(str(folder))
