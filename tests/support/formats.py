"""Checks of `format` that are nobody's grammar: by parts and numbers, as RFC 3339 says, and by the calendar."""

from __future__ import annotations

import datetime
import re

from jsonschema import FormatChecker

FORMATS = FormatChecker(["ipv4", "uuid"])
_OFFSET = re.compile(r"Z|[+-]([01]\d|2[0-3]):[0-5]\d")
_DURATION = re.compile(r"P(?=.)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=\d)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)")


@FORMATS.checks("date", ValueError)
def is_date(text: object) -> bool:
    if not isinstance(text, str):
        return True
    year, month, day = text.split("-")
    if list(map(len, (year, month, day))) != [4, 2, 2]:
        return False
    return bool(datetime.date(int(year), int(month), int(day)))


@FORMATS.checks("time", ValueError)
def is_time(text: object) -> bool:
    if not isinstance(text, str):
        return True
    offset = re.sub(r"^\.\d+", "", text[8:].upper())
    hour, minute, second = map(int, text[:8].split(":"))
    return hour < 24 and minute < 60 and second < 60 and _OFFSET.fullmatch(offset) is not None


@FORMATS.checks("date-time", ValueError)
def is_date_time(text: object) -> bool:
    return not isinstance(text, str) or (text[10:11] in ("t", "T") and is_date(text[:10]) and is_time(text[11:]))


@FORMATS.checks("duration")
def is_duration(text: object) -> bool:
    return not isinstance(text, str) or _DURATION.fullmatch(text) is not None
