"""/v1/chat/completions, and the call behind every interface that speaks in messages."""

from __future__ import annotations

from typing import Any

from verispec.errors import InputError
from verispec.server.api import ChatRequest, TemplateRequest, TokenizeRequest
from verispec.server.conversation import check_text_format, checked_tools, plain_messages
from verispec.server.core import Answer, Call, Choice, Commit, Core, sampling_params
from verispec.server.errors import ApiError
from verispec.server.http import Received, Reply
from verispec.server.logprobs import chat_entries, prompt_entries
from verispec.server.openai import Shape, make_call, reply


async def chat_completions(core: Core, received: Received) -> Reply:
    """Answer a conversation."""
    body = received.parsed(ChatRequest)
    model = core.check_model(body.model)
    answer = core.start(await chat_call(core, body, received))
    return await reply(answer, body, _shape(body), model)


async def chat_call(core: Core, body: ChatRequest, received: Received) -> Call:
    """The call that a conversation makes."""
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, "modalities can only be text", param="modalities")
    check_text_format(body.response_format, "response_format")
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true")
    params = sampling_params(
        body,
        core.llm.generation_defaults,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    prompt_ids = await rendered(core, body, tool_choice=body.tool_choice)
    return make_call(core, body, received, prompts=[prompt_ids], params=params)


async def rendered(
    core: Core, body: ChatRequest | TemplateRequest | TokenizeRequest, *, tool_choice: Any = None
) -> list[int]:
    """The prompt tokens of a conversation."""
    messages = plain_messages(body.messages or [])
    tools = checked_tools(body.tools, tool_choice)
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InputError("continue_final_message and add_generation_prompt exclude each other")

    def make() -> list[int]:
        return core.llm.chat_ids(
            messages,
            tools=tools,
            variables=body.chat_template_kwargs,
            add_generation_prompt=not goes_on and body.add_generation_prompt is not False,
            continues_last=goes_on,
        )

    return await core.tokenised(make, sum(len(message["content"]) for message in messages))


def _shape(body: ChatRequest) -> Shape:
    wants_logprobs, wants_ids = bool(body.logprobs), bool(body.return_token_ids)

    def logprobs(answer: Answer, entries: Any) -> dict[str, Any] | None:
        if not wants_logprobs:
            return None
        return {"content": chat_entries(answer.core.llm.tokenizer, entries), "refusal": None}

    def whole(answer: Answer, index: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs(answer, choice.entries),
            "finish_reason": None if choice.output is None else str(choice.output.finish_reason),
        }
        if wants_ids:
            found["token_ids"] = choice.entries.token_ids
            found["prompt_token_ids"] = list(answer.call.prompts[0])
        if body.prompt_logprobs is not None and choice.output is not None:
            found["prompt_logprobs"] = prompt_entries(answer.core.llm.tokenizer, choice.output.prompt_logprobs)
        return found

    def frame(answer: Answer, commit: Commit) -> dict[str, Any]:
        reason = commit.event.finish_reason
        found: dict[str, Any] = {
            "index": commit.choice,
            "delta": {"content": commit.text},
            "logprobs": logprobs(answer, commit.logprobs),
            "finish_reason": None if reason is None else str(reason),
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
        opening={"delta": {"role": "assistant", "content": ""}},
        has_details=wants_logprobs or wants_ids,
    )
