"""Calls of tools over HTTP: in three interfaces, streamed or not, resumed, and with results in the conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.served import Frame, Served, chat_body

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "how": {"enum": ["fast", "slow"]}},
    "required": ["on", "how"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
SAY = {"type": "function", "function": {"name": "say", "parameters": SCHEMA}}
WRITTEN = 'So.\n<tool_call>\n{"name": "look", "arguments": {"on": true}}\n</tool_call>'


def ids_of(served: Served, text: str) -> list[int]:
    return served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]


def ending_in(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is this text, of which the client has all but the last character."""
    *given, last = ids_of(served, text)
    own = {"committed_ids": [given]}
    return chat_body(max_tokens=len(given) + 1, logit_bias={str(last): 9000}, verispec=own, **fields)


def joined_calls(frames: list[Frame], *, is_rest: bool = False) -> list[dict[str, Any]]:
    """The calls that the frames of a chat completion add up to; of the rest of one, if its client has the beginning."""
    found: list[dict[str, Any]] = []
    for frame in frames[:-1]:
        for delta in frame.data["choices"][0]["delta"].get("tool_calls", ()):
            assert delta["index"] <= len(found)
            if delta["index"] == len(found):
                assert is_rest or {"id", "type"} <= set(delta)
                found.append({key: value for key, value in delta.items() if key != "index"})
            else:
                found[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return found


def test_what_the_model_wrote_is_read_as_a_call(served: Served) -> None:
    body = ending_in(served, WRITTEN, tools=[LOOK])
    (choice,) = served.post(CHAT, body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"on": true}'}
    assert choice["message"]["content"] is None  # the client has the text before it
    streamed = served.stream(CHAT, {**body, "stream": True})
    assert joined_calls(streamed) == [call]
    without = served.post(CHAT, ending_in(served, WRITTEN)).json()["choices"][0]["message"]
    assert "tool_calls" not in without  # control: nobody asked for tools
    broken = served.post(CHAT, ending_in(served, WRITTEN.replace("look", "lock"), tools=[LOOK])).json()
    assert broken["choices"][0]["message"]["content"].startswith("\n<tool_call>")


def test_tools_that_are_no_functions_are_skipped_and_listed(served: Served) -> None:
    others = [{"type": "web_search"}, LOOK, {"type": "mcp", "server_label": "x"}]
    assert served.chat(tools=others)["verispec"]["skipped_tools"] == ["web_search", "mcp"]
    assert served.chat(tools=others)["choices"] == served.chat(tools=[LOOK])["choices"]
    theirs = [{"type": "web_search_20250305", "name": "web"}, {"name": "look", "input_schema": SCHEMA}]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "tools": theirs}
    assert served.post(MESSAGES, body).json()["verispec"]["skipped_tools"] == ["web_search_20250305"]


def test_the_template_shows_tools_unless_none_may_be_called(served: Served) -> None:
    shown = served.chat(tools=[LOOK])["usage"]["prompt_tokens"]
    assert served.chat()["usage"]["prompt_tokens"] < shown
    assert served.chat(tools=[LOOK], tool_choice="none")["choices"] == served.chat()["choices"]


@pytest.mark.parametrize(("path", "tool", "param"), [
    (CHAT, {"type": "function", "function": {"name": "a b"}}, "tools[1].function.name"),
    (RESPONSES, {"type": "function", "name": "a b"}, "tools[1].name"),
    (MESSAGES, {"name": "a", "input_schema": "x"}, "tools[1].input_schema"),
])  # fmt: skip
def test_what_is_wrong_with_a_tool_is_named_as_its_interface_does(
    served: Served, path: str, tool: dict[str, Any], param: str
) -> None:
    body = (
        {"input": "hello"} if path == RESPONSES else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    )
    answer = served.post(path, {**body, "tools": [{"type": "web_search"}, tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(param)


def test_results_are_in_the_prompt_in_every_interface(served: Served) -> None:
    """The same conversation gives the same prompt, and with it the same answer."""
    arguments = {"on": True, "how": "fast"}
    function = {"name": "look", "arguments": json.dumps(arguments)}
    question, result = {"role": "user", "content": "hello"}, "it is on"
    messages = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    chat = served.post(CHAT, chat_body(messages=messages, tools=[LOOK])).json()
    prompt = served.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert result in prompt
    assert '"arguments": {"on": true' in prompt
    items = [
        question,
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": result},
    ]
    fields: dict[str, Any] = {"seed": 7, "temperature": 1}
    flat = {"type": "function", **LOOK["function"]}  # type: ignore[dict-item]
    response = served.post(RESPONSES, {"input": items, "tools": [flat], "max_output_tokens": 12, **fields}).json()
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    blocks = [
        question,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
    ]
    theirs = [{"name": "look", "description": "looks", "input_schema": SCHEMA}]
    message = served.post(MESSAGES, {"messages": blocks, "tools": theirs, "max_tokens": 12, **fields}).json()
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert message["usage"]["output_tokens"] == response["usage"]["output_tokens"]
