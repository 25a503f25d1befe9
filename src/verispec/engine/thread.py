"""The thread that steps an engine for everybody: the only place that knows threads.

Requests come in from any thread, each with a *sink*, which is called on this thread, once per step, with all that was
committed for its requests. Every sample has exactly one event with an output, its last, whatever happens: a pass that
fails ends the requests that were in it, and a backend that is dead ends all. Ctrl-C reaches the main thread, never this
one, so no step is ever cut in two; a caller that was interrupted is noticed by its inbox, which is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from verispec.engine.engine import Engine
from verispec.engine.request import Request
from verispec.errors import BackendDeadError, InputError, QueueFullError, VerispecError
from verispec.types import NO_LOGPROBS, FinishReason, SampleOutput, SequenceStats, TokenEvent, Totals

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

T = TypeVar("T")
Sink = Callable[[list[TokenEvent]], object]
logger = logging.getLogger(__name__)
_PAUSE = 0.001  # seconds until the engine is inside of its next pass, and needs the interpreter no more
_FEW = 4  # events, which are dealt with so soon that nobody has to wait


def on_loop(loop: AbstractEventLoop, deliver: Sink) -> Sink:
    """A sink that calls `deliver` on an asyncio loop, at most once per step for all requests that share it.

    A loop that is behind gets the events of several steps with one call. With more than a few events it is called after
    a pause, so as not to fight with the engine for the interpreter while that prepares its next pass.
    """
    return _LoopSink(loop, deliver)


class _GoneError(Exception):
    """Whoever listened has ended; nothing is wrong with that."""


class _LoopSink:
    def __init__(self, loop: AbstractEventLoop, deliver: Sink) -> None:
        self._loop = loop
        self._deliver = deliver
        self._events: deque[TokenEvent] = deque()
        self._is_called = False

    def __call__(self, events: list[TokenEvent]) -> None:
        """On the engine's thread."""
        self._events.extend(events)
        if self._is_called:
            return
        self._is_called = True
        try:
            if len(events) > _FEW:
                self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE, self._flush)
            else:
                self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:
            if self._loop.is_closed():
                raise _GoneError from None
            raise

    def _flush(self) -> None:
        """On the loop's thread."""
        self._is_called = False  # first: what comes from now on calls again
        if events := _drained(self._events):
            self._deliver(events)


class Status(NamedTuple):
    """What the engine has to do, seen from outside; times are in seconds.

    A step that runs for much longer than its pass should, by the measured costs, hangs.
    """

    num_running: int
    num_waiting: int
    totals: Totals
    step_seconds: float  # how long the step that runs now has taken; 0 if none does
    last_step_seconds: float
    predicted_seconds: float  # of the newest pass
    kv_usage: float = 0.0  # the share of the K/V slots that running samples hold


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way, and who hears of it. `owner` is dead once nobody can."""

    request_id: int
    request: Request
    sink: Sink
    owner: weakref.ref[Inbox] | None
    left: set[int]  # samples that have not ended


class EngineThread:
    """Steps `engine` while there are requests. It may be replaced, or driven by hand, inside `alone`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._gate = threading.Lock()  # held to submit, and to close the gate for good
        self._line = threading.Lock()  # held by who is next to have the engine
        self._turn = threading.Lock()  # held by who has it: this thread while it has requests, or who is alone
        self._alone_id: int | None = None  # of the thread that is alone
        self._num_submitted = 0
        self._arrived: SimpleQueue[list[_Job]] = SimpleQueue()
        self._waiting: deque[_Job] = deque()  # for room in the engine's queue
        self._live: dict[int, _Job] = {}  # in the engine, by request id
        self._aborted: deque[int] = deque()
        self._gone: deque[weakref.ref[Inbox]] = deque()  # owners
        self._drains: Callable[[Request], bool] | None = None  # since `stop`
        self._failure: VerispecError | None = None
        self._step_start: float | None = None
        self._process_id = os.getpid()
        self._last_step_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="verispec-engine", daemon=True)
        self._thread.start()

    def check_open(self) -> None:
        """Raise if no request can be taken any more."""
        if self._failure is not None:
            raise self._failure
        if self._drains is not None:
            raise InputError("this LLM is closed")

    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request; returns its id. Raises InputError for a bad one, QueueFullError when there is no room."""
        self.engine.validate(request)
        return self._submit([request], sink, is_bounded=True)[0]

    def abort(self, request_id: int) -> None:
        """End a request before the next step; its last events come with that. One that has ended is left alone."""
        self._aborted.append(request_id)

    def stop(self, *, drains: Callable[[Request], bool] = lambda request: True) -> None:
        """Refuse requests from now on, let those that are there come to their end, and end the thread.

        Requests that `drains` is False for are aborted. May be called again, with less patience. In a fork of the
        process there is nothing to stop.
        """
        if self._process_id != os.getpid():
            return
        self._check_here()
        with self._gate:
            self._drains = drains
            self._arrived.put([])  # wakes it up
        if self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def alone(self) -> Iterator[Engine]:
        """The engine, to have alone inside the block. Waits for the requests in it; others wait for the block's end."""
        self._check_here()
        with self._line, self._turn:
            self.check_open()
            try:
                self._alone_id = threading.get_ident()
                yield self.engine
            finally:
                self._alone_id = None

    @property
    def idle_engine(self) -> Engine:
        """The engine, once it has nothing to do."""
        if threading.get_ident() not in (self._alone_id, self._thread.ident):
            with self._line, self._turn:
                pass
        return self.engine

    def status(self) -> Status:
        """What is going on. Never waits, not even for a pass that hangs."""
        start = self._step_start
        return Status(
            num_running=self.engine.num_running,
            num_waiting=self._num_outside + self.engine.num_waiting,
            totals=self.engine.totals,
            step_seconds=0.0 if start is None else time.monotonic() - start,
            last_step_seconds=self._last_step_seconds,
            predicted_seconds=self.engine.predicted_seconds,
            kv_usage=self.engine.kv_usage,
        )

    @property
    def _num_outside(self) -> int:
        """Requests that the engine has not seen yet."""
        return self._arrived.qsize() + len(self._waiting)

    def _check_here(self) -> None:
        if self._process_id != os.getpid():  # threads stay behind in a fork, and locks as they were
            raise InputError("this LLM is another process's: make one in each, and start processes by 'spawn'")
        if self._alone_id == threading.get_ident():
            raise InputError("a separate engine of this LLM is in use here; leave its block first")

    def _submit(
        self,
        requests: Sequence[Request],
        sink: Sink,
        owner: weakref.ref[Inbox] | None = None,
        *,
        is_bounded: bool = False,
    ) -> range:
        """Queue requests that are valid; unless it is bounded, as many as there are."""
        self._check_here()
        with self._gate:
            self.check_open()
            if is_bounded and not self.engine.has_room(requests[0].params, num_before=self._num_outside):
                raise QueueFullError("the queue of requests is full; try again later")
            first, self._num_submitted = self._num_submitted, self._num_submitted + len(requests)
            self._arrived.put([_Job(first + i, r, sink, owner, _samples(r)) for i, r in enumerate(requests)])
        return range(first, first + len(requests))

    # On the thread.

    def _run(self) -> None:
        while self._drains is None or self._waiting or not self._arrived.empty():
            if not self._waiting:
                self._waiting.extend(self._arrived.get())
            with self._line:  # whoever wants it alone goes first
                self._turn.acquire()
            try:
                self._serve()
            except BaseException as error:  # nobody may wait in vain
                logger.critical("the engine has failed", exc_info=error)
                self._failure = error if isinstance(error, VerispecError) else BackendDeadError(_said(error))
                self._end_all(str(self._failure))
            finally:
                self._turn.release()

    def _serve(self) -> None:
        """Step until nothing is left; whoever wants the engine alone waits for the requests in it, not for others."""
        if self._failure is not None:
            raise self._failure
        while self.engine.has_work or (self._waiting and not self._line.locked()):
            self._take_orders()
            start = self._step_start = time.monotonic()
            try:
                events = self.engine.step()
            except BackendDeadError:
                raise
            except BaseException as error:
                logger.error("a step failed", exc_info=error)
                events = self.engine.fail(f"a pass failed: {_said(error)}")
            self._step_start, self._last_step_seconds = None, time.monotonic() - start
            self._tell(events)

    def _take_orders(self) -> None:
        """What came from outside since the last step."""
        while not self._arrived.empty():
            self._waiting.extend(self._arrived.get())
        if self._gone:
            gone = _drained(self._gone)
            self._abort(lambda job: job.owner in gone, tells=False)
        if self._aborted:
            request_ids = _drained(self._aborted)
            self._abort(lambda job: job.request_id in request_ids)
        if self._drains is not None:
            drains = self._drains
            self._abort(lambda job: not drains(job.request))
        if self._line.locked():
            return
        while self._waiting and self.engine.has_room(self._waiting[0].request.params):
            job = self._waiting.popleft()
            try:
                self.engine.add(job.request, request_id=job.request_id)
                self._live[job.request_id] = job
            except Exception as error:
                self._end(job, FinishReason.ERROR, _said(error))

    def _abort(self, is_meant: Callable[[_Job], bool], *, tells: bool = True) -> None:
        """End requests, wherever they are; unless it `tells`, nobody hears of it."""
        for job in [job for job in self._live.values() if is_meant(job)]:
            self.engine.abort(job.request_id)
            if not tells:
                del self._live[job.request_id]
        meant = [job for job in self._waiting if is_meant(job)]
        if meant:
            self._waiting = deque(job for job in self._waiting if not is_meant(job))
        for job in meant if tells else ():
            self._end(job, FinishReason.ABORT)

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        """Call every sink that has something to hear, once."""
        told: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            job = self._live.get(event.request_id)
            if job is None:
                continue
            told.setdefault(job.sink, []).append(event)
            if event.output is not None:
                job.left.remove(event.sample_index)
                if not job.left:
                    del self._live[job.request_id]
        for sink, heard in told.items():
            self._call(sink, heard)

    def _call(self, sink: Sink, events: list[TokenEvent]) -> None:
        try:
            sink(events)
        except BaseException as error:
            if not isinstance(error, _GoneError):
                logger.error("a sink failed; its requests are dropped", exc_info=error)
            self._abort(lambda job: job.sink == sink, tells=False)

    def _end(self, job: _Job, reason: FinishReason, error: str | None = None) -> None:
        """The last events of a request that is not in the engine."""
        output = partial(
            SampleOutput,
            prompt_len=len(job.request.prompt_ids),
            logprobs=NO_LOGPROBS,
            text="",
            finish_reason=reason,
            seed=job.request.params.seed or 0,
            stats=SequenceStats(),
            error=error,
        )
        self._call(job.sink, [TokenEvent(job.request_id, i, output=output(sample_index=i)) for i in sorted(job.left)])

    def _end_all(self, error: str) -> None:
        jobs = [*self._live.values(), *self._waiting]
        self._live.clear()
        self._waiting.clear()
        for job in jobs:
            self._end(job, FinishReason.ERROR, error)


class Inbox:
    """One caller's end of the thread. Its requests live no longer than it does, however it comes to its end.

    That they go with the last reference to it, without a line of Python, makes it safe to be interrupted anywhere.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._mail: SimpleQueue[list[TokenEvent]] = SimpleQueue()
        self._ref = weakref.ref(self, thread._gone.append)

    def submit(self, requests: Sequence[Request]) -> range:
        """Queue requests, as many as there are; returns their ids."""
        return self._thread._submit(requests, self._mail.put, self._ref)

    def take(self) -> list[TokenEvent]:
        """What one step committed; waits for it."""
        return self._mail.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread._gone.append(self._ref)


def _samples(request: Request) -> set[int]:
    return set(range(request.first_sample, request.first_sample + request.params.n))


def _drained(items: deque[T]) -> list[T]:
    """What is there, removed; others may go on adding."""
    return [items.popleft() for _ in range(len(items))]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
