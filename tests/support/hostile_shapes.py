"""Constraints that are short and would take a process, or minutes and gigabytes, were they not counted before."""

from __future__ import annotations

import json
from typing import Any


def chained_rules(num_rules: int, num_brackets: int = 0) -> str:
    """Each holds the next one."""
    opened, closed = "(" * num_brackets, ")" * num_brackets
    rules = [f'r{i}: {opened}"x" r{i + 1}{closed}' for i in range(num_rules)]
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "y"'])


def chained_terminals(num_terminals: int) -> str:
    return chained_rules(num_terminals).replace("r", "R").replace("staRt", "start")


def met_terms(num_terms: int) -> str:
    return "start: T\nT: " + " & ".join(f"/(?s:.*)a.{{{i}}}b(?s:.*)/" for i in range(1, num_terms + 1))


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, count + 1)]


def wide_patterns(count: int, num_options: int) -> list[dict[str, Any]]:
    """Each with many beginnings that overlap."""
    sets = ["ab" + "".join(chr(99 + j) for j in range(20) if i >> j & 1) for i in range(num_options)]
    return [
        {"type": "string", "pattern": "|".join(f"[{each}].*{'pqrst'[i]}{j}" for j, each in enumerate(sets))}
        for i in range(count)
    ]


def shared(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The same as allOf, by references, each beside a keyword of its own."""
    chain = {f"d{i}": {**part, "$ref": f"#/$defs/d{i + 1}"} for i, part in enumerate(parts)}
    return {"$defs": {**chain, f"d{len(parts)}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def respelt(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """With another beginning of all references than "#/$defs/", and names for places beside their pointers."""
    for name, part in schema["$defs"].items():
        part["$anchor"] = name
    found: dict[str, Any] = json.loads(json.dumps(schema).replace('"#/$defs/', f'"{pointer}'))
    return found


def leading_on(num_refs: int, num_levels: int) -> dict[str, Any]:
    """Lists in lists, by references to the next ones."""
    parts: dict[str, Any] = {f"d{num_refs}": {"type": "null"}}
    for i in range(num_refs):
        part = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(num_levels):
            part = {"items": part}
        parts[f"d{i}"] = part
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def overlapping(num_levels: int, place: str) -> dict[str, Any]:
    """Lists in lists with every one of them at the end; where it is, is said."""
    part: dict[str, Any] = {"anyOf": [{"type": "null"}, *({"$ref": place + "/items" * i} for i in range(num_levels))]}
    for _ in range(num_levels):
        part = {"items": part}
    return part


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


PRIMES = (3, 7, 11, 13, 17, 19, 23, 29)
SCHEMAS: dict[str, Any] = {
    "patterns": {"allOf": patterns(39)},
    "patterns by reference": shared(patterns(39)),
    "patterns by an escaped reference": respelt(shared(patterns(39)), "#/%24defs/"),
    "patterns of a property": {"allOf": [{"properties": {"a": each}} for each in patterns(30)]},
    "patterns of items": {"allOf": [{"items": each} for each in patterns(30)]},
    "patterns of names": {"allOf": [{"patternProperties": {"x": each}} for each in patterns(30)]},
    "patterns beside options": {"anyOf": [{}, {"allOf": patterns(20)}], "allOf": patterns(19)},
    "wide patterns": {"allOf": wide_patterns(3, 300)},
    "patterns in a circle": {"properties": {"a": {"allOf": patterns(39)}, "b": {"$ref": "#"}}},
    "a large multiple": {"type": "integer", "multipleOf": 9_999_991},
    "a large power": {"type": "integer", "multipleOf": 2**30},
    "multiples": {"allOf": [{"type": "integer", "multipleOf": each} for each in PRIMES]},
    "multiples of a property": {"allOf": [{"properties": {"a": {"multipleOf": each}}} for each in PRIMES]},
    "multiples apart": {"properties": {f"k{i}": {"type": "integer", "multipleOf": 9_973} for i in range(300)}},
    "multiples by reference": {"$defs": {"a": {"multipleOf": 311}, "b": {"multipleOf": 313, "$ref": "#/$defs/a"}},
                               "prefixItems": [{"type": "integer", "$ref": "#/$defs/b"} for _ in range(200)]},
}  # fmt: skip
# The library would follow these to where we count nothing.
REFERENCES: dict[str, Any] = {
    "by name": respelt(shared(patterns(39)), "#"),
    "by a relative address": {"$id": "http://a/b", **respelt(shared(patterns(39)), "b#/$defs/")},
    "by an address": {"$id": "http://a/b", **respelt(shared(patterns(39)), "http://a/b#/$defs/")},
    "in a part with an address": {"properties": {"a": {"$id": "http://a/b", **shared(patterns(39))}}},
}
# These go deep by references: more than 8 MiB of stack.
DEEP: dict[str, Any] = {
    "references": leading_on(495, 9),
    "references to parts": {"anyOf": [overlapping(55, f"#/anyOf/{i}") for i in range(3)]},
}
GRAMMARS: dict[str, str] = {
    "rules": chained_rules(2990),
    "terminals": chained_terminals(2990),
    "brackets in rules": chained_rules(500, 20),
    "terms": met_terms(20),
    "two terms": met_terms(2) + " & " + " & ".join(f"/{each['pattern']}/" for each in wide_patterns(2, 300)),
    "patterns in a schema": f"start: %json {json.dumps(SCHEMAS['patterns'])}",
    "a deep schema": f"start: %json {nested(100)}",
    "a deeper schema": f"start: %json {nested(6000)}",
    "a list of grammars": json.dumps({"grammars": [{"json_schema": SCHEMAS["patterns"]}]}),
    "a schema in a grammar in a grammar": f"start: %lark {{ start: %json {json.dumps(SCHEMAS['multiples'])} }}",
}
for name in ("multiples", "multiples apart"):
    GRAMMARS[name] = f"start: %json {json.dumps(SCHEMAS[name])}"
_SCHEMA = json.dumps({"type": "integer", "multipleOf": 9_973})
GRAMMARS["schemas with multiples"] = "start: " + " ".join(f"%json {_SCHEMA}" for _ in range(100))
# These are within the limits, and large.
HEAVY: dict[str, dict[str, Any]] = {
    "rules": {"grammar": chained_rules(2000)},
    "rules and brackets": {"grammar": chained_rules(95, 20)},
    "terminals": {"grammar": chained_terminals(2000)},
    "terms": {"grammar": met_terms(4)},
    "references": {"schema": shared([{"minLength": i} for i in range(500)])},
    "nested references": {
        "schema": {
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(511)},
            "$ref": "#/$defs/d0",
        }
    },
    "levels by references": {"schema": leading_on(340, 9)},
    "references to parts": {"schema": overlapping(55, "#")},
    "patterns": {"schema": {"allOf": patterns(12)}},
    "wide patterns": {"schema": {"allOf": wide_patterns(2, 250)}},
    "multiples": {"schema": {"type": "integer", "multipleOf": 99_991}},
    "a part that is too much by itself": {"schema": {"properties": {"a": shared(patterns(39))}}},
    "an error behind much": {
        "schema": {
            "$defs": {"h": {"properties": {f"k{i}": {} for i in range(1500)}}},
            "properties": {**{f"p{i}": {"$ref": "#/$defs/h"} for i in range(500)}, "z": {"type": "strin"}},
        }
    },
    "properties": {"schema": {"properties": {f"k{i}": {} for i in range(3000)}}},
    "options": {"schema": {"enum": [f"k{i}" for i in range(6000)]}},
    "brackets": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "brackets in a grammar": {"grammar": "start: " + "[" * 400 + '"a"' + "]" * 400},
    "choices": {"regex": "|".join(map(str, range(12_000)))},
    "repetitions": {"regex": "((a{1,900}b){1,900}c){1,900}"},
    "repeated rules": {"grammar": 'start: x{1,99999}\nx: "a" | "b" x'},
    "doubled terminals": {
        "grammar": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "x"'
    },
}
