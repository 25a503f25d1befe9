"""Rebuilds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

GGUF names a pre-tokenizer instead of describing it, so each supported name is spelled out here, following the
behaviour of the Hugging Face tokenizer it was converted from. The name "default", and no name, mean that the converter
did not know the model; guessing would give subtly wrong ids, so both are refused. Knows nothing of files.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.fields import Fields, quoted
from verispec.model.tokenizer import Tokenizer, byte_level_bytes, byte_token_bytes, sentencepiece_bytes


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Some converters write "no such token" as -1 in an unsigned field.
_NO_TOKEN = 2**32 - 1

# A token is tried at every cut, so a token of megabytes would never end; published ones have up to a few dozen.
_MAX_SCORED_CHARS = 1024

_EOS_KEYS = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")
# Control tokens that end an answer although files of their family, Gemma, name only <eos>.
_TURN_ENDS = frozenset({"<end_of_turn>"})

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _ByteLevelKind(NamedTuple):
    """What one value of `tokenizer.ggml.pre` means; `pattern` is None where GPT-2's own pattern splits the text."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


def _split_pattern(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_SYMBOLS_AND_SPACES}"


_BYTE_LEVEL_KINDS = {
    "gpt-2": _ByteLevelKind(),
    "llama-bpe": _ByteLevelKind(pattern=_split_pattern(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _ByteLevelKind(pattern=_split_pattern(r"\p{N}"), nfc=True),
    "smollm": _ByteLevelKind(single_digits=True),
}


class _Vocab(NamedTuple):
    pieces: list[str]
    types: npt.NDArray[np.integer]

    def ids_of(self, *wanted: _TokenType) -> list[int]:
        return [int(token_id) for token_id in np.flatnonzero(np.isin(self.types, wanted))]

    def by_piece(self) -> dict[str, int]:
        """Ids the encoder may produce."""
        ids = dict(zip(self.pieces, range(len(self.pieces)), strict=True))
        for token_id in self.ids_of(_TokenType.UNUSED):
            del ids[self.pieces[token_id]]
        return ids


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    fields = Fields(metadata, "the tokenizer")
    model = fields.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"tokenizer.ggml.model {quoted(model)} is not supported; supported: gpt2, llama")
    return (_byte_level if model == "gpt2" else _sentencepiece)(fields, _read_vocab(fields))


def _byte_level(fields: Fields, vocab: _Vocab) -> Tokenizer:
    name = fields.text("tokenizer.ggml.pre", "(none)")
    kind = _BYTE_LEVEL_KINDS.get(name)
    if kind is None:
        supported = ", ".join(sorted(_BYTE_LEVEL_KINDS))
        raise UnsupportedModelError(f"tokenizer.ggml.pre {quoted(name)} is not supported; supported: {supported}")
    backend = tokenizers.Tokenizer(_bpe(fields, vocab.by_piece(), ignore_merges=kind.ignore_merges))
    backend.pre_tokenizer = _byte_level_pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    table = byte_level_bytes(vocab.pieces)
    return _assemble(fields, vocab, backend, table, add_bos=kind.add_bos, strips_leading_space=False)


def _byte_level_pre_tokenizer(kind: _ByteLevelKind) -> pre_tokenizers.PreTokenizer:
    if kind.pattern is not None:
        split = pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, gpt2]) if kind.single_digits else gpt2


def _sentencepiece(fields: Fields, vocab: _Vocab) -> Tokenizer:
    """SentencePiece BPE: the best-scored adjacent pair first, unknown characters as bytes.

    The space prefix goes before the text and again after every special token, as llama.cpp and Hugging Face's
    `legacy` tokenizers do; GGUF has no field for the other convention.
    """
    unknown = next((vocab.pieces[token_id] for token_id in vocab.ids_of(_TokenType.UNKNOWN)), None)
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    merges = _merges_from_scores(vocab, _read_scores(fields, len(vocab.pieces)))
    bpe = models.BPE(vocab=vocab.by_piece(), merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=True)
    backend = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    table = [sentencepiece_bytes(piece) for piece in vocab.pieces]
    for token_id in vocab.ids_of(_TokenType.BYTE):
        value = byte_token_bytes(vocab.pieces[token_id])
        if value is None:
            raise ModelFileError(f"token {token_id} is marked as a byte but reads {quoted(vocab.pieces[token_id])}")
        table[token_id] = value
    return _assemble(fields, vocab, backend, table, add_bos=True, strips_leading_space=prefix)


def _merges_from_scores(vocab: _Vocab, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens, best token first: a merge list that acts like the scores.

    Within one token the longer left half comes first, which is the order of Hugging Face's converter.
    """
    normal = vocab.ids_of(_TokenType.NORMAL)
    known = {vocab.pieces[token_id] for token_id in normal}
    merges: list[tuple[str, str]] = []
    for token_id in sorted(normal, key=lambda token_id: (-scores[token_id], token_id)):
        piece = vocab.pieces[token_id]
        if len(piece) > _MAX_SCORED_CHARS:
            raise ModelFileError(f"token {token_id} has {len(piece)} characters; the limit is {_MAX_SCORED_CHARS}")
        cuts = ((piece[:cut], piece[cut:]) for cut in range(len(piece) - 1, 0, -1))
        merges += [(left, right) for left, right in cuts if left in known and right in known]
    return merges


def _assemble(
    fields: Fields,
    vocab: _Vocab,
    backend: tokenizers.Tokenizer,
    table: list[bytes],
    *,
    add_bos: bool,
    strips_leading_space: bool,
) -> Tokenizer:
    """What both families share: special and user-defined tokens, the named ids and the chat template."""
    special_ids = vocab.ids_of(_TokenType.UNKNOWN, _TokenType.CONTROL)
    user_ids = vocab.ids_of(_TokenType.USER_DEFINED)
    # Both kinds match verbatim in the text; the ids come from the vocabulary, which holds them already.
    backend.add_special_tokens([AddedToken(vocab.pieces[i], special=True, normalized=False) for i in special_ids])
    backend.add_tokens([AddedToken(vocab.pieces[i], special=False, normalized=False) for i in user_ids])
    for token_id in user_ids:
        table[token_id] = sentencepiece_bytes(vocab.pieces[token_id])
    for token_id in [*special_ids, *vocab.ids_of(_TokenType.UNUSED)]:
        table[token_id] = b""
    turn_ends = [token_id for token_id in special_ids if vocab.pieces[token_id] in _TURN_ENDS]
    return Tokenizer(
        backend=backend,
        table=tuple(table),
        special_texts={token_id: vocab.pieces[token_id] for token_id in special_ids},
        bos_id=next(iter(_named_ids(fields, ["bos_token_id"])), None),
        eos_ids=tuple(dict.fromkeys([*_named_ids(fields, _EOS_KEYS), *turn_ends])),
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", default=add_bos),
        strips_leading_space=strips_leading_space,
        chat_template=fields.text("tokenizer.chat_template", "") or None,
    )


def _read_vocab(fields: Fields) -> _Vocab:
    pieces = fields.array("tokenizer.ggml.tokens")
    if set(map(type, pieces)) - {str}:
        token_id = next(i for i, piece in enumerate(pieces) if type(piece) is not str)
        raise ModelFileError(f"tokenizer.ggml.tokens[{token_id}] is not text")
    if len(set(pieces)) != len(pieces):
        seen: dict[str, int] = {}
        for token_id, piece in enumerate(pieces):
            if (first := seen.setdefault(piece, token_id)) != token_id:
                raise ModelFileError(f"tokenizer.ggml.tokens: ids {first} and {token_id} are both {quoted(piece)}")
    if "tokenizer.ggml.token_type" not in fields:
        return _Vocab(pieces, np.full(len(pieces), _TokenType.NORMAL))
    codes = fields.array("tokenizer.ggml.token_type")
    if len(codes) != len(pieces):
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(codes)} entries for {len(pieces)} tokens")
    if set(map(type, codes)) - {int} or set(codes) - set(_TokenType):
        raise ModelFileError("tokenizer.ggml.token_type has an entry that is not a number from 1 to 6")
    return _Vocab(pieces, np.array(codes, np.int8))


def _bpe(fields: Fields, ids: dict[str, int], *, ignore_merges: bool) -> models.BPE:
    merges = fields.array("tokenizer.ggml.merges")
    with suppress(Exception):  # the library checks merges quickly, but does not say which one is wrong
        if "" not in ids:
            pairs = [tuple(merge.split(" ", 1)) for merge in merges]
            return models.BPE(vocab=ids, merges=pairs, ignore_merges=ignore_merges)
    return models.BPE(vocab=ids, merges=_checked_merges(merges, ids), ignore_merges=ignore_merges)


def _checked_merges(merges: list[Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for index, merge in enumerate(merges):
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")
        if not (left and right and left in ids and right in ids and left + right in ids):
            raise ModelFileError(
                f"tokenizer.ggml.merges[{index}] {quoted(merge)} does not join two tokens into a third"
            )
        pairs.append((left, right))
    return pairs


def _read_scores(fields: Fields, num_tokens: int) -> list[float]:
    try:
        scores = list(map(float, fields.array("tokenizer.ggml.scores")))
    except (TypeError, ValueError):
        raise ModelFileError("tokenizer.ggml.scores has an entry that is not a number") from None
    if len(scores) != num_tokens:
        raise ModelFileError(f"tokenizer.ggml.scores has {len(scores)} entries for {num_tokens} tokens")
    if any(score != score for score in scores):
        raise ModelFileError("tokenizer.ggml.scores has a NaN")
    return scores


def _named_ids(fields: Fields, names: Iterable[str]) -> list[int]:
    """Ids under `tokenizer.ggml.<name>`, each one id or an array of them, without repeats."""
    ids: list[int] = []
    for key in (f"tokenizer.ggml.{name}" for name in names):
        if key in fields:
            found = fields.array(key) if key.endswith("_ids") else [fields.mapping[key]]
            if not all(isinstance(token_id, int) for token_id in found):
                raise ModelFileError(f"{key} is not a token id")
            ids += found
    return [token_id for token_id in dict.fromkeys(ids) if token_id != _NO_TOKEN]
