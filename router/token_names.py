"""What each token of a vocabulary reads as on its own, for log-probabilities; asked for once, off the event loop.

The names go with the tokenizer that gave them: a model that is served from another folder has other names.
"""

from collections.abc import Iterable
from itertools import islice
from weakref import WeakKeyDictionary

from router.call import TokenName, TokenReader
from router.tokenizer_pool import TokenizerPool

_MAX_TOKEN_NAMES = 65_536
"""Names that are kept of each tokenizer."""


class TokenNames:
    """Names of tokens, by tokenizer. Owned by the event loop."""

    def __init__(self, pool: TokenizerPool) -> None:
        self._pool = pool
        self._kept: WeakKeyDictionary[TokenReader, dict[int, TokenName]] = WeakKeyDictionary()

    async def of(self, tokenizer: TokenReader, token_ids: Iterable[int]) -> dict[int, TokenName]:
        """Return the name of each token id."""
        kept = self._kept.setdefault(tokenizer, {})
        wanted = set(token_ids)
        known = {token_id: kept[token_id] for token_id in wanted if token_id in kept}
        missing = sorted(wanted - known.keys())
        if not missing:
            return known
        found = await self._pool.run(_read_names, tokenizer, missing)
        if len(kept) + len(found) > _MAX_TOKEN_NAMES:  # others may have added theirs meanwhile
            kept.clear()
        kept.update(islice(found.items(), _MAX_TOKEN_NAMES))
        return known | found


def _read_names(tokenizer: TokenReader, token_ids: Iterable[int]) -> dict[int, TokenName]:
    return {token_id: tokenizer.token_name(token_id) for token_id in token_ids}
