"""What an answer has to look like, from the fields of a request to a compiled grammar; what is wrong is named by place.

Compiling takes milliseconds, sometimes many, so it happens on another thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from verispec.constraints import json_term
from verispec.errors import ConstraintError, InputError
from verispec.llm import LLM
from verispec.sampling.constraint import Grammar
from verispec.server.api import Sampling, StructuredOutputs
from verispec.server.errors import wrong
from verispec.server.tool_use import ANY_OBJECT, ToolUse
from verispec.types import SamplingParams


class Wanted(NamedTuple):
    """What an answer has to look like: one of the library's constraints, and the field that says so."""

    kind: str
    value: Any
    place: str


class Structure(NamedTuple):
    """The parameters of a call with their constraint, compiled; and what it does with tools."""

    params: SamplingParams
    grammar: Grammar | None
    tools: ToolUse


def wanted_answer(body: Sampling) -> Wanted | None:
    """What `response_format` or `structured_outputs` ask for, if anything."""
    by_format = None if body.response_format is None else _by_format(body.response_format)
    if body.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise wrong("structured_outputs", "response_format says already what the answer looks like")
    return _by_vllm(body.structured_outputs)


def _by_format(asked: Mapping[str, Any]) -> Wanted | None:
    place, kind = "response_format", asked.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Wanted("schema", ANY_OBJECT, place)
    if kind != "json_schema":
        raise wrong(f"{place}.type", "must be text, json_object or json_schema")
    place += ".json_schema"
    described = asked.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise wrong(f"{place}.schema", "must be a JSON schema")
    return Wanted("schema", schema, f"{place}.schema")


def _by_vllm(asked: StructuredOutputs) -> Wanted:
    place = "structured_outputs"
    fields = ("json", "regex", "choice", "grammar", "json_object")
    given = [name for name in fields if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        raise wrong(place, f"give exactly one of {', '.join(fields)}")
    (name,) = given
    value, place = getattr(asked, name), f"{place}.{name}"
    if name == "json_object":
        return Wanted("schema", ANY_OBJECT, place)
    if name == "json":
        return Wanted("schema", value, place)
    if name == "choice":
        return Wanted("grammar", "start: " + " | ".join(map(json.dumps, value)), place)
    return Wanted(name, value, place)


async def structured(
    llm: LLM, params: SamplingParams, wanted: Wanted | None, tools: ToolUse | None = None
) -> Structure:
    """Compile what an answer, and the calls in it, must look like. Raises 400 with the place of what is wrong."""
    tools = tools or ToolUse()
    if wanted is not None and tools.functions and not tools.must_call:
        if wanted.kind != "schema":
            raise wrong(wanted.place, "cannot be combined with tools that may be called; only a schema can")
        tools = replace(tools, is_answer_json=True)
    if wanted is None and not tools.is_guided:
        return Structure(params, None, tools)
    return await asyncio.to_thread(_compiled, llm, params, wanted, tools)


def _compiled(llm: LLM, params: SamplingParams, wanted: Wanted | None, tools: ToolUse) -> Structure:
    if wanted is not None:
        _check(llm, wanted)
    for function in tools.checked:
        _check(llm, Wanted("schema", function.schema, f"{function.place}.parameters"))
    if tools.is_guided:
        answer = None if wanted is None or tools.must_call else json_term(json.loads(str(_with(params, wanted).schema)))
        wanted = Wanted("grammar", tools.grammar(answer), "tools")
    assert wanted is not None
    _check(llm, wanted)
    params = _with(params, wanted)
    return Structure(params, llm.grammar(params), tools)


def _check(llm: LLM, wanted: Wanted) -> None:
    try:
        llm.grammar(_with(SamplingParams(), wanted))
    except ConstraintError as error:
        raise wrong(wanted.place + _dotted(error.path), error.reason) from error
    except InputError as error:
        raise wrong(wanted.place, str(error)) from error


def _with(params: SamplingParams, wanted: Wanted) -> SamplingParams:
    return replace(params, **{wanted.kind: wanted.value})


def _dotted(pointer: str) -> str:
    """A JSON pointer as fields are named: `.properties.size`, `.anyOf[0]`."""
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    return "".join(f"[{key}]" if key.isdecimal() else f".{key}" for key in keys)
