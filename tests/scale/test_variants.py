"""Other applications on the cluster: replicas of which some are odd, and as many of them as there is work for.

Comes last: what runs afterwards is not what other tests want.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

import ray

from tests.scale.clients import Client, bodies, check, crowd, crowding, expected
from tests.scale.conftest import Farm
from verispec.llm import LLM
from verispec.ray import serving

FLIPPED_BIT = 22  # of a float32: the highest of its fraction


def odd_engine(folder: Path) -> type:
    """Replicas of which the first has another profile, the second a bit in its memory that is wrong."""

    class OddEngine(serving.EngineDeployment):
        def __init__(self, load: dict[str, Any], fingerprint: str | None) -> None:
            role = next((name for name in ("other", "wrong") if _is_first(folder / name)), "sound")
            super().__init__({**load, "kv_dtype": "float32"} if role == "other" else load, fingerprint)
            if role == "wrong":
                final_norm = self._replica.llm.backend._models[0]._arrays[-1]
                final_norm.view(np.uint32)[0] ^= 1 << FLIPPED_BIT

    return OddEngine


def _is_first(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def logged(text: str) -> int:
    """How often a process of the cluster said it."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return sum(path.read_text(errors="replace").count(text) for path in folder.rglob("*") if path.is_file())


def test_one_replica_computes_wrongly_and_one_has_another_profile(
    farm: Farm, oracle: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is noticed, by drawing everything twice; the other one is asked once, and never again."""
    monkeypatch.setattr(serving, "EngineDeployment", odd_engine(tmp_path))
    farm.stop()
    farm.run(replicas=3, resources={"engine": 0.5}, cross_check=1.0)
    farm.wait_for_replicas(3)
    asked = bodies(8)
    wanted = expected(oracle, asked)
    clients = crowd(farm, asked)
    assert [client.error for client in clients] == [None] * len(asked)
    is_right = [client.said == said for client, said in zip(clients, wanted, strict=True)]
    assert set(is_right) == {True, False}, is_right
    deadline = time.monotonic() + 60
    while farm.metric("cross_checks") < len(asked) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert farm.metric("cross_checks") == farm.metric("cross_check_mismatches") == len(asked)
    assert farm.metric("replicas_refused") == 1
    assert logged("one of them computes wrongly") == len(asked)
    assert logged("is not asked any more: its fingerprint is vs-") == 1


def test_replicas_come_and_go_with_the_load(farm: Farm, oracle: LLM) -> None:
    quick = {"metrics_interval_s": 0.5, "look_back_period_s": 2.0, "upscale_delay_s": 1.0, "downscale_delay_s": 2.0}
    farm.stop()
    farm.run(replicas=1, max_replicas=2, target_load=3.0, autoscaling=quick)
    farm.wait_for_replicas(1)
    # Two requests, six samples: by Ray's own count there would be no need for a second replica.
    common = {"n": 3, "temperature": 1.0, "max_tokens": 400, "logprobs": 1}
    asked = [{"prompt": f"Part {i}.", "seed": i, **common} for i in range(2)]
    wanted = expected(oracle, asked)
    rounds: list[list[Client]] = []

    async def load() -> None:
        """Again and again, until there are two: on a quick machine the answers end before the second one runs."""
        second = asyncio.create_task(asyncio.to_thread(farm.wait_for_replicas, 2))
        while not second.done():
            rounds.append(await crowding(farm, asked, None))
        await second

    begun = time.monotonic()
    asyncio.run(load())
    grown = time.monotonic()
    for clients in rounds:
        check(clients, wanted)
    farm.wait_for_replicas(1)
    print(
        f"\na second replica, and {len(rounds)} rounds of answers, in {grown - begun:.1f} s; "
        f"gone {time.monotonic() - grown:.1f} s later"
    )
