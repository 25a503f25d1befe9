"""Clients that read slowly or never: their requests end, their places and connections become free, others go on."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.test_load import CHAT, ENDLESS, is_idle, wait_for
from tests.support.held import held
from tests.support.served import Served, chat_body, serving
from verispec.llm import LLM
from verispec.server import run
from verispec.server.settings import Settings

NEVER = 1e5  # seconds
LONG: dict[str, Any] = {**ENDLESS, "n": 4, "top_logprobs": 4}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own take megabytes."""

    def listening(settings: Settings) -> socket.socket:
        listener = listen(settings)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        return listener

    listen = run._listening
    monkeypatch.setattr(run, "_listening", listening)


@contextmanager
def unread(served: Served, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request that was sent, of whose answer nothing has been read."""
    host, port = served.url.removeprefix("http://").split(":")
    data = httpx.Request("POST", served.url, json=body).content
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.settimeout(20)
        sock.connect((host, int(port)))
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield sock


def received(sock: socket.socket) -> bytes:
    """All that comes, to the end of the stream or of the connection."""
    data = b""
    try:
        while b"[DONE]" not in data and (part := sock.recv(1 << 16)):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_slow_reader_is_ended_and_others_go_on(chat_llm: LLM) -> None:
    with (
        serving(chat_llm, max_pending=64) as served,
        ThreadPoolExecutor(1) as pool,
        held(chat_llm) as is_free,
        unread(served, chat_body(stream=True, **LONG)) as sock,
    ):
        wait_for(lambda: served.core.num_samples == 4)
        asked = pool.submit(served.chat)
        wait_for(lambda: served.core.num_samples == 5)
        is_free.set()
        assert asked.result(20)["choices"][0]["finish_reason"]
        wait_for(lambda: served.core.llm.status().num_running == 0, 60)
        assert b"slow_reader" in received(sock)
        wait_for(lambda: is_idle(served))


@pytest.mark.parametrize("limits", [{"max_pending": 64}, {"timeout": 2.0, "max_pending": 10**6}])
def test_whoever_never_reads_makes_room_for_others(chat_llm: LLM, limits: dict[str, Any]) -> None:
    """Too much is unread, or it takes too long: the place is free although the first client never reads."""
    settings = {"max_running": 4, "max_waiting": 0, "write_timeout": NEVER, "drain": 0.1, **limits}
    with (
        serving(chat_llm, **settings) as served,
        held(chat_llm) as is_free,
        unread(served, chat_body(stream=True, **LONG)),
    ):
        wait_for(lambda: served.core.num_samples == 4)
        assert served.post(CHAT, chat_body()).status_code == 429  # control
        is_free.set()
        wait_for(lambda: served.core.num_samples == 0, 60)
        assert served.post(CHAT, chat_body()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_never_reads_is_cut_off(chat_llm: LLM, stream: bool) -> None:
    """Nothing else would end it: neither its time nor what is unread. Whole answers too fill buffers."""
    settings = {"write_timeout": 0.5, "timeout": NEVER, "max_pending": 10**6}
    with serving(chat_llm, **settings) as served, unread(served, chat_body(stream=stream, **LONG)) as sock:
        wait_for(lambda: served.core.num_samples == 4)
        wait_for(lambda: is_idle(served), 60)
        wait_for(lambda: served.num_connections == 0)
        head, _, data = received(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        if stream:
            assert b"[DONE]" not in data
        else:
            (length,) = re.findall(rb"content-length: (\d+)", head)
            assert len(data) < int(length)


def test_whoever_reads_slowly_but_steadily_is_not_cut_off(chat_llm: LLM) -> None:
    body, limit = chat_body(**LONG), 5.0
    with serving(chat_llm, write_timeout=limit) as served:
        expected = len(served.post(CHAT, body).content)
        with unread(served, body) as sock:
            wait_for(lambda: served.core.num_samples == 4)
            wait_for(lambda: is_idle(served), 60)
            data = b""
            end = time.monotonic() + 1.2 * limit
            while len(data) < expected:
                part = sock.recv(1 << 14)
                assert part, (len(data), expected)
                data += part
                time.sleep(0.2 if time.monotonic() < end else 0)
            assert time.monotonic() > end  # control: longer than the limit


def test_streams_without_a_frame_get_pings(chat_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = chat_llm.engine.step

    def slow() -> Any:
        time.sleep(0.5)
        return step()

    body = chat_body(stream=True, max_tokens=2, ignore_eos=True)
    with serving(chat_llm, ping=0.1) as served, serving(chat_llm) as usual:
        monkeypatch.setattr(chat_llm.engine, "step", slow)
        pinged, plain = (each.post(CHAT, body).text for each in (served, usual))
    assert pinged.count(": ping\n\n") >= 3
    assert ": ping" not in plain  # control: fifteen seconds have not passed
    assert pinged.endswith("data: [DONE]\n\n")
