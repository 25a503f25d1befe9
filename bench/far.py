"""Drafters beside each other on a device that is far from the host: who lets it idle. For docs/benchmarks.md.

    python bench/far.py             # batches of 1 to 128, medians of 5
    python bench/far.py --quick
    python bench/far.py --prompts FILE.jsonl ... --batch 1 8    # answers of SmolLM2, made here first

The device is simulated with the costs of an H200 (`tests/support/far_backend.py`; --trip and --drafted change two of
them); the host is this machine's, by its CPU time. All requests are there from the start, their prompts in the cache.
The answers are text in which words recur but not what follows them (*words*), in which nothing occurs twice (*new*),
which quotes the prompt (*quotes*), or of which every third does (*some*). With --prompts they are those that a model
gave on this machine, greedy and sampled, all of the same length. Arms run in turns.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the device lives with the tests

from drafting import Prompts, Renewed

from tests.support.far_backend import ROWS, SECONDS, TRIP, FarBackend
from verispec import LLM
from verispec.backends.blas import cpu_name
from verispec.backends.cost import CostTable
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.request import new_batch
from verispec.spec.registry import DRAFTERS, DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

VOCAB, NUM_PROMPT, CONTEXT_LEN = 49_152, 320, 1024
TEXTS = ("words", "new", "quotes", "some")
WRONG_EVERY = 24  # of a text that quotes
DRAFTED = 45e-6  # seconds of a round that the device drafts, beyond its pass; SmolLM2-135M on an H200


class Device(NamedTuple):
    """What it takes in seconds, beside passes: for each pass that the host waits for, and a round that it drafts."""

    trip: float = TRIP
    drafted: float = DRAFTED


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_second: float
    busy: float  # the share of the time in which the device computes
    num_passes: int
    num_rounds: int
    host: float  # seconds for a token
    drafted: float  # nodes for a token
    digest: int


class Texts(Protocol):
    """What requests are about: prompts, by seed, and prompts with the answers that are drawn, which end together."""

    temperature: float

    def prompt(self, seed: int) -> list[int]: ...
    def whole(self, seed: int) -> list[int]: ...


class MadeTexts:
    """Those of a kind, in so many variants of each prompt as are asked for."""

    temperature = 1.0

    def __init__(self, kind: str, num_prompts: int, num_new: int) -> None:
        self._kind, self._num_new = kind, num_new
        self._prompts = [self._words(i, NUM_PROMPT) for i in range(num_prompts)]

    def _words(self, seed: int, length: int) -> list[int]:
        share = np.random.default_rng(seed).random(length)
        return (VOCAB**share).astype(np.int64).tolist()

    def prompt(self, seed: int) -> list[int]:
        return self._prompts[seed % len(self._prompts)]

    def whole(self, seed: int) -> list[int]:
        prompt, num_prompts = self.prompt(seed), len(self._prompts)
        if self._kind == "quotes" or (self._kind == "some" and seed % num_prompts % 3 == 0):
            start, step = seed % 64, 1 + seed // num_prompts % 5
            quoted = prompt[start : start + self._num_new]
            return prompt + [(t + step) % VOCAB if i % WRONG_EVERY == 9 else t for i, t in enumerate(quoted)]
        if self._kind == "new":
            return prompt + np.random.default_rng(seed).permutation(VOCAB)[: self._num_new].tolist()
        return prompt + self._words(seed, self._num_new)


class Answers(NamedTuple):
    """Those of a model."""

    temperature: float
    prompts: list[list[int]]
    wholes: list[list[int]]

    @classmethod
    def of(cls, llm: LLM, prompts: list[list[int]], num_new: int, temperature: float) -> Answers:
        params = SamplingParams(max_tokens=num_new, temperature=temperature, seed=1, ignore_eos=True)
        outputs = llm.generate(prompts, params, drafter="none")
        return cls(temperature, prompts, [[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)])

    def prompt(self, seed: int) -> list[int]:
        return self.prompts[seed % len(self.prompts)]

    def whole(self, seed: int) -> list[int]:
        return self.wholes[seed % len(self.prompts)]


class Bench:
    """An engine, with the prompts of one batch, or of several, in its cache."""

    def __init__(self, device: Device, texts: Texts, batch: int, num_new: int, num_batches: int = 1) -> None:
        self._texts, self._batch, self._num_new = texts, batch, num_new
        self._seeds = count(batch)
        num_slots = (3 + num_batches) * batch * CONTEXT_LEN
        self._backend = FarBackend(
            texts.whole, vocab_size=VOCAB, num_slots=num_slots, context_len=CONTEXT_LEN, num_seq_rows=batch,
            host=time.process_time, **device._asdict(),
        )  # fmt: skip
        cost = CostTable(ROWS, SECONDS, (0.0,) * len(ROWS), learns=True, trip=device.trip)
        setup = DraftSetup(backend=self._backend, cost=cost)
        self._renewed = {
            name: Renewed(lambda name=name: DRAFTERS[name](setup), is_for_auto=True) for name in ("suffix", "lookup")
        }  # arms have the same answers
        self._engine = Engine(
            self._backend,
            family=FarBackend.shapes,
            drafters=make_drafters(setup) | self._renewed,
            config=EngineConfig(num_slots=num_slots, row_budget=2048, max_running=batch, depth=2),
            cost=cost,
            clock=lambda: self._backend.now,
        )
        for i in range(num_batches):
            self.run("none", range(i * batch, (i + 1) * batch))

    def renew(self) -> None:
        for drafter in self._renewed.values():
            drafter.renew()

    def run(self, drafter: str, seeds: Sequence[int]) -> Run:
        engine, backend, temperature, batch = self._engine, self._backend, self._texts.temperature, new_batch()
        requests = [
            Request(
                self._texts.prompt(seed), SamplingParams(max_tokens=self._num_new, seed=seed, temperature=temperature),
                Speculation(drafter), is_streamed=False, batch=batch,
            ) for seed in seeds
        ]  # fmt: skip
        start, busy, host, num_passes = backend.now, backend.busy, backend.host_seconds, len(backend.rounds)
        for request in requests:
            engine.add(request)
        outputs = []
        while engine.has_work:
            outputs += [event.output for event in engine.step() if event.output is not None]
        seconds, num_tokens = backend.now - start, sum(len(o.token_ids) for o in outputs)
        rounds = backend.rounds[num_passes:]
        return Run(
            num_tokens / seconds, (backend.busy - busy) / seconds, len(rounds), sum(rounds),
            (backend.host_seconds - host) / num_tokens, sum(o.stats.drafted for o in outputs) / num_tokens,
            hash(tuple(sorted(o.digest for o in outputs))),
        )  # fmt: skip

    def measured(self, drafters: Sequence[str], repeats: int) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = {drafter: [] for drafter in drafters}
        for i in range(-1, repeats):
            seeds = [next(self._seeds) for _ in range(self._batch)]
            for drafter in drafters if i % 2 else drafters[::-1]:
                gc.collect()
                self.renew()
                run = self.run(drafter, seeds)
                if i >= 0:
                    found[drafter].append(run)
        return found

    def over_all(self, drafters: Sequence[str], repeats: int, num_batches: int) -> dict[str, list[Run]]:
        """One run of each batch, the median by speed; drafters learn from batch to batch."""
        taken: dict[str, list[list[Run]]] = {drafter: [] for drafter in drafters}
        for i in range(repeats):
            for drafter in drafters if i % 2 else drafters[::-1]:
                gc.collect()
                self.renew()
                seeds = [range(j * self._batch, (j + 1) * self._batch) for j in range(num_batches)]
                taken[drafter].append([self.run(drafter, each) for each in seeds])

        def median(runs: Iterable[Run]) -> Run:
            return sorted(runs, key=lambda run: run.tokens_per_second)[repeats // 2]

        return {drafter: [*map(median, zip(*rows, strict=True))] for drafter, rows in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--drafters", nargs="+", default=["none", "suffix", "decode", "auto"])
    parser.add_argument("--texts", nargs="+", default=TEXTS, choices=TEXTS)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON lines; answers are a model's")
    parser.add_argument("--model", default="smollm2-135m", help="whose answers, with --prompts")
    parser.add_argument("--count", type=int, default=48, help="of prompts, of all tasks in turn")
    parser.add_argument(
        "--trip", type=float, default=1e3 * TRIP, help="ms for each pass that is waited for; %(default)g"
    )
    parser.add_argument(
        "--drafted",
        type=float,
        default=1e6 * DRAFTED,
        help="us of a round that the device drafts, beyond its pass; %(default)g",
    )
    parser.add_argument("--quick", action="store_true", help="batches of 1 and 32, medians of 3")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.repeats = [1, 32], 3
    device = Device(1e-3 * options.trip, 1e-6 * options.drafted)
    print(f"{cpu_name()}; Python {platform.python_version()}; medians of {options.repeats}\n")
    print(
        "| text | batch | drafter | tok/s | against none (min-max) | device busy | passes | rounds a pass | "
        "host us a token | drafted a token |"
    )
    print("|---" * 10 + "|")
    if options.prompts:
        show_answers(options, device)
        return
    for text in options.texts:
        for batch in options.batch:
            texts = MadeTexts(text, batch, options.tokens)
            found = Bench(device, texts, batch, options.tokens).measured(options.drafters, options.repeats)
            for drafter, runs in found.items():
                show(text, batch, drafter, runs, found["none"])


def show_answers(options: argparse.Namespace, device: Device) -> None:
    """Whole times over all batches, and in brackets the least and the most of one."""
    llm = LLM(options.model, drafter="none")
    prompts = Prompts(llm, options.prompts, max_len=CONTEXT_LEN - options.tokens).mixed(options.count)
    for temperature in (0.0, 1.0):
        texts = Answers.of(llm, prompts, options.tokens, temperature)
        for batch in [batch for batch in options.batch if batch <= options.count]:
            num_batches = options.count // batch
            bench = Bench(device, texts, batch, options.tokens, num_batches)
            found = bench.over_all(options.drafters, options.repeats, num_batches)
            for drafter, runs in found.items():
                show(f"answers, T = {temperature:g}", batch, drafter, runs, found["none"], as_sum=True)
    llm.close()


def show(text: str, batch: int, drafter: str, runs: list[Run], none: list[Run], *, as_sum: bool = False) -> None:
    """`as_sum`: the speed-up is that of all runs together, which are of other texts."""
    if [run.digest for run in runs] != [run.digest for run in none]:
        raise SystemExit(f"{drafter} changed the output")
    ratios = [run.tokens_per_second / plain.tokens_per_second for run, plain in zip(runs, none, strict=True)]

    speed_up = statistics.median(ratios)
    if as_sum:
        speed_up = sum(1 / run.tokens_per_second for run in none) / sum(1 / run.tokens_per_second for run in runs)

    def median(name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs)

    print(
        f"| {text} | {batch} | {drafter} | {median('tokens_per_second'):,.0f} | {speed_up:.3f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) | {median('busy'):.0%} | {median('num_passes'):.0f} "
        f"| {statistics.median(run.num_rounds / run.num_passes for run in runs):.1f} | {1e6 * median('host'):.1f} "
        f"| {median('drafted'):.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
