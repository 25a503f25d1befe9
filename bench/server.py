"""What HTTP costs: tokens per second and first-token times of streams over loopback, beside LLM.generate.

    python bench/server.py [--model NAME] [--streams 1 8 32] [--tokens 64] [--repeats 3]

Each figure is the median of interleaved repeats in one run. The client is in this process, asyncio and httpx, and costs
more than the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from verispec.llm import LLM
from verispec.server.core import Core
from verispec.server.run import serve
from verispec.server.settings import Settings
from verispec.types import SamplingParams


def prompts(count: int) -> list[str]:
    return [f"Write {i + 2} sentences about the number {i}." for i in range(count)]


def by_library(llm: LLM, count: int, num_tokens: int) -> tuple[float, float]:
    """Tokens per second, and the median time to the first token."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    done = llm.generate(prompts(count), params)
    seconds = time.perf_counter() - start
    return count * num_tokens / seconds, statistics.median(c.stats.time_to_first_token or 0.0 for c in done)


async def by_http(url: str, count: int, num_tokens: int) -> tuple[float, float]:
    firsts: list[float] = []

    async def one(client: httpx.AsyncClient, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        start = time.perf_counter()
        first = None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_raw():
                if first is None and b"id: 0." in part:
                    first = time.perf_counter() - start
        assert first is not None
        firsts.append(first)

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts(count)))
        return count * num_tokens / (time.perf_counter() - start), statistics.median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    started = threading.Event()
    found: dict[str, Any] = {}
    with LLM(asked.model, drafter="none", prefix_cache=False) as llm:
        core = Core(llm, Settings(port=0))
        thread = threading.Thread(
            target=serve,
            args=(core,),
            kwargs={
                "on_start": lambda url: (found.update(url=url), started.set()),
                "server": lambda server: found.update(server=server),
            },
        )
        thread.start()
        started.wait()
        print(
            "| streams | library, tokens/s | HTTP, tokens/s | share | first token, library | HTTP |\n"
            + "|---" * 6
            + "|"
        )
        for count in asked.streams:
            runs: list[tuple[tuple[float, float], tuple[float, float]]] = []
            for _ in range(asked.repeats):
                library = by_library(llm, count, asked.tokens)
                runs.append((library, asyncio.run(by_http(found["url"], count, asked.tokens))))
            shares = statistics.median(http[0] / library[0] for library, http in runs)
            (a, first_a), (b, first_b) = (
                tuple(statistics.median(column) for column in zip(*(run[i] for run in runs), strict=True))
                for i in (0, 1)
            )
            row = (
                count,
                f"{a:.1f}",
                f"{b:.1f}",
                f"{shares:.2f}",
                f"{1000 * first_a:.0f} ms",
                f"{1000 * first_b:.0f} ms",
            )
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
        found["server"].should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
