"""What each token adds to a text, and where: joined, the pieces are the text."""

from collections.abc import Sequence

import pytest

from router.call import TokenName
from router.text_pieces import TextPieces

EOS = TokenName(b"<eos>", is_special=True)


WORD = TokenName(b" a", first_data=b"a")


def cut(
    *tokens: TokenName | bytes, prompt: Sequence[TokenName] = (), skips_special: bool = True, is_over: bool = True
) -> list[tuple[str, int]]:
    """Return the pieces and their offsets."""
    pieces = TextPieces(skips_special=skips_special)
    pieces.take_prompt(prompt)
    found = []
    for number, token in enumerate(tokens, start=1):
        offset, name = pieces.offset, token if isinstance(token, TokenName) else TokenName(token)
        found.append((pieces.push(name, is_last=is_over and number == len(tokens)), offset))
    return found


def test_character_is_in_the_piece_of_its_last_token_and_all_of_them_begin_where_it_does() -> None:
    assert cut(b"a\xf0", b"\x9f\x98", b"\x80b", b"c") == [("a", 0), ("", 1), ("😀b", 1), ("c", 3)]


@pytest.mark.parametrize(("is_over", "last"), [(True, "�"), (False, "")])
def test_character_that_is_cut_is_seen_when_the_text_is_over(is_over: bool, last: str) -> None:
    assert cut(b"a", b"\xf0\x9f", is_over=is_over) == [("a", 0), (last, 1)]


def test_character_that_a_special_token_cuts_is_seen_with_its_name() -> None:
    assert cut(b"a", b"\xf0\x9f", EOS) == [("a", 0), ("", 1), ("�<eos>", 1)]
    assert cut(b"a\xf0", EOS, b"\x9f\x98\x80") == [("a", 0), ("<eos>", 1), ("😀", 1)], "it is not in the text"


def test_name_of_a_special_token_may_be_no_text() -> None:
    assert cut(TokenName(b"\xabfin\xbb", is_special=True)) == [("�fin�", 0)]


@pytest.mark.parametrize(("skips_special", "offset"), [(True, 1), (False, 6)])
def test_special_token_has_its_name_whether_it_is_in_the_text_or_not(skips_special: bool, offset: int) -> None:
    assert cut(b"a", EOS, b"b", skips_special=skips_special) == [("a", 0), ("<eos>", 1), ("b", offset)]


@pytest.mark.parametrize(
    ("prompt", "skips_special", "pieces"),
    [
        ([EOS], True, [("a", 0), (" a", 1)]),
        ([EOS], False, [(" a", 0), (" a", 2)]),
        ([WORD, EOS], True, [(" a", 0), (" a", 2)]),
    ],
)
def test_first_word_has_its_space_where_the_prompt_has_a_text(
    prompt: list[TokenName], skips_special: bool, pieces: list[tuple[str, int]]
) -> None:
    assert cut(WORD, WORD, prompt=prompt, skips_special=skips_special) == pieces


def test_character_that_began_in_the_prompt_is_in_the_piece_that_ends_it() -> None:
    prompt = [TokenName(b"\x98\x80\xf0"), EOS, TokenName(b"\x9f")]  # its first token ends a character
    assert cut(b"\x98", b"\x80b", b"c", prompt=prompt) == [("", 0), ("😀b", 0), ("c", 2)]


def test_look_at_another_token_changes_nothing() -> None:
    pieces = TextPieces(skips_special=True)
    pieces.push(TokenName(b"\xf0\x9f\x98"))
    assert [pieces.peek(TokenName(data)) for data in (b"\x81", b"", b"x")] == ["😁", "", "�x"]
    assert pieces.peek(TokenName(b""), is_last=True) == "�"
    assert pieces.offset == 0
    assert pieces.push(TokenName(b"\x80")) == "😀"


def test_look_at_a_first_word_leaves_the_next_one_the_first() -> None:
    pieces = TextPieces(skips_special=True)
    assert [pieces.peek(WORD), pieces.push(WORD), pieces.push(WORD)] == ["a", "a", " a"]
