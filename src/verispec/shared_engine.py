"""One engine for callers on several threads: they take it in turns, a step at a time, or one has it alone.

Whoever waits for an event drives the engine for all; events go to the inbox of their request. The lock is held for one
step at most, and Ctrl-C waits for the end of that step, so an interrupt finds nothing half done. Nobody is called back
while the lock is held, so a caller may wait for another thread that uses the engine as well.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.interrupts import deferred_interrupt
from verispec.types import TokenEvent

_PAUSE_S = 0.005  # between two looks at whether another thread is done with its batch, or with the engine


class _FairLock:
    """A lock that is not taken twice by one thread while another waits: between two steps others get in."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


@dataclass(slots=True, eq=False)
class Inbox:
    """The events of one request that nobody has taken yet. A stream may stay unread for long; a batch is driven."""

    is_stream: bool = False
    events: deque[TokenEvent] = field(default_factory=deque)
    request_id: int | None = None  # while the request is open
    thread_id: int = field(default_factory=threading.get_ident)

    def take(self) -> Iterator[TokenEvent]:
        """Remove and give what is there."""
        while self.events:
            yield self.events.popleft()


class SharedEngine:
    """The engine, and who uses it. `engine` may be replaced while nobody does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = _FairLock()
        self._inboxes: dict[int, Inbox] = {}
        self._alone: Inbox | None = None  # stands for whoever has the engine alone
        self._is_closing = False
        self._is_closed = False

    def check_open(self) -> None:
        """Raise InputError once `close` was called, except for a thread whose batch is waited for."""
        here = threading.get_ident()
        if self._is_closed or (self._is_closing and here not in {i.thread_id for i in list(self._inboxes.values())}):
            raise InputError("this LLM is closed")

    def open(self, request: Request, inbox: Inbox) -> None:
        """Add a request, whose events go to the inbox; waits while another thread has the engine alone."""

        def add() -> bool:
            self.check_open()
            self._check_not_alone_here()
            if self._alone is None:
                inbox.request_id = self.engine.add(request)
                self._inboxes[inbox.request_id] = inbox
            return inbox.request_id is not None

        self._wait(add)

    def close_request(self, inbox: Inbox) -> None:
        """Abort the request if it still runs, and drop its events. One that is not open is left alone."""
        with deferred_interrupt(), self._lock:
            if inbox.request_id is not None:
                self.engine.abort(inbox.request_id)
                del self._inboxes[inbox.request_id]
                inbox.request_id = None

    def step(self) -> None:
        """One step of the engine for all who have requests in it."""
        with deferred_interrupt(), self._lock:
            self.check_open()
            if self.engine.has_work:
                for event in self.engine.step():
                    if event.request_id in self._inboxes:
                        self._inboxes[event.request_id].events.append(event)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the engine alone inside the block; waits until the batches of other threads are done.

        Raises InputError while streams are open, or a batch of this thread: they would be waited for in vain.
        """
        marker = Inbox()

        def take() -> bool:
            self.check_open()
            self._check_not_alone_here()
            stuck = [i for i in self._inboxes.values() if i.is_stream or i.thread_id == marker.thread_id]
            if stuck:
                raise InputError(f"{len(stuck)} streams of this LLM are open; close them first")
            if self._alone is None and not self._inboxes:
                self._alone = marker
            return self._alone is marker

        try:
            self._wait(take)
            yield
        finally:
            with deferred_interrupt(), self._lock:
                if self._alone is marker:
                    self._alone = None

    def close(self, release: Callable[[], None]) -> None:
        """Refuse new calls from now on, wait for the batches of other threads, then `release` what the engine uses."""
        here = threading.get_ident()
        self._is_closing = True

        def end() -> bool:
            others = [i for i in self._inboxes.values() if not i.is_stream]
            others += [] if self._alone is None else [self._alone]
            if all(i.thread_id == here for i in others) and not self._is_closed:
                self._is_closed = True
                release()
            return self._is_closed

        self._wait(end)

    def _wait(self, attempt: Callable[[], bool]) -> None:
        """Try under the lock until it succeeds."""
        while True:
            with deferred_interrupt(), self._lock:
                if attempt():
                    return
            time.sleep(_PAUSE_S)

    def _check_not_alone_here(self) -> None:
        if self._alone is not None and self._alone.thread_id == threading.get_ident():
            raise InputError("a separate engine of this LLM is in use here; leave its block first")
