"""What a client sees of token ids that come one by one."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from workers.detokenizer import IncrementalDetokenizer
from workers.tokenizer import TokenTable


def differing_streams(tokenizer: Tokenizer, sequences: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """The streamed and the decoded texts that are not the same, special tokens left out and kept in turn."""
    table = TokenTable(tokenizer)
    pairs = []
    for index, token_ids in enumerate(sequences):
        skip = index % 2 == 0
        detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip)
        streamed = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        pairs.append((streamed, tokenizer.decode(token_ids, skip_special_tokens=skip)))
    return [pair for pair in pairs if pair[0] != pair[1]]
