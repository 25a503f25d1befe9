"""/v1/messages and its count_tokens: Anthropic's interface over the same call as a chat completion."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from verispec.server.answer import Answer
from verispec.server.api import ChatRequest, CountRequest, Message, MessagesRequest
from verispec.server.call import refuse_trace
from verispec.server.chat import chat_call, rendered
from verispec.server.choices import Item
from verispec.server.conversation import joined_text
from verispec.server.core import Core
from verispec.server.errors import ApiError, as_api_error, renamed
from verispec.server.http import EVENTS, Received, Reply, event, json_reply
from verispec.server.openai import new_id
from verispec.server.tool_use import tool_use
from verispec.types import FinishReason

_encode = msgspec.json.encode
_FUNCTION = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
_NAMES = {
    "tool_choice.function": "tool_choice", ".function.parameters": ".input_schema", ".function": "",
    "response_format.json_schema": "output_config.format", "response_format": "output_config.format",
    "stop": "stop_sequences",
}  # fmt: skip
_NOT_SHOWN = ("thinking", "redacted_thinking")


async def messages(core: Core, received: Received) -> Reply:
    """Answer a conversation."""
    body = received.parsed(MessagesRequest)
    model = core.check_model(body.model)
    refuse_trace(body.verispec)
    chat = _as_chat(body)
    chat.max_tokens, chat.temperature, chat.top_p, chat.top_k = (
        body.max_tokens,
        body.temperature,
        body.top_p,
        body.top_k,
    )
    chat.stop, chat.seed, chat.stream, chat.verispec = body.stop_sequences, body.seed, body.stream, body.verispec
    with renamed(_NAMES, ChatRequest.__struct_fields__):
        answer = core.start(await chat_call(core, chat, received))
    if body.stream:
        return Reply(_frames(answer, model), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(lambda: _message(answer, model, new_id("msg_"))))


async def count_tokens(core: Core, received: Received) -> Reply:
    """How many tokens a conversation has as a prompt."""
    body = received.parsed(CountRequest)
    core.check_model(body.model)
    chat = _as_chat(body)
    with renamed(_NAMES, ChatRequest.__struct_fields__):
        tools = tool_use(chat.tools, chat.tool_choice, core.llm.tokenizer)
    return json_reply({"input_tokens": len(await rendered(core, chat, tools))})


def _as_chat(body: MessagesRequest | CountRequest) -> ChatRequest:
    """The conversation as a chat completion has it."""
    _check_edits(body.context_management or {})
    found = []
    if body.system:
        found.append(Message(role="system", content=joined_text(body.system, "system")))
    for i, message in enumerate(body.messages):
        if message.get("role") not in ("user", "assistant", "system"):
            raise ApiError(400, f"messages[{i}].role must be user or assistant", param=f"messages[{i}].role")
        found += _messages(str(message["role"]), message.get("content"), f"messages[{i}].content")
    choice = body.tool_choice or {}
    return ChatRequest(
        messages=found,
        model=body.model,
        tools=None if body.tools is None else [_in_function(tool) for tool in body.tools],
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") is True else None,
        response_format=_format(body.output_config) if isinstance(body, MessagesRequest) else None,
    )


def _check_edits(management: Mapping[str, Any]) -> None:
    """Raise 400 for what would change the prompt. What a model thought before is never shown to it again."""
    edits = management.get("edits") or []
    if not isinstance(edits, list) or management.keys() - {"edits"}:
        raise ApiError(400, "context_management may have a list of edits, and nothing else", param="context_management")
    for i, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        if not str(kind).startswith("clear_thinking_"):
            place = f"context_management.edits[{i}].type"
            raise ApiError(400, f"{place}: {str(kind)[:50]!r} is not supported", param=place)


def _format(config: Any) -> dict[str, Any] | None:
    """What the answer has to look like, as chat completions have it."""
    asked = config.get("format") if isinstance(config, Mapping) else None
    if not isinstance(asked, Mapping | None):
        raise ApiError(400, "output_config.format must be an object", param="output_config.format")
    return None if asked is None else {"type": asked.get("type"), "json_schema": asked}


def _in_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat completions have it; those of Anthropic's own servers as they are."""
    if tool.get("type", "custom") not in ("custom", None):
        return dict(tool)
    function = {theirs: tool[ours] for ours, theirs in _FUNCTION.items() if tool.get(ours) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if kind == "any" else kind


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
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_block(answer, i, item, is_whole=True) for i, item in enumerate(choice.items) if item.is_told],
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(answer),
        "verispec": {**answer.extension(0), "system_fingerprint": answer.core.fingerprint},
    }


def _block(answer: Answer, index: int, item: Item, *, is_whole: bool) -> dict[str, Any]:
    """A text or a call. The arguments of one that was cut off are no JSON, and left out."""
    if item.name is None:
        return {"type": "text", "text": item.text if is_whole else "", "citations": None}
    written = msgspec.Raw(item.text.encode() if is_whole and item.is_complete else b"{}")
    return {"type": "tool_use", "id": answer.call_id(0, index), "name": item.name, "input": written}


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
    if choice.has_called:
        return "tool_use", None
    tokenizer, token_ids = answer.core.llm.tokenizer, [*answer.given_ids(0), *choice.entries.token_ids]
    if token_ids and token_ids[-1] not in tokenizer.eos_ids:
        whole = tokenizer.decode(token_ids)
        if found := [stop for stop in answer.call.params.stop if stop in whole]:
            return "stop_sequence", min(found, key=whole.index)
    return "end_turn", None  # a grammar may end it, too


async def _frames(answer: Answer, model: str) -> AsyncIterator[bytes]:
    def written(kind: str, event_id: str | None = None, **fields: Any) -> bytes:
        return event(_encode({"type": kind, **fields}), name=kind, event_id=event_id)

    items = answer.choices[0].items
    current: int | None = None  # the block that is being told

    def opened(index: int) -> bytes:
        block = _block(answer, index, items[index], is_whole=False)
        closed = b"" if current is None else written("content_block_stop", index=current)
        return closed + written("content_block_start", index=index, content_block=block)

    try:
        yield written("message_start", message=_message(answer, model, new_id("msg_")))
        async for commits in answer.commits():
            told = b""
            for commit in commits:
                for i, (index, part) in enumerate(commit.parts, start=1):
                    if index != current:
                        told += opened(index)
                        current = index
                    delta = {"type": "text_delta", "text": part.text}
                    if part.name is not None:
                        delta = {"type": "input_json_delta", "partial_json": part.text}
                    event_id = f"0.{commit.end}" if i == len(commit.parts) else None
                    told += written("content_block_delta", event_id, index=index, delta=delta)
            if told:
                yield told
        if current is None:
            yield opened(len(items) - 1)
            current = len(items) - 1
        yield written("content_block_stop", index=current)
        reason, stop = _stop(answer)
        ending = {"stop_reason": reason, "stop_sequence": stop}
        yield written("message_delta", delta=ending, usage=_usage(answer), verispec=answer.extension(0))
        yield written("message_stop")
    except Exception as error:
        yield event(_encode(as_api_error(error).body(anthropic=True)), name="error")
