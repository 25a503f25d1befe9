"""On a cluster: nodes are lost in mid-stream, a replica hangs, all of them are replaced; every answer stays the same.

The oracle is the library in this process: what it generates is what every stream must say, to the bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("ray")

from tests.scale.clients import Client, all_began, bodies, check, crowd, crowding, expected
from tests.scale.conftest import Farm
from verispec.llm import LLM

LONGEST = 8  # times the usual answers: quick machines need longer ones to be caught in mid-stream


def test_nodes_are_lost_in_mid_stream(farm: Farm, oracle: LLM, request: pytest.FixtureRequest) -> None:
    """A round in which everybody was answered before the node was gone shows nothing: the next has longer answers."""
    asked = bodies(8)
    wanted = expected(oracle, asked)
    check(crowd(farm, asked), wanted)
    waits: list[float] = []
    times, num_wanted = 1, max(2, round(10 * request.config.getoption("--times")))
    while len(waits) < num_wanted:
        before, lost_at = farm.metric("failovers"), [0.0]

        async def lose(clients: list[Client], lost_at: list[float] = lost_at) -> None:
            await all_began(clients)
            lost_at[0] = await asyncio.to_thread(farm.replace_node)

        clients = crowd(farm, asked, lose)
        check(clients, wanted)
        farm.add_node()
        if farm.metric("failovers") > before:
            waits.append(max(_wait(client.times, lost_at[0]) for client in clients))
            continue
        times *= 2
        assert times <= LONGEST, "nobody was ever in mid-stream"
        asked = bodies(8, times)
        wanted = expected(oracle, asked)
    print(f"\nfrom a node's loss to the next token of the slowest stream: {sorted(waits)} s")


def _wait(times: list[float], since: float) -> float:
    """From the last token before a moment to the first one after it."""
    after = [t for t in times if t > since]
    return after[0] - since if after else 0.0


def test_a_replica_that_hangs_is_given_up(farm: Farm, oracle: LLM) -> None:
    """Here, too, a round in which it had nothing left to say shows nothing."""
    before, times = farm.metric("failovers"), 1
    while farm.metric("failovers") == before:
        assert times <= LONGEST, "nobody was ever in mid-stream"
        asked = bodies(8, times)
        check(crowd_with_one_stopped(farm, asked), expected(oracle, asked))
        farm.wait_for_replicas(2)
        times *= 2


def crowd_with_one_stopped(farm: Farm, asked: list[dict[str, Any]]) -> list[Client]:
    stopped = farm.pids("ray::ServeReplica:default:engine")[0]

    async def stop(clients: list[Client]) -> None:
        await all_began(clients)
        os.kill(stopped, signal.SIGSTOP)

    try:
        return crowd(farm, asked, stop)
    finally:
        with suppress(ProcessLookupError):  # it hung for so long that it was replaced
            os.kill(stopped, signal.SIGCONT)


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
            rounds.append(await crowding(farm, asked, None))
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
