"""On a cluster: nodes are lost in mid-stream, a replica hangs, all of them are replaced; every answer stays the same.

The oracle is the library in this process: what it generates is what every stream must say, to the bit.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("ray")

from tests.scale.conftest import MODEL, Farm
from verispec.llm import LLM
from verispec.model import DEFAULT_MODEL

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "max_tokens": 90},
    {"temperature": 1.0, "max_tokens": 40, "n": 3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.8, "max_tokens": 90, "stop": ["\n\n", "zzzz"], "repetition_penalty": 1.1},
    {"temperature": 0.0, "max_tokens": 90, "logprobs": 3},
]


def bodies(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Chapter {i}. The story of a", "seed": i, "logprobs": 1, **KINDS[i % 4]} for i in range(num)]


@pytest.fixture(scope="module")
def oracle() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, **MODEL) as llm:
        yield llm


Said = dict[int, tuple[list[int], str, list[float]]]


def expected(llm: LLM, asked: list[dict[str, Any]]) -> list[Said]:
    params = [{k: v for k, v in body.items() if k != "prompt"} for body in asked]
    found = llm.generate([body["prompt"] for body in asked], params)
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


async def _crowd(
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
    return asyncio.run(_crowd(farm, asked, meanwhile))


async def all_began(clients: list[Client]) -> None:
    async with asyncio.timeout(120):
        while not all(client.times or client.error for client in clients):
            await asyncio.sleep(0.01)


def check(clients: list[Client], wanted: list[Said]) -> None:
    assert [client.error for client in clients] == [None] * len(clients)
    for i, (client, said) in enumerate(zip(clients, wanted, strict=True)):
        assert client.said == said, f"stream {i}"


def test_nodes_are_lost_in_mid_stream(farm: Farm, oracle: LLM, request: pytest.FixtureRequest) -> None:
    asked = bodies(8)
    wanted = expected(oracle, asked)
    check(crowd(farm, asked), wanted)
    waits: list[float] = []
    for _ in range(max(2, round(10 * request.config.getoption("--times")))):
        before, lost_at = farm.metric("failovers"), [0.0]

        async def lose(clients: list[Client], lost_at: list[float] = lost_at) -> None:
            await all_began(clients)
            lost_at[0] = await asyncio.to_thread(farm.replace_node)

        clients = crowd(farm, asked, lose)
        check(clients, wanted)
        assert farm.metric("failovers") > before, "nobody was in mid-stream: the round shows nothing"
        waits.append(max(_wait(client.times, lost_at[0]) for client in clients))
        farm.add_node()
    print(f"\nfrom a node's loss to the next token of the slowest stream: {sorted(waits)} s")


def _wait(times: list[float], since: float) -> float:
    """From the last token before a moment to the first one after it."""
    after = [t for t in times if t > since]
    return after[0] - since if after else 0.0


def test_a_replica_that_hangs_is_given_up(farm: Farm, oracle: LLM) -> None:
    asked = bodies(8)
    stopped = _replica_pids()[0]

    async def stop(clients: list[Client]) -> None:
        await all_began(clients)
        os.kill(stopped, signal.SIGSTOP)

    before = farm.metric("failovers")
    try:
        clients = crowd(farm, asked, stop)
    finally:
        os.kill(stopped, signal.SIGCONT)
    check(clients, expected(oracle, asked))
    assert farm.metric("failovers") > before
    farm.wait_for_replicas(2)


def _replica_pids() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ServeReplica:default:engine"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    assert found
    return sorted(found)


def test_work_for_another_fingerprint_is_refused(farm: Farm) -> None:
    from ray import serve

    from verispec.engine import Request
    from verispec.ray.channel import Address
    from verispec.ray.replica import Fate, Work

    engine = serve.get_deployment_handle("engine", "default")
    work = Work(Request((1, 2)), False, (), 1, Address("127.0.0.1", 1, "", 1.0), "vs-of-another-machine")
    assert engine.run.remote(work).result().fate is Fate.OTHER_PROFILE


def hit_rate(farm: Farm) -> float:
    """The share of prompt tokens that were found cached, of conversations that share long beginnings."""
    beginnings = [f"Rules of house number {i}: " + "be kind to cats. " * 20 for i in range(6)]
    before = farm.metric("prefix_cache_hits"), farm.metric("prefix_cache_queries")
    for turn in range(4):
        asked = [{"prompt": f"{text} Turn {turn}.", "max_tokens": 2, "seed": turn} for text in beginnings]
        clients = crowd(farm, asked)
        assert [client.error for client in clients] == [None] * len(asked)
    after = farm.metric("prefix_cache_hits"), farm.metric("prefix_cache_queries")
    return (after[0] - before[0]) / (after[1] - before[1])


def test_rolling_restart_under_load_and_prefix_routing(farm: Farm, oracle: LLM) -> None:
    """All processes are replaced, for another option, while requests come: none fails, none differs."""
    by_prefix = hit_rate(farm)
    asked = bodies(4)
    wanted = expected(oracle, asked)
    rounds: list[list[Client]] = []

    async def load() -> None:
        restart = asyncio.create_task(asyncio.to_thread(farm.run, prefix_routing=False))
        while not restart.done() or len(rounds) < 2:
            rounds.append(await _crowd(farm, asked, None))
        await restart

    asyncio.run(load())
    for clients in rounds:
        check(clients, wanted)
    farm.wait_for_replicas(2)
    at_random = hit_rate(farm)
    print(
        f"\n{len(rounds)} rounds meanwhile; prompt tokens found cached: {by_prefix:.2f} by prefix, {at_random:.2f} else"
    )
    assert by_prefix > at_random
