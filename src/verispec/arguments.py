"""Arguments, checked where they enter: every refusal is one sentence that names the field.

Numbers of other libraries are taken for what they are and become Python's own; a bool is no number.
"""

import math
from numbers import Integral, Real
from typing import Any

from verispec.errors import InputError


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {kind_of(value)}")
    number = int(value)
    if not low <= number <= high:
        raise InputError(f"{name} must be from {low} to {high}, not {number}")
    return number


def check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """A finite number in [low, high]; with `low_open`, above `low`. An int stays one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, not {kind_of(value)}")
    number = int(value) if isinstance(value, Integral) else float(value)
    below = number <= low if low_open else number < low
    if below or number > high or not math.isfinite(number):  # in this order: a huge whole number is no float
        opening = "(" if low_open else "["
        raise InputError(f"{name} must be in {opening}{low:g}, {high:g}], not {number!r}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """What refusals call a value."""
    return "None" if value is None else type(value).__name__
