"""A pass that fails or is interrupted leaves the engine as it was: the rows are planned again, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from verispec.engine import Engine, Request
from verispec.spec.registry import DRAFTERS
from verispec.types import SamplingParams


def run(*, failing_passes: set[int], error: type[BaseException] = RuntimeError) -> tuple[list[str], int]:
    backend = FakeBackend()
    plain_submit, count, failures = backend.submit, 0, 0

    def submit(pass_: Any) -> Any:
        nonlocal count
        count += 1
        ticket = plain_submit(pass_)  # K/V is written, as by a pass that breaks off late
        if count in failing_passes:
            raise error("the device went away")
        return ticket

    backend.submit = submit  # type: ignore[method-assign]
    engine = Engine(backend, family=(4, 8, 16), drafters={"ngram": DRAFTERS["ngram"]()})
    for i in range(5):
        engine.add(Request([1, 2, 3, i] * 4, SamplingParams(max_tokens=12, temperature=1.0, seed=i, n=1 + i % 2)))
    digests = {}
    while engine.has_work:
        try:
            events = engine.step()
        except error:
            failures += 1
            engine.check()
            continue
        for event in events:
            if event.output is not None:
                digests[event.request_id, event.sample_index] = event.output.digest
        engine.check()
    return [digests[key] for key in sorted(digests)], failures


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_a_failed_pass_changes_nothing(error: type[BaseException]) -> None:
    expected, none_failed = run(failing_passes=set())
    found, failed = run(failing_passes={1, 2, 5, 9}, error=error)
    assert (none_failed, failed) == (0, 4)
    assert found == expected
