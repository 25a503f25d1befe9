"""`--share-history`: over HTTP, an answer that was drafted from another key's looks like one that was not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.chat_model import write_chat_model
from tests.support.served import Frame, Served, serving
from tests.support.tiny_llm import fix_cost, loaded

KEYS = ("first-key-123", "second-key-456")
OTHER = {"Authorization": f"Bearer {KEYS[1]}"}
DRAFTED = {"verispec": {"speculative": {"method": "suffix"}}}
SAMPLING: dict[str, Any] = {"seed": 7, "ignore_eos": True}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# A path and a body of each interface; no two have the same prompt, so that none drafts from another's answer.
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": said("chat"), "max_tokens": 120, **SAMPLING,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "/v1/completions": {"prompt": "completions", "max_tokens": 120, **SAMPLING, "logprobs": 1},
    "/v1/responses": {
        "input": said("responses"), "max_output_tokens": 120, **SAMPLING, "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {"messages": said("messages"), "max_tokens": 120, "seed": 8},
    "/generate": {
        "text": "generate", "return_logprob": True,
        "sampling_params": {"max_new_tokens": 120, "sampling_seed": 7, "ignore_eos": True},
    },
    "/inference/v1/generate": {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 120, **SAMPLING}},
}  # fmt: skip
# Ids, times, and how much of a prompt was in the cache.
DIFFERS = re.compile(
    r'"(id|created|created_at|request_id|cached_tokens|cache_read_input_tokens|input_tokens|\w+_ms|tokens_per_second)":'
    r"[^,}]+"
)
OF_DRAFTS = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_accepted_tokens_total",
    "inter_token_latency_seconds_count",
)


@contextmanager
def fresh(folder: Path, **options: Any) -> Iterator[Served]:
    path = folder / "tiny.gguf"
    path = path if path.exists() else write_chat_model(path)
    with loaded(path, folder, drafter="suffix", **options) as llm:
        fix_cost(llm)
        with serving(llm, api_keys=KEYS) as server:
            yield server


def shown(frames: list[Frame]) -> list[tuple[str, str | None]]:
    """All that a client sees of a stream but ids and times."""
    return [(DIFFERS.sub("", json.dumps(frame.data)), frame.event_id) for frame in frames]


def counts(served: Served) -> dict[str, float]:
    lines = [line for line in served.client.get("/metrics").text.splitlines() if line[0] != "#"]
    return {line.rpartition(" ")[0].removeprefix("verispec:"): float(line.rpartition(" ")[2]) for line in lines}


def told(folder: Path, *, shares: bool, has_history: bool) -> dict[str, Any]:
    """What streams of every interface, and the metrics, tell; with a history they are drafted from another key's answer
    or, where keys do not share, from their own."""
    found = {}
    with fresh(folder, share_history=shares) as served:
        for path, asked in STREAMS.items():
            body = {**asked, **DRAFTED}
            if has_history:
                assert served.post(path, body).status_code == 200
            before, accepted = counts(served), served.core.llm.status().totals.accepted
            frames = served.stream(path, {**body, "stream": True}, headers=OTHER if shares else None)
            after = counts(served)
            assert (served.core.llm.status().totals.accepted > accepted + 50) is has_history, path
            found[path] = shown(frames), [after[name] - before[name] for name in OF_DRAFTS]
    return found


def test_a_stream_that_was_drafted_from_others_answers_looks_like_any_other(tmp_path: Path) -> None:
    """In every interface: frames, their ids, usage; and what every key may read of all requests."""
    assert told(tmp_path, shares=True, has_history=True) == told(tmp_path, shares=True, has_history=False)


def test_control_drafts_are_seen_where_they_are_told(tmp_path: Path) -> None:
    drafted, alone = (told(tmp_path, shares=False, has_history=has_history) for has_history in (True, False))
    for path in STREAMS:
        for ours, theirs in zip(drafted[path], alone[path], strict=True):
            assert ours != theirs, path


def test_whole_answers_tell_nothing_either(tmp_path: Path) -> None:
    with fresh(tmp_path, share_history=True) as served:
        path = "/v1/chat/completions"
        body = {**STREAMS[path], **DRAFTED}
        served.post(path, body)
        before = served.core.llm.status().totals.accepted
        answer = served.post(path, body, headers=OTHER).json()
        assert served.core.llm.status().totals.accepted > before + 90
        assert set(answer["usage"]["completion_tokens_details"].values()) == {0}
        assert "speculative_decoding" not in answer["metrics"]
        assert "tokens_per_pass" not in answer["verispec"]
        assert "other keys" in answer["verispec"]["no_draft_reason"]
        assert {counts(served)[name] for name in OF_DRAFTS} == {0}
