"""Stop strings against their definition: the smallest n for which the text of the first n tokens contains one."""

import functools
import pathlib
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from emapg_jax.envs.embedded import AddTask, BetweenTask
from emapg_jax.models.tokenizer import ChatTokenizer
from emapg_jax.rollout.stop import StopStrings

DATA = pathlib.Path(__file__).parent / "data"
# One to four bytes a character; combining accent and joined emoji are several characters each.
TEXT = "a b. ab\n\naé  bé 你好 a你 , 🙂b 👩‍🚀.\n</ab> é . a, b!"
# Ids of the byte-level toy: pieces of characters, alone and stuck to whole ones; one empty, as a dropped special token; one never valid.
PIECES = (b"a", b"b", b"ab", b" ", b"  a", b"\n", b"\xc3", b"\xa9", b"b\xc3", b"\xa9 ", b"\xe4", b"\xbd", b"\xa0", b"\xe4\xbd", b"\xa0b")
PIECES += (b"a\xe4", b"\xf0\x9f", b"\x99", b"\x82", b"\xff", b"", b" .", b".", b"\xef\xbf\xbd")


def brute_force(decode, ids, strings):
  return next((n for n in range(1, len(ids) + 1) if any(string in decode(ids[:n]) for string in strings)), None)


def in_blocks(stop, ids, blocks):
  """What a sampler finds that looks after blocks of these lengths, used in turn."""
  searched, turn = 0, 0
  while searched < len(ids):
    end = min(len(ids), searched + blocks[turn % len(blocks)])
    found = stop.find(np.asarray(ids[:end], np.int32), searched)
    if found is not None:
      return found
    searched, turn = end, turn + 1
  return None


def decode_pieces(ids):
  return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")


def decode_cleaned(ids):
  text = decode_pieces(ids)  # as transformers cleans up: what was at the end of a text may be gone from a longer one
  return text.replace(" .", ".").replace(" ,", ",")


@functools.cache
def byte_level():
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
  tokenizer.train_from_iterator([TEXT] * 3, trainer)
  return tokenizer


@functools.cache
def sentence_piece():
  """As in Llama: pieces that begin with ▁, bytes for the rest, the first space of a text stripped."""
  pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "a", "b", "ab", "▁b", ".", ",", "▁.", "好", "▁▁", "</"]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "."), ("▁", "▁")]
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
  )
  tokenizer.add_special_tokens(["</s>"])
  return tokenizer


@functools.cache
def word_piece():
  pieces = ["[UNK]", "a", "b", "##a", "##b", "##ab", ".", "##.", ",", "ab"]
  tokenizer = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
  tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
  return tokenizer


DECODERS = {
  "pieces": (len(PIECES), decode_pieces),
  "cleaned": (len(PIECES), decode_cleaned),
  "byte_level": (byte_level().get_vocab_size(), byte_level().decode),
  "sentence_piece": (sentence_piece().get_vocab_size(), sentence_piece().decode),
  "word_piece": (word_piece().get_vocab_size(), word_piece().decode),
}
ENCODERS = {"byte_level": lambda text: byte_level().encode(text).ids, "sentence_piece": lambda text: sentence_piece().encode(text).ids}


@st.composite
def responses(draw, name):
  """(ids, stop strings): random ids, between them texts as the tokenizer writes them; strings cut from their text, or from TEXT."""
  vocab, decode = DECODERS[name]
  part = st.lists(st.integers(0, vocab - 1), max_size=12)
  if name in ENCODERS:
    part |= st.text(alphabet=sorted(set(TEXT)), max_size=8).map(ENCODERS[name])
  ids = [i for some in draw(st.lists(part, max_size=12)) for i in some]
  text = decode(ids)
  strings = []
  for _ in range(draw(st.integers(1, 3))):
    source = draw(st.sampled_from([text, text[-9:], decode(ids[: draw(st.integers(0, len(ids)))])[-9:], TEXT]))
    begin = draw(st.integers(0, max(0, len(source) - 1)))
    strings.append(source[begin : begin + draw(st.integers(1, 6))])
  keep = [s for s in strings if s and "\ufffd" not in s]
  keep = [s for i, s in enumerate(keep) if s not in keep[:i] and not any(other != s and other in s for other in keep)]
  return ids, keep


@pytest.mark.parametrize("name", DECODERS)
def test_is_the_smallest_prefix_whose_text_has_a_string(name):
  decode = DECODERS[name][1]

  @settings(max_examples=150, deadline=None, derandomize=True, database=None)
  @given(responses(name), st.lists(st.integers(1, 9), min_size=1, max_size=3))
  def check(response, blocks):
    ids, strings = response
    assume(strings)
    expected = brute_force(decode, ids, strings)
    stop = StopStrings(decode, strings)
    assert in_blocks(stop, ids, blocks) == expected
    assert stop.find(ids) == expected

  check()


@pytest.mark.parametrize("name", DECODERS)
def test_a_long_response_is_searched_at_its_end_only(name):
  vocab, decode = DECODERS[name]
  read = []

  def counting(ids):
    read.append(len(ids))
    return decode(ids)

  rng = np.random.default_rng(0)
  word = ENCODERS.get(name, lambda text: [1, 2])("ab")
  ids = [*(int(i) for i in rng.integers(0, vocab, 300)), *(word * 1000)][:1000]
  stop = StopStrings(counting, ["never there"])
  assert stop.find(ids, len(ids) - 32) is None
  # 32 new ones, and before them 19 characters of text, twice (or four times, while the width is doubled).
  assert sum(read) <= 32 + 19 + 19 + 38 + 76 and len(read) <= 4


def test_spans_tokens_ends_inside_one_and_is_made_of_bytes():
  def find(pieces, *strings):
    return StopStrings(decode_pieces, strings).find([PIECES.index(piece) for piece in pieces])

  assert find([b"a", b"b", b"a"], "ab") == 2  # spans two
  assert find([b"b", b"  a", b"b"], "b ") == 2  # ends inside the second, which stays whole
  assert find([b"a\xe4", b"\xbd", b"\xa0b", b"a"], "a你") == 3  # its last byte comes with more text
  assert find([b"\xf0\x9f", b"\x99", b"\x82"], "🙂") == 3
  assert find([b"\xe4", b"\xff", b"\xef\xbf\xbd"], "a") is None
  assert find([b"a", b"", b"b"], "ab") == 3  # around a token without text
  assert find([b"a", b"b", b"ab"], "bb", "ba") == 3  # "ba" is complete with "ab"


def test_bytes_that_are_spoiled_by_later_ones_have_been_seen():
  # Byte fallback shows a whole run of bytes as U+FFFD while its last character is incomplete. "\n" is complete with the second token, but
  # the text of all four is "a" and three U+FFFD; with the last two bytes of 你 it is there again.
  ids = [sentence_piece().token_to_id(token) for token in ("a", "<0x0A>", "<0xE4>", "<0xBD>")]
  decode = sentence_piece().decode
  assert decode(ids) == "a\ufffd\ufffd\ufffd" and decode(ids[:2]) == "a\n"
  assert StopStrings(decode, ["\n"]).find(ids) == 2
  assert StopStrings(decode, ["\n"]).find(ids[1:]) == 1


def test_the_space_that_is_stripped_at_the_beginning_of_a_text_is_seen_inside_it():
  tokenizer = sentence_piece()
  ids = [tokenizer.token_to_id(token) for token in ["b"] * 200 + ["▁a", "b"]]
  stop = StopStrings(tokenizer.decode, [" a"])
  for searched in (0, 100, 199, 200):
    assert stop.find(ids, searched) == 201
  # At the beginning of a response it is not part of the text, so the string is not there.
  assert stop.find(ids[-2:]) is None
  assert StopStrings(tokenizer.decode, ["ab"]).find(ids[-2:]) == 2


def test_a_window_cut_inside_a_character_misses_nothing():
  # 你 in three tokens, many times; wherever the search begins, the "a" behind it is found, and never a character of the wrong bytes.
  for decode, fragments, letter in (
    (decode_pieces, [PIECES.index(piece) for piece in (b"\xe4", b"\xbd", b"\xa0")], PIECES.index(b"a")),
    (sentence_piece().decode, [sentence_piece().token_to_id(f"<0x{byte}>") for byte in ("E4", "BD", "A0")], 260),
  ):
    ids = fragments * 60 + [letter]
    stop = StopStrings(decode, ["你a"])
    assert [stop.find(ids, searched) for searched in range(150, 181)] == [181] * 31
    assert StopStrings(decode, ["好"]).find(ids, 100) is None


def test_a_character_spoiled_by_bytes_before_the_window_is_not_there():
  # One byte that is no character in front, and the whole run of bytes is U+FFFD; a window that begins behind it shows 你.
  byte = sentence_piece().token_to_id
  ids = [byte("<0xFF>"), *[byte("<0xE4>"), byte("<0xBD>"), byte("<0xA0>")] * 60]
  decode = sentence_piece().decode
  assert decode(ids[100 - 48 :]) == "你" * 43 and "你" not in decode(ids)
  assert StopStrings(decode, ["你你你你"]).find(ids, 100) is None


def test_fragments_cost_a_few_short_decodes():
  calls = []

  def counting(ids):
    calls.append(len(ids))
    return decode_pieces(ids)

  # The window may begin, and the searched part and the new one end, inside a character.
  ids = [PIECES.index(piece) for piece in (b"\xe4", b"\xbd", b"\xa0")] * 100
  stop = StopStrings(counting, ["never"])
  for searched in range(200, 206):
    for end in range(searched + 30, searched + 36):
      calls.clear()
      # 13 characters of 3 tokens: 6, 12, 24, 48 tokens back; then the new ones without their last 0, 1 and 2, until no character is open.
      assert stop.find(ids[:end], searched) is None and len(calls) <= 7


def test_a_decoder_at_the_bounds_of_what_it_may_do():
  # The first token of a part has 8 characters more than inside the whole.
  pieces = ["a", "b", "########a", "########b"]
  word_pieces = decoders.WordPiece(prefix="########", cleanup=False)

  def decode(ids):
    return word_pieces.decode([pieces[i] for i in ids])

  for middle in range(1, 13):
    ids = [0, *[2] * 40, 3, *[2] * middle, 3]
    string = "b" + "a" * middle + "b"
    assert decode(ids) == "a" * 41 + string and decode(ids[-2:]) == "########ab"
    assert StopStrings(decode, [string]).find(ids, len(ids) - 1) == len(ids)

  def erase_spaces(ids):
    return re.sub(" +[.]", ".", decode_pieces(ids))

  # Spaces without number are erased once there is a full stop behind them.
  ids = [PIECES.index(piece) for piece in [b"a", b"b", *[b" "] * 100, b"."]]
  assert StopStrings(erase_spaces, ["ab."]).find(ids, 102) == 103
  assert StopStrings(erase_spaces, ["b "]).find(ids, 0) == 3


def test_special_tokens_that_decode_leaves_out_part_no_string():
  tokenizer = ChatTokenizer(str(DATA / "tiny_llama"))
  end = tokenizer.eos_ids[0]
  one, two = 9, 10  # "1" and "2"
  assert tokenizer.decode([one, end, two]) == "12"
  assert StopStrings(tokenizer.decode, ["12"]).find([two, one, end, end, two, two]) == 5
  # Hundreds of them between the two halves: the window reaches back over all.
  ids = [one] + [end] * 300 + [two]
  assert StopStrings(tokenizer.decode, ["12"]).find(ids, 290) == 302
  qwen2 = ChatTokenizer(str(DATA / "tiny_qwen2"))
  assert StopStrings(qwen2.decode, ["</think>"]).find([5, 9, 6, 10]) == 3  # a special token that is shown


def test_embedded_tasks():
  tokenizer = AddTask().tokenizer
  ids = tokenizer.encode("5 1 8 0 > 0 8 5")
  stop = StopStrings(tokenizer.decode, ["0 > 0", "8 5"])
  assert stop.find(ids) == 6 and stop.find(ids[:5]) is None and stop.find(ids, 5) == 6
  # Symbols are parted by spaces, so those of two tokens never join; but one symbol may contain a string.
  assert StopStrings(tokenizer.decode, ["51"]).find(ids) is None
  between = BetweenTask().tokenizer
  assert StopStrings(between.decode, ["23"]).find(between.encode("2 3 17 123 4")) == 4
  # An end mark is shown only once something follows it.
  ids = [*tokenizer.encode("1 2"), tokenizer.eos_ids[0], *tokenizer.encode("3")]
  assert StopStrings(tokenizer.decode, ["<eos>"]).find(ids) == 4 and StopStrings(tokenizer.decode, ["<eos>"]).find(ids[:3]) is None


def test_only_new_tokens_are_searched_and_bounds_are_checked():
  ids = [PIECES.index(b"a"), PIECES.index(b"b")] * 4
  stop = StopStrings(decode_pieces, ["ba"])
  assert stop.find(ids, 8) is None and stop.find([], 0) is None and stop.find(ids, 2) == 3
  assert StopStrings(lambda ids: 1 / 0, []).find(ids) is None  # nothing to look for, so nothing is decoded
  for searched in (-1, 9):
    with pytest.raises(ValueError, match=rf"between 0 and the 8 tokens of the response, got {searched}\."):
      stop.find(ids, searched)


@pytest.mark.parametrize(
  "strings, message",
  [
    ("abc", "must be a sequence of texts, got 'abc'"),
    (["a", 1], r"must be a sequence of texts, got \['a', 1\]"),
    (["a", ""], r"stop string 1 of \['a', ''\] is empty"),
    (["x\ufffd"], "contains U\\+FFFD"),
    (["\udc80"], "not valid Unicode"),
    (["a", "b", "a"], "stop string 2 .* is there twice"),
    (["<b>a", "a"], "stop string 0 .* contains 'a', which ends the response first"),
    (["\n", "x\n"], "stop string 1 .* contains '\\\\n', which ends the response first"),
  ],
)
def test_refused(strings, message):
  with pytest.raises(ValueError, match=message):
    StopStrings(decode_pieces, strings)
