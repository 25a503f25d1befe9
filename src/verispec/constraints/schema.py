"""How schemas nest, what they lead to, and where in one an error is. Knows nothing of grammars.

Places are JSON pointers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote

_MAX_TRIED = 1 << 17  # characters of subschemas that are compiled to find the place of an error
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_SHARED = ("$defs", "definitions")
_SCALARS = {"string", "number", "integer", "boolean", "null"}
# How the library names the part that it cannot satisfy, and the one in which it found an error.
_CULPRIT = re.compile(
    r"required property '(?P<name>.*)' is unsatis|(?P<item>required item) is|prefixItems\[(?P<at>\d+)\] is"
)
_INSIDE = re.compile(r"\s*while processing json-schema:///#(\S*)")
IS_FALSE = "Unsatisfiable schema: schema is false"  # as the library says it


class Step(NamedTuple):
    """A value inside JSON, and the way to it."""

    path: str
    value: Any


class Child(NamedTuple):
    """A schema directly inside another one."""

    keyword: str
    path: str
    value: Any


def children(schema: Mapping[str, Any]) -> Iterator[Child]:
    """The schemas inside, those that others share last."""
    for key in sorted(schema, key=_SHARED.__contains__):
        value = schema[key]
        if key in MAPS and isinstance(value, Mapping):
            yield from (Child(key, f"/{escaped(key)}/{escaped(name)}", each) for name, each in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from (Child(key, f"/{key}/{i}", each) for i, each in enumerate(value))
        elif key in SINGLE:
            yield Child(key, f"/{key}", value)


def escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def refs(part: Any) -> Iterator[str]:
    """The references inside to places in the same schema."""
    if isinstance(part, Mapping) and isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
        yield part["$ref"]
    for _, each in parts(part):
        yield from refs(each)


def pointed_at(schema: Any, ref: str) -> Any:
    """What a local reference names; True, which anything matches, where it is not for us to say."""
    if ref != "#" and not ref.startswith("#/"):
        return True
    part = schema
    for key in unquote(ref).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part = part[int(key)] if key.isdecimal() and int(key) < len(part) else True
        else:
            part = part.get(key, True) if isinstance(part, Mapping) else True
    return part


class Found(NamedTuple):
    """An error, and where it is."""

    path: str
    error: str


def find(schema: Mapping[str, Any], error: str, compile_: Callable[[Mapping[str, Any]], str]) -> Found:
    """The innermost subschema that is to blame, and its own error. `compile_` gives the error of one by itself."""
    shared = {key: schema[key] for key in _SHARED if key in schema}
    at, part, left = Found("", error), schema, _MAX_TRIED
    seen: set[str] = set()

    def own_error(value: Any) -> str:
        nonlocal left
        if not isinstance(value, Mapping):
            return IS_FALSE if value is False else ""
        whole = {**shared, **value} if any(refs(value)) else value
        left -= len(json.dumps(whole))
        return compile_(whole) if left > 0 else ""

    while True:
        ref = _leads_to(part, at.error)
        if ref not in seen and isinstance(target := pointed_at(schema, ref), Mapping):
            seen.add(ref)
            at, part = Found(ref[1:], own_error(target) or at.error), target
            continue
        at = Found(at.path, _INSIDE.sub("", at.error))
        below = sorted(children(part), key=lambda child: not _is_named(at.error, child))
        for child in below:
            own = own_error(child.value)
            if own and (_is_named(at.error, child) or _INSIDE.sub("", own) == at.error):
                at, part = Found(at.path + child.path, own), child.value or {}
                break
        else:
            return at


def _leads_to(part: Mapping[str, Any], error: str) -> str:
    """The place in the whole schema that an error is in, as a reference; "" if it is in this part."""
    inside, ref = _INSIDE.search(error), part.get("$ref")
    return f"#{inside[1]}" if inside else ref if isinstance(ref, str) and len(part) == 1 else ""


def _is_named(error: str, child: Child) -> bool:
    """Whether an error says that this child is the reason."""
    named = _CULPRIT.search(error)
    if named is None:
        return False
    if named["name"] is not None:
        return child.path == f"/properties/{escaped(named['name'])}"
    return child.path == ("/items" if named["item"] else f"/prefixItems/{named['at']}")


def endless(schema: Any, matches: Callable[[str, str], bool]) -> str | None:
    """The place of a schema of which every answer would have to hold another one like it, if the whole leads there.

    `matches` says if a pattern is found in a text.
    """
    holders: dict[str, list[Mapping[str, Any]]] = {}
    owners: dict[int, list[Mapping[str, Any]]] = {}
    todo: list[Mapping[str, Any]] = []

    def collect(value: Any, above: list[Mapping[str, Any]]) -> None:
        if isinstance(value, Mapping):
            owners[id(value)] = above[-2:]  # its owner, and a map of names between them
            above = [*above, value]
            if isinstance(ref := value.get("$ref"), str):
                holders.setdefault(ref, []).append(value)
        for _, each in parts(value):
            collect(each, above)
        if isinstance(value, Mapping):
            todo.append(value)

    collect(schema, [])
    ends = _Ends(matches)
    led_here: dict[int, list[str]] = {}
    for ref in holders:
        target = pointed_at(schema, ref)
        led_here.setdefault(id(target), []).append(ref)
        if not isinstance(target, Mapping) and target is not False:
            ends.refs.add(ref)
    todo.reverse()
    while todo:
        part = todo.pop()
        if id(part) not in ends.known and ends.can_end(part):
            ends.known.add(id(part))
            found = led_here.get(id(part), ())
            ends.refs.update(found)
            todo += [*owners[id(part)], *(holder for ref in found for holder in holders[ref])]
    return None if ends.of(schema) else _way_back(schema, ends)


def _way_back(schema: Any, ends: _Ends) -> str:
    """Follow what has no end to where it leads back to itself."""
    seen: set[str] = set()
    path, part = "", schema
    while path not in seen:
        seen.add(path)
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in ends.refs:
            path, part = ref[1:], pointed_at(schema, ref)
        else:
            below = (child for child in children(part) if not ends.of(child.value) and _is_needed(part, child))
            child = next((child for child in below if isinstance(child.value, Mapping)), None)
            if child is not None:
                path, part = path + child.path, child.value
    return path


def _is_needed(part: Mapping[str, Any], child: Child) -> bool:
    if child.keyword != "properties":
        return child.keyword not in _SHARED
    required = part.get("required")
    return isinstance(required, list) and child.path in [f"/properties/{escaped(str(name))}" for name in required]


class _Ends:
    """Which schemas something finite can match, as far as is known of those inside."""

    def __init__(self, matches: Callable[[str, str], bool]) -> None:
        self.known: set[int] = set()
        self.refs: set[str] = set()
        self._matches = cache(matches)

    def of(self, part: Any) -> bool:
        return id(part) in self.known if isinstance(part, Mapping) else part is not False

    def can_end(self, part: Mapping[str, Any]) -> bool:
        ref = part.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and ref not in self.refs:
            return False
        for key, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            options = part.get(key)
            if isinstance(options, list) and not combine(map(self.of, options)):
                return False
        types = part.get("type")
        types = {types} if isinstance(types, str) else set(map(str, types)) if isinstance(types, list) else None
        if types is None or types & _SCALARS or "enum" in part or "const" in part:
            return True
        return ("object" in types and self._object(part)) or ("array" in types and self._array(part))

    def _object(self, part: Mapping[str, Any]) -> bool:
        known, patterns, rest = part.get("properties"), part.get("patternProperties"), part.get("additionalProperties")
        known = known if isinstance(known, Mapping) else {}
        patterns = patterns if isinstance(patterns, Mapping) else {}
        required, least = part.get("required"), part.get("minProperties")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if not all(self._property(name, known, patterns, rest) for name in names):
            return False
        if not isinstance(least, int) or any(map(self.of, (rest, *patterns.values()))):
            return True
        return least <= len(names | {name for name, each in known.items() if self.of(each)})

    def _property(self, name: str, known: Mapping[str, Any], patterns: Mapping[str, Any], rest: Any) -> bool:
        if name in known:
            return self.of(known[name])
        endless = [pattern for pattern, each in patterns.items() if not self.of(each)]
        if any(self._matches(pattern, name) for pattern in endless):
            return False
        return self.of(rest) or any(self._matches(pattern, name) for pattern in patterns if pattern not in endless)

    def _array(self, part: Mapping[str, Any]) -> bool:
        least = part.get("minItems")
        least = least if isinstance(least, int) else 0
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        rest_ends = least <= len(first) or self.of(part.get("items", True))
        return rest_ends and all(map(self.of, first[:least]))
