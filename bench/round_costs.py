"""What passes and whole rounds of drafts take, timed at the backend, and the speed-up that follows for an arm of
bench/speculation.py: E / (N c + v)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from drafting import Arm, Drafts, Run

from verispec import SamplingParams
from verispec.backends.cost import FLAT_COST, probe_pass, time_pass, typical_time
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import FULL_VIEW, Backend, Pass, PassKind
from verispec.engine.policy import LEFT_OUT
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.sampling.rows import SampleKey, Sampler
from verispec.spec.growth import DraftModel
from verispec.spec.tree import TreeShape

CONTEXT_LEN = 192  # of the passes that are timed
FEW_ROUNDS, MANY_ROUNDS = 2, 10  # of the bursts that are timed


class Round(NamedTuple):
    """What a round of an arm is: who drafts, in which shape, and how it is judged, for so many sequences. A chain that
    `exits` may be shorter."""

    name: str
    shape: TreeShape
    by_probability: bool
    batch: int
    exits: bool = False

    def of(self, batch: int) -> Round:
        """The same for other numbers of sequences."""
        return self._replace(batch=batch)

    @property
    def shortest(self) -> Round:
        return self._replace(shape=TreeShape.chain(1), exits=False)

    def __str__(self) -> str:
        rule = ", by probability" if self.by_probability else ""
        return f"{self.name} {self.shape}{rule}, {self.batch} at once"


def sizes_up_to(batch: int) -> list[int]:
    """Numbers of sequences that rounds are timed with."""
    return [*(1 << i for i in range((batch - 1).bit_length())), batch]


def longest_of(count: int, average: float, most: int) -> float:
    """How long the longest of so many chains is on average, if each goes on with the same chance behind every token."""

    def expected(chance: float, count: int) -> float:
        return sum(1 - (1 - chance**depth) ** count for depth in range(most))

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, 1) < average else (low, middle)
    return expected(high, count)


def _total(num_rounds: Sequence[int], seconds: Mapping[int, float]) -> float:
    """Of a batch whose sequences have so many rounds, by what one takes with a number of sequences that was timed."""
    total, done = 0.0, 0
    for i, count in enumerate(sorted(num_rounds)):
        left = len(num_rounds) - i
        total += (count - done) * seconds[min(n for n in seconds if n >= left)]
        done = count
    return total


def round_of(arm: Arm, drafts: Mapping[str, Drafts], batch: int) -> Round | None:
    """That of an arm which drafts with a model in every round, always in the same shape; None for others."""
    name, _, how = arm.drafter.partition(", ")
    if name not in drafts or how not in ("full", "forced"):  # of one-hot drafts the host takes part in every pass
        return None
    shape = TreeShape.chain(drafts[name].draft_len) if arm.tree is None else TreeShape.parse(arm.tree)
    return Round(name, shape, not arm.is_match, batch, exits=how == "forced")


def drafted_pass(backend: Backend, drafts: Drafts, round_: Round, context_len: int, num_rounds: int) -> Pass:
    """A burst as the engine makes them: so many rounds that draft."""
    limits, shape, builder = backend.limits, round_.shape, PassBuilder()
    is_second = drafts.store != TARGET_STORE
    model = DraftModel(backend, FLAT_COST, drafts.view, drafts.store, only_drafts=is_second, fit=_fit(backend))
    rule = model.rule(shape, 0.0, by_probability=round_.by_probability)
    length = min(context_len + MANY_ROUNDS * (1 + shape.depth) + shape.num_nodes, limits.context_len)
    for seq_row in range(1, round_.batch + 1):
        backend.bind(seq_row, Sampler(SamplingParams(temperature=1.0), SampleKey(0, 0)))
        slots = (NUM_RESERVED + (np.arange(length) + seq_row * length) % limits.num_slots).tolist()
        builder.update_table(seq_row, 0, slots)
        first = slots[context_len - 1 : context_len + shape.num_nodes]
        builder.add_drafted(seq_row, context_len - 1, 0, first, num_rounds, rule)
    return builder.build(PassKind.CANONICAL, _fit(backend), vocab_size=limits.vocab_size)


def _fit(backend: Backend) -> Callable[[int], int]:
    return lambda num_rows: min(m for m in backend.shapes if m >= num_rows)


class Costs:
    """T of passes by rows, for the target and for what drafts: timed in turns, several in the air where that is
    possible, so that it is the device's time. Overwrites K/V: make it before a Stage.

    Where the backend drafts trees by itself, also T of whole rounds of some arms, N c + v, and of plain ones: by bursts
    of many and of few, so that nothing of the host is in it.
    """

    def __init__(
        self, backend: Backend, drafts: Mapping[str, Drafts], *, seconds: float, most_rows: int,
        rounds: Sequence[Round] = (),
    ) -> None:  # fmt: skip
        shapes = [m for m in backend.shapes if m <= most_rows]
        kinds = {"none": (FULL_VIEW, TARGET_STORE), **{name: (d.view, d.store) for name, d in drafts.items()}}
        context_len = min(CONTEXT_LEN, backend.limits.context_len // 2, backend.limits.num_slots // 2)
        points = [(name, m) for m in shapes for name in kinds if name == "none" or m <= max(8, most_rows // 4)]
        passes = {
            (name, m): replace(
                probe_pass(backend, m, context_len, view=kinds[name][0], store=kinds[name][1]),
                only_drafts=kinds[name][1] != TARGET_STORE,
            )
            for name, m in points
        }
        num_flights = 4 if backend.limits.prepares else 1
        times: dict[tuple[str, int], list[float]] = {point: [] for point in points}
        end = time.perf_counter() + seconds
        for turn in range(8):
            for point in points:
                if turn < 2 or time.perf_counter() < end:
                    start = time.perf_counter()
                    tickets = [backend.submit(passes[point]) for _ in range(num_flights)]
                    for ticket in tickets:
                        ticket.result()
                    times[point].append((time.perf_counter() - start) / num_flights)
        self._known = {
            name: ([m for n, m in points if n == name], [typical_time(times[p][1:]) for p in points if p[0] == name])
            for name in kinds
        }

        self._leaves_out = backend.limits.leaves_out
        self._rounds: dict[Round | int, float] = {}
        if backend.limits.prepares and backend.limits.trees:
            self._rounds = _timed_rounds(backend, drafts, rounds, context_len, seconds)

    def seconds(self, name: str, num_rows: float) -> float:
        return float(np.interp(num_rows, *self._known[name]))

    def predicted(self, arm: Arm, name: str, round_: Round | None, batch: int, runs: Sequence[Run]) -> float | None:
        """Speed-up E / (N c + v), given the tokens a pass that these runs had; `name` is what drafts. None where rounds
        were timed, but none like those of the arm."""
        passes = sum(run.num_passes for run in runs)
        if self._rounds and batch > 1:
            return None if round_ is None else self._of_batches(round_, runs)
        if self._rounds:
            steady = [part for part in (run.steady for run in runs) if part is not None]
            tokens = sum(part.tokens for part in steady) / max(1, sum(part.passes for part in steady))
            tokens = tokens or sum(run.num_tokens for run in runs) / passes
            if round_ is None or round_ not in self._rounds:
                return None
            return tokens * self._rounds[1] / self._round_seconds(round_, runs)
        tokens, nodes = (sum(values) / passes for values in zip(*_counts(runs), strict=True))
        if arm.tree is None or TreeShape.parse(arm.tree).is_chain:
            # A pass of a draft serves all sequences that still draft: as many as the one has that exits last.
            longest = [
                max(o.stats.draft_passes / (o.stats.passes + o.stats.fast_passes) for o in run.outputs) for run in runs
            ]
            drafting = sum(longest) / len(longest) * self.seconds(name, batch)
        else:
            widths = (1, *TreeShape.parse(arm.tree).keep[:-1])
            drafting = sum(self.seconds(name, batch * width) for width in widths)
        return tokens * self.seconds("none", batch) / (drafting + self.seconds("none", batch * (1 + nodes)))

    def _of_batches(self, round_: Round, runs: Sequence[Run]) -> float | None:
        """Speed-up of whole batches: each ends with its slowest answer, in rounds of as many as are still there."""
        if not all(key in self._rounds for count in sizes_up_to(round_.batch) for key in (count, round_.of(count))):
            return None
        took = {count: self._round_seconds(round_.of(count), runs) for count in sizes_up_to(round_.batch)}
        undrafted = {count: self._rounds[count] for count in took}
        plain = sum(_total([len(o.token_ids) for o in run.outputs], undrafted) for run in runs)
        return plain / sum(_total([o.stats.passes + o.stats.fast_passes for o in run.outputs], took) for run in runs)

    def _round_seconds(self, round_: Round, runs: Sequence[Run]) -> float:
        """Of a round as these runs had them on average: chains that exit are timed in full, and with one token."""
        longest, most = self._rounds[round_], round_.shape.depth
        if not round_.exits or most == 1 or not self._leaves_out:
            return longest
        outputs = [output for run in runs for output in run.outputs]
        drafted = sum(o.stats.draft_passes for o in outputs) / max(1, sum(o.stats.passes for o in outputs))
        shortest = self._rounds[round_.shortest]
        left_out = max(0.0, most - longest_of(round_.batch, drafted, most))
        return longest - left_out * ((longest - shortest) / (most - 1) - LEFT_OUT)

    def table(self) -> dict[str, dict[int, float]]:
        """Milliseconds by rows."""
        return {
            name: {m: round(t * 1e3, 4) for m, t in zip(*known, strict=True)} for name, known in self._known.items()
        }

    def rounds(self) -> dict[str, float]:
        """Milliseconds of whole rounds, those of so many sequences without drafts among them."""
        names = {at: f"none, {at} at once" if isinstance(at, int) else str(at) for at in self._rounds}
        return {name: round(self._rounds[at] * 1e3, 4) for at, name in names.items()}


def _timed_rounds(
    backend: Backend, drafts: Mapping[str, Drafts], rounds: Sequence[Round], context_len: int, seconds: float
) -> dict[Round | int, float]:
    """Seconds of a round, by what it is; by the number of sequences where nothing is drafted."""
    passes: dict[Round | int, list[Pass]] = {}
    for round_ in dict.fromkeys([*rounds, *(r.shortest for r in rounds if r.exits)]):
        passes[round_] = [
            drafted_pass(backend, drafts[round_.name], round_, context_len, count)
            for count in (FEW_ROUNDS, MANY_ROUNDS)
        ]
        passes[round_.batch] = [
            probe_pass(backend, round_.batch, context_len, num_rounds=count - 1) for count in (FEW_ROUNDS, MANY_ROUNDS)
        ]
    times: dict[Round | int, list[float]] = {at: [] for at in passes}
    end = time.perf_counter() + seconds
    for turn in range(8):
        for at, (few, many) in passes.items():
            if turn < 2 or time.perf_counter() < end:
                took = [time_pass(backend, pass_, time.perf_counter) for pass_ in (few, many)]
                times[at].append((took[1] - took[0]) / (MANY_ROUNDS - FEW_ROUNDS))
    return {at: typical_time(listed[1:]) for at, listed in times.items()}


def _counts(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    return ((run.num_tokens, run.total("drafted")) for run in runs)
