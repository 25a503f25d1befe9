"""/v1/responses: items in, items out, over the same call as a chat completion. Nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from verispec.server.answer import Answer
from verispec.server.api import ChatRequest, Drawing, Message, ResponsesRequest
from verispec.server.call import refuse_trace
from verispec.server.chat import chat_call
from verispec.server.choices import Commit
from verispec.server.conversation import joined_text
from verispec.server.core import Core
from verispec.server.errors import ApiError, as_api_error, renamed
from verispec.server.http import EVENTS, Received, Reply, event, json_reply
from verispec.server.logprobs import chat_entries
from verispec.server.openai import new_id
from verispec.server.tool_reader import Part
from verispec.types import FinishReason, TokenLogprob

_encode = msgspec.json.encode
_ID_DIGITS = 24
_WANTS_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_NAMES = {
    ".tool_calls[0]": "", ".function": "", "response_format.json_schema": "text.format",
    "response_format": "text.format", "messages": "input", "max_tokens": "max_output_tokens",
}  # fmt: skip


async def responses(core: Core, received: Received) -> Reply:
    """Answer items."""
    body = received.parsed(ResponsesRequest)
    model = core.check_model(body.model)
    if body.background:
        raise ApiError(400, "background is not supported", param="background")
    refuse_trace(body.verispec)
    chat, places = _as_chat(body)
    names = {f"messages[{i}]": place for i, place in enumerate(places)}
    with renamed({**names, **_NAMES}, ChatRequest.__struct_fields__):
        answer = core.start(await chat_call(core, chat, received))
    writer = _Writer(answer, body, model)
    if body.stream:
        return Reply(writer.frames(), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(lambda: writer.response(writer.status)))


def _as_chat(body: ResponsesRequest) -> tuple[ChatRequest, list[str]]:
    """The same request as a chat completion, and where this one has what its messages are made of."""
    found = [] if body.instructions is None else [("instructions", Message(role="system", content=body.instructions))]
    if isinstance(body.input, str):
        found.append(("input", Message(role="user", content=body.input)))
    else:
        items = [(f"input[{i}]", item) for i, item in enumerate(body.input)]
        found += [(where, message) for where, item in items for message in _messages(item, where)]
    chat = ChatRequest(
        messages=[message for _, message in found],
        model=body.model,
        max_tokens=body.max_output_tokens,
        logprobs=_wants_logprobs(body),
        top_logprobs=body.top_logprobs if _wants_logprobs(body) else None,
        tools=None if body.tools is None else [_in_function(tool) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format((body.text or {}).get("format")),
        stream=body.stream,
        verispec=body.verispec,
        **{name: getattr(body, name) for name in Drawing.__struct_fields__},
    )
    return chat, [where for where, _ in found]


def _format(asked: Any) -> dict[str, Any] | None:
    """As chat completions have it, where a schema is inside of `json_schema`."""
    if not isinstance(asked, dict | None):
        raise ApiError(400, "text.format must be an object", param="text.format")
    return asked if asked is None or asked.get("type") != "json_schema" else {**asked, "json_schema": asked}


def _in_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chat completions name it, inside of `function`; other kinds of tools as they are."""
    if tool.get("type") != "function":
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return _in_function(choice) if isinstance(choice, dict) else choice
    listed = choice.get("tools")
    tools = [_in_function(tool) if isinstance(tool, Mapping) else tool for tool in listed or ()]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _wants_logprobs(body: ResponsesRequest) -> bool:
    return bool(body.top_logprobs) or _WANTS_LOGPROBS in (body.include or ())


def _messages(item: Mapping[str, Any], where: str) -> list[Message]:
    """The messages that an item stands for."""
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise ApiError(400, f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
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

    def __init__(self, answer: Answer, body: ResponsesRequest, model: str) -> None:
        self._answer = answer
        self._choice = answer.choices[0]
        self._body = body
        self._model = model
        self._id = new_id("resp_")
        self._number = 0
        self._open: int | None = None  # the item that is being told
        self._unsaid: list[TokenLogprob] = []  # of tokens whose text no event has had yet

    @property
    def status(self) -> str:
        output = self._choice.output
        return "incomplete" if output is None or output.finish_reason is FinishReason.LENGTH else "completed"

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The whole object, in any state."""
        answer, body = self._answer, self._body
        has_begun = self._choice.output is not None or self._choice.num_tokens > 0
        usage = answer.usage()
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
            "output": [
                self._item(i, self._item_status(i, status)) for i, item in enumerate(self._choice.items) if item.is_told
            ],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": answer.call.params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
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
            "verispec": {**answer.extension(0), "system_fingerprint": answer.core.fingerprint},
        }

    def _item_status(self, index: int, status: str) -> str:
        is_last = index == len(self._choice.items) - 1
        return "incomplete" if is_last and status != "completed" else "completed"

    def _item(self, index: int, status: str) -> dict[str, Any]:
        item = self._choice.items[index]
        text = "" if status == "in_progress" else item.text
        if item.name is not None:
            call = {"call_id": self._answer.call_id(0, index), "name": item.name, "arguments": text}
            return {"id": self._item_id(index), "type": "function_call", "status": status, **call}
        content = [] if status == "in_progress" else [self._part(text)]
        return {
            "id": self._item_id(index),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _item_id(self, index: int) -> str:
        prefix = "msg_" if self._choice.items[index].name is None else "fc_"
        return prefix + self._answer.id_of(0, index)[:_ID_DIGITS]

    def _part(self, text: str) -> dict[str, Any]:
        entries = self._choice.entries if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _logprobs(self, entries: Sequence[Any]) -> list[dict[str, Any]]:
        return chat_entries(self._answer.core.llm.tokenizer, entries) if _wants_logprobs(self._body) else []

    def _event(self, kind: str, event_id: str | None = None, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(_encode(data), name=kind, event_id=event_id)

    async def frames(self) -> AsyncIterator[bytes]:
        """The events, to the end."""
        try:
            yield self._event("response.created", response=self.response("in_progress"))
            yield self._event("response.in_progress", response=self.response("in_progress"))
            async for commits in self._answer.commits():
                for commit in commits:
                    self._unsaid += commit.logprobs
                    for told in self._told(commit):
                        yield told
            if self._open is None:
                yield self._opened(len(self._choice.items) - 1)
            yield self._closed()
            yield self._event(f"response.{self.status}", response=self.response(self.status))
        except Exception as error:
            yield self._event("response.failed", response=self.response("failed", as_api_error(error)))

    def _told(self, commit: Commit) -> Iterator[bytes]:
        """The events of a commit; the last one has its id, so that nothing is told twice."""
        for i, (index, part) in enumerate(commit.parts):
            if index != self._open:
                yield (b"" if self._open is None else self._closed()) + self._opened(index)
            event_id = f"0.{commit.end}" if i == len(commit.parts) - 1 else None
            yield self._delta(index, part, event_id)

    def _delta(self, index: int, part: Part, event_id: str | None = None) -> bytes:
        place: dict[str, Any] = {"item_id": self._item_id(index), "output_index": index}
        if part.name is not None:
            return self._event("response.function_call_arguments.delta", event_id, delta=part.text, **place)
        logprobs, self._unsaid = self._logprobs(self._unsaid), []
        return self._event(
            "response.output_text.delta", event_id, delta=part.text, logprobs=logprobs, content_index=0, **place
        )

    def _opened(self, index: int) -> bytes:
        self._open = index
        place: dict[str, Any] = {"item_id": self._item_id(index), "output_index": index}
        told = self._event("response.output_item.added", output_index=index, item=self._item(index, "in_progress"))
        if self._choice.items[index].name is None:
            told += self._event("response.content_part.added", part=self._part(""), content_index=0, **place)
        return told

    def _closed(self) -> bytes:
        index = self._open
        assert index is not None
        item = self._choice.items[index]
        place: dict[str, Any] = {"item_id": self._item_id(index), "output_index": index}
        if item.name is not None:
            kind = "response.function_call_arguments.done"
            told = self._event(kind, name=item.name, arguments=item.text, **place)
        else:
            part, place = self._part(item.text), {**place, "content_index": 0}
            told = self._delta(index, Part("")) if self._unsaid and _wants_logprobs(self._body) else b""
            told += self._event("response.output_text.done", text=item.text, logprobs=part["logprobs"], **place)
            told += self._event("response.content_part.done", part=part, **place)
        whole = self._item(index, self._item_status(index, self.status))
        return told + self._event("response.output_item.done", output_index=index, item=whole)
