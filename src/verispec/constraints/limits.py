"""How large and how entangled a constraint may be: counts, taken before the library sees the text.

The library walks rules and brackets on the stack, multiplies out patterns that must all hold of one text, and has a
state for each remainder of a `multipleOf`: a short text could take the process, or minutes and gigabytes.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from math import prod
from typing import Any

from verispec.constraints.dialect import Embedded
from verispec.constraints.schema import Step, children, escaped, parts, pointed_at, refs
from verispec.errors import ConstraintError

MAX_CHARS = 1 << 16
MAX_DEPTH = 64
MAX_REFS = 512
MAX_LEVELS = 4096  # 24 MiB of stack
MAX_RULES = 2048  # 8 MiB of stack
MAX_COMBINATIONS = 1 << 20  # a second
MAX_GRAMMAR_COMBINATIONS = 1 << 22  # more, because what lies apart in a grammar is counted together
MAX_MULTIPLE = 100_000  # 2 seconds, 50 MB
_BRANCHES = re.compile(r"(?<!\()\?|[|*+{]")  # "(?" is no choice
_FORMAT_BRANCHES = 16
_TOO_MANY_MULTIPLES = (
    f"has too many multipleOf; all together, those for one number multiplied, make {MAX_MULTIPLE} at most"
)
# What Lark's lexer knows: comments, texts, regexes and control tokens, which hold no rules; a schema; and operators.
_LARK = re.compile(
    r"""(?:\#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|(?P<regex>/(?:\\.|[^/\\])+/)|<[^<>\s]+>"""
    r"""|(?P<json>%(?:json|regex|llguidance)\b)|::|(?P<nesting>[:(\[])|(?P<meet>&)|(?P<branch>[|?*+{])"""
)


def check_schema(schema: Any) -> None:
    """Raise ConstraintError for a schema that would take too much to be walked or compiled."""
    _check_depth(schema)
    if len(set(refs(schema))) > MAX_REFS:
        raise ConstraintError("schema", f"has more than {MAX_REFS} different $refs")
    for path, part in _reached(schema):
        _check_place(part, path)
        if _multiple(part) > MAX_MULTIPLE:
            raise ConstraintError("schema", f"multipleOf may be {MAX_MULTIPLE} at most, and has few digits", path)
    if _num_levels(schema) > MAX_LEVELS:
        raise ConstraintError("schema", f"has more than {MAX_LEVELS} levels, those below each $ref counted again")
    if _multiples([schema]) > MAX_MULTIPLE:
        raise ConstraintError("schema", _TOO_MANY_MULTIPLES)
    if _met(schema, _num_branches, apart=max) > MAX_COMBINATIONS:
        raise ConstraintError("schema", "too many patterns, or too large ones, have to match the same text")


def check_grammar(text: str) -> list[Embedded]:
    """Raise ConstraintError for a grammar that would take too much to be compiled. The schemas inside, checked too."""
    if text.lstrip().startswith("{"):
        raise ConstraintError("grammar", "must be in Lark's notation")
    embedded: list[Embedded] = []
    num_nestings, num_meets, num_branches, at = 0, 0, 1, 0
    while found := _LARK.search(text, at):
        at = found.end()
        num_nestings += found["nesting"] is not None
        num_meets += found["meet"] is not None
        num_branches += found["branch"] is not None
        if found["regex"]:
            num_branches += 1 + len(_BRANCHES.findall(found["regex"]))
        if found["json"]:
            start, at, value = _json(text, at)
            embedded += [Embedded(start, at, value)] if found["json"] == "%json" else []
    if num_nestings > MAX_RULES:
        raise ConstraintError("grammar", f"has more than {MAX_RULES} rules, terminals and brackets")
    if num_meets and num_branches ** (num_meets + 1) > MAX_GRAMMAR_COMBINATIONS:
        raise ConstraintError("grammar", "has too many &, or too large terms, for the same text")
    for each in embedded:
        try:
            check_schema(each.schema)
        except ConstraintError as error:
            raise ConstraintError("grammar", f"its {error}") from error
    if _multiples(each.schema for each in embedded) > MAX_MULTIPLE:
        raise ConstraintError("grammar", _TOO_MANY_MULTIPLES)
    return embedded


def _json(text: str, at: int) -> Embedded:
    """The JSON there."""
    start = len(text) - len(text[at:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ConstraintError("grammar", f"has no JSON at character {start}: {error}") from error
    return Embedded(start, end, value)


def _check_depth(value: Any) -> None:
    level: list[Step] = [Step("", value)]
    for _ in range(MAX_DEPTH):
        level = [Step(f"{path}/{escaped(str(key))}", each) for path, part in level for key, each in parts(part)]
        if not level:
            return
    raise ConstraintError("schema", f"is nested more than {MAX_DEPTH} levels deep", level[0].path)


def _reached(schema: Any) -> Iterator[Step]:
    """All schemas inside, and those that they refer to, each once, with its place."""
    todo = deque([Step("", schema)])
    seen: set[int] = set()
    while todo:
        path, part = todo.popleft()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield Step(path, part)
            todo += [Step(path + child.path, child.value) for child in children(part)]
            todo.append(Step(str(part.get("$ref"))[1:], _target(schema, part)))


def _check_place(part: Mapping[str, Any], path: str) -> None:
    """Raise ConstraintError where the library would follow references to where nothing was counted."""
    ref = part.get("$ref")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        raise ConstraintError("schema", 'unsupported: a "$ref" that is not a JSON pointer ("#/...")', path)
    base = next((key for key in ("$id", "id") if isinstance(part.get(key), str)), None)
    if path and base and any(refs(part)):
        raise ConstraintError("schema", f'unsupported: "{base}" around a "$ref"', path)


def _num_levels(schema: Any) -> int:
    """How deep the library can get: each reference leads to its place once."""
    depths: dict[int, int] = {}

    def depth(value: Any) -> int:
        depths[id(value)] = 1 + max((depth(each) for _, each in parts(value)), default=0)
        return depths[id(value)]

    return depth(schema) + sum(depths.get(id(pointed_at(schema, ref)), 1) for ref in set(refs(schema)))


def _num_branches(part: Mapping[str, Any]) -> int:
    """Of the patterns that one schema has of its own for a text, multiplied."""
    pattern = part.get("pattern")
    own = 2 + len(_BRANCHES.findall(pattern)) if isinstance(pattern, str) else 1
    if "format" in part:
        own *= _FORMAT_BRANCHES
    return own


def _multiple(part: Mapping[str, Any]) -> int:
    """The digits of `multipleOf` as a number, or their place if that is more."""
    value = part.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    if not isinstance(exponent, int):
        return 1  # not a number: the library says so
    shift = 10 ** min(abs(exponent), 20)
    found = int("".join(map(str, digits)) or 0)
    return max(1, found * shift if exponent > 0 else found if not exponent else max(found, shift))


def _multiples(schemas: Iterable[Any]) -> int:
    """All of them together, those for one number multiplied."""
    return _sum(_met(schema, _multiple, apart=_sum) for schema in schemas)


def _sum(values: Iterable[int]) -> int:
    """Where 1 is nothing."""
    return 1 + sum(value - 1 for value in values)


def _met(schema: Any, own: Callable[[Mapping[str, Any]], int], *, apart: Callable[[Iterable[int]], int]) -> int:
    """What `own` gives, multiplied over all that must hold of one value; or more than that, never less. `apart` says
    what several give that are for different values.
    """
    known: dict[int, int] = {}
    opened: set[int] = set()
    todo = [(schema, False)]
    while todo:
        part, is_walked = todo.pop()
        if is_walked:
            known[id(part)] = _product(part, _target(schema, part), own(part), known, apart)
        elif isinstance(part, Mapping) and id(part) not in opened:
            opened.add(id(part))
            todo.append((part, True))
            todo += [(each, False) for each in (_target(schema, part), *(child.value for child in children(part)))]
    return known.get(id(schema), 1)


def _target(schema: Any, part: Mapping[str, Any]) -> Any:
    ref = part.get("$ref")
    return pointed_at(schema, ref) if isinstance(ref, str) else True


def _product(
    part: Mapping[str, Any], target: Any, own: int, known: Mapping[int, int], apart: Callable[[Iterable[int]], int]
) -> int:
    """What is not known yet leads back to itself, and counts nothing."""
    below: dict[str, list[int]] = {}
    for child in children(part):
        below.setdefault(child.keyword, []).append(known.get(id(child.value), 1))
    every, named = below.pop("allOf", []), below.pop("patternProperties", [])
    options = [apart([1, *below.pop(key, [])]) for key in ("anyOf", "oneOf")]
    others = [value for key, values in below.items() if key not in ("$defs", "definitions") for value in values]
    within = apart([1, *others]) * apart([1, *named])
    return prod([apart([own, within]), known.get(id(target), 1), *every, *options])
