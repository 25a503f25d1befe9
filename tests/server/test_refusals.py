"""Bad requests get 4xx in OpenAI's form, with the field named; no input gives a 5xx or stops the server."""

from __future__ import annotations

import errno
import functools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.served import Served, chat_body, serving
from verispec.llm import LLM
from verispec.server import api
from verispec.server.app import ROUTES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
DEEP = functools.reduce(lambda inner, _: [inner], range(900), "x")  # less than what a parser gives up at
CALL = {"type": "function", "function": {"name": "f", "arguments": json.dumps(DEEP)}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 99, "max_tokens": 3}, "min_tokens"),
    ({"seed": 2**65}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"3": "much"}}, "logit_bias[...]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"no_such_thing": 1}, "no_such_thing"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"verispec": {"speculative": {"method": "magic"}}}, "verispec.speculative.method"),
    ({"verispec": {"speculative": {"accept": "magic"}}}, "verispec.speculative.accept"),
    ({"verispec": {"speculative": {"tree": "magic"}}}, "verispec.speculative.tree"),
    ({"verispec": {"committed_ids": [[10**6]]}}, "verispec.committed_ids"),
    ({"verispec": {"committed_ids": [[1], [2]]}}, "verispec.committed_ids"),
    ({"verispec": {"committed_ids": [[1] * 13]}}, "verispec.committed_ids"),
    ({"verispec": {"receipt": True, "deterministic": False}}, "verispec.deterministic"),
    ({"verispec": {"what": 1}}, "verispec.what"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": DEEP}]}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"a": DEEP}]}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"structured_outputs": {"json": {"a": DEEP}}}, "structured_outputs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_its_name(served: Served, fields: dict[str, Any], param: str | None) -> None:
    answer = served.post(CHAT, chat_body(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param


LONG = "x" * 5000
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": LONG}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": [USER, {"role": "wizard", "content": "x"}]}, "input[1].role"),
    ("/v1/responses", {"instructions": "x", "input": [USER, {"type": "reasoning"}, {
        "type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[2].arguments"),
    ("/v1/responses", {"input": "x", "temperature": 1e-9}, "temperature"),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}, "messages"),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences"),
    ("/generate", {"text": LONG}, "text"),
    ("/generate", {"input_ids": [1] * 5000}, "input_ids"),
    ("/generate", {"input_ids": [1], "image_data": ["data:"]}, "image_data"),
    ("/inference/v1/generate", {"token_ids": [1] * 5000}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1], "verispec": {"committed_ids": [[10**6]]}}, "verispec.committed_ids"),
    *((path, {**body, "stream": True, "verispec": {"trace": True}}, "verispec.trace") for path, body in (
        ("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": [USER], "max_tokens": 1}),
        ("/generate", {"text": "x"}), ("/inference/v1/generate", {"token_ids": [1]}))),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), OTHERS, ids=lambda value: str(value)[:40])
def test_other_interfaces_name_the_field_as_they_have_it(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    is_long = any(given in (LONG, [1] * 5000) for given in body.values())
    assert error.get("code") == ("context_length_exceeded" if is_long else error.get("code"))


def test_a_model_that_is_not_served_is_404_with_those_that_are(served: Served) -> None:
    for answer in (served.post(CHAT, chat_body(model="gpt-9")), served.client.get("/v1/models/gpt-9")):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert served.core.names[0] in error["message"]


BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[]",
    "a number": b"7",
    "NaN": b'{"temperature": NaN}',
    "huge": b'{"temperature": 1e999, "messages": []}',
    "digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "deep": b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested": b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"]}",
    "bytes": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "nul": b"\0" * 100,
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_requests(served: Served, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.client.post(CHAT, content=BODIES[name], headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_long_bodies_are_refused_before_they_are_read(served: Served) -> None:
    answer = served.client.post(CHAT, content=b" " * (10 * 2**20), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert served.client.get("/health").status_code == 200


def test_other_paths_and_methods(served: Served) -> None:
    assert served.client.get("/nowhere").status_code == 404
    assert served.client.get("/nowhere").json()["error"]["message"]
    assert served.client.get(CHAT).status_code == 405
    assert served.client.get("/static/../app.py").status_code == 404


def _raw(served: Served, data: bytes) -> bytes:
    """What comes back; the server may close while it is still being sent to."""
    host, port = served.url.removeprefix("http://").split(":")
    parts = []
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                parts.append(part)
        except OSError as error:
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
    return b"".join(parts)


RAW = {
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabc",
    "length and chunks": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "negative": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 500 + b"\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    "long URL": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", RAW)
def test_requests_that_are_no_http_are_refused(served: Served, name: str) -> None:
    """Smuggling shapes and floods: at most one answer, and it is no success."""
    answer = _raw(served, RAW[name])
    assert answer.startswith(b"HTTP/1.1 4") or answer == b""
    assert answer.count(b"HTTP/1.1") <= 1
    assert served.client.get("/health").status_code == 200


@pytest.fixture(scope="module")
def hasty(chat_llm: LLM) -> Iterator[Served]:
    """A server with little patience."""
    with serving(chat_llm, body_timeout=0.3, header_timeout=0.5) as server:
        yield server


@pytest.mark.parametrize("begun", [b"", b"POST /tokenize HTTP/1.1\r\nHost: local"])
def test_whoever_sends_headers_too_slowly_is_cut_off(hasty: Served, begun: bytes) -> None:
    host, port = hasty.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(begun)
        assert sock.recv(100) == b""


def test_whoever_sends_a_body_too_slowly_gets_408(hasty: Served) -> None:
    host, port = hasty.url.removeprefix("http://").split(":")
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(head)
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("head", "status"), [
    ("POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n", b"408"),
    ("POST /tokenize HTTP/1.1\r\n", b"415"),
    ("POST /nowhere HTTP/1.1\r\nContent-Type: application/json\r\n", b"404"),
])  # fmt: skip
def test_whoever_was_answered_and_goes_on_sending_is_cut_off(hasty: Served, head: str, status: bytes) -> None:
    """A byte now and then would otherwise hold the connection for ever."""
    host, port = hasty.url.removeprefix("http://").split(":")

    def trickle(sock: socket.socket) -> None:
        for _ in range(50):
            sock.sendall(b" ")
            time.sleep(0.1)

    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(f"{head}Host: localhost\r\nContent-Length: 9999\r\n\r\n{{".encode())
        assert sock.recv(1000).split()[1] == status
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(sock)


def test_whoever_was_refused_and_has_sent_everything_may_go_on(chat_llm: LLM) -> None:
    """Control of the above: the connection outlives the time that a body has."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    with serving(chat_llm, body_timeout=0.3) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            for _ in range(2):
                sock.sendall(head + b"{}")
                assert sock.recv(1000).split()[1] == b"404"
                time.sleep(0.8)


def test_openapi_describes_every_route(served: Served) -> None:
    described = served.client.get("/openapi.json").json()
    assert set(described["paths"]) == {route.path.replace(":path", "") for route in ROUTES}
    body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    assert set(described["components"]["schemas"][name]["properties"]) == set(api.ChatRequest.__struct_fields__)
    assert json.dumps(described)
