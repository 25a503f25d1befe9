"""Log-probabilities as clients expect them. Numbers are the shortest that read back to the same float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from verispec.model.tokenizer import Tokenizer
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


def text_len(tokenizer: Tokenizer, token_ids: Iterable[int]) -> int:
    """Characters of these tokens, as completions count them."""
    return sum([len(tokenizer.token_text(token_id)) for token_id in token_ids])


def completion_entries(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], offset: int
) -> dict[str, Any]:
    """In the form of completions, with `offset` characters before; the first token of an echoed prompt has no entry."""
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets = list(accumulate(map(len, texts), initial=offset))[: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": [None if entry is None else shortest(entry.logprob) for entry in entries],
        "top_logprobs": [
            None if entry is None else {tokenizer.token_text(i): shortest(value) for i, value in entry.alternatives}
            for entry in entries
        ],
        "text_offset": offsets,
    }


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
