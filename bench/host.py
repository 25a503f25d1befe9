"""What the engine itself costs: CPU time of the host, the backend answering at once. For docs/benchmarks.md.

    python bench/host.py            # every part, medians of 5
    python bench/host.py --quick    # a few seconds
    python bench/host.py --json     # one object per figure, for machines

`steps` is a step of n sequences, one round each, by drafter; `tokens` a committed token of 1,024 requests, of which 256
run at once, from `LLM.run` to its completions; `streams` one of 32 streams whose events go to an asyncio loop;
`cache` a step of 8 sequences while the prefix cache is full, so that each needs an eviction; `waiting` such a step in
front of a queue; `evict` and `prefix` are the prefix cache's operations alone; `native` is the share of CPU time
outside the kernels, with a real model. Figures of one part are measured in
turns, so that their ratios can be trusted on a noisy machine. CPU time is that of the whole process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import statistics
import time
from asyncio import Event
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from verispec.backends.blas import cpu_name
from verispec.backends.protocol import BackendLimits, BurstResult, DrawResult, Pass, PassResult, ReadyTicket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.thread import EngineThread, on_loop
from verispec.kv import RadixPrefixCache, SlotPool
from verispec.llm import LLM
from verispec.sampling.rows import Sampler
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.text.detokenizer import TextStream
from verispec.types import NoText, SamplingParams, TextSink, TokenEvent

VOCAB = 32_000
REPEATS, NEW = 17, VOCAB - 1  # the backend's text repeats itself after so many tokens: n-grams are right, or not found
RUNNING = 256
SHAPES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # the largest is the row budget: prompts come in beside 256
CONTEXT_LEN = 1 << 20
PROMPT_LEN = 16
NODE_LEN = 10  # slots of a cached prefix


class InstantBackend:
    """Draws a token that follows from its row's position alone, and computes nothing."""

    shapes = SHAPES
    weights_version = 0

    def __init__(self, num_slots: int, period: int = REPEATS) -> None:
        self.limits = BackendLimits(VOCAB, CONTEXT_LEN, num_slots, RUNNING, max_tail=64)
        self._period = period
        self._logprobs = np.full(RUNNING * 32, -1, np.float32)

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        pass

    def submit(self, pass_: Pass) -> ReadyTicket:
        draw, burst = pass_.wanted.draw, pass_.burst
        if draw is None:
            return ReadyTicket(PassResult())
        found = None
        if burst is not None and burst.num_rounds:
            t = pass_.rows.positions[burst.rows][:, None] + 2 + np.arange(burst.num_rounds)
            found = BurstResult(t % self._period, self._logprobs[: t.size].reshape(t.shape))
        token_ids = (pass_.rows.positions[draw.rows] + 1) % self._period
        return ReadyTicket(PassResult(DrawResult(token_ids, self._logprobs[: len(token_ids)]), burst=found))

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: `run(n)` does something n times over; `goal` is the most that one of them should cost.

    Of a share, `run` gives n times its value in per cent.
    """

    part: str
    name: str
    unit: str  # "ms", "us" or "%"
    run: Callable[[int], float | None]  # may say itself what it cost
    goal: float | None = None
    most: int = 1_000_000  # times that `run` may do it at once; it is called about 8 times in all
    size: int = 1  # things that one of them does, which share its cost


@dataclass(frozen=True, slots=True)
class Figure:
    case: Case
    values: list[float]  # one per repeat, in the case's unit

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def measure(cases: list[Case], *, repeats: int, seconds: float) -> Iterator[Figure]:
    """Each case for about `seconds` of CPU time, `repeats` times, all of them in turns."""
    times = {}
    for case in cases:  # also warms up
        num, spent = 1, cpu_time(case, 1)
        while spent < seconds / 4 and num * 2 <= case.most:
            num *= 2
            spent = cpu_time(case, num)
        times[case.name] = min(max(1, round(num * seconds / spent)), case.most)
    values: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            num = times[case.name]
            values[case.name].append(cpu_time(case, num) / num / case.size * {"ms": 1e3, "us": 1e6, "%": 1}[case.unit])
    return (Figure(case, values[case.name]) for case in cases)


def cpu_time(case: Case, num: int) -> float:
    start = time.process_time()
    found = case.run(num)
    return time.process_time() - start if found is None else found


def bare_engine(num_slots: int, *, running: int, waiting: int, burst: int = 1, period: int = REPEATS) -> Engine:
    return Engine(
        InstantBackend(num_slots, period),  # type: ignore[arg-type]
        family=SHAPES,
        drafters=make_drafters(),
        config=EngineConfig(
            num_slots=num_slots, row_budget=SHAPES[-1], max_running=running, max_waiting=running + waiting,
            max_burst=burst,
        ),
    )  # fmt: skip


def make_engine(
    num_slots: int, *, running: int, drafter: str = "none", waiting: int = 0, period: int = REPEATS
) -> Engine:
    """An engine in which `running` sequences decode and `waiting` ones queue; none of them ends by itself."""
    engine = bare_engine(num_slots, running=running, waiting=waiting, period=period)
    params = SamplingParams(max_tokens=num_slots // running - PROMPT_LEN, seed=0)
    for i in range(running + waiting):
        engine.add(Request([i % VOCAB, *range(PROMPT_LEN - 1)], params, Speculation(drafter)))
    while engine.num_running < running or any(not s.logprobs for s in engine._roster.running):
        engine.step()
    return engine


def stepping(engine: Engine) -> Callable[[int], None]:
    """Steps of the engine; the sequences must be able to go on for all of them."""

    def run(num: int) -> None:
        for _ in range(num):
            if not engine.step():
                raise RuntimeError("the sequences have ended: the figures are of steps that do nothing")

    return run


def text(i: int) -> list[int]:
    """NODE_LEN tokens, the first shared with a few other texts, so that the tree has inner nodes."""
    return [i // 8 % VOCAB, i // VOCAB, i % VOCAB, *range(NODE_LEN - 3)]


def publish(cache: RadixPrefixCache, pool: SlotPool, token_ids: list[int]) -> None:
    """Put a text into the cache that nobody goes on holding."""
    lease = pool.lease()
    pool.extend(lease, len(token_ids))
    slots = pool.commit(lease, range(len(token_ids)))
    cache.let_go(cache.publish(token_ids, slots, (len(token_ids),)).node)


def fill(cache: RadixPrefixCache, pool: SlotPool) -> None:
    """Publish texts until there is no slot left for another; the rest is held to the end."""
    for i in count():
        if pool.num_free < NODE_LEN:
            break
        publish(cache, pool, text(i))
    rest = pool.lease()
    pool.extend(rest, pool.num_free)
    pool.commit(rest, range(len(rest.slots)))


def step_cases(quick: bool) -> Iterable[Case]:
    """A plain step of 1 to 256 sequences."""
    for running, goal in ((1, 0.08), (8, 0.12), (64, 0.4), (256, 1.3)):
        engine = make_engine(1_000_000, running=running)
        yield Case("steps", f"none, {running} running", "ms", stepping(engine), goal)
    for drafter, running, goal in (("suffix", 1, 0.12), ("suffix", 32, 0.4), ("auto", 1, 0.12), ("auto", 32, 0.5)):
        for what, period in (("nothing to quote", NEW), ("quotes", REPEATS)):
            engine = make_engine(1_000_000, running=running, drafter=drafter, period=period)
            own_goal = goal if period == NEW else None  # quoting, a step commits 17 tokens of each
            yield Case("steps", f"{drafter}, {running} running, {what}", "ms", stepping(engine), own_goal, most=300)


class Words:
    """A tokenizer of short words."""

    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return f" w{token_id}".encode()


def token_cases(quick: bool) -> Iterable[Case]:
    """A committed token of many requests, admission and results included."""
    num_requests, num_tokens = 1024, 32 if quick else 64

    def words() -> TextSink:
        return TextStream(Words(), ("never this", "nor w99999 w99999"))

    for name, burst, text, goal in (
        ("plain", 1, NoText, 8), ("bursts of 8", 8, NoText, 3), ("plain, text and stop strings", 1, words, 25),
        ("bursts of 8, text and stop strings", 8, words, 25),
    ):  # fmt: skip
        run = generating(num_requests, num_tokens, burst=burst, text=text)
        name = f"{RUNNING} of {num_requests:,} requests, {name}"
        yield Case("tokens", name, "us", run, goal, most=1, size=num_requests * num_tokens)


class InstantLLM(LLM):
    """An LLM without a model."""

    def __init__(self, engine: Engine) -> None:
        self.thread = EngineThread(engine)
        self.calibration = SimpleNamespace(profile=SimpleNamespace(hash="instant"))  # type: ignore[assignment]

    def close(self) -> None:
        self.thread.stop()


def instant_requests(num_requests: int, num_tokens: int, **fields: Any) -> list[Request]:
    params = SamplingParams(max_tokens=num_tokens, seed=0)
    return [
        Request([i % VOCAB, *range(PROMPT_LEN - 1)], params, Speculation("none"), **fields) for i in range(num_requests)
    ]


def generating(
    num_requests: int, num_tokens: int, *, burst: int, text: Callable[[], TextSink]
) -> Callable[[int], None]:
    requests = instant_requests(num_requests, num_tokens, is_streamed=False, text=text)

    def run(num: int) -> None:
        for _ in range(num):
            with InstantLLM(bare_engine(200_000, running=RUNNING, waiting=num_requests, burst=burst)) as llm:
                completions = llm.run(requests)
            if sum(len(completion.token_ids) for completion in completions) != num_requests * num_tokens:
                raise RuntimeError("not every request got its tokens")

    return run


def stream_cases(quick: bool) -> Iterable[Case]:
    """A committed token of 32 streams, told to an asyncio loop."""
    num_tokens = 256 if quick else 2048
    yield Case("streams", "32 streams", "us", streaming(32, num_tokens), most=1, size=32 * num_tokens)


def streaming(num_streams: int, num_tokens: int) -> Callable[[int], None]:
    requests = instant_requests(num_streams, num_tokens)

    async def stream() -> None:
        thread = EngineThread(bare_engine(200_000, running=num_streams, waiting=0))
        left, ended = 0, Event()

        def deliver(events: list[TokenEvent]) -> None:
            nonlocal left
            for event in events:
                if event.output is not None:
                    left -= 1
            if not left:
                ended.set()

        sink = on_loop(asyncio.get_running_loop(), deliver)
        for request in requests:
            left += 1
            thread.submit(request, sink)
        await ended.wait()
        thread.stop()

    def run(num: int) -> None:
        for _ in range(num):
            asyncio.run(stream())

    return run


def cache_cases(quick: bool) -> Iterable[Case]:
    """A step of 8 sequences that evict a slot each, by the size of the cache."""
    for num_nodes in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        num_slots = num_nodes * NODE_LEN
        engine = make_engine(num_slots, running=8)
        assert isinstance(engine._cache, RadixPrefixCache)
        fill(engine._cache, engine._pool)
        name = f"8 running, full cache of {num_nodes:,} nodes"
        yield Case("cache", name, "ms", stepping(engine), 0.12, most=num_slots // 80)


def waiting_cases(quick: bool) -> Iterable[Case]:
    """A step of 8 sequences while others wait for their turn."""
    for waiting in (0, 1_000) if quick else (0, 1_000, 10_000):
        engine = make_engine(1_000_000, running=8, waiting=waiting)
        yield Case("waiting", f"8 running, {waiting:,} waiting", "ms", stepping(engine), 0.12, most=1_000)


def evict_cases(quick: bool) -> Iterable[Case]:
    """A text of NODE_LEN tokens published in the place of an older one, by the size of the cache."""
    for num_nodes in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        pool = SlotPool(num_nodes * NODE_LEN)
        cache = RadixPrefixCache(pool)
        fill(cache, pool)
        name = f"{NODE_LEN} of {num_nodes * NODE_LEN:,} slots evicted, published, {num_nodes:,} nodes"
        yield Case("evict", name, "us", evicting(cache, pool))


def evicting(cache: RadixPrefixCache, pool: SlotPool) -> Callable[[int], None]:
    numbers = count(pool.num_slots)

    def run(num: int) -> None:
        for _ in range(num):
            cache.evict(NODE_LEN)
            publish(cache, pool, text(next(numbers)))

    return run


def prefix_cases(quick: bool) -> Iterable[Case]:
    """A cached prefix of 1,000 and 10,000 tokens found, held and let go."""
    for length in (1_000, 10_000):
        pool = SlotPool(length)
        cache = RadixPrefixCache(pool)
        token_ids = list(range(length))
        publish(cache, pool, token_ids)

        def run(num: int, cache: RadixPrefixCache = cache, ids: list[int] = token_ids) -> None:
            for _ in range(num):
                cache.let_go(cache.match(ids, limit=len(ids)).node)

        yield Case("prefix", f"{length:,} tokens matched, held, let go", "us", run)


def native_cases(quick: bool) -> Iterable[Case]:
    """Of one sequence's decoding on the native backend with a real model, the CPU time outside the kernels."""
    llm = LLM("smollm2-135m", backend="native", drafter="none", threads=1)
    kernels = llm.backend._kernels  # type: ignore[attr-defined]
    prepared, inside = kernels.prepared, [0.0]

    def timed(*arguments: Any) -> Callable[[], int | None]:
        call = prepared(*arguments)

        def run() -> int | None:
            start = time.process_time()
            try:
                return call()
            finally:
                inside[0] += time.process_time() - start

        return run

    kernels.prepared = timed
    params = SamplingParams(max_tokens=64 if quick else 256, ignore_eos=True)

    def share(streamed: bool) -> Callable[[int], float]:
        def run(num: int) -> float:
            inside[0], start = 0.0, time.process_time()
            for _ in range(num):
                if streamed:
                    for _event in llm.stream("Once upon a time", params):
                        pass
                else:
                    llm.generate("Once upon a time", params)
            if not inside[0]:
                raise RuntimeError("no call of a kernel was timed")
            return 100 * (1 - inside[0] / (time.process_time() - start)) * num

        return run

    yield Case("native", "outside the kernels, one sequence", "%", share(streamed=False), 3, most=1)
    yield Case("native", "outside the kernels, one stream", "%", share(streamed=True), None, most=1)


PARTS: dict[str, Callable[[bool], Iterable[Case]]] = {
    "steps": step_cases,
    "tokens": token_cases,
    "streams": stream_cases,
    "cache": cache_cases,
    "waiting": waiting_cases,
    "evict": evict_cases,
    "prefix": prefix_cases,
    "native": native_cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, less time for each figure")
    parser.add_argument("--json", action="store_true", help="one JSON object per figure")
    options = parser.parse_args()
    if not options.json:
        print(f"{cpu_name()}; Python {platform.python_version()}; CPU time, medians of {options.repeats} (min-max)\n")
        print("| part | what | median (min-max) | goal |")
        print("|---|---|---|---|")
    for part in options.parts:
        cases = list(PARTS[part](options.quick))
        for figure in measure(cases, repeats=options.repeats, seconds=0.02 if options.quick else 0.2):
            show(figure, as_json=options.json)
        del cases
        gc.collect()


def show(figure: Figure, *, as_json: bool) -> None:
    case, low, high = figure.case, min(figure.values), max(figure.values)
    if as_json:
        fields = {"part": case.part, "name": case.name, "unit": case.unit, "goal": case.goal}
        print(json.dumps({**fields, "median": figure.median, "min": low, "max": high}), flush=True)
        return
    goal = "" if case.goal is None else f"{case.goal:g} {case.unit}"
    print(
        f"| {case.part} | {case.name} | {figure.median:.3g} {case.unit} ({low:.3g}-{high:.3g}) | {goal} |", flush=True
    )


if __name__ == "__main__":
    main()
