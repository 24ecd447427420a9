"""Every benchmark runs at tiny sizes and writes JSON of one schema; what is asked for wrongly is refused by name."""

import dataclasses
import json

import jax
import pytest
from absl import flags as absl_flags

from experiments.architectures import ARCHITECTURES
from experiments.baselines import sizes
from experiments.bench import __main__ as bench
from experiments.bench import measure, models, settings, table, token_stats
from experiments.bench.sampling import Weighed, Work

TINY = settings.Settings(
  arch="tiny",
  layers=1,
  tokens=8,
  batch=2,
  prompt=3,
  new_tokens=2,
  group=2,
  prompts=(4,),
  seq=(8,),
  topk=4,
  matmul_size=16,
  bandwidth_mib=1,
  case=("vocab=64,hidden=8,topk=4",),
)


def read(*arguments):
  values = absl_flags.FlagValues()
  settings.define(values)
  values(["bench", *arguments])
  return settings.read(values)


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    # case x (ours, matmuls alone) x (prefill, decode, whole) + the row of the weights; spread has a third variant
    ("sampler", 7 + 7 + 10),
    ("token_stats", 4),
    ("attention", 4),
    ("train_step", 3),
    ("prefix", 4),
  ],
)
def test_every_benchmark_writes_the_schema(name, expected, tmp_path, capsys):
  path = tmp_path / "results.json"
  content = bench.run([name], dataclasses.replace(TINY, json=str(path)))
  assert json.loads(path.read_text()) == json.loads(json.dumps(content))
  assert content.keys() == {"schema", "command", "device", "versions", "settings", "machine", "rows", "ratios"}
  assert content["versions"].keys() == {"jax", "jaxlib", "flax", "numpy", "python"}
  assert content["device"]["platform"] == "cpu"
  assert content["machine"]["matmul_size"] == 16 and content["machine"]["bandwidth"] > 0
  assert len(content["rows"]) == expected
  for row in content["rows"]:
    assert row.keys() == {field.name for field in dataclasses.fields(table.Row)}
    assert row["benchmark"] == name
    if row["seconds"] is None:
      assert (name, row["phase"]) == ("sampler", "decode")  # shorter than the clock's noise
    else:
      assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
    if row["seconds"] and row["flops"]:
      assert row["flop_share"] == pytest.approx(row["flops"] / row["seconds"] / content["machine"]["matmul_flops"])
      assert row["bandwidth_share"] == pytest.approx(row["bytes"] / row["seconds"] / content["machine"]["bandwidth"])
    if row["variant"] != "matmuls alone" and row["phase"] != "weights, once a step":
      assert row["temporary_bytes"] >= 0
  assert content["ratios"] and all(ratio["value"] >= 0 for ratio in content["ratios"])
  shown = capsys.readouterr().out
  assert all(row["phase"] in shown for row in content["rows"]) and all(ratio["what"] in shown for ratio in content["ratios"])


def test_compiled_only_nothing_runs():
  content = bench.run(["token_stats", "attention", "attention"], dataclasses.replace(TINY, compile_only=True))
  assert content["machine"] is None
  assert [row["benchmark"] for row in content["rows"]] == ["token_stats"] * 4 + ["attention"] * 4  # a name twice is run once
  assert all(row["seconds"] is None and row["flop_share"] is None and row["temporary_bytes"] >= 0 for row in content["rows"])
  assert not any("seconds" in ratio["what"] for ratio in content["ratios"])


@pytest.mark.parametrize(
  ("names", "changes", "message"),
  [
    ([], {}, "Name one or more benchmarks: sampler, token_stats, attention, train_step, prefix"),
    (["samplers"], {}, "Benchmark 'samplers' is unknown. Did you mean sampler?"),
    (["sampler"], {"compile_only": True}, "sampler can only be run"),
    (["token_stats"], {"case": ("vocab=8,hidden=x,topk=2",)}, "--case=vocab=8,hidden=x,topk=2 is not understood"),
    (["token_stats"], {"case": ("vocab=8,hidden=4,topk=8",)}, "K below V"),
    (["sampler"], {"group": 3}, "--batch=2 to be a multiple of --group=3"),
    (["sampler"], {"prompt": 600}, "4802 tokens were asked for, but tiny has 4096 positions"),
    (["train_step"], {"micro_batch": 3}, "--micro_batch=3 does not divide the 2 sequences"),
    (["train_step"], {"topk": 300}, "--topk=300 exceeds the vocabulary of 256"),
  ],
)
def test_what_is_wrong_is_named(names, changes, message):
  with pytest.raises(ValueError) as caught:
    bench.run(names, dataclasses.replace(TINY, **changes))
  assert message in str(caught.value)


def test_a_file_that_cannot_be_written_is_known_before_the_work(monkeypatch):
  monkeypatch.setattr(bench, "measure_machine", lambda *args: pytest.fail("work was begun"))
  with pytest.raises(ValueError, match=r"--json=/no/such/folder/x.json can't be written \(No such file or directory\)"):
    bench.run(["prefix"], dataclasses.replace(TINY, json="/no/such/folder/x.json"))


def test_results_of_an_earlier_run_outlive_one_that_fails(monkeypatch, tmp_path):
  path = tmp_path / "results.json"
  path.write_text("earlier")
  monkeypatch.setitem(bench.BENCHMARKS, "prefix", lambda settings, machine: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    bench.run(["prefix"], dataclasses.replace(TINY, json=str(path)))
  assert path.read_text() == "earlier"
  monkeypatch.setitem(bench.BENCHMARKS, "prefix", lambda settings, machine: ([], []))
  bench.run(["prefix"], dataclasses.replace(TINY, json=str(path)))
  assert json.loads(path.read_text())["rows"] == []


def test_ratios_of_token_stats_by_hand():
  fields = {"chunked": {"seconds": 3.0, "temporary_bytes": 80}, "whole": {"seconds": 2.0, "temporary_bytes": 1000}}
  ratios = token_stats._ratios("c", *(table.Row("token_stats", "c", variant, "gradient", **field) for variant, field in fields.items()))
  assert [ratio.value for ratio in ratios] == [1.5, 0.08]


def test_flags():
  assert read() == settings.Settings()
  cases = ("vocab=8,hidden=4,topk=2", "vocab=9,hidden=4,topk=2")
  found = read(*(f"--case={case}" for case in cases), "--tokens=5", "--repeats=3", "--dtype=bfloat16", "--seq=4,6")
  assert found == settings.Settings(case=cases, tokens=5, repeats=3, dtype="bfloat16", seq=(4, 6))
  for argument, message in (
    ("--arch=qwen2.5-05b", r"--arch 'qwen2.5-05b' is unknown. Did you mean qwen2.5-0.5b"),
    ("--dtype=float16", "Did you mean (b?)float"),
    ("--sampler_case=groups", "Did you mean group"),
    ("--prompts=8,0", "--prompts=0 must be at least 1"),
    ("--batch=-1", "--batch=-1 must be 0 or more"),
  ):
    with pytest.raises(ValueError, match=message):
      read(argument)
  with pytest.raises(ValueError, match="--layers=2 makes a random model smaller"):
    read("--layers=2", "--model_path=x")
  assert read("--model_path=x").model_path == "x"
  for arch in ("tiny", "smollm2-135m"):  # the default too, when it is asked for
    with pytest.raises(ValueError, match=f"--arch={arch} names a random model and can't be used with --model_path=x"):
      read(f"--arch={arch}", "--model_path=x")


def test_comparisons_count_the_tokens_that_are_sampled():
  parser = sizes.sampling_parser("")
  for case, batches, lengths in (("distinct", 1, [2] * 6), ("group", 1, [2] * 6), ("spread", 4, [2] * 18 + [8] * 6)):
    args = parser.parse_args([f"--case={case}", "--batch=6", "--group=3", "--new_tokens=2", "--prompt=1"])
    made = sizes.prompts(args, lambda count, length: [[i] * length for i in range(count)])
    assert len(made) == batches and sum(map(len, made)) == len(lengths)
    assert sizes.steps_and_useful(args) == (max(lengths), sum(lengths))
  args = parser.parse_args(["--case=group", "--batch=7", "--group=3"])
  for function in (sizes.steps_and_useful, lambda args: sizes.prompts(args, lambda count, length: [[1]] * count)):
    with pytest.raises(SystemExit, match=r"--batch=7 to be a multiple of --group=3"):
      function(args)


# N in millions of what the models' cards state: SmolLM2-135M, Llama-3.2-1B 1.24B, Qwen2.5 0.49B, 1.54B, 3.09B, 7.62B.
@pytest.mark.parametrize(
  ("arch", "millions"),
  [
    ("smollm2-135m", 135),
    ("llama-3.2-1b", 1236),
    ("qwen2.5-0.5b", 494),
    ("qwen2.5-1.5b", 1544),
    ("qwen2.5-3b", 3086),
    ("qwen2.5-7b", 7616),
  ],
)
def test_architectures_have_the_published_size(arch, millions):
  config = models.decoder_config(settings.Settings(arch=arch), longest=8192)
  shapes = jax.eval_shape(lambda: models.parameters(settings.Settings(arch=arch), config))
  count = sum(a.size for a in jax.tree.leaves(shapes))
  assert round(count / 1e6) == millions
  vectors = sum(a.size for path, a in jax.tree_util.tree_leaves_with_path(shapes) if path[-1].key in ("scale", "bias"))
  embedding = 0 if config.tied else config.hidden_size * config.vocab_size
  assert models.layer_weights(config) + models.head_weights(config) == count - vectors - embedding
  assert set(ARCHITECTURES) >= {arch, "tiny"}


def test_operations_by_hand():
  config = models.decoder_config(dataclasses.replace(TINY, layers=2), 8)
  # A layer: q and o 32·4·8 each, k and v 32·2·8 each, three of 32·64: 1024·2 + 512·2 + 6144 = 9216; the head 32·256 = 8192.
  assert models.layer_weights(config) == 2 * 9216 and models.head_weights(config) == 8192
  assert models.weight_bytes(config) == 4 * (2 * 9216 + 8192)
  # 3 queries, of which query i sees i keys and 2 before: 1 + 2 + 3 + 3·2.
  assert models.causal_pairs(3) == 6 and models.causal_pairs(3, 2) == 12
  # Scores and their sum: 2 · 2·Dh operations for a pair, head and layer.
  assert models.forward_flops(config, 5, 2, 7) == 2 * (5 * 2 * 9216 + 2 * 8192) + 7 * 2 * 4 * 2 * 2 * 8


def test_work_in_batches():
  work = Work(((1, 2), (3, 4), (5, 6)), 2, (1, 2, 3, 4, 5, 6), 4)
  assert work.prompt_tokens == 6
  first, second = work.in_batches()
  assert first == Work(((1, 2), (3, 4)), 2, (1, 2, 3, 4), 4) and second == Work(((5, 6),), 2, (5, 6), 4)
  assert work.cut_to(1).lengths == (1,) * 6


def test_weighed_compiles_once_per_shape_and_static_argument():
  weighed, traced = Weighed(), []

  def scaled(x, times):
    traced.append((x.shape, times))
    return x * times

  for options in ({"static_argnames": "times"}, {"static_argnums": 1}):
    call = weighed.jit(scaled, **options)
    traced.clear()
    for size, times in ((2, 3), (2, 3), (2, 4), (5, 3)):
      args = (jax.numpy.ones(size),)
      found = call(*args, times=times) if "static_argnames" in options else call(*args, times)
      assert found.tolist() == [times] * size
    assert traced == [((2,), 3), ((2,), 4), ((5,), 3)]
  assert len(weighed.bytes) == 6


@pytest.mark.parametrize(("function", "expected"), [(measure.median_seconds, 2.0), (measure.best_seconds, 1.0)])
def test_the_warm_up_is_not_timed(function, expected, monkeypatch):
  ticks = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])  # 5, 1 and 2 seconds
  monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
  calls = []
  assert function(lambda: calls.append(1), 3) == expected
  assert len(calls) == 4
