"""What the engine itself costs: CPU time of the host, the backend answering at once. For docs/benchmarks.md.

    python bench/host.py            # every part, medians of 5
    python bench/host.py --quick    # a few seconds
    python bench/host.py --json     # one object per figure, for machines

`steps` is a step of n sequences that decode without drafts; `cache` such a step of 8 sequences while the prefix cache
is full, so that each needs an eviction; `waiting` such a step in front of a queue; `evict` and `prefix` are the
operations of the prefix cache alone. Figures of one part are measured in turns, so that their ratios can be trusted on
a noisy machine. CPU time is that of the whole process.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from verispec.backends.blas import cpu_name
from verispec.backends.protocol import BackendLimits, DrawResult, Pass, PassResult, ReadyTicket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.kv import RadixPrefixCache, SlotPool
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.types import SamplingParams

VOCAB = 32_000
PERIOD = 17  # the backend's text repeats itself after so many tokens: drafts of n-grams are right
SHAPES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT_LEN = 1 << 20
PROMPT_LEN = 16
NODE_LEN = 10  # slots of a cached prefix


class InstantBackend:
    """Draws a token that follows from its row's position alone, and computes nothing."""

    shapes = SHAPES

    def __init__(self, num_slots: int) -> None:
        self.limits = BackendLimits(VOCAB, CONTEXT_LEN, num_slots, SHAPES[-1], max_tail=64)

    def submit(self, pass_: Pass) -> ReadyTicket:
        draw = pass_.wanted.draw
        if draw is None:
            return ReadyTicket(PassResult())
        token_ids = (pass_.rows.positions[draw.rows] + 1) % PERIOD
        return ReadyTicket(PassResult(DrawResult(token_ids.astype(np.int64), np.full(len(token_ids), -1, np.float32))))

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: `run(n)` does something n times over; `goal` is the most that one of them should cost."""

    part: str
    name: str
    unit: str  # "ms" or "us"
    run: Callable[[int], None]
    goal: float | None = None
    most: int = 1_000_000  # times that `run` may do it at once; it is called about 8 times in all


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
            values[case.name].append(cpu_time(case, num) / num * {"ms": 1e3, "us": 1e6}[case.unit])
    return (Figure(case, values[case.name]) for case in cases)


def cpu_time(case: Case, num: int) -> float:
    start = time.process_time()
    case.run(num)
    return time.process_time() - start


def make_engine(num_slots: int, *, running: int, drafter: str = "none", waiting: int = 0) -> Engine:
    """An engine in which `running` sequences decode and `waiting` ones queue; none of them ends by itself."""
    engine = Engine(
        InstantBackend(num_slots),  # type: ignore[arg-type]
        family=SHAPES,
        drafters={drafter: DRAFTERS[drafter](DraftSetup())},
        config=EngineConfig(
            num_slots=num_slots, row_budget=SHAPES[-1], max_running=running, max_waiting=running + waiting
        ),
    )
    params = SamplingParams(max_tokens=num_slots // running - PROMPT_LEN, seed=0)
    for i in range(running + waiting):
        engine.add(Request([i % VOCAB, *range(PROMPT_LEN - 1)], params))
    while engine.num_running < running or any(not s.output for s in engine._scheduler.running):
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
    pool.release(cache.publish(token_ids, slots, (len(token_ids),)))


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

        def run(num: int, cache: RadixPrefixCache = cache, pool: SlotPool = pool, ids: list[int] = token_ids) -> None:
            for _ in range(num):
                pool.release(cache.match(ids, limit=len(ids)).slots)

        yield Case("prefix", f"{length:,} tokens matched, held, let go", "us", run)


PARTS: dict[str, Callable[[bool], Iterable[Case]]] = {
    "steps": step_cases,
    "cache": cache_cases,
    "waiting": waiting_cases,
    "evict": evict_cases,
    "prefix": prefix_cases,
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
