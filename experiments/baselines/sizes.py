"""Sizes of the comparisons, the same as those of `experiments.bench`, and the line each prints. Needs nothing but Python."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

from experiments.architectures import ARCHITECTURES

CASES = ("distinct", "group", "spread")


def parser(description: str) -> argparse.ArgumentParser:
  """The flags that all comparisons have."""
  flags = argparse.ArgumentParser(description=description)
  flags.add_argument("--arch", default="smollm2-135m", choices=list(ARCHITECTURES))
  flags.add_argument("--batch", type=int, default=0, help="Sequences at a time; 0: 16 for sampling, 8 for training.")
  flags.add_argument("--prompt", type=int, default=64, help="Tokens of a prompt; 8 times as many in the case group.")
  flags.add_argument("--new_tokens", type=int, default=64)
  flags.add_argument("--group", type=int, default=8, help="Samples of each prompt in the case group.")
  flags.add_argument("--repeats", type=int, default=3, help="Timed calls after a warm-up; the median counts.")
  return flags


def sampling_parser(description: str) -> argparse.ArgumentParser:
  """The flags of those that sample."""
  flags = parser(description)
  flags.add_argument("--case", default="distinct", choices=CASES)
  return flags


def _sequences(args: argparse.Namespace) -> int:
  batch = args.batch or 16
  if args.case == "group" and batch % args.group:
    raise SystemExit(f"error: --case=group needs --batch={batch} to be a multiple of --group={args.group}.")
  return batch


def prompts(args: argparse.Namespace, random_ids: Callable[[int, int], list[list[int]]]) -> list[list[list[int]]]:
  """Batches of prompts, each sequence with its own copy. `random_ids` makes (count, length) ids."""
  batch = _sequences(args)
  if args.case == "group":
    unique = random_ids(batch // args.group, 8 * args.prompt)
    return [[ids for ids in unique for _ in range(args.group)]]
  return [random_ids(batch, args.prompt) for _ in range(4 if args.case == "spread" else 1)]


def steps_and_useful(args: argparse.Namespace) -> tuple[int, int]:
  """(tokens that each sequence of a batch decodes, tokens that are of use): every batch of `spread` has a sequence of the longest."""
  batch = _sequences(args)
  if args.case == "spread":
    return 4 * args.new_tokens, 3 * batch * args.new_tokens + batch * 4 * args.new_tokens
  return args.new_tokens, batch * args.new_tokens


def median_seconds(call: Callable[[], object], repeats: int) -> float:
  """Median over `repeats` calls after one that is not counted; each must return with its work done."""
  call()
  seconds = []
  for _ in range(repeats):
    began = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds)


def report(name: str, args: argparse.Namespace, tokens: int, seconds: float, versions: dict[str, str]) -> None:
  """Prints one line of JSON."""
  line = {"name": name, **vars(args), "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
  print(json.dumps(line | {"versions": {"python": platform.python_version(), **versions}}))
