"""Flags of a dataclass: types and None from the annotations, and a flagfile that reads back."""

import dataclasses
import sys

import pytest
from absl.flags import FlagValues, IllegalFlagValueError

from emapg_jax.config import RunConfig
from experiments import flags


@dataclasses.dataclass(frozen=True)
class Toy:
  rate: float | None = flags.field(None, "A rate.")
  count: int | None = flags.field(None, "A count.")
  name: str | None = flags.field(None, "A name.")
  fast: bool | None = flags.field(None, "Fast.")
  scale: float = flags.field(1, "A float whose default is written as an int.")
  sizes: tuple[int, ...] = flags.field((1, 2), "Sizes.")
  files: tuple[str, ...] = flags.field((), "Files.")
  kind: str = dataclasses.field(default="a", metadata={"help": "A kind.", "choices": ("a", "b")})


def parse(*arguments, cls=Toy):
  values = FlagValues()
  flags.define(cls, values)
  values(["program", *arguments])
  return flags.read(cls, values)


def test_without_flags_every_field_has_its_default():
  assert parse() == Toy()


def test_types_come_from_the_annotations():
  got = parse("--rate=2", "--count=3", "--name=4", "--nofast", "--scale=5", "--sizes=6,7", "--files=8,x")
  assert got == Toy(rate=2.0, count=3, name="4", fast=False, scale=5.0, sizes=(6, 7), files=("8", "x"))
  assert [type(x) for x in (got.rate, got.count, got.name, got.fast, got.scale)] == [float, int, str, bool, float]


@pytest.mark.parametrize("argument", ["--rate=x", "--count=1.5", "--fast=maybe", "--scale=x"])
def test_a_value_of_another_type_is_refused(argument):
  with pytest.raises(IllegalFlagValueError, match=argument):
    parse(argument)


def test_what_is_no_number_in_a_tuple_is_named():
  with pytest.raises(ValueError, match="--sizes=1,x must be numbers"):
    parse("--sizes=1,x")


@pytest.mark.parametrize(
  "config",
  [
    Toy(),
    Toy(rate=0.0, count=0, name="", fast=False, sizes=(), files=("",)),  # none of these is None
    Toy(rate=1e-7, name="None", fast=True, scale=0.1, files=("a,b", 'c"d', "e")),
  ],
)
def test_a_flagfile_reads_back(config, tmp_path):
  flags.write(config, tmp_path / "flags.txt")
  assert parse(f"--flagfile={tmp_path / 'flags.txt'}") == config


def test_none_is_no_line_of_the_flagfile(tmp_path):
  flags.write(Toy(count=0), tmp_path / "flags.txt")
  assert (tmp_path / "flags.txt").read_text().splitlines() == ["--count=0", "--scale=1", "--sizes=1,2", "--files=", "--kind=a"]
  # but it has a value to compare with when a run is resumed
  assert flags.as_strings(Toy(count=0))["rate"] == "None"


@pytest.mark.parametrize("path", sorted(flags.QUICKSTART.parent.glob("*.flags")), ids=lambda path: path.stem)
def test_every_recipe_is_accepted(path, monkeypatch):
  monkeypatch.chdir(flags.QUICKSTART.parent.parent.parent)  # recipes name each other from there
  assert parse(f"--flagfile={path}", cls=RunConfig) != RunConfig()


def test_published_settings(monkeypatch):
  monkeypatch.chdir(flags.QUICKSTART.parent.parent.parent)
  paper, baseline, best = (
    parse(f"--flagfile=experiments/flags/math_{name}_8k.flags", cls=RunConfig) for name in ("paper", "baseline", "best")
  )
  assert (paper.advantage, paper.policy_loss, paper.aggregation) == ("group_normalized", "ppo_clip", "sequence_mean")
  assert (paper.clip_low, paper.clip_high, paper.dual_clip, paper.kl, paper.kl_coef) == (0.2, 0.28, 3, "k3", 0.001)
  assert (paper.rows, paper.updates, paper.max_prompt_tokens, paper.max_new_tokens) == (1024, 2, 4096, 8192)
  assert (paper.ema_decay, paper.ema_period, paper.learning_rate, paper.mask_truncated, paper.seed) == (0.95, 10, 1e-6, True, 6725)
  assert baseline == dataclasses.replace(paper, ema_decay=1.0)
  assert best == dataclasses.replace(paper, kl="topk_reverse", kl_topk=32)


def test_published_settings_of_the_later_stages(monkeypatch):
  monkeypatch.chdir(flags.QUICKSTART.parent.parent.parent)
  stages = {
    (kind, length): parse(f"--flagfile=experiments/flags/math_{kind}_{length}.flags", cls=RunConfig)
    for kind in ("paper", "baseline", "best")
    for length in ("8k", "16k", "24k")
  }
  first = stages["paper", "8k"]
  later = dataclasses.replace(first, seed=986, mask_truncated=False, steps=800)
  assert stages["paper", "16k"] == dataclasses.replace(later, max_new_tokens=16384)
  assert stages["paper", "24k"] == dataclasses.replace(later, max_new_tokens=24576)
  for length in ("16k", "24k"):
    assert stages["baseline", length] == dataclasses.replace(stages["paper", length], ema_decay=1.0)
    assert stages["best", length] == dataclasses.replace(stages["paper", length], kl="topk_reverse", kl_topk=32)


def test_help_of_the_program_shows_every_flag():
  values = FlagValues()
  flags.define(Toy, values)
  shown = {flag.name: flag.help for flag in values.get_key_flags_for_module(sys.argv[0])}
  assert shown.keys() == {field.name for field in dataclasses.fields(Toy)}
  assert shown["rate"] == "A rate." and shown["kind"] == "A kind. One of: a, b."
