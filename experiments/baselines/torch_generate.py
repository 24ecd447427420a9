"""Sampling with transformers' `generate` in torch on the CPU, random weights: `pip install torch transformers`.

`python -m experiments.baselines.torch_generate`. Temperature 1 over the whole vocabulary, with the KV cache; nothing ends a sequence early.
"""

import torch

from experiments.baselines import sizes, torch_model


def main() -> None:
  """Prints one line."""
  flags = sizes.sampling_parser(__doc__)
  flags.add_argument("--threads", type=int, default=2)
  args = flags.parse_args()
  torch.set_num_threads(args.threads)
  steps, useful = sizes.steps_and_useful(args)
  model = torch_model.build(args.arch, 8 * args.prompt + steps).eval()
  vocab = model.config.vocab_size
  batches = [torch.tensor(b) for b in sizes.prompts(args, lambda count, length: torch.randint(1, vocab, (count, length)).tolist())]

  def call() -> None:
    for batch in batches:
      out = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        use_cache=True,
        pad_token_id=0,
      )
      if out.shape[1] != batch.shape[1] + steps:
        raise SystemExit(f"error: {out.shape[1] - batch.shape[1]} tokens came back where {steps} were asked for.")

  with torch.inference_mode():
    seconds = sizes.median_seconds(call, args.repeats)
  sizes.report(f"transformers generate, {args.case}", args, useful, seconds, torch_model.versions())


if __name__ == "__main__":
  main()
