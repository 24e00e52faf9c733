"""A text as its tokens give it, one piece for each: joined they are the text, as workers/detokenizer.py makes it.

A character that is split over tokens is in the piece of the last of them; the pieces before it are empty. Pure.
"""

import codecs
from collections.abc import Iterable

from router.call import TokenName


class TextPieces:
    """The pieces of one text, from its first token on."""

    def __init__(self, *, skips_special: bool) -> None:
        """`skips_special`: special tokens are not in the text; their pieces are their names all the same."""
        self.offset = 0
        """Where the next piece begins in the text; within a character, where that does."""
        self.is_at_start = True
        """Whether neither the prompt nor a piece has had a text: the space before a first word may be dropped."""
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take_prompt(self, tokens: Iterable[TokenName]) -> None:
        """Go on where a prompt that ends with these tokens does, before the first piece."""
        for token in tokens:
            self.push(token)
        self.offset = 0

    def push(self, token: TokenName, *, is_last: bool = False) -> str:
        """Return the piece of the next token; of the last one with U+FFFD for a character that was cut."""
        if self._skips_special and token.is_special:
            return self._decoder.decode(b"", final=is_last) + token.data.decode(errors="replace")
        data = token.data
        if self.is_at_start and data:
            self.is_at_start = False
            data = data if token.first_data is None else token.first_data
        piece = self._decoder.decode(data, final=is_last)
        self.offset += len(piece)
        return piece

    def peek(self, token: TokenName, *, is_last: bool = False) -> str:
        """Return what the piece would be if this were the next token."""
        offset, is_at_start, state = self.offset, self.is_at_start, self._decoder.getstate()
        piece = self.push(token, is_last=is_last)
        self.offset, self.is_at_start = offset, is_at_start
        self._decoder.setstate(state)
        return piece
