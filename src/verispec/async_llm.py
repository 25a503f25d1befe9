"""An LLM for asyncio: the same engine thread and the same answers, awaited instead of waited for.

Knows the event loop and the engine's thread. Requests that are made on the loop hear of their tokens there, all of them
together by one call per step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from verispec.engine import Request
from verispec.engine.request import new_batch
from verispec.engine.thread import Sink, on_loop
from verispec.errors import VerispecError
from verispec.llm import LLM, Completion, Speculative, check_requests
from verispec.runtime import Message
from verispec.text.prompts import Params, Prompt
from verispec.types import FinishReason, SampleOutput, TokenEvent

_ENDS = (FinishReason.STOP, FinishReason.LENGTH)  # that the model came to


class SlowReaderError(VerispecError):
    """A stream was read more slowly than its tokens came, for too long; it was aborted."""


class Stream:
    """The events of some requests as they come; iterate over it, or `take` what there is. `abort` ends it early.

    Whoever reads too slowly loses it: with `max_pending` events unread it is aborted, and reading raises. `on_close` is
    called when it is closed, be that by its reader or by a failure that the reader has not seen yet.
    """

    def __init__(self, llm: AsyncLLM, max_pending: int | None) -> None:
        self._llm = llm
        self._max_pending = max_pending
        self._pending: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_left: dict[int, int] = {}  # samples that have not ended, by request id
        self._error: Exception | None = None
        self.request_ids: list[int] = []
        self.on_close: Callable[[], None] = lambda: None

    @property
    def has_ended(self) -> bool:
        """Whether all samples have; what they said may still be unread."""
        return not self._num_left

    async def take(self) -> list[TokenEvent]:
        """What has come since the last time, at least one event; nothing once all were taken."""
        while not self._pending and self._num_left and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        events = list(self._pending)
        self._pending.clear()
        return events

    def abort(self) -> None:
        """End the requests before the next step; their last events say so. Nothing happens to those that have ended."""
        for request_id in self._num_left:
            self._llm.abort(request_id)

    def close(self) -> None:
        """`abort`, and hear no more."""
        self.abort()
        self._llm._forget(self)
        self._num_left.clear()
        self._wake()
        self.on_close()

    def fail(self, error: Exception) -> None:
        """`close`, and raise this to whoever reads."""
        self._error = error
        self.close()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        try:
            while events := await self.take():
                for event in events:
                    yield event
        finally:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def _put(self, event: TokenEvent) -> None:
        self._pending.append(event)
        if event.output is not None:
            self._num_left[event.request_id] -= 1
            if not self._num_left[event.request_id]:
                del self._num_left[event.request_id]
        self._wake()

    def _is_read(self) -> bool:
        """Whether there is room for what is delivered now, however much that is: else the stream fails."""
        if self._max_pending is None or len(self._pending) < self._max_pending:
            return True
        message = f"the stream was not read for {self._max_pending} events, so the request was ended"
        self.fail(SlowReaderError(message))
        return False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncLLM:
    """What `LLM` does, on an event loop. `AsyncLLM(llm)` shares a loaded model; use it on one loop at a time.

    Any number of calls run at once, as one batch. Cancelling one frees everything it started. `llm` has the rest:
    tokenizer, profile, `chat_ids`.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._streams: dict[int, Stream] = {}
        self._sink: Sink = self._deliver
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard_at = 0.0
        self._num_committed = 0  # when somebody last looked

    def silent_seconds(self) -> float:
        """How long no token and no end was heard of the requests that are open; 0 if none is.

        Requests that are not streamed say nothing on their way: that the engine commits tokens is noticed here.
        """
        num_committed = self.llm.status().totals.committed
        if num_committed != self._num_committed:
            self._num_committed, self._heard_at = num_committed, time.monotonic()
        return time.monotonic() - self._heard_at if self._streams else 0.0

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
        receipts: bool = False,
    ) -> list[Completion]:
        """`LLM.generate`, awaited."""
        requests = self.llm.requests(prompts, params, drafter=drafter, speculative=speculative)
        return await self._completed(requests, receipts=receipts)

    async def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Completion:
        """Answer one conversation through the model's chat template."""
        request = self.llm.request(self.llm.chat_ids(messages), params, drafter=drafter, speculative=speculative)
        (completion,) = await self._completed([request])
        return completion

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
        trace: bool = False,
        max_pending: int | None = None,
    ) -> Stream:
        """Complete one prompt; iterate over the result for each commit as it happens."""
        request = self.llm.request(prompt, params, drafter=drafter, speculative=speculative)
        return self.open([replace(request, is_traced=trace)], max_pending=max_pending)

    def chat_stream(self, messages: Sequence[Message], params: Params | None = None, **options: Any) -> Stream:
        """`chat`, streamed; `options` are those of `stream`."""
        return self.stream(self.llm.chat_ids(messages), params, **options)

    def open(self, requests: Sequence[Request], *, max_pending: int | None = None) -> Stream:
        """One stream for all of these requests, or none: raises QueueFullError when there is no room for them."""
        self._bind()
        if not self._streams:
            self._heard_at = time.monotonic()
        stream = Stream(self, max_pending)
        try:
            for request in requests:
                request_id = self.llm.thread.submit(request, self._sink)
                stream.request_ids.append(request_id)
                stream._num_left[request_id] = request.params.n
                self._streams[request_id] = stream
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, request_id: int) -> None:
        """End a request before the next step. One that has ended is left alone."""
        self.llm.thread.abort(request_id)

    async def aclose(self) -> None:
        """`LLM.close`, without blocking the loop."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _completed(self, requests: Sequence[Request], *, receipts: bool = False) -> list[Completion]:
        check_requests(requests, receipts=receipts)
        samples: dict[int, list[SampleOutput]] = {}
        batch = new_batch()
        async with self.open([replace(r, is_streamed=False, batch=batch) for r in requests]) as stream:
            while events := await stream.take():
                for event in events:
                    if event.output is not None:
                        samples.setdefault(event.request_id, []).append(event.output)
        return [
            self.llm.completion(request, samples[request_id], receipts=receipts)
            for request, request_id in zip(requests, stream.request_ids, strict=True)
        ]

    def _bind(self) -> None:
        """Hear of tokens on the loop that runs now."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._sink = loop, on_loop(loop, self._deliver)

    def _deliver(self, events: list[TokenEvent]) -> None:
        if any(event.logprobs or event.finish_reason in _ENDS for event in events):
            self._heard_at = time.monotonic()
        heard: set[Stream] = set()  # of what is delivered now nobody can have read anything
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None or not (stream in heard or stream._is_read()):  # closed by its reader, or for it
                continue
            heard.add(stream)
            if event.output is not None and stream._num_left[event.request_id] == 1:
                del self._streams[event.request_id]
            stream._put(event)

    def _forget(self, stream: Stream) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
