"""A task of a user's own, as README shows it; hf_run_test trains on it."""

from emapg_jax.envs.task import Problem


class Parity:
  """Odd or even?"""

  chat = True

  def prompts(self):
    return [Problem(f"Is {n} even or odd", "odd" if n % 2 else "even") for n in range(100)]

  def score(self, problem, response):
    # A random model says neither word; the share of vowels gives it something to climb.
    return sum(letter in "aeiou" for letter in response) / max(len(response), 1)


def make():
  return Parity()
