"""Log-probabilities as clients expect them. Numbers are the shortest that read back to the same float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from verispec.model.tokenizer import Tokenizer
from verispec.text.detokenizer import TextStream
from verispec.types import TokenLogprob


def shortest(value: float) -> float:
    """The double with the fewest digits that is this float32."""
    return float(str(np.float32(value)))


def chat_entries(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """In the form of chat completions."""
    return [
        {
            **_chat_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, *alternative) for alternative in entry.alternatives],
        }
        for entry in entries
    ]


class Offsets:
    """Where the tokens of a text begin in it, in characters. A token that goes on with a character begins where that
    does, and control tokens are not in the text.
    """

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self._num_chars = 0

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Those of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._num_chars)
            self._num_chars += len(self._text.push(token_id).text)
        return found


def completion_entries(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """In the form of completions; the first token of an echoed prompt has no entry."""
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else shortest(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _likeliest(tokenizer, entry) for entry in entries],
        "text_offset": offsets,
    }


def _likeliest(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """By text, the likelier of tokens with the same one; the chosen token in any case, as OpenAI has it."""
    found: dict[str, float] = {}
    for token_id, value in (*entry.alternatives, (entry.token_id, entry.logprob)):
        found.setdefault(tokenizer.token_text(token_id), shortest(value))
    return found


def prompt_entries(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob] | None
) -> list[dict[str, dict[str, Any]] | None] | None:
    """Of a prompt, in vLLM's form: by token id; the first token has none."""
    if entries is None:
        return None
    found: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        values = {entry.token_id: entry.logprob, **dict(entry.alternatives)}
        found.append(
            {
                str(token_id): {"logprob": shortest(value), "decoded_token": tokenizer.token_text(token_id)}
                for token_id, value in values.items()
            }
        )
    return found


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode()
    return {"token": tokenizer.token_text(token_id), "logprob": shortest(logprob), "bytes": list(data)}
