"""One LLM, several threads: every call gets what it would have got alone, nobody hangs, nothing is left behind."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.held import held
from tests.support.tiny_llm import CONFIG, loaded, write_model
from verispec.errors import InputError
from verispec.llm import LLM, Completion
from verispec.types import FinishReason, SamplingParams

TIMEOUT_S = 60
NUM_THREADS = 4
PROMPTS = [[1 + i, 2, 3 + i % 5, 4] for i in range(NUM_THREADS * 3)]
SHORT = SamplingParams(max_tokens=24, ignore_eos=True, seed=3, temperature=1.0)
LONG = SamplingParams(max_tokens=120, ignore_eos=True, seed=3)


@pytest.fixture(scope="module", params=["native", "numpy"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("threads")
    with loaded(write_model(folder / "tiny.gguf"), folder / "cache", backend=request.param, kv_slots=2048) as made:
        yield made


def start(call: Callable[[], Any]) -> Future[Any]:
    """Run in a thread of its own that ends with the process, so that a call that hangs does not hang the tests."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def digests(completions: list[Completion]) -> list[str]:
    assert all(c.error is None for c in completions)
    return [c.digest for c in completions]


def is_idle(llm: LLM) -> bool:
    wait_until(lambda: llm.status()[:2] == (0, 0))
    llm.engine.check()
    return not llm.engine.has_work and llm.engine.num_free_slots == llm.engine._pool.num_slots


def generate_until_interrupted(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    threading.Timer(0.02, _thread.interrupt_main).start()
    try:
        while True:
            llm.generate(PROMPTS, LONG)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def set_once(condition: Callable[[], bool], event: threading.Event) -> None:
    """Without waiting for it here."""

    def run() -> None:
        wait_until(condition)
        event.set()

    start(run)


def test_calls_of_several_threads_get_what_they_get_alone(llm: LLM) -> None:
    expected = [digests(llm.generate([p], SHORT))[0] for p in PROMPTS]
    score = llm.score(PROMPTS[0])

    def work(first: int) -> list[str]:
        assert llm.score(PROMPTS[0]) == score
        return [digests(llm.generate([p], SHORT))[0] for p in PROMPTS[first::NUM_THREADS]]

    calls = [start(lambda i=i: work(i)) for i in range(NUM_THREADS)]  # type: ignore[misc]
    found = [call.result(TIMEOUT_S) for call in calls]
    assert found == [expected[i::NUM_THREADS] for i in range(NUM_THREADS)]
    assert is_idle(llm)


def test_streams_and_batches_of_different_threads(llm: LLM) -> None:
    """Two streams of one thread, read in turns, one more that nobody reads, and batches of another thread."""
    expected = digests(llm.generate(PROMPTS, SHORT))
    unread = llm.stream([5, 6, 7], LONG)
    next(unread)

    def read() -> list[str]:
        streams = [llm.stream(p, SHORT) for p in PROMPTS[:2]]
        last = [None, None]
        while events := [(i, e) for i, s in enumerate(streams) if (e := next(s, None)) is not None]:
            for i, event in events:
                last[i] = event.output and event.output.digest  # type: ignore[assignment]
        return last  # type: ignore[return-value]

    reader, batch = start(read), start(lambda: digests(llm.generate(PROMPTS, SHORT)))
    assert reader.result(TIMEOUT_S) == expected[:2]
    assert batch.result(TIMEOUT_S) == expected
    unread.close()  # type: ignore[attr-defined]
    assert is_idle(llm)


def test_a_callback_may_wait_for_another_thread(llm: LLM) -> None:
    def wait(index: int, completion: Completion) -> None:
        assert start(lambda: llm.score([1, 2, 3])).result(TIMEOUT_S).logprobs

    assert len(start(lambda: llm.generate(PROMPTS[:2], SHORT, on_finish=wait)).result(TIMEOUT_S)) == 2


def test_a_separate_engine_waits_for_batches_and_is_waited_for(llm: LLM) -> None:
    (expected,) = digests(llm.generate([PROMPTS[0]], LONG))
    with held(llm) as is_free:
        batch = start(lambda: digests(llm.generate([PROMPTS[0]], LONG)))
        wait_until(lambda: llm.status().num_running > 0)
        set_once(llm.thread._line.locked, is_free)
        with llm.separate_engine() as engine:
            assert batch.result(TIMEOUT_S) == [expected], "the batch had ended"
            late = start(lambda: digests(llm.generate([PROMPTS[0]], LONG)))
            engine.add(llm.request(PROMPTS[1], SHORT))
            while engine.has_work:
                engine.step()
            assert not late.done()
            with pytest.raises(InputError, match="separate engine"):
                llm.generate([PROMPTS[0]], SHORT)
    assert late.result(TIMEOUT_S) == [expected]


def test_a_separate_engine_waits_for_streams_whether_they_are_read_or_not(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    first = next(stream)
    with llm.separate_engine():
        assert is_idle(llm)
    assert [*first.token_ids, *(t for e in stream for t in e.token_ids)] == [
        *llm.generate([PROMPTS[0]], LONG)[0].token_ids
    ]

    def separate(index: int, completion: Completion) -> None:
        with llm.separate_engine():
            assert is_idle(llm)

    assert len(start(lambda: llm.generate(PROMPTS[:2], [SHORT, LONG], on_finish=separate)).result(TIMEOUT_S)) == 2


def test_ctrl_c_ends_the_call_of_the_main_thread_alone(llm: LLM) -> None:
    (expected,) = digests(llm.generate([PROMPTS[0]], LONG))
    other = start(lambda: [digests(llm.generate([PROMPTS[0]], LONG))[0] for _ in range(3)])
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            generate_until_interrupted(llm)
    assert other.result(TIMEOUT_S) == [expected] * 3
    assert is_idle(llm)


def test_close_waits_for_batches_and_refuses_what_comes_later(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", replace(CONFIG, context_len=8192))
    with loaded(model, tmp_path, backend="numpy", max_running=2) as llm:
        (expected,) = digests(llm.generate([PROMPTS[0]], SHORT))
        with held(llm, num_running=2) as both_are_free, held(llm) as stream_is_free:
            stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=8000, ignore_eos=True))
            next(stream)
            batch = start(lambda: digests(llm.generate([PROMPTS[0]], SHORT)))
            wait_until(lambda: llm.status().num_waiting > 0)
            stream_is_free.set()
            wait_until(lambda: llm.status().num_running == 2)
            set_once(lambda: llm.thread._drains is not None, both_are_free)
            llm.close()
        assert batch.result(TIMEOUT_S) == [expected]
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
        llm.close()
        later: list[Callable[[], object]] = [
            lambda: llm.generate("a", SHORT),
            lambda: llm.stream("a", SHORT),
            lambda: llm.score("ab"),
            lambda: llm.chat([{"role": "user", "content": "a"}], SHORT),
            lambda: llm.separate_engine().__enter__(),
        ]
        for call in later:
            with pytest.raises(InputError, match="closed"):
                call()
