"""What a request lets the model do with tools, from the fields of a chat completion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verispec.model.tokenizer import Tokenizer
from verispec.server.errors import wrong
from verispec.server.tool_formats import HERMES, ToolFormat, calls_grammar, recognised
from verispec.server.tool_reader import Reader, TextReader, ToolReader

ANY_OBJECT = {"type": "object"}
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A tool that can be called. `place` is where the request has it."""

    name: str
    parameters: Mapping[str, Any] | None
    is_strict: bool
    place: str

    @property
    def schema(self) -> Mapping[str, Any]:
        """What the arguments must match, which are an object in any case. Raises 400 if the schema says otherwise."""
        if self.parameters is None:
            return {**ANY_OBJECT, "properties": {}, "additionalProperties": False}
        if self.parameters.get("type", "object") != "object":
            raise wrong(f"{self.place}.parameters.type", "must be object")
        return {**ANY_OBJECT, **self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What may be called, and how it is written. `declared` is what the prompt shows, `functions` what may be called,
    `skipped` the types of tools that are no functions. `is_guided`: a grammar sees to it that calls are right.
    """

    format: ToolFormat = HERMES
    declared: Sequence[Mapping[str, Any]] = ()
    functions: Sequence[Function] = ()
    skipped: Sequence[str] = ()
    must_call: bool = False
    is_single: bool = False
    control: Mapping[str, int] = field(default_factory=dict)  # control tokens that calls are marked by
    is_answer_json: bool = False  # where nothing is called

    @property
    def is_guided(self) -> bool:
        return bool(self.functions) and (
            self.must_call or self.is_single or self.is_answer_json or any(f.is_strict for f in self.functions)
        )

    @property
    def shown_ids(self) -> tuple[int, ...]:
        """Control tokens that have text in an answer, for the reader to see them."""
        return tuple(self.control.values()) if self.functions else ()

    @property
    def checked(self) -> list[Function]:
        """Functions whose arguments must match their schema; those of others are any object."""
        return [f for f in self.functions if self.is_guided and (self.must_call or f.is_strict)]

    def grammar(self, answer: str | None) -> str:
        """The grammar of answers, where calls are guided; `answer` is a term for those that call nothing."""
        schemas = {f.name: f.schema if f in self.checked else ANY_OBJECT for f in self.functions}
        return calls_grammar(
            self.format,
            schemas,
            control=self.control,
            is_single=self.is_single,
            must_call=self.must_call,
            answer=answer,
        )

    def reader(self) -> Reader:
        if not self.functions:
            return TextReader()
        names = [function.name for function in self.functions]
        is_leading = self.must_call or self.is_answer_json
        return ToolReader(self.format, names, is_exact=self.is_guided, is_leading=is_leading)


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, tokenizer: Tokenizer, *, parallel: bool | None = None
) -> ToolUse:
    """Raises 400, naming the field, for what is wrong. Tools that are no functions are skipped."""
    declared, functions, skipped = [], [], []
    for i, tool in enumerate(tools or ()):
        if isinstance(kind := tool.get("type"), str) and kind != "function":
            skipped.append(kind[:50])
        else:
            functions.append(_function(tool, f"tools[{i}]"))
            declared.append(tool)
    names = [function.name for function in functions]
    for function in functions:
        if names.count(function.name) > 1:
            raise wrong(f"{function.place}.name", f"{function.name} is the name of several tools")
    mode, allowed = _chosen(choice, names)
    if mode == "required" and not allowed:
        raise wrong("tool_choice", "there is no tool to be called")
    fmt = recognised(tokenizer.chat_template or "")
    return ToolUse(
        format=fmt,
        declared=declared if mode != "none" else (),
        functions=[f for f in functions if f.name in allowed],
        skipped=skipped,
        must_call=mode == "required",
        is_single=parallel is False,
        control=fmt.control(tokenizer) if functions else {},
    )


def _function(tool: Mapping[str, Any], place: str) -> Function:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise wrong(place, 'must be like {"type": "function", "function": {"name": ...}}')
    place += ".function"
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{place}.name", "must be up to 128 letters, digits and _ . : / -")
    if not isinstance(parameters, Mapping | None):
        raise wrong(f"{place}.parameters", "must be a JSON schema")
    if not isinstance(strict, bool | None):
        raise wrong(f"{place}.strict", "must be true or false")
    return Function(name=name, parameters=parameters, is_strict=bool(strict), place=place)


def _chosen(choice: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """none, auto or required; and the names of what may be called then."""
    if choice is None or choice == "auto":
        return "auto", names
    if choice in ("none", "required"):
        return choice, names if choice == "required" else ()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return "required", [_known(choice, "tool_choice", names)]
    if kind == "allowed_tools":
        asked = choice.get("allowed_tools")
        listed = asked.get("tools") if isinstance(asked, Mapping) else None
        if (
            not isinstance(asked, Mapping)
            or not isinstance(listed, list)
            or asked.get("mode") not in ("auto", "required")
        ):
            raise wrong("tool_choice.allowed_tools", "must have a mode, auto or required, and a list of tools")
        place = "tool_choice.allowed_tools.tools"
        return asked["mode"], [_known(each, f"{place}[{i}]", names) for i, each in enumerate(listed)]
    raise wrong("tool_choice", "must be none, auto, required, or name a function")


def _known(named: Any, place: str, names: Sequence[str]) -> str:
    function = named.get("function") if isinstance(named, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise wrong(f"{place}.function.name", "must be the name of one of the tools")
    return name
