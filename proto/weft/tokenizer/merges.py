"""Byte-pair merges of a vocabulary that does not list them: SentencePiece and tiktoken only rank the results."""

from collections.abc import Iterable, Set


def derive_merges(ranked: Iterable[str], parts: Set[str]) -> list[tuple[str, str]]:
    """Return every pair of `parts` that makes one of the tokens, in the order of the tokens.

    Where the originals merge the adjacent pair whose result ranks first, whatever its halves, a list of merges must
    name each pair of halves.

    Args:
        ranked: the tokens, those that are merged first in front.
        parts: what may be a half.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
