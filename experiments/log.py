"""Where the numbers of a step go."""

from emapg_jax import metrics
from emapg_jax.config import RunConfig
from emapg_jax.presets import GROUP_ADVANTAGES
from experiments import report

FLAT_GROUPS_WARNING = 0.95


class Log:
  """Where the numbers of a step go: the metrics writer, the progress line, and remarks on what looks wrong."""

  def __init__(self, writer: metrics.MetricsWriter, progress: metrics.Progress, config: RunConfig):
    self._writer, self._progress = writer, progress
    self._by_group = config.advantage in GROUP_ADVANTAGES  # then a group of equal rewards trains nothing
    self._floor_is_rounding = not config.truncated_sampling
    self._warned: set[str] = set()
    self.last: dict[str, float] = {}

  def write(self, step: int, numbers: dict, samples: list[dict]) -> None:
    """Writes the line of a step, and its samples if there are any."""
    self._writer.write(step, numbers)
    if samples:
      self._writer.write_samples(step, samples)
    self.last |= numbers
    if step:
      names = ("score_mean", "kl", "entropy", "response_length", "eval_greedy", "eval_sampled")
      self._progress.update(step, {name: numbers[name] for name in names if name in numbers})
    if step == 1 and "sampler_kl" in numbers and self._floor_is_rounding:
      report.say(f"noise floor of the KL: {numbers['sampler_kl']:.2g} nats per token (the policy to itself, sampler against trainer)")
    if numbers.get("empty_updates", 0) > 0:
      self._warn(
        "empty updates",
        f"at step {step} {numbers['empty_updates']:.0%} of the updates had no token to train on and were left out: every response in them "
        "was without a score, empty, or left out by a flag. Look at samples.jsonl and at what scores the responses.",
      )
    flat = max(numbers.get("degenerate", 0), numbers.get("groups_filled", 0))
    if self._by_group and flat > FLAT_GROUPS_WARNING:
      self._warn(
        "flat groups",
        f"at step {step} {flat:.0%} of the groups have equal scores and teach nothing. If that stays, the task is too "
        "hard or too easy for this policy: change the data, the group size or the reward.",
      )
    if step > 1 and self._floor_is_rounding and 0 < numbers.get("kl", -1.0) < numbers.get("sampler_kl", 0.0):
      self._warn(
        "noise floor",
        f"at step {step} the KL to the anchor, {numbers['kl']:.2g}, lies below the noise floor of {numbers['sampler_kl']:.2g} (the policy "
        "to itself, sampler against trainer): its gradient is rounding. Compute in float32, or let the anchor lag more.",
      )

  def _warn(self, kind: str, text: str) -> None:
    if kind not in self._warned:
      self._warned.add(kind)
      report.say(f"warning: {text}")

  def close(self) -> None:
    """Ends the progress line."""
    self._progress.close()
