"""Tokens per second of the whole engine on a GPU: python -m bench.gpu_engine FOLDER [MODEL.gguf PROMPTS.jsonl]
[8b | 8b-int4 | 8b-int8 | 8b-fp8]

SmolLM2 (or any model file) with the prompts of a file, and the shapes of an 8B model with random weights. Each figure
is the median of three runs or more; the first run of a size also captures its graphs and is not counted. Beside them:
what `deterministic=False` would give, memory, what the host's time and the device's goes to, and what products take
that may be divided. The profiler of kernels stays once it has run: measure 8B in a process of its own.
`python -m bench.gpu_engine start MODEL` is one start, and how long it took.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bench.gpu import microseconds
from bench.kernel_times import kernel_times, start_tracing
from verispec.backends.calibration import calibrate
from verispec.backends.cost import CostTable
from verispec.backends.cuda.backend import CudaBackend, CudaModel
from verispec.backends.cuda.device import Gpu
from verispec.backends.cuda.kernels import _by_parts, undivided_products
from verispec.backends.cuda.shapes import num_parts
from verispec.backends.select import engine_defaults
from verispec.engine import Engine, Request
from verispec.llm import LLM
from verispec.model.architecture import Architecture, LayerSpec, Rope, expected_tensors
from verispec.model.hub import cache_dir
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

RESULTS: list[dict[str, object]] = []
LARGE = {"8b": "", "8b-int4": "int4", "8b-int8": "int8", "8b-fp8": "fp8"}  # weights that draw windows
NONE = Speculation.of("none")
PRODUCTS_8B = {"q/k/v": (6144, 4096), "output": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
PRODUCT_ROWS = (128, 512, 2048)
NUM_MATRICES = 4  # in turns, so that none is found in the cache


class Timed:
    """A backend whose calls are timed: what is left of a run is the engine's own time."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.reset()
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] | None = None

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def reset(self) -> None:
        self.submitting = self.waiting = 0.0
        self.passes = self.rounds = 0

    def submit(self, pass_):
        begin = time.perf_counter()
        if self.events is not None:
            marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            marks[0].record()
        ticket = self.backend.submit(pass_)
        if self.events is not None:
            marks[1].record()
            self.events.append((_kind(pass_), *marks))
        self.submitting += time.perf_counter() - begin
        self.passes += 1
        self.rounds += 1 + (0 if pass_.burst is None else pass_.burst.num_rounds)
        return _TimedTicket(ticket, self)


def _kind(pass_) -> str:
    """Rows of prompts and of others, to the next power of two, and rounds."""
    real = int((pass_.rows.slots != 1).sum())
    drawn = 0 if pass_.wanted.draw is None else len(pass_.wanted.draw.rows)
    rounds = 0 if pass_.burst is None else pass_.burst.num_rounds
    prompt, others = (1 << max(0, count - 1).bit_length() for count in (real - drawn, drawn))
    return f"{prompt} prompt + {others}, {1 + rounds} rounds"


class _TimedTicket:
    def __init__(self, ticket, timed: Timed) -> None:
        self._ticket, self._timed = ticket, timed

    def result(self):
        begin = time.perf_counter()
        result = self._ticket.result()
        self._timed.waiting += time.perf_counter() - begin
        return result


def run(make_engine: Callable[[], Engine], requests: list[Request]) -> tuple[int, float]:
    engine = make_engine()
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    tokens = 0
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                tokens += len(event.output.token_ids)
    return tokens, time.perf_counter() - begin


def measure(name: str, make_engine: Callable[[], Engine], requests: list[Request], timed: Timed, runs: int = 3) -> None:
    begin = time.perf_counter()
    run(make_engine, requests)
    first = time.perf_counter() - begin
    rates, parts = [], []
    for _ in range(runs):
        timed.reset()
        tokens, seconds = run(make_engine, requests)
        rates.append(tokens / seconds)
        parts.append((timed.submitting / seconds, timed.waiting / seconds, timed.passes))
    submitting, waiting, passes = parts[-1]
    entry = {
        "what": name, "tokens_per_second": statistics.median(rates), "runs": rates, "first_seconds": first,
        "submitting": submitting, "waiting": waiting, "passes": passes, "tokens": tokens, "rounds": timed.rounds,
        "us_per_round": host_parts(timed, seconds),
    }  # fmt: skip
    RESULTS.append(entry)
    print(
        f"{name}: {statistics.median(rates):,.0f} tok/s ({', '.join(f'{r:,.0f}' for r in rates)}); waiting for the "
        f"device {waiting:.0%}, submitting {submitting:.0%}, {passes} passes; first run {first:.2f} s", flush=True,
    )  # fmt: skip


def host_parts(timed: Timed, seconds: float) -> dict[str, float]:
    """Microseconds of a round, of prompts too, without a profiler: what is neither submitting nor waiting is the
    engine's own."""
    parts = {"engine": seconds - timed.submitting - timed.waiting, "submit": timed.submitting, "wait": timed.waiting}
    return {name: part * 1e6 / max(1, timed.rounds) for name, part in parts.items()}


def print_host_parts() -> None:
    """Of all that was measured, the last run of each."""
    print(f"host parts, us a round: {'what':46} {'rounds':>7} {'engine':>8} {'submit':>8} {'wait':>8}")
    for entry in RESULTS:
        if isinstance(parts := entry.get("us_per_round"), dict):
            row = " ".join(f"{part:8.1f}" for part in parts.values())
            print(f"{'':24}{entry['what']!s:46} {entry['rounds']!s:>7} {row}", flush=True)


def compare(
    name: str, deterministic: Callable[[], tuple[int, float]], free: Callable[[], tuple[int, float]], runs: int
) -> None:
    """Tokens per second of both, in turns, and their ratio. The first run of each is not counted."""
    rates: tuple[list[float], list[float]] = [], []
    for turn in range(runs + 1):
        for arm in ((0, 1), (1, 0))[turn % 2]:
            tokens, seconds = (deterministic, free)[arm]()
            rates[arm].append(tokens / seconds)
    ours, others = (arm[1:] for arm in rates)
    ratio = statistics.median(ours) / statistics.median(others)
    pairs = ", ".join(f"{a / b:.3f}" for a, b in zip(ours, others, strict=True))
    RESULTS.append({"what": f"{name}, deterministic / not", "ratio": ratio, "deterministic": ours, "not": others})
    print(
        f"{name}: deterministic {statistics.median(ours):,.0f} tok/s, not {statistics.median(others):,.0f}, ratio "
        f"{ratio:.3f} (pair by pair {pairs})", flush=True,
    )  # fmt: skip


def report_memory(name: str) -> None:
    """What is allocated, the most that was ever reserved, and all that the device has in use, graphs included."""
    free, total = torch.cuda.mem_get_info()
    found = {
        "allocated": torch.cuda.memory_allocated(), "most_reserved": torch.cuda.max_memory_reserved(),
        "in_use": total - free,
    }  # fmt: skip
    RESULTS.append({"what": f"{name}: GiB", **{key: nbytes / 2**30 for key, nbytes in found.items()}})
    print(f"{name}: GiB", ", ".join(f"{key} {nbytes / 2**30:.2f}" for key, nbytes in found.items()), flush=True)


def kernels_by_batch(
    name: str, backend: CudaBackend, make_engine: Callable[[], Engine], sizes: dict[int, list[Request]]
) -> None:
    """Microseconds by kernel, behind everything else: the profiler stays in memory. All graphs are captured anew."""
    start_tracing()
    torch.cuda.synchronize()
    backend._graphs._graphs.clear()
    for count, requests in sizes.items():
        groups = kernel_times(f"{name} batch {count}", lambda r=requests: partial(run, make_engine, r))
        RESULTS.append({"what": f"kernels of {name} batch {count}", "kernels": [g._asdict() for g in groups]})


def library_products() -> None:
    """Microseconds of the library's products in the shapes of 8B: as it likes, undivided, and where passes ask for
    fixed parts of K, in these. Whether `deterministic=False` could be faster is the first against the last."""
    for name, (outputs, columns) in PRODUCTS_8B.items():
        w = [torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_MATRICES)]
        parts = num_parts(outputs, columns)
        for rows in PRODUCT_ROWS:
            x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            free = product_microseconds(lambda x=x, w=w: [torch.mm(x, one.t()) for one in w])
            with undivided_products():
                whole = product_microseconds(lambda x=x, w=w: [torch.mm(x, one.t()) for one in w])
                entry = {"default": free, "undivided": whole}
                if parts > 1:
                    ours = product_microseconds(lambda x=x, w=w, parts=parts: [_by_parts(x, one, parts) for one in w])
                    entry[f"in {parts} parts"] = ours
            RESULTS.append({"what": f"product {name}, {rows} rows", **entry})
            print(f"product {name}, {rows} rows, us:", ", ".join(f"{k} {v:.1f}" for k, v in entry.items()), flush=True)


def product_microseconds(work: Callable[[], object]) -> float:
    """Of one of them, in a graph that is captured as things are set: a device's own captures divide nothing."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return microseconds(graph) / NUM_MATRICES


def device_times(name: str, make_engine: Callable[[], Engine], requests: list[Request], timed: Timed) -> None:
    """What the device spends on passes of each kind, and how long it idles behind them."""
    timed.events = events = []
    run(make_engine, requests)
    torch.cuda.synchronize()
    timed.events = None
    kinds: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    for kind, begin, end in events:
        kinds.setdefault(kind, []).append(begin.elapsed_time(end))
    for (kind, _, end), (_, begin, _) in pairwise(events):
        gaps.setdefault(kind, []).append(end.elapsed_time(begin))
    print(f"device ms of {name}:")
    for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1]))[:12]:
        print(
            f"  {kind}: {len(times)} passes, {sum(times):.0f} in all, {statistics.median(times):.2f} each", flush=True
        )
    every = [gap for behind in gaps.values() for gap in behind]
    print(f"  idle between passes: {sum(every):.2f} in all, {_num_noticeable(every)} of {len(every)} above 0.05")
    for kind, behind in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:4]:
        print(f"    behind {kind}: {sum(behind):.2f}, {_num_noticeable(behind)} of {len(behind)}", flush=True)


def _num_noticeable(gaps: list[float]) -> int:
    return sum(gap > 0.05 for gap in gaps)


def profile(
    name: str, make_engine: Callable[[], Engine], requests: list[Request], timed: Timed, lines: int = 14
) -> None:
    """Where the host's time goes: each function's own, which the profiler makes longer."""
    profiler = cProfile.Profile()
    timed.reset()
    profiler.enable()
    tokens, seconds = run(make_engine, requests)
    profiler.disable()
    every = [
        (own * 1e6 / timed.rounds, calls / timed.rounds, f"{Path(file).name}:{line} {function}")
        for (file, line, function), (_, calls, own, *_) in pstats.Stats(profiler).stats.items()
    ]
    most = sorted(every, reverse=True)[:lines]
    RESULTS.append({"what": f"profile of {name}", "us_and_calls_a_round": most})
    print(f"profile of {name} ({tokens} tokens, {timed.rounds} rounds, {seconds:.2f} s with the profiler)")
    print("  us a round    calls  function")
    for took, calls, function in most:
        print(f"  {took:10.1f} {calls:8.2f}  {function}", flush=True)


def plain(ids: list[int], num_tokens: int, seed: int, temperature: float = 1.0, *, free: bool = False) -> Request:
    params = SamplingParams(
        temperature=temperature, max_tokens=num_tokens, seed=seed, ignore_eos=True, deterministic=not free
    )
    return Request(ids, params, NONE, is_streamed=False)


def started(model: str) -> LLM:
    """The model, loaded; prints how long that took, and whether compiled kernels were there."""
    folder = cache_dir() / "cuda"
    is_warm = folder.exists() and any(folder.iterdir())
    begin = time.perf_counter()
    llm = LLM(model, backend="cuda", drafter="none", prefix_cache=False, max_running=512)
    seconds = time.perf_counter() - begin
    RESULTS.append({"what": "start", "seconds": seconds, "warm": is_warm})
    cache, gib = "warm" if is_warm else "empty", torch.cuda.memory_allocated() / 2**30
    print(f"start {seconds:.1f} s, disk cache {cache}, {gib:.2f} GiB, {llm.engine._config.num_slots} slots", flush=True)
    return llm


def smol(model: str, prompts: Path) -> None:
    subprocess.run([sys.executable, "-m", "bench.gpu_engine", "start", model], check=True)  # so that the next is warm
    llm = started(model)
    costs = zip(llm.calibration.cost.shapes, llm.calibration.cost.base, strict=True)
    print("cost ms", " ".join(f"{m}:{s * 1e3:.2f}" for m, s in costs))
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    texts = [line["turns"][0] for line in lines]
    ids = [llm.tokenizer.encode(text)[-1024:] for text in texts]
    timed = Timed(llm.backend)
    llm._backend = timed  # the engines made from here on are timed
    for count in (1, 8, 32, 256):
        requests = [plain(ids[i % len(ids)], 256, i) for i in range(count)]
        measure(f"SmolLM2 batch {count}", llm.fresh_engine, requests, timed, runs=7 if count == 32 else 3)
        if count == 32:
            others = [plain(ids[i], 256, i, free=True) for i in range(count)]
            both = (partial(run, llm.fresh_engine, each) for each in (requests, others))
            compare(f"SmolLM2 batch {count}", *both, runs=7)
        if count != 8:
            profile(f"SmolLM2 batch {count}", llm.fresh_engine, requests, timed)
    requests = [plain(part, 256, i) for i, part in enumerate(ids * 2)]
    for budget, running in ((4096, 480), (2048, 480), (2048, 256)):
        engine = partial(llm.fresh_engine, max_running=running, row_budget=budget)
        measure(f"SmolLM2 480 requests, {running} at once, {budget} rows", engine, requests, timed)
    engine = partial(llm.fresh_engine, max_running=480)
    device_times("480 requests", engine, requests, timed)
    profile("480 requests", engine, requests, timed)
    text_to_text(llm, texts * 2)
    report_memory("SmolLM2")
    sizes = {count: [plain(ids[i % len(ids)], 256, i) for i in range(count)] for count in (1, 32, 256)}
    kernels_by_batch("SmolLM2", timed.backend, llm.fresh_engine, sizes)
    llm.close()


def text_to_text(llm: LLM, texts: list[str]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=256, seed=1, ignore_eos=True)

    def generated(params: SamplingParams) -> tuple[int, float]:
        begin = time.perf_counter()
        done = llm.generate(texts, params)
        return sum(len(c.token_ids) for c in done), time.perf_counter() - begin

    both = (partial(generated, each) for each in (params, replace(params, deterministic=False)))
    compare(f"SmolLM2 {len(texts)} requests, text to text", *both, runs=3)


def large_backend(draft_weights: str = "") -> CudaBackend:
    """Random weights in the shapes of Llama 8B."""
    layer = LayerSpec(rope=Rope(500000.0), query_scalar=128)
    arch = Architecture(
        family="llama", layers=(layer,) * 32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_size=14336, vocab_size=128256, context_len=2048, norm_eps=1e-5, tied_head=False,
    )  # fmt: skip
    shapes = {name: spec.shape for name, spec in expected_tensors(arch).items()}
    generator = torch.Generator(device="cuda").manual_seed(0)

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device="cuda")
        scale = 1.0 if name == "embed" else shape[1] ** -0.5
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * scale

    begin = time.perf_counter()
    backend = CudaBackend(
        [CudaModel(arch, read)],
        device=Gpu(0, cache_dir() / "cuda"),
        num_slots=256 * 800,
        num_seq_rows=256,
        draft_weights=draft_weights,
    )
    print(f"8B shapes: start {time.perf_counter() - begin:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    return backend


def large(draft_weights: str = "") -> None:
    """8B shapes; with `draft_weights`, windows that weights of this kind draw."""
    backend = large_backend(draft_weights)
    found = calibrate(backend)
    costs = zip(found.cost.shapes, found.cost.base, strict=True)
    print("cost ms", " ".join(f"{m}:{s * 1e3:.2f}" for m, s in costs))
    timed = Timed(backend)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 100000, (256, 512)).tolist()
    if draft_weights:
        windows(timed, found.cost, prompts[0], draft_weights)
        return
    config = replace(engine_defaults("cuda"), num_slots=backend.limits.num_slots, prefix_cache=False)

    def make() -> Engine:
        return Engine(timed, family=backend.shapes, drafters={"none": NoDrafter()}, config=config, cost=found.cost)

    for count in (1, 8, 32):
        requests = [plain(prompts[i], 256, i) for i in range(count)]
        measure(f"8B batch {count}", make, requests, timed, runs=7 if count == 32 else 3)
        if count != 8:
            profile(f"8B batch {count}", make, requests, timed)
    device_times("8B batch 32", make, requests, timed)
    others = [plain(prompts[i], 256, i, free=True) for i in range(32)]
    compare("8B batch 32", *(partial(run, make, each) for each in (requests, others)), runs=7)
    requests = [plain(prompts[i], 256, i) for i in range(256)]
    measure("8B 256 requests 512 + 256", make, requests, timed, runs=3)
    device_times("8B 256 requests", make, requests, timed)
    profile("8B 256 requests", make, requests, timed)
    report_memory("8B shapes")
    library_products()
    sizes = {count: [plain(prompts[i], 256, i) for i in range(count)] for count in (1, 32)}
    sizes[256] = [plain(prompts[i][:128], 64, i) for i in range(256)]  # short, so that most of it is rounds
    kernels_by_batch("8B", backend, make, sizes)


def windows(timed: Timed, cost: CostTable, prompt: list[int], kind: str) -> None:
    """One stream whose windows are drawn by weights of few bits: random weights say what a window costs, and what it
    would give at an acceptance that was measured elsewhere."""
    config = replace(engine_defaults("cuda"), num_slots=timed.limits.num_slots, prefix_cache=False)

    def seconds(method: str, draft_len: int, num_tokens: int = 192) -> tuple[list[int], float, int]:
        drafters = make_drafters(DraftSetup(draft_len=draft_len, backend=timed))
        engine = Engine(timed, family=timed.shapes, drafters=drafters, config=config, cost=cost)
        request = replace(plain(prompt[:64], num_tokens, 1, temperature=0.0), speculation=Speculation.of(method))
        engine.add(request)
        begin = time.perf_counter()
        while engine.has_work:
            for event in engine.step():
                if event.output is not None:
                    tokens, windows = list(event.output.token_ids), event.output.stats.passes - 1  # one is the prompt's
        return tokens, time.perf_counter() - begin, windows

    def behind_the_prompt(method: str, draft_len: int) -> tuple[list[int], float, int]:
        """Medians of three, without the time of the first token."""
        seconds(method, draft_len), seconds(method, draft_len, 1)
        runs = [seconds(method, draft_len) for _ in range(3)]
        first = statistics.median(seconds(method, draft_len, 1)[1] for _ in range(3))
        return runs[0][0], statistics.median(took for _, took, _ in runs) - first, runs[0][2]

    tokens, took, _ = behind_the_prompt("none", 0)
    each = took / (len(tokens) - 1)
    print(f"8B one stream, none: {each * 1e3:.2f} ms a token")
    for draft_len in (2, 3, 4, 5, 6, 8):
        found, took, count = behind_the_prompt("decode", draft_len)
        assert found == tokens, "a drafter changed the output"
        gains = []
        for acceptance in (0.82, 0.9, 0.95):
            expected = sum(acceptance**i for i in range(draft_len + 1))
            gains.append(f"{expected * each / (took / count):.2f}x at {acceptance}")
        print(
            f"8B windows of {draft_len} by {kind}: {took / count * 1e3:.2f} ms each ({count}); {', '.join(gains)}",
            flush=True,
        )


def main() -> None:
    if sys.argv[1] == "start":
        started(sys.argv[2]).close()
        return
    folder = Path(sys.argv[1])
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda, flush=True)
    if len(sys.argv) > 3:
        smol(sys.argv[2], Path(sys.argv[3]))
    if sys.argv[-1] in LARGE:
        large(LARGE[sys.argv[-1]])
    print_host_parts()
    (folder / "engine.json").write_text(json.dumps(RESULTS, indent=1) + "\n")


if __name__ == "__main__":
    main()
