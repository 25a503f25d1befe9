"""The CUDA backend on a GPU through the engine's protocol: passes cut in many ways, trees, views, stores, bursts, and
the device's draws against the host's. Needs torch, numpy and the package.

python -m tests.backends.cuda.backend_check prints one line per check; what differs must be 0 except in the controls.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from tests.support.passes import NO_UPDATE, RowsBuilder, Tape, joined, run_logprobs
from verispec.backends.cuda import tiny
from verispec.backends.cuda.backend import CudaBackend, CudaModel
from verispec.backends.protocol import (
    FROM_STATE,
    Burst,
    DrawWanted,
    Noise,
    Pass,
    PassKind,
    TableUpdate,
    TopKWanted,
    View,
    Wanted,
)
from verispec.kv import NUM_RESERVED
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import NO_PARENT, Draft, SamplingParams

RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, 320, 300).tolist()  # longer than a span
FAILED: list[str] = []


def report(name: str, compared: int, different: int, *, control: bool = False) -> None:
    bad = (different == 0) if control else (different != 0)
    if bad:
        FAILED.append(name)
    print(f"{'BAD ' if bad else ''}{name}: {different} of {compared} differ", flush=True)


def rows_differ(a: np.ndarray, b: np.ndarray) -> int:
    return int((np.ascontiguousarray(a).view(np.int32) != np.ascontiguousarray(b).view(np.int32)).any(-1).sum())


def make(name: str, device, *, models: int = 2, poison: int | list[int] | None = None) -> CudaBackend:
    source = tiny.tiny_model(name)
    tensors = {k: v.copy() for k, v in source.tensors.items()}
    if poison is not None:
        tensors["embed"][poison] = np.inf
    other = {k: v * np.float32(0.9) for k, v in tensors.items()}
    readers = [tensors.__getitem__, other.__getitem__]
    return CudaBackend(
        [CudaModel(source.arch, read) for read in readers[:models]], device=device, num_slots=2000, num_seq_rows=16,
        max_tail=32, second_weights="",
    )  # fmt: skip


def check_passes(name: str, device) -> None:
    backend = make(name, device)
    whole = Tape(backend, seq_row=1, first_slot=0)
    expected = whole.feed(PROMPT, shape=512)
    for seq_row, chunks in ((2, (1, 3, 16, 60, 220)), (3, (100, 7, 9, 8, 176)), (4, (1,) * 300)):
        tape = Tape(backend, seq_row=seq_row, first_slot=310 * (seq_row - 1))
        parts = [tape.feed(PROMPT[len(tape.token_ids) :][:n], shape=n) for n in chunks]
        report(f"{name} prompt in {len(chunks)} parts", 300, rows_differ(np.concatenate(parts), expected))
        kv = [backend.kv(0, np.array([t.slot(p) for p in range(300)])) for t in (whole, tape)]
        for part in range(2):
            report(f"{name} its {'KV'[part]}", 300, int((kv[0][part] != kv[1][part]).any(axis=(0, 2, 3)).sum()))
    changed = Tape(backend, seq_row=5, first_slot=1300)
    other = changed.feed([PROMPT[0] + 1, *PROMPT[1:]], shape=512)
    report(f"{name} control: another first token", 300, rows_differ(other, expected), control=True)
    check_trees(name, backend)
    check_views_and_stores(name, backend)


def check_trees(name: str, backend: CudaBackend) -> None:
    parents = tuple(int(RNG.integers(NO_PARENT, i)) if i else NO_PARENT for i in range(20))
    draft = Draft(tuple(RNG.integers(0, 320, 20).tolist()), parents)
    tape = Tape(backend, seq_row=6, first_slot=0)
    tape.feed(PROMPT[:250], shape=256)
    rows = RowsBuilder()
    found = run_logprobs(tape, rows, tape.add_draft_rows(rows, draft, scratch=1700), NO_UPDATE, 32)
    different = 0
    for node in range(len(draft)):
        plain = Tape(backend, seq_row=7, first_slot=1300)
        plain.feed(PROMPT[:250], shape=256)
        for i in draft.path_to(node):
            expected = plain.feed([draft.token_ids[i]], shape=1)
        different += rows_differ(found[node : node + 1], expected)
    report(f"{name} tree rows and plain rows", len(draft), different)


def check_views_and_stores(name: str, backend: CudaBackend) -> None:
    tape = Tape(backend, seq_row=1, first_slot=0)
    expected = tape.feed(PROMPT[:20], shape=32)
    skipped = Tape(backend, seq_row=2, first_slot=400, view=View.without({0}, {1})).feed(PROMPT[:20], shape=32)
    report(f"{name} control: skipped sub-layers", 20, rows_differ(skipped, expected), control=True)
    one_by_one = Tape(backend, seq_row=3, first_slot=800, view=View.without({0}, {1}))
    parts = np.concatenate([one_by_one.feed([t], shape=1) for t in PROMPT[:20]])
    report(f"{name} a view, one by one", 20, rows_differ(parts, skipped))
    slots = np.array([tape.slot(p) for p in range(20)])
    before = backend.kv(0, slots)
    second = Tape(backend, seq_row=1, first_slot=0, store=1).feed(PROMPT[:20], shape=32)
    report(f"{name} control: another model", 20, rows_differ(second, expected), control=True)
    after = backend.kv(0, slots)
    report(f"{name} the first store behind it", 2, sum(int((a != b).any()) for a, b in zip(before, after, strict=True)))


PARAMS = [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05}, {"temperature": 1.0, "repetition_penalty": 1.3}, {"presence_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 6, "logit_bias": ((3, 9.0),)},
]  # fmt: skip
PROMPT_LEN, END = 5, 40
STOPS = tuple(range(0, 320, 20))  # often enough to be met


class Driven:
    """Sequences at the end of short prompts, each with parameters of its own."""

    def __init__(self, backend: CudaBackend, which: list[int], limits: list[int]) -> None:
        self.backend, self.which = backend, which
        self.tapes = [Tape(backend, seq_row=1 + i, first_slot=60 * i) for i in range(len(which))]
        builder, updates = RowsBuilder(), []
        for i, tape in enumerate(self.tapes):
            params = SamplingParams(**PARAMS[which[i]])
            backend.bind(tape.seq_row, Sampler(params, SampleKey(i + 3, i % 3), PROMPT_LEN, limits[i], STOPS))
            updates.append(tape.add_prompt_rows(builder, PROMPT[9 * i :][: PROMPT_LEN - 1])[1])
            positions = np.arange(PROMPT_LEN - 1, END, dtype=np.int32)
            slots = np.array([tape.slot(p) for p in positions.tolist()], np.int32)
            updates.append(TableUpdate(np.full(len(slots), tape.seq_row, np.int32), positions, slots))
        pass_ = Pass(PassKind.CANONICAL, builder.build(len(builder)), Wanted(), joined(*updates), 0)
        backend.submit(pass_).result()
        self.last = [PROMPT[9 * i + PROMPT_LEN - 1] for i in range(len(which))]

    def rows(self, positions: list[int], tokens: list[int], which: list[int]) -> RowsBuilder:
        builder = RowsBuilder()
        for i, position, token in zip(which, positions, tokens, strict=True):
            tape = self.tapes[i]
            slot = tape.slot(position)
            builder.add(token_id=token, position=position, slot=slot, seq_row=tape.seq_row, prefix_len=position + 1)
        return builder

    def start(self, rounds: int | None, *, from_state: bool = False, shape: int | None = None):
        count = len(self.tapes)
        builder = self.rows([PROMPT_LEN - 1] * count, self.last, list(range(count)))
        rows = builder.build(shape or count)
        if from_state:
            rows.token_ids[:count] = FROM_STATE
        at = np.arange(count, dtype=np.int32)
        burst = None if rounds is None else Burst(at, np.full(count, rounds, np.int32), shape or count)
        pass_ = Pass(PassKind.CANONICAL, rows, Wanted(draw=DrawWanted(at)), NO_UPDATE, len(rows), burst=burst)
        return self.backend.submit(pass_)

    def one_by_one(self, rounds: int) -> list[list[tuple[int, bytes]]]:
        """What single passes draw, the host feeding every token back; every other pass is sampled by the host."""
        found: list[list[tuple[int, bytes]]] = [[] for _ in self.tapes]
        tokens, going = list(self.last), list(range(len(self.tapes)))
        for n in range(rounds + 1):
            builder = self.rows([PROMPT_LEN - 1 + n] * len(going), [tokens[i] for i in going], going)
            at = np.arange(len(going), dtype=np.int32)
            wanted = Wanted(draw=DrawWanted(at), top_k=TopKWanted(at[:1], 2) if n % 2 else None)
            pass_ = Pass(PassKind.CANONICAL, builder.build(len(going)), wanted, NO_UPDATE, len(going))
            draw = self.backend.submit(pass_).result().draw
            for k, i in enumerate(list(going)):
                tokens[i] = int(draw.token_ids[k])
                found[i].append((tokens[i], draw.logprobs[k].tobytes()))
                least = PARAMS[self.which[i]].get("min_tokens", 0)
                if (tokens[i] in STOPS and n + 1 >= least) or PROMPT_LEN + n + 1 >= self.limits(i):
                    going.remove(i)
            if not going:
                break
        return found

    def limits(self, i: int) -> int:
        return int(self.backend.resident.limits[1 + i])


def drawn(tickets) -> list[list[tuple[int, bytes]]]:
    found: list[list[tuple[int, bytes]]] = []
    for ticket in tickets:
        result = ticket.result()
        tokens = np.concatenate([result.draw.token_ids[:, None], result.burst.token_ids], axis=1)
        logprobs = np.concatenate([result.draw.logprobs[:, None], result.burst.logprobs], axis=1)
        found = found or [[] for _ in tokens]
        for i, (row, values) in enumerate(zip(tokens.tolist(), logprobs, strict=True)):
            found[i] += [(t, x.tobytes()) for t, x in zip(row, values, strict=True) if t != NO_TOKEN]
    return found


def check_bursts(name: str, device) -> None:
    for label, which in (
        ("on the device", [0, 1, 2, 3, 4, 1, 1, 0, 1]),
        ("host", list(range(8))),
        ("plain", [0, 1, 0]),
    ):
        limits = [200, 200, 200, 200, 200, 12, 200, 200, 9][: len(which)]
        single = Driven(make(name, device, models=1), which, limits).one_by_one(17)
        total = sum(map(len, single))
        for shape in (None, 16):
            driven = Driven(make(name, device, models=1), which, limits)
            found = drawn([driven.start(17, shape=shape)])
            report(f"{name} burst of 18 {label}", total, sum(a != b for a, b in zip(single, found, strict=True)))
        driven = Driven(make(name, device, models=1), which, limits)
        tickets = [driven.start(5), driven.start(3, from_state=True), driven.start(0, from_state=True)]
        tickets += [driven.start(6, from_state=True)]  # all in the air at once
        found = drawn(tickets)
        report(f"{name} four flights {label}", total, sum(a != b for a, b in zip(single, found, strict=True)))
    moved = Driven(make(name, device, models=1), [1, 1, 1], [200] * 3)
    moved.last[0] += 1
    report(f"{name} control: another token", 3, int(drawn([moved.start(5)])[0] != single[1][:6]), control=True)


def check_draws(name: str, device) -> None:
    """The same rows drawn on the device and on the host: chains, trees, streams of noise."""
    backend = make(name, device, models=1)
    different = total = 0
    for i, params in enumerate(PARAMS[:5]):
        tape = Tape(backend, seq_row=1, first_slot=0)
        backend.bind(1, Sampler(SamplingParams(**params), SampleKey(2**40 + i, 1)))
        rows = RowsBuilder()
        added, update = tape.add_prompt_rows(rows, PROMPT[:60])
        nodes = tape.add_draft_rows(rows, Draft((5, 6, 7), (NO_PARENT, NO_PARENT, 0)), scratch=200)
        at = np.array([*added[::3], *nodes], np.int32)
        for noise in (None, Noise(np.arange(len(at)) + 9, np.full(len(at), 2 + 256))):
            wanted = Wanted(draw=DrawWanted(at, noise))
            pass_ = Pass(PassKind.CANONICAL, rows.build(64), wanted, update, 64)
            here = backend.submit(pass_).result().draw
            by_hand = replace(pass_, wanted=replace(wanted, top_k=TopKWanted(at, 1)))
            there = backend.submit(by_hand).result().draw
            total += len(at)
            same = (here.token_ids == there.token_ids) & (here.logprobs.view(np.int32) == there.logprobs.view(np.int32))
            different += int((~same).sum())
    report(f"{name} draws of device and host", total, different)


def check_masks(name: str, device) -> None:
    """What a mask forbids is never drawn, and device and host draw the same of what it allows."""
    backend, rng = make(name, device, models=1), np.random.default_rng(5)
    vocab_size = backend.limits.vocab_size
    flags = rng.random((3, -(-vocab_size // 32) * 32)) < np.array([[0.5], [0.1], [0.01]])
    flags[:, 3], flags[:, vocab_size:] = True, False
    backend.set_masks(1, np.packbits(flags, axis=1, bitorder="little").view(np.uint32))
    tape, rows = Tape(backend, seq_row=1, first_slot=0), RowsBuilder()
    backend.bind(1, Sampler(SamplingParams(temperature=1.0, top_p=0.9), SampleKey(11, 0)))
    added, update = tape.add_prompt_rows(rows, PROMPT[:60])
    at = np.array(added, np.int32)
    masks = np.zeros(64, np.int32)
    masks[at] = 1 + np.arange(len(at)) % 3
    plain = Pass(PassKind.CANONICAL, rows.build(64), Wanted(draw=DrawWanted(at)), update, 64)
    masked = replace(plain, rows=replace(plain.rows, masks=masks))
    here = backend.submit(masked).result().draw
    there = backend.submit(replace(masked, wanted=replace(masked.wanted, top_k=TopKWanted(at, 1)))).result().draw
    same = (here.token_ids == there.token_ids) & (here.logprobs.view(np.int32) == there.logprobs.view(np.int32))
    report(f"{name} masked draws of device and host", len(at), int((~same).sum()))
    report(f"{name} draws that a mask forbids", len(at), int((~flags[masks[at] - 1, here.token_ids]).sum()))
    free = backend.submit(plain).result().draw.token_ids
    report(f"{name} control: without masks", len(at), int((~flags[masks[at] - 1, free]).sum()), control=True)


def check_not_finite(name: str, device) -> None:
    """A token whose K/V are not finite ends its own sequence, in this pass and later ones, and no other."""
    if tiny.ARCHITECTURES[name].tied_head:
        return  # the token's row would be in the head too
    backend = make(name, device, models=1, poison=7)
    clean = make(name, device, models=1)
    results = []
    for each, bad in ((backend, 7), (clean, 8)):
        builder, updates, last = RowsBuilder(), [], []
        for i in range(4):
            each.bind(1 + i, Sampler(SamplingParams(temperature=1.0), SampleKey(i, 0)))
            tape = Tape(each, seq_row=1 + i, first_slot=60 * i)
            tokens = [40 + i, bad if i == 2 else 50, 60, 70]
            added, update = tape.add_prompt_rows(builder, tokens)
            updates.append(update)
            more = np.arange(4, 20, dtype=np.int32)
            updates.append(TableUpdate(np.full(16, 1 + i, np.int32), more, more + 60 * i + NUM_RESERVED))
            last.append(added[-1])
        at = np.array(last, np.int32)
        pass_ = Pass(
            PassKind.CANONICAL, builder.build(16), Wanted(draw=DrawWanted(at)), joined(*updates), 4,
            burst=Burst(at, np.full(4, 3, np.int32), 4),
        )  # fmt: skip
        result = each.submit(pass_).result()
        results.append(np.concatenate([result.draw.token_ids[:, None], result.burst.token_ids], axis=1))
    report(f"{name} the poisoned sequence draws", 4, int((results[0][2] != NO_TOKEN).sum()))
    others = [0, 1, 3]
    report(f"{name} its neighbours", 12, int((results[0][others] != results[1][others]).sum()))
    report(f"{name} control: without poison", 4, int((results[1][2] != NO_TOKEN).sum()), control=True)


def check_audit(device) -> None:
    """Products in the form that each number of rows asks for are one family; the library by its defaults is not."""
    import torch

    from verispec.backends.audit import KernelProbe, audit
    from verispec.backends.cuda.forward import most_few_rows
    from verispec.backends.cuda.shapes import Shapes

    large, sizes = Shapes(4096, 32, 8, 128, 14336, 128256, 1e-5), (1, 8, 16, 32, 64, 128, 256)
    kernels = device.kernels(large)
    w = torch.randn(4096, 14336, device=device.name, dtype=torch.bfloat16) * 0.01

    def ours(x: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(x).to(device.name, torch.bfloat16)
        with device.exact_products():
            y = kernels.plain(rows, w, many=len(x) > most_few_rows(w))
        return y.float().cpu().numpy()

    def usual(x: np.ndarray) -> np.ndarray:
        return torch.mm(torch.from_numpy(x).to(device.name, torch.bfloat16), w.t()).float().cpu().numpy()

    for name, run in (("8B down, as served", ours), ("control: 8B down by the library's defaults", usual)):
        found = audit([KernelProbe(name, 14336, run)], shapes=sizes)
        outside = len(sizes) - max(map(len, found.families), default=0)
        report(f"audit, {name}", len(sizes), outside, control=name.startswith("control"))


def check_all(device, names=tuple(tiny.ARCHITECTURES)) -> None:
    for name in names:
        for check in (check_passes, check_bursts, check_draws, check_masks, check_not_finite):
            begin = time.perf_counter()
            check(name, device)
            print(f"  {check.__name__} {name}: {time.perf_counter() - begin:.1f} s", flush=True)


def main() -> None:
    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    device = Gpu(0, cache_dir() / "cuda")
    check_audit(device)
    check_all(device)
    print("FAILED: " + "; ".join(FAILED) if FAILED else "all equal")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
