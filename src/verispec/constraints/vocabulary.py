"""A model's tokens as the grammar library knows them: bytes by id, control tokens by name, and an encoder.

The library wants an end token, which gets an id of its own behind the vocabulary: where answers may end is decided
outside of it. Building its tables takes up to a second, once per model.
"""

from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from verispec.model.tokenizer import Tokenizer

_MAX_CUTS = 4096  # texts that are remembered with their tokens: keys and brackets come again and again
# Tokens that are text of a JSON string are looked at together, by length: where as many characters may follow, all of
# them are allowed. With the library's own lengths, 10 and 30, masks take three times as long where maxLength is 24.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{count}' for count in ("{1,4}", "{1,8}", "{1,12}", "{1,16}", "{1,24}", "+")]
_MARK = "\x02"  # stands before a text, so that no space is put there


class _Source:
    """The attributes that the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ends = {*tokenizer.special_ids, *tokenizer.eos_ids}
        self.tokens: Sequence[bytes] = [
            *(tokenizer.token_text(i).encode() if i in ends else tokenizer.token_bytes(i) for i in range(vocab_size)),
            b"<|the end|>",
        ]
        self.eos_token_id, self.bos_token_id = vocab_size, None
        self.special_token_ids = [*sorted(i for i in ends if i < vocab_size), vocab_size]
        self._tokenizer = tokenizer
        self._ids = {data: i for i, data in enumerate(tokenizer.table) if data and i not in ends}
        self._max_len = max(map(len, self._ids), default=0)
        self._num_marked = len(self._encode(_MARK)) if tokenizer.strips_leading_space else 0
        self._cut = lru_cache(_MAX_CUTS)(self._cut_now)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)

    def __call__(self, text: str) -> list[int]:
        """Tokens that write exactly this: the tokenizer's own, unless it changes the text or finds control tokens."""
        if not isinstance(text, str):
            raise TypeError("this encodes text, not bytes")  # so the library tells the two kinds apart
        return self._cut(text)

    def _cut_now(self, text: str) -> list[int]:
        ids = self._encode(_MARK + text)[self._num_marked :] if self._num_marked else self._encode(text)
        data = text.encode()
        return ids if b"".join(map(self._tokenizer.token_bytes, ids)) == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """The longest token at each place, up to where there is none."""
        found: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._max_len), start, -1)
            end = next((e for e in ends if data[start:e] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[data[start:end]])
            start = end
        return found


def library_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """`vocab_size` is the width of the logits: ids behind the tokenizer's have no bytes, and are never allowed."""
    return LLTokenizer(TokenizerWrapper(_Source(tokenizer, vocab_size)), n_vocab=vocab_size + 1, slices=_SLICES)
