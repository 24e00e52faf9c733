"""SentencePiece models without a tokenizer.json: ids and texts are those of sentencepiece and of transformers."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from helpers.streaming import differing_streams
from helpers.texts import made_texts, prompts
from tokenizers import Tokenizer
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import load_tokenizer
from weft.tokenizer.sentencepiece_model_pb2 import SentencePieceModel

LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
UNKNOWN = {"piece": "<unk>", "type": "UNKNOWN"}
SPECIAL = ("<s>", "</s>", "<unk>")

TRAINED: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<sep>"],
    },
    "bpe": {"model_type": "bpe"},
    "bpe-as-gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": ["<sep>", "▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "\t"],
    },
}


def ids_of(tokenizer: Tokenizer, texts: list[str], *, special: bool) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=special)]


def differing(texts: list[str], mine: list[Any], theirs: list[Any]) -> list[tuple[str, Any, Any]]:
    assert len(texts) == len(mine) == len(theirs)
    return [row for row in zip(texts, mine, theirs, strict=True) if row[1] != row[2]]


def write_folder(folder: Path, model: bytes, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def llama2(shared: Path) -> bytes:
    return (shared / "tokenizers/llama2-32k/tokenizer.model").read_bytes()


@pytest.fixture(scope="module")
def plain(shared: Path) -> list[str]:
    """Texts without special tokens, which sentencepiece itself does not look for."""
    return [text for text in prompts(shared) + made_texts() if not any(token in text for token in SPECIAL)]


def test_llama2_model_equals_sentencepiece(llama2: bytes, plain: list[str], tmp_path: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_proto=llama2)
    tokenizer = load_tokenizer(write_folder(tmp_path, llama2, **LLAMA2)).tokenizer

    ids = ids_of(tokenizer, plain, special=False)

    assert differing(plain, ids, original.encode(plain)) == []
    assert differing(plain, tokenizer.decode_batch(ids), original.decode(ids)) == []
    assert differing_streams(tokenizer, ids) == []


def test_llama2_model_with_special_tokens_equals_transformers(shared: Path, llama2: bytes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/llama2-32k")
    tokenizer = load_tokenizer(write_folder(tmp_path, llama2, **LLAMA2, legacy=True)).tokenizer
    texts = prompts(shared) + made_texts(SPECIAL)

    ids = ids_of(tokenizer, texts, special=True)

    assert differing(texts, ids, original(texts)["input_ids"]) == []
    assert differing(texts, tokenizer.decode_batch(ids), original.batch_decode(ids, skip_special_tokens=True)) == []
    kept = tokenizer.decode_batch(ids, skip_special_tokens=False)
    assert differing(texts, kept, original.batch_decode(ids)) == []
    assert differing_streams(tokenizer, ids) == []


def test_prefix_before_the_first_part_only_equals_transformers(shared: Path, llama2: bytes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shutil.copy(shared / "tokenizers/llama2-32k/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA2 | {"tokenizer_class": "LlamaTokenizer"}))
    original = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(write_folder(tmp_path / "mine", llama2, **LLAMA2, legacy=False)).tokenizer
    # transformers forgets the prefix of a text that begins with a space or a mark; sentencepiece does not
    texts = [text for text in made_texts(SPECIAL) if not text.startswith((" ", "▁"))]

    assert differing(texts, ids_of(tokenizer, texts, special=True), original(texts)["input_ids"]) == []
    assert tokenizer.encode("a</s>b", add_special_tokens=False).tokens == ["▁a", "</s>", "b"]


def test_model_without_a_prefix_by_its_config_equals_transformers(shared: Path, llama2: bytes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = LLAMA2 | {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    shutil.copy(shared / "tokenizers/llama2-32k/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    original = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(write_folder(tmp_path / "mine", llama2, **config)).tokenizer
    texts = made_texts(SPECIAL)

    ids = ids_of(tokenizer, texts, special=True)

    assert differing(texts, ids, original(texts)["input_ids"]) == []
    assert differing(texts, tokenizer.decode_batch(ids), original.batch_decode(ids, skip_special_tokens=True)) == []


@pytest.mark.parametrize("name", TRAINED)
def test_trained_model_equals_sentencepiece(name: str, shared: Path, plain: list[str], tmp_path: Path) -> None:
    model = _train(plain[:1500], **TRAINED[name])
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = load_tokenizer(write_folder(tmp_path, model)).tokenizer
    texts = [*plain[::3], *(text.replace("e", "<sep>") for text in plain[:200])]
    if TRAINED[name].get("normalization_rule_name") != "identity":
        texts = [text for text in texts if "ｈ\u0301" not in text]  # a cluster for the tokenizers package

    ids = ids_of(tokenizer, texts, special=False)

    rows = differing(texts, ids, original.encode(texts))
    if TRAINED[name]["model_type"] == "unigram":  # equally likely, in float32
        assert len(rows) < len(texts) / 50
        rows = [row for row in rows if _cost(original, row[1]) != pytest.approx(_cost(original, row[2]), rel=1e-6)]
    assert rows == []
    unknown = [text.replace(" ⁇ ", "<unk>") for text in original.decode(ids)]
    assert differing(texts, tokenizer.decode_batch(ids, skip_special_tokens=False), unknown) == []
    known = [row for row in ids if original.unk_id() not in row]
    assert differing_streams(tokenizer, known) == []


def test_names_of_bytes_and_special_tokens_in_a_text_are_text_to_the_model(llama2: bytes, tmp_path: Path) -> None:
    unigram = _train(["a few words 0x41 < > and more of them"] * 20, model_type="unigram", byte_fallback=True)
    for index, model in enumerate((llama2, unigram)):
        tokenizer = load_tokenizer(write_folder(tmp_path / str(index), model)).tokenizer
        assert "<0x41>" not in tokenizer.encode("a <0x41>").tokens
        assert tokenizer.decode(tokenizer.encode("a <0x41> é").ids) == "a <0x41> é"


def test_places_that_a_config_names_get_these_names(llama2: bytes, tmp_path: Path) -> None:
    declared = {"259": {"content": "<|im_end|>", "special": True}, "32005": {"content": "<tool>", "special": False}}
    folder = write_folder(tmp_path, llama2, **LLAMA2, added_tokens_decoder=declared)

    tokenizer = load_tokenizer(folder).tokenizer

    ids = tokenizer.encode("hi<|im_end|>  there<tool>", add_special_tokens=False).ids
    assert (259 in ids, ids[-1]) == (True, 32005)
    assert "▁▁" not in tokenizer.get_vocab()  # it was called so
    assert tokenizer.decode(ids) == "hi  there<tool>"
    assert tokenizer.get_vocab_size() == 32006


def test_frame_is_what_the_config_asks_for(llama2: bytes, tmp_path: Path) -> None:
    config = LLAMA2 | {"add_bos_token": False, "add_eos_token": True}
    assert load_tokenizer(write_folder(tmp_path / "a", llama2, **config)).tokenizer.encode("a").ids == [263, 2]
    assert load_tokenizer(write_folder(tmp_path / "b", llama2)).tokenizer.encode("a").ids == [263]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainer_spec": {"model_type": "WORD"}}, "of type WORD; allowed: BPE, UNIGRAM"),
        ({"trainer_spec": {"model_type": "BPE", "treat_whitespace_as_suffix": True}}, "no marks before its words"),
        ({"normalizer_spec": {"escape_whitespaces": False}}, "no marks before its words"),
        ({"denormalizer_spec": {"precompiled_charsmap": b"x"}}, "has a denormalizer"),
        ({"pieces": [{"piece": "a", "score": -1.0}]}, "0 unknown pieces; allowed: 1"),
        ({"trainer_spec": {"model_type": "BPE"}, "pieces": [UNKNOWN, {"type": "UNUSED"}]}, "unused pieces"),
        ({"pieces": [UNKNOWN, {"piece": "▁▁", "type": "USER_DEFINED"}]}, "user defined '▁▁'"),
    ],
)
def test_model_of_unknown_kind_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = {"pieces": [UNKNOWN, {"piece": "a", "score": -1.0}]} | change
    folder = write_folder(tmp_path, SentencePieceModel(**model).SerializeToString())

    with pytest.raises(TokenizerError, match=said) as caught:
        load_tokenizer(folder)

    assert str(folder / "tokenizer.model") in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x0a\xff\xff\xff", b"PK\x03\x04 a zip file", b"\x00" * 64])
def test_file_that_is_no_model_is_named(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: neither a SentencePiece model nor a tiktoken"):
        load_tokenizer(write_folder(tmp_path, data))


def _cost(model: sentencepiece.SentencePieceProcessor, ids: list[int]) -> float:
    return sum(-model.get_score(token_id) if token_id != model.unk_id() else 100.0 for token_id in ids)


def _train(texts: list[str], **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=2000 if len(texts) > 1000 else 300,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()
