"""The tables of docs/scale.md from results of the compile check: `python -m experiments.compile_check.markdown docs/scale/*.json`."""

import json
import pathlib
import sys

_GIB = 2**30


def _mesh(sizes: dict[str, int]) -> str:
  return ",".join(f"{axis}:{size}" for axis, size in sizes.items() if size > 1) or "data:1"


def _billions(name: str) -> float:
  """Of the parameters, in the name of a result: 1.5b_8k_v5e."""
  return float(name.partition("b")[0])


def _programs(result: dict) -> dict[str, dict]:
  return {program["name"]: program for program in result["programs"]}


def _gib(count: float) -> str:
  return f"{count / _GIB:.1f}"


def _bound(result: dict) -> str:
  """Seconds of an RL step: of each part the slowest of its three bounds."""
  return f"{sum(max(part['seconds'].values()) for part in result['rl_step'].values()):.0f}"


def _sizes(result: dict) -> list[str]:
  """A line of the table of sizes."""
  programs = _programs(result)
  step = programs["train_step"]
  return [
    result["arch"],
    f"{result['prompt']} + {result['response']}",
    result["topology"],
    f"`{_mesh(result['mesh'])}`" + (", anchor on the hosts" if "--anchor_memory=pinned_host" in result["command"] else ""),
    f"`{_mesh(result['rollout_mesh'])}`",
    str(result["slots"]),
    _gib(step["arguments"]),
    _gib(step["temporaries"]),
    f"{_gib(result['hbm'])} of {_gib(result['limit'])} ({max(programs.values(), key=lambda p: p['hbm'])['name']})",
    _gib(step["bytes_sent"]),
    f"{result['rl_step']['train_step']['flops'] / 1e15:.1f}",
    f"{result['bytes_per_decoded_token'] / 2**20:.0f}",
    _bound(result),
  ]


_SIZES = (
  *("model", "prompt + response", "slice", "mesh", "rollout mesh", "slots", "state GiB", "update's temporaries GiB", "HBM in all GiB"),
  *("sent by a chip in the updates GiB", "updates' PFLOP a chip", "MiB read a token", "RL step at least s"),
)


def _scaling(result: dict) -> list[str]:
  """A line of the table of weak scaling."""
  programs = _programs(result)
  step, anchor = programs["train_step"], programs["anchor_pass"]
  kinds = {kind: found["bytes_sent"] for kind, found in step["collectives"].items()}
  return [
    str(result["chips"]),
    str(result["rows"]),
    f"`{_mesh(result['mesh'])}`",
    _gib(step["arguments"]),
    _gib(step["temporaries"]),
    _gib(step["bytes_sent"]),
    ", ".join(f"{kind} {_gib(sent)}" for kind, sent in sorted(kinds.items(), key=lambda item: -item[1])),
    _gib(anchor["temporaries"]),
    _gib(anchor["bytes_sent"]),
  ]


_SCALING = (
  *("chips", "sequences", "mesh", "state GiB", "update's temporaries GiB", "sent by a chip in the updates GiB", "of these"),
  *("anchor pass's temporaries GiB", "sent by a chip in it GiB"),
)


def table(header: tuple[str, ...], lines: list[list[str]]) -> str:
  """Markdown."""
  return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *lines))


def tables(paths: list[str]) -> tuple[str, str]:
  """Of sizes, and of weak scaling: results whose file is named weak_*."""
  results = {pathlib.Path(path).stem: json.loads(pathlib.Path(path).read_text()) for path in paths}
  sizes = {name: result for name, result in results.items() if not name.startswith("weak_")}
  scaling = [result for name, result in results.items() if name not in sizes]
  return (
    table(_SIZES, [_sizes(sizes[name]) for name in sorted(sizes, key=lambda name: (_billions(name), sizes[name]["response"], name))]),
    table(_SCALING, [_scaling(result) for result in sorted(scaling, key=lambda result: (result["mesh"]["data"] == 1, result["chips"]))]),
  )


if __name__ == "__main__":
  print("\n\n".join(tables(sys.argv[1:])))
