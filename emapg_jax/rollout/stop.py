"""Stop strings: where in the tokens of a response a given text is first complete. Host code, called between blocks of decoding."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet one
_SLACK = 8  # characters by which the first token of a part may differ from the same token inside the whole


def _checked(strings: Sequence[str]) -> tuple[str, ...]:
  if isinstance(strings, str) or not all(isinstance(string, str) for string in strings):
    raise ValueError(f"stop strings must be a sequence of texts, got {strings!r}. Put a single one in a tuple.")
  for i, string in enumerate(strings):
    where = f"stop string {i} of {list(strings)!r}"
    if not string:
      raise ValueError(f"{where} is empty, so every response would end before its first token: leave it out.")
    try:
      string.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(f"{where} is not valid Unicode ({error}), so no tokens can spell it: write it in UTF-8.") from error
    if _REPLACEMENT in string:
      raise ValueError(
        f"{where} contains U+FFFD, which only stands for bytes that are not a whole character yet, so it would end a response inside a "
        "character. Take it out."
      )
    if string in strings[:i]:
      raise ValueError(f"{where} is there twice: leave one out.")
    inner = next((other for other in strings if other and other != string and other in string), None)
    if inner is not None:
      raise ValueError(f"{where} has no effect, because it contains {inner!r}, which ends the response first: leave one of them out.")
  return tuple(strings)


class StopStrings:
  """Finds the first token of a response with which one of the given texts is complete.

  A response of ids ends at the smallest n for which decode(ids[:n]) contains one of the texts: they may span tokens, end inside one, be
  made of tokens that each hold a part of a character, or lie around tokens that `decode` leaves out. Ids are kept as sampled: token n - 1
  stays whole, with whatever text it has behind the stop string.

  `decode` may show one token differently in different company, within these bounds. The text of ids[:n] begins with the text of each
  shorter ids[:m], apart from spaces (an erased space before a full stop, say) and from U+FFFD in place of characters that are incomplete.
  The text of ids[m:n] is how the text of ids[:n] ends, apart from spaces and 8 other characters at its beginning, and from U+FFFD there,
  if m falls within a character. Byte-level, SentencePiece (byte fallback included) and WordPiece decoders keep to them.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]):
    """Binds the texts to a decoder.

    Args:
      decode: text of token ids, as the response will be read when it is scored.
      strings: the texts; none: nothing is ever found.

    Raises:
      ValueError: if a text is empty, not Unicode, contains U+FFFD, or can never be the first: a duplicate, or one around another.
    """
    self._decode = decode
    self.strings = _checked(strings)
    self._squeezed = tuple(string.replace(" ", "") for string in self.strings)
    self._reach = max(map(len, self.strings), default=0) + _SLACK

  def find(self, ids: Sequence[int], searched: int = 0) -> int | None:
    """How many tokens to keep, the last of them the one that completes a stop string; None if there is no stop string yet.

    The cost is that of decoding the new tokens and a few before them twice, however long the response is; a response is decoded whole
    only to confirm what was found.

    Args:
      ids: every token of the response so far, a list or an integer array [n].
      searched: number of tokens at its beginning for which earlier calls have returned None.

    Returns:
      n in (searched, len(ids)], or None.
    """
    if not 0 <= searched <= len(ids):
      raise ValueError(f"searched must be between 0 and the {len(ids)} tokens of the response, got {searched}.")
    if not self.strings or searched == len(ids):
      return None
    start, before = self._window(ids, searched)
    window = [int(i) for i in ids[start:]]
    if not self._may_hold(window, searched - start, before):
      return None
    for width in range(searched - start + 1, len(window) + 1):
      # The window may show a character that the bytes before it spoil, so the whole response has the last word.
      if self._holds(window[:width]) and self._holds(ids[: start + width]):
        return start + width
    return None

  def _text(self, ids: Sequence[int]) -> str:
    return self._decode([int(i) for i in ids])

  def _holds(self, ids: Sequence[int]) -> bool:
    text = self._text(ids)
    return any(string in text for string in self.strings)

  def _window(self, ids: Sequence[int], searched: int) -> tuple[int, str]:
    """(start, text of ids[start:searched]): far enough back for the longest string to begin there and be shown as in the whole."""
    width = self._reach // 2  # tokens; the text of most has two characters or more
    while True:
      start = max(0, searched - width)
      before = self._text(ids[start:searched])
      # Spaces don't count, since a decoder may strip the first; nor leading U+FFFD, since the window may begin inside a character.
      if start == 0 or len(before.lstrip(_REPLACEMENT).replace(" ", "")) >= self._reach:
        return start, before
      width *= 2

  def _may_hold(self, window: list[int], searched: int, before: str) -> bool:
    """False only if no window[:n] with n > searched contains a stop string.

    What a shorter window shows, the longest shows too, apart from erased spaces, so those are ignored; and from characters turned back
    into U+FFFD (byte fallback spoils a whole run of bytes while its last character is incomplete): while there are any, shorter ones are
    read.
    """
    settled = before.rstrip(_REPLACEMENT)
    for width in range(len(window), searched, -1):
      text = self._text(window[:width])
      squeezed = text.replace(" ", "")
      if any(string in squeezed for string in self._squeezed):
        return True
      if _REPLACEMENT not in text.removeprefix(settled):
        return False
    return False
