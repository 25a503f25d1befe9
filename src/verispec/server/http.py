"""Between ASGI and the interfaces: bodies in, within limits; JSON and event streams out; and what a disconnect means.

A handler is a coroutine that takes a `Received` and returns a `Reply`; whatever it raises becomes an error answer. It
is cancelled when the client goes away, also while it streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from verispec.server.api import MAX_DEPTH, is_too_deep
from verispec.server.errors import ApiError

T = TypeVar("T")
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
_encode = msgspec.json.encode
_AT = re.compile(r"(.*?) - at `\$\.?(.*?)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


class ClientGoneError(Exception):
    """The client closed the connection; nobody is there to be answered."""


@dataclass(frozen=True, slots=True)
class Received:
    """A request, its body read and checked by the handler."""

    request: Request
    data: bytes
    tenant: str

    @classmethod
    def of(cls, data: bytes) -> Received:
        """A body that came over no connection."""
        return cls(Request({"type": "http", "headers": []}), data, tenant="")

    def parsed(self, kind: type[T]) -> T:
        """The body as a value of this type. Raises 400, naming the field."""
        return parse(self.data, kind)

    def header(self, name: str) -> str | None:
        """A header's value."""
        return self.request.headers.get(name)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: a whole body, or one that comes in parts."""

    body: bytes | AsyncIterator[bytes]
    status: int = 200
    content_type: bytes = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    on_end: Callable[[], None] = lambda: None  # called in any case, also where no part was ever sent


Handler = Callable[[Received], Awaitable[Reply]]


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A value as JSON."""
    return Reply(_encode(value), status, headers=headers or {})


def parse(data: bytes, kind: type[T]) -> T:
    """JSON as a value of this type. Raises 400, naming the field."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if is_too_deep(getattr(value, name)):
                raise ApiError(400, f"{name} is nested more than {MAX_DEPTH} levels deep", param=name)
        _check_refused(value)
    return value


def _check_refused(value: msgspec.Struct, place: str = "") -> None:
    """Raise 400 for a field that is known and not supported, here or in what the fields hold. Null, false and an empty
    list ask for nothing.
    """
    for name in getattr(value, "refused", ()):
        asked = getattr(value, name)
        if asked is not None and asked is not False and asked != []:
            raise ApiError(400, f"{place}{name} is not supported", param=place + name, code="unsupported_parameter")
    for name in value.__struct_fields__:
        if isinstance(inner := getattr(value, name), msgspec.Struct):
            _check_refused(inner, f"{place}{name}.")


def _field_error(message: str) -> ApiError:
    match = _AT.fullmatch(message)
    said, place = (match[1], match[2]) if match else (message, "")
    if unknown := _UNKNOWN.fullmatch(said):
        name = ".".join(filter(None, (place, unknown[1][:100])))
        return ApiError(400, f"{name} is not a field of this request", param=name, code="unknown_parameter")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", said):
        name = ".".join(filter(None, (place, missing[1])))
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    said = said[:1].lower() + said[1:].replace("`", "")
    return ApiError(400, f"{place or 'the body'}: {said}", param=place or None, code="invalid_type")


def event(data: bytes, *, event_id: str | None = None, name: str | None = None) -> bytes:
    """One frame of an event stream."""
    head = f"event: {name}\n".encode() if name else b""
    if event_id is not None:
        head += f"id: {event_id}\n".encode()
    return head + b"data: " + data + b"\n\n"


class Endpoint:
    """A handler as an ASGI application. `admit` raises where nothing can be done for a request, which is then not read:
    a refusal has to be cheap.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        admit: Callable[[], None],
        max_nbytes: int,
        body_timeout: float,
        ping_seconds: float,
        on_error: Callable[[Exception], ApiError],
    ) -> None:
        self._handler = handler
        self._admit = admit
        self._max_nbytes = max_nbytes
        self._body_timeout = body_timeout
        self._ping_seconds = ping_seconds
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        tenant = scope.get("state", {}).get("tenant", "")
        try:
            self._admit()
            data = await self._body(request)
            reply = await _unless_gone(receive, self._handler(Received(request, data, tenant)))
        except ClientGoneError:
            return
        except Exception as error:
            await send_reply(send, error_reply(self._on_error(error), scope))
            return
        if isinstance(reply.body, bytes):
            await send_reply(send, reply)
            return
        try:
            await _unless_gone(receive, self._stream(send, reply, reply.body))
        except ClientGoneError:
            pass
        finally:
            reply.on_end()

    async def _body(self, request: Request) -> bytes:
        """The body, unless it is too long or too slow."""
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self._max_nbytes:
            raise self._too_long()
        parts: list[bytes] = []
        num_left = self._max_nbytes
        try:
            async with asyncio.timeout(self._body_timeout):
                async for part in request.stream():
                    num_left -= len(part)
                    if num_left < 0:
                        raise self._too_long()
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._body_timeout:g} seconds") from None
        except ClientDisconnect:
            raise ClientGoneError from None
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_nbytes} bytes", headers={"Connection": "close"})

    async def _stream(self, send: Send, reply: Reply, parts: AsyncIterator[bytes]) -> None:
        await _send_head(send, reply)
        num_sent = 0

        async def ping() -> None:
            while True:
                before = num_sent
                await asyncio.sleep(self._ping_seconds)
                if num_sent == before:
                    await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})

        pinging = asyncio.ensure_future(ping())
        try:
            async for part in parts:
                num_sent += 1
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """`work`, cancelled as soon as the client goes away; then raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_reply(error: ApiError, scope: Scope) -> Reply:
    """An error in the form that the path's interface has."""
    anthropic = scope["path"].startswith("/v1/messages")
    return json_reply(error.body(anthropic=anthropic), status=error.status, headers=error.headers)


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole answer."""
    assert isinstance(reply.body, bytes)
    await _send_head(send, reply, length=len(reply.body))
    await send({"type": "http.response.body", "body": reply.body})


async def _send_head(send: Send, reply: Reply, length: int | None = None) -> None:
    headers = [(b"content-type", reply.content_type)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    headers += [(name.lower().encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
