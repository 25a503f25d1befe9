"""/v1/messages and its count_tokens: Anthropic's interface over the same call as a chat completion."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from verispec.server.api import ChatRequest, CountRequest, Message, MessagesRequest
from verispec.server.chat import chat_call, rendered
from verispec.server.conversation import joined_text
from verispec.server.core import Answer, Core
from verispec.server.errors import ApiError, as_api_error
from verispec.server.http import EVENTS, Received, Reply, event, json_reply
from verispec.server.openai import new_id
from verispec.types import FinishReason

_encode = msgspec.json.encode
_NOT_SHOWN = ("thinking", "redacted_thinking")


async def messages(core: Core, received: Received) -> Reply:
    """Answer a conversation."""
    body = received.parsed(MessagesRequest)
    model = core.check_model(body.model)
    chat = _as_chat(body)
    chat.max_tokens, chat.temperature, chat.top_p, chat.top_k = (
        body.max_tokens,
        body.temperature,
        body.top_p,
        body.top_k,
    )
    chat.stop, chat.seed, chat.stream, chat.verispec = body.stop_sequences, body.seed, body.stream, body.verispec
    answer = core.start(await chat_call(core, chat, received))
    if body.stream:
        return Reply(_frames(answer, model), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(lambda: _message(answer, model, new_id("msg_"))))


async def count_tokens(core: Core, received: Received) -> Reply:
    """How many tokens a conversation has as a prompt."""
    body = received.parsed(CountRequest)
    core.check_model(body.model)
    chat = _as_chat(body)
    return json_reply({"input_tokens": len(await rendered(core, chat, tool_choice=chat.tool_choice))})


def _as_chat(body: MessagesRequest | CountRequest) -> ChatRequest:
    """The conversation as a chat completion has it."""
    found = []
    if body.system:
        found.append(Message(role="system", content=joined_text(body.system, "system")))
    for i, message in enumerate(body.messages):
        if message.get("role") not in ("user", "assistant", "system"):
            raise ApiError(400, f"messages[{i}].role must be user or assistant", param=f"messages[{i}].role")
        found += _messages(str(message["role"]), message.get("content"), f"messages[{i}].content")
    choice = (body.tool_choice or {}).get("type")
    if choice in ("any", "tool"):
        raise ApiError(
            400, "tool_choice can be auto or none: no answer can be made to call a tool", param="tool_choice"
        )
    return ChatRequest(messages=found, model=body.model, tools=_tools(body.tools), tool_choice=choice)


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    found = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            continue  # tools of Anthropic's own servers
        if not isinstance(tool.get("name"), str):
            raise ApiError(400, f"tools[{i}].name must be a string", param=f"tools[{i}].name")
        function = {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        found.append({"type": "function", "function": function})
    return found or None


def _messages(role: str, content: Any, where: str) -> list[Message]:
    """What one message's blocks say: text, calls of tools, and their results, each of which is a message of its own."""
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ApiError(400, f"{where} must be text or a list of blocks", param=where)
    texts: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    found: list[Message] = []
    for i, block in enumerate(content):
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content") or ""
            if not isinstance(result, str | list):
                raise ApiError(400, f"{where}[{i}].content must be text or blocks", param=f"{where}[{i}].content")
            text = joined_text(result, f"{where}[{i}].content")
            found.append(Message(role="tool", content=text, tool_call_id=str(block.get("tool_use_id"))))
        elif kind not in _NOT_SHOWN:
            texts.append(block)
    if texts or calls or not found:
        found.append(Message(role=role, content=joined_text(texts, where), tool_calls=calls or None))
    return found


def _message(answer: Answer, model: str, message_id: str) -> dict[str, Any]:
    choice = answer.choices[0]
    reason, stop = _stop(answer)
    has_begun = choice.num_tokens or choice.output is not None
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": choice.text, "citations": None}] if has_begun else [],
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(answer),
        "verispec": {**answer.extension(0), "system_fingerprint": answer.core.fingerprint},
    }


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _stop(answer: Answer) -> tuple[str | None, str | None]:
    """Why it ended, and by which stop sequence: without one of those it was an end-of-turn token."""
    choice = answer.choices[0]
    if choice.output is None:
        return None, None
    if choice.output.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    last = choice.entries.token_ids[-1] if choice.num_tokens else None
    if answer.call.params.stop and last not in answer.core.llm.tokenizer.eos_ids:
        whole = answer.core.llm.tokenizer.decode(choice.entries.token_ids)
        found = [stop for stop in answer.call.params.stop if stop in whole]
        return "stop_sequence", min(found, key=whole.index, default=None)
    return "end_turn", None


async def _frames(answer: Answer, model: str) -> AsyncIterator[bytes]:
    def written(kind: str, event_id: str | None = None, **fields: Any) -> bytes:
        return event(_encode({"type": kind, **fields}), name=kind, event_id=event_id)

    try:
        yield written("message_start", message=_message(answer, model, new_id("msg_")))
        yield written("content_block_start", index=0, content_block={"type": "text", "text": "", "citations": None})
        async for commits in answer.commits():
            yield b"".join(
                written("content_block_delta", f"0.{c.end}", index=0, delta={"type": "text_delta", "text": c.text})
                for c in commits
            )
        yield written("content_block_stop", index=0)
        reason, stop = _stop(answer)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield written("message_delta", delta=delta, usage=_usage(answer), verispec=answer.extension(0))
        yield written("message_stop")
    except Exception as error:
        yield event(_encode(as_api_error(error).body(anthropic=True)), name="error")
