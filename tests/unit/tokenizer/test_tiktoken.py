"""tiktoken vocabularies: ids and texts are those of tiktoken and of transformers."""

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from helpers.streaming import differing_streams
from helpers.texts import made_texts, prompts
from weft.tokenizer.byte_level import BYTE_OF_CHAR
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import load_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_RANKS = 151643

# As the code of the models, and tiktoken for its own vocabularies, write them.
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
PATTERNS = {
    "qwen.tiktoken": rf"{_HEAD}|\p{{N}}|{_TAIL}",
    "tokenizer.model": rf"{_HEAD}|\p{{N}}{{1,3}}|{_TAIL}",
    "cl100k_base.tiktoken": rf"{_HEAD}|\p{{N}}{{1,3}}|{_TAIL}",
    "o200k_base.tiktoken": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}


@pytest.fixture(scope="module")
def ranks(shared: Path) -> dict[bytes, int]:
    """Qwen's vocabulary, out of the tokenizer.json that was made of it."""
    vocab = json.loads((shared / "tokenizers/qwen/tokenizer.json").read_text())["model"]["vocab"]
    return {bytes(BYTE_OF_CHAR[c] for c in token): rank for token, rank in vocab.items() if rank < NUM_RANKS}


def as_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


def write_folder(folder: Path, name: str, data: bytes, **config: Any) -> Path:
    (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def declared() -> dict[str, dict[str, Any]]:
    return {str(NUM_RANKS + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}


@pytest.mark.parametrize("name", PATTERNS)
def test_vocabulary_equals_tiktoken(name: str, ranks: dict[bytes, int], shared: Path, tmp_path: Path) -> None:
    if name != "qwen.tiktoken":
        ranks = {token: rank for token, rank in ranks.items() if rank < 20_000}  # quicker; the pattern is the point
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL)}
    original = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=special)
    places = {str(token_id): {"content": token, "special": True} for token, token_id in special.items()}
    tokenizer = load_tokenizer(write_folder(tmp_path, name, as_file(ranks), added_tokens_decoder=places)).tokenizer
    texts = prompts(shared, 6000 if name == "qwen.tiktoken" else 2000) + made_texts(SPECIAL)
    if name == "qwen.tiktoken":
        texts = [unicodedata.normalize("NFC", text) for text in texts]  # the code around tiktoken does

    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]

    theirs = original.encode_batch(texts, num_threads=1, allowed_special="all")
    assert [row for row in zip(texts, ids, theirs, strict=True) if row[1] != row[2]] == []
    assert tokenizer.decode_batch(ids, skip_special_tokens=False) == original.decode_batch(ids)
    assert differing_streams(tokenizer, ids) == []


def test_qwen_equals_transformers(ranks: dict[bytes, int], shared: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/qwen")
    tokenizer = load_tokenizer(write_folder(tmp_path, "qwen.tiktoken", as_file(ranks))).tokenizer
    texts = prompts(shared) + made_texts(SPECIAL)

    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]

    assert ids == original(texts)["input_ids"]
    assert tokenizer.decode_batch(ids) == original.batch_decode(ids, skip_special_tokens=True)


def test_llama3_style_model_equals_transformers(ranks: dict[bytes, int], shared: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "add_bos_token": True}
    small = {token: rank for token, rank in ranks.items() if rank < 5000}
    places = {"5000": {"content": SPECIAL[0], "special": True}, "5003": {"content": SPECIAL[2], "special": True}}
    folder = write_folder(tmp_path, "tokenizer.model", as_file(small), **config, added_tokens_decoder=places)
    original = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder).tokenizer
    texts = made_texts(SPECIAL)

    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]

    assert ids == original(texts)["input_ids"]
    assert tokenizer.get_vocab_size() == len(original) == 5004


def test_special_tokens_that_only_code_names_are_known(ranks: dict[bytes, int], tmp_path: Path) -> None:
    small = as_file({token: rank for token, rank in ranks.items() if rank < 300})
    for name, token, offset, size in (
        ("qwen.tiktoken", "<|im_end|>", 2, 208),
        ("tokenizer.model", "<|eot_id|>", 9, 256),
    ):
        folder = tmp_path / token.strip("<|>")
        folder.mkdir()
        tokenizer = load_tokenizer(write_folder(folder, name, small)).tokenizer
        assert (tokenizer.token_to_id(token), tokenizer.get_vocab_size()) == (300 + offset, 300 + size)
        assert tokenizer.decode(tokenizer.encode(f"a{token}").ids) == "a"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("my.tiktoken", lambda data: data, r"not known; allowed: vocabularies called qwen\.tiktoken, tokenizer\.model"),
        ("qwen.tiktoken", lambda data: data + b"no-base64 256\n", "line 257 is b'no-base64 256'; allowed: base64"),
        ("qwen.tiktoken", lambda data: data + b"YWI= x\n", "line 257"),
        ("qwen.tiktoken", lambda data: data + b"YWI= 300\n", "257 tokens have other ranks; allowed: 0 to 256"),
        ("qwen.tiktoken", lambda data: data.replace(b"YQ== ", b"YWI= "), "no token for the byte 97"),
    ],
)
def test_broken_vocabulary_is_refused(
    name: str, change: Any, said: str, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    data = as_file({token: rank for token, rank in ranks.items() if rank < 256})

    with pytest.raises(TokenizerError, match=said) as caught:
        load_tokenizer(write_folder(tmp_path, name, change(data)))

    assert str(tmp_path / name) in str(caught.value)
