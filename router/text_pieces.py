"""A text as its tokens give it, one piece for each: joined they are the text, as workers/detokenizer.py makes it.

A character that is split over tokens is in the piece of the last of them; the pieces before it are empty. The prompt
is not known here: where it has no text, or ends within a character, the first piece is as if that were not so. Pure.
"""

import codecs

from router.call import TokenName


class TextPieces:
    """The pieces of one text, from its first token on."""

    def __init__(self, *, skips_special: bool) -> None:
        """`skips_special`: special tokens are not in the text; their pieces are their names all the same."""
        self.offset = 0
        """Where the next piece begins in the text; within a character, where that does."""
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: TokenName, *, is_last: bool = False) -> str:
        """Return the piece of the next token; of the last one with U+FFFD for a character that was cut."""
        if self._skips_special and token.is_special:
            return token.data.decode()
        piece = self._decoder.decode(token.data, final=is_last)
        self.offset += len(piece)
        return piece

    def peek(self, token: TokenName, *, is_last: bool = False) -> str:
        """Return what the piece would be if this were the next token."""
        offset, state = self.offset, self._decoder.getstate()
        piece = self.push(token, is_last=is_last)
        self.offset = offset
        self._decoder.setstate(state)
        return piece
