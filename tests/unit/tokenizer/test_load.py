"""Which files of a folder make its tokenizer, and what those beside it add."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.streaming import differing_streams
from helpers.texts import made_texts, prompts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import load_tokenizer

from router.errors import ModelFilesError
from router.tokenizer import ModelTokenizer
from workers.errors import EngineConfigError
from workers.tokenizer import load_token_table


def write_json(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def write_letters(folder: Path, *tokens: str) -> Path:
    """A tokenizer.json of letters and some further entries."""
    vocab = {token: index for index, token in enumerate([*"abc", *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_folder_without_a_vocabulary_says_what_was_looked_for(tmp_path: Path) -> None:
    said = (
        r"has no tokenizer; looked for tokenizer\.json, tokenizer\.model, spiece\.model, \*\.tiktoken, "
        r"or vocab\.json with merges\.txt"
    )
    with pytest.raises(TokenizerError, match=said):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelFilesError, match=said):
        ModelTokenizer.from_folder(tmp_path)
    with pytest.raises(EngineConfigError, match=said):
        load_token_table(tmp_path)


def test_tokenizer_json_comes_before_other_files(tmp_path: Path) -> None:
    write_letters(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not read")

    assert load_tokenizer(tmp_path).tokenizer.encode("cab").ids == [2, 0, 1]


@pytest.mark.parametrize("name", ["TinyStories-656K", "stories260K", "stories3M"])
def test_special_tokens_are_special_to_router_and_engine(name: str, shared: Path) -> None:
    """Those of TinyStories are declared `normalized`, in a tokenizer that puts a mark before every text."""
    folder = shared / "models" / name
    table, tokenizer = load_token_table(folder), ModelTokenizer.from_folder(folder)

    assert [table.is_special(token_id) for token_id in range(4)] == [True, True, True, False]
    (begin,) = tokenizer.encode("")
    assert tokenizer.decode([begin, *tokenizer.encode("A cat", add_special_tokens=False)]) == "A cat"
    name_of_begin = load_tokenizer(folder).special_tokens["bos_token"]
    assert tokenizer.encode(f"A{name_of_begin}", add_special_tokens=False)[-1] == begin


@pytest.mark.parametrize("name", ["gpt2", "llama2-32k", "qwen"])
def test_who_only_decodes_has_the_same_tokens_without_merges(name: str, shared: Path) -> None:
    whole, part = (load_tokenizer(shared / "tokenizers" / name, encodes=each).tokenizer for each in (True, False))

    assert part.get_vocab(with_added_tokens=True) == whole.get_vocab(with_added_tokens=True)
    assert part.get_added_tokens_decoder().keys() == whole.get_added_tokens_decoder().keys()
    for text in made_texts(count=20):
        ids = whole.encode(text).ids
        assert part.decode(ids) == whole.decode(ids)
    assert len(part.encode("the").ids) > len(whole.encode("the").ids), "no merges"


def test_vocabulary_and_merges_equal_the_tokenizer_json(shared: Path, tmp_path: Path) -> None:
    original = load_tokenizer(shared / "tokenizers/gpt2").tokenizer
    original.model.save(str(tmp_path))
    write_json(tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"})
    texts = prompts(shared, 1000) + made_texts(("<|endoftext|>",))

    tokenizer = load_tokenizer(tmp_path).tokenizer

    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    assert ids == [encoding.ids for encoding in original.encode_batch_fast(texts)]
    assert tokenizer.decode_batch(ids) == original.decode_batch(ids)
    assert differing_streams(tokenizer, ids) == []


def test_vocabulary_and_merges_of_qwen_are_split_as_qwen_does(shared: Path, tmp_path: Path) -> None:
    original = load_tokenizer(shared / "tokenizers/qwen").tokenizer
    original.model.save(str(tmp_path))
    places = {id: {"content": token.content} for id, token in original.get_added_tokens_decoder().items()}
    write_json(tmp_path, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": places})
    texts = prompts(shared, 1000) + made_texts(("<|im_end|>",))

    tokenizer = load_tokenizer(tmp_path).tokenizer

    assert [of.ids for of in tokenizer.encode_batch_fast(texts)] == [of.ids for of in original.encode_batch_fast(texts)]


@pytest.mark.parametrize(
    ("config", "first"), [({}, 0), ({"add_prefix_space": False}, 0), ({"add_prefix_space": True}, 2)]
)
def test_text_begins_with_a_space_where_the_config_of_merges_says_so(
    config: dict[str, Any], first: int, tmp_path: Path
) -> None:
    write_json(tmp_path, vocab={"a": 0, "Ġ": 1, "Ġa": 2}, tokenizer_config=config)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\n", encoding="utf-8")

    assert load_tokenizer(tmp_path).tokenizer.encode("a a").ids == [first, 2]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("place", ["tokenizer.json", "added_tokens_decoder"])
def test_special_token_that_is_named_keeps_what_it_takes_in(flag: str, place: str, tmp_path: Path) -> None:
    token = AddedToken("<x>", special=True, normalized=False, **{flag: True})
    tokenizer = load_tokenizer(write_letters(tmp_path, " ", "<x>")).tokenizer
    config: dict[str, Any] = {"eos_token": "<x>"}
    if place == "tokenizer.json":
        tokenizer.add_special_tokens([token])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    else:
        config["added_tokens_decoder"] = {"4": {"content": "<x>", "special": True, flag: True}}

    loaded = load_tokenizer(write_json(tmp_path, tokenizer_config=config)).tokenizer

    (kept,) = loaded.get_added_tokens_decoder().values()
    assert [name for name in ("lstrip", "rstrip", "single_word") if getattr(kept, name)] == [flag]


@pytest.mark.parametrize(
    ("files", "is_special"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"3": {"content": "<x>", "special": True}}}}, True),
        ({"tokenizer_config": {"added_tokens_decoder": {"3": {"content": "<x>", "special": False}}}}, False),
        ({"tokenizer_config": {"eos_token": {"content": "<x>"}}}, True),
        ({"tokenizer_config": {"additional_special_tokens": ["<x>"]}}, True),
        ({"tokenizer_config": {"extra_special_tokens": {"image_token": "<x>"}}}, True),
        ({"special_tokens_map": {"pad_token": "<x>"}}, True),
        ({"special_tokens_map": {"additional_special_tokens": [{"content": "<x>"}]}}, True),
        ({"added_tokens": {"<x>": 3}}, False),
        ({"added_tokens": {"<x>": 3}, "special_tokens_map": {"eos_token": "<x>"}}, True),
    ],
)
@pytest.mark.parametrize("is_in_vocabulary", [True, False])
def test_files_beside_the_vocabulary_declare_tokens(
    files: dict[str, Any], is_special: bool, is_in_vocabulary: bool, tmp_path: Path
) -> None:
    write_letters(tmp_path, *(["<x>"] if is_in_vocabulary else []))
    has_place = "added_tokens" in str(files)

    tokenizer = load_tokenizer(write_json(tmp_path, **files)).tokenizer

    if not (has_place or is_in_vocabulary):  # the model has no such token
        assert tokenizer.token_to_id("<x>") is None
        return
    ids = tokenizer.encode("a<x>b").ids
    assert ids == [0, 3, 1]
    assert tokenizer.decode(ids) == ("ab" if is_special else "a<x>b")


def test_ids_between_vocabulary_and_declared_tokens_stay_free(tmp_path: Path) -> None:
    write_json(write_letters(tmp_path), added_tokens={"<y>": 7, "<x>": 5})

    tokenizer = load_tokenizer(tmp_path).tokenizer

    assert tokenizer.encode("<x>a<y>").ids == [5, 0, 7]


def test_frame_of_the_config_replaces_that_of_the_file(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((shared / "tokenizers/llama2-32k/tokenizer.json").read_bytes())
    for config, expected in (
        ({}, [1, 263]),  # as tokenizer.json says
        ({"bos_token": "<s>", "add_bos_token": False}, [263]),
        ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, [1, 263, 2]),
        ({"bos_token": None, "add_bos_token": True}, [263]),
        ({"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": False}, [1, 263]),  # nothing of the beginning
        ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": None, "add_eos_token": True}, [1, 263, 2]),
    ):
        write_json(tmp_path, tokenizer_config=config)
        assert load_tokenizer(tmp_path).tokenizer.encode("a").ids == expected


@pytest.mark.parametrize("text", ["<s>", "$A", "$1", "<s:1>", "a:b", "0"])
def test_frame_takes_the_text_of_a_token_literally(text: str, tmp_path: Path) -> None:
    config = {"bos_token": text, "add_bos_token": True, "added_tokens_decoder": {"3": {"content": text}}}

    encoding = load_tokenizer(write_json(write_letters(tmp_path), tokenizer_config=config)).tokenizer.encode("b")

    assert (encoding.ids, encoding.tokens, encoding.special_tokens_mask) == ([3, 1], [text, "b"], [1, 0])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config": r'{"bos_token": "\ud800"}'}, r"tokenizer_config\.json is not JSON.*surrogates"),
        ({"tokenizer_config": r'{"added_tokens_decoder": {"1": "\ud800"}}'}, r"tokenizer_config\.json is not JSON"),
        ({"special_tokens_map": "[]"}, r"special_tokens_map\.json holds a list; allowed: an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "y"}}}}, r"tokenizer_config\.json: the added"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {}}}}, r"tokenizer_config\.json: the added tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, r"tokenizer_config\.json: the added tokens"),
        ({"added_tokens": {"<x>": None}}, r"added_tokens\.json: the added tokens are not written as text and id"),
        ({"added_tokens": '{"<x>": 1e999}'}, r"added_tokens\.json: the added tokens are not written as text and id"),
        ({"added_tokens": {"<x>": 2**31}}, r"added_tokens\.json: the id of '<x>' is 2147483648; allowed: 0 to 524287"),
        ({"added_tokens": {"<x>": -1}}, r"added_tokens\.json: the id of '<x>' is -1; allowed: 0 to 524287"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9999999999": {"content": "<x>"}}}},
            r"tokenizer_config\.json: the id of '<x>' is 9999999999; allowed: 0 to 524287",
        ),
        ({"tokenizer": "{}"}, r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_broken_file_is_named(files: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=said):
        load_tokenizer(write_json(write_letters(tmp_path), **files))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "qwen.tiktoken"])
def test_pointer_of_git_lfs_is_called_so(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n")
    with pytest.raises(TokenizerError, match=rf"{name}.*: it is a pointer of Git LFS; allowed: .* `git lfs pull`"):
        load_tokenizer(tmp_path)


def test_broken_merges_are_named(tmp_path: Path) -> None:
    write_json(tmp_path, vocab={"a": 0})
    (tmp_path / "merges.txt").write_text("x y z\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json and merges\.txt are not a vocabulary and its merges"):
        load_tokenizer(tmp_path)
