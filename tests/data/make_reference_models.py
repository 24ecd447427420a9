"""Writes tests/data/{tiny_llama,tiny_qwen2}: random models as Hugging Face folders, with what torch says of them in reference.json.

Needs torch, which the project itself does not. To write the folders again, from the repository root:

  python3 -m venv torch_env
  torch_env/bin/pip install torch transformers safetensors numpy jinja2
  torch_env/bin/python tests/data/make_reference_models.py

The committed files came from torch 2.13.0 and transformers 5.24.0. Each model holds what an importer gets wrong: the Llama has
head_dim ≠ hidden/heads, a head of its own and Llama 3's rope scaling; the Qwen2 has tied embeddings, q/k/v biases and bfloat16 weights.
"""

import json
import pathlib
import string

import tokenizers
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
SPECIAL = ["<s>", "<|end|>", "<|im_start|>", "<|im_end|>", "<pad>", "<think>", "</think>"]
VOCAB = [*SPECIAL, "?", *string.digits, *string.ascii_lowercase, *" \n.,:+-*/=()!'\";ABCDEF"][:64]
BOS, END, IM_END, PAD = 0, 1, 3, 4
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{THINK}{% endif %}"
PROMPTS = ["1+1=", "once upon a time, there was a small model with a rope of its own.", "what is (3+4)*5? answer: "]


def write_tokenizer(folder: pathlib.Path, template: str, bos: bool, **special: str):
  """A tokenizer of single characters, 64 entries; `bos` puts <s> before raw text."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(VOCAB)}, [], unk_token="?"))
  tokenizer.decoder = tokenizers.decoders.Fuse()
  tokenizer.add_special_tokens(SPECIAL)
  if bos:
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
  fast.chat_template = template
  fast.save_pretrained(folder)
  return fast


def randomize(model: torch.nn.Module, seed: int) -> None:
  """Weights large enough that attention, positions and biases all show in the logits."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      if parameter.ndim == 2:
        parameter.copy_(noise * (0.4 if "embed" in name else 2.0 / parameter.shape[1] ** 0.5))
      else:
        parameter.copy_(0.5 * noise + (0.0 if "bias" in name else 1.0))


@torch.no_grad()
def reference(model: torch.nn.Module, tokenizer, prompt: str) -> dict:
  """Log-probabilities of the prompt, logsumexp and entropy at every position, and 16 greedy tokens."""
  ids = tokenizer(prompt).input_ids
  logits = model(torch.tensor([ids])).logits[0]
  log_probs = logits.log_softmax(-1)
  greedy = list(ids)
  for _ in range(16):
    last = model(torch.tensor([greedy])).logits[0, -1]
    top = last.topk(2)
    assert top.values[0] - top.values[1] > 1e-3, "a tie: rounding could choose the other token; take another seed"
    greedy.append(int(top.indices[0]))
  return {
    "prompt": prompt,
    "input_ids": ids,
    "logp": log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(),
    "logsumexp": logits.logsumexp(-1).tolist(),
    "entropy": (-(log_probs.exp() * log_probs).sum(-1)).tolist(),
    "greedy_ids": greedy[len(ids) :],
  }


def write(name: str, model: torch.nn.Module, seed: int, dtype: torch.dtype, template: str, bos: bool, **special: str) -> None:
  """One folder; the reference is computed in float32 from the files as written."""
  folder = FOLDER / name
  randomize(model, seed)
  model = model.to(dtype)
  model.generation_config = transformers.GenerationConfig(bos_token_id=BOS, eos_token_id=[IM_END, END], pad_token_id=PAD)
  model.save_pretrained(folder)
  tokenizer = write_tokenizer(folder, template, bos, **special)
  # Read back, not cast back: casting a model to bfloat16 rounds its rotary frequencies too, which no file holds.
  model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
  cases = [reference(model, tokenizer, prompt) for prompt in PROMPTS]
  made_with = f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
  (folder / "reference.json").write_text(json.dumps({"made_with": made_with, "cases": cases}) + "\n")


def main() -> None:
  shared = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "rms_norm_eps": 1e-5,
  }
  # Rotations within 32 positions for the eight frequencies: 5.1 (kept), 1.6 (between), 0.5 and less (stretched).
  rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  rope["original_max_position_embeddings"] = 32
  llama = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**shared, intermediate_size=24, head_dim=16, tie_word_embeddings=False, rope_parameters=rope)
  )
  special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "?"}
  write("tiny_llama", llama, 0, torch.float32, TEMPLATE.replace("{THINK}", ""), bos=True, pad_token="<pad>", **special)
  qwen2 = transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(**shared, intermediate_size=48, tie_word_embeddings=True, rope_parameters={"rope_theta": 1000.0})
  )
  write("tiny_qwen2", qwen2, 1, torch.bfloat16, TEMPLATE.replace("{THINK}", "<think>\n"), bos=False, **special)


if __name__ == "__main__":
  main()
