"""Schemas of every kind that is supported, in the manner of the JSON-Schema-Test-Suite; of real tools; random ones."""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

Schema = dict[str, Any]


def obj(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


SHORT: Schema = {"type": "string", "maxLength": 5}
INT: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
LEAVES: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    SHORT,
    INT,
    {"const": 7},
    {"const": "a b"},
    {"const": None},
    {"const": [1, {"a": 2}]},
    {"enum": ["red", "green"]},
    {"enum": [1, "1", None, True]},
    {"type": ["string", "null"], "maxLength": 3},
]
NUMBERS: list[Schema] = [
    *({"type": "integer", "minimum": low, "maximum": high} for low, high in product((-20, -1, 0, 3), (3, 9, 10, 101))),
    *({"type": "number", "minimum": low, "maximum": high} for low, high in product((-2.5, 0, 0.25), (1, 1.5, 20))),
    *({"type": "integer", "exclusiveMinimum": n, "exclusiveMaximum": n + 5} for n in (-7, 0, 95)),
    *({"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 60} for n in (2, 3, 5, 12)),
]
STRINGS: list[Schema] = [
    *({"type": "string", "minLength": low, "maxLength": low + more} for low, more in product((0, 1, 3), (0, 1, 6))),
    *(
        {"type": "string", "pattern": p}
        for p in (
            "^[a-c]{2,4}$",
            "^(yes|no)$",
            r"^\d{3}-\d{4}$",
            "^#[0-9a-f]{6}$",
            "^a?b?c?$",
            "^[A-Z][a-z]{1,5}( [A-Z]\\.)?$",
        )
    ),
    *({"type": "string", "format": f} for f in ("date", "time", "date-time", "uuid", "ipv4", "duration")),
]
ARRAYS: list[Schema] = [
    *({"type": "array", "items": leaf, "maxItems": 3} for leaf in LEAVES),
    *({"type": "array", "items": INT, "minItems": n, "maxItems": n + more} for n, more in product((0, 1, 4), (0, 2))),
    {"type": "array", "prefixItems": [SHORT, INT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [INT], "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": INT, "maxItems": 2}, "maxItems": 2},
]
OBJECTS: list[Schema] = [
    *(obj("a", a=leaf) for leaf in LEAVES),
    *(obj("", a=leaf) for leaf in LEAVES),
    *(obj(required, a=INT, b=SHORT, c={"type": "boolean"}) for required in ("", "a", "b", "c", "a c", "a b c")),
    *(obj("x", x=inner) for inner in (obj("y", y=INT), obj("", y=SHORT, z=INT))),
    {"type": "array", "items": obj("k", k=INT), "maxItems": 2},
    {"type": "object", "additionalProperties": INT, "maxProperties": 2, "propertyOrder": []},
    {"type": "object", "patternProperties": {"^[a-d]$": INT}, "additionalProperties": False, "maxProperties": 2},
    {**obj("a b", a=INT, b=INT), "title": "t", "description": "d", "default": {}, "examples": [1]},
    obj("a b", **{"a": {"type": "string", "maxLength": 2}, "b": {"type": "string", "maxLength": 2}, 'q"\\/': INT}),
]
COMBINED: list[Schema] = [
    *({"anyOf": [one, other]} for one, other in pairwise(LEAVES)),
    {"oneOf": [{"type": "null"}, {"type": "boolean"}, INT]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [obj("a", a=INT, b=INT), {"type": "object", "required": ["b"]}]},
    {"anyOf": [obj("kind n", kind={"const": "n"}, n=INT), obj("kind s", kind={"const": "s"}, s=SHORT)]},
    {"$defs": {"n": INT}, **obj("a b", a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/n"})},
    {"definitions": {"n": SHORT}, "$ref": "#/definitions/n"},
    {"$defs": {"l": {"anyOf": [{"type": "null"}, obj("h t", h=INT, t={"$ref": "#/$defs/l"})]}}, "$ref": "#/$defs/l"},
    obj("v", v=INT, c={"type": "array", "items": {"$ref": "#"}, "maxItems": 1}),
    {
        "type": "object",
        "properties": {"a": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
]
TOOLS: list[Schema] = [
    obj(
        "location",
        location={"type": "string", "description": "City and state", "maxLength": 20},
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    ),
    obj(
        "query",
        query={"type": "string", "maxLength": 20},
        limit={"type": "integer", "minimum": 1, "maximum": 50},
        filters={
            "type": "array",
            "items": obj(
                "field op value",
                field=SHORT,
                op={"enum": ["eq", "lt", "gt"]},
                value={"type": ["string", "integer"], "maxLength": 5, "minimum": 0, "maximum": 99},
            ),
            "maxItems": 2,
        },
    ),
    obj(
        "to subject body",
        to={
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.com$"},
            "minItems": 1,
            "maxItems": 2,
        },
        subject=SHORT,
        body={"type": "string", "maxLength": 30},
    ),
    obj(
        "path edits",
        path={"type": "string", "pattern": "^/[a-z/]{1,12}$"},
        edits={"type": "array", "minItems": 1, "maxItems": 2, "items": obj("line text", line=INT, text=SHORT)},
    ),
    obj(
        "origin destination date",
        origin={"type": "string", "pattern": "^[A-Z]{3}$"},
        destination={"type": "string", "pattern": "^[A-Z]{3}$"},
        date={"type": "string", "format": "date"},
        passengers={"type": "integer", "minimum": 1, "maximum": 9},
        cabin={"anyOf": [{"enum": ["economy", "business"]}, {"type": "null"}]},
    ),
    {
        "anyOf": [
            obj("name arguments", name={"const": "add"}, arguments=obj("a b", a=INT, b=INT)),
            obj("name arguments", name={"const": "now"}, arguments=obj("")),
        ]
    },
]
SCHEMAS: list[Schema] = [*LEAVES, *NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, *COMBINED, *TOOLS]
_LOCAL = [s for s in SCHEMAS if "$ref" not in str(s)]
SCHEMAS += [obj("first second", first=one, second=other) for one, other in zip(_LOCAL[::2], _LOCAL[1::2], strict=False)]

_KEYWORDS: dict[str, list[Any]] = {
    "type": ["string", "integer", "object", "array", "objekt", ["null", "number"], 3],
    "minimum": [0, -5, 1.5, "x"],
    "maximum": [0, 7, 1e308],
    "multipleOf": [2, 0, 0.1],
    "minLength": [0, 3, -1, 10**9],
    "maxLength": [0, 2, 10**12],
    "pattern": ["^a+$", "(", "[0-9]{2,}", "(a|b)*c", "(?=x)"],
    "format": ["date", "email", "?"],
    "enum": [[], [1, "a"], [None, {"a": []}], 5],
    "const": [1, {"x": [1, 2]}, "\u0000"],
    "required": [["a"], [], "a", [1]],
    "minItems": [0, 2, -1],
    "maxItems": [0, 3, 10**7],
    "minProperties": [0, 2],
    "uniqueItems": [True],
    "nullable": [True],
    "additionalProperties": [True, False],
    "$ref": ["#", "#/$defs/d", "#/nowhere", "http://x/y", "#/properties/a"],
    "x-guidance": [{"lenient": True}, 3, {"whitespace_flexible": True}, {"no": 1}],
    "description": ["text"],
    "unknown": [{}],
}


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """Anything that looks like a schema: most are right, many are not."""
    if rng.random() < 0.1:
        return rng.choice([True, False, {}, rng.choice(SCHEMAS)])
    found = {key: rng.choice(_KEYWORDS[key]) for key in rng.sample([*_KEYWORDS], rng.randint(0, 3))}
    if depth:
        for key in rng.sample(
            ["properties", "items", "anyOf", "allOf", "oneOf", "prefixItems", "$defs", "not"], rng.randint(0, 2)
        ):
            parts = [random_schema(rng, depth - 1) for _ in range(rng.randint(0, 3))]
            found[key] = (
                dict(zip("abd", parts, strict=False))
                if key in ("properties", "$defs")
                else random_schema(rng, depth - 1)
                if key in ("items", "not")
                else parts
            )
    return found
