"""What HTTP costs, over loopback: rates and first tokens beside LLM.generate and a peer; limits; memory; overload.

    python bench/server.py                              # all parts but the peer, about 8 minutes
    python bench/server.py --part overhead --peer PATH  # also llama-server, which is at PATH

`overhead`: streams against `LLM.generate` and streams without HTTP, and against the peer on the same model. `first`:
how much later one stream's first token comes by HTTP, in pairs of many short answers. `instant`: 32 streams of an
engine whose backend answers at once, a token a commit and in bursts of 8; also the CPU time of the server per token,
and of whole requests for one token. `overload`: three times as many clients as there are places, against exactly as
many. `memory`: resident memory over 20,000 requests. The client is a process of its own (`load_client.py`). Runs are
interleaved, figures are medians; the CPU time that other processes took meanwhile is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from host import bare_engine
from peer import running_peer
from table import watched_cpu

from verispec.async_llm import AsyncLLM, Stream
from verispec.backends.blas import num_cores
from verispec.llm import LLM
from verispec.server.core import Core
from verispec.server.run import serve
from verispec.server.settings import Settings
from verispec.types import SamplingParams

HERE = Path(__file__).parent
PROMPT = "Write {i} sentences about the number {i}, and then some more."
COMPLETIONS = "/v1/completions"
PLACES = 16  # of the server that is overloaded
NUM_STREAMS = 32
FIRST_TOKENS, FIRST_TURNS = 16, 15  # of an answer whose first token is timed; answers for each of `--repeats`


class Run(NamedTuple):
    """What some streams came to."""

    tokens_per_second: float
    first_token: float  # seconds, median
    num_refused: int = 0
    refusal: float = 0.0  # seconds, 99th percentile
    cpu_per_token: float = 0.0  # seconds, of this process
    client_share: float = 0.0  # of the CPU time there is


def streamed(port: int, count: int, seconds: float = 0, **fields: Any) -> Run:
    """`count` streams from a process of their own."""
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    command = [sys.executable, str(HERE / "load_client.py"), str(port), COMPLETIONS, str(count), str(seconds)]
    cpu = time.process_time()
    done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, check=True)
    cpu = time.process_time() - cpu
    found = json.loads(done.stdout)
    good = [each for each in found["requests"] if each["status"] == 200]
    refused = sorted(each["seconds"] for each in found["requests"] if each["status"] == 429)
    assert len(good) + len(refused) == len(found["requests"])
    num_tokens = sum(each["tokens"] for each in good)
    return Run(
        num_tokens / found["seconds"],
        statistics.median(each["first"] for each in good),
        len(refused),
        refused[int(0.99 * (len(refused) - 1))] if refused else 0.0,
        cpu / num_tokens,
        found["cpu"] / found["seconds"] / num_cores(),
    )


def generated(llm: LLM, count: int, num_tokens: int) -> Run:
    """The same by the library."""
    prompts = [PROMPT.replace("{i}", str(i)) for i in range(count)]
    start = time.perf_counter()
    done = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    seconds = time.perf_counter() - start
    return Run(count * num_tokens / seconds, statistics.median(c.stats.time_to_first_token or 0.0 for c in done))


def streamed_here(llm: LLM, count: int, num_tokens: int) -> Run:
    """The same as streams, without HTTP."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)

    async def first_tokens() -> list[float]:
        model = AsyncLLM(llm)
        streams = [model.stream(PROMPT.replace("{i}", str(i)), params) for i in range(count)]
        return await asyncio.gather(*map(first_token, streams))

    async def first_token(stream: Stream) -> float:
        found = None
        async for _ in stream:
            found = found or time.perf_counter() - start
        assert found is not None
        return found

    start = time.perf_counter()
    firsts = asyncio.run(first_tokens())
    return Run(count * num_tokens / (time.perf_counter() - start), statistics.median(firsts))


@contextmanager
def served(llm: LLM, **settings: Any) -> Iterator[int]:
    """A server on a thread of this process; its port."""
    started, found = threading.Event(), {}

    def on_start(url: str) -> None:
        found["url"] = url
        started.set()

    core = Core(llm, Settings(port=0, **settings))
    target = {"on_start": on_start, "server": lambda server: found.update(server=server)}
    thread = threading.Thread(target=serve, args=(core,), kwargs=target)
    thread.start()
    started.wait()
    try:
        yield int(found["url"].rpartition(":")[2])
    finally:
        found["server"].should_exit = True
        thread.join()


def streamed_by_peer(asked: argparse.Namespace, count: int) -> Run:
    with running_peer(asked.peer, asked.model, num_slots=count, threads=2) as peer:
        return streamed(peer.port, count, max_tokens=asked.tokens, cache_prompt=False)


def median(runs: list[Run]) -> Run:
    return Run(*(statistics.median(column) for column in zip(*runs, strict=True)))


def table(*names: str) -> None:
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")


def row(*values: object) -> None:
    print("| " + " | ".join(map(str, values)) + " |", flush=True)


def overhead(asked: argparse.Namespace) -> None:
    table(
        "streams",
        "by",
        "tokens/s",
        "of LLM.generate's, median (quartiles)",
        "first token",
        "added",
        "the client's share of the CPU time",
    )
    fields = {"max_tokens": asked.tokens, "seed": 1, "verispec": {"speculative": False}}
    with LLM(asked.model, drafter="none", prefix_cache=False) as llm, served(llm) as port:
        for count in asked.streams:
            arms: dict[str, Callable[..., Run]] = {
                "LLM.generate": generated,
                "LLM.generate again": generated,  # what the machine's noise comes to
                "AsyncLLM.stream": streamed_here,
                "HTTP": lambda llm, count, _: streamed(port, count, **fields),
            }
            if asked.peer:
                arms["llama-server"] = lambda llm, count, _: streamed_by_peer(asked, count)
            runs: dict[str, list[Run]] = {name: [] for name in arms}
            for _ in range(asked.repeats):
                for name in random.sample(
                    list(arms), len(arms)
                ):  # a machine may be slower after one than after another
                    runs[name].append(arms[name](llm, count, asked.tokens))
            base = median(runs["AsyncLLM.stream"])
            for name, each in runs.items():
                found = median(each)
                pairs = zip(each, runs["LLM.generate"], strict=True)
                shares = sorted(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
                quarter = len(shares) // 4
                share = f"{statistics.median(shares):.3f} ({shares[quarter]:.2f}-{shares[-1 - quarter]:.2f})"
                added = f"{1000 * (found.first_token - base.first_token):.1f} ms"
                row(count, name, f"{found.tokens_per_second:.1f}", share,
                    f"{1000 * found.first_token:.0f} ms", added, f"{found.client_share:.1%}")  # fmt: skip


def first(asked: argparse.Namespace) -> None:
    table("by", "first token, median (quartiles)", "later than AsyncLLM.stream's, in pairs")
    fields = {"max_tokens": FIRST_TOKENS, "seed": 1, "verispec": {"speculative": False}}
    with LLM(asked.model, drafter="none", prefix_cache=False) as llm, served(llm) as port:
        arms: dict[str, Callable[[], Run]] = {
            "AsyncLLM.stream": lambda: streamed_here(llm, 1, FIRST_TOKENS),
            "AsyncLLM.stream again": lambda: streamed_here(llm, 1, FIRST_TOKENS),  # the machine's noise
            "HTTP": lambda: streamed(port, 1, **fields),
        }
        found: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(1 + FIRST_TURNS * asked.repeats):
            for name in random.sample(list(arms), len(arms)):
                seconds = arms[name]().first_token
                if turn:  # the first one warms up
                    found[name].append(1000 * seconds)
    for name, each in found.items():
        added = [a - b for a, b in zip(each, found["AsyncLLM.stream"], strict=True)]
        row(name, quartiles(each), quartiles(added))


def quartiles(millis: list[float]) -> str:
    low, middle, high = statistics.quantiles(millis)
    return f"{middle:.1f} ({low:.1f} to {high:.1f}) ms"


@contextmanager
def instant_llm(model: str, burst: int) -> Iterator[LLM]:
    """A model's tokenizer with an engine whose backend answers at once, in bursts of so many tokens."""
    with LLM(model, drafter="none") as llm:
        with llm.thread.alone():
            engine = bare_engine(1 << 16, running=NUM_STREAMS, waiting=256, burst=burst)
            policy = engine._policy
            policy.num_rounds = lambda load, host_seconds: min(burst, load.room, load.num_free)  # type: ignore[method-assign]
            llm.thread.engine = engine
        yield llm


def instant(asked: argparse.Namespace) -> None:
    table("commits of", "tokens/s", "server's CPU time per token")
    for name, burst, num_tokens, num_streams in (
        ("1", 1, 500, 32),
        ("8", 8, 1500, 32),
        ("1, a request each", 1, 1, 250),
    ):
        with instant_llm(asked.model, burst) as llm, served(llm, max_pending=2**20, max_waiting=1000) as port:
            fields = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": num_tokens}
            streamed(port, 4, **fields)
            found = median([streamed(port, num_streams, **fields) for _ in range(asked.repeats)])
        row(name, f"{found.tokens_per_second:,.0f}", f"{1e6 * found.cpu_per_token:.1f} us")


def overload(asked: argparse.Namespace) -> None:
    table("clients", "tokens/s", "of capacity", "refused", "refusals, 99 %")
    fields = {"max_tokens": 24, "verispec": {"speculative": False}}
    half = PLACES // 2
    runs: dict[int, list[Run]] = {PLACES: [], 3 * PLACES: []}
    with (
        LLM(asked.model, drafter="none", prefix_cache=False, max_running=half) as llm,
        served(llm, max_running=half, max_waiting=half) as port,
    ):
        for _ in range(asked.repeats):
            for count, each in runs.items():
                each.append(streamed(port, count, 20, **fields))
    capacity = median(runs[PLACES]).tokens_per_second
    for count, each in runs.items():
        found = median(each)
        share = f"{found.tokens_per_second / capacity:.3f}"
        row(count, f"{found.tokens_per_second:.1f}", share, found.num_refused, f"{1000 * found.refusal:.1f} ms")


def memory(asked: argparse.Namespace) -> None:
    table("requests", "resident memory")
    with instant_llm(asked.model, 1) as llm, served(llm, max_waiting=1000) as port:
        done = 0
        for mark in (2_000, 5_000, 10_000, 20_000):
            while done < mark:
                streamed(port, 250, prompt=[5, 6, 7], max_tokens=8, verispec={"receipt": True})
                done += 250
            (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in each]
            row(f"{mark:,}", f"{int(line.split()[1]) / 1024:.1f} MB")


PARTS = {"overhead": overhead, "first": first, "instant": instant, "overload": overload, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", metavar="PATH", help="llama-server's program")
    asked = parser.parse_args()
    with watched_cpu() as others_share:
        for name in asked.part:
            PARTS[name](asked)
        print(f"\n{others_share():.0%} of the CPU time was used by other processes")


if __name__ == "__main__":
    main()
