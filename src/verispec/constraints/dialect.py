"""A schema as the library is to read it, so that it allows what a validator would, spelt as `json.dumps` does.

The library refuses keywords that demand nothing, and its dates know no leap years.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from verispec.constraints.schema import LISTS, MAPS, SINGLE

DIALECT = 2  # counts up when a constraint's text comes to mean something else
# Where nothing is left to choose, the grammar can be drafted, and no answer drowns in white space. A schema may say
# otherwise for itself, under "x-guidance".
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
EXACT = {"lenient": False, "coerce_one_of": False}
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # of the years from 04 to 96
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})"  # but 0000, which most calendars do not have
_DAYS = rf"^({_YEAR}-(0[13-9]|1[0-2]|02-([01]\d|2[0-8]))|(\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
_SECONDS = "^[^:]*:[^:]*:[0-5]"  # leap seconds are on some days only
_CALENDAR = {"date": [_DAYS], "time": [_SECONDS], "date-time": [_DAYS, _SECONDS]}


class Embedded(NamedTuple):
    """A schema inside a grammar, and the characters that it takes."""

    start: int
    end: int
    schema: Any


def translated(schema: Any) -> Any:
    """Without keywords that demand nothing, and with what a calendar demands of a `format`."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            found[key] = {name: translated(each) for name, each in value.items()}
        elif key in LISTS and isinstance(value, list):
            found[key] = [translated(each) for each in value]
        elif (key, value) != ("uniqueItems", False):
            found[key] = translated(value) if key in SINGLE else value
    format_, every = schema.get("format"), found.get("allOf", [])
    if isinstance(format_, str) and format_ in _CALENDAR and isinstance(every, list):
        found["allOf"] = [*every, *({"pattern": pattern} for pattern in _CALENDAR[format_])]
    return found


def spliced(grammar: str, embedded: list[Embedded]) -> str:
    """A grammar with its schemas translated. They keep their lines, which the library's errors count."""
    pieces, at = [], 0
    for start, end, schema in embedded:
        pieces += [grammar[at:start], _spelt(schema, num_lines=grammar.count("\n", start, end))]
        at = end
    return "".join([*pieces, grammar[at:]])


def _spelt(schema: Any, num_lines: int) -> str:
    if not isinstance(schema, Mapping):
        return json.dumps(schema)
    own = schema.get("x-guidance")
    options = {**LAYOUT, **(own if isinstance(own, Mapping) else {}), **EXACT}
    return "{" + "\n" * num_lines + json.dumps({**translated(schema), "x-guidance": options})[1:]
