"""A server on a tiny model, in a thread of this process, and a client for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from verispec.llm import LLM
from verispec.server.core import Core
from verispec.server.run import serve
from verispec.server.settings import Settings


@dataclass
class Served:
    """A server and how to talk to it."""

    url: str
    core: Core
    client: httpx.Client
    server: uvicorn.Server

    @property
    def num_connections(self) -> int:
        """Those that the server has not closed."""
        return len(self.server.server_state.connections)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def chat(self, content: str = "hello", **fields: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        answer = self.post("/v1/chat/completions", chat_body(content, **fields))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, body: Any, **more: Any) -> list[Frame]:
        """All frames of a stream that must succeed."""
        with self.client.stream("POST", path, json=body, **more) as answer:
            answer.read() if answer.status_code != 200 else None
            assert answer.status_code == 200, answer.text
            return list(frames(answer.iter_lines()))


@dataclass(frozen=True)
class Frame:
    """One event of a stream; `data` is None for the last one."""

    data: Any
    event_id: str | None = None
    name: str | None = None


def frames(lines: Iterator[str]) -> Iterator[Frame]:
    found: dict[str, str] = {}
    for line in lines:
        if line:
            key, _, value = line.partition(": ")
            found[key] = value
        elif found:
            data = found.get("data", "")
            if data:
                yield Frame(None if data == "[DONE]" else json.loads(data), found.get("id"), found.get("event"))
            found = {}


def chat_body(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "seed": 7, **fields}


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[Served]:
    """A server on a free port; it is told to stop at the end, and must."""
    core = Core(llm, Settings(**{"port": 0, "drain": 2.0, **settings}))
    started = threading.Event()
    found: dict[str, Any] = {}

    def on_start(url: str) -> None:
        found["url"] = url
        started.set()

    thread = threading.Thread(
        target=lambda: serve(core, on_start=on_start, server=lambda server: found.update(server=server)), daemon=True
    )
    thread.start()
    assert started.wait(20)
    keys = settings.get("api_keys")
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    with httpx.Client(base_url=found["url"], timeout=60, headers=headers) as client:
        try:
            yield Served(found["url"], core, client, found["server"])
        finally:
            found["server"].should_exit = True
            thread.join(20)
            assert not thread.is_alive()
