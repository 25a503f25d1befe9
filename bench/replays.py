"""Decode-verify-rollback, two parts of bench/speculation.py: what deterministic traffic costs, and what is recomputed.

On a backend that is pure at every shape, and without cheaper weights, windows never differ: there the numpy backend can
stand in for arithmetics that err, fast passes rounded to bf16 or run on weights of few bits.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # backends that err live with the tests

from drafting import MOST_TRIES, num_prepared, ratio, typical
from workload import Arrival, RunResult, percentile, play, read_trace

from tests.support.faulty_backends import Bf16FastPasses, WrappedBackend, bf16
from verispec import SamplingParams
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.numpy_dense import Dense
from verispec.backends.numpy_model import NumpyModel
from verispec.backends.protocol import Backend
from verispec.engine import Engine, Request
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput

if TYPE_CHECKING:
    from speculation import Bench

SHARES = (0, 10, 50, 100)  # per cent of deterministic requests
SIMULATED = ("bf16", "int8", "int4")  # arithmetics of fast passes that the numpy backend can stand in for
NUM_ARRIVALS = 3  # runs of an arm in which requests arrive one by one
PLAIN = "all non-deterministic"
ARMS = {PLAIN: None, "none": "none", "decode": "decode", "auto": "auto"}  # what deterministic requests draft with
UTILISATION = 0.7  # of what the engine can do, where requests arrive one by one
GROUP = 32  # weights that share a scale, as in backends/cuda/quantize.py
SHRINKS = (1.0, 0.93, 0.86)


def requests_of(bench: Bench, share: int, drafter: str, *, temperature: float = 1.0) -> list[Request]:
    """The prompts; `share` per cent of them, spread evenly, are deterministic and use `drafter`."""
    prompts = bench.prompts.mixed(bench.options.requests)
    count = round(len(prompts) * share / 100)
    exact = {round((i + 0.5) * len(prompts) / count - 0.5) for i in range(count)}
    made = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=bench.options.tokens, ignore_eos=True, seed=i, temperature=temperature, deterministic=i in exact
        )
        speculation = Speculation(drafter if i in exact else "none")
        made.append(Request(prompt, params, speculation=speculation, is_streamed=False))
    return made


def digests_of(run: RunResult, requests: list[Request]) -> dict[int, str]:
    """Of deterministic requests."""
    pairs = enumerate(zip(run.outputs, requests, strict=True))
    return {i: output.digest for i, (output, request) in pairs if request.params.deterministic}


def played(bench: Bench, share: int, drafter: str, times: list[float]) -> tuple[RunResult, list[Request]]:
    requests = requests_of(bench, share, drafter)
    if times[-1]:  # whoever arrives one by one wants to see tokens as they come
        requests = [replace(request, is_streamed=True) for request in requests]
    engine = bench.llm.fresh_engine(prefix_cache=False)
    return play(engine, [Arrival(t, request) for t, request in zip(times, requests, strict=True)]), requests


def timed(bench: Bench, share: int, name: str, times: list[float]) -> tuple[RunResult, list[Request]]:
    """A run of an arm, once more where graphs were captured meanwhile. What earlier runs left behind is collected
    before, not in it."""
    drafter = ARMS[name]
    for _ in range(MOST_TRIES):
        before = num_prepared(bench.llm.backend)
        gc.collect()
        found = played(bench, share if drafter else 0, drafter or "none", times)
        if num_prepared(bench.llm.backend) == before:
            break
    return found


def replay_part(bench: Bench) -> None:
    """Throughput and latency by the share of deterministic requests: `decode` in any case, and what `auto` chooses."""
    options = bench.options
    exact: dict[int, str] = {}
    gap = 0.0  # seconds between arrivals, the same for all shares
    taken: dict[str, list[ReplayRound]] = {}
    arrived: dict[str, dict[str, dict[str, Any]]] = {}
    order = np.random.default_rng(0)
    for key, share, turn in bench.turns("replay", {f"{share} %": share for share in SHARES}):
        if not exact:
            exact, gap = warmed(bench)
        arms = arms_of(share, with_decode=turn <= options.decode_rounds)
        taken.setdefault(key, []).append(replay_round(bench, share, arms, order, exact))
        if turn == 2 or options.rounds == 1:  # what arrives one by one takes longer: everything once at first
            arrived[key] = arriving(bench, share, gap, order, exact)
        cells = replay_cells(taken[key], options.requests * options.tokens)
        for name, figures in arrived.get(key, {}).items():
            cells[name]["arrivals"] = figures
        bench.results.add(key, {"part": "replay", "model": bench.name, "share": share, "arms": cells})


def warmed(bench: Bench) -> tuple[dict[int, str], float]:
    """Every arm once, all at once and arriving: graphs are captured in these. Returns what deterministic requests get,
    and seconds between arrivals."""
    at_once = [0.0] * bench.options.requests
    exact = digests_of(*played(bench, 100, "none", at_once))
    for name in ARMS:
        timed(bench, 100, name, at_once)
    gap = timed(bench, 0, PLAIN, at_once)[0].seconds / bench.options.requests / UTILISATION
    for name in ARMS:
        timed(bench, 100, name, arrival_times(bench, gap))
    return exact, gap


def arms_of(share: int, *, with_decode: bool) -> list[str]:
    """Where nobody is deterministic, nobody drafts."""
    return [name for name in ARMS if name == PLAIN or (share and (with_decode or name != "decode"))]


class ReplayRound(NamedTuple):
    """Seconds of the arms of a round, and of all non-deterministic requests before and after them."""

    before: float
    arms: dict[str, float]
    after: float

    def ratio(self, name: str) -> float:
        """How fast an arm was against the runs around it; of those the second against the first, which says how far a
        figure may be off."""
        return self.before / self.after if name == PLAIN else (self.before + self.after) / 2 / self.arms[name]


def replay_round(
    bench: Bench, share: int, arms: Sequence[str], order: np.random.Generator, exact: dict[int, str]
) -> ReplayRound:
    """All at once, the arms in any order, between two runs of all non-deterministic requests."""
    found = []
    names = [PLAIN, *order.permutation([name for name in arms if name != PLAIN]).tolist(), PLAIN]
    for name in names:
        run, requests = timed(bench, share, name, [0.0] * bench.options.requests)
        _compare(exact, run, requests, f"{name}, {share} %")
        found.append(run.seconds)
    return ReplayRound(found[0], dict(zip(names[1:-1], found[1:-1], strict=True)), found[-1])


def replay_cells(rounds: Sequence[ReplayRound], num_tokens: int) -> dict[str, dict[str, Any]]:
    """What is kept of each arm: ratios are of rounds that it was in, the median, with its interval over rounds."""
    cells = {}
    for name in (name for name in ARMS if name == PLAIN or any(name in each.arms for each in rounds)):
        own = [each for each in rounds if name == PLAIN or name in each.arms]
        seconds = [s for each in own for s in ((each.before, each.after) if name == PLAIN else (each.arms[name],))]
        cells[name] = {
            "tokens_per_second": num_tokens / float(np.median(seconds)), "rounds": len(own),
            "speed_up": typical([each.ratio(name) for each in own]),
        }  # fmt: skip
    return cells


def arrival_times(bench: Bench, gap: float) -> list[float]:
    """As in the trace, `gap` seconds apart on average."""
    return [t * gap for t in read_trace(bench.options.trace, bench.options.requests)]


def arriving(
    bench: Bench, share: int, gap: float, order: np.random.Generator, exact: dict[int, str]
) -> dict[str, dict[str, Any]]:
    """What came of each arm where requests arrive as in the trace; arms take turns, in any order."""
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(1, 1 + NUM_ARRIVALS):
        arms = arms_of(share, with_decode=turn <= bench.options.decode_rounds)
        for name in order.permutation(arms).tolist():
            run, requests = timed(bench, share, name, arrival_times(bench, gap))
            _compare(exact, run, requests, f"{name}, {share} %, arrivals")
            found.setdefault(name, []).append({"tokens_per_second": run.tokens_per_second} | _latencies(run, requests))
    return {name: {"seconds_between": gap, **ranges(runs)} for name, runs in found.items()}


def ranges(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Median, least and most of every figure; all runs have the same ones."""
    values = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: [float(np.median(each)), min(each), max(each)] for name, each in values.items()}


def _compare(exact: dict[int, str], run: RunResult, requests: list[Request], what: str) -> None:
    if any(exact[i] != digest for i, digest in digests_of(run, requests).items()):
        raise SystemExit(f"{what}: a deterministic request has other tokens")


def _latencies(run: RunResult, requests: list[Request]) -> dict[str, float]:
    """Seconds, p50 and p99, of deterministic requests and of others: from arrival to end, and between tokens."""
    values: dict[str, list[float]] = {}
    for output, request in zip(run.outputs, requests, strict=True):
        kind = "deterministic" if request.params.deterministic else "other"
        finished = output.stats.finish_time or 0.0
        values.setdefault(f"{kind} latency", []).append(finished - output.stats.arrival_time)
        values.setdefault(f"{kind} gap", []).extend(output.stats.gaps)
    return {f"{name} p{q}": percentile(each, q / 100) for name, each in values.items() if each for q in (50, 99)}


def recomputed_part(bench: Bench) -> None:
    """What `decode` accepts and recomputes by N, and that its output is always the one of `none`."""
    options, llm = bench.options, bench.llm
    wanted = {
        f"{kind} | {temperature:g} | {window_len}": (kind, temperature, window_len)
        for kind in kinds_of(bench)
        for temperature in options.temperature
        for window_len in options.windows
    }
    exact: dict[float, dict[int, str]] = {}
    backend, made = llm.backend, ""
    for key, (kind, temperature, window_len), _ in bench.turns("recomputed", wanted, most=1):
        if temperature not in exact:
            requests = requests_of(bench, 100, "none", temperature=temperature)
            exact[temperature] = digests_of(offline(llm.fresh_engine(prefix_cache=False), requests), requests)
        if made != kind:
            backend, made = erring(llm.backend, kind), kind
        engine = Engine(
            backend, family=llm.calibration.family, cost=llm.calibration.cost,
            drafters=make_drafters(DraftSetup(draft_len=window_len, backend=backend)),
            config=replace(llm._config, max_draft=window_len, prefix_cache=False, max_running=8),
        )  # fmt: skip
        requests = requests_of(bench, 100, "decode", temperature=temperature)
        run = offline(engine, requests)
        _compare(exact[temperature], run, requests, f"{kind}, N = {window_len}")
        bench.results.add(key, {
            "part": "recomputed", "model": bench.name, "kind": kind, "temperature": temperature, "N": window_len,
            **replayed(run.outputs), "tokens_per_second": run.tokens_per_second,
        })  # fmt: skip


def replayed(outputs: Sequence[SampleOutput]) -> dict[str, Any]:
    """What became of their windows: counts, and shares with their intervals over requests. `acceptance` is of tokens
    that were compared: all up to the first that differs."""
    stats = [output.stats for output in outputs]
    drawn = zip(stats, (len(output.token_ids) for output in outputs), strict=True)
    return {
        "committed": sum(len(output.token_ids) for output in outputs),
        **{name: sum(getattr(s, name) for s in stats) for name in ("replays", "mismatches", "recomputed")},
        "recomputed_share": ratio((s.recomputed, s.recomputed + num_tokens) for s, num_tokens in drawn),
        "acceptance": ratio((s.accepted, s.accepted + s.mismatches) for s in stats),
    }


def offline(engine: Engine, requests: list[Request]) -> RunResult:
    return play(engine, [Arrival(0.0, request) for request in requests])


def kinds_of(bench: Bench) -> Iterator[str]:
    """Arithmetics of fast passes: the backend's own, and others on the numpy backend."""
    yield f"weights of {bench.options.fast_weights}" if bench.options.fast_weights else "as they are"
    if isinstance(bench.llm.backend, NumpyBackend):
        yield from bench.options.simulated


def erring(backend: Backend, kind: str) -> Backend:
    """The backend, its fast passes in another arithmetic."""
    if kind == "bf16":
        return Bf16FastPasses(backend)  # type: ignore[arg-type]
    return FewBits(backend, int(kind[3:])) if kind in ("int8", "int4") else backend


class FewBits(Bf16FastPasses):
    """Fast passes on weights of few bits, rounded as backends/cuda/quantize.py rounds them; the embedding is exact."""

    def __init__(self, inner: Any, bits: int) -> None:
        WrappedBackend.__init__(self, inner)
        self._rounded = [_in_bits(model, bits) for model in inner._models]


def _in_bits(model: NumpyModel, bits: int) -> NumpyModel:
    found = copy(model)
    found.layers = [copy(layer) for layer in model.layers]
    for layer in found.layers:
        layer.qkv, layer.o = rounded(layer.qkv, bits), rounded(layer.o, bits)
        layer.gate_up, layer.down = rounded(layer.gate_up, bits), rounded(layer.down, bits)
    found._head = rounded(model._head, bits)
    found.embed = model.embed  # type: ignore[method-assign]
    return found


def rounded(dense: Dense, bits: int) -> Dense:
    """The layer with weights of so many bits: a bf16 scale for every 32, the best of three."""
    found = copy(dense)
    found._blocks = np.empty_like(dense._blocks)
    for block, out in zip(dense._blocks, found._blocks, strict=True):  # [in, COLUMN_BLOCK]
        groups = block.reshape(-1, GROUP, block.shape[1])
        half = 2 ** (bits - 1)
        at = np.abs(groups).argmax(axis=1, keepdims=True)
        extreme = np.take_along_axis(groups, at, axis=1) / -half
        tries = []
        for shrink in SHRINKS:
            scale = bf16(extreme * np.float32(shrink))
            scale = np.where(scale == 0, np.float32(1), scale)
            tries.append(np.clip(np.rint(groups / scale), -half, half - 1) * scale)
        errors = np.stack([((t - groups) ** 2).sum(axis=1, keepdims=True) for t in tries])
        best = errors.argmin(axis=0)
        out[:] = np.choose(np.broadcast_to(best, groups.shape), tries).reshape(block.shape)
    return found
