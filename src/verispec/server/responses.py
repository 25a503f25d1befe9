"""/v1/responses: items in, items out, over the same call as a chat completion. Nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from verispec.server.api import ChatRequest, Message, ResponsesRequest
from verispec.server.chat import chat_call
from verispec.server.conversation import check_text_format, joined_text
from verispec.server.core import Answer, Core
from verispec.server.errors import ApiError, as_api_error
from verispec.server.http import EVENTS, Received, Reply, event, json_reply
from verispec.server.logprobs import chat_entries
from verispec.server.openai import new_id
from verispec.types import FinishReason

_encode = msgspec.json.encode
_WANTS_LOGPROBS = "message.output_text.logprobs"


async def responses(core: Core, received: Received) -> Reply:
    """Answer items."""
    body = received.parsed(ResponsesRequest)
    model = core.check_model(body.model)
    if body.background:
        raise ApiError(400, "background is not supported", param="background")
    chat, skipped = _as_chat(body)
    answer = core.start(await chat_call(core, chat, received))
    writer = _Writer(answer, body, model, skipped)
    if body.stream:
        return Reply(writer.frames(), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(lambda: writer.response(writer.status)))


def _as_chat(body: ResponsesRequest) -> tuple[ChatRequest, list[str]]:
    """The same request as a chat completion, and the types of tools that it leaves out: only functions can be shown."""
    check_text_format((body.text or {}).get("format"), "text.format")
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += [m for i, item in enumerate(body.input) for m in _messages(item, f"input[{i}]")]
    tools, skipped = [], []
    for tool in body.tools or ():
        if tool.get("type") == "function":
            tools.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
        else:
            skipped.append(str(tool.get("type"))[:50])
    chat = ChatRequest(
        messages=messages,
        model=body.model,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=_wants_logprobs(body),
        top_logprobs=body.top_logprobs if _wants_logprobs(body) else None,
        tools=tools or None,
        tool_choice=body.tool_choice,
        seed=body.seed,
        stream=body.stream,
        verispec=body.verispec,
    )
    return chat, skipped


def _wants_logprobs(body: ResponsesRequest) -> bool:
    return bool(body.top_logprobs) or (isinstance(body.include, list) and _WANTS_LOGPROBS in body.include)


def _messages(item: Mapping[str, Any], where: str) -> list[Message]:
    """The messages that an item stands for."""
    kind = item.get("type", "message")
    if kind == "message":
        if not isinstance(item.get("role"), str):
            raise ApiError(400, f"{where}.role must be a string", param=f"{where}.role")
        return [Message(role=_role(item["role"]), content=_text(item.get("content"), f"{where}.content"))]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return [Message(role="assistant", content="", tool_calls=[call])]
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{where}.output")
        return [Message(role="tool", content=output, tool_call_id=str(item.get("call_id")))]
    if kind == "reasoning":  # what a model thought before is not shown to it again
        return []
    raise ApiError(400, f"{where}: items of type {str(kind)[:50]!r} are not supported", param=f"{where}.type")


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _text(content: Any, where: str) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(part, Mapping) for part in content):
            raise ApiError(400, f"{where} must be text or a list of parts", param=where)
    elif not isinstance(content, str):
        raise ApiError(400, f"{where} must be text or a list of parts", param=where)
    return joined_text(content, where)


class _Writer:
    """One answer as a response object, and as the events that lead to it."""

    def __init__(self, answer: Answer, body: ResponsesRequest, model: str, skipped: list[str]) -> None:
        self._answer = answer
        self._body = body
        self._model = model
        self._skipped = skipped
        self._id = new_id("resp_")
        self._item_id = new_id("msg_")
        self._number = 0

    @property
    def status(self) -> str:
        output = self._answer.choices[0].output
        return "incomplete" if output is None or output.finish_reason is FinishReason.LENGTH else "completed"

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The whole object, in any state."""
        answer, body = self._answer, self._body
        has_begun = answer.choices[0].output is not None or answer.choices[0].num_tokens > 0
        usage = answer.usage()
        own = answer.extension(0)
        if self._skipped:
            own["skipped_tools"] = self._skipped
        return {
            "id": self._id,
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
            "model": self._model,
            "output": [self._item(status)] if has_begun else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": answer.call.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.get("type") == "function"],
            "top_p": answer.call.params.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            if has_begun
            else None,
            "verispec": {**own, "system_fingerprint": answer.core.fingerprint},
        }

    def _item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self._part(self._answer.choices[0].text)],
        }

    def _part(self, text: str) -> dict[str, Any]:
        entries = self._answer.choices[0].entries if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _logprobs(self, entries: Sequence[Any]) -> list[dict[str, Any]]:
        return chat_entries(self._answer.core.llm.tokenizer, entries) if _wants_logprobs(self._body) else []

    def _event(self, kind: str, event_id: str | None = None, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(_encode(data), name=kind, event_id=event_id)

    async def frames(self) -> AsyncIterator[bytes]:
        """The events, to the end."""
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        try:
            yield self._event("response.created", response=self.response("in_progress"))
            yield self._event("response.in_progress", response=self.response("in_progress"))
            yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
            yield self._event("response.content_part.added", part=self._part(""), **place)
            async for commits in self._answer.commits():
                for commit in commits:
                    yield self._event(
                        "response.output_text.delta",
                        f"0.{commit.end}",
                        delta=commit.text,
                        logprobs=self._logprobs(commit.logprobs),
                        **place,
                    )
            text = self._answer.choices[0].text
            part = self._part(text)
            yield self._event("response.output_text.done", text=text, logprobs=part["logprobs"], **place)
            yield self._event("response.content_part.done", part=part, **place)
            yield self._event("response.output_item.done", output_index=0, item=self._item(self.status))
            yield self._event(f"response.{self.status}", response=self.response(self.status))
        except Exception as error:
            yield self._event("response.failed", response=self.response("failed", as_api_error(error)))
