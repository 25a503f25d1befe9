"""The native backend beside llama.cpp: speed, memory, start, and how far 15-bit activations are from float32.

    python -m venv .venv-llama && .venv-llama/bin/pip install xllamacpp      # once
    python bench/native.py --llama .venv-llama/bin/python [--formats Q4_1 Q4_0 Q8_0] [--parts speed ...]

Parts: speed (128 prompt and 128 new tokens, greedy, EOS ignored, 1, 8 and 32 in parallel, interleaved with llama.cpp in
a process of its own, same threads), decode (the same without the prompts), greedy (texts against numpy's), prompt (one
prompt of 128 tokens), passes, overhead, quoting (drafter ngram against none), accuracy (against the numpy backend on
the same dequantised weights; --text FILE), memory (RSS, start to first token).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from generate import prompts as make_prompts

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.model import resolve


class Llama:
    """llama.cpp behind a pipe."""

    def __init__(self, python: str, threads: int) -> None:
        worker = Path(__file__).with_name("llama_worker.py")
        self._process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._threads = threads

    def run(self, model: Path, prompts: list[list[int]], new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"model": str(model), "prompts": prompts, "new": new, "threads": self._threads}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        raise RuntimeError("llama.cpp has gone")


def convert(source: Path, target: Path, type_name: str) -> Path:
    """The same model with its layers in another type; embedding and norms stay as they are."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    wanted = gguf.GGMLQuantizationType[type_name]
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and tensor.tensor_type is gguf.GGMLQuantizationType.Q4_1:
            data = gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), wanted)
            writer.add_tensor(tensor.name, data, raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = resolve(options.model)
        self.folder = Path(tempfile.mkdtemp())
        self.models = {name: self.model(name) for name in options.formats}
        self.llama = Llama(options.llama, options.threads) if options.llama else None

    def model(self, type_name: str) -> Path:
        if type_name == "Q4_1":
            return self.path
        return convert(self.path, self.folder / f"{type_name}.gguf", type_name)

    def save(self, part: str, key: str, value: Any) -> None:
        out: Path = self.options.out
        known = json.loads(out.read_text()) if out.exists() else {}
        known.setdefault(part, {})[key] = value
        out.write_text(json.dumps(known, indent=1))

    def load(self, path: Path, **options: Any) -> LLM:
        return LLM(path, drafter="none", prefix_cache=False, threads=self.options.threads, **options)


def ours(llm: LLM, batch: list[list[int]], new: int, drafter: str = "none") -> float:
    start = time.perf_counter()
    done = llm.generate(batch, SamplingParams(max_tokens=new, ignore_eos=True, seed=0), drafter=drafter)
    assert all(len(c.token_ids) == new for c in done)
    return time.perf_counter() - start


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def speed(bench: Bench) -> Iterator[str]:
    """Tokens per second of generation, prompt included, in parallel; ratios against llama.cpp's best format."""
    yield _header("parallel", bench) + " ratio to its best |"
    yield "|---" * (len(bench.models) + 3) + "|"
    llm = bench.load(bench.path)
    for size in bench.options.parallel:
        batch = make_prompts(llm, "free", size, 128)
        found, theirs = _interleaved(bench, llm, batch, 128, count=size * 128)
        known = {name: rates for name, rates in theirs.items() if rates}
        ratio = "-"
        if known:
            best = max(known, key=lambda name: statistics.median(known[name]))
            ratio = f"{statistics.median(a / b for a, b in zip(found, known[best], strict=True)):.2f}"
        yield f"| {size} | {cell(found)} | {_cells(theirs)} | {ratio} |"
        bench.save("speed", str(size), {"verispec": found, **{f"llama.cpp {n}": rates for n, rates in known.items()}})


def _header(first: str, bench: Bench) -> str:
    return f"| {first} | verispec, the file as shipped | " + "".join(f"llama.cpp {f} | " for f in bench.models)


def _cells(theirs: dict[str, list[float]]) -> str:
    return " | ".join(cell(rates) if rates else "-" for rates in theirs.values())


def _interleaved(
    bench: Bench, llm: LLM, batch: list[list[int]], new: int, *, count: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Rates of verispec and of llama.cpp in turns; the first turn is a warm-up for both."""
    found: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in bench.models}
    for turn in range(bench.options.repeats + 1):
        mine = count / ours(llm, batch, new)
        rates = {}
        if bench.llama is not None:
            rates = {name: count / bench.llama.run(path, batch, new)["seconds"] for name, path in bench.models.items()}
        if turn:
            found.append(mine)
            for name, rate in rates.items():
                theirs[name].append(rate)
    return found, theirs


def decode(bench: Bench) -> Iterator[str]:
    """Decoding alone, in parallel: ours once all have their first token, theirs by llama.cpp's own rate of one slot."""
    llm = bench.load(bench.path)
    for size in (8, 32):
        batch = make_prompts(llm, "free", size, 128)
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in bench.models}
        for name, path in bench.models.items():
            for turn in range(bench.options.repeats + 1):
                done = llm.generate(batch, SamplingParams(max_tokens=128, ignore_eos=True), drafter="none")
                start = max(c.stats.first_token_time or 0.0 for c in done)
                end = max(c.stats.finish_time or 0.0 for c in done)
                times = [t for c in done for t in accumulate(c.stats.gaps, initial=c.stats.first_token_time or 0.0)]
                mine = sum(t > start for t in times) / (end - start)
                assert bench.llama is not None
                theirs = size * bench.llama.run(path, batch, 128)["timings"]["predicted_per_second"]
                if turn:
                    pairs[name].append((mine, theirs))
        for name, found in pairs.items():
            ours_, theirs_ = ([pair[i] for pair in found] for i in (0, 1))
            ratio = statistics.median(a / b for a, b in found)
            rates = f"verispec {cell(ours_)}, llama.cpp {name} {cell(theirs_)} tok/s"
            yield f"{size} in parallel: {rates}, ratio {ratio:.2f}"


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


def prompt(bench: Bench) -> Iterator[str]:
    """Prompt tokens per second, one prompt of 128 (and of 1024) tokens, one new token."""
    yield _header("prompt", bench)
    yield "|---" * (len(bench.models) + 2) + "|"
    llm = bench.load(bench.path)
    for length in (128, 1024):
        batch = [(make_prompts(llm, "free", 1, 128)[0] * 8)[:length]]
        found, theirs = _interleaved(bench, llm, batch, 1, count=length)
        yield f"| {length} | {cell(found)} | {_cells(theirs)} |"


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
        bench.save("passes", str(shape), best)


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def overhead(bench: Bench) -> Iterator[str]:
    """What Python and scheduling take of a step at batch 8."""
    llm = bench.load(bench.path)
    kernels = llm._backend._kernels  # type: ignore[attr-defined]
    inside, call = [0.0], kernels.call

    def timed(name: str, *arguments: object) -> None:
        start = time.perf_counter()
        call(name, *arguments)
        inside[0] += time.perf_counter() - start

    kernels.call = timed
    for size in (1, 8, 32):
        batch = make_prompts(llm, "free", size, 32)
        ours(llm, batch, 16)
        inside[0] = 0.0
        seconds = ours(llm, batch, 96)
        share = 1 - inside[0] / seconds
        yield f"batch {size}: {share:.1%} of the time outside of kernels, {seconds / 96 * 1e3:.1f} ms a step"


def quoting(bench: Bench) -> Iterator[str]:
    """Drafter ngram against none where the text quotes itself."""
    llm = bench.load(bench.path)
    for size in (1, 8):
        batch = make_prompts(llm, "quote", size, 128)
        pairs = [(ours(llm, batch, 128, "none"), ours(llm, batch, 128, "ngram")) for _ in range(bench.options.repeats)]
        plain, drafted = ([size * 128 / s for s in column] for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        yield f"quote prompts, batch {size}: none {cell(plain)}, ngram {cell(drafted)} tok/s, ratio {ratio:.2f}"


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
    from verispec.backends.protocol import Pass, PassKind, RowsBuilder, TableUpdate, Wanted
    from verispec.kv import NUM_RESERVED

    backend = llm._backend
    count = len(ids) - 1
    rows = RowsBuilder()
    for i in range(count):
        rows.add(token_id=ids[i], position=i, slot=NUM_RESERVED + i, seq_row=1, prefix_len=i + 1)
    positions = np.arange(count, dtype=np.int32)
    update = TableUpdate(np.ones(count, np.int32), positions, positions + NUM_RESERVED)
    pass_ = Pass(PassKind.CANONICAL, rows.build(256), Wanted(), update, head_shape=0)
    hidden = backend._forward(_prepared(backend, pass_))[:count]  # type: ignore[attr-defined]
    if hasattr(backend, "_kernels"):
        return backend._logits(0, hidden)[0].astype(np.float64)  # type: ignore[attr-defined]
    return backend._models[0].logits(hidden).astype(np.float64)  # type: ignore[attr-defined]


def _prepared(backend: Any, pass_: Any) -> Any:
    update = pass_.table_update
    backend._table[update.seq_rows, update.positions] = update.slots
    return pass_


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


def plot(results: dict[str, Any], path: Path) -> None:
    """Two panels: tokens per second in parallel, and T(M)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (a, b) = pyplot.subplots(1, 2, figsize=(11, 4))
    sizes = list(results["speed"])
    names = list(results["speed"][sizes[0]])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        medians = [statistics.median(results["speed"][size][name]) for size in sizes]
        a.bar([x + i * width for x in range(len(sizes))], medians, width, label=name)
    a.set_xticks([x + 0.4 - width / 2 for x in range(len(sizes))], sizes)
    a.set(title="SmolLM2-135M, 128 + 128 tokens, 2 cores", xlabel="sequences in parallel", ylabel="tokens per second")
    a.legend(fontsize=8)
    rows = [int(m) for m in results["passes"]]
    b.loglog(rows, [seconds * 1e3 for seconds in results["passes"].values()], marker="o")
    b.set_xticks(rows, rows)
    b.set(title="One pass, context 200", xlabel="rows", ylabel="ms")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


PARTS = {
    "speed": speed, "decode": decode, "greedy": greedy, "prompt": prompt, "passes": passes, "overhead": overhead,
    "quoting": quoting, "accuracy": accuracy, "memory": memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--llama", help="the Python of an environment with xllamacpp; without it only verispec runs")
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "Q4_0", "Q8_0"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", type=Path, help="text for the part `accuracy`")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("native.json"), help="results as JSON, updated part by part")
    parser.add_argument("--plot", type=Path, help="only draw what --out holds into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.out.read_text()), options.plot)
        return
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
