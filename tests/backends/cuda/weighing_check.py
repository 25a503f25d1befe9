"""Rounds that probabilities judge, on a GPU: the kernels against `sampling/recursive.py`, rounds of the device against
those that the host drafts and judges, bit for bit; and what a round takes. Needs torch, numpy and the package.

python -m tests.backends.cuda.weighing_check [FOLDER] prints one line per check; what differs must be 0 except in the
controls. Times are taken for FOLDER/weighing.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.backends.cuda.backend_check import FAILED, PROMPT, make, report
from tests.backends.cuda.chains_check import random_backend
from tests.backends.cuda.trees_check import POISONED, Timing, Told, hosted, looped, round_milliseconds, told
from tests.support.cuda_stand_in import StandInDraws
from tests.support.skipping import CHEAP, cheap_setup, menu_of
from verispec.backends.cuda.backend import CudaBackend
from verispec.backends.cuda.drawing import DrawInputs, Shares
from verispec.backends.cuda.outputs import DeviceOutputs
from verispec.backends.cuda.steps import LENGTH, Kept, Parcel, Stage, StepSizes, StepState, record_of
from verispec.backends.protocol import BackendLimits, Pass, Ticket, View
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.recursive import Distributions, RoundKeys, judge_recursive
from verispec.sampling.rows import SampleKey, Sampler
from verispec.sampling.weights import totals
from verispec.spec.model_drafter import DraftExit
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import NO_PARENT, Accept, Draft, SamplingParams, Verdict

REQUESTS = [
    {"temperature": 1.0}, {"temperature": 0.8, "top_k": 6}, {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.02}, {"temperature": 0.6, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "min_tokens": 9, "logit_bias": ((7, 1.5),)}, {}, {"temperature": 0.4, "top_k": 2},
]  # fmt: skip
TREES = ("chain:3", "branch:3,2,1", "branch:2", "beam:3,3", "beam:2,1")


# The kernels


def check_shares(draws, device: str, vocabs: Sequence[int] = (5000,)) -> int:
    """Probabilities that are kept, and their sums: how many rows differ from those of numpy."""
    rng, differ = np.random.default_rng(3), 0
    for vocab in vocabs:
        rows = 6
        logits = torch.from_numpy(3 * rng.standard_normal((rows, vocab)).astype(np.float32))
        logits[4, 7] = torch.nan
        words = torch.zeros(rows, 3, dtype=torch.int32)
        inputs = DrawInputs(
            words[:, :2].contiguous(), words, torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0, 0.9]),
            torch.tensor([0, 9, 0, 0, 0, 0], dtype=torch.int32), torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 1.0]),
            torch.full((rows,), -torch.inf),
        )  # fmt: skip
        found = []
        for kernels, where in ((StandInDraws(rows), "cpu"), (draws(vocab, rows), device)):
            kept = Shares.of(8, vocab, torch.tensor([3, 0, 7, 5, 1, -1], dtype=torch.int32, device=where))
            kept.values.zero_(), kept.masses.zero_()
            sent = DrawInputs(*(getattr(inputs, name).to(where) for name in list(inputs.__slots__)[:6]))
            kernels.children(logits.to(where), sent, rows, k=0, filters=True, kept=kept)
            found.append((kept.values.cpu().view(torch.int32), kept.masses.cpu().view(torch.int64)))
        differ += int(sum((a != b).any(1).sum() for a, b in zip(*found, strict=True)))
    return differ


def distribution(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Flat or sharp, with or without a filter."""
    values = np.exp(rng.choice([0.5, 2.0, 8.0]) * rng.standard_normal(vocab))
    if rng.random() < 0.5:
        values[rng.permutation(vocab)[: int(rng.integers(vocab))]] = 0
    values[int(rng.integers(vocab))] += 1e-3
    return (values / values.sum()).astype(np.float32)


class Case:
    """Drafts of some members, with what they were drawn from: chains, and trees with places left free."""

    def __init__(self, vocab: int, seed: int, num_members: int = 6) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.lengths = vocab, rng.integers(1, 9, num_members)
        self.base = np.cumsum(1 + self.lengths) - 1 - self.lengths
        self.is_tree, self.weighed = rng.random(num_members) < 0.7, np.arange(num_members) != 2
        num_rows = int((1 + self.lengths).sum())
        self.p = np.stack([distribution(rng, vocab) for _ in range(num_rows)])
        self.q = np.stack([distribution(rng, vocab) for _ in range(num_rows)])
        alike = rng.random(num_rows) < 0.6
        self.q[alike] = (0.5 * self.q[alike] + 0.5 * self.p[alike]).astype(np.float32)
        same = rng.random(num_rows) < 0.1
        self.q[same] = self.p[same]
        self.q[rng.random(num_rows) < 0.05] = np.nan
        self.logits = rng.standard_normal((num_rows, vocab)).astype(np.float32)
        self.tokens, self.parents = np.full(num_rows, NO_TOKEN), np.full(num_rows, NO_PARENT)
        self.counts = np.zeros(num_members, np.int64)
        for s, (length, base) in enumerate(zip(self.lengths, self.base, strict=True)):
            for n in range(length):
                if not self.is_tree[s]:
                    parent, exists = n - 1, self.counts[s] == n and rng.random() < 0.9
                else:
                    there = [i for i in range(n) if self.tokens[base + 1 + i] >= 0]
                    parent, exists = int(rng.choice([NO_PARENT, NO_PARENT, *there])), rng.random() < 0.8
                if exists:
                    offered = self.p[base + 1 + parent].astype(np.float64)
                    siblings = self.tokens[base + 1 : base + 1 + n][self.parents[base + 1 : base + 1 + n] == parent]
                    if rng.random() < 0.9 and np.count_nonzero(offered) > n:  # now and then a second copy of a token
                        offered[siblings[siblings >= 0]] = 0.0
                    token = int(rng.choice(vocab, p=offered / offered.sum()))
                    self.tokens[base + 1 + n], self.parents[base + 1 + n] = token, parent
                    self.counts[s] += 1
        self.keys = RoundKeys(
            rng.integers(0, 2**63, num_members).astype(np.uint64) * np.uint64(2) + np.uint64(1),
            rng.integers(0, 3, num_members), rng.integers(5, 60, num_members),
        )  # fmt: skip

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws, log-probabilities and how much may be accepted; -7 where nothing is to be written."""
        drawn, logprobs = np.full(len(self.p), -7), np.full(len(self.p), -7, np.float32)
        most = np.where(self.weighed, 0, -7)
        top, log_total = totals(np, self.logits)
        for s in np.flatnonzero(self.weighed):
            rows = self.base[s] + 1 + np.arange(self.lengths[s])
            places = np.flatnonzero(self.tokens[rows] >= 0)
            if not len(places):
                continue
            verdict = self._verdict(s, places)
            at = [self.base[s], *(rows[places[node]] for node in verdict.path)]
            tokens = [*(self.tokens[row] for row in at[1:]), verdict.bonus_id]
            drawn[at], most[s] = tokens, len(verdict.path)
            for row, token in zip(at, tokens, strict=True):
                logprobs[row] = (self.logits[row, token] - top[row]) - log_total[row] if token >= 0 else np.nan
        return drawn, logprobs, most

    def _verdict(self, s: int, places: np.ndarray) -> Verdict:
        """By the host's own code."""
        own, base = 1 + len(places), self.base[s]
        node_of = {NO_PARENT: NO_PARENT} | {place: node for node, place in enumerate(places.tolist())}
        draft = Draft(
            tuple(self.tokens[base + 1 + places].tolist()),
            tuple(node_of[p] for p in self.parents[base + 1 + places].tolist()),
        )
        rows = np.arange(own)[None]
        q, p = (values[[base, *(base + 1 + places)]] for values in (self.q, self.p))
        keys = RoundKeys(*(part[s : s + 1] for part in self.keys))
        (verdict,) = judge_recursive([draft], Distributions(q, rows), Distributions(p, rows), keys)
        return verdict

    def found(self, steps, device: str, stage: Stage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By the kernel. Rows of the head stand one behind those that verify where the host has named them."""
        count, num_rows = len(self.lengths), len(self.p)
        state = StepState(BackendLimits(self.vocab, 64, 64, 16, 8), 128, device)
        shift = int(stage is Stage.FIRST)
        parcel = Parcel(np.zeros(state.max_words, np.int32))
        zeros = np.zeros(count, np.int64)
        parcel.put(
            "chains", 1 + np.arange(count), zeros, zeros, zeros, self.lengths, self.base + shift, self.base,
            self.is_tree.astype(int), zeros, self.weighed.astype(int),
        )  # fmt: skip
        parcel.set("chains", count)
        state.sent[: len(parcel)] = torch.from_numpy(parcel._words[: len(parcel)]).to(device)
        for s in range(count):
            key = SampleKey(int(self.keys.seeds[s]), int(self.keys.sample_index[s]))
            record = record_of(Sampler(SamplingParams(), key), BackendLimits(self.vocab, 64, 64, 16, 8))
            record[LENGTH] = self.keys.committed_len[s]
            state.records[1 + s] = torch.from_numpy(record).to(device)
        for name, values in (("drafts", self.tokens), ("parents", self.parents), ("counts", self.counts)):
            state.chains[name][: len(values)] = torch.from_numpy(values.astype(np.int32)).to(device)
        state.chains["most"].fill_(-7)
        weighed = Kept.of(num_rows, self.vocab, state)
        for shares, values in ((weighed.target, self.q), (weighed.proposal, self.p)):
            sent = Shares.of(num_rows, self.vocab, torch.arange(num_rows, dtype=torch.int32))
            StandInDraws(num_rows)._keep(sent, values)
            shares.values.copy_(sent.values), shares.masses.copy_(sent.masses)
        logits = torch.zeros(num_rows + shift, self.vocab)
        logits[shift:] = torch.from_numpy(self.logits)
        of_rows = torch.zeros(num_rows + shift, 2)
        of_rows[shift:] = torch.from_numpy(np.stack(totals(np, self.logits), axis=1))
        drawn = torch.full((num_rows + shift,), -7, dtype=torch.int32, device=device)
        logprobs = torch.full((num_rows + shift,), -7.0, device=device)
        sizes = StepSizes(num_rows + shift, num_rows + shift)
        steps.weigh(state, sizes, weighed, logits.to(device), of_rows.to(device), drawn, logprobs, stage=stage)
        parts = (drawn[shift:], logprobs[shift:], state.chains["most"][:count])
        drawn, logprobs, most = (part.cpu().numpy() for part in parts)
        return drawn, logprobs, most


def check_kernel(
    steps, device: str, vocabs: Sequence[int] = (24, 320, 5000), num_cases: int = 12, what: str = ""
) -> None:
    """One round of many drafts, against the host's own code: tokens, log-probabilities, and how many are accepted."""
    differ = compared = accepted = 0
    for vocab in vocabs:
        for seed in range(num_cases):
            case = Case(vocab, seed)
            expected = case.expected()
            for stage in (Stage.FIRST, Stage.VERIFY):
                found = case.found(steps, device, stage)
                differ += any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(found, expected, strict=True))
                compared += 1
            accepted += int(expected[2].max())
    report(f"{what}rounds judged by the kernel and by numpy", compared, differ)
    report(f"{what}control: accepted", compared, accepted, control=True)


# Through the engine


def watched(backend: CudaBackend) -> CudaBackend:
    """A backend that counts the passes which show distributions: there the host drafts, or judges."""
    submit, backend.num_shown = backend.submit, 0

    def counted(pass_: Pass) -> Ticket:
        backend.num_shown += pass_.wanted.distribution is not None
        return submit(pass_)

    backend.submit = counted
    return backend


def rule_of(tree: str) -> str:
    return "rejection" if tree.startswith("chain") else "recursive"


def requests(speculation: Speculation, *, seed: int, max_tokens: int) -> list[Request]:
    return [
        Request(
            PROMPT[7 * i :][: 9 + 5 * i],
            SamplingParams(max_tokens=max_tokens, seed=seed + i, deterministic=False, **more),
            eos_ids=(3,), speculation=speculation,
        )
        for i, more in enumerate(REQUESTS)
    ]  # fmt: skip


def engine_of(backend: CudaBackend, **changes: object) -> Engine:
    """Little is skipped. Chains are not cut where the draft is unsure: that moves with what the host has seen. There
    are rows for whole drafts of everybody: a shorter draft has other tokens."""
    sizes = {"num_slots": backend.limits.num_slots, "max_running": 8, "row_budget": 256, "prefix_cache": False}
    config = EngineConfig(**sizes | changes)
    menu = menu_of(View.without(mlp={1}), full=1e-6, attention=1e-7, mlp=1e-7)
    drafters = make_drafters(replace(cheap_setup(backend, draft_len=3), find_menu=lambda: menu))
    drafters["skip"]._exit = DraftExit(gamma=0.0, step=0.0)
    return Engine(backend, family=(1, 4, 16, 64, 256), drafters=drafters, config=config, cost=CHEAP)


def check_rounds(
    device, trees: Sequence[str] = TREES, drafters: Sequence[str] = ("skip", "model"), max_tokens: int = 30,
    num_requests: int = 8,
) -> None:  # fmt: skip
    """Every tree by both drafters: one request after the other with all counters, then together, two flights deep and
    beside drafts of rule `match`; by the loop of `rounds.py`, too; and where slots are short."""
    host, alone, loop = hosted(make("llama", device)), watched(make("llama", device)), looped(make("llama", device))
    for tree in trees:
        for drafter in drafters:
            what, how = f"{drafter} {tree}", Speculation.of(drafter, tree=tree, accept=rule_of(tree))
            asked = requests(how, seed=len(tree), max_tokens=max_tokens)[:num_requests]
            expected = told(engine_of(host, max_burst=1, max_running=1), asked)
            alone.num_shown = 0
            found = told(engine_of(alone, max_burst=6, max_running=1), asked)
            if drafter == "skip":  # `model` reads the prompt with its first draft
                report(f"{what}: passes in which the host judged", len(asked), alone.num_shown)
            report(f"{what}: of the device and of the host", len(asked), differing(found, expected))
            report(f"{what}: control: accepted", len(asked), sum(t.counted[-1] for t in found), control=True)
            by_loop = told(engine_of(loop, max_burst=6, max_running=1), asked)
            report(f"{what}: of the loop and of the host", len(asked), differing(by_loop, expected))
            by_match = [replace(r, speculation=replace(how, accept=Accept.MATCH)) for r in asked[:3]]
            for beside, depth in (([], 2), (by_match, 1)):
                together = told(engine_of(alone, max_burst=6, depth=depth), [*asked[:5], *beside])[: len(asked[:5])]
                differ = sum(a.digest != b.digest for a, b in zip(together, expected[:5], strict=True))
                report(f"{what}: beside {len(beside)} of rule match, {depth} flights", len(together), differ)
            check_short_of_slots(what, host, alone, asked)
    other = requests(how, seed=99, max_tokens=max_tokens)[:num_requests]
    again = told(engine_of(alone, max_burst=6, max_running=1), other)
    report("control: another seed", len(found), differing(again, found), control=True)


def check_short_of_slots(what: str, host: CudaBackend, alone: CudaBackend, asked: Sequence[Request]) -> None:
    """Whoever is preempted goes on from another round; so the same rounds are compared, one at a time."""
    longest = max(len(r.prompt_ids) + r.params.max_tokens for r in asked)
    sizes = {"max_burst": 1, "num_slots": longest + 8, "max_running": 4}
    engines = [engine_of(backend, **sizes) for backend in (host, alone)]
    first, second = (told(engine, asked) for engine in engines)
    report(f"{what}: short of slots", len(asked), differing(first, second))
    report(f"{what}: control: preempted", len(asked), engines[1].totals.preemptions, control=True)


def check_poison(device, max_tokens: int = 12, num_requests: int = 16) -> None:
    """Tokens whose K/V are not finite: a draft ends where it meets one, and a sequence where one is committed."""
    host, alone = hosted(make("qwen2", device, poison=POISONED)), make("qwen2", device, poison=POISONED)
    for drafter, tree in (("skip", "chain:3"), ("model", "chain:3"), ("model", "beam:3,3"), ("skip", "branch:2,2")):
        asked = [
            Request(
                [9 * i % 300, 51, 60, 69],
                SamplingParams(max_tokens=max_tokens, seed=i, temperature=1.0, deterministic=False),
                speculation=Speculation.of(drafter, tree=tree, accept=rule_of(tree)),
            )
            for i in range(num_requests)
        ]
        expected = outcomes(engine_of(host, max_burst=1, max_running=1), asked)
        found = outcomes(engine_of(alone, max_burst=6, max_running=1), asked)
        what = f"with tokens that are not finite, {drafter} {tree}"
        report(what, num_requests, sum(a != b for a, b in zip(found, expected, strict=True)))
        report(f"{what}: control: ended", num_requests, sum(error is not None for _, error in found), control=True)


def outcomes(engine: Engine, asked: Sequence[Request]) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens and error of each request."""
    ids, found = [engine.add(request) for request in asked], {}
    while engine.has_work:
        outputs = {event.request_id: event.output for event in engine.step() if event.output is not None}
        found |= {i: (tuple(output.token_ids), output.error) for i, output in outputs.items()}
    engine.check()
    return [found[i] for i in ids]


def differing(found: Sequence[Told], expected: Sequence[Told]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))


# Times

WAYS = [
    ("none", None), ("model", "chain:3"), ("model", "chain:5"), ("model", "branch:3,2,1"), ("model", "beam:3,3"),
    ("skip", "branch:3,2,1"),
]  # fmt: skip


def time_rounds(device, name: str, second: str, results: list[Timing]) -> None:
    backend = random_backend(device, name, second)
    by_device = backend._started, backend.limits
    for count in (1, 8):
        for drafter, tree in WAYS:
            speculation = Speculation.of(drafter, tree=tree, accept=rule_of(tree) if tree else "match")
            alone = round_milliseconds(backend, count, speculation)
            hosted(backend)._outputs.__class__ = DeviceOutputs  # whose children are the device's
            host = round_milliseconds(backend, count, speculation)
            backend._started, backend.limits = by_device
            what = drafter if tree is None else f"{drafter} {tree} {rule_of(tree)}"
            results.append(Timing(name, count, what, alone, host))
            print(f"{name}, {count} sequences, {what}: {alone:.3f} ms a round, with the host {host:.3f}", flush=True)


def main() -> None:
    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    device, begin, results = Gpu(0, cache_dir() / "cuda"), time.perf_counter(), list[Timing]()
    with device.current(), np.errstate(all="ignore"):
        report("distributions that are kept", 16, check_shares(device.draws, device.name, (320, 5000, 151936)))
        check_kernel(device.steps(), device.name, vocabs=(24, 320, 5000, 151936))
        check_rounds(device)
        check_poison(device)
        print(f"checks: {time.perf_counter() - begin:.0f} s", flush=True)
        for name, second in (("smol", ""), ("qwen1.5b", "qwen0.5b")) if len(sys.argv) > 1 else ():
            time_rounds(device, name, second, results)
            torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        Path(sys.argv[1], "weighing.json").write_text(json.dumps([r._asdict() for r in results], indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(FAILED) if FAILED else "all equal")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
