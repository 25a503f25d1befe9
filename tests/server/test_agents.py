"""What coding agents send and act on: Codex at /v1/responses, event by event, and Claude Code at /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.held import fail_once
from tests.support.served import Frame, Served

SHELL: dict[str, Any] = {
    "type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                   "required": ["command"], "additionalProperties": False},
}  # fmt: skip
# Tools that are no functions: a 400 for them would end its every session.
SKIPPED: list[dict[str, Any]] = [
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
]
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]}
REQUEST: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before writing."}]},
        USER,
    ],
    "tools": [SHELL, *SKIPPED], "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None, "store": False,
    "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a-session", "service_tier": None,
    "text": {"verbosity": "low"}, "client_metadata": {"installation": "x"}, "max_output_tokens": 40,
}  # fmt: skip
HEADERS = {"Accept": "text/event-stream", "session_id": "a-session", "originator": "codex_cli_rs"}


def asked(served: Served, **fields: Any) -> list[Frame]:
    body = {**REQUEST, "model": served.core.names[0], "seed": 3, **fields}
    found = served.stream("/v1/responses", body, headers=HEADERS)
    assert [f.data["type"] for f in found] == [f.name for f in found]
    assert [f.data["sequence_number"] for f in found] == list(range(len(found)))
    return found


def test_a_text_comes_event_by_event(served: Served) -> None:
    found = asked(served)
    names = [frame.name for frame in found]
    deltas = [f.data for f in found if f.name == "response.output_text.delta"]
    around = [name for name in names if name != "response.output_text.delta"]
    assert around == [f"response.{name}" for name in (
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", around[-1].removeprefix("response."),
    )]  # fmt: skip
    ended = found[-1].data["response"]
    assert found[-1].name == f"response.{ended['status']}"
    assert ended["status"] in ("completed", "incomplete")
    assert ended["verispec"]["skipped_tools"] == ["custom", "web_search", "local_shell"]
    text = "".join(delta["delta"] for delta in deltas)
    done = next(f.data["item"] for f in found if f.name == "response.output_item.done")
    assert (done["type"], done["role"], done["content"][0]["text"]) == ("message", "assistant", text)
    assert {delta["item_id"] for delta in deltas} == {done["id"]}
    assert ended["id"] == found[0].data["response"]["id"]
    used = ended["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert used["input_tokens_details"]["cached_tokens"] >= 0
    assert used["output_tokens_details"]["reasoning_tokens"] == 0
    assert found[0].data["response"]["usage"] is None


def test_a_call_and_its_result_go_on_as_a_conversation(served: Served) -> None:
    found = asked(served, tool_choice="required", max_output_tokens=300)
    assert [f.name for f in found if "delta" not in (f.name or "")] == [f"response.{name}" for name in (
        "created", "in_progress", "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    )]  # fmt: skip
    call = next(f.data["item"] for f in found if f.name == "response.output_item.done")
    assert (call["type"], call["name"], call["status"]) == ("function_call", "shell", "completed")
    assert isinstance(json.loads(call["arguments"])["command"], list)
    told = "".join(f.data["delta"] for f in found if f.name == "response.function_call_arguments.delta")
    assert told == call["arguments"]
    thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    for output in ("a.txt", [{"type": "input_text", "text": "a.txt"}]):  # both forms are in use
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        rest = asked(served, input=[*REQUEST["input"], thought, call, result])
        assert rest[-1].name in ("response.completed", "response.incomplete")


def test_a_failure_is_an_event_that_it_acts_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(served.core.llm, monkeypatch)
    last = asked(served)[-1]
    assert last.name == "response.failed"
    assert last.data["response"]["status"] == "failed"
    assert "the device coughed" in last.data["response"]["error"]["message"]


def test_a_prompt_that_is_too_long_has_the_code_that_it_knows(served: Served) -> None:
    long = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 5000}]}
    answer = served.post("/v1/responses", {**REQUEST, "input": [long]}, headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "system": [{"type": "text", "text": "You are a coding agent.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "note"}, {"type": "text", "text": "list", **CACHED}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "how?", "signature": "s"}, {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.txt"}],
             "is_error": False}, {"type": "text", "text": "and now?"}]},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "required": ["command"],
            "properties": {"command": {"type": "string"}}, "additionalProperties": False}, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip


def test_claude_code_is_answered_and_counted(served: Served) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "one,two", "x-api-key": "none"}
    ask = {**CLAUDE, "model": served.core.names[0], "max_tokens": 30, "stream": True, "seed": 4}
    found = served.stream("/v1/messages?beta=true", ask, headers=headers)
    names = [frame.name for frame in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    start, end = found[0].data["message"], found[-2].data
    assert start["verispec"]["skipped_tools"] == ["web_search_20250305"]
    assert (start["usage"]["output_tokens"], end["usage"]["output_tokens"]) == (0, 30)
    counted = {name: CLAUDE[name] for name in ("system", "messages", "tools", "thinking", "context_management")}
    used = end["usage"]
    expected = used["input_tokens"] + used["cache_read_input_tokens"]
    assert served.post("/v1/messages/count_tokens?beta=true", counted).json() == {"input_tokens": expected}
