"""Generated schemas, grammars and tools that nobody should send: each is refused or answered, none fails the server.

`make judges` runs 2,000 of them (`--times 8`).
"""

from __future__ import annotations

import random
from typing import Any

from tests.server.test_hostile import SECONDS, values
from tests.server.test_load import is_idle, wait_for
from tests.support.hostile_shapes import GRAMMARS as HOSTILE_GRAMMARS
from tests.support.hostile_shapes import SCHEMAS as HOSTILE_SCHEMAS
from tests.support.scale import scaled
from tests.support.served import Served, chat_body

KEYWORDS = [
    "type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "enum", "const", "$ref",
    "$defs", "additionalProperties", "minimum", "maximum", "multipleOf", "minLength", "maxLength", "pattern", "format",
    "minItems", "maxItems", "uniqueItems", "if", "then", "patternProperties", "dependentRequired", "x-guidance", "$id",
]  # fmt: skip
TYPES = ["object", "array", "string", "integer", "number", "boolean", "null", "any", ["string", "null"], 3]
REFS = ["#", "#/$defs/a", "#/$defs/nowhere", "http://evil/x.json", "file:///etc/passwd", "#/properties/a", ""]
PATTERNS = ["^a+$", "(a|b)*c{2,3}", "([", "(?=x)", "(a*)*" * 9, "a{1,99999}", "\\p{L}+", "\0", "^[^a]{500}$"]
GRAMMARS = [
    'start: "a"', "start: start", 'start: "a" start | "b"', "start: nothing", "", "start:", 'start: %json {"type": 1}',
    "start: <[5]>", "start: <[99999]>", "start: <|im_end|>", 'start[lazy]: /a*/', 'start: ("a"*)*', "x: /a/", "\0" * 40,
    'start: %json {"$ref": "#/a"}', "start: /(?s:.*)/ & ~/(?s:.*)/", 'start: @other', 'start: "a"{9,99999}',
]  # fmt: skip


def schemas(rng: random.Random, depth: int = 0) -> Any:
    """A schema, mostly; with references, keywords in wrong places and values of wrong types."""
    if rng.random() < 0.02:
        return rng.choice([*HOSTILE_SCHEMAS.values()])
    if depth > 4 or rng.random() < 0.1:
        return rng.choice([{}, True, False, {"type": rng.choice(TYPES)}, values(rng)])
    found: dict[str, Any] = {"type": rng.choice(TYPES)} if rng.random() < 0.8 else {}
    for key in rng.sample(KEYWORDS, rng.randrange(4)):
        below = [schemas(rng, depth + 1) for _ in range(rng.randrange(3))]
        named = {rng.choice(["a", "b", "", "é\0", "$ref", "a/b~c"]): each for each in below}
        made: dict[str, Any] = {
            "type": rng.choice(TYPES), "$ref": rng.choice(REFS), "pattern": rng.choice(PATTERNS), "$defs": named,
            "properties": named, "patternProperties": {rng.choice(PATTERNS): each for each in below},
            "required": ["a", "b"][: rng.randrange(3)], "x-guidance": {"whitespace_flexible": True, "lenient": True},
            "minLength": rng.choice([3, 10**6, -1]), "maxItems": rng.choice([0, 2, 10**9]), "maximum": -5,
            "enum": [values(rng) for _ in range(rng.randrange(3))], "format": rng.choice(["date", "uuid", "nonsense"]),
        }  # fmt: skip
        usual = below if key.endswith("Of") or key == "prefixItems" else schemas(rng, depth + 1)
        found[key] = values(rng) if rng.random() < 0.15 else made.get(key, usual)
    return found


def requests(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request with such things in one of the places that take them."""
    schema = schemas(rng)
    grammar = rng.choice([*GRAMMARS, *HOSTILE_GRAMMARS.values(), "start: " + str(values(rng))])
    function = {"name": rng.choice(["f", "g.h", "", "a b"]), "parameters": schema, "strict": rng.random() < 0.7}
    tools = [{"type": "function", "function": function}, {"type": rng.choice(["function", "web", 5]), "x": 1}]
    choice = rng.choice(["auto", "required", {"type": "function", "function": {"name": "f"}}, values(rng)])
    chat = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}}, {"structured_outputs": {"grammar": grammar}},
        {"structured_outputs": {"regex": rng.choice(PATTERNS)}}, {"structured_outputs": {"choice": ["", "a\0", "\n"]}},
        {"tools": tools[: rng.randrange(1, 3)], "tool_choice": choice, "parallel_tool_calls": rng.random() < 0.5},
        {"tools": tools[:1], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ]  # fmt: skip
    if rng.random() < 0.8:
        return "/v1/chat/completions", chat_body(max_tokens=4, stream=rng.random() < 0.3, **rng.choice(chat))
    if rng.random() < 0.5:
        flat = {"tools": [{**tools[0], **function}], "text": {"format": {"type": "json_schema", "schema": schema}}}
        return "/v1/responses", {"input": "x", "max_output_tokens": 4, **flat}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "output_config": {"format": schema}}
    theirs = [{"name": "f", "input_schema": schema, "strict": True}]
    return "/v1/messages", {**body, "tools": theirs, "tool_choice": {"type": rng.choice(["any", "tool", "auto"])}}


def test_no_schema_grammar_or_tool_fails_the_server(served: Served) -> None:
    rng = random.Random(19)
    seen: dict[int, int] = {}
    for _ in range(scaled(250)):
        path, body = requests(rng)
        try:
            answer = served.client.post(path, json=body, timeout=SECONDS)
        except ValueError:  # no JSON: NaN, or a number too large
            continue
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (path, body, answer.text)
        assert b"engine_error" not in answer.content, (path, body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
    assert min(seen[200], seen[400]) > scaled(50)  # control: both kinds were generated
    assert served.client.get("/health").json() == {"status": "ok"}
    wait_for(lambda: is_idle(served))
    served.core.llm.engine.check()
