"""Clients of the application, what they ask, and what the library in this process says to that."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np

from tests.scale.conftest import Farm
from verispec.llm import LLM

NAMED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}
PEOPLE = {"type": "array", "items": {**NAMED, "required": ["name", "age"]}, "minItems": 100}  # longer than any answer
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "max_tokens": 90},
    {"temperature": 1.0, "max_tokens": 40, "n": 3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.8, "max_tokens": 90, "stop": ["\n\n", "zzzz"], "repetition_penalty": 1.1},
    {"temperature": 0.0, "max_tokens": 90, "logprobs": 3},
    {"temperature": 1.0, "max_tokens": 90, "n": 2, "structured_outputs": {"json": PEOPLE}},
    {"temperature": 0.0, "max_tokens": 90, "structured_outputs": {"regex": "([A-Z][a-z]{3,8} (and|or) )+the end"}},
]


def bodies(num: int, times: int = 1) -> list[dict[str, Any]]:
    """Answers of up to `times` as many tokens as usual."""
    found = [
        {"prompt": f"Chapter {i}. The story of a", "seed": i, "logprobs": 1, **KINDS[i % len(KINDS)]}
        for i in range(num)
    ]
    return [{**body, "max_tokens": times * body["max_tokens"]} for body in found]


Said = dict[int, tuple[list[int], str, list[float]]]


def library_params(body: dict[str, Any]) -> dict[str, Any]:
    """What a body asks for, as the library names it."""
    params = {name: value for name, value in body.items() if name not in ("prompt", "structured_outputs")}
    shape = body.get("structured_outputs", {})
    return params | {{"json": "schema"}.get(kind, kind): value for kind, value in shape.items()}


def expected(llm: LLM, asked: list[dict[str, Any]]) -> list[Said]:
    found = llm.generate([body["prompt"] for body in asked], [library_params(body) for body in asked])
    return [
        {s.sample_index: (list(s.token_ids), s.text, [float(v) for v in s.logprobs.values]) for s in each.samples}
        for each in found
    ]


class Client:
    """One stream; what it heard, and when."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.values: dict[int, list[float]] = {}
        self.times: list[float] = []
        self.error: str | None = None

    @property
    def said(self) -> Said:
        return {i: (self.ids[i], self.texts[i], self.values[i]) for i in sorted(self.ids)}

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            asked = {**body, "stream": True, "return_token_ids": True}
            async with client.stream("POST", "/v1/completions", json=asked) as answer:
                if answer.status_code != 200:
                    self.error = (await answer.aread()).decode()
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _take(self, frame: dict[str, Any]) -> None:
        if "error" in frame:
            self.error = str(frame["error"])
            return
        for choice in frame["choices"]:
            at = choice["index"]
            self.ids.setdefault(at, []).extend(choice.get("token_ids") or [])
            self.texts[at] = self.texts.get(at, "") + choice["text"]
            values = (choice["logprobs"] or {}).get("token_logprobs") or []
            self.values.setdefault(at, []).extend(float(np.float32(value)) for value in values)
            if choice.get("token_ids"):
                self.times.append(time.monotonic())


async def crowding(
    farm: Farm, asked: list[dict[str, Any]], meanwhile: Callable[[list[Client]], Awaitable[None]] | None
) -> list[Client]:
    clients = [Client() for _ in asked]
    async with httpx.AsyncClient(base_url=farm.url, timeout=300, limits=httpx.Limits(max_connections=64)) as http:
        streams = asyncio.gather(*(c.ask(http, body) for c, body in zip(clients, asked, strict=True)))
        if meanwhile is not None:
            await meanwhile(clients)
        await streams
    return clients


def crowd(
    farm: Farm, asked: list[dict[str, Any]], meanwhile: Callable[[list[Client]], Awaitable[None]] | None = None
) -> list[Client]:
    return asyncio.run(crowding(farm, asked, meanwhile))


async def all_began(clients: list[Client]) -> None:
    async with asyncio.timeout(120):
        while not all(client.times or client.error for client in clients):
            await asyncio.sleep(0.01)


def check(clients: list[Client], wanted: list[Said]) -> None:
    assert [client.error for client in clients] == [None] * len(clients)
    for i, (client, said) in enumerate(zip(clients, wanted, strict=True)):
        assert client.said == said, f"stream {i}"
