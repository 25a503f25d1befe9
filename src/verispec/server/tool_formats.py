"""How models write calls of tools: a format per family, known by the chat template.

Templates that know nothing of tools get them as text: in the system message, in hermes' form, which most models have
seen. Knows texts, nothing of requests or of how calls are read back (`tool_reader`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`open` is what calls are known by, `{"name": ..., KEY: ...}` each call, `between` two of them, `end` after all.

    `close` ends a call that no grammar guides, where the format has such a mark. `is_leading`: calls are the whole
    answer. `id_len`: characters that the template allows in the id of a call.
    """

    name: str
    open: str
    between: str | None
    end: str
    begin: str = ""  # behind `open`
    close: str = ""
    key: str = "arguments"
    is_leading: bool = False
    id_len: int | None = None
    has_tools: bool = True  # the template writes tools into the prompt,
    has_calls: bool = True  # and calls and their results

    def heads(self, names: Sequence[str]) -> dict[str, str]:
        """What comes before a call's arguments, and the name it calls."""
        return {f'{{"name": {json.dumps(name)}, "{self.key}": ': name for name in names}


HERMES = ToolFormat(
    name="hermes",
    open="<tool_call>",
    begin="\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    close="</tool_call>",
)
LLAMA3 = ToolFormat(name="llama3_json", open="{", between=None, end="", key="parameters", is_leading=True)
MISTRAL = ToolFormat(name="mistral", open="[TOOL_CALLS]", begin="[", between=", ", end="]", id_len=9)


def recognised(template: str) -> ToolFormat:
    """The format of the family whose template this is."""
    fmt = HERMES
    if MISTRAL.open in template:
        fmt = replace(MISTRAL, begin=" [") if f"{MISTRAL.open} [" in template else MISTRAL
    elif "<|python_tag|>" in template or "ipython" in template:
        fmt = LLAMA3
    return replace(fmt, has_tools="tools" in template, has_calls="tool_calls" in template)


def calls_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of calls: those and their results are written into texts."""
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        written = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
        if written:
            text = "\n".join(filter(None, (message["content"], *written)))
            found.append({"role": message["role"], "content": text})
        elif message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if found and found[-1].get("holds_results"):
                found[-1]["content"] += "\n" + text
            else:
                found.append({"role": "user", "content": text, "holds_results": True})
        else:
            found.append(message)
    return found


def tools_as_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: they are written into the system message."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    before = messages[0]["content"] + "\n\n" if has_system else ""
    return [{"role": "system", "content": before + _tools_text(tools)}, *messages[int(has_system) :]]


def _call_text(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, given as JSON within <tools></tools>:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and its arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
    )
