"""What is compiled into an RL step, and the shapes of the functions that are bound to it."""

import dataclasses
from collections.abc import Callable

import jax

from emapg_jax import losses
from emapg_jax.token_stats import token_stats
from emapg_jax.types import Hyper, Max, PyTree, RolloutBatch, TokenStats, Weighted

# (params, frozen, batch) -> the hidden state [B, T, D] before each response token, the unembedding [D, V]. See `before_responses`
Model = Callable[[PyTree, PyTree, RolloutBatch], tuple[jax.Array, jax.Array]]
Critic = Callable[[PyTree, PyTree, RolloutBatch], jax.Array]  # (params, frozen, batch) -> the value before each response token [B, T]
# (stats, batch, in_topk) -> per token [B, T]: head, tail, and whether the log-ratio was beyond the estimator's bound
KL = Callable[[TokenStats, RolloutBatch, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
# (batch, own, later, hyper) -> advantages and, for a critic, returns, each [B, T]; own, later: the KL in the reward at a token, after it
Credit = Callable[[RolloutBatch, jax.Array, jax.Array, Hyper], tuple[jax.Array, jax.Array | None]]
Metrics = dict[str, Weighted | Max]

PPO_CLIP = losses.token_level(losses.ppo_clip)


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """Settings that are compiled in."""

  micro_batch: int  # rows per forward, all devices together; not read where a Plan says which
  mini_batches: int  # optimizer updates per epoch
  epochs: int = 1
  prompt_rows: int = 1  # so many consecutive rows have one prompt and stay together, for a model that reads it once for all of them
  together: int = 1  # so many consecutive rows, or prompt_rows, enter a mini-batch as one, however many are read at a time
  temperature: float = 1.0
  policy_loss: losses.PolicyLoss = PPO_CLIP
  credit: Credit | None = None  # None: `batch.advantages` are used as they are
  aggregation: str = "token_mean"
  max_new_tokens: int | None = None  # read by the aggregation `fixed_length`
  kl: KL | None = None  # None: no anchor is read
  kl_in_reward: bool = False  # part of the advantages, by `credit_step`, instead of part of the loss
  kl_iw_low: float | None = None
  kl_iw_high: float | None = None
  topk: int = 0  # ids that `score_step` reports when it is given none
  topk_approximate: bool = False  # find them by approx_max_k
  entropy_coef: float = 0.0
  value_clip: float | None = None  # of the critic's loss
  old_from_sampler: bool = False  # old_logp is sampling_logp
  tis_cap: float | None = None  # largest importance weight old / sampling of a token; None: no such weight
  tis_sequence_bound: float | None = None  # sequences of which the mean such ratio lies beyond it train nothing
  stats: Callable[..., TokenStats] = token_stats  # or one of its arguments that knows of a mesh
  head_logits: int | None = None  # held at a time, on all devices together; None: as `stats` chooses
  seed: int = 0  # of the order of rows in mini-batches

  @property
  def updates(self) -> int:
    """Optimizer updates in an RL step."""
    return self.epochs * self.mini_batches

  @property
  def on_policy(self) -> bool:
    """Whether the policy that is updated is the one at the start of the RL step: then it is its own old policy, and the ratio exactly 1."""
    return self.updates == 1 and not self.old_from_sampler


def check_divides(rows: int, config: StepConfig) -> None:
  """Raises ValueError unless `rows` split into whole mini-batches of whole micro-batches of whole prompts."""
  if config.micro_batch % config.prompt_rows:
    raise ValueError(
      f"Micro-batches of {config.micro_batch} sequences do not split into the {config.prompt_rows} that share a prompt and are read "
      f"together (prompt_rows): make micro_batch a multiple of {config.prompt_rows}, or read each sequence with a prompt of its own."
    )
  if rows % (config.mini_batches * config.micro_batch):
    raise ValueError(
      f"A batch of {rows} sequences does not split into {config.mini_batches} mini-batches of micro-batches of {config.micro_batch} "
      f"(micro_batch rows per device times the devices that share the batch): {rows} must be a multiple of "
      f"{config.mini_batches * config.micro_batch}. Change prompts_per_step, group_size, mini_batches, micro_batch or the mesh."
    )
