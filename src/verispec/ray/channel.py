"""Tokens from replicas to an ingress, over a socket of their own: one frame per step for all streams between the two.

A replica connects to the *hub* of the ingress that asked it and keeps the connection. Frames are msgpack behind a
length of four bytes; the first one says who it is, with the hub's secret. Ray hands out the requests; its own streams
cost hundreds of microseconds per item. Both ends notice a peer that is gone, or silent for too long.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from verispec.types import TokenEvent

SILENCE_SECONDS = 5.0  # without a frame: the replica's machine is lost, or it hangs
_BEATS = 4  # frames that a replica sends in this time, even if there is nothing to say
MAX_FRAME_NBYTES = 2**28
_LENGTH = struct.Struct("<I")


class Load(NamedTuple):
    """What a replica has to do."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class Hello(NamedTuple):
    """Who connects."""

    secret: str
    replica: str


class Said(NamedTuple):
    """What one attempt committed. Without events: it has begun."""

    attempt: int
    events: list[TokenEvent]


class Frame(NamedTuple):
    """Everything a replica has to say."""

    load: Load
    said: list[Said]


def _hook(kind: type, value: Any) -> Any:
    return kind(value)  # Counter, of statistics


_encode = msgspec.msgpack.Encoder().encode
_read_hello = msgspec.msgpack.Decoder(Hello).decode
_read_frame = msgspec.msgpack.Decoder(Frame, dec_hook=_hook).decode
_read_aborted = msgspec.msgpack.Decoder(int).decode


class _Framed(asyncio.Protocol, ABC):
    """Frames of a connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start, size = 0, _LENGTH.size
        while len(buffer) - start >= size:
            (nbytes,) = _LENGTH.unpack_from(buffer, start)
            if nbytes > MAX_FRAME_NBYTES:
                self.cut()
                return
            if len(buffer) - start < size + nbytes:
                break
            frame = bytes(memoryview(buffer)[start + size : start + size + nbytes])
            start += size + nbytes
            try:
                self.take(frame)
            except msgspec.MsgspecError:  # no peer of ours
                self.cut()
                return
        del buffer[:start]

    @abstractmethod
    def take(self, frame: bytes) -> None:
        """Raises MsgspecError for what no peer of ours says."""

    def write(self, value: Any) -> None:
        data = _encode(value)
        if self.transport is not None:
            self.transport.write(_LENGTH.pack(len(data)) + data)

    def cut(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class Attempt:
    """One replica's go at a request. `tell` hears what it commits; `lost` is set, with the reason, when it is gone."""

    def __init__(self, number: int, tell: Callable[[list[TokenEvent]], None], lost: Callable[[str], None]) -> None:
        self.number = number
        self.tell = tell
        self.lost = lost
        self.link: _Link | None = None

    @property
    def replica(self) -> str | None:
        """Who has it, as far as is known."""
        return None if self.link is None else self.link.replica


class Address(NamedTuple):
    """Where a hub listens, the secret that it knows its replicas by, and how often it must hear of them."""

    host: str
    port: int
    secret: str
    beat_seconds: float


class Hub:
    """The ingress's end of all connections. Use it on one loop."""

    def __init__(self, *, silence: float = SILENCE_SECONDS) -> None:
        self._secret = secrets.token_hex(16)
        self._silence = silence
        self._attempts: dict[int, Attempt] = {}
        self._num_attempts = 0
        self.links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str) -> Address:
        """Wait for replicas on any free port of this host."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self, self._secret), host, 0)
        self._watching = loop.create_task(self._watch())
        port = self._server.sockets[0].getsockname()[1]
        return Address(host, port, self._secret, self._silence / _BEATS)

    def expect(self, tell: Callable[[list[TokenEvent]], None], lost: Callable[[str], None]) -> Attempt:
        """A new attempt; whoever is given its number can say something about it."""
        self._num_attempts += 1
        attempt = self._attempts[self._num_attempts] = Attempt(self._num_attempts, tell, lost)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Hear no more of it, and tell the replica that has it."""
        if self._attempts.pop(attempt.number, None) is not None and attempt.link is not None:
            attempt.link.write(attempt.number)

    @property
    def loads(self) -> list[Load]:
        """What the replicas said last that they have to do."""
        return [link.load for link in self.links if link.replica is not None]

    async def close(self) -> None:
        """Hear no more."""
        if self._watching is not None:
            self._watching.cancel()
        for link in list(self.links):
            link.cut()
        if self._server is not None:
            self._server.close()

    def _take(self, link: _Link, frame: Frame) -> None:
        for number, events in frame.said:
            attempt = self._attempts.get(number)
            if attempt is None:  # it was given up before the replica began
                link.write(number)
                continue
            attempt.link = link
            if events:
                attempt.tell(events)

    def _lost(self, link: _Link, reason: str) -> None:
        self.links.discard(link)
        for attempt in [a for a in self._attempts.values() if a.link is link]:
            del self._attempts[attempt.number]
            attempt.lost(reason)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._silence / _BEATS)
            for link in [link for link in self.links if loop.time() - link.heard_at > self._silence]:
                link.cut()


class _Link(_Framed):
    """The hub's end of one connection."""

    def __init__(self, hub: Hub, secret: str) -> None:
        super().__init__()
        self._hub = hub
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self.replica: str | None = None
        self.load = Load()
        self.heard_at = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._hub.links.add(self)

    def take(self, frame: bytes) -> None:
        self.heard_at = self._loop.time()
        if self.replica is not None:
            read = _read_frame(frame)
            self.load = read.load
            self._hub._take(self, read)
            return
        hello = _read_hello(frame)
        if hmac.compare_digest(hello.secret, self._secret):
            self.replica = hello.replica
        else:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub._lost(self, f"the connection to replica {self.replica} is lost")


class Uplink(_Framed):
    """A replica's end of the connection to one hub. What is said in one turn of the loop goes out as one frame."""

    def __init__(self, load: Callable[[], Load], on_abort: Callable[[int], None], on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._load = load
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._said: list[Said] = []
        self._loop = asyncio.get_running_loop()
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: Address,
        *,
        replica: str,
        load: Callable[[], Load],
        on_abort: Callable[[int], None],
        on_lost: Callable[[], None],
    ) -> Uplink:
        """Raises OSError if there is no hub any more."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(load, on_abort, on_lost), address.host, address.port)
        link.write(Hello(address.secret, replica))
        link._beating = loop.create_task(link._beat(address.beat_seconds))
        return link

    def say(self, attempt: int, events: list[TokenEvent]) -> None:
        """Tell the ingress what was committed."""
        if not self._said:
            self._loop.call_soon(self._flush)
        self._said.append(Said(attempt, [_plain(event) if event.trace is not None else event for event in events]))

    async def room(self) -> None:
        """Wait while the other end does not read."""
        await self._is_writable.wait()

    def take(self, frame: bytes) -> None:
        self._on_abort(_read_aborted(frame))

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._is_writable.set()
        if self._beating is not None:
            self._beating.cancel()
        self._on_lost()

    def _flush(self) -> None:
        said, self._said = self._said, []
        self.write(Frame(self._load(), said))

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.write(Frame(self._load(), []))


def _plain(event: TokenEvent) -> TokenEvent:
    """Without what has a meaning only where it was drafted."""
    trace = event.trace
    assert trace is not None
    draft = trace.draft
    draft = type(draft)(draft.token_ids, draft.parents, draft.probabilities)
    return event._replace(trace=trace._replace(draft=draft))
