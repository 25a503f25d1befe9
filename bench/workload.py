"""Prompts, arrival times and runs that the benchmarks share. No figures here.

Prompt files are JSON lines with `turns`, `question` or `prompt`; traces are CSV files with TIMESTAMP, ContextTokens and
GeneratedTokens. Without files there are a few sentences and evenly spaced arrivals.
"""

from __future__ import annotations

import csv
import json
import math
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from verispec import LLM
from verispec.engine import Engine, Request
from verispec.types import SampleOutput

SENTENCES = [
    "The harbour was quiet in the early morning, and only a few gulls circled above the boats.",
    "Maria counted the crates twice, wrote the number into her book, and waited for the captain.",
    "He arrived late, as always, with an excuse about the weather and a bag of oranges.",
    "They talked about the price of fish, the new lighthouse, and the letter from the city.",
    "In the afternoon the wind turned, and the whole bay was covered with small white waves.",
    "A child on the pier tried to catch the reflections with a net made of old curtains.",
    "Nobody noticed the stranger who sat by the wall and drew the ships one after another.",
    "When the bell rang from the church on the hill, everyone looked up and went home.",
]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it arrives, in seconds from the start."""

    seconds: float
    request: Request


@dataclass(slots=True)
class RunResult:
    """Outputs in the order of the requests, the seconds from the first arrival to the last token, and latencies."""

    outputs: list[SampleOutput] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def read_prompts(llm: LLM, files: list[Path], *, count: int, max_len: int) -> list[list[int]]:
    """`count` prompts through the chat template, cut to `max_len` tokens, spread over the files."""
    texts: list[str] = []
    for file in files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found = [line["turns"][0] if "turns" in line else line.get("question") or line["prompt"] for line in lines]
        share = math.ceil(count / len(files))
        texts += [found[i * len(found) // share] for i in range(min(share, len(found)))]
    if not texts:
        texts = [" ".join(SENTENCES[(i + j) % len(SENTENCES)] for j in range(6)) for i in range(count)]
    texts = [texts[i % len(texts)] for i in range(count)]
    return [llm.chat_ids([{"role": "user", "content": text}])[-max_len:] for text in texts]


def read_trace(file: Path | None, count: int) -> list[float]:
    """The first `count` arrival times, scaled so that one request arrives per second on average."""
    if file is None:
        return [float(i) for i in range(count)]
    with file.open(newline="") as source:
        rows = [row for row, _ in zip(csv.DictReader(source), range(count), strict=False)]
    moments = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    span = max(1e-9, moments[-1] - moments[0])
    return [(m - moments[0]) / span * (count - 1) for m in moments]


def play(engine: Engine, arrivals: list[Arrival]) -> RunResult:
    """Feed the engine in real time; requests that arrive at 0 are all there from the start."""
    waiting = sorted(enumerate(arrivals), key=lambda pair: pair[1].seconds, reverse=True)
    outputs: dict[int, SampleOutput] = {}
    ids: dict[int, int] = {}
    start = time.monotonic()
    while waiting or engine.has_work:
        now = time.monotonic() - start
        while waiting and waiting[-1][1].seconds <= now:
            index, arrival = waiting.pop()
            ids[engine.add(arrival.request)] = index
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1][1].seconds - now))
            continue
        for event in engine.step():
            if event.output is not None:
                outputs[ids[event.request_id]] = event.output
    result = RunResult([outputs[i] for i in range(len(arrivals))], time.monotonic() - start)
    engine.check()
    return result


def percentile(values: list[float], q: float) -> float:
    """The value at rank ceil(q * n)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan
