"""How many generated cases to run: `pytest --times 20` (make test-long) runs twenty times as many, randomly chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")
factor = 1.0


def configure(times: float) -> None:
    """Called once, before any test module is imported."""
    global factor
    factor = times
    settings.register_profile("suite", max_examples=scaled(100), derandomize=times <= 1, database=None, deadline=None)
    settings.load_profile("suite")


def scaled(count: int) -> int:
    """`count` cases, times what was asked for."""
    return max(1, round(count * factor))


def is_whole() -> bool:
    """Whether enough cases run that one may count on everything having happened."""
    return factor >= 1


def thinned(cases: Sequence[T]) -> Sequence[T]:
    """All cases; every n-th of them, with the last, where a part was asked for."""
    return cases[:: -max(1, round(1 / factor))][::-1]
