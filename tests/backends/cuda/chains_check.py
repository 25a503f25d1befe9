"""Bursts of drafted rounds on a GPU, without the host: against single rounds and against the host's loop, bit for bit;
draws with filters; and what it all takes. Needs torch, numpy and the package.

python -m tests.backends.cuda.chains_check [FOLDER] prints one line per check; what differs must be 0 except in the
controls. Times are taken for FOLDER/chains.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.backends.cuda.backend_check import FAILED, PROMPT, Driven, make, report
from tests.support.passes import NO_UPDATE, RowsBuilder
from verispec.backends.cuda.backend import CudaBackend, CudaModel
from verispec.backends.protocol import (
    FROM_DRAFT,
    Burst,
    Drafting,
    DrawWanted,
    Pass,
    PassKind,
    PassResult,
    TopKWanted,
    View,
    Wanted,
)
from verispec.model.architecture import Architecture, LayerSpec, Rope, expected_tensors
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import SamplingParams

LENGTHS = (3, 1, 3, 2, 3, 0, 2, 3, 3)  # the most that each sequence drafts
ROUNDS = 6
WAYS = {
    "plain": [0, 1, 2, 3, 4, 1, 1, 0, 1],  # by number of the parameters
    "with penalties, bias and least lengths": [5, 6, 7, 5, 6, 7, 0, 1, 2],
}
LIMITS = [200, 200, 200, 200, 200, 12, 200, 11, 9]


class Round(NamedTuple):
    draft: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    logprobs: bytes


class Drafted(Driven):
    """Sequences that draft by a view, or by a second model that has computed all but their last two tokens."""

    def __init__(self, backend: CudaBackend, which: list[int], drafter: str) -> None:
        super().__init__(backend, which, LIMITS)
        self.drafter, self.ids = drafter, [[*t.token_ids, last] for t, last in zip(self.tapes, self.last, strict=True)]
        if drafter == "model":
            builder = RowsBuilder()
            for tape in self.tapes:
                for p, token in enumerate(tape.token_ids[:-1]):
                    builder.add(
                        token_id=token, position=p, slot=tape.slot(p), seq_row=tape.seq_row, prefix_len=p + 1
                    )  # fmt: skip
            rows = builder.build(len(builder))
            backend.submit(Pass(PassKind.CANONICAL, rows, Wanted(), NO_UPDATE, 0, store=1)).result()

    def submit(self, which: list[int], num_rounds: int, *, by_host: bool = False) -> PassResult:
        """Some sequences; what is wanted beside makes the host take part in every round."""
        builder, first = RowsBuilder(), []
        for i in which:
            tape, start = self.tapes[i], len(self.ids[i]) - 1
            first.append(len(builder))
            for p, token in enumerate([self.ids[i][-1], *[FROM_DRAFT] * LENGTHS[i]], start):
                builder.add(token_id=token, position=p, slot=tape.slot(p), seq_row=tape.seq_row, prefix_len=p + 1)
        at, drawn = np.array(first, np.int32), np.arange(len(builder), dtype=np.int32)
        burst = Burst(at, np.full(len(at), num_rounds - 1, np.int32), 64, self.drafts(which))
        wanted = Wanted(draw=DrawWanted(drawn), top_k=TopKWanted(at[:1], 2) if by_host else None)
        pass_ = Pass(PassKind.CANONICAL, builder.build(64), wanted, NO_UPDATE, 64, burst=burst)
        return self.backend.submit(pass_).result()

    def drafts(self, which: list[int]) -> tuple[Drafting, ...]:
        drafting = np.array([s for s, i in enumerate(which) if LENGTHS[i]], np.int32)
        store, view = (1, View()) if self.drafter == "model" else (0, View.without({1}))
        part = Drafting(
            drafting, np.array([LENGTHS[which[s]] for s in drafting], np.int32), 32, 16, store, view,
            PassKind.CANONICAL, -3.0 if self.drafter == "skip" else -np.inf,
        )  # fmt: skip
        return (part,)

    def rounds(self, which: list[int], num_rounds: int, *, by_host: bool = False) -> list[list[Round]]:
        """The same, cut into rounds; sequences move on."""
        result, found, row = self.submit(which, num_rounds, by_host=by_host), [], 0
        draw, burst = result.draw, result.burst
        for s, i in enumerate(which):
            own, count, at = [], 1 + int(burst.accepted[s, 0]), 0
            tokens = [*draw.token_ids[row : row + count].tolist(), *burst.token_ids[s].tolist()]
            values = np.concatenate([draw.logprobs[row : row + count], burst.logprobs[s]])
            row += 1 + LENGTHS[i]
            for drafted, accepted in zip(burst.drafts[s].tolist(), burst.accepted[s].tolist(), strict=True):
                end = at + accepted + 1
                if accepted >= 0:
                    draft = tuple(t for t in drafted if t >= 0)
                    own.append(Round(draft, accepted, tuple(tokens[at:end]), values[at:end].tobytes()))
                at = end
            self.ids[i] += [t for r in own for t in r.tokens]
            found.append(own)
        return found

    def round_by_round(self, num_rounds: int) -> list[list[Round]]:
        found: list[list[Round]] = [[] for _ in self.tapes]
        going = list(range(len(self.tapes)))
        for _ in range(num_rounds):
            for i, rounds in zip(list(going), self.rounds(going, 1), strict=True) if going else ():
                found[i] += rounds
                if self.backend._state.records[1 + i, 8] < 0:  # kNext: it has ended
                    going.remove(i)
        return found


def check_chains(name: str, device) -> None:
    every = list(range(len(LENGTHS)))
    for drafter in ("skip", "model"):
        for label, which in WAYS.items():
            what = f"{name} {drafter}, {ROUNDS} rounds {label}"
            host = Drafted(make(name, device), which, drafter).rounds(every, ROUNDS, by_host=True)
            backend = make(name, device)
            backend._sampled_by_hand = None  # whoever calls the host fails
            found = Drafted(backend, which, drafter).rounds(every, ROUNDS)
            total = sum(map(len, host))
            report(f"{what}: of the device and of the host", total, differing(found, host))
            single = Drafted(make(name, device), which, drafter).round_by_round(ROUNDS)
            report(f"{what}: at once and one by one", total, differing(found, single))
            rounds = [r for own in found for r in own]
            report(f"{what}: control: tokens accepted", total, sum(r.accepted for r in rounds), control=True)
            if name == "gemma3":  # with random weights it repeats its token, so that nothing is ever rejected
                continue
            rejected = sum(r.accepted < len(r.draft) for r in rounds)
            report(f"{what}: control: rounds with a rejection", total, rejected, control=True)
            other = Drafted(make(name, device), which[1:] + which[:1], drafter).rounds(every, ROUNDS)
            report(f"{what}: control: other parameters", total, differing(found, other), control=True)


def differing(found: list[list[Round]], expected: list[list[Round]]) -> int:
    return sum(
        sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
        for one, other in zip(found, expected, strict=True)
    )


# Times


SIZES = {  # layers, width, heads, K/V heads, their size, MLP, vocabulary
    "smol": (30, 576, 9, 3, 64, 1536, 49152),
    "qwen1.5b": (28, 1536, 12, 2, 128, 8960, 151936),
    "qwen0.5b": (24, 896, 14, 2, 64, 4864, 151936),
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),
}


def random_backend(device, name: str, second: str = "") -> CudaBackend:
    """Random weights in the shapes of a model, and of a second one: a quarter of the layers, unless it is named."""
    import torch

    def model(sizes: tuple[int, ...], seed: int) -> CudaModel:
        num_layers, width, heads, kv_heads, head_dim, mlp, vocab = sizes
        layer = LayerSpec(rope=Rope(10000.0), query_scalar=head_dim)
        arch = Architecture(
            family="llama", layers=(layer,) * num_layers, hidden_size=width, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=head_dim, mlp_size=mlp, vocab_size=vocab, context_len=1024, norm_eps=1e-5, tied_head=False,
        )  # fmt: skip
        shapes = {name: spec.shape for name, spec in expected_tensors(arch).items()}
        generator = torch.Generator(device=device.name).manual_seed(seed)

        def read(tensor: str):
            shape = shapes[tensor]
            if len(shape) == 1:
                return torch.ones(shape, device=device.name)
            scale = 1.0 if tensor == "embed" else shape[1] ** -0.5
            return torch.randn(shape, generator=generator, device=device.name, dtype=torch.bfloat16) * scale

        return CudaModel(arch, read)

    layers, *rest = SIZES[name]
    models = [model(SIZES[name], 0), model(SIZES[second] if second else (max(1, layers // 4), *rest), 1)]
    return CudaBackend(models, device=device, num_slots=33 * 600, num_seq_rows=33)


class Timing(NamedTuple):
    """Milliseconds of a round, medians."""

    shape: str
    sequences: int
    what: str
    device: float
    host: float


def time_rounds(device, name: str, results: list[Timing], num_rounds: int = 16, length: int = 4) -> None:
    """Sequences at a context of 300: plain rounds, rounds with penalties, and rounds that draft."""
    backend = random_backend(device, name)
    num_layers = backend._architectures[0].num_layers
    half = View.without(range(1, num_layers, 2), range(1, num_layers, 2))
    for count in (1, 8):
        tapes = prompted(backend, count)
        for what, drafts in (
            ("plain", None), ("penalties", None), ("skip, half of the layers", (0, half)),
            ("a second model", (1, View())),
        ):  # fmt: skip
            params = SamplingParams(temperature=1.0, repetition_penalty=1.1 if what == "penalties" else 1.0)
            for i in range(count):
                backend.bind(1 + i, Sampler(params, SampleKey(i, 0)))
            pass_ = round_pass(tapes, num_rounds, length, drafts)
            alone = milliseconds(lambda p=pass_: backend.submit(p).result()) / num_rounds
            host = by_the_host(backend, pass_) / num_rounds
            results.append(Timing(name, count, what, alone, host))
            print(f"{name}, {count} sequences, {what}: {alone:.3f} ms a round, with the host {host:.3f}", flush=True)


def by_the_host(backend: CudaBackend, pass_: Pass, take: Callable[[PassResult], object] = lambda result: None) -> float:
    """The same by the loop of `backends/rounds.py`."""
    started = backend._started
    backend._started = lambda p, lane: None if p.burst is not None else started(p, lane)
    took = milliseconds(lambda: take(backend.submit(pass_).result()))
    backend._started = started
    return took


def prompted(backend: CudaBackend, count: int, start: int = 300) -> list[int]:
    """Sequences 1.. whose tables reach far enough, and prompts in both stores; returns their first slots."""
    from verispec.backends.protocol import TableUpdate

    for i in range(count):
        positions = np.arange(600, dtype=np.int32)
        slots = 2 + 600 * i + positions
        backend.bind(1 + i, Sampler(SamplingParams(), SampleKey(i, 0)))
        for store in (0, 1):
            builder = RowsBuilder()
            for p in range(start):
                builder.add(token_id=PROMPT[p], position=p, slot=int(slots[p]), seq_row=1 + i, prefix_len=p + 1)
            update = TableUpdate(np.full(600, 1 + i, np.int32), positions, slots.astype(np.int32))
            pass_ = Pass(PassKind.CANONICAL, builder.build(start), Wanted(), update, 0, store=store)
            backend.submit(pass_).result()
    return [2 + 600 * i for i in range(count)]


def round_pass(first_slots: list[int], num_rounds: int, length: int, drafts: tuple[int, View] | None) -> Pass:
    builder, first, start = RowsBuilder(), [], 300
    for i, slot in enumerate(first_slots):
        first.append(len(builder))
        for p, token in enumerate([PROMPT[i], *[FROM_DRAFT] * (length if drafts else 0)], start):
            builder.add(token_id=token, position=p, slot=slot + p, seq_row=1 + i, prefix_len=p + 1)
    at, count = np.array(first, np.int32), len(first_slots)
    parts = ()
    if drafts:
        every = np.arange(count, dtype=np.int32)
        parts = (Drafting(every, np.full(count, length, np.int32), 2 * count, count, drafts[0], drafts[1]),)
    burst = Burst(at, np.full(count, num_rounds - 1, np.int32), len(builder), parts)
    drawn = np.arange(len(builder), dtype=np.int32)
    wanted = Wanted(draw=DrawWanted(drawn))
    return Pass(PassKind.CANONICAL, builder.build(len(builder)), wanted, NO_UPDATE, len(builder), burst=burst)


def milliseconds(work: Callable[[], object], times: int = 5) -> float:
    work()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def time_filters() -> None:
    """The draw with filters over large vocabularies."""
    import torch

    from bench.gpu import PARAMETERS, microseconds
    from tests.backends.cuda.draw_check import device_parameters
    from verispec.backends.cuda.device import Gpu
    from verispec.backends.cuda.drawing import DrawKernels

    for vocab in (49152, 151936, 262144):
        kernels = DrawKernels(vocab, 64)
        logits = torch.randn(64, vocab, device="cuda") * 3
        for name, chosen in (("top-k 40", {"top_k": 40}), ("top-p 0.9", {"top_p": 0.9}), ("none", {})):
            for rows in (1, 8, 64):
                inputs = device_parameters([PARAMETERS | chosen | {"seed": i} for i in range(rows)])
                work = partial(kernels.draw, logits, inputs, rows, filters=bool(chosen))
                graph = Gpu().capture(work)
                print(f"draw, {name}, vocabulary {vocab}, {rows} rows: {microseconds(graph):.0f} us", flush=True)


def main() -> None:
    import torch

    from tests.backends.cuda.draw_check import check_draws
    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    device, begin, results = Gpu(0, cache_dir() / "cuda"), time.perf_counter(), list[Timing]()
    with device.current():
        for name in ("llama", "gemma3"):
            check_chains(name, device)
            print(f"{time.perf_counter() - begin:.0f} s", flush=True)
        with np.errstate(all="ignore"):
            report("draws with filters, of the device and of numpy", 720, check_draws())
        made = device.num_branches
        report("control: conditional nodes of captured chains", made, made, control=True)
        print(f"checks: {time.perf_counter() - begin:.0f} s", flush=True)
        if len(sys.argv) > 1:
            time_filters()
        for name in ("smol", "qwen1.5b", "8b") if len(sys.argv) > 1 else ():
            time_rounds(device, name, results)
            torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        Path(sys.argv[1], "chains.json").write_text(json.dumps([r._asdict() for r in results], indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(FAILED) if FAILED else "all equal")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
