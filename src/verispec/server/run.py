"""Serves an application until it is told to stop: sockets, signals, and limits on what comes before a request.

SIGTERM or Ctrl-C: nothing new is taken, what runs has `drain` seconds, then it is ended and told so. A second one ends
it at once, and a third one waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verispec.errors import InputError
from verispec.server.app import make_app
from verispec.server.core import Core
from verispec.server.settings import MAX_HEADER_NBYTES, MAX_HEADERS, Settings

logger = logging.getLogger(__name__)
_WATCH_SECONDS = 1.0
_LAST_WORDS_SECONDS = 5.0
_BACKLOG = 2048


def make_protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """HTTP with bounds on headers: their size, their number, and the time they may take to come; on the time in which
    the rest of a body may come that was answered already; and on the time in which a client takes nothing of what is
    sent to it.
    """

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arrival_timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None
            self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_watching()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            self._stop_watching()
            super().resume_writing()

        def on_message_begin(self) -> None:
            self._wait_for_headers()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._num_headers += 1
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._wait_for_body()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._stop_waiting()
            super().on_message_complete()

        def _count(self, nbytes: int) -> None:
            self._num_header_nbytes += nbytes
            if self._num_header_nbytes > MAX_HEADER_NBYTES or self._num_headers > MAX_HEADERS:
                raise ValueError("too many headers")  # the parser then refuses the request with 400

        def _wait_for_headers(self) -> None:
            self._stop_waiting()
            self._num_header_nbytes = self._num_headers = 0
            self._arrival_timer = self.loop.call_later(settings.header_timeout, self.transport.close)

        def _wait_for_body(self) -> None:
            """Whoever was refused may send the rest, so that the connection can be used again, but not for ever."""
            self._stop_waiting()

            def look() -> None:
                is_answered = self.cycle is None or self.cycle.response_complete
                self.transport.close() if is_answered else self._wait_for_body()

            self._arrival_timer = self.loop.call_later(settings.body_timeout, look)

        def _stop_waiting(self) -> None:
            if self._arrival_timer is not None:
                self._arrival_timer.cancel()

        def _watch(self, nbytes: int) -> None:
            """Cut the client off unless it takes some of these bytes in time. Closing would wait for it."""
            self._stop_watching()

            def look() -> None:
                left = self.transport.get_write_buffer_size()
                self._watch(left) if left < nbytes else self.transport.abort()

            self._write_timer = self.loop.call_later(settings.write_timeout, look)

        def _stop_watching(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()

    return Protocol


class _Server(uvicorn.Server):
    """Uvicorn's, with a drain that tells clients, and signals that end it with exit code 0."""

    def __init__(self, config: uvicorn.Config, core: Core, on_start: Callable[[str], None]) -> None:
        super().__init__(config)
        self._core = core
        self._on_start = on_start
        self.failure: str | None = None
        self._num_signals = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not on the main thread
                loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._num_signals += 1
        if self._num_signals == 2:
            self._core.abort_all()
        self.should_exit, self.force_exit = True, self._num_signals > 2

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets:
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._on_start(f"http://{shown}:{port}")
        self._watcher = asyncio.ensure_future(self._watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._core.drain()
        self._watcher.cancel()
        asyncio.get_running_loop().call_later(self._core.settings.drain, self._core.abort_all)
        await super().shutdown(sockets)

    async def _watch(self) -> None:
        """End the server when its engine is dead: only a new process helps."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if (failure := self._core.failure) is not None:
                self.failure, self.should_exit = failure, True
                return


def serve(
    core: Core, *, on_start: Callable[[str], None] = lambda url: None, server: Callable[[Any], None] | None = None
) -> str | None:
    """Serve until told to stop. Returns what went wrong, if the engine died; `server` is given the running server."""
    settings = core.settings
    config = uvicorn.Config(
        make_app(core),
        http=make_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(settings.header_timeout),
        timeout_graceful_shutdown=int(settings.drain + _LAST_WORDS_SECONDS),
    )
    running = _Server(config, core, on_start)
    if server is not None:
        server(running)
    with _listening(settings) as listener:
        running.run(sockets=[listener])
    return running.failure


def _listening(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"port {settings.port} on {settings.host} cannot be used: {error.strerror or error}"
        ) from error
    listener.listen(_BACKLOG)
    return listener
