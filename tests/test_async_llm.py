"""The asyncio interface: the same answers as LLM's, and nothing left behind however a call ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.held import held
from tests.support.tiny_llm import loaded
from verispec import AsyncLLM, async_llm
from verispec.async_llm import SlowReaderError
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.types import FinishReason, SamplingParams

PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("async")
    with loaded(write_chat_model(folder / "tiny.gguf"), folder) as llm:
        yield llm


def run(work: Callable[[], Awaitable[object]]) -> object:
    async def bounded() -> object:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(bounded())


def test_awaited_answers_are_the_waited_for_ones(llm: LLM) -> None:
    expected = llm.generate(["one", "two"], PARAMS, receipts=True)

    async def work() -> None:
        model = AsyncLLM(llm)
        both = await model.generate(["one", "two"], PARAMS, receipts=True)
        assert both == expected
        assert [c.receipts for c in both] == [c.receipts for c in expected]
        assert await model.chat(MESSAGES, PARAMS) == llm_chat
        events = [event async for event in model.chat_stream(MESSAGES, PARAMS)]
        assert "".join(event.text for event in events) == llm_chat.text
        assert events[-1].output == llm_chat.samples[0]

    llm_chat = llm.chat(MESSAGES, PARAMS)
    run(work)


def test_prompts_of_one_call_are_a_batch_and_other_calls_are_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody waits for all of a call's answers, and for nobody else's; streams have no batch."""
    batches: list[int] = []
    add = Engine.add

    def noted(self: Engine, request: Request, **more: object) -> int:
        batches.append(request.batch)
        return add(self, request, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "add", noted)

    async def work() -> None:
        await AsyncLLM(llm).generate(["one", "two"], PARAMS)
        async for _ in AsyncLLM(llm).stream("five", PARAMS):
            pass

    llm.generate(["three", "four"], PARAMS)
    run(work)
    first, same, second, other, stream = batches
    assert first == same != second == other
    assert stream == 0


def test_many_calls_at_once_change_no_answer(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    alone = [llm.generate(prompt, PARAMS)[0] for prompt in prompts]

    async def work() -> None:
        model = AsyncLLM(llm)
        answers = await asyncio.gather(*(model.generate(prompt, PARAMS) for prompt in prompts))
        assert [answer for (answer,) in answers] == alone

    run(work)


async def _until(condition: Callable[[], object]) -> None:
    """It must not take long."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def _idle(llm: LLM) -> None:
    """Wait until nothing runs."""
    await _until(lambda: llm.status()[:2] == (0, 0))


def test_abort_cancel_and_an_iterator_left_early_free_everything(llm: LLM) -> None:
    """Each of them while the engine is not far in its 900 tokens."""
    before = llm.status().totals.committed

    async def work() -> None:
        model = AsyncLLM(llm)
        with held(llm) as is_free:
            stream = model.stream("abc", LONG)
            await stream.take()
            stream.abort()
            is_free.set()
            events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.ABORT
        with held(llm):
            task = asyncio.create_task(model.generate("abc", LONG))
            await _until(lambda: llm.status().num_running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with held(llm):
            async with model.stream("abc", LONG) as left:
                await left.take()
        await _idle(llm)
        assert not model._streams

    run(work)
    llm.engine.check()
    assert llm.status().totals.committed - before < 900


def test_a_reader_that_is_too_slow_is_told_and_others_go_on(llm: LLM) -> None:
    async def work() -> None:
        model = AsyncLLM(llm)
        slow = model.stream("slow", LONG, max_pending=5)
        fast = [event async for event in model.stream("fast", SamplingParams(max_tokens=60, ignore_eos=True))]
        assert sum(len(event.logprobs) for event in fast) == 60
        await _idle(llm)
        with pytest.raises(SlowReaderError, match="5 events"):
            await slow.take()

    run(work)


def test_who_reads_what_was_delivered_is_not_slow(llm: LLM) -> None:
    """However many events a delivery has: nobody can have read any of them before the next one. The control reads
    none."""

    async def work() -> None:
        model = AsyncLLM(llm)
        for reads in (True, False):
            stream = model.stream("many", LONG, max_pending=5)
            (request_id,) = stream.request_ids
            event = (await stream.take())[0]._replace(request_id=request_id, output=None)
            for _ in range(3):
                model._deliver([event] * 20)
                assert len(stream._pending) >= 20 or not reads
                if reads:
                    assert len(await stream.take()) >= 20
            if reads:
                stream.close()
            else:
                with pytest.raises(SlowReaderError, match="5 events"):
                    await stream.take()
        await _idle(llm)

    run(work)


def test_a_bad_request_is_refused_at_once_and_leaves_nothing(llm: LLM) -> None:
    async def work() -> None:
        model = AsyncLLM(llm)
        with pytest.raises(InputError, match="vocabulary"):
            await model.generate([[10**6]])
        with pytest.raises(InputError, match="deterministic"):
            await model.generate("abc", SamplingParams(deterministic=False), receipts=True)
        good = llm.request("abc", LONG)
        bad = llm.request("abc", LONG)
        object.__setattr__(bad, "prompt_ids", ())
        with pytest.raises(InputError, match="empty"):
            model.open([good, bad])
        await _idle(llm)

    run(work)


def test_one_llm_serves_one_loop_after_another(llm: LLM) -> None:
    model = AsyncLLM(llm)
    answers = [run(lambda: model.generate("abc", PARAMS)) for _ in range(2)]
    assert answers[0] == answers[1]


def test_silence_is_measured_only_where_somebody_waits_and_nothing_is_committed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that the test moves; the engine makes the steps that it is allowed."""
    step, allowed, num_made, is_stalled, now = llm.engine.step, threading.Semaphore(0), 0, False, 0.0

    def counted() -> object:
        nonlocal num_made
        assert allowed.acquire(timeout=60)
        events = [] if is_stalled else step()
        num_made += 1
        return events

    monkeypatch.setattr(llm.engine, "step", counted)
    monkeypatch.setattr(async_llm, "time", SimpleNamespace(monotonic=lambda: now))

    async def work() -> None:
        nonlocal is_stalled, now
        model = AsyncLLM(llm)
        assert model.silent_seconds() == 0
        asked = asyncio.ensure_future(model.generate("one", SamplingParams(max_tokens=60, ignore_eos=True)))
        await asyncio.sleep(0)  # it begins
        found = []
        while not asked.done():  # it is not streamed: nothing is heard of it before its end
            now += 0.1
            found.append(model.silent_seconds())
            allowed.release()
            await _until(lambda: num_made == len(found))
            await _until(lambda: llm.status().num_running or asked.done())
        assert max(found) < 0.15
        assert now > 0.3  # control: longer than it may be silent
        num_before, is_stalled = num_made, True
        assert model.silent_seconds() == 0
        async with model.stream("one", PARAMS) as stream:  # control
            allowed.release(2)
            await _until(lambda: num_made == num_before + 2)
            now += 0.4
            assert model.silent_seconds() > 0.3
            is_stalled = False
            allowed.release(100)
            assert [event async for event in stream]
        assert model.silent_seconds() == 0

    run(work)
