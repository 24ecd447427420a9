"""The table of algorithms: what it refuses before the first run, and that a table is one."""

import pathlib

import pytest

from experiments.algorithm_table import Config, check, run_one, table

RECIPE = str(pathlib.Path(__file__).parent.parent / "experiments" / "flags" / "one_digit.flags")


@pytest.mark.parametrize(
  ("changes", "extra", "text"),
  [
    ({"algorithms": ("grpo", "pppo")}, [], "--algorithms names pppo, which is unknown"),
    ({"seeds": 0}, [], "--seeds is 0"),
    ({"recipe": "none.flags"}, [], "--recipe=none.flags is not there"),
    ({}, ["--seed=4"], "--seed=4: the algorithm, the seed and the folder of a run are set by the table"),
    ({}, ["--steps=11"], "--steps=11 is too short"),
    ({}, ["--bogus"], "--algorithm=grpo: .*bogus"),
    ({"algorithms": ("grpo", "rloo")}, ["--clip_low=0.1"], "--algorithm=rloo: --clip_low=0.1 has no effect"),
  ],
)
def test_refused_before_the_first_run(changes, extra, text, tmp_path):
  with pytest.raises(ValueError, match=text):
    check(Config(**{"recipe": RECIPE, "out": str(tmp_path)} | changes), extra)


def test_every_algorithm_fits_the_recipe(tmp_path):
  check(Config(recipe=RECIPE, out=str(tmp_path)), ["--ema_decay=1"])


def test_an_earlier_table_is_not_overwritten(tmp_path):
  (tmp_path / "grpo-0").mkdir()
  with pytest.raises(ValueError, match="holds runs of an earlier table"):
    Config(recipe=RECIPE, out=str(tmp_path))


def test_a_run_that_fails_says_why(tmp_path):
  with pytest.raises(ValueError, match=r"The run of ppo with seed 1 failed: .*--hidden_size=7 is not a multiple"):
    run_one(Config(recipe=RECIPE, out=str(tmp_path)), "ppo", 1, ["--hidden_size=7"])


def test_a_table():
  run = {"steps": 40, "first": 0.25, "last": 0.5, "entropy": 1.0, "seconds": 3.0}
  lines = table({"grpo": [run, run | {"last": 0.75}], "ppo": [run]}).splitlines()
  assert {line.count("|") for line in lines} == {7}
  assert lines[2] == "| grpo | 40 | 0.250 | 0.500 0.750 | 0.625 | 1.00 |"
