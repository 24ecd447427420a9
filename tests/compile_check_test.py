"""The compile check: collectives with their loops, in written and in compiled programs; what fits, what doesn't, what is refused."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags as absl_flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emapg_jax.config import RunConfig
from emapg_jax.models import decoder
from experiments import flags
from experiments.architectures import ARCHITECTURES
from experiments.compile_check import __main__ as compile_check
from experiments.compile_check import chips, hlo, markdown

# As the TPU compiler writes it: counters with other starts and steps than 0 and 1 (the inner one's start out of sight), tuples, layouts,
# an asynchronous pair, groups written in three ways, a channel of two collectives, and collectives spread over fusions, one of them over
# those of a loop between its start and its end.
WRITTEN = """HloModule jit_f, is_scheduled=true

%piece (p: bf16[8,4]) -> bf16[32,4] {
  %p = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[32,4]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
}

%started (p.1: f32[64]) -> f32[512] {
  %p.1 = f32[64] parameter(0)
  ROOT %all-to-all.1 = f32[512] all-to-all(%p.1), channel_id=5, replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
}

%inner_cond (c: (u32[], f32[16])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8)
  %c = (u32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %at = u32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

%inner_body (b: (u32[], f32[16])) -> (u32[], f32[16]) {
  %two = u32[]{:T(128)} constant(2)
  %b = (u32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%b), index=0
  %next = u32[]{:T(128)} add(%i, %two)
  %x = f32[16]{0:T(128)} get-tuple-element(%b), index=1
  %send = (f32[16]{0:T(128)}, f32[16]{0:T(128)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}
  %sent = f32[16]{0:T(128)} collective-permute-done(%send), metadata={op_name="ring"}
  ROOT %out = (u32[]{:T(128)}, f32[16]{0:T(128)}) tuple(%next, %sent)
}

%cond (c.1: (s32[], f32[16], bf16[8,4], u32[])) -> pred[] {
  %c.1 = (s32[], f32[16], bf16[8,4], /*index=3*/u32[]) parameter(0)
  %at.1 = s32[] get-tuple-element(%c.1), index=0
  %limit.1 = s32[] constant(10)
  ROOT %less.1 = pred[] compare(%at.1, %limit.1), direction=LT
}

%body (b.1: (s32[], f32[16], bf16[8,4], u32[])) -> (s32[], f32[16], bf16[8,4], u32[]) {
  %b.1 = (s32[], f32[16], bf16[8,4], /*index=3*/u32[]) parameter(0)
  %three = s32[] constant(3)
  %i.1 = s32[] get-tuple-element(%b.1), index=0
  %next.1 = s32[] add(%i.1, %three)
  %x.1 = f32[16] get-tuple-element(%b.1), index=1
  %w = bf16[8,4] get-tuple-element(%b.1), index=2
  %zero = u32[] get-tuple-element(%b.1), index=3
  %first = bf16[32,4] fusion(%w), kind=kCustom, calls=%piece
  %second = bf16[32,4] fusion(%w), kind=kCustom, calls=%piece
  %step = f32[512] fusion(%w), kind=kCustom, calls=%started
  %start = (u32[], f32[16]) tuple(%zero, %x.1)
  %ring = (u32[], f32[16]) while(%start), condition=%inner_cond, body=%inner_body
  %y = f32[16] get-tuple-element(%ring), index=1
  ROOT %out.1 = (s32[], f32[16], bf16[8,4], /*index=3*/u32[]) tuple(%next.1, %y, %w, %zero)
}

ENTRY %main (a: f32[16], m: bf16[8,4]) -> f32[2] {
  %a = f32[16] parameter(0)
  %m = bf16[8,4] parameter(1)
  %one = s32[] constant(1)
  %none = u32[] constant(0)
  %first.1 = f32[512] fusion(%a), kind=kCustom, calls=%started
  %begin = (s32[], f32[16], bf16[8,4], /*index=3*/u32[]) tuple(%one, %a, %m, %none)
  %loop = (s32[], f32[16], bf16[8,4], /*index=3*/u32[]) while(%begin), condition=%cond, body=%body
  %z = f32[16] get-tuple-element(%loop), index=1
  %sum = f32[16] all-reduce(%z), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %part = f32[2]{0} reduce-scatter(%sum), channel_id=1, replica_groups=mesh['a'=8,'b'=1] {'a','b'}, dimensions={0}, to_apply=%add
}
"""


def test_a_written_program():
  collectives = hlo.collectives(hlo.parse(WRITTEN), 8)
  outer = 3  # 1, 4, 7
  assert sorted((c.kind, c.count) for c in collectives) == [
    ("all-gather", outer),
    ("all-reduce", 1),
    ("all-to-all", 1),
    ("collective-permute", outer * 4),
    ("reduce-scatter", 1),
  ]
  found = {c.kind: c for c in collectives}
  assert found["all-gather"].bytes == outer * 32 * 4 * 2 * 3 / 4  # a device sends what it doesn't get of its own: groups of 4
  assert found["collective-permute"].bytes == outer * 4 * 16 * 4
  assert found["all-reduce"].bytes == 2 * 16 * 4 / 2
  assert found["reduce-scatter"].bytes == 2 * 4 * 7
  assert found["collective-permute"].op_name == "ring" and not any(c.guessed for c in found.values())


def test_a_loop_that_data_ends_is_counted_as_told():
  by_data = WRITTEN.replace("%limit.1 = s32[] constant(10)", "%limit.1 = s32[] get-tuple-element(%c.1), index=0")
  found = {c.kind: c for c in hlo.collectives(hlo.parse(by_data), 8, unknown_turns=5)}
  assert found["all-gather"].count == 5 and found["collective-permute"].count == 20 and found["all-reduce"].count == 1
  assert found["all-gather"].guessed and found["collective-permute"].guessed and not found["all-reduce"].guessed


def test_largest_arrays_of_main_memory():
  (array, origin), *_ = hlo.largest(hlo.parse(WRITTEN), 3)
  assert (str(array), array.bytes, origin) in (("f32[512]", 2048, "step"), ("f32[512]", 2048, "first.1"))
  assert hlo.arrays("(pred[3], s4[8]{0:T(8)S(1)}, f8e4m3fn[2,2], c64[], token[])") == [
    hlo.Array("pred", (3,), 0),
    hlo.Array("s4", (8,), 1),
    hlo.Array("f8e4m3fn", (2, 2), 0),
    hlo.Array("c64", (), 0),
  ]
  assert [a.bytes for a in hlo.arrays("pred[3] s4[8] f8e4m3fn[2,2] c64[] bf16[5]")] == [3, 4, 4, 8, 10]


def test_the_page_has_the_tables_of_the_committed_results():
  docs = pathlib.Path(__file__).parents[1] / "docs"
  results = sorted((docs / "scale").glob("*.json"))
  page = (docs / "scale.md").read_text()
  for table in markdown.tables([str(path) for path in results]):
    assert table.count("\n") > 5 and table in page
  assert all(json.loads(path.read_text())["fits"] for path in results)


@pytest.mark.multi_device
def test_a_compiled_program():
  """Seven turns of a loop, each with an all-reduce, and one around five turns of another."""
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

  def summed(x):
    return jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

  def function(x):
    x = jax.lax.fori_loop(0, 7, lambda i, x: x + summed(x)[:1] * i, x)
    return jax.lax.scan(lambda x, _: (jax.lax.fori_loop(2, 7, lambda i, x: x * summed(x)[:1], x), None), x, length=3)[0]

  x = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))
  found = hlo.collectives(hlo.parse(jax.jit(function).lower(x).compile().as_text()), 4)
  assert {c.kind for c in found} == {"all-reduce"} and sum(c.count for c in found) == 7 + 15
  assert sum(c.bytes for c in found) == 22 * 2 * (2 * 3 * 4) * 3 / 4


TINY = (
  *("--topology=cpu:8", "--arch=tiny", "--mesh=fsdp:4,tensor:2", "--prompts_per_step=8", "--group_size=4", "--max_prompt_tokens=6"),
  *("--max_new_tokens=12", "--decode_block=4", "--rollout_mesh=data:4,tensor:2", "--rollout_slots=24"),  # six a shard: no weight's size
)
AUTO = ("--rollout_mesh=auto", "--rollout_slots=0")


def run(*arguments):
  """The exit code of the command, in this process."""
  values = absl_flags.FlagValues()
  flags.define(RunConfig, values)
  flags.define(compile_check.Settings, values)
  values(["compile_check", *arguments])
  return compile_check.check_and_say(flags.read(RunConfig, values), flags.read(compile_check.Settings, values))


def assert_nothing_large_moves(folder, fsdp, tensor):
  """No logits and no parameters of several layers in training, no weights in a decode step; and the state is spread over all devices."""
  sizes, params = ARCHITECTURES["tiny"], tiny_params()
  vocab, hidden, layers = sizes["vocab_size"], sizes["hidden_size"], sizes["num_layers"]
  stacked = {(a.ndim, a.size // parts) for a in jax.tree.leaves(params["layers"]) if a.ndim > 2 for parts in (1, tensor)}
  of_head = [sorted((v, d)) for v in (vocab, vocab // tensor) for d in (hidden, hidden // fsdp)]  # it may be summed over fsdp in one go
  for name in ("anchor_pass", "train_step"):
    found = hlo.collectives(hlo.parse((folder / f"{name}.hlo").read_text()), 8)
    assert any("all-gather" in collective.kind for collective in found)
    for array in (array for collective in found for array in collective.arrays):
      of_vocabulary = vocab in array.shape or vocab // tensor in array.shape
      assert not of_vocabulary or sorted(n for n in array.shape if n > 1) in of_head or array.bytes <= 4 * vocab, (
        f"{name} exchanges logits: {array}"
      )
      of_layers = array.shape[:1] == (layers,) and (len(array.shape), math.prod(array.shape)) in stacked
      assert not of_layers, f"{name} gathers parameters of several layers at once: {array}"
  moved = [array for collective in hlo.collectives(hlo.parse((folder / "decode.hlo").read_text()), 8) for array in collective.arrays]
  weights = {math.prod(a.shape[1:]) // parts for a in jax.tree.leaves(params["layers"]) if a.ndim > 2 for parts in (1, fsdp, tensor)}
  assert moved and not weights & {math.prod(array.shape) for array in moved}, "a decode step carries a collective of a parameter"
  step = hlo.parse((folder / "train_step.hlo").read_text())
  (results,) = (instruction for instruction in step.computations[step.entry].values() if instruction.root)
  state = sum(array.bytes for array in results.arrays)
  assert state < 1.1 * 16 * decoder.count_params(params) / 8, "parameters, anchor and both moments are spread over all devices"


def tiny_params():
  """Shapes."""
  return jax.eval_shape(lambda: decoder.init_params(decoder.DecoderConfig(**ARCHITECTURES["tiny"]), jax.random.key(0)))


@pytest.mark.multi_device
def test_every_program_of_a_tiny_model(tmp_path, capsys):
  path = tmp_path / "tiny.json"
  assert run(*TINY, f"--json={path}", f"--hlo={tmp_path}") == 0
  printed = capsys.readouterr().out
  found = json.loads(path.read_text())
  programs = {program["name"]: program for program in found["programs"]}
  assert list(programs) == ["rollout_weights", "prefill", "decode", "anchor_pass", "train_step"]
  assert found["fits"] and found["limit"] is None and "fits: " in printed
  step = programs["train_step"]
  code = sum(program["code"] for program in found["programs"])
  assert step["hbm"] == step["arguments"] + step["outputs"] - step["aliased"] + step["temporaries"] + code
  assert step["aliased"] > 0.9 * step["outputs"] > 0 and step["temporaries"] > 0
  assert programs["decode"]["beside"] > step["aliased"] and programs["anchor_pass"]["beside"] > 0
  assert step["bytes_sent"] == sum(kind["bytes_sent"] for kind in step["collectives"].values()) > 0
  moved = found["rl_step"]
  assert moved["train_step"]["flops"] > 3 * moved["anchor_pass"]["flops"] > 0 and found["bytes_per_decoded_token"] > 0
  assert 0 < found["planned"] < 2 * found["hbm"]
  assert_nothing_large_moves(tmp_path, 4, 2)


@pytest.mark.multi_device
def test_what_does_not_fit_exits_with_1_and_names_the_largest_arrays(capsys):
  assert run(*TINY, *AUTO, "--programs=anchor_pass", "--hbm_gib=0.0001") == 1
  printed = capsys.readouterr().out
  assert "anchor_pass DOES NOT FIT" in printed and "largest arrays" in printed and "f32[" in printed
  assert run(*TINY, "--programs=anchor_pass", "--hbm_gib=0.01") == 0


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("--topology=v9:4x4",), r"--topology=v9:4x4 is not understood.*v5e, v5p, v6e"),
    (("--topology=cpu:0",), "--topology=cpu:0 is not understood"),
    (("--topology=cpu:64",), "needs 64 simulated devices.*start another"),
    (("--mesh=fsdp:3",), "--mesh=fsdp:3 does not fit 8 devices"),
    (("--arch=qwen2.5-2b",), r"Architecture 'qwen2.5-2b' is unknown. Did you mean qwen2.5-32b|Did you mean"),
    (("--programs=train",), "Program 'train' is unknown.*train_step"),
    (("--micro_tokens=64",), "--micro_tokens=64 makes the number of forwards depend"),
    (("--max_new_tokens=8192",), "exceeds the 4096 positions of tiny"),
    (("--hbm_gib=-1",), "--hbm_gib=-1.0 must be"),
    (("--kl_coef=0", "--programs=anchor_pass"), "has none of --programs=anchor_pass"),
  ],
)
def test_what_cannot_be_compiled_is_refused(arguments, message):
  with pytest.raises(ValueError, match=f"(?s){message}"):
    run(*TINY, *arguments)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"pip install -r requirements-tpu\.txt"):
    chips.topology("v5e:2x2")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_topology(tmp_path):
  """In a process of its own: libtpu ends one whose XLA_FLAGS it doesn't know."""
  env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}

  def command(*arguments):
    line = [sys.executable, "-m", "experiments.compile_check", *TINY, *arguments]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)

  done = command("--topology=v5e:4x2", f"--hlo={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert "8 × TPU v5e" in done.stdout and "15.75 GiB a chip can be used" in done.stdout and "197 TFLOP/s" in done.stdout
  assert_nothing_large_moves(tmp_path, 4, 2)
  part_of_an_axis = command("--topology=v6e:4x4", "--mesh=fsdp:8,tensor:2", "--programs=rollout_weights", *AUTO)
  assert part_of_an_axis.returncode == 0, part_of_an_axis.stderr
  refused = command("--topology=v5e:3x5")
  assert refused.returncode == 1 and "--topology=v5e:3x5 is refused by libtpu" in refused.stderr
