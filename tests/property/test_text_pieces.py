"""The pieces that log-probabilities tell, against the text that the engine streams: two readings of one tokenizer."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text_pieces import TextPieces
from router.tokenizer import ModelTokenizer
from workers.detokenizer import IncrementalDetokenizer
from workers.tokenizer import TokenTable, load_token_table


@pytest.mark.parametrize("name", ["llama2-32k", "gpt2", "qwen"])
def test_pieces_of_any_tokens_are_the_text_that_goes_on_behind_the_prompt(name: str, shared: Path) -> None:
    folder = shared / "tokenizers" / name
    tokenizer, table = ModelTokenizer.from_folder(folder), load_token_table(folder)
    token_name = cache(tokenizer.token_name)
    ids = _ids(tokenizer, table)

    @settings(max_examples=200, derandomize=True, deadline=None)
    @given(prompt=st.lists(ids, max_size=6), token_ids=st.lists(ids, min_size=1, max_size=12), skips=st.booleans())
    def check(prompt: list[int], token_ids: list[int], skips: bool) -> None:
        detokenizer = IncrementalDetokenizer(table, prompt, skip_special_tokens=skips)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        pieces = TextPieces(skips_special=skips)
        pieces.take_prompt(map(token_name, prompt))
        shown = ""
        for number, token in enumerate(map(token_name, token_ids), start=1):
            piece = pieces.push(token, is_last=number == len(token_ids))
            is_skipped = skips and token.is_special  # its piece is its name all the same
            shown += piece.removesuffix(token.data.decode()) if is_skipped else piece
        assert shown == text

    check()


def _ids(tokenizer: ModelTokenizer, table: TokenTable) -> st.SearchStrategy[int]:
    """Any ids, some beyond the vocabulary; often special ones, and such as are a part of a character."""
    every = range(tokenizer.vocab_size + 3)
    special = [i for i in every if table.is_special(i)]
    parts = [i for i in every if table.texts(skips_special=False)[i] is None]
    return st.one_of(st.sampled_from(every), st.sampled_from(special), st.sampled_from(parts))
