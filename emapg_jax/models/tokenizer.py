"""The tokenizer of a Hugging Face folder: prompts in, through its chat template or raw, and text out."""

import os
from collections.abc import Sequence

from emapg_jax.models import hf

_THINK = ("<think>", "</think>")
_PROBE = "What is 1+1?"


def _read_template(chat_template: str) -> str:
  """A template given as text or as the path of a file."""
  if os.path.isfile(chat_template):
    try:
      with open(chat_template, encoding="utf-8") as f:
        return f.read()
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f"--chat_template={chat_template!r} cannot be read as text ({error}). Give the path of a Jinja file.") from error
  if "{" not in chat_template:
    raise ValueError(
      f"--chat_template={chat_template!r} is neither an existing file nor a template (it has no {{{{ }}}} in it). Give the path of a Jinja "
      "file, or the template's text."
    )
  return chat_template


class ChatTokenizer:
  """Encodes prompts and decodes responses with the folder's own tokenizer; reads local files only.

  Attributes:
    eos_ids: every id that ends a response (config.json, generation_config.json and the tokenizer together), ascending.
    pad_id: the tokenizer's padding id, or the first eos id if it has none. Masks never look at it.
    vocab_size: entries of the tokenizer; the model's embedding may have more rows.
  """

  def __init__(self, model_path: str, chat_template: str | None = None):
    """Reads the tokenizer's files, and tries a given template on a short prompt.

    Args:
      model_path: folder with config.json and the tokenizer's files.
      chat_template: Jinja text, or the path of a file with it, to use instead of the tokenizer's own.

    Raises:
      ValueError: if there is no usable tokenizer, or the given template does not render a user message.
    """
    self._model_rows = hf.read_model_json(model_path).get("vocab_size")
    # Without torch, transformers announces at import that no model will be available; none is wanted.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # here, because runs without a model folder need not wait for it

    # AutoTokenizer rebuilds the tokenizer of a Qwen2 model in Qwen's own way, whatever tokenizer.json says: other ids, without an error.
    has_json = os.path.isfile(os.path.join(model_path, "tokenizer.json"))
    source = transformers.PreTrainedTokenizerFast if has_json else transformers.AutoTokenizer
    try:
      self._tokenizer = source.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # the library raises whatever the damaged file happens to cause
      raise ValueError(
        f"No tokenizer could be read from {model_path!r} ({type(error).__name__}: {str(error).strip().splitlines()[0]}). The folder must "
        "hold the model's tokenizer.json and tokenizer_config.json; download them again."
      ) from error
    self._path = model_path
    self._template = None if chat_template is None else _read_template(chat_template)
    self.vocab_size = len(self._tokenizer)
    self.eos_ids = hf.eos_ids(model_path, self._tokenizer.eos_token_id)
    pad = self._tokenizer.pad_token_id
    # A padding token added after training may have no row in the embedding.
    self.pad_id = self.eos_ids[0] if pad is None or (self._model_rows and pad >= self._model_rows) else pad
    special = self._tokenizer.added_tokens_decoder
    # Some tokenizers call the reasoning marks special; without them an answer cannot be told from the thoughts before it.
    self._dropped = frozenset(i for i, token in special.items() if token.special and token.content not in _THINK)
    self._template_name = f"the tokenizer in {model_path!r}" if chat_template is None else "--chat_template"
    self._probed = False
    if self._template is not None:
      self.render(_PROBE)

  def render(self, prompt: str) -> str:
    """The chat text with `prompt` as the only user message, up to where the assistant begins to speak.

    Raises:
      ValueError: if there is no chat template, it fails, or it leaves out the message.
    """
    if self._template is None and self._tokenizer.chat_template is None:
      raise ValueError(
        f"The tokenizer in {self._path!r} has no chat template, so a prompt cannot be put as a chat. Give one by --chat_template (a Jinja "
        "file, or its text), or use raw prompts, as for a base model."
      )
    if not self._probed:
      if _PROBE not in self._apply_template(_PROBE):
        raise ValueError(
          f"The chat template of {self._template_name} leaves out the user's message: it must render `messages`, a list of role and "
          "content. Correct it, or give another by --chat_template."
        )
      self._probed = True
    return self._apply_template(prompt)

  def _apply_template(self, prompt: str) -> str:
    try:
      return self._tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], chat_template=self._template, tokenize=False, add_generation_prompt=True
      )
    except Exception as error:  # a template is a program and fails as it likes: 1/0, text + 1, a range without end
      raise ValueError(
        f"The chat template of {self._template_name} does not render a user message ({type(error).__name__}: {error}). Correct it, or give "
        "another by --chat_template."
      ) from error

  def encode_prompt(self, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
      prompt: the problem's text.
      chat: through the chat template, which writes its own special tokens; else as raw text, with BOS where the tokenizer adds one.

    Raises:
      ValueError: if chat is asked for without a template, or the ids are not ones the model can read.
    """
    ids = self._tokenizer.encode(self.render(prompt), add_special_tokens=False) if chat else self._tokenizer.encode(prompt)
    if not ids:
      raise ValueError(f"The prompt {prompt!r} has no tokens, so nothing can be generated from it: remove it from the data.")
    if self._model_rows and max(ids) >= self._model_rows:
      raise ValueError(
        f"The tokenizer in {self._path!r} gives id {max(ids)} ({self._tokenizer.convert_ids_to_tokens(max(ids))!r}), but config.json has "
        f"vocab_size {self._model_rows}: tokenizer and model do not belong together. Use the tokenizer files of this very model."
      )
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of generated ids, without special tokens; <think> and </think> stay even where they are special."""
    return self._tokenizer.decode([int(i) for i in ids if int(i) not in self._dropped], clean_up_tokenization_spaces=False)

  def opens_think(self, prompt: str, chat: bool) -> bool:
    """Whether the rendered prompt ends by opening <think>, so that a response begins inside the reasoning."""
    return (self.render(prompt) if chat else prompt).rstrip().endswith(_THINK[0])
