"""Decode-verify-rollback: what determinism costs, and when replaying regular tokens pays. Tables, JSON and a plot.

    python bench/dvr.py --prompts FILE.jsonl ... --trace FILE.csv --out dvr.json
    python bench/dvr.py --plot docs/plots/dvr.png --out dvr.json        # draws what was measured; needs matplotlib

Parts (`--parts`): shares (throughput against the share of deterministic requests, all requests there from the start),
single (the same at 100 % with 1, 8 and 16 running sequences), arrivals (requests arrive as in a trace), recomputed
(tokens recomputed against N, fast passes rounded to bf16), replay (cost of a replay against its rows), flips (how often
fast passes draw another token). Runs that are compared are interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the bf16 backend lives with the tests

from workload import Arrival, RunResult, percentile, play, read_prompts, read_trace

from tests.support.faulty_backends import Bf16FastPasses
from verispec import LLM, SamplingParams
from verispec.backends.blas import blas_name, cpu_name
from verispec.backends.cost import FLAT_COST
from verispec.engine import Engine, Request
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.turn import Step
from verispec.types import Draft

SHARES = (0, 2, 5, 10, 20, 50, 100)
Results = dict[str, Any]


class Bench:
    """A model and its prompts; engines come and go on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.llm = LLM(options.model, drafter="none", prefix_cache=False, backend="numpy")
        self.prompts = read_prompts(self.llm, options.prompts, count=options.requests, max_len=options.prompt_len)

    def engine(self, *, running: int, draft_len: int | None = None, family: tuple[int, ...] | None = None) -> Engine:
        return Engine(
            self.llm._backend,
            family=family or self.llm.calibration.family,
            cost=self.llm.calibration.cost,
            drafters=make_drafters(DraftSetup(draft_len=draft_len)),
            config=replace(self.llm._config, max_running=running, max_draft=draft_len),
        )

    def requests(self, share: int, drafter: str, *, new: int, temperature: float = 1.0) -> list[Request]:
        """The prompts; `share` per cent of them, spread evenly, are deterministic and use `drafter`."""
        count = len(self.prompts)
        num_exact = round(count * share / 100) if share else 0
        exact = {round((i + 0.5) * count / num_exact - 0.5) for i in range(num_exact)} if num_exact else set()
        made = []
        for i, prompt in enumerate(self.prompts):
            params = SamplingParams(
                max_tokens=new, ignore_eos=True, seed=i, temperature=temperature, deterministic=i in exact
            )
            made.append(Request(prompt, params, speculation=Speculation(drafter if i in exact else "none")))
        return made


def offline(engine: Engine, requests: list[Request]) -> RunResult:
    return play(engine, [Arrival(0.0, request) for request in requests])


def shares(bench: Bench) -> Iterator[str]:
    """Throughput against the share of deterministic requests, relative to none of them."""
    options = bench.options
    results: Results = {}
    for label, family in (("family of this machine", None), ("one canonical shape, 64 rows", (64,))):
        drafters = ("none", "decode", "auto")
        ratios: dict[tuple[str, int], list[float]] = {}
        speeds: list[float] = []
        for _ in range(options.repeats):
            base = max(
                offline(bench.engine(running=8, family=family), _all_fast(bench, drafter)).tokens_per_second
                for drafter in ("none", "suffix")
            )
            speeds.append(base)
            for share in SHARES[1:]:
                for drafter in drafters:
                    run = offline(
                        bench.engine(running=8, family=family), bench.requests(share, drafter, new=options.new)
                    )
                    ratios.setdefault((drafter, share), []).append(run.tokens_per_second / base)
        table = {d: {s: statistics.median(ratios[d, s]) for s in SHARES[1:]} for d in drafters}
        results[label] = {"non_deterministic": speeds, "ratios": table}
        yield f"\n{label}: 8 running, best all-non-deterministic {_cell(speeds)} tok/s"
        yield "| deterministic share | " + " | ".join(f"{s} %" for s in SHARES[1:]) + " |"
        yield "|---" * len(SHARES) + "|"
        for drafter in drafters:
            yield f"| `{drafter}` | " + " | ".join(f"{table[drafter][s]:.2f}" for s in SHARES[1:]) + " |"
    _save(bench, "shares", results)


def _all_fast(bench: Bench, drafter: str) -> list[Request]:
    return [replace(r, speculation=Speculation(drafter)) for r in bench.requests(0, "none", new=bench.options.new)]


def single(bench: Bench) -> Iterator[str]:
    """All requests deterministic against none of them, by the number of running sequences."""
    drafters = ("none", "suffix", "decode", "auto")
    results: Results = {}
    yield "\n| running | best non-deterministic tok/s | " + " | ".join(f"`{d}`" for d in drafters) + " | auto / best |"
    yield "|---|---|" + "---|" * (len(drafters) + 1)
    for running in (1, 8, 16):
        few = bench.options.requests if running > 1 else max(2, bench.options.requests // 6)
        ratios: dict[str, list[float]] = {d: [] for d in drafters}
        bases = []
        for _ in range(bench.options.repeats):
            base = max(
                offline(bench.engine(running=running), _all_fast(bench, d)[:few]).tokens_per_second
                for d in ("none", "suffix")
            )
            bases.append(base)
            for drafter in drafters:
                run = offline(bench.engine(running=running), bench.requests(100, drafter, new=bench.options.new)[:few])
                ratios[drafter].append(run.tokens_per_second / base)
        medians = {d: statistics.median(ratios[d]) for d in drafters}
        against_best = medians["auto"] / max(medians[d] for d in drafters if d != "auto")
        results[str(running)] = {"base": bases, "ratios": ratios, "auto_against_best": against_best}
        cells = " | ".join(f"{medians[d]:.2f}" for d in drafters)
        yield f"| {running} | {_cell(bases)} | {cells} | {against_best:.2f} |"
    _save(bench, "single", results)


def auto(bench: Bench) -> Iterator[str]:
    """Drafter auto against the best fixed choice, interleaved, 8 running."""
    yield "\n| canonical shapes | deterministic | `none` | `decode` | `auto` | `auto` / best |"
    yield "|---|---|---|---|---|---|"
    for family in (None, (64,)):
        for share in (50, 100):
            speeds: dict[str, list[float]] = {"none": [], "decode": [], "auto": []}
            for _ in range(bench.options.repeats):
                for drafter, found in speeds.items():
                    requests = bench.requests(share, drafter, new=bench.options.new)
                    found.append(offline(bench.engine(running=8, family=family), requests).tokens_per_second)
            medians = {name: statistics.median(found) for name, found in speeds.items()}
            ratio = medians["auto"] / max(medians["none"], medians["decode"])  # the better of two runs would be luck
            cells = " | ".join(f"{speed:.0f}" for speed in medians.values())
            yield f"| {family or 'audited'} | {share} % | {cells} | {ratio:.2f} |"


def arrivals(bench: Bench) -> Iterator[str]:
    """Requests as a trace has them; latency of those that asked for no determinism beside those that did."""
    options = bench.options
    times = read_trace(options.trace, len(bench.prompts))
    speed = offline(bench.engine(running=16), bench.requests(0, "none", new=options.new)).tokens_per_second
    gap = options.new / speed / options.utilisation  # seconds between arrivals at that share of the capacity
    results: Results = {"seconds_between_arrivals": gap, "capacity": speed}
    yield f"\n{len(times)} requests of {options.new} tokens, one per {gap:.2f} s on average; capacity {speed:.0f} tok/s"
    yield (
        "| deterministic | drafter | tok/s | ms between tokens p50 / p99, non-deterministic | longest stall ms "
        "| latency s p50 / p99, non-deterministic | deterministic |"
    )
    yield "|---|---|---|---|---|---|---|"
    for share in (0, 10, 50, 100):
        for drafter in ("none",) if not share else ("decode", "auto"):
            requests = bench.requests(share, drafter, new=options.new)
            run = play(bench.engine(running=16), [Arrival(t * gap, r) for t, r in zip(times, requests, strict=True)])
            row = _latencies(run, requests)
            results[f"{share} {drafter}"] = row
            gaps = " / ".join(f"{seconds * 1e3:.0f}" for seconds in row["gap"])
            yield (
                f"| {share} % | `{drafter}` | {row['speed']:.0f} | {gaps} "
                f"| {row['stall'] * 1e3:.0f} | {row['fast'][0]:.1f} / {row['fast'][1]:.1f} "
                f"| {row['exact'][0]:.1f} / {row['exact'][1]:.1f} |"
            )
    _save(bench, "arrivals", results)


def _latencies(run: RunResult, requests: list[Request]) -> Results:
    latency: dict[bool, list[float]] = {True: [], False: []}
    gaps, stall = [], 0.0
    for output, request in zip(run.outputs, requests, strict=True):
        stats = output.stats
        latency[request.params.deterministic].append((stats.finish_time or 0.0) - stats.arrival_time)
        if not request.params.deterministic:
            gaps += stats.gaps
            stall = max(stall, stats.longest_stall)
    return {
        "speed": run.tokens_per_second,
        "gap": [percentile(gaps, 0.5), percentile(gaps, 0.99)],
        "stall": stall,
        "fast": [percentile(latency[False], q) for q in (0.5, 0.99)],
        "exact": [percentile(latency[True], q) for q in (0.5, 0.99)],
    }


def recomputed(bench: Bench) -> Iterator[str]:
    """Tokens recomputed against N, where fast passes round their activations to bf16."""
    results: Results = {}
    llm, options = bench.llm, bench.options
    backend = Bf16FastPasses(llm._backend)
    yield "\n| N | tokens committed | replays | mismatches | recomputed | accepted per replay | tok/s |"
    yield "|---|---|---|---|---|---|---|"
    digests = set()
    for window_len in (16, 32, 64, 128):
        engine = Engine(
            backend, family=llm.calibration.family, cost=llm.calibration.cost,
            drafters=make_drafters(DraftSetup(draft_len=window_len)),
            config=replace(llm._config, max_running=8, max_draft=window_len),
        )  # fmt: skip
        run = offline(engine, bench.requests(100, "decode", new=options.long_new)[: options.requests // 2])
        totals = engine.totals
        digests.add(tuple(o.digest for o in run.outputs))
        results[str(window_len)] = {
            "committed": totals.committed, "replays": totals.replays, "mismatches": totals.mismatches,
            "recomputed": totals.recomputed, "fraction": totals.recomputed_fraction, "speed": run.tokens_per_second,
        }  # fmt: skip
        yield (
            f"| {window_len} | {totals.committed} | {totals.replays} | {totals.mismatches} "
            f"| {totals.recomputed} ({totals.recomputed_fraction:.1%}) | {totals.accepted / totals.replays:.1f} "
            f"| {run.tokens_per_second:.0f} |"
        )
    assert len(digests) == 1, "N changed a bit"
    _save(bench, "recomputed", results)


def replay(bench: Bench) -> Iterator[str]:
    """The canonical passes that replay windows, timed where the engine runs them."""
    results: Results = {}
    yield "\n| N | sequences | rows of a replay, median | ms, median | ms per row |"
    yield "|---|---|---|---|---|"
    for window_len, running in ((8, 1), (16, 1), (32, 1), (64, 1), (128, 1), (16, 4), (32, 4), (16, 8)):
        engine = bench.engine(running=running, draft_len=window_len)
        commit, timed = engine._committer.commit, []  # type: ignore[var-annotated]

        def note(step: Step, now: float, commit: Any = commit, timed: list[Any] = timed) -> Any:
            canonical = [t for t in step.turns if t.is_canonical and isinstance(t.draft, Draft)]
            rows = [t.num_pending + len(t.draft) for t in canonical if t.choice.is_replay]
            if rows and len(rows) == len(canonical) and not any(c.is_canonical for c in step.cohorts):
                timed.append((sum(rows), canonical[0].seconds))
            return commit(step, now)

        engine._committer.commit = note  # type: ignore[method-assign]
        new = window_len * 2 + 4
        offline(engine, bench.requests(100, "decode", new=new)[: 2 * running])
        rows, seconds = (statistics.median(column) for column in zip(*timed, strict=True))
        results[f"{window_len}x{running}"] = {"rows": rows, "seconds": seconds}
        yield f"| {window_len} | {running} | {rows:.0f} | {seconds * 1e3:.0f} | {seconds / rows * 1e3:.1f} |"
    _save(bench, "replay", results)


def flips(bench: Bench) -> Iterator[str]:
    """How fast passes differ from canonical ones: log-probability bits, drawn tokens, first divergence of a text."""
    results: Results = {}
    llm, options = bench.llm, bench.options
    yield (
        "\n| fast passes | temperature | tokens replayed (n) | other token drawn | texts that diverge "
        "| first divergence, median | log-probabilities with other bits | largest difference |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for label, backend in (("as they are, 1 row", llm._backend), ("rounded to bf16", Bf16FastPasses(llm._backend))):
        for temperature in (0.0, 1.0):
            row = _flips(bench, backend, temperature)
            results[f"{label}, T={temperature}"] = row
            bound = f" (under {3 / row['n']:.1e} at 95 %)" if not row["flips"] else f" ({row['flips'] / row['n']:.2%})"
            median = statistics.median(row["first"]) if row["first"] else "-"
            yield (
                f"| {label} | {temperature:g} | {row['n']} | {row['flips']}{bound} "
                f"| {len(row['first'])} of {options.requests} | {median} "
                f"| {row['other_bits']:.0%} | {row['largest']:.1e} |"
            )
    _save(bench, "flips", results)


def _flips(bench: Bench, backend: Any, temperature: float) -> Results:
    llm, new = bench.llm, bench.options.new

    def engine() -> Engine:
        # With flat costs no row is padded: where a pass of two rows costs less than one, a lone row would run as two.
        config = replace(llm._config, max_running=1)
        return Engine(backend, family=llm.calibration.family, cost=FLAT_COST, drafters=make_drafters(), config=config)

    replayed = engine()
    exact = offline(replayed, bench.requests(100, "decode", new=new, temperature=temperature))
    fast = offline(engine(), bench.requests(0, "none", new=new, temperature=temperature))
    first, other_bits, compared, largest = [], 0, 0, 0.0
    for a, b in zip(exact.outputs, fast.outputs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), None)
        first += [] if same is None else [same]
        for x, y in list(zip(a.logprobs, b.logprobs, strict=True))[1:same]:  # the first comes from a canonical pass
            compared += 1
            other_bits += struct.pack("<f", x.logprob) != struct.pack("<f", y.logprob)
            largest = max(largest, abs(x.logprob - y.logprob))
    totals = replayed.totals
    return {
        "n": totals.accepted + totals.mismatches,
        "flips": totals.mismatches,
        "first": first,
        "other_bits": other_bits / max(1, compared),
        "largest": largest,
    }


def plot(results: Results, path: Path) -> None:
    """Four panels: shares, N, rows of a replay, first divergence."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((a, b), (c, d)) = pyplot.subplots(2, 2, figsize=(11, 8))
    styles = {"none": "C0", "decode": "C1", "auto": "C2"}
    for (label, found), line in zip(results.get("shares", {}).items(), ("-", "--"), strict=False):
        for drafter, ratios in found["ratios"].items():
            xs = [int(s) for s in ratios]
            a.plot(xs, list(ratios.values()), styles[drafter] + line, marker="o", label=f"{drafter}, {label}")
    a.axhline(1.0, color="grey", linewidth=0.8)
    a.set(title="Throughput against all non-deterministic", xlabel="deterministic requests, %", ylim=(0, 1.15))
    a.legend(fontsize=7)
    found = results.get("recomputed", {})
    b.bar(list(found), [row["fraction"] * 100 for row in found.values()])
    b.set(title="Tokens recomputed (fast passes rounded to bf16)", xlabel="N", ylabel="%")
    points = sorted((row["rows"], row["seconds"] * 1e3) for row in results.get("replay", {}).values())
    c.plot(*zip(*points, strict=True), marker="o") if points else None
    c.set(title="Cost of a replay", xlabel="rows", ylabel="ms", ylim=(0, None))
    for label, row in results.get("flips", {}).items():
        if row["first"]:
            ordered = sorted(row["first"])
            d.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=label)
    d.set(title="First divergence of fast passes, texts that diverge", xlabel="token", ylabel="share", ylim=(0, 1.02))
    d.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def _save(bench: Bench, part: str, results: Results) -> None:
    path: Path = bench.options.out
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, part: results}, indent=1))


PARTS = {
    "single": single, "shares": shares, "auto": auto, "arrivals": arrivals, "recomputed": recomputed, "replay": replay,
    "flips": flips,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines; default: a few sentences")
    parser.add_argument("--trace", type=Path, help="CSV of arrival times; default: evenly spaced")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-len", type=int, default=96, help="prompts are cut to their last so many tokens")
    parser.add_argument("--new", type=int, default=48, help="tokens per request")
    parser.add_argument("--long-new", type=int, default=160, help="tokens per request of the part `recomputed`")
    parser.add_argument("--utilisation", type=float, default=0.7, help="load of the part `arrivals`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("dvr.json"), help="results as JSON, updated part by part")
    parser.add_argument("--plot", type=Path, help="only draw what --out holds into this PNG file")
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.out.read_text()), options.plot)
        return
    random.seed(0)
    bench = Bench(options)
    family = ", ".join(map(str, bench.llm.calibration.family))
    print(f"{cpu_name()}; {blas_name()}; Python {platform.python_version()}; {options.model}; family {family}")
    for name in options.parts:
        start = time.monotonic()
        print(f"\n## {name}: {PARTS[name].__doc__}")
        for line in PARTS[name](bench):
            print(line, flush=True)
        print(f"({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
