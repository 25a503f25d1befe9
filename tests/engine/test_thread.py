"""The engine's own thread: many submitters, one batch; nobody waits in vain, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import WrappedBackend
from verispec.backends.protocol import Pass, Ticket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.thread import EngineThread, Inbox, on_loop
from verispec.errors import BackendDeadError, InputError, QueueFullError, VerispecError
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenEvent

TIMEOUT_S = 30


class GatedBackend(WrappedBackend):
    """Waits before each pass for as long as the gate is shut; `fault(number)` may raise."""

    def __init__(self, fault: Callable[[int], object] = lambda number: None) -> None:
        super().__init__(FakeBackend())
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[Pass] = []
        self._fault = fault

    def submit(self, pass_: Pass) -> Ticket:
        self.passes.append(pass_)
        assert self.gate.wait(TIMEOUT_S)
        self._fault(len(self.passes))
        return self.inner.submit(pass_)

    @contextmanager
    def shut(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


def make(backend: Any = None, **config: Any) -> EngineThread:
    engine = Engine(
        backend or GatedBackend(), family=(4, 8, 16), drafters={"none": DRAFTERS["none"](DraftSetup())},
        config=EngineConfig(num_slots=256, **config),
    )  # fmt: skip
    return EngineThread(engine)


def request(i: int, num_tokens: int = 12, **fields: Any) -> Request:
    n = fields.pop("n", 1)
    return Request([1, 2, 3 + i % 5], SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=i, n=n), **fields)


class Heard:
    """A sink that keeps what it hears, and can be waited for."""

    def __init__(self) -> None:
        self.calls: list[list[TokenEvent]] = []
        self._outputs: SimpleQueue[SampleOutput] = SimpleQueue()
        self.threads: set[int] = set()

    def __call__(self, events: list[TokenEvent]) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(events)
        for event in events:
            if event.output is not None:
                self._outputs.put(event.output)

    def outputs(self, count: int = 1) -> list[SampleOutput]:
        return [self._outputs.get(timeout=TIMEOUT_S) for _ in range(count)]

    @property
    def has_ended_once(self) -> bool:
        ends = [(e.request_id, e.sample_index) for call in self.calls for e in call if e.output is not None]
        return len(ends) == len(set(ends))


def alone(each: Request) -> str:
    thread, heard = make(), Heard()
    thread.submit(each, heard)
    (output,) = heard.outputs()
    thread.stop()
    return output.digest


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def check_idle(thread: EngineThread) -> None:
    """Nothing is left of anything."""
    wait_until(lambda: thread.status()[:2] == (0, 0))
    engine = thread.idle_engine
    engine.check()
    assert engine.num_free_slots == engine._pool.num_slots
    assert not engine.has_work
    assert not thread._live


def test_requests_of_many_threads_run_as_one_batch_and_get_their_own_bits() -> None:
    backend = GatedBackend()
    thread, heard = make(backend), [Heard() for _ in range(6)]
    with backend.shut():
        submitters = [threading.Thread(target=thread.submit, args=(request(i), heard[i])) for i in range(6)]
        for submitter in submitters:
            submitter.start()
        for submitter in submitters:
            submitter.join(TIMEOUT_S)
    digests = [h.outputs()[0].digest for h in heard]
    assert digests == [alone(request(i)) for i in range(6)]
    assert max(len(p.wanted.head_rows()) for p in backend.passes) >= 5
    assert {ident for h in heard for ident in h.threads} == {thread._thread.ident}
    check_idle(thread)
    thread.stop()


def test_a_sink_is_called_once_per_step_for_all_its_requests() -> None:
    backend = GatedBackend()
    thread, heard = make(backend, max_burst=1), Heard()
    with backend.shut():
        ids = [thread.submit(request(i), heard) for i in range(4)]
    heard.outputs(4)
    assert len(heard.calls) <= len(backend.passes)
    assert max(map(len, heard.calls)) == 4
    assert {e.request_id for call in heard.calls for e in call} == set(ids)
    thread.stop()


def test_a_loop_is_called_at_most_once_per_step() -> None:
    async def main() -> tuple[int, int, int]:
        backend = GatedBackend()
        thread, heard, ended = make(backend, max_burst=1), list[list[TokenEvent]](), asyncio.Event()
        left = 4

        def deliver(events: list[TokenEvent]) -> None:
            nonlocal left
            heard.append(events)
            left -= sum(e.output is not None for e in events)
            if not left:
                ended.set()

        sink = on_loop(asyncio.get_running_loop(), deliver)
        with backend.shut():
            for i in range(4):
                thread.submit(request(i), sink)
        wait_until(lambda: len(backend.passes) >= 6)  # the loop is behind: several steps come at once
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        await asyncio.to_thread(thread.stop)
        return len(heard), len(backend.passes), sum(map(len, heard))

    num_calls, num_passes, num_events = asyncio.run(main())
    assert num_calls < num_passes < num_events


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_that_the_engine_stayed_behind() -> None:
    thread, heard = make(), Heard()
    process_id = os.fork()
    if not process_id:
        refused = 0
        thread.stop()  # which is the other's to do
        for ask in (lambda: thread.submit(request(0), heard), lambda: thread.alone().__enter__()):
            try:
                ask()
            except InputError as error:
                refused += "another process's" in str(error)
        os._exit(refused)
    _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    thread.submit(request(0), heard)
    heard.outputs()
    thread.stop()


def test_whose_loop_is_closed_is_forgotten_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A program that ends in the middle says why itself. The control: any other failure of a sink is told."""
    backend = GatedBackend()
    thread, heard, loop = make(backend, max_burst=1), Heard(), asyncio.new_event_loop()
    loop.close()

    def broken(events: list[TokenEvent]) -> None:
        raise RuntimeError("no")

    for sink, is_told in ((on_loop(loop, heard), False), (broken, True)):
        caplog.clear()
        with backend.shut():
            thread.submit(request(0, 40), sink)
            thread.submit(request(1), heard)
        heard.outputs()
        wait_until(lambda: not thread.status().num_running)
        assert ("a sink failed" in caplog.text) is is_told
    thread.stop()


def test_abort_ends_requests_wherever_they_are_and_tells_of_it() -> None:
    """One that runs, one in the engine's queue, one that has no room there; the others go on."""
    backend = GatedBackend()
    thread = make(backend, max_running=1, max_waiting=2)
    inbox = Inbox(thread)
    with backend.shut():
        ids = inbox.submit([request(i, 40) for i in range(5)])
        wait_until(lambda: thread.status().num_running == 1)
        for request_id in (ids[0], ids[1], ids[4], 10**6):
            thread.abort(request_id)
    outputs: dict[int, SampleOutput] = {}
    while len(outputs) < 5:
        outputs |= {e.request_id: e.output for e in inbox.take() if e.output is not None}
    aborted = [i for i, output in outputs.items() if output.finish_reason is FinishReason.ABORT]
    assert sorted(aborted) == [ids[0], ids[1], ids[4]]
    assert {i: outputs[i].digest for i in (2, 3)} == {i: alone(request(i, 40)) for i in (2, 3)}
    check_idle(thread)
    thread.stop()


def test_the_queue_is_bounded() -> None:
    backend = GatedBackend()
    thread, heard = make(backend, max_running=1, max_waiting=2), Heard()
    with backend.shut():
        thread.submit(request(0), heard)
        wait_until(lambda: thread.status().num_running == 1)
        for i in (1, 2):
            thread.submit(request(i), heard)
        with pytest.raises(QueueFullError):
            thread.submit(request(3), heard)
    assert len(heard.outputs(3)) == 3
    thread.submit(request(3), heard)
    assert heard.outputs()[0].digest == alone(request(3))
    thread.stop()


def test_a_bad_request_is_refused_where_it_is_submitted() -> None:
    thread = make()
    with pytest.raises(InputError, match="empty"):
        thread.submit(Request([]), Heard())

    def no_text() -> Any:
        raise LookupError("no such tokenizer")

    heard = Heard()
    thread.submit(request(0, text=no_text, n=2), heard)
    assert [output.error for output in heard.outputs(2)] == ["LookupError: no such tokenizer"] * 2
    check_idle(thread)
    thread.stop()


def test_a_failed_pass_ends_what_was_in_it_and_the_thread_lives() -> None:
    def fault(number: int) -> None:
        if number in (3, 4):
            raise RuntimeError("the device hiccuped")

    backend = GatedBackend(fault)
    thread, heard = make(backend, max_running=2, max_burst=1), Heard()
    with backend.shut():
        for i in range(6):
            thread.submit(request(i, n=2 if i == 1 else 1), heard)
    outputs = heard.outputs(7)
    failed = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert 2 <= len(failed) <= 4
    assert all("RuntimeError: the device hiccuped" in str(o.error) for o in failed)
    well = [o.digest for o in outputs if o.finish_reason is FinishReason.LENGTH and o.sample_index == 0]
    assert set(well) <= {alone(request(i)) for i in (0, *range(2, 6))} | {o.digest for o in outputs if o.seed == 1}
    assert heard.has_ended_once
    check_idle(thread)
    thread.submit(request(7), heard)
    assert heard.outputs()[0].digest == alone(request(7))
    thread.stop()


def test_a_dead_backend_ends_everything() -> None:
    def fault(number: int) -> None:
        if number == 3:
            raise BackendDeadError("the device is lost")

    backend = GatedBackend(fault)
    thread, heard = make(backend, max_running=2, max_waiting=3), Heard()
    with backend.shut():
        for i in range(3):
            thread.submit(request(i), heard)
        inbox = Inbox(thread)
        inbox.submit([request(i) for i in range(3, 8)])
    assert [o.error for o in heard.outputs(3)] == ["the device is lost"] * 3
    ends = 0
    while ends < 5:
        ends += sum(e.output is not None for e in inbox.take())
    with pytest.raises(BackendDeadError, match="the device is lost"):
        thread.submit(request(9), heard)
    thread.stop()


def test_a_broken_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, heard = make(), Heard()

    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(thread.engine, "step", broken)
    monkeypatch.setattr(thread.engine, "fail", broken)
    thread.submit(request(0), heard)
    assert heard.outputs()[0].error == "ZeroDivisionError: a bug"
    with pytest.raises(VerispecError, match="a bug"):
        thread.submit(request(1), heard)
    thread.stop()


def test_a_sink_that_fails_loses_its_own_requests_only() -> None:
    thread, heard = make(max_burst=1), Heard()

    def fails(events: list[TokenEvent]) -> None:
        raise OSError("the client is gone")

    for i in range(4):
        thread.submit(request(i), heard if i % 2 else fails)
    assert sorted(o.digest for o in heard.outputs(2)) == sorted(alone(request(i)) for i in (1, 3))
    check_idle(thread)
    thread.stop()


@pytest.mark.parametrize("drains", [True, False])
def test_stop_drains_or_aborts_and_refuses_what_comes_later(drains: bool) -> None:
    backend = GatedBackend()
    thread, heard = make(backend, max_running=2), Heard()
    with backend.shut():
        for i in range(5):
            thread.submit(request(i, n=1 + i % 2), heard)
        stopper = threading.Thread(target=thread.stop, kwargs={"drains": lambda request: drains})
        stopper.start()
        wait_until(lambda: thread._drains is not None)
        with pytest.raises(InputError, match="closed"):
            thread.submit(request(9), heard)
    stopper.join(TIMEOUT_S)
    reasons = {o.finish_reason for o in heard.outputs(7)}
    assert reasons == ({FinishReason.LENGTH} if drains else {FinishReason.ABORT})
    assert not thread._thread.is_alive()
    thread.stop()


def test_an_inbox_that_is_gone_takes_its_requests_along() -> None:
    backend = GatedBackend()
    thread, heard = make(backend, max_running=2, max_waiting=2), Heard()
    with backend.shut():
        thread.submit(request(0), heard)
        inbox = Inbox(thread)
        inbox.submit([request(i, 100) for i in range(1, 6)])
        del inbox
        gc.collect()
    assert heard.outputs()[0].digest == alone(request(0))
    check_idle(thread)
    assert len(backend.passes) < 60
    thread.stop()


def test_whoever_wants_the_engine_alone_waits_for_what_runs_not_for_what_comes() -> None:
    backend = GatedBackend()
    thread, heard, had = make(backend, max_burst=1), Heard(), threading.Event()

    def use() -> None:
        with thread.alone() as engine:
            assert not engine.has_work
            with pytest.raises(InputError, match="separate engine"):
                thread.submit(request(1), heard)
            had.set()

    user = threading.Thread(target=use)
    with backend.shut():
        thread.submit(request(0), heard)
        wait_until(lambda: thread.status().num_running == 1)
        user.start()
        wait_until(thread._line.locked)
        thread.submit(request(2), heard)
        assert not had.is_set()
    user.join(TIMEOUT_S)
    assert had.is_set()
    heard.outputs(2)
    first_end = next(i for i, call in enumerate(heard.calls) if any(e.output for e in call))
    assert {e.request_id for call in heard.calls[: first_end + 1] for e in call} == {0}, "the second waited"
    thread.stop()


def test_status_shows_a_pass_that_hangs() -> None:
    backend = GatedBackend()
    thread, heard = make(backend), Heard()
    assert thread.status().predicted_seconds == thread.status().step_seconds == 0
    with backend.shut():
        for i in range(3):
            thread.submit(request(i), heard)
        wait_until(lambda: thread.status().step_seconds > 0.02)
        status = thread.status()
        assert status.predicted_seconds > 0
        assert status.num_running + status.num_waiting == 3
    heard.outputs(3)
    wait_until(lambda: thread.status().step_seconds == 0)
    assert thread.status().totals.committed == 36
    assert thread.status().last_step_seconds > 0
    thread.stop()
