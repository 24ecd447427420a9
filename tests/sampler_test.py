"""Sequences through slots: against the trainer's own scoring, whatever the slots, blocks, chunks and neighbours; stops and limits."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emapg_jax import sharding, streams
from emapg_jax.models import decoder
from emapg_jax.rollout import sampler
from emapg_jax.rollout import slots as device_slots
from emapg_jax.rollout.draw import Sampling
from emapg_jax.rollout.layout import Layout
from emapg_jax.rollout.sampler import Sampler
from emapg_jax.rollout.stop import StopStrings
from emapg_jax.token_stats import token_stats

CONFIG = decoder.DecoderConfig(
  vocab_size=16, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
EOS, PAD, PROMPT, NEW, ROWS = (3, 5), 5, 8, 12, 24  # the pad id is one of the end ids: masks must not look at token values
PARAMS = decoder.init_params(CONFIG, jax.random.key(0))
WARM = Sampling(temperature=0.7)
# Slots, samples of a prompt, decode block and prefill chunk: all at once; refilled; refilled at every turn, by groups.
LAYOUTS = {"one fill": (24, 1, 32, 512), "refilled": (7, 1, 5, 3), "groups": (5, 4, 1, 8)}


def letters(ids):
  """The text of token ids: a letter each, without the end ids."""
  return "".join(chr(97 + int(i)) for i in ids if int(i) not in EOS)


@functools.cache
def make(slots=24, group=1, block=32, chunk=512, eos=EOS, stop=(), new=NEW, config=CONFIG, prompt=PROMPT):
  return Sampler(
    config,
    **{"slots": slots, "group": group, "block": block, "chunk": chunk, "max_prompt_tokens": prompt, "max_new_tokens": new},
    **{"eos_ids": eos, "pad_id": PAD, "stop": StopStrings(letters, stop) if stop else None},
  )


@functools.cache
def weights():
  return make().prepare(PARAMS)


def prompts(count=ROWS):
  rng = np.random.default_rng(1)
  return [rng.integers(0, 16, n).tolist() for n in rng.integers(1, PROMPT + 1, count)]


def keys_for(rows=ROWS, step=1):
  return streams.row_keys(0, streams.ROLLOUT, step, np.arange(rows), np.zeros(rows, int))


def generate(made, sampling=WARM, count=ROWS, **changes):
  return made.generate(
    weights(), **{"prompts": prompts(count), "owner": np.arange(count), "keys": keys_for(count)} | changes, sampling=sampling
  )


@functools.cache
def full_forward(temperature, topk=0):
  def score(tokens, lengths, responses, ids=None):
    before = lengths[:, None] - 1 + jnp.arange(responses.shape[1])[None, :]
    hidden = jnp.take_along_axis(decoder.apply(CONFIG, PARAMS, tokens), before[..., None], axis=1)
    return token_stats(hidden, decoder.unembedding(PARAMS), responses, topk_ids=ids, topk=topk, temperature=temperature)

  return jax.jit(score)


def scored(out, temperature, ids=None, given=None):
  """What the trainer says of the sampled tokens."""
  given = given or prompts()
  tokens = np.zeros((len(given), PROMPT + NEW), np.int32)
  for row, prompt, response in zip(tokens, given, out.tokens):
    row[: len(prompt) + NEW] = [*prompt, *response]
  return jax.device_get(full_forward(temperature)(tokens, np.asarray([len(p) for p in given]), out.tokens, ids))


def inside(out):
  return np.arange(out.tokens.shape[1]) < out.length[:, None]


def assert_same(found, expected, rows=slice(None)):
  """Ids and reasons equal, log-probabilities to rounding."""
  for name in ("tokens", "length", "reason"):
    np.testing.assert_array_equal(getattr(found, name), getattr(expected, name)[rows], name)
  for name in ("logp", "sampling_logp"):
    np.testing.assert_allclose(getattr(found, name), getattr(expected, name)[rows], atol=1e-5)


@functools.cache
def reference():
  return generate(make())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_decoding_equal_the_full_forward(layout):
  made = make(*LAYOUTS[layout])
  out = generate(made, Sampling(temperature=0.7, report_topk=16))
  # All 16 log-probabilities at every position, and those of the tokens.
  stats = scored(out, 0.7, out.topk_ids)
  real = inside(out)
  np.testing.assert_allclose(out.topk_logp[real], stats.logp_topk[real], atol=1e-5)
  np.testing.assert_allclose(out.logp[real], stats.logp[real], atol=1e-5)
  np.testing.assert_array_equal(np.sort(out.topk_ids[real]), np.tile(np.arange(16), (real.sum(), 1)))
  assert np.all(np.diff(out.topk_logp[real]) <= 0)
  for array in (out.logp, out.sampling_logp, out.topk_logp, out.topk_ids):
    assert not array[~real].any()
  assert np.all(out.tokens[~real] == PAD)
  assert_same(out, reference())


def test_ends():
  out = reference()
  assert len(set(out.length.tolist())) > 3, "rows of different length are what this test is about"
  assert out.length.min() < 4 and out.length.max() == NEW, "a row that ends does not end the others"
  for ids, length, reason in zip(out.tokens, out.length, out.reason):
    first = next((i for i, token in enumerate(ids[:length]) if token in EOS), None)
    # An end id is kept, once; without one the row is full.
    assert (first, reason) == (length - 1, "eos") if reason != "length" else first is None and length == NEW
  assert set(out.reason) == {"eos", "length"}


@pytest.mark.parametrize("slots_", [24, 3])
def test_draws_depend_on_the_sequence_alone(slots_):
  order, expected, given = np.random.default_rng(0).permutation(ROWS), reference(), prompts()
  made = make(slots_, block=5)
  assert_same(generate(made, owner=order, keys=keys_for()[order]), expected, order)
  assert_same(generate(made, prompts=given[7:8], owner=np.array([0]), keys=keys_for()[7:8]), expected, slice(7, 8))
  # The same sequence with other company: its prompt is there twice, and is sampled by others as well.
  owner = np.array([9, 2, 9, 9, 4, 2])
  mixed = generate(made, owner=owner, keys=keys_for(30)[np.array([9, 2, 28, 29, 4, 27])])
  same = np.array([0, 1, 4])
  for name in ("tokens", "length", "reason"):
    np.testing.assert_array_equal(getattr(mixed, name)[same], getattr(expected, name)[owner[same]])
  assert not np.array_equal(mixed.tokens[0], mixed.tokens[2])


def test_other_step_sample_or_seed_draws_otherwise():
  base = jax.random.key_data(streams.row_keys(0, streams.ROLLOUT, 1, np.array([7]), np.array([0])))
  others = [
    streams.row_keys(1, streams.ROLLOUT, 1, np.array([7]), np.array([0])),
    streams.row_keys(0, streams.EVAL, 1, np.array([7]), np.array([0])),
    streams.row_keys(0, streams.ROLLOUT, 2, np.array([7]), np.array([0])),
    streams.row_keys(0, streams.ROLLOUT, 1, np.array([8]), np.array([0])),
    streams.row_keys(0, streams.ROLLOUT, 1, np.array([7]), np.array([1])),
  ]
  assert all(np.any(np.asarray(jax.random.key_data(other)) != np.asarray(base)) for other in others)


def test_the_prompt_of_a_group_is_prefilled_once(monkeypatch):
  owner, calls = np.append(np.repeat(np.arange(6), 4), [0] * 4), []  # the first is asked for again at the end
  made, given = make(8, group=4, chunk=3), prompts(6)

  def prefill(params, cache, tokens, start, prefill=made._prefill):
    calls.append((start.tolist(), tokens.tolist()))
    return prefill(params, cache, tokens, start)

  monkeypatch.setattr(made, "_prefill", prefill)
  keys = keys_for(28)
  out = generate(made, prompts=given, owner=owner, keys=keys)
  # 8 slots for groups of 4: 2 prompts at a time, read to the end of the longer, 3 tokens a call, 2 in the last of a width of 8.
  expected = []
  for pair in (given[:2], given[2:4], given[4:]):
    padded = [prompt + [PAD] * (PROMPT - len(prompt)) for prompt in pair]
    expected += [([start] * 2, [row[start : start + 3] for row in padded]) for start in range(0, max(map(len, pair)), 3)]
  assert calls == expected
  assert_same(out, generate(make(), prompts=[given[i] for i in owner], owner=np.arange(28), keys=keys))


def test_prompts_of_several_buckets_through_one_sampler():
  """Caches of 16, 40 and 32 prompt tokens, made anew in each call, against one of 40 that all sequences go through."""
  rng, counts = np.random.default_rng(2), []
  calls = [[rng.integers(0, 16, n).tolist() for n in lengths] for lengths in ((10, 1, 7), (40, 10, 33), (4, 20, 17))]
  calls.append(calls[0])
  config = dataclasses.replace(CONFIG, num_layers=1)
  params, keys = device_slots.prepare(config, decoder.init_params(config, jax.random.key(0))), keys_for(12)
  made = make(2, block=5, chunk=12, prompt=40, config=config)
  whole = make(12, prompt=40, config=config).generate(params, list(itertools.chain(*calls)), np.arange(12), keys, WARM)
  assert len(set(whole.length.tolist())) > 3
  for i, given in enumerate(calls):
    rows = slice(3 * i, 3 * i + 3)
    assert_same(made.generate(params, given, np.arange(3), keys[rows], WARM), whole, rows)
    counts.append([getattr(made, name)._cache_size() for name in ("_decode", "_insert", "_prefill")])
  # 40 tokens are read by 12, 12, 12 and 4, those of the other calls by 12 alone.
  assert counts == [[1, 1, 1], [2, 2, 3], [3, 3, 4], [3, 3, 4]]


@pytest.mark.parametrize("rubbish", [1e4, float("nan")])
def test_what_lies_in_the_cache_has_no_effect(rubbish, monkeypatch):
  """In slots and in prefilled prompts: what nothing has written yet, and so what earlier sequences left behind."""
  clean = decoder.empty_cache
  monkeypatch.setattr(decoder, "empty_cache", lambda *args: jax.tree.map(lambda x: jnp.full_like(x, rubbish), clean(*args)))
  assert_same(generate(make.__wrapped__(5, 2, 4, 3)), reference())


def test_only_what_is_visible_is_read(monkeypatch):
  monkeypatch.setattr(sampler, "_VISIBLE", 1)
  made = make.__wrapped__(9, block=2)
  asked = []
  monkeypatch.setattr(made, "_decode", lambda *args, decode=made._decode, **named: asked.append(named["visible"]) or decode(*args, **named))
  assert_same(generate(made), reference())
  assert set(asked) == {16, PROMPT + NEW}


def test_greedy_is_the_argmax_of_the_full_forward():
  out = generate(make(), Sampling(temperature=0.0))
  tokens = np.zeros((ROWS, PROMPT + NEW), np.int32)
  for row, prompt, response in zip(tokens, prompts(), out.tokens):
    row[: len(prompt) + NEW] = [*prompt, *response]
  before = np.asarray([len(p) for p in prompts()])[:, None] - 1 + np.arange(NEW)
  hidden = jnp.take_along_axis(decoder.apply(CONFIG, PARAMS, tokens), before[..., None], axis=1)
  best = np.asarray(jnp.argmax(hidden @ decoder.unembedding(PARAMS), axis=-1))
  np.testing.assert_array_equal(out.tokens[inside(out)], best[inside(out)])
  np.testing.assert_allclose(out.logp[inside(out)], scored(out, 1.0).logp[inside(out)], atol=1e-5)
  np.testing.assert_array_equal(out.logp, out.sampling_logp)


def test_first_tokens_follow_the_softmax():
  count = 4000
  given, keys = prompts()[:1], keys_for(count)
  out = make(500, new=1).generate(weights(), given, np.zeros(count, int), keys, Sampling())
  stats = scored(generate(make(), Sampling(report_topk=16)), 1.0, np.tile(np.arange(16, dtype=np.int32), (ROWS, NEW, 1)))
  expected = count * np.exp(stats.logp_topk[0, 0].astype(np.float64))
  assert expected.min() > 5
  statistic = np.sum((np.bincount(out.tokens[:, 0], minlength=16) - expected) ** 2 / expected)
  # Chi-square of 15 degrees of freedom: mean 15, standard deviation √30; 5 of them above.
  assert statistic < 15 + 5 * np.sqrt(30)
  assert set(out.reason) == {"eos", "length"}


def test_truncated_draws_have_two_log_probabilities():
  out = generate(make(), Sampling(temperature=0.7, top_k=3, report_topk=3))
  real = inside(out)
  np.testing.assert_allclose(out.logp[real], scored(out, 0.7).logp[real], atol=1e-5)
  assert np.all(np.any(out.tokens[real][:, None] == out.topk_ids[real], axis=1))
  kept = jax.nn.logsumexp(out.topk_logp[real], axis=1)
  np.testing.assert_allclose(out.sampling_logp[real], out.logp[real] - kept, atol=1e-5)
  assert np.all(out.sampling_logp[real] > out.logp[real])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stop_strings(layout):
  strings = ("nb", "a")
  plain, made = reference(), make(*LAYOUTS[layout], stop=strings)
  out = generate(made)
  kinds = set()
  for row, (ids, length) in enumerate(zip(plain.tokens, plain.length)):
    first = next((n for n in range(1, length + 1) if any(string in letters(ids[:n]) for string in strings)), None)
    assert (out.length[row], out.reason[row]) == ((first, "stop") if first else (length, plain.reason[row]))
    np.testing.assert_array_equal(out.tokens[row, : out.length[row]], ids[: out.length[row]])
    np.testing.assert_allclose(out.logp[row], np.where(np.arange(NEW) < out.length[row], plain.logp[row], 0), atol=1e-5)
    kinds.add(out.reason[row])
  assert kinds == {"eos", "stop", "length"}
  assert np.all(out.tokens[~inside(out)] == PAD)


def test_limits_and_a_full_context():
  limits = np.resize([0, 1, 5, NEW], ROWS)
  plain, out = reference(), generate(make(7, block=3), limits=limits)
  np.testing.assert_array_equal(out.length, np.minimum(plain.length, limits))
  short = dataclasses.replace(CONFIG, max_positions=14)
  full = make(7, block=3, config=short)
  # Prompt and response share 14 positions: what lies within them is as before, and nothing is overwritten.
  out = generate(full)
  room = 14 - np.asarray([len(p) for p in prompts()])
  assert room.min() < NEW
  np.testing.assert_array_equal(out.length, np.minimum(plain.length, room))
  for row in range(ROWS):
    np.testing.assert_array_equal(out.tokens[row, : out.length[row]], plain.tokens[row, : out.length[row]])
    assert out.reason[row] == (plain.reason[row] if plain.length[row] <= room[row] else "length")
  none = make(2, config=dataclasses.replace(CONFIG, max_positions=PROMPT)).generate(
    weights(), [[1] * PROMPT], np.zeros(1, int), keys_for(1), WARM
  )
  assert (none.length.tolist(), none.reason.tolist()) == ([0], ["length"])


def test_no_sequence_at_all():
  out = make().generate(weights(), [], np.zeros(0, int), keys_for(0), WARM)
  assert out.tokens.shape == (0, NEW)


def test_compiles_once_per_shape():
  made, functions = make.__wrapped__(7, block=5, chunk=4), ("_empty_slots", "_empty_prompts", "_prefill", "_insert", "_decode")
  counts = []
  for step, rows in enumerate((24, 5, 17)):
    generate(made, count=rows, keys=keys_for(rows, step), limits=np.resize([1, 4, 9], rows))
    counts.append([getattr(made, name)._cache_size() for name in functions])
  assert counts == [[1] * 5] * 3


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"prompts": [[1] * 9], "owner": np.zeros(1, int), "keys": keys_for(1)}, r"9 to 9 tokens, but this sampler takes 1 to 8"),
    ({"prompts": [[]], "owner": np.zeros(1, int), "keys": keys_for(1)}, r"0 to 0 tokens"),
    ({"owner": np.array([24]), "keys": keys_for(1)}, r"prompt index from 0 to 23"),
    ({"owner": np.array([-1]), "keys": keys_for(1)}, r"prompt index from 0 to 23"),
    ({"keys": keys_for(3)}, r"owners int64 of shape \(24,\) and keys of shape \(3,\)"),
    ({"limits": np.full(ROWS, 13)}, r"13 to 13 tokens: they must lie in 0 to 12"),
  ],
)
def test_bad_input(changes, text):
  with pytest.raises(ValueError, match=text):
    generate(make(), **changes)


@pytest.mark.parametrize("changes", [{"slots": 0}, {"group": 0}, {"block": 0}, {"chunk": 0}, {"new": 0}])
def test_bad_settings(changes):
  with pytest.raises(ValueError, match="must be at least 1, got 0"):
    make(**changes)


def test_slots_that_do_not_divide():
  layout = Layout(sharding.make_mesh("data:2,tensor:2", jax.devices()[:4]))
  with pytest.raises(ValueError, match="9 slots can't be laid out over 4 devices"):
    Sampler(CONFIG, slots=9, layout=layout, max_prompt_tokens=1, max_new_tokens=1, eos_ids=EOS, pad_id=PAD)
