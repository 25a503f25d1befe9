"""Bursts that look their drafts up on a GPU: against single rounds and the host's loop, bit for bit; and what a round
takes. Needs torch, numpy and the package.

python -m tests.backends.cuda.lookup_check [FOLDER] prints one line per check; what differs must be 0 except in the
controls. Times are taken for FOLDER/lookup.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.backends.cuda.backend_check import FAILED, PARAMS, make, report
from tests.backends.cuda.chains_check import (
    LENGTHS,
    LIMITS,
    ROUNDS,
    SIZES,
    Drafted,
    by_the_host,
    differing,
    milliseconds,
)
from tests.support.passes import NO_UPDATE, RowsBuilder, Tape, joined
from verispec.backends.cuda.backend import CudaBackend, CudaModel
from verispec.backends.protocol import (
    FROM_DRAFT,
    Burst,
    Drafting,
    DrawWanted,
    Pass,
    PassKind,
    PassResult,
    TableUpdate,
    View,
    Wanted,
)
from verispec.kv import NUM_RESERVED
from verispec.model.architecture import Architecture, LayerSpec, Rope, expected_tensors
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import SamplingParams

# Few tokens, so that texts repeat themselves; the first of them stops.
TOKENS, BIAS = (3, 5, 7), ((3, 24.0), (5, 30.0), (7, 30.0))
TEXT_LENS = (9, 40, 20, 30, 130, 12, 33, 64, 10)
BY_A_VIEW = (2, 3)  # sequences that draft so, beside those that look up


class LookedUp(Drafted):
    """Sequences with texts of few tokens; two draft by a view, and one not at all."""

    def __init__(self, backend: CudaBackend, which: list[int], seed: int = 0) -> None:
        self.backend, self.ids, rng = backend, [], np.random.default_rng(seed)
        self.tapes = [Tape(backend, seq_row=1 + i, first_slot=200 * i) for i in range(len(which))]
        builder, updates = RowsBuilder(), []
        for i, (tape, count) in enumerate(zip(self.tapes, TEXT_LENS, strict=True)):
            params = SamplingParams(**PARAMS[which[i]] | {"temperature": 2.0, "logit_bias": BIAS})
            backend.bind(tape.seq_row, Sampler(params, SampleKey(i + 3, i % 3), 5, LIMITS[i] + count, TOKENS[:1]))
            self.ids.append(rng.choice(TOKENS, count).tolist())
            updates.append(tape.add_prompt_rows(builder, self.ids[i][:-1])[1])
            updates.append(table_update(tape.seq_row, tape.slot(0), count - 1, 190))
        pass_ = Pass(PassKind.CANONICAL, builder.build(len(builder)), Wanted(), joined(*updates), 0)
        backend.submit(pass_).result()

    def drafts(self, which: list[int]) -> tuple[Drafting, ...]:
        found = []
        for looks_up in (True, False):
            chosen = [s for s, i in enumerate(which) if LENGTHS[i] and (i in BY_A_VIEW) is not looks_up]
            lengths = np.array([LENGTHS[which[s]] for s in chosen], np.int32)
            view = View() if looks_up else View.without({1})
            part = Drafting(
                np.array(chosen, np.int32), lengths, 16, 16, 0, view, PassKind.CANONICAL, looks_up=looks_up
            )  # fmt: skip
            found += [part] if chosen else []
        return tuple(found)


def table_update(seq_row: int, first_slot: int, start: int, end: int) -> TableUpdate:
    positions = np.arange(start, end, dtype=np.int32)
    return TableUpdate(np.full(len(positions), seq_row, np.int32), positions, first_slot + positions)


def check_look_up(name: str, device) -> None:
    every = list(range(len(LENGTHS)))
    for label, which in (("plain", [0, 1, 2, 3, 4, 1, 1, 0, 1]), ("with penalties", [5, 6, 5, 1, 6, 0, 5, 6, 5])):
        what = f"{name} looked up, {ROUNDS} rounds {label}"
        host = LookedUp(make(name, device), which).rounds(every, ROUNDS, by_host=True)
        backend = make(name, device)
        backend._sampled_by_hand = None  # whoever calls the host fails
        found = LookedUp(backend, which).rounds(every, ROUNDS)
        total = sum(map(len, host))
        report(f"{what}: of the device and of the host", total, differing(found, host))
        single = LookedUp(make(name, device), which).round_by_round(ROUNDS)
        report(f"{what}: at once and one by one", total, differing(found, single))
        rounds = [r for i, own in enumerate(found) if i not in BY_A_VIEW for r in own]
        report(f"{what}: control: tokens accepted", total, sum(r.accepted for r in rounds), control=True)
        rejected = sum(r.accepted < len(r.draft) for r in rounds)
        report(f"{what}: control: rounds with a rejection", total, rejected, control=True)
        other = LookedUp(make(name, device), which, seed=1).rounds(every, ROUNDS)
        report(f"{what}: control: other texts", total, differing(found, other), control=True)


# Times, in the shapes of real models; and long contexts, whose scan takes every thread several turns.


class Timing(NamedTuple):
    """Milliseconds of a round, medians; `length` 0: nothing is drafted."""

    shape: str
    context: int
    sequences: int
    length: int
    device: float
    host: float


MOST, SLOTS_EACH, NUM_TIMED = 8, 4400, 16


def random_backend(device, name: str) -> CudaBackend:
    import torch

    layers, width, heads, kv_heads, head_dim, mlp, vocab = SIZES[name]
    layer = LayerSpec(rope=Rope(10000.0), query_scalar=head_dim)
    arch = Architecture(
        family="llama", layers=(layer,) * layers, hidden_size=width, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, mlp_size=mlp, vocab_size=vocab, context_len=SLOTS_EACH, norm_eps=1e-5, tied_head=False,
    )  # fmt: skip
    shapes = {tensor: spec.shape for tensor, spec in expected_tensors(arch).items()}
    generator = torch.Generator(device=device.name).manual_seed(0)

    def read(tensor: str):
        shape = shapes[tensor]
        if len(shape) == 1:
            return torch.ones(shape, device=device.name)
        values = torch.randn(shape, generator=generator, device=device.name, dtype=torch.bfloat16)
        return values * (1.0 if tensor == "embed" else shape[1] ** -0.5)

    return CudaBackend([CudaModel(arch, read)], device=device, num_slots=MOST * SLOTS_EACH, num_seq_rows=MOST)


def written(backend: CudaBackend, context: int, params: SamplingParams) -> np.ndarray:
    """Texts of so many tokens for all sequences. Their K/V is what stands there: it does not matter for times, and is
    the same for whoever is compared."""
    import torch

    tokens = np.random.default_rng(context).choice(TOKENS, (MOST, context)).astype(np.int32)
    updates = []
    for i, text in enumerate(tokens):
        first = NUM_RESERVED + SLOTS_EACH * i
        backend.bind(1 + i, Sampler(params, SampleKey(i, 0), context))
        updates.append(table_update(1 + i, first, 0, SLOTS_EACH - 1))
        backend._state.slot_tokens[first : first + context] = torch.from_numpy(text).to(backend._device.name)
    builder = RowsBuilder()
    builder.add(token_id=int(tokens[0, 0]), position=0, slot=NUM_RESERVED, seq_row=1, prefix_len=1)
    backend.submit(Pass(PassKind.CANONICAL, builder.build(1), Wanted(), joined(*updates), 0)).result()
    return tokens


def burst_of(tokens: np.ndarray, count: int, length: int) -> Pass:
    builder, first, context = RowsBuilder(), [], tokens.shape[1]
    for i in range(count):
        first.append(len(builder))
        for p, token in enumerate([int(tokens[i, -1]), *[FROM_DRAFT] * length], context - 1):
            slot = NUM_RESERVED + SLOTS_EACH * i + p
            builder.add(token_id=token, position=p, slot=slot, seq_row=1 + i, prefix_len=p + 1)
    every, num_rows = np.arange(count, dtype=np.int32), len(builder)
    drafts = (Drafting(every, np.full(count, length, np.int32), count, count, looks_up=True),) if length else ()
    burst = Burst(np.array(first, np.int32), np.full(count, NUM_TIMED - 1, np.int32), num_rows, drafts)
    wanted = Wanted(draw=DrawWanted(np.arange(num_rows, dtype=np.int32)))
    return Pass(PassKind.CANONICAL, builder.build(num_rows), wanted, NO_UPDATE, num_rows, burst=burst)


def time_rounds(device, name: str, results: list[Timing]) -> None:
    backend = random_backend(device, name)
    for context in (300, 4000):
        tokens = written(backend, context, SamplingParams(temperature=2.0, logit_bias=BIAS))
        pass_ = burst_of(tokens, MOST, 8)
        found, what = backend.submit(pass_).result(), f"{name}, contexts of {context}"
        hosts, accepted = list[PassResult](), int(np.maximum(found.burst.accepted, 0).sum())
        by_the_host(backend, pass_, hosts.append)
        different = sum(a.tobytes() != b.tobytes() for a, b in zip(found.burst, hosts[0].burst, strict=True))
        report(f"{what}: rounds of the device and of the host", 4, different)
        report(f"{what}: control: tokens accepted", NUM_TIMED * MOST, accepted, control=True)
        tokens = written(backend, context, SamplingParams(temperature=1.0))
        for count in (1, MOST):
            for length in (0, 4, 8, 16):
                pass_ = burst_of(tokens, count, length)
                alone = milliseconds(lambda p=pass_: backend.submit(p).result()) / NUM_TIMED
                host = by_the_host(backend, pass_) / NUM_TIMED if length == 8 else 0.0
                results.append(Timing(name, context, count, length, alone, host))
                print(
                    f"{what}, {count} sequences, chains of {length}: {alone:.3f} ms a round, host {host:.3f}",
                    flush=True,
                )


def main() -> None:
    import torch

    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    device, begin, results = Gpu(0, cache_dir() / "cuda"), time.perf_counter(), list[Timing]()
    with device.current():
        for name in ("llama", "qwen3"):
            check_look_up(name, device)
        print(f"checks: {time.perf_counter() - begin:.0f} s", flush=True)
        for name in ("smol", "8b") if len(sys.argv) > 1 else ():
            time_rounds(device, name, results)
            torch.cuda.empty_cache()
            print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1], "lookup.json").write_text(json.dumps([r._asdict() for r in results], indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(FAILED) if FAILED else "all equal")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
