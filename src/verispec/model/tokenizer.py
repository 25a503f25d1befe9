"""Text to token ids and back, and the exact bytes behind every token.

Knows the `tokenizers` library and the two token alphabets in use, GPT-2's byte-level one and SentencePiece's.
`folder_tokenizer` and `gguf_tokenizer` build the class from files. Knows nothing of chat, streaming or the engine.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import tokenizers

from verispec.errors import InputError, ModelFileError
from verispec.model.fields import quoted

_MAX_NAMED = 3  # of the entries in which two vocabularies differ
_LONG_CHARS = 10_000  # of a text for which nobody else should wait
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenizer:
    """One model's vocabulary. Immutable; `encode` never adds an end token, since every prompt is to be continued.

    `decode` is defined through `token_bytes`, so that decoding a stream token by token gives the same text. On bytes
    that are not UTF-8 it writes U+FFFD per maximal invalid sequence, where Hugging Face's SentencePiece decoder writes
    one per byte token.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    table: tuple[bytes, ...] = field(repr=False)  # id -> bytes; b"" for special, unused and missing ids
    special_texts: Mapping[int, str] = field(repr=False)  # control and unknown tokens
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    strips_leading_space: bool  # the encoder put a space before the text, so the decoder takes one away
    chat_template: str | None = field(repr=False)
    special_ids: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_ids", frozenset(self.special_texts))
        named = {"bos": [] if self.bos_id is None else [self.bos_id], "eos": self.eos_ids}
        for name, ids in named.items():
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ModelFileError(
                        f"{name} token id {quoted(token_id)} is outside the vocabulary of {self.vocab_size}"
                    )
        if self.add_bos and self.bos_id is None:
            raise ModelFileError("the tokenizer wants a BOS token before the text but names none")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's logits may be wider."""
        return len(self.table)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The strings that chat templates know as `bos_token` and `eos_token`, where the model has them."""
        named = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        return {name: self.token_text(token_id) for name, token_id in named.items() if token_id is not None}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become special ids; `control_tokens` has another way.

        `add_special` puts BOS in front where the model wants it.
        """
        ids = library_encoding(self.backend, text).ids
        if add_special and self.add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return list(ids)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """`encode` for many texts at once, by all cores."""
        try:
            found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # which text it was, and why, is said by the one that cannot be encoded
            return [self.encode(text) for text in texts]
        start = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return [start + encoding.ids for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens are skipped."""
        data = b"".join(map(self.token_bytes, ids))
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes `token_id` adds to the text: none for special tokens and for padding past the vocabulary."""
        if token_id < 0:
            raise InputError(f"token id {token_id} is negative")
        return self.table[token_id] if token_id < len(self.table) else b""

    def token_text(self, token_id: int) -> str:
        r"""One token for display: special tokens by name, half characters as `\xNN`."""
        special = self.special_texts.get(token_id)
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace") if special is None else special


def library_encoding(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """The library's encoding of a text, without BOS; what it cannot encode is an `InputError`.

    Its `encode` stops all other threads meanwhile; `encode_batch` does not, but costs more.
    """
    if not isinstance(text, str):
        raise InputError(f"text to encode must be a string, not {type(text).__name__}")
    try:
        if len(text) > _LONG_CHARS:
            return backend.encode_batch([text], add_special_tokens=False)[0]
        return backend.encode(text, add_special_tokens=False)
    except TypeError:  # the library's answer to a str that has no UTF-8 form
        raise InputError("text to encode holds a lone surrogate, which is not Unicode text") from None
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"text to encode does not fit the model's vocabulary: {quoted(str(error))}") from error


def _byte_level_values() -> npt.NDArray[np.int16]:
    """GPT-2's alphabet backwards: printable bytes stand for themselves, the n-th other byte is U+0100 + n.

    -1 at the characters that it leaves out; the last entry is for all behind it.
    """
    values = np.full(256, -1, np.int16)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    values[printable] = printable
    return np.append(values, [*np.flatnonzero(values < 0), -1]).astype(np.int16)


_BYTE_LEVEL = _byte_level_values()


def byte_level_bytes(pieces: Sequence[str]) -> list[bytes]:
    """Bytes of byte-level tokens; a piece with characters outside the alphabet is taken as plain text."""
    codes = np.frombuffer("".join(pieces).encode("utf-32-le"), np.uint32)
    values = _BYTE_LEVEL.take(codes, mode="clip")
    data, bounds = values.astype(np.uint8).tobytes(), [0, *accumulate(map(len, pieces))]  # a character is a byte
    table = [data[start:end] for start, end in pairwise(bounds)]
    for index in np.unique(np.searchsorted(bounds, np.flatnonzero(values < 0), side="right") - 1).tolist():
        table[index] = pieces[index].encode()
    return table


def sentencepiece_bytes(piece: str) -> bytes:
    return piece.replace("▁", " ").encode()


def byte_token_bytes(piece: str) -> bytes | None:
    """Bytes of a `<0xNN>` token, None for any other."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else None


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, *, logits: int, draft_logits: int) -> None:
    """Raise InputError that names the differing entries unless every id means the same to both."""
    if target.vocab_size != draft.vocab_size:
        raise InputError(
            f"the draft model's vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}: "
            f"{_differences(target, draft)}"
        )
    if differences := _differences(target, draft):
        raise InputError(f"the draft model's vocabulary is not the model's: {differences}")
    if logits != draft_logits:
        raise InputError(f"the draft model has logits for {draft_logits} tokens, the model for {logits}")


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, str]:
    """A token's bytes; special tokens have none, but a text."""
    return tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)


def _differences(target: Tokenizer, draft: Tokenizer) -> str:
    """The first entries that differ, in words; empty if none does."""
    shared = range(min(target.vocab_size, draft.vocab_size))
    differing = [i for i in shared if _meaning(target, i) != _meaning(draft, i)]
    named = [f"token {i} is {draft.token_text(i)!r} there and {target.token_text(i)!r} here" for i in differing]
    longer, where = (draft, "there") if draft.vocab_size > target.vocab_size else (target, "here")
    named += [f"token {i} is {longer.token_text(i)!r} {where} alone" for i in range(len(shared), longer.vocab_size)]
    rest = len(named) - _MAX_NAMED
    return "; ".join(named[:_MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
