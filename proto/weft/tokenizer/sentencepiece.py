"""From a SentencePiece model file to a tokenizer: BPE, as of Llama 2, and unigram models, with their byte fallback.

What differs from the original: special and user-defined tokens are found from left to right, before a text is prefixed
with a space, as in `transformers`; of two ways to cut a text that are equally likely in float32 the other may be taken;
where a model normalizes, the `tokenizers` package takes clusters of characters (a letter with its marks, CR LF) as one.
"""

from collections.abc import Mapping

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.merges import derive_merges
from weft.tokenizer.sentencepiece_model_pb2 import SentencePieceModel

_SPACE = "▁"
_Piece = SentencePieceModel.Piece
_Trainer = SentencePieceModel.TrainerSpec

_UNKNOWN_PENALTY = 10.0  # what an unknown character costs more than the rarest piece
_LONGEST_HIDDEN = 16  # characters of a token's name that are read, at worst, one by one


def convert_sentencepiece(
    data: bytes, *, names: Mapping[int, str], is_prefixed: bool, is_each_part_prefixed: bool
) -> Tokenizer:
    """Return the tokenizer of a model file.

    Args:
        data: the file.
        names: what pieces are called instead: files keep places free that a config names later.
        is_prefixed: a space is put before a text where the model has such a prefix; else it has none.
        is_each_part_prefixed: it is put before each part between special tokens, else before the first only.

    Raises:
        TokenizerError: the file is not such a model, or of a kind that is not known.
    """
    model = _parse(data)
    pieces = [_renamed(piece, names.get(index)) for index, piece in enumerate(model.pieces)]
    if model.trainer_spec.model_type == _Trainer.BPE:
        tokenizer = Tokenizer(_bpe(pieces, model.trainer_spec.byte_fallback))
    else:
        tokenizer = Tokenizer(_unigram(pieces, model.trainer_spec.byte_fallback))
    spec = model.normalizer_spec
    spec.add_dummy_prefix = spec.add_dummy_prefix and is_prefixed
    tokenizer.normalizer = _normalizer(spec)
    pre_tokenizer = _pre_tokenizer(spec, "always" if is_each_part_prefixed else "first")
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = _decoder(spec, model.trainer_spec.byte_fallback)
    _add_tokens(tokenizer, pieces)
    return tokenizer


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise TokenizerError(f"neither a SentencePiece model nor a tiktoken vocabulary: {error}") from error
    if not model.pieces:
        raise TokenizerError("neither a SentencePiece model nor a tiktoken vocabulary: it has no pieces")
    trainer, types = model.trainer_spec, [piece.type for piece in model.pieces]
    if trainer.model_type not in (_Trainer.BPE, _Trainer.UNIGRAM):
        kind = _Trainer.ModelType.Name(trainer.model_type)
        raise TokenizerError(f"the model is of type {kind}; allowed: BPE, UNIGRAM")
    if types.count(_Piece.UNKNOWN) != 1:
        raise TokenizerError(f"the model has {types.count(_Piece.UNKNOWN)} unknown pieces; allowed: 1")
    if trainer.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        raise TokenizerError("the model has no marks before its words; allowed: a mark for each space, before the word")
    if trainer.model_type == _Trainer.BPE and _Piece.UNUSED in types:
        raise TokenizerError("the model has unused pieces; allowed in a BPE model: pieces that all may be used")
    marked = [piece.piece for piece in model.pieces if piece.type == _Piece.USER_DEFINED and _SPACE in piece.piece]
    if trainer.model_type == _Trainer.UNIGRAM and marked:  # they compete with others for the best cut
        raise TokenizerError(f"the user defined {marked[0]!r}; allowed in a unigram model: pieces without {_SPACE}")
    if model.denormalizer_spec.precompiled_charsmap:
        raise TokenizerError("the model has a denormalizer; allowed: none")
    return model


def _renamed(piece: "_Piece", name: str | None) -> "_Piece":
    if name is None or name == piece.piece:
        return piece
    kind = piece.type if piece.type == _Piece.UNKNOWN else _Piece.CONTROL
    return _Piece(piece=name, score=piece.score, type=kind)


def _unknown(pieces: list["_Piece"]) -> int:
    return next(index for index, piece in enumerate(pieces) if piece.type == _Piece.UNKNOWN)


def _bpe(pieces: list["_Piece"], has_byte_fallback: bool) -> models.BPE:
    normal = [piece for piece in pieces if piece.type == _Piece.NORMAL]
    ranked = sorted(normal, key=lambda piece: -piece.score)
    texts = {piece.piece for piece in normal}
    return models.BPE(
        vocab={piece.piece: index for index, piece in enumerate(pieces)},
        merges=derive_merges((piece.piece for piece in ranked), texts),
        unk_token=pieces[_unknown(pieces)].piece,
        fuse_unk=True,
        byte_fallback=has_byte_fallback,
    )


def _unigram(pieces: list["_Piece"], has_byte_fallback: bool) -> models.Unigram:
    """Names that stand for something else, such as "<0x0A>", cost more than their characters one by one."""
    lowest = min((piece.score for piece in pieces if piece.type == _Piece.NORMAL), default=0.0)
    hidden = _LONGEST_HIDDEN * (lowest - _UNKNOWN_PENALTY)
    vocabulary = [(piece.piece, piece.score if piece.type == _Piece.NORMAL else hidden) for piece in pieces]
    return models.Unigram(vocabulary, unk_id=_unknown(pieces), byte_fallback=has_byte_fallback)


def _normalizer(spec: SentencePieceModel.NormalizerSpec) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        at_the_ends = r" +\z" if spec.add_dummy_prefix else r"\A +| +\z"  # Strip would take other white space too
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(at_the_ends), "")]
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _pre_tokenizer(spec: SentencePieceModel.NormalizerSpec, scheme: str) -> pre_tokenizers.PreTokenizer | None:
    if not spec.add_dummy_prefix:
        return None
    if spec.remove_extra_whitespaces:
        return pre_tokenizers.Metaspace(_SPACE, scheme, split=False)  # no second mark where the text begins with one
    prefix = pre_tokenizers.Metaspace(" ", scheme, split=False)  # the normalizer has left no other spaces
    return pre_tokenizers.Sequence([prefix, pre_tokenizers.Metaspace(_SPACE, "never", split=False)])


def _decoder(spec: SentencePieceModel.NormalizerSpec, has_byte_fallback: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    if has_byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, pieces: list["_Piece"]) -> None:
    """All are found before the text is normalized, but for those with marks, which are found among its marks."""
    special = [piece.piece for piece in pieces if piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)]
    defined = [piece.piece for piece in pieces if piece.type == _Piece.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=_SPACE in text) for text in defined])
