"""What is wrong with a schema, and where: sizes, schemas that nothing finite can match, and the place of an error.

Knows how schemas nest, and nothing of grammars. Places are JSON pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from verispec.errors import ConstraintError

MAX_DEPTH = 64
_MAX_TRIES = 256  # subschemas that are compiled to find the place of an error
_MAX_REFS = 512
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_SCALARS = {"string", "number", "integer", "boolean", "null"}


class _Sub(NamedTuple):
    path: str
    schema: Any


def _children(schema: Mapping[str, Any]) -> Iterator[_Sub]:
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            yield from (_Sub(f"/{_escaped(key)}/{_escaped(name)}", each) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from (_Sub(f"/{key}/{i}", each) for i, each in enumerate(value))
        elif key in _SINGLE:
            yield _Sub(f"/{key}", value)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def check_depth(value: Any) -> None:
    """Raise ConstraintError for JSON that is nested too deeply to be walked, or to be compiled."""
    level = [("", value)]
    for _ in range(MAX_DEPTH):
        level = [(f"{path}/{_escaped(str(key))}", each) for path, part in level for key, each in _parts(part)]
        if not level:
            return
    raise ConstraintError("schema", f"is nested more than {MAX_DEPTH} levels deep", level[0][0])


def _parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def find(schema: Mapping[str, Any], error: str, compile_: Callable[[Mapping[str, Any]], str]) -> str:
    """The path of the innermost subschema that gives the same error by itself. `compile_` gives the error of one."""
    path, part, tries = "", schema, _MAX_TRIES
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    while True:
        for child in _children(part):
            if isinstance(child.schema, Mapping) and tries:
                tries -= 1
                if compile_({**definitions, **child.schema}) == error:
                    path, part = path + child.path, child.schema
                    break
        else:
            return path


def check_finite(schema: Mapping[str, Any]) -> None:
    """Raise ConstraintError if every answer would have to hold another one like it, without end."""
    targets: dict[str, Any] = {}
    for ref in _refs(schema):
        if len(targets) >= _MAX_REFS:
            raise ConstraintError("schema", f"has more than {_MAX_REFS} different $refs")
        targets[ref] = _pointed_at(schema, ref)
    finite: set[str] = set()
    while grown := {ref for ref, part in targets.items() if ref not in finite and _is_finite(part, finite)}:
        finite |= grown
    if not _is_finite(schema, finite):
        endless = next((ref for ref in targets if ref not in finite), "#")
        raise ConstraintError("schema", "can match nothing: it requires itself without end", endless[1:])


def _refs(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping) and isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
        yield part["$ref"]
    for _, each in _parts(part):
        yield from _refs(each)


def _pointed_at(schema: Any, ref: str) -> Any:
    """What a local reference names; True, which anything matches, where it is not for us to say."""
    part = schema
    for key in ref[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part = part[int(key)] if key.isdecimal() and int(key) < len(part) else True
        else:
            part = part.get(key, True) if isinstance(part, Mapping) else True
    return part


def _is_finite(part: Any, finite: set[str]) -> bool:
    """Whether something finite can match, as far as nesting goes and as far as is known of references."""
    if not isinstance(part, Mapping):
        return part is not False
    ref = part.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and ref not in finite:
        return False
    for key, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        options = part.get(key)
        if isinstance(options, list) and not combine(_is_finite(each, finite) for each in options):
            return False
    types = part.get("type")
    types = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else None
    if types is None or types & _SCALARS or "enum" in part or "const" in part:
        return True
    return ("object" in types and _object_is_finite(part, finite)) or (
        "array" in types and _array_is_finite(part, finite)
    )


def _object_is_finite(part: Mapping[str, Any], finite: set[str]) -> bool:
    known, required = part.get("properties"), part.get("required")
    if not isinstance(known, Mapping) or not isinstance(required, list):
        return True
    return all(_is_finite(known[name], finite) for name in required if isinstance(name, str) and name in known)


def _array_is_finite(part: Mapping[str, Any], finite: set[str]) -> bool:
    least = part.get("minItems")
    least = least if isinstance(least, int) else 0
    first = part.get("prefixItems")
    first = first if isinstance(first, list) else []
    rest_is_finite = least <= len(first) or _is_finite(part.get("items", True), finite)
    return rest_is_finite and all(_is_finite(each, finite) for each in first[:least])
