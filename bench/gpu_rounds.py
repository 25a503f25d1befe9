"""Where the time of a round goes, by kernel: python -m bench.gpu_rounds FOLDER [shape ...] writes rounds.json.

Random weights in the shapes of models (smol, qwen1.5b drafted for by qwen0.5b, 8b): plain rounds, chains of 4 by a
second model and trees of beams, for one sequence and for 8 at a context of some 300. Also what a round costs in which
every sequence idles, because it has reached its limit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.kernel_times import kernel_times, start_tracing
from tests.backends.cuda.backend_check import PROMPT
from tests.backends.cuda.chains_check import milliseconds, prompted, random_backend, round_pass
from tests.backends.cuda.trees_check import engine_of
from verispec.backends.cuda.backend import CudaBackend
from verispec.backends.cuda.device import Gpu
from verispec.backends.protocol import View
from verispec.engine import Engine, Request
from verispec.model.hub import cache_dir
from verispec.sampling.rows import SampleKey, Sampler
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

SECOND = {"smol": "", "qwen1.5b": "qwen0.5b", "8b": ""}
DRAFTS = {"plain": None, "chains of 4 by a second model": (1, View())}
TREE = "beam:2,3"
ROUNDS = 16
CHAIN = 4
ENDS_AT_ONCE = 302  # tokens: those of `round_pass`, 301, and the first that is drawn
FAR = 1 << 31
ENGINE_TOKENS = 96


class RoundTimes(NamedTuple):
    """Milliseconds of a round, and of one in which everybody idles; None: not measured."""

    shape: str
    sequences: int
    what: str
    running: float
    idle: float | None
    kernels: list[dict[str, Any]]  # of the running rounds


def time_bursts(backend: CudaBackend, shape: str, count: int) -> list[RoundTimes]:
    """Plain rounds and chains, without an engine."""
    tapes, found = prompted(backend, count), []
    for what, drafts in DRAFTS.items():
        name = f"{shape}, {count} sequences, {what}"

        def burst(num_rounds: int, drafts: tuple[int, View] | None = drafts) -> Callable[[], object]:
            pass_ = round_pass(tapes, num_rounds, CHAIN, drafts)
            return lambda: backend.submit(pass_).result()

        bind_all(backend, count, ENDS_AT_ONCE)
        check_ended(burst(ROUNDS)())
        idle = further_round(burst)
        bind_all(backend, count, FAR)
        running = further_round(burst)
        print(f"{name}: {running:.3f} ms a round, {idle:.3f} when everybody idles", flush=True)
        groups = kernel_times(name, partial(burst, ROUNDS), ROUNDS)
        found.append(RoundTimes(shape, count, what, running, idle, [g._asdict() for g in groups]))
    return found


def bind_all(backend: CudaBackend, count: int, limit: int) -> None:
    for i in range(count):
        backend.bind(1 + i, Sampler(SamplingParams(temperature=1.0), SampleKey(i, 0), limit=limit))


def check_ended(result: Any) -> None:
    """Fails unless every sequence gave a token in the first round, and none behind it."""
    if (result.burst.accepted[:, 0] < 0).any() or (result.burst.accepted[:, 1:] >= 0).any():
        raise SystemExit("rounds that should idle do not")


def further_round(burst: Callable[[int], Callable[[], object]]) -> float:
    """Milliseconds that one round more takes: what a burst costs by itself is not in it."""
    return (milliseconds(burst(ROUNDS)) - milliseconds(burst(1))) / (ROUNDS - 1)


def time_engine(backend: CudaBackend, shape: str, count: int) -> RoundTimes:
    """Trees, as an engine asks for them; its prompts and graphs are not counted."""
    name = f"{shape}, {count} sequences, tree {TREE} by a second model"
    finish(started_engine(backend, count))  # captures graphs
    engine = started_engine(backend, count)
    begin = time.perf_counter()
    num_rounds = finish(engine)
    running = (time.perf_counter() - begin) * 1e3 / num_rounds
    print(f"{name}: {running:.3f} ms a round, with the engine", flush=True)
    groups = kernel_times(name, lambda: partial(finish, started_engine(backend, count)), num_rounds)
    return RoundTimes(shape, count, TREE, running, None, [g._asdict() for g in groups])


def started_engine(backend: CudaBackend, count: int) -> Engine:
    """An engine whose sequences have read their prompts."""
    engine = engine_of(backend)
    for i in range(count):
        params = SamplingParams(max_tokens=ENGINE_TOKENS, seed=i, temperature=1.0)
        speculation = Speculation.of("model", tree=TREE)
        engine.add(Request(PROMPT[i : 250 + i], params, speculation=speculation, is_streamed=False))
    engine.step()
    return engine


def finish(engine: Engine) -> int:
    """Run it to its end; returns how many rounds the longest sequence took."""
    outputs = []
    while engine.has_work:
        outputs += [event.output for event in engine.step() if event.output is not None]
    return max(output.stats.passes + output.stats.fast_passes for output in outputs)


def main() -> None:
    folder, shapes = Path(sys.argv[1]), sys.argv[2:] or list(SECOND)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda, flush=True)
    start_tracing()
    device, found = Gpu(0, cache_dir() / "cuda"), list[RoundTimes]()
    with device.current():
        for shape in shapes:
            backend = random_backend(device, shape, SECOND[shape])
            for count in (1, 8):
                found += time_bursts(backend, shape, count)
                found.append(time_engine(backend, shape, count))
                (folder / "rounds.json").write_text(json.dumps([f._asdict() for f in found], indent=1) + "\n")
            del backend
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
