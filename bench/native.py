"""The native backend by itself: passes, memory, start, and how far 15-bit activations are from float32.

    python bench/native.py [--parts passes memory ...] [--text FILE]

Parts: greedy (texts against the numpy backend's), passes (T(M)), overhead (time outside of kernels), quoting (drafter
suffix against none), accuracy (against the numpy backend on the same dequantised weights; --text FILE), memory (RSS,
start to first token). Beside llama.cpp: bench/table.py.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from generate import prompts as make_prompts

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.model import resolve


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = resolve(options.model)

    def load(self, path: Path, **options: Any) -> LLM:
        return LLM(path, drafter="none", prefix_cache=False, history_len=0, threads=self.options.threads, **options)


def ours(llm: LLM, batch: list[list[int]], new: int, drafter: str = "none") -> float:
    start = time.perf_counter()
    done = llm.generate(batch, SamplingParams(max_tokens=new, ignore_eos=True, seed=0), drafter=drafter)
    assert all(len(c.token_ids) == new for c in done)
    return time.perf_counter() - start


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def greedy(bench: Bench) -> Iterator[str]:
    """Greedy texts of the native and the numpy backend on the same prompts."""
    texts = {}
    for name in ("numpy", "native"):
        llm = bench.load(bench.path, backend=name)
        batch = [ids[: 16 + 4 * i] for i, ids in enumerate(make_prompts(llm, "free", 16, 128))]
        done = llm.generate(batch, SamplingParams(max_tokens=48, ignore_eos=True), drafter="none")
        texts[name] = [c.token_ids for c in done]
        llm.close()
    same = sum(a == b for a, b in zip(texts["numpy"], texts["native"], strict=True))
    yield f"{same} of {len(texts['numpy'])} greedy texts of 48 tokens are the same"


def passes(bench: Bench) -> Iterator[str]:
    """T(M) at a context of 200 tokens, and the share of the limits: memory read at 24 GB/s, integer operations."""
    from verispec.backends.cost import probe_pass

    yield "| rows | ms | GB/s of weights | 8-bit GOP/s |"
    yield "|---|---|---|---|"
    llm = bench.load(bench.path)
    nbytes = llm._backend.weights_nbytes  # type: ignore[attr-defined]
    for shape in (1, 2, 4, 8, 16, 32, 64, 128):
        pass_ = probe_pass(llm._backend, shape, 200)
        best = min(_timed(lambda: llm._backend.submit(pass_).result()) for _ in range(7))  # noqa: B023
        yield f"| {shape} | {best * 1e3:.1f} | {nbytes / best / 1e9:.1f} | {2 * 0.269 * shape / best:.0f} |"


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def overhead(bench: Bench) -> Iterator[str]:
    """What Python and scheduling take of a step at batch 8."""
    llm = bench.load(bench.path)
    kernels = llm._backend._kernels  # type: ignore[attr-defined]
    for size in (1, 8, 32):
        batch = make_prompts(llm, "free", size, 32)
        ours(llm, batch, 16)
        before = kernels.seconds
        seconds = ours(llm, batch, 96)
        share = 1 - (kernels.seconds - before) / seconds
        yield f"batch {size}: {share:.1%} of the time outside of kernels, {seconds / 96 * 1e3:.1f} ms a step"


def quoting(bench: Bench) -> Iterator[str]:
    """Drafter suffix against none where the text quotes itself."""
    llm = bench.load(bench.path)
    for size in (1, 8):
        batch = make_prompts(llm, "quote", size, 128)
        pairs = [(ours(llm, batch, 128, "none"), ours(llm, batch, 128, "suffix")) for _ in range(bench.options.repeats)]
        plain, drafted = ([size * 128 / s for s in column] for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        yield f"quote prompts, batch {size}: none {cell(plain)}, suffix {cell(drafted)} tok/s, ratio {ratio:.2f}"


def accuracy(bench: Bench) -> Iterator[str]:
    """KL, perplexity and greedy agreement against float32 on the same weights."""
    text = bench.options.text.read_text(encoding="utf-8") if bench.options.text else "The quick brown fox. " * 400
    reference = bench.load(bench.path, backend="numpy")
    ids = reference.tokenizer.encode(text)[: bench.options.tokens]
    chunks = [ids[i : i + 256] for i in range(0, len(ids) - 1, 255)]
    chunks = [chunk for chunk in chunks if len(chunk) > 1]
    exact = [_distributions(reference, chunk) for chunk in chunks]
    reference.close()
    yield (
        "| K/V | tokens | perplexity, float32 | native | change | mean KL nats | largest KL "
        "| largest logit difference | mean | argmax agrees |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for kv_dtype in ("float16", "float32"):
        llm = bench.load(bench.path, kv_dtype=kv_dtype)
        kls, logit_errors, agree, nll, exact_nll = [], [], [], 0.0, 0.0
        for chunk, wanted in zip(chunks, exact, strict=True):
            found = _distributions(llm, chunk)
            p, q = (logits - _lse(logits) for logits in (wanted, found))
            kls += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            logit_errors.append(np.abs(wanted - found))
            agree += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
            rows, targets = np.arange(len(chunk) - 1), np.array(chunk[1:])
            exact_nll -= float(p[rows, targets].sum())
            nll -= float(q[rows, targets].sum())
        count = len(kls)
        before, after = math.exp(exact_nll / count), math.exp(nll / count)
        errors = np.concatenate(logit_errors)
        yield (
            f"| {kv_dtype} | {count} | {before:.4f} | {after:.4f} | {after / before - 1:+.3%} "
            f"| {statistics.mean(kls):.1e} | {max(kls):.1e} | {errors.max():.3f} | {errors.mean():.4f} "
            f"| {statistics.mean(agree):.2%} |"
        )
        llm.close()


def _lse(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def _distributions(llm: LLM, ids: list[int]) -> np.ndarray:
    """Logits after each token but the last, float64, straight from the backend: [tokens - 1, V]."""
    from verispec.backends.native_backend import NativeBackend
    from verispec.backends.pass_builder import padded
    from verispec.backends.protocol import Pass, PassKind, TableUpdate, Wanted
    from verispec.kv import NUM_RESERVED

    backend = llm._backend
    count = len(ids) - 1
    positions = np.arange(count, dtype=np.int32)
    rows = padded(ids[:count], positions, positions + NUM_RESERVED, np.ones(count), shape=256)
    update = TableUpdate(np.ones(count, np.int32), positions, positions + NUM_RESERVED)
    pass_ = Pass(PassKind.CANONICAL, rows, Wanted(), update, head_shape=0)
    pass_ = backend.resident.take(pass_)  # type: ignore[attr-defined]
    if isinstance(backend, NativeBackend):
        hidden, _ = backend.forward(pass_)
        return backend.logits(0, hidden[:count]).values.astype(np.float64)
    hidden = backend._forward(pass_)[-1]  # type: ignore[attr-defined]
    return backend._models[0].logits(hidden[:count]).astype(np.float64)  # type: ignore[attr-defined]


def memory(bench: Bench) -> Iterator[str]:
    """RSS and start, each in a fresh process."""
    script = (
        "import time, resource; start = time.perf_counter()\n"
        "from verispec import LLM, SamplingParams\n"
        "import sys\n"
        "llm = LLM(sys.argv[1], prefix_cache=False); next(iter(llm.stream('Hello', SamplingParams(max_tokens=1))))\n"
        "first = time.perf_counter() - start\n"
        "loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "llm.generate([list(range(100, 200)) * 10] * 8, SamplingParams(max_tokens=8))\n"
        "print(f'{first:.2f} {loaded:.0f} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}')\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script, str(bench.path)], capture_output=True, text=True, check=True
        )
        first, loaded, peak = done.stdout.split()
        yield f"start to first token {first} s, RSS {loaded} MB after it, {peak} MB after eight prompts of 1000 tokens"


PARTS = {
    "greedy": greedy, "passes": passes, "overhead": overhead, "quoting": quoting, "accuracy": accuracy,
    "memory": memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", type=Path, help="text for the part `accuracy`")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    bench = Bench(options)
    isa = bench.load(bench.path)._backend.isa  # type: ignore[attr-defined]
    print(f"{cpu_name()}; {isa} kernels; {bench.options.threads} threads; Python {platform.python_version()}")
    for name in bench.options.parts:
        start = time.monotonic()
        print(f"\n## {name}: {PARTS[name].__doc__}\n")
        for line in PARTS[name](bench):
            print(line, flush=True)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
