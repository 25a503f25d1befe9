"""An engine that waits where a test wants to look at it, however fast the machine is; and one that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from verispec.llm import LLM
from verispec.types import TokenEvent

TIMEOUT_S = 60


@contextmanager
def held(llm: LLM, num_running: int = 1) -> Iterator[threading.Event]:
    """No step begins while so many samples run or more, until the event is set or the block ends.

    Samples begin to run inside of a step: with one of them only the first step is made, with 0 none.
    """
    engine, is_free = llm.engine, threading.Event()
    step = engine.step

    def waiting() -> list[TokenEvent]:
        if engine.num_running >= num_running:
            assert is_free.wait(TIMEOUT_S), "the engine was held for too long"
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", waiting)
        try:
            yield is_free
        finally:
            is_free.set()


def fail_once(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """The next step of the engine fails."""
    step = llm.engine.step

    def broken() -> list[TokenEvent]:
        patch.setattr(llm.engine, "step", step)
        raise RuntimeError("the device coughed")

    patch.setattr(llm.engine, "step", broken)
