"""What answers in a shape cost, and what drafts of the grammar give back. CPU time of one thread, arms in turns.

    python bench/structured.py MODEL.gguf [--llama-server FILE] [--batch 1 8 32] [--tokens 96] [--pairs 3]

*mask*: microseconds of the host for each token: moving on in the grammar, and the next mask. *shape*: tokens per second
by a schema against the same number of free tokens, drafter `none`; *by default*: the same with drafter `suffix`, the
product's default, and the grammar's drafts beside it. *grammar*: the schemas of tools, and all schemas of the tests one
after the other, drafter `grammar` against `none`; with --only-schemas nothing but the latter. *beside*: what the free
ones of 32 sequences get if 1 or 16 others have a schema, against 32 free ones. With --llama-server: its own tokens per
second (wall time, one thread), with the same schema against without. Prompts are cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the schemas live with the tests

from tests.support.schemas import SCHEMAS
from tests.support.schemas import TOOLS as TEST_TOOLS
from verispec import LLM, SamplingParams
from verispec.constraints.compiler import Position
from verispec.engine import Engine, Request
from verispec.model import resolve
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput

PROMPT = "Make up a list of people as JSON."
DEFAULT_DRAFTER = "suffix"
PORT = 18973
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


def run(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[SampleOutput]]:
    """CPU seconds, and what each request got."""
    ids = [engine.add(replace(request, is_streamed=False)) for request in requests]
    outputs = {}
    start = time.process_time()
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                assert event.output.error is None
                outputs[event.request_id] = event.output
    return time.process_time() - start, [outputs[i] for i in ids]


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


class Bench:
    def __init__(self, llm: LLM, num_tokens: int, pairs: int) -> None:
        self.llm, self.num_tokens, self.pairs = llm, num_tokens, pairs
        self.ids = llm.chat_ids([{"role": "user", "content": PROMPT}])

    def request(self, schema: object = None, drafter: str = "none", **params: Any) -> Request:
        chosen = SamplingParams(**{"max_tokens": self.num_tokens, "ignore_eos": True, "schema": schema, **params})
        return replace(self.llm.request(self.ids, chosen), speculation=Speculation(drafter))

    def rates(self, arms: Sequence[Sequence[Request]], count: slice = slice(None)) -> list[float]:
        """Tokens of the requests `count` a second, arm by arm: medians of ratios are the caller's to take."""
        found = []
        with self.llm.separate_engine() as engine:
            run(engine, [self.request(max_tokens=1)])  # the prompt is cached from now on
            for requests in arms:
                seconds, outputs = run(engine, requests)
                found.append(sum(len(output.token_ids) for output in outputs[count]) / seconds)
        return found

    def ratio(self, arm: Sequence[Request], base: Sequence[Request], count: slice = slice(None)) -> str:
        """Medians of turns, with their range; the first turn warms up."""
        pairs = [self.rates((arm, base), count) for _ in range(self.pairs + 1)][1:]
        ratios = sorted(one / other for one, other in pairs)
        speeds = [statistics.median(column) for column in zip(*pairs, strict=True)]
        bounds = f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
        return f"{statistics.median(ratios):.2f} ({bounds}), {speeds[0]:.0f} / {speeds[1]:.0f} tok/s"

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


def llama(server: str, model: str, num_tokens: int, pairs: int) -> None:
    command = [server, "-m", model, "-t", "1", "--port", str(PORT), "-c", "4096", "--no-webui"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ratios, speeds = [], []
        for turn in range(pairs + 1):
            pair = [_llama_speed(schema, num_tokens) for schema in (PEOPLE, None)]
            if turn:
                speeds.append(pair)
                ratios.append(pair[0] / pair[1])
        shaped, free = (statistics.median(column) for column in zip(*speeds, strict=True))
        print(f"llama-server: shape {statistics.median(ratios):.2f}, {shaped:.0f} / {free:.0f} tok/s")
    finally:
        process.terminate()
        process.wait()


def _llama_speed(schema: object, num_tokens: int) -> float:
    body = {"prompt": PROMPT, "n_predict": num_tokens, "temperature": 0, "ignore_eos": schema is None}
    body |= {} if schema is None else {"json_schema": schema}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return float(json.load(answer)["timings"]["predicted_per_second"])
        except OSError:  # it is loading
            time.sleep(0.5)
    raise SystemExit("llama-server does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--llama-server")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only-schemas", action="store_true")
    args = parser.parse_args()
    with LLM(args.model, drafter="none", threads=1, backend="native") as llm:
        bench = Bench(llm, args.tokens, args.pairs)
        if not args.only_schemas:
            for size in args.batch:
                bench.batch(size)
                bench.grammar(size)
            for num_shaped in (1, 16):
                bench.beside(num_shaped)
        bench.every("schemas of the tests", SCHEMAS)
        bench.every("schemas of tools among them", TEST_TOOLS)
    if args.llama_server:
        llama(args.llama_server, str(resolve(args.model)), args.tokens, args.pairs)


if __name__ == "__main__":
    main()
