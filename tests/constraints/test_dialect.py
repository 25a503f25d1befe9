"""Schemas as the library is to read them: by the calendar, without what demands nothing, in grammars too."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.formats import FORMATS
from tests.support.shapes import VOCABULARY, compiled
from verispec.constraints import compiler
from verispec.constraints.positions import Position
from verispec.errors import ConstraintError
from verispec.types import SamplingParams


def is_allowed(value: Any, **constraint: Any) -> bool:
    """Whether an answer may be this, and end."""
    return is_text(compiled(SamplingParams(**constraint)).start(()), json.dumps(value))


def is_text(start: Position, text: str) -> bool:
    place: Position | None = start
    for token_id in VOCABULARY.encode(text, add_special=False):
        place = place and place.after(token_id)
    return place is not None and place.is_complete


def leap_days(num_years: int) -> list[str]:
    return [f"{year:04}-02-29" for year in range(num_years)]


def test_29_february_is_a_day_of_leap_years_alone() -> None:
    for schema in ({"type": "string", "format": "date"}, {"format": "date", "pattern": "9$", "allOf": [{}]}):
        allowed = [text for text in leap_days(2101) if is_allowed(text, schema=schema)]
        assert allowed == [text for text in leap_days(2101) if FORMATS.conforms(text, "date")]
        assert 500 < len(allowed) < 520


def test_other_days_and_times_are_allowed_where_the_calendar_has_them() -> None:
    rng = random.Random(0)
    for _ in range(300):
        year, month, day = rng.choice((0, 1, 1900, 2000, 9999)), rng.randrange(14), rng.choice((0, 1, *range(28, 33)))
        hour, minute, second = rng.randrange(22, 26), rng.choice((0, 59, 60)), rng.choice((0, 59, 60))
        date = f"{year:04}-{month:02}-{day:02}"
        time = f"{hour:02}:{minute:02}:{second:02}{rng.choice(('Z', '.5-23:59'))}"
        for format_, text in (("date", date), ("time", time), ("date-time", f"{date}T{time}")):
            assert is_allowed(text, schema={"type": "string", "format": format_}) == FORMATS.conforms(text, format_), (
                text
            )


def test_dates_inside_of_grammars_are_by_the_calendar_too() -> None:
    schema = {"type": "object", "properties": {"d": {"format": "date"}}, "required": ["d"]}
    grammar = f"start: %json {json.dumps(schema, indent=1)}\n"
    assert is_allowed({"d": "2024-02-29"}, grammar=grammar)
    assert not is_allowed({"d": "2023-02-29"}, grammar=grammar)


def test_control_the_library_knows_no_leap_years(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "translated", lambda schema: schema)
    assert is_allowed("2023-02-29", schema={"format": "date", "title": "not compiled yet"})


def test_schemas_inside_of_grammars_are_spelt_as_by_themselves() -> None:
    """Also where the grammar writes them over several lines; errors behind them are told of the user's own line."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}
    grammar = f"start: %json {json.dumps(schema, indent=1)} more\n"
    made = compiled(SamplingParams(grammar=grammar + 'more: "!"'))
    for text, is_fine in (("[1, 2]!", True), ("[1,2]!", False), ("[ 1, 2]!", False)):
        assert is_text(made.start(()), text) == is_fine
    with pytest.raises(ConstraintError, match=rf"\b{grammar.count(chr(10)) + 1}\("):
        compiled(SamplingParams(grammar=grammar + "more: missing"))


def test_a_grammar_makes_no_schema_lenient() -> None:
    schema = {"type": "array", "contains": {}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    for constraint in ({"schema": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(ConstraintError, match="contains"):
            compiled(SamplingParams(**constraint))
