"""Ctrl-C at any moment: what a call started is given up, nothing is lost or left behind, and the next call is the same.

Python delivers an interrupt where a function begins and where a call has returned. `interrupted_at` raises at the n-th
such moment of the calling thread; timers find the moments at which it waits.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from tests.support.scale import scaled
from tests.support.tiny_llm import loaded, write_model
from verispec.llm import LLM
from verispec.types import FinishReason, SamplingParams, TokenEvent

TIMEOUT_S = 30
PROMPTS = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=1.0)
Call = Callable[[LLM], object]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("interrupts")
    with loaded(write_model(folder / "tiny.gguf"), folder / "cache", backend="numpy", kv_slots=2048) as made:
        yield made


def generate(llm: LLM) -> list[str]:
    return [c.digest for c in llm.generate(PROMPTS, PARAMS)]


def stream(llm: LLM) -> str:
    *_, last = llm.stream(PROMPTS[0], PARAMS)
    assert last.output is not None
    return last.output.digest


def half_a_stream(llm: LLM) -> int:
    events = llm.stream(PROMPTS[0], PARAMS)
    first = next(events)
    events.close()  # type: ignore[attr-defined]
    return first.token_ids[0]


def moments(call: Callable[[], object]) -> int:
    """How often an interrupt could be delivered while the call runs."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_return")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def interrupted_at(moment: int, call: Callable[[], object]) -> bool:
    """Run the call, interrupted at this moment; False if it ended before."""
    left = moment

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    try:
        sys.setprofile(profile)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def interrupted_after(seconds: float, call: Callable[[], object]) -> bool:
    """Run the call, interrupted after so many seconds; False if it ended before."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def leaks(llm: LLM) -> bool:
    """Whether a request goes on that nobody hears of; returns once nothing runs, and nothing may be left by then."""
    thread, end, is_lost = llm.thread, time.monotonic() + TIMEOUT_S, False
    while llm.status()[:2] != (0, 0):
        assert time.monotonic() < end, "a request never ends"
        is_lost |= any(job.owner is None or job.owner() is not None for job in list(thread._live.values()))
        time.sleep(0.0002)
    engine = llm.engine
    engine.check()
    assert engine.num_free_slots == engine._pool.num_slots
    assert not engine.has_work
    assert not any((engine._live, thread._live, thread._waiting, thread._line.locked(), thread._turn.locked()))
    return is_lost


@pytest.mark.parametrize("call", [generate, stream, half_a_stream])
def test_an_interrupt_leaves_nothing_behind_and_the_next_call_is_the_same(llm: LLM, call: Call) -> None:
    expected, rng, interrupts = call(llm), random.Random(1), 0
    most = moments(lambda: call(llm))
    start = time.monotonic()
    call(llm)
    seconds = time.monotonic() - start
    while interrupts < scaled(50):
        if rng.random() < 0.8:
            was_interrupted = interrupted_at(rng.randrange(1, most), lambda: call(llm))
        else:
            was_interrupted = interrupted_after(rng.uniform(1e-5, seconds), lambda: call(llm))
        interrupts += was_interrupted
        assert not leaks(llm)
        if interrupts % 8 == 0:
            assert call(llm) == expected
    assert call(llm) == expected


def test_the_test_notices_a_caller_that_forgets_its_request(llm: LLM) -> None:
    """The control: it ends its request by the id that `submit` returned, which an interrupt may keep from it."""

    def careless(told: list[TokenEvent], known: list[int]) -> None:
        request_id = llm.thread.submit(llm.request(PROMPTS[0], PARAMS), told.extend)
        try:
            known.append(request_id)
        finally:
            llm.thread.abort(request_id)

    is_lost = []
    for moment in range(1, moments(lambda: careless([], []))):
        told: list[TokenEvent] = []
        known: list[int] = []
        if interrupted_at(moment, lambda: careless(told, known)):  # noqa: B023
            leaks(llm)
            is_lost.append(not known and bool(told) and told[-1].finish_reason is FinishReason.LENGTH)
    assert any(is_lost)
    assert not all(is_lost)
