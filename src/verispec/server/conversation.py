"""Conversations as clients send them, made into what chat templates expect: messages with text, calls as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verispec.errors import InputError
from verispec.server.api import MAX_DEPTH, Message, is_too_deep
from verispec.server.errors import ApiError

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with one text each."""
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def joined_text(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    """The text of a content; parts that are no text are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind not in _TEXT_PARTS:
            raise ApiError(400, f"{where}[{i}]: only text is supported, not {kind!r:.50}", param=f"{where}[{i}].type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{where}[{i}].text must be a string", param=f"{where}[{i}].text")
        texts.append(text)
    return "".join(texts)


def _plain(message: Message, where: str) -> dict[str, Any]:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise ApiError(400, f"{where}.{name} is not supported", param=f"{where}.{name}")
    if message.content is None and message.role != "assistant":
        raise InputError(f"messages: {where}.content is missing")
    plain: dict[str, Any] = {"role": message.role, "content": joined_text(message.content, f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls is not None:
        plain["tool_calls"] = [
            _plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _plain_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates write out."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}.function must have a name", param=f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            raise ApiError(
                400, f"{where}.function.arguments is not JSON", param=f"{where}.function.arguments"
            ) from None
    if is_too_deep(arguments):
        place = f"{where}.function.arguments"
        raise ApiError(400, f"{place} is nested more than {MAX_DEPTH} levels deep", param=place)
    return {**call, "function": {**function, "arguments": arguments}}
