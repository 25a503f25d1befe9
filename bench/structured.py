"""What answers in a shape cost, and what drafts of the grammar give back. One thread, arms in turns.

    python bench/structured.py MODEL.gguf [--llama-server FILE] [--batch 1 8 32] [--tokens 96] [--pairs 3]

*mask*: microseconds of the host for each token: moving on in the grammar, and the next mask. *shape*: tokens per second
by a schema against the same number of free tokens, drafter `none`; *by default*: the same with drafter `suffix`, the
product's default, and the grammar's drafts beside it. *tools*: schemas of tools, drafter `grammar` against `none`;
*schemas*: the same for all schemas of the tests one after the other. *beside*: what the free ones of 32 sequences get
if 1 or 16 others have a schema, against 32 free ones. All of these are CPU time. *peer*, with --llama-server: its
tokens per second and ours in turns, for the same schema, prompt and number of tokens, greedy. That is wall time, and
one of the two is at work at a time: the CPU time that the peer took in our turns is printed. Prompts are cached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from peer import Peer, running_peer
from table import watched_cpu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the schemas live with the tests

from tests.support.schemas import SCHEMAS
from tests.support.schemas import TOOLS as TEST_TOOLS
from verispec import LLM, SamplingParams
from verispec.constraints.positions import Position
from verispec.engine import Engine, Request
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput

PROMPT = "Make up a list of people as JSON."
DEFAULT_DRAFTER = "suffix"
PARTS = ("batch", "tools", "beside", "schemas", "peer")
_LEAST_ANSWERS = 60  # of an arm: a few schemas get more pairs


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PERSON = _object(
    name={"type": "string", "maxLength": 24},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    email={"type": "string", "maxLength": 32},
    member={"type": "boolean"},
)
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}  # does not end before the tokens do
CODE = {"type": "string", "pattern": "^[A-Z]{3}$"}
SEARCH = _object(query={"type": "string", "maxLength": 20}, limit={"type": "integer", "minimum": 1, "maximum": 50})
TOOLS = [
    _object(location={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]}),
    _object(name={"const": "search"}, arguments=SEARCH),
    _object(origin=CODE, destination=CODE, passengers={"enum": [1, 2, 3]}, cabin={"enum": ["economy", "business"]}),
    PERSON,
]


def run(
    engine: Engine, requests: Sequence[Request], clock: Callable[[], float] = time.process_time
) -> tuple[float, list[SampleOutput]]:
    """The seconds of a clock, and what each request got."""
    ids = [engine.add(replace(request, is_streamed=False)) for request in requests]
    outputs = {}
    start = clock()
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                assert event.output.error is None
                outputs[event.request_id] = event.output
    return clock() - start, [outputs[i] for i in ids]


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """The seconds of every new place in a grammar meanwhile, with its mask."""
    after, found = Position.after, []

    def timed(place: Position, token_id: int) -> Position | None:
        start, is_new = time.thread_time(), token_id not in place._next
        behind = after(place, token_id)
        if behind is not None and is_new:
            _ = behind.allowed
            found.append(time.thread_time() - start)
        return behind

    Position.after = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Position.after = after  # type: ignore[method-assign]


def compared(rates: Sequence[float], base: Sequence[float]) -> str:
    """The median of the turns' ratios, with their range, and the median rates."""
    ratios = sorted(one / other for one, other in zip(rates, base, strict=True))
    speeds = f"{statistics.median(rates):.0f} / {statistics.median(base):.0f} tok/s"
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), {speeds}"


class Bench:
    def __init__(self, llm: LLM, num_tokens: int, pairs: int) -> None:
        self.llm, self.num_tokens, self.pairs = llm, num_tokens, pairs
        self.ids = llm.chat_ids([{"role": "user", "content": PROMPT}])

    def request(self, schema: object = None, drafter: str = "none", **params: Any) -> Request:
        chosen = SamplingParams(**{"max_tokens": self.num_tokens, "ignore_eos": True, "schema": schema, **params})
        return replace(self.llm.request(self.ids, chosen), speculation=Speculation(drafter))

    def rates(
        self,
        arms: Sequence[Sequence[Request]],
        count: slice = slice(None),
        clock: Callable[[], float] = time.process_time,
    ) -> list[float]:
        """Tokens of the requests `count` a second, arm by arm: medians of ratios are the caller's to take. The engine
        is a new one, which knows of no earlier answers."""
        found = []
        with self.llm.separate_engine() as engine:
            run(engine, [self.request(max_tokens=1)])  # the prompt is cached from now on
            for requests in arms:
                seconds, outputs = run(engine, requests, clock)
                found.append(sum(len(output.token_ids) for output in outputs[count]) / seconds)
        return found

    def ratio(self, arm: Sequence[Request], base: Sequence[Request], count: slice = slice(None)) -> str:
        """Medians of turns, with their range; the first turn warms up."""
        pairs = [self.rates((arm, base), count) for _ in range(self.pairs + 1)][1:]
        return compared(*zip(*pairs, strict=True))

    def batch(self, size: int) -> None:
        shaped, free = [self.request(PEOPLE)] * size, [self.request()] * size
        with timed_masks() as seconds:
            self.rates((shaped,))
        micros = sorted(1e6 * each for each in seconds)
        p50, p99 = micros[len(micros) // 2], micros[int(len(micros) * 0.99)]
        print(f"batch {size}: mask p50 {p50:.0f} us, p99 {p99:.0f} us; shape {self.ratio(shaped, free)}", flush=True)
        arms = ([self.request(schema, DEFAULT_DRAFTER)] * size for schema in (PEOPLE, None))
        print(f"batch {size}: by default {self.ratio(*arms)}", flush=True)

    def grammar(self, size: int) -> None:
        arms = [
            [self.request(TOOLS[i % len(TOOLS)], drafter, ignore_eos=False) for i in range(max(size, len(TOOLS)))]
            for drafter in ("grammar", "none")
        ]
        if size == 1:
            for i in range(len(TOOLS)):
                print(f"batch 1: tool {i}: grammar {self.ratio([arms[0][i]], [arms[1][i]])}", flush=True)
        else:
            print(f"batch {size}: tools: grammar {self.ratio(*arms)}", flush=True)

    def every(self, name: str, schemas: Sequence[object]) -> None:
        """Schemas one after the other, as a single user has them: all of their tokens a second, and each schema's.

        The arms take turns at being first: then the caches of a schema are cold.
        """
        arms, num_pairs = ("grammar", "none"), max(self.pairs, _LEAST_ANSWERS // len(schemas))
        seconds = np.zeros((num_pairs, len(schemas), len(arms)))
        answers: dict[tuple[int, str], SampleOutput] = {}
        with self.llm.separate_engine() as engine:
            run(engine, [self.request(max_tokens=1)])  # the prompt is cached from now on
            for pair, (i, schema) in product(range(num_pairs), enumerate(schemas)):
                for arm in (0, 1) if (pair + i) % 2 else (1, 0):
                    request = self.request(schema, arms[arm], ignore_eos=False)
                    seconds[pair, i, arm], (answers[i, arms[arm]],) = run(engine, [request])
        digests = [{answers[i, drafter].digest for drafter in arms} for i in range(len(schemas))]
        assert all(len(found) == 1 for found in digests), "a drafter changed an answer"
        totals = seconds.sum(axis=1)
        whole, each = totals[:, 1] / totals[:, 0], np.median(seconds[..., 1] / seconds[..., 0], axis=0)
        stats = {d: [answers[i, d].stats for i in range(len(schemas))] for d in arms}
        num_passes = [sum(found.passes for found in stats[d]) for d in arms]
        num_accepted, num_drafted = (
            sum(getattr(s, name) for s in stats["grammar"]) for name in ("accepted", "drafted")
        )
        print(
            f"batch 1: {len(schemas)} {name}: grammar {np.median(whole):.2f} ({whole.min():.2f}-{whole.max():.2f}), by "
            f"schema median {np.median(each):.2f}, a tenth below {np.quantile(each, 0.1):.2f}; "
            f"passes {num_passes[0]} / {num_passes[1]}, accepted {num_accepted} of {num_drafted}",
            flush=True,
        )

    def beside(self, num_shaped: int) -> None:
        free = [self.request()] * 32
        mixed = [*free[num_shaped:], *[self.request(PEOPLE)] * num_shaped]
        found = self.ratio(mixed, free, slice(32 - num_shaped))
        print(f"{num_shaped} of 32 with a schema: the others {found}", flush=True)

    def versus(self, program: str, model: str, size: int) -> None:
        """Arms of both sides in turns; the first one changes, and the first turn warms up."""
        idle: list[float] = []  # CPU seconds of the peer in each of our turns
        options = ("--cache-ram", "0")  # its slots keep the prompt; copies of old answers would only cost it time
        with running_peer(program, model, num_slots=size, threads=1, options=options) as peer:

            def ours(schema: object, drafter: str = "none") -> float:
                before = peer.cpu_seconds
                (rate,) = self.rates(([self.request(schema, drafter)] * size,), clock=time.perf_counter)
                idle.append(peer.cpu_seconds - before)
                return rate

            arms: dict[str, Callable[[], float]] = {
                "ours": lambda: ours(PEOPLE),
                "ours, free": lambda: ours(None),
                "ours by default": lambda: ours(PEOPLE, DEFAULT_DRAFTER),
                "llama-server": lambda: self._peer_rate(peer, PEOPLE, size),
                "llama-server, free": lambda: self._peer_rate(peer, None, size),
            }
            rates: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(self.pairs + 1):
                for name in np.roll([*arms], turn).tolist():
                    rates[name].append(arms[name]())
        rates = {name: found[1:] for name, found in rates.items()}
        for one, other in (
            ("ours", "ours, free"),
            ("llama-server", "llama-server, free"),
            ("ours", "llama-server"),
            ("ours, free", "llama-server, free"),
            ("ours by default", "llama-server"),
        ):
            print(f"batch {size}: {one} against {other}: {compared(rates[one], rates[other])}", flush=True)
        print(f"batch {size}: llama-server took {max(idle):.2f} s of CPU time at most in a turn of ours", flush=True)

    def _peer_rate(self, peer: Peer, schema: object, size: int) -> float:
        body = {"prompt": self.ids, "n_predict": self.num_tokens, "temperature": 0, "ignore_eos": schema is None}
        body |= {} if schema is None else {"json_schema": schema}
        start = time.perf_counter()
        answers = peer.complete([body] * size)
        seconds = time.perf_counter() - start
        assert [answer["tokens_predicted"] for answer in answers] == [self.num_tokens] * size
        return size * self.num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--llama-server")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    with watched_cpu() as others_share:
        with LLM(args.model, drafter="none", threads=1, backend="native") as llm:
            measure(Bench(llm, args.tokens, args.pairs), args)
        print(f"{others_share():.0%} of the CPU time was used by other processes")


def measure(bench: Bench, args: argparse.Namespace) -> None:
    for size in args.batch:
        if "batch" in args.part:
            bench.batch(size)
        if "tools" in args.part:
            bench.grammar(size)
    if "beside" in args.part:
        for num_shaped in (1, 16):
            bench.beside(num_shaped)
    if "schemas" in args.part:
        bench.every("schemas of the tests", SCHEMAS)
        bench.every("schemas of tools among them", TEST_TOOLS)
    if "peer" in args.part and args.llama_server:
        for size in args.batch:
            bench.versus(args.llama_server, args.model, size)


if __name__ == "__main__":
    main()
