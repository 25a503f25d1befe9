"""A pass that fails or is interrupted leaves the engine as it was: the rows are planned again, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from verispec.engine import Engine, Request
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.types import FinishReason, NoText, SampleOutput, SamplingParams, TextPiece


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
    engine = Engine(backend, family=(4, 8, 16), drafters={"suffix": DRAFTERS["suffix"](DraftSetup())})
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


class InterruptedText(NoText):
    """A text whose n-th token is interrupted."""

    def __init__(self, interrupted_push: int) -> None:
        self._left = interrupted_push

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return TextPiece("x", stopped=False)


@pytest.mark.parametrize("interrupted_push", [1, 3, 4])
def test_an_interrupted_commit_ends_one_request_and_loses_no_event(interrupted_push: int) -> None:
    """The request whose commit was cut in two ends with an error; what others committed comes with the next step."""

    def outputs(*, push: int) -> tuple[dict[int, SampleOutput], int]:
        engine = Engine(FakeBackend(), family=(4, 8), drafters={"none": DRAFTERS["none"](DraftSetup())})
        for i in range(3):
            text = (lambda: InterruptedText(push)) if i == 1 else NoText
            engine.add(Request([1, 2, i], SamplingParams(max_tokens=4, seed=i), text=text))
        found, interrupts = {}, 0
        for _ in range(40):
            try:
                found |= {e.request_id: e.output for e in engine.step() if e.output is not None}
            except KeyboardInterrupt:
                interrupts += 1
            engine.check()
        assert not engine.has_work
        return found, interrupts

    expected, _ = outputs(push=10**6)
    found, interrupts = outputs(push=interrupted_push)
    assert interrupts == 1
    assert found[1].finish_reason is FinishReason.ERROR
    assert "interrupted" in str(found[1].error)
    assert {i: found[i].digest for i in (0, 2)} == {i: expected[i].digest for i in (0, 2)}


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_a_failed_pass_changes_nothing(error: type[BaseException]) -> None:
    expected, none_failed = run(failing_passes=set())
    found, failed = run(failing_passes={1, 2, 5, 9}, error=error)
    assert (none_failed, failed) == (0, 4)
    assert found == expected
