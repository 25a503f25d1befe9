"""How many generated cases to run: `pytest --times 20` (make test-long) runs twenty times as many, randomly chosen."""

from __future__ import annotations

from hypothesis import settings

factor = 1.0


def configure(times: float) -> None:
    """Called once, before any test module is imported."""
    global factor
    factor = times
    settings.register_profile("suite", derandomize=times <= 1, database=None, deadline=None)
    settings.load_profile("suite")


def scaled(count: int) -> int:
    """`count` cases, times what was asked for."""
    return max(1, round(count * factor))
