"""/v1/chat/completions, and the call behind every interface that speaks in messages."""

from __future__ import annotations

from typing import Any

import msgspec

from verispec.errors import InputError
from verispec.server.answer import Answer
from verispec.server.api import ChatRequest, TemplateRequest, TokenizeRequest
from verispec.server.call import Call, sampling_params
from verispec.server.choices import Choice, Commit, Item
from verispec.server.conversation import plain_messages
from verispec.server.core import Core
from verispec.server.errors import ApiError
from verispec.server.http import Received, Reply
from verispec.server.logprobs import chat_entries, prompt_entries
from verispec.server.openai import Shape, make_call, reply
from verispec.server.prediction import predicted_text
from verispec.server.tool_formats import calls_as_text, tools_as_text
from verispec.server.tool_use import ToolUse, tool_use


async def chat_completions(core: Core, received: Received) -> Reply:
    """Answer a conversation."""
    body = received.parsed(ChatRequest)
    model = core.check_model(body.model)
    answer = core.start(await chat_call(core, body, received))
    return await reply(answer, body, _shape(body, has_tools=bool(answer.call.tools.functions)), model)


async def chat_call(core: Core, body: ChatRequest, received: Received) -> Call:
    """The call that a conversation makes."""
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, "modalities can only be text", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true")
    if body.add_special_tokens:
        raise InputError("add_special_tokens: the chat template writes them")
    params = sampling_params(
        body,
        body.verispec,
        core.llm.generation_defaults,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tools = tool_use(body.tools, body.tool_choice, core.llm.tokenizer, parallel=body.parallel_tool_calls)
    prompt_ids = await rendered(core, body, tools)
    predicted = predicted_text(body.prediction)
    prediction_ids = await core.tokenised(
        lambda: core.llm.tokenizer.encode(predicted, add_special=False), len(predicted)
    )
    return await make_call(
        core, body, received, prompts=[prompt_ids], params=params, stream=body.stream, extension=body.verispec,
        tools=tools, prediction_ids=prediction_ids,
    )  # fmt: skip


async def rendered(
    core: Core, body: ChatRequest | TemplateRequest | TokenizeRequest, tools: ToolUse | None = None
) -> list[int]:
    """The prompt tokens of a conversation."""
    messages = plain_messages(body.messages or [])
    tools = tools or tool_use(body.tools, None, core.llm.tokenizer)
    declared = [dict(tool) for tool in tools.declared] or None
    if not tools.format.has_calls:
        messages = calls_as_text(messages)
    if declared and not tools.format.has_tools:
        messages, declared = tools_as_text(messages, declared), None
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InputError("continue_final_message and add_generation_prompt exclude each other")

    def make() -> list[int]:
        return core.llm.chat_ids(
            messages,
            tools=declared,
            variables=body.chat_template_kwargs,
            add_generation_prompt=not goes_on and body.add_generation_prompt is not False,
            continues_last=goes_on,
        )

    return await core.tokenised(make, len(msgspec.json.encode(body)))


def _shape(body: ChatRequest, *, has_tools: bool) -> Shape:
    wants_logprobs, wants_ids = bool(body.logprobs), bool(body.return_token_ids)

    def logprobs(answer: Answer, entries: Any) -> dict[str, Any] | None:
        if not wants_logprobs:
            return None
        return {"content": chat_entries(answer.core.llm.tokenizer, entries), "refusal": None}

    def whole(answer: Answer, index: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "message": _message(answer, index, choice),
            "logprobs": logprobs(answer, choice.entries),
            "finish_reason": _reason(choice),
        }
        if wants_ids:
            found["token_ids"] = choice.entries.token_ids
            found["prompt_token_ids"] = list(answer.call.prompts[0])
        if body.prompt_logprobs is not None and choice.output is not None:
            found["prompt_logprobs"] = prompt_entries(answer.core.llm.tokenizer, choice.output.prompt_logprobs)
        return found

    def frame(answer: Answer, commit: Commit) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": commit.choice,
            "delta": _delta(answer, commit) if has_tools else {"content": commit.text},
            "logprobs": logprobs(answer, commit.logprobs),
            "finish_reason": _reason(answer.choices[commit.choice]),
        }
        if wants_ids:
            found["token_ids"] = commit.logprobs.token_ids
        return found

    return Shape(
        kind="chat.completion",
        id_prefix="chatcmpl-",
        whole=whole,
        frame=frame,
        plain=(b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}'),
        opening={"delta": {"role": "assistant", "content": None if has_tools else ""}},
        has_details=wants_logprobs or wants_ids or has_tools,
    )


def _reason(choice: Choice) -> str | None:
    if choice.output is None:
        return None
    return "tool_calls" if choice.has_called else str(choice.output.finish_reason)


def _message(answer: Answer, index: int, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {
                "id": answer.call_id(index, i),
                "type": "function",
                "function": {"name": item.name, "arguments": item.text},
            }
            for i, item in enumerate(choice.items)
            if item.name is not None and item.is_told
        ]
    return message


def _delta(answer: Answer, commit: Commit) -> dict[str, Any]:
    """What a commit adds: text, and of every call that it adds to, one entry."""
    items = answer.choices[commit.choice].items
    calls: dict[int, dict[str, Any]] = {}
    for number, part in commit.parts:
        if part.name is None:
            continue
        if number not in calls:
            calls[number] = {"index": _num_calls(items[:number]), "function": {"arguments": ""}}
        if part.opens:
            calls[number] |= {"id": answer.call_id(commit.choice, number), "type": "function"}
            calls[number]["function"]["name"] = part.name
        calls[number]["function"]["arguments"] += part.text
    delta: dict[str, Any] = {"content": commit.text} if commit.text else {}
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


def _num_calls(items: list[Item]) -> int:
    return sum(item.name is not None for item in items)
