"""Token ids to text as they come: whole characters only, and nothing that may yet turn out to be a stop string.

The emitted text is a pure function of the tokens so far, so that a request goes on elsewhere exactly where it was.
Every character costs the same, however long the text: UTF-8 is decoded incrementally, and each stop string keeps how
much of itself the text's end matches (Knuth, Morris and Pratt 1977).

What is no UTF-8 becomes U+FFFD as in Python, one for each part that could have begun a character. `Tokenizer.decode`
has one for each byte of a run of byte tokens that is not all UTF-8, which is not known before the run ends.
"""

import codecs
from collections.abc import Sequence

from workers.tokenizer import TokenTable

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that go on with a character: any other byte begins anew, whatever came before."""


class IncrementalDetokenizer:
    """The text of one request. After a stop string is found, nothing more is to be pushed."""

    def __init__(
        self,
        table: TokenTable,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """The text goes on where that of the prompt ends: a character that ends in the output is a part of it. A stop
        string that is complete before `min_tokens` tokens does not count.
        """
        self._table = table
        self._piece = table.shown_piece if skip_special_tokens else table.piece
        self._texts = table.texts(skips_special=skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_first = not any(map(self._piece, prompt_token_ids))
        start = self._find_whole_character(prompt_token_ids)
        self._decoder.decode(b"".join(map(self._piece, prompt_token_ids[start:])))
        self._is_plain = False
        """Whether the text has begun and ends with a whole character, as far as is known."""
        self._stops = [_StopString(text) for text in stop]
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that became certain with it."""
        self._num_tokens += 1
        known = self._texts[token_id] if self._is_plain else None
        text = self._decode(token_id) if known is None else known
        return self._search(text) if self._stops else text

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that come before the first one pushed; others have their text.

        It does what a `push` of each would, up to the first stop string, at a small part of the price: a request with
        thousands of tokens may come from another replica, and dozens of them at once.
        """
        if not self._stops:
            start = self._find_whole_character(token_ids)
            self._decode_all(token_ids[start:])
            return
        num_early = max(0, self._min_tokens - 1)
        early = self._decode_all(token_ids[:num_early])
        text = early + self._decode_all(token_ids[num_early:])
        self._num_tokens = len(token_ids)
        self.stop_string = self._find_stop(text, len(early))
        if self.stop_string is None:
            for stop in self._stops:
                for char in text[max(0, len(text) + 1 - len(stop.text)) :]:
                    stop.advance(char)
            num_held = max(stop.num_matched for stop in self._stops)
            self._held = text[len(text) - num_held :]

    def flush(self) -> str:
        """Return what was held back, now that no more tokens come. A cut character becomes U+FFFD, as in `decode`."""
        held, self._held = self._held, ""
        if self.stop_string is not None:
            return ""
        return held + self._decoder.decode(b"", final=True)

    def _decode(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if self._is_first and piece:
            self._is_first = False
            piece = self._table.first_piece(token_id)
        text = self._decoder.decode(piece)
        held, _ = self._decoder.getstate()
        self._is_plain = not self._is_first and not held
        return text

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        pieces = {token_id: self._piece(token_id) for token_id in set(token_ids)}
        num_done, text = 0, ""
        while self._is_first and num_done < len(token_ids):
            text += self._decode(token_ids[num_done])
            num_done += 1
        self._is_plain = False
        return text + self._decoder.decode(b"".join(map(pieces.__getitem__, token_ids[num_done:])))

    def _find_whole_character(self, token_ids: Sequence[int]) -> int:
        """Return the token from which on the bytes tell what a decoder of them all holds back: the last that begins a
        character, or a wrong one, somewhere in it; 0 when there is none.
        """
        starts = (i for i in range(len(token_ids) - 1, 0, -1) if self._piece(token_ids[i]).strip(_CONTINUATION_BYTES))
        return next(starts, 0)

    def _find_stop(self, text: str, num_early: int) -> str | None:
        """Return the stop string complete first after `num_early` characters, of several at once the longest."""
        found = []
        for stop in self._stops:
            place = text.find(stop.text, max(0, num_early + 1 - len(stop.text)))
            if place >= 0:
                found.append((place + len(stop.text), -len(stop.text), stop.text))
        return min(found)[2] if found else None

    def _search(self, text: str) -> str:
        """Walk the new characters; the stop string complete first wins, of those complete together the longest."""
        counts = self._num_tokens >= self._min_tokens
        for index, char in enumerate(text):
            complete = [stop for stop in self._stops if stop.advance(char)]
            if complete and counts:
                stop = max(complete, key=lambda stop: len(stop.text))
                return self._end(self._held + text[: index + 1], stop.text)
        text = self._held + text
        num_held = max(stop.num_matched for stop in self._stops)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]

    def _end(self, text: str, stop: str) -> str:
        self.stop_string = stop
        return text if self._include_stop_str else text[: len(text) - len(stop)]


class _StopString:
    """How many of a stop string's leading characters the text ends with: fewer than all."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _fallbacks(text)

    def advance(self, char: str) -> bool:
        """Take the next character of the text; True when the stop string is complete with it."""
        matched = self.num_matched
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        if self.text[matched] == char:
            matched += 1
        if matched < len(self.text):
            self.num_matched = matched
            return False
        self.num_matched = self._fallback[matched]
        return True


def _fallbacks(text: str) -> list[int]:
    """For each length n, the longest proper prefix of text[:n] that is also its suffix."""
    fallback = [0, 0]
    for length in range(1, len(text)):
        matched = fallback[length]
        while matched and text[matched] != text[length]:
            matched = fallback[matched]
        fallback.append(matched + 1 if text[matched] == text[length] else 0)
    return fallback
