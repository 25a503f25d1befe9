"""Lines of a batch that use everything a sample can be resumed in the middle of; and some that cannot be served."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ("ab", "her", "the cat", "a bather", "oath", "zebra")
HARD = {
    "temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.2,
    "stop": ["zq", "xx"], "min_tokens": 4, "logit_bias": {"3": 0.5},
}  # fmt: skip


def line(number: int, *, num_tokens: int = 24) -> dict[str, Any]:
    """A line of every kind in turn, all different."""
    chance = random.Random(number)
    text = f"{chance.choice(WORDS)} {chance.choice(WORDS)}"
    common = {"max_tokens": chance.randrange(num_tokens // 2, num_tokens + 1), "ignore_eos": number % 3 == 0}
    messages = [{"role": "user", "content": text}]
    match number % 7:
        case 0:
            return {"prompt": text, "temperature": 1.0, "n": 2, "logprobs": 2, "id": number, **common}
        case 1:
            body = {"messages": messages, "n": 3, "logprobs": True, "top_logprobs": 3, **HARD, **common}
            return _named(number, "/v1/chat/completions", body)
        case 2:
            body = {"prompt": [text, "ab"], "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1, **HARD, **common}
            return _named(number, "/v1/completions", body)
        case 3:
            body = {"input": text, "max_output_tokens": common["max_tokens"], "top_logprobs": 2}
            return _named(number, "/v1/responses", body)
        case 6:
            return {"prompt": text, "temperature": 1.0, "regex": "((th|er|ab) ?){6,8}z", "n": 2, "logprobs": 1}
        case 4:
            return {"messages": messages, "temperature": 0.7, "stop": ["q"], "prompt_logprobs": 1, **common}
        case _:
            body = {"prompt": text, "temperature": 0, "verispec": {"committed_ids": [[5, 6, 7]]}, **common}
            return _named(number, "/v1/completions", body)


def _named(number: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


BAD: list[tuple[bytes, str]] = [
    (b"{", "is not JSON"),
    (b"", "is blank"),
    (b"[1]", "must be an object"),
    (b'{"prompt": "ab", "temperature": -1}', "temperature must be"),
    (b'{"prompt": "ab", "max_token": 3}', "did you mean max_tokens"),
    (b'{"custom_id": "request-1", "url": "/v1/completions", "body": {"prompt": "ab"}}', "that of line 2, too"),
    (b'{"custom_id": 4, "url": "/v1/completions", "body": {}}', "custom_id must be text"),
    (b'{"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "ab"}}', "url must be one of"),
    (b'{"custom_id": "g", "method": "GET", "url": "/v1/completions", "body": {}}', "method must be POST"),
    (b'{"custom_id": "b", "url": "/v1/completions", "body": "ab"}', "body must be an object"),
    (b'{"custom_id": "k", "url": "/v1/completions", "body": {}, "more": 1}', "unknown key 'more'"),
    (b'{"custom_id": "p", "url": "/v1/completions", "body": {"promt": "ab"}}', "promt is not a field"),
    (b'{"custom_id": "s", "url": "/v1/completions", "body": {"prompt": "ab", "stream": true}}', "stream must be false"),
    (b'{"custom_id": "m", "url": "/v1/completions", "body": {"prompt": "ab", "model": "other"}}', "is not served here"),
    (b'{"custom_id": "l", "url": "/v1/completions", "body": {"prompt": "' + b"ab " * 300 + b'"}}', "at most"),
    (b'{"prompt": "ab", "note": "\\ud800"}', ""),  # half of a pair goes through
]


def write_lines(path: Path, count: int, *, bad: bool = False, **more: Any) -> Path:
    lines = [json.dumps(line(i, **more)).encode() for i in range(count)]
    path.write_bytes(b"\n".join([*lines, *(text for text, _ in BAD if bad)]) + b"\n")
    return path
