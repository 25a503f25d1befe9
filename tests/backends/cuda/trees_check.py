"""Rounds that draft trees on a GPU, through the engine: of the device and of the host, bit for bit, by every rule; and
what a round takes. Needs torch, numpy and the package.

python -m tests.backends.cuda.trees_check [FOLDER] prints one line per check; what differs must be 0 except in the
controls. Times are taken for FOLDER/trees.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.backends.cuda.backend_check import FAILED, PROMPT, make, report
from tests.backends.cuda.chains_check import random_backend
from tests.support.skipping import CHEAP, cheap_setup
from verispec.backends.cuda.backend import CudaBackend
from verispec.backends.cuda.outputs import DeviceOutputs
from verispec.backends.protocol import Pass, Ticket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.sampling import draw
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

REQUESTS = [
    {}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 6}, {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.6, "repetition_penalty": 1.2}, {"temperature": 1.0, "min_tokens": 9}, {"temperature": 1.3},
]  # fmt: skip
TREES = ("branch:3,2,1", "branch:2,2", "branch:2", "beam:3,3", "beam:2,1")
COUNTED = ("passes", "fast_passes", "draft_passes", "drafted", "accepted")


class Told(NamedTuple):
    """What came of a sequence. How it was drafted is the same whatever ran beside it only if nothing did."""

    digest: str
    counted: tuple[int, ...]
    drafted: tuple[tuple[int, ...], ...]  # of each round: how much was accepted, and the tokens that were not


class Host(DeviceOutputs):
    """Children by plain numpy, from logits that were copied."""

    def _children(self, logits, sampling, k):
        with np.errstate(all="ignore"):
            return draw.noisy_top_k(np, logits.cpu().numpy(), sampling, k)


def hosted(backend: CudaBackend) -> CudaBackend:
    """A backend whose host grows trees, level by level, and takes part in whatever is more than a draw."""
    started = backend._started
    backend._started = lambda pass_, lane: (
        started(pass_, lane) if pass_.wanted.noisy_top_k is None and pass_.wanted.distribution is None else None
    )
    backend._outputs.__class__ = Host
    backend.limits = replace(backend.limits, trees=False, by_probability=False)
    return backend


def looped(backend: CudaBackend) -> CudaBackend:
    """A backend whose bursts are those of `backends/rounds.py`."""
    started = backend._started
    backend._started = lambda pass_, lane: started(pass_, lane) if pass_.burst is None else None
    return backend


def unassisted(backend: CudaBackend) -> CudaBackend:
    """A backend whose host takes part in nothing; it counts the levels of trees that are asked for one by one."""
    submit, backend.num_grown = backend.submit, 0

    def counted(pass_: Pass) -> Ticket:
        backend.num_grown += pass_.wanted.noisy_top_k is not None
        return submit(pass_)

    backend._sampled_by_hand, backend.submit = None, counted
    return backend


def requests(speculation: Speculation, *, seed: int, max_tokens: int) -> list[Request]:
    is_match = speculation.accept == "match"
    return [
        Request(
            PROMPT[7 * i :][: 9 + 5 * i],
            SamplingParams(max_tokens=max_tokens, seed=seed + i, deterministic=is_match, **more),
            eos_ids=(3,), speculation=speculation,
        )
        for i, more in enumerate(REQUESTS)
        if is_match or not {"repetition_penalty", "min_tokens"} & more.keys()
    ]  # fmt: skip


def engine_of(backend: CudaBackend, **changes: object) -> Engine:
    config = EngineConfig(**{"num_slots": backend.limits.num_slots, "max_running": 8, "prefix_cache": False, **changes})
    drafters = make_drafters(cheap_setup(backend, draft_len=3))
    return Engine(backend, family=(1, 4, 16, 64, 256), drafters=drafters, config=config, cost=CHEAP)


def told(engine: Engine, asked: Sequence[Request]) -> list[Told]:
    found, drafted, ids = {}, defaultdict(list), [engine.add(request) for request in asked]
    while engine.has_work:
        for event in engine.step():
            drafted[event.request_id].append((event.num_accepted, *event.rejected_ids))
            if event.output is not None:
                stats, drafts = event.output.stats, tuple(drafted[event.request_id])
                found[event.request_id] = Told(event.output.digest, tuple(getattr(stats, n) for n in COUNTED), drafts)
    engine.check()
    return [found[i] for i in ids]


def check_trees(
    device, trees: Sequence[str] = TREES, drafters: Sequence[str] = ("skip", "model"),
    rules: Sequence[str] = ("match", "recursive"), max_tokens: int = 30, num_requests: int = 9,
) -> None:  # fmt: skip
    """Every tree by both drafters and both rules: one request after the other with all counters, then together."""
    host, alone = hosted(make("llama", device)), unassisted(make("llama", device))
    for tree in trees:
        for drafter in drafters:
            for accept in rules:
                what, how = f"{drafter} {tree} {accept}", Speculation.of(drafter, tree=tree, accept=accept)
                asked = requests(how, seed=len(tree), max_tokens=max_tokens)[:num_requests]
                expected = told(engine_of(host, max_burst=1, max_running=1), asked)
                alone.num_grown = 0
                found = told(engine_of(alone, max_burst=6, max_running=1), asked)
                if drafter == "skip" and accept == "match":  # `model` reads the prompt with its first draft
                    report(f"{what}: passes in which the host drafted", len(asked), alone.num_grown)
                report(f"{what}: of the device and of the host", len(asked), differing(found, expected))
                ahead = told(engine_of(alone, max_burst=2, max_running=1, depth=2), asked)
                report(f"{what}: two flights", len(asked), differing(ahead, expected))
                report(f"{what}: control: accepted", len(asked), sum(t.counted[-1] for t in found), control=True)
                if accept == "match":
                    together = told(engine_of(alone, max_burst=6, depth=2), asked)
                    differ = sum(a.digest != b.digest for a, b in zip(together, expected, strict=True))
                    report(f"{what}: one by one and together", len(asked), differ)
    asked = requests(how, seed=99, max_tokens=max_tokens)[:num_requests]
    report(
        "control: another seed",
        len(found),
        differing(told(engine_of(alone, max_running=1), asked), found),
        control=True,
    )


POISONED = list(range(5, 320, 9))  # those of the prompts are not among them


def check_poison(device, max_tokens: int = 12, num_requests: int = 24) -> None:
    """Tokens whose K/V are not finite: one that the target draws ends its sequence, one that is only drafted does not,
    and what the host gets is what the device does."""
    backend = make("qwen2", device, poison=POISONED)
    expected = poisoned(backend, Speculation.of("none"), max_tokens, num_requests, {"max_burst": 1, "max_running": 1})
    ended = sum(error is not None for _, error, _ in expected)
    report("control: the target draws tokens that are not finite", num_requests, ended, control=True)
    for drafter, tree in (
        ("none", None),
        ("skip", "chain:3"),
        ("model", "chain:3"),
        ("model", "beam:3,3"),
        ("skip", "branch:2,2"),
    ):
        found = poisoned(backend, Speculation.of(drafter, tree=tree), max_tokens, num_requests, {"max_burst": 6})
        what = f"with tokens that are not finite, {drafter} {tree or ''}"
        report(what, num_requests, sum(a[:2] != b[:2] for a, b in zip(found, expected, strict=True)))
        if drafter != "none":
            only_drafted = sum(bool(set(POISONED) & rejected) for _, _, rejected in found)
            report(f"{what}: control: only drafted", num_requests, only_drafted, control=True)


def poisoned(
    backend: CudaBackend, speculation: Speculation, max_tokens: int, num_requests: int, sizes: dict[str, int]
) -> list[tuple[tuple[int, ...], str | None, set[int]]]:
    """Tokens, error and what was rejected of each request."""
    engine, found, rejected = engine_of(backend, **sizes), {}, defaultdict(set)
    for i in range(num_requests):
        params = SamplingParams(max_tokens=max_tokens, seed=i, temperature=1.0)
        engine.add(Request([9 * i % 300, 51, 60, 69], params, speculation=speculation))
    while engine.has_work:
        for event in engine.step():
            rejected[event.request_id].update(event.rejected_ids)
            if event.output is not None:
                found[event.request_id] = tuple(event.output.token_ids), event.output.error
    engine.check()
    return [(*found[i], rejected[i]) for i in sorted(found)]


def differing(found: Sequence[Told], expected: Sequence[Told]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))


# Times


class Timing(NamedTuple):
    """Milliseconds of a round."""

    shape: str
    sequences: int
    what: str
    device: float
    host: float


WAYS = [
    ("none", None, "match"), ("model", "chain:3", "match"), ("model", "branch:3,2,1", "match"),
    ("model", "beam:3,3", "match"), ("model", "branch:3,2,1", "recursive"), ("skip", "branch:3,2,1", "match"),
]  # fmt: skip


def time_trees(device, name: str, second: str, results: list[Timing]) -> None:
    backend = random_backend(device, name, second)
    by_device = backend._started, backend.limits
    for count in (1, 8):
        for drafter, tree, accept in WAYS:
            speculation = Speculation.of(drafter, tree=tree, accept=accept)
            alone = round_milliseconds(backend, count, speculation)
            hosted(backend)._outputs.__class__ = DeviceOutputs  # whose children are the device's
            host = round_milliseconds(backend, count, speculation)
            backend._started, backend.limits = by_device
            what = drafter if tree is None else f"{drafter} {tree} {accept}"
            results.append(Timing(name, count, what, alone, host))
            print(f"{name}, {count} sequences, {what}: {alone:.3f} ms a round, with the host {host:.3f}", flush=True)


def round_milliseconds(backend: CudaBackend, count: int, speculation: Speculation, max_tokens: int = 120) -> float:
    """Of sequences that start at a context of 250; graphs are captured in a first run."""
    best = float("inf")
    for _ in range(2):
        engine = engine_of(backend)
        for i in range(count):
            params = SamplingParams(
                max_tokens=max_tokens, seed=i, temperature=1.0, deterministic=speculation.accept == "match"
            )
            engine.add(Request(PROMPT[i : 250 + i], params, speculation=speculation, is_streamed=False))
        engine.step()
        begin, outputs = time.perf_counter(), []
        while engine.has_work:
            outputs += [e.output for e in engine.step() if e.output is not None]
        seconds = time.perf_counter() - begin
        best = min(best, 1e3 * seconds / max(o.stats.passes + o.stats.fast_passes for o in outputs))
    return best


def main() -> None:
    import torch

    from tests.backends.cuda.draw_check import check_draws
    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    device, begin, results = Gpu(0, cache_dir() / "cuda"), time.perf_counter(), list[Timing]()
    with device.current():
        with np.errstate(all="ignore"):
            report("draws and children, of the device and of numpy", 288, check_draws(vocabs=(5000, 151936)))
        check_trees(device)
        check_poison(device)
        print(f"checks: {time.perf_counter() - begin:.0f} s", flush=True)
        for name, second in (("smol", ""), ("qwen1.5b", "qwen0.5b")) if len(sys.argv) > 1 else ():
            time_trees(device, name, second, results)
            torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        Path(sys.argv[1], "trees.json").write_text(json.dumps([r._asdict() for r in results], indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(FAILED) if FAILED else "all equal")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
