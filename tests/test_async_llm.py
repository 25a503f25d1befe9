"""The asyncio interface: the same answers as LLM's, and nothing left behind however a call ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.tiny_llm import loaded
from verispec import AsyncLLM
from verispec.async_llm import SlowReaderError
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


def test_many_calls_at_once_change_no_answer(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    alone = [llm.generate(prompt, PARAMS)[0] for prompt in prompts]

    async def work() -> None:
        model = AsyncLLM(llm)
        answers = await asyncio.gather(*(model.generate(prompt, PARAMS) for prompt in prompts))
        assert [answer for (answer,) in answers] == alone

    run(work)


async def _idle(llm: LLM) -> None:
    """Wait until nothing runs; it must not take long."""
    end = time.monotonic() + 10
    while (status := llm.status()).num_running + status.num_waiting:
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_abort_cancel_and_an_iterator_left_early_free_everything(llm: LLM) -> None:
    async def work() -> None:
        model = AsyncLLM(llm)
        stream = model.stream("abc", LONG)
        await stream.take()
        stream.abort()
        events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.ABORT
        task = asyncio.create_task(model.generate("abc", LONG))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with model.stream("abc", LONG) as left:
            await left.take()
        await _idle(llm)
        assert not model._streams

    run(work)
    llm.engine.check()


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
    step, is_stalled = llm.engine.step, False

    def slow() -> object:
        time.sleep(0.01)
        return [] if is_stalled else step()

    monkeypatch.setattr(llm.engine, "step", slow)

    async def work() -> None:
        nonlocal is_stalled
        model = AsyncLLM(llm)
        assert model.silent_seconds() == 0
        asked = asyncio.ensure_future(model.generate("one", SamplingParams(max_tokens=60, ignore_eos=True)))
        longest = 0.0
        while not asked.done():  # it is not streamed: nothing is heard of it before its end
            await asyncio.sleep(0.02)
            longest = max(longest, model.silent_seconds())
        assert longest < 0.3
        is_stalled = True
        async with model.stream("one", PARAMS) as stream:  # control
            await asyncio.sleep(0.4)
            assert model.silent_seconds() > 0.3
            is_stalled = False
            assert [event async for event in stream]
        assert model.silent_seconds() == 0

    run(work)
