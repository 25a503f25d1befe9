"""Generated hostile requests, on every route and below HTTP: each is refused or answered, none fails the server.

`make judges` runs 5,000 of them (`--times 12.5`).
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.test_load import is_idle, wait_for
from tests.support.scale import scaled
from tests.support.served import Served, chat_body, serving
from verispec.llm import LLM
from verispec.server.app import ROUTES

USER = {"role": "user", "content": "hello"}
RECEIPT = {"format": 3, "verispec": "0", "model": {}, "profile": {}, "prompt": {}, "parameters": {}, "output": {}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(max_tokens=2),
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [USER]},
    "/verispec/replay": {"receipt": RECEIPT},
    "/verispec/check": {"receipt": RECEIPT},
}
LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens")
JSON = {"Content-Type": "application/json"}
LONG = "word and " * 40_000
TOOL = {"type": "function", "function": {"name": "look", "description": LONG, "parameters": {}}}
SECONDS = 30  # that an answer may take on a busy machine


def values(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and some that it cannot."""
    kind = rng.randrange(10 if depth < 3 else 7)
    numbers = [0.5, 1e300, -1e-300, 2**63, -(2**70), 10**400, float("nan"), float("-inf")]
    plain = [None, True, rng.randrange(-3, 300), rng.choice(numbers), "", "x" * 50]
    if kind < 7:
        words = ["user", "text", "auto", "é\0\U0001f600", "1", "{{ 7*7 }}", "../.."]
        return plain[kind] if kind < 6 else rng.choice(words)
    if kind < 9:
        return [values(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["type", "content", "role", "a"]): values(rng, depth + 1) for _ in range(rng.randrange(4))}


def wrong_fields(rng: random.Random) -> tuple[str, bytes]:
    """A valid body with one to three fields replaced by anything. No answer gets long, or the server has to work."""
    path = rng.choice(list(VALID))
    body = dict(VALID[path])
    (kind,) = (route.body for route in ROUTES if route.path == path)
    assert kind is not None
    for name in rng.sample(kind.__struct_fields__, rng.randrange(1, 3)):
        body[name] = values(rng)
    for name in LIMITS:
        if isinstance(body.get(name), int):
            body[name] = min(4, body[name])
    if path == "/v1/chat/completions" and body.get("max_tokens") is None:
        body["max_completion_tokens"] = 2
    return path, json.dumps(body).encode()


def broken_bytes(rng: random.Random) -> tuple[str, bytes]:
    """A valid body, damaged as bytes."""
    path = rng.choice(list(VALID))
    data = json.dumps(VALID[path]).encode()
    place = rng.randrange(len(data))
    damage = [
        data[:place], data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :], data + data,
        data[:place] + b"\xff\xc0\xed\xa0\x80" + data[place:], b"[" * rng.randrange(2, 50_000), b"\0" * place,
        b'{"a":' * rng.randrange(2, 20_000), data.replace(b'"', b"'"), b"\xef\xbb\xbf" + data,
        json.dumps(VALID[path]).encode("utf-16"), data.replace(b"{", b'{"\\ud800": 1, ', 1),
    ]  # fmt: skip
    return path, rng.choice(damage)


def raw_requests(rng: random.Random) -> bytes:
    """Bytes that two parsers may understand differently, or that no parser should."""
    method = rng.choice([b"POST", b"GET", b"PUT", b"DELETE", b"TRACE", b"CONNECT", b"OPTIONS", b"PRI", b"p\0st"])
    path = rng.choice(
        [b"/tokenize", b"/health", b"*", b"//", b"/%00", b"/../../etc/passwd", b"http://evil/", b"/" + b"a" * 40_000]
    )
    version = rng.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b""])
    body = b'{"prompt": "ab"}'
    lengths = [
        b"Content-Length: %d" % len(body), b"Content-Length: -1", b"Content-Length: 99999999999999999999",
        b"Content-Length: +%d" % len(body), b"Content-Length : 5", b"Content-Length: 0x10", b"Content-Length:",
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: xchunked", b"Transfer-Encoding:\tchunked, identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    ]  # fmt: skip
    odd = [
        b"Host: localhost", b"Host:", b"Host: localhost\r\nHost: evil", b"Expect: 100-continue", b"Upgrade: h2c",
        b"Upgrade: websocket\r\nConnection: Upgrade", b"A: b\r\n c: d", b"X: " + bytes(range(1, 32)), b": nothing",
        b"A" * 9_000 + b": b", b"\r\n".join([b"A: b"] * 300), b"Range: bytes=0-,-1", b"Content-Encoding: gzip",
    ]  # fmt: skip
    usual = [b"Host: localhost", b"Content-Type: application/json"]
    headers = usual + rng.sample(lengths, rng.randrange(3)) + rng.sample(odd, rng.randrange(3))
    rng.shuffle(headers)
    chunked = rng.choice([b"", b"0\r\n\r\n", b"ffffffffffffffff\r\nab", b"5;x=y\r\nabcde\r\n0\r\n\r\n", b"-1\r\n\r\n"])
    end = rng.choice([b"\r\n", b"\n", b"\r\n"])
    head = method + b" " + path + b" " + version + end + end.join(headers)
    return head + rng.choice([end + end, end, b""]) + rng.choice([body, chunked, b"GET /health HTTP/1.1\r\n\r\n"])


def answers_to(served: Served, data: bytes) -> list[bytes]:
    """The status lines that come back before the server closes, or before it waits for more."""
    host, port = served.url.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                found += part
        except ConnectionError:  # it was cut off, which is an answer
            pass
    return [line for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.")]


def test_no_generated_request_fails_the_server(served: Served) -> None:
    rng = random.Random(16)
    seen: dict[int, int] = {}
    num_raw = 0
    for i in range(scaled(400)):
        if i % 4 == 3:
            data = raw_requests(rng)
            for line in answers_to(served, data):
                num_raw += 1
                assert not line.split()[1].startswith(b"5") or line.split()[1] == b"505", (data[:300], line)
            continue
        path, body = (wrong_fields, broken_bytes)[i % 4 == 2](rng)
        answer = served.client.post(path, content=body, headers=JSON, timeout=SECONDS)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (path, body[:500], answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
    assert {200, 400} <= set(seen)  # control: both kinds were generated
    assert num_raw > scaled(50)
    assert served.client.get("/health").json() == {"status": "ok"}
    wait_for(lambda: is_idle(served))
    served.core.llm.engine.check()


def test_large_bodies_cost_nothing(served: Served) -> None:
    """Declared and undeclared, ten megabytes are refused before they are kept."""

    def parts() -> Iterator[bytes]:
        for _ in range(160):
            yield b" " * 65536

    for content in (b" " * (10 * 2**20), parts()):
        with contextlib.suppress(httpx.WriteError):  # the server had closed before all was sent
            assert served.client.post("/tokenize", content=content, headers=JSON).status_code == 413


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
])  # fmt: skip
def test_a_long_text_holds_nobody_up(served: Served, path: str, body: dict[str, Any]) -> None:
    """Neither the event loop nor the interpreter is held while it is made into tokens. Others on a busy machine may
    hold up one try; a server that does so itself does it every time."""
    shares = (_longest_share(served, path, body) for _ in range(5))
    assert any(share < 0.5 for share in shares)


def _longest_share(served: Served, path: str, body: dict[str, Any]) -> float:
    """The longest that /health took meanwhile, as a share of the whole."""
    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        asked = pool.submit(served.client.post, path, json=body, timeout=SECONDS)
        longest = 0.0
        while not asked.done():
            before = time.monotonic()
            served.client.get("/health")
            longest = max(longest, time.monotonic() - before)
        assert asked.result().status_code in (200, 400)
        return longest / (time.monotonic() - start)


@pytest.fixture(scope="module")
def hasty(chat_llm: LLM) -> Iterator[Served]:
    with serving(chat_llm, body_timeout=0.5, header_timeout=0.5) as server:
        yield server


def test_a_crowd_of_slow_clients_holds_nobody_up(hasty: Served) -> None:
    """Headers and bodies that come a byte at a time; meanwhile others are answered, and then the slow ones are gone."""
    host, port = hasty.url.removeprefix("http://").split(":")
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = [b"POST /tokenize", head + b"A: ", head + b"Content-Length: 1000\r\n\r\n{"]
    slow = [socket.create_connection((host, int(port)), timeout=SECONDS) for _ in range(90)]
    try:
        for i, sock in enumerate(slow):
            sock.sendall(begun[i % 3])
        assert hasty.chat()["choices"]
        for _ in range(3):
            time.sleep(0.1)
            for sock in slow:
                with contextlib.suppress(ConnectionError):  # cut off by now
                    sock.sendall(b"x")
        assert hasty.chat()["choices"]
        for i, sock in enumerate(slow):
            found = b""
            with contextlib.suppress(ConnectionError):
                found = sock.recv(1000)
            assert found == b"" or (i % 3 == 2 and found.startswith(b"HTTP/1.1 408")), (i, found)
    finally:
        for sock in slow:
            sock.close()
    assert hasty.client.get("/health").status_code == 200
