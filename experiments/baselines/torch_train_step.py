"""An RL step in torch and transformers on the CPU, random weights: `pip install torch transformers`.

`python -m experiments.baselines.torch_train_step`. Anchor forward, policy forward and backward with the K3 KL, clipping by the global norm,
AdamW, and the anchor's EMA; float32, head on the response tokens only, activations kept.
"""

import copy

import torch

from experiments.baselines import sizes, torch_model


def _logp(model: torch.nn.Module, tokens: torch.Tensor, response: int) -> torch.Tensor:
  logits = model(tokens, use_cache=False, logits_to_keep=response + 1).logits[:, :-1]
  return torch.gather(torch.log_softmax(logits.float(), dim=-1), -1, tokens[:, -response:, None])[..., 0]


def _update_anchor(policy: torch.nn.Module, anchor: torch.nn.Module, ema_decay: float) -> None:
  with torch.no_grad():
    torch._foreach_lerp_(list(anchor.parameters()), list(policy.parameters()), 1 - ema_decay)


def main() -> None:
  """Prints one line."""
  flags = sizes.parser(__doc__)
  flags.add_argument("--threads", type=int, default=2)
  args = flags.parse_args()
  torch.set_num_threads(args.threads)
  rows, length = args.batch or 8, args.prompt + args.new_tokens
  policy = torch_model.build(args.arch, length)
  anchor = copy.deepcopy(policy).requires_grad_(False)
  optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.01)
  tokens = torch.randint(0, policy.config.vocab_size, (rows, length))
  advantages = torch.randn(rows, 1)

  def step() -> None:
    with torch.no_grad():
      ref_logp = _logp(anchor, tokens, args.new_tokens)
    logp = _logp(policy, tokens, args.new_tokens)
    ratio = torch.exp(logp - logp.detach())
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    log_ratio = ref_logp - logp
    kl = torch.exp(log_ratio) - 1 - log_ratio
    (surrogate + 0.01 * kl).mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _update_anchor(policy, anchor, 0.9)

  seconds = sizes.median_seconds(step, args.repeats)
  sizes.report("torch train step", args, rows * length, seconds, torch_model.versions())


if __name__ == "__main__":
  main()
