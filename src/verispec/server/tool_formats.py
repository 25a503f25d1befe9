"""How models write calls of tools: a format per family, known by the chat template, and the grammar of such calls.

Templates that know nothing of tools get them as text: in the system message, in hermes' form, which most models have
seen. Knows texts and grammars, nothing of requests or of how calls are read back (`tool_reader`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verispec.constraints import json_term
from verispec.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`open` is what calls are known by, `{"name": ..., KEY: ...}` each call, `between` two of them, `end` after all.

    With `args`, a call is its name, this mark and its arguments; a model may put `call_id` and an id behind the name.
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
    args: str = ""
    call_id: str = ""
    is_leading: bool = False
    id_len: int | None = None
    has_tools: bool = True  # the template writes tools into the prompt,
    has_calls: bool = True  # and calls and their results

    def heads(self, names: Sequence[str]) -> dict[str, str]:
        """What comes before a call's arguments, and the name it calls."""
        if self.args:
            return {name + self.args: name for name in names}
        return {f'{{"name": {json.dumps(name)}, "{self.key}": ': name for name in names}

    @property
    def tail(self) -> str:
        """What comes behind a call's arguments."""
        return "" if self.args else "}"

    def control(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The marks of this format that are control tokens of the model."""
        marks = {self.open, self.args, self.call_id}
        return {text: token_id for token_id, text in tokenizer.special_texts.items() if text in marks}


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
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    open="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    end="",
    args="[ARGS]",
    call_id="[CALL_ID]",
    id_len=9,
)


def recognised(template: str) -> ToolFormat:
    """The format of the family whose template this is."""
    fmt = HERMES
    if MISTRAL_ARGS.open in template and MISTRAL_ARGS.args in template:
        fmt = MISTRAL_ARGS
    elif MISTRAL.open in template:
        fmt = replace(MISTRAL, begin=" [") if f"{MISTRAL.open} [" in template else MISTRAL
    elif "<|python_tag|>" in template or "ipython" in template:
        fmt = LLAMA3
    return replace(fmt, has_tools="tools" in template, has_calls="tool_calls" in template)


def calls_grammar(
    fmt: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    control: Mapping[str, int],
    is_single: bool,
    must_call: bool,
    answer: str | None = None,
) -> str:
    """The grammar, in Lark, of calls of functions with such arguments; or else, unless it `must_call`, of an `answer`,
    itself a term of Lark, or of any text, which may also come before calls where the format has them anywhere.

    `control` are the marks of the format that are control tokens.
    """
    items = [f"item_{i}: {_terms(head, control)} args_{i}" for i, head in enumerate(fmt.heads(list(schemas)))]
    arguments = [f"args_{i}: {json_term(schema)}" for i, schema in enumerate(schemas.values())]
    more = "" if is_single or fmt.between is None else f" ({_text(fmt.tail + fmt.between, control)} item)*"
    calls = "calls" if fmt.is_leading else f"{_text(fmt.open + fmt.begin, control)} calls"
    if must_call:
        start = [f"start: {calls}"]
    elif answer is not None:
        start = [f"start: answer | {calls}", f"answer: {answer}"]
    elif fmt.is_leading:
        start = [f"start: TEXT? | {calls}", r"TEXT: /[^{\s](?s:.*)/"]
    elif fmt.open in control:
        start = [f"start: TEXT ({calls})?", "TEXT: /(?s:.*)/"]
    else:
        start = [
            f"start: TEXT | opened {_text(fmt.begin, control)} calls",
            f"opened[lazy]: /(?s:.*){re.escape(fmt.open)}/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(fmt.open)}(?s:.*)/",
        ]
    names = " | ".join(f"item_{i}" for i in range(len(items)))
    end = _text(fmt.tail + fmt.end, control)
    return "\n".join([*start, f"calls: item{more} {end}", f"item: {names}", *items, *arguments])


def _terms(head: str, control: Mapping[str, int]) -> str:
    """JSON as a grammar of it has its parts, each a term: a longer one would hide what else begins like it."""
    return " ".join(_text(part, control) for part in re.findall(r'{|"[^"]*"|[:,] |[^{"]+', head))


def _text(text: str, control: Mapping[str, int]) -> str:
    """A text as terms, its control tokens by their ids."""
    parts = re.split(f"({'|'.join(map(re.escape, control))})", text) if control else [text]
    return " ".join(f"<[{control[part]}]>" if part in control else json.dumps(part) for part in parts if part)


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
