"""What passes and whole rounds of drafts take, timed at the backend, and the speed-up that follows for an arm of
bench/speculation.py: E / (N c + v), and where rounds run without the host that of whole answers, with what is fixed in
them."""

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
from verispec.engine.step_rates import LEFT_OUT
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.sampling.rows import SampleKey, Sampler
from verispec.spec.growth import DraftModel
from verispec.spec.tree import TreeShape

CONTEXT_LEN, LONG_CONTEXT_LEN = 192, 960  # of the passes that are timed; rounds are timed at both
FEW_ROUNDS, MANY_ROUNDS = 2, 10  # of the bursts that are timed
CATCH_UP_ROWS = 8  # of a pass by which what drafts reads what was committed in a burst
FAR = 1 << 31  # tokens: a limit that is never reached


class RoundTime(NamedTuple):
    """Seconds of a round: with a short context, with a long one, and where nobody is there any more; and what a pass
    takes beyond its rounds if nothing is in the air."""

    short: float
    long: float
    idle: float
    trip: float = 0.0

    def at(self, context_len: float, contexts: tuple[int, int]) -> float:
        """With so many tokens of context, on the line through those timed; more of them never take less."""
        short, long = contexts
        per_token = max(0.0, self.long - self.short) / max(1, long - short)
        return self.short + per_token * (context_len - short)


class Round(NamedTuple):
    """What a round of an arm is: who drafts, in which shape, and how it is judged, for so many sequences."""

    name: str
    shape: TreeShape
    by_probability: bool
    batch: int

    def of(self, batch: int) -> Round:
        """The same for other numbers of sequences."""
        return self._replace(batch=batch)

    @property
    def shortest(self) -> Round:
        return self._replace(shape=TreeShape.chain(1))

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
    return Round(name, shape, not arm.is_match, batch)


def drafted_pass(backend: Backend, drafts: Drafts, round_: Round, context_len: int, num_rounds: int) -> Pass:
    """A burst as the engine makes them: so many rounds that draft."""
    limits, shape, builder = backend.limits, round_.shape, PassBuilder()
    is_second = drafts.store != TARGET_STORE
    model = DraftModel(backend, FLAT_COST, drafts.view, drafts.store, only_drafts=is_second, fit=_fit(backend))
    rule = model.rule(shape, 0.0, by_probability=round_.by_probability)
    length = min(context_len + MANY_ROUNDS * (1 + shape.depth) + shape.num_nodes, limits.context_len)
    for seq_row in range(1, round_.batch + 1):
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
    of many and of few, so that nothing of the host is in it. `clock` is theirs.
    """

    def __init__(
        self, backend: Backend, drafts: Mapping[str, Drafts], *, seconds: float, most_rows: int,
        rounds: Sequence[Round] = (), clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        shapes = [m for m in backend.shapes if m <= most_rows]
        kinds = {"none": (FULL_VIEW, TARGET_STORE), **{name: (d.view, d.store) for name, d in drafts.items()}}
        most = min(backend.limits.context_len, backend.limits.num_slots) // 2
        context_len = min(CONTEXT_LEN, most)
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
        end = clock() + seconds
        for turn in range(8):
            for point in points:
                if turn < 2 or clock() < end:
                    start = clock()
                    tickets = [backend.submit(passes[point]) for _ in range(num_flights)]
                    for ticket in tickets:
                        ticket.result()
                    times[point].append((clock() - start) / num_flights)
        self._known = {
            name: ([m for n, m in points if n == name], [typical_time(times[p][1:]) for p in points if p[0] == name])
            for name in kinds
        }

        self._leaves_out, self._fits_rows = backend.limits.leaves_out, backend.limits.fits_rows
        self._contexts = context_len, min(LONG_CONTEXT_LEN, most)
        self._rounds: dict[Round | int, RoundTime] = {}
        if backend.limits.prepares and backend.limits.trees:
            self._rounds = _timed_rounds(backend, drafts, rounds, self._contexts, seconds, clock)

    def seconds(self, name: str, num_rows: float) -> float:
        return float(np.interp(num_rows, *self._known[name]))

    def predicted(
        self, arm: Arm, name: str, round_: Round | None, batch: int, runs: Sequence[Run], plain: Sequence[Run]
    ) -> float | None:
        """The speed-up, given how many passes these runs had and how long their drafts were; `name` is what drafts, and
        `plain` are the same runs without drafts, whose seconds are given, too. None where rounds were timed, but none
        like those of the arm."""
        if self._rounds:
            return None if round_ is None else self._of_whole_answers(arm, round_, runs, plain)
        passes = sum(run.num_passes for run in runs)
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

    def _of_whole_answers(self, arm: Arm, round_: Round, runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
        """What answers took without drafts beyond their rounds is fixed: they take as much with drafts. Where they took
        less than their rounds, the machine was faster than when those were timed, and is so in both. Of rules by which
        answers may have another length, seconds a token are compared."""
        sizes = sizes_up_to(round_.batch)
        if not all(key in self._rounds for size in sizes for key in (size, round_.of(size))):
            return None
        before = after = 0.0
        for run, none in zip(runs, plain, strict=True):
            undrafted = {size: self._rounds[size].at(none.context_len, self._contexts) for size in sizes}
            drafted = {size: self._round_seconds(round_.of(size), run) for size in sizes}
            in_rounds = _device_seconds(none, undrafted, self._rounds[1].idle)
            own = _device_seconds(run, drafted, self._rounds[round_.of(1)].idle)
            own += (run.num_waits + run.num_catch_ups) * self.seconds(round_.name, CATCH_UP_ROWS)
            own += run.num_waits * self._rounds[1].trip
            own = own + none.seconds - in_rounds if none.seconds > in_rounds else own * none.seconds / in_rounds
            before += none.seconds / (1 if arm.is_match else none.num_tokens)
            after += own / (1 if arm.is_match else run.num_tokens)
        return before / after

    def _round_seconds(self, round_: Round, run: Run) -> float:
        """Of a round as this run had them on average: chains are timed in full, and with one token. They are shorter
        where they exit, and near the end of an answer."""
        longest, most = self._rounds[round_].at(run.context_len, self._contexts), round_.shape.depth
        if not round_.shape.is_chain or most == 1 or not self._leaves_out:
            return longest
        drafted = run.total("draft_passes") / max(1, run.total("passes"))
        shortest = self._rounds[round_.shortest].at(run.context_len, self._contexts)
        left_out = max(0.0, most - longest_of(round_.batch, drafted, most))
        drafting = max(0.0, longest - shortest - self._wider(round_)) / (most - 1)  # a pass of it
        return longest - left_out * (drafting - LEFT_OUT)

    def _wider(self, round_: Round) -> float:
        """Of what the longest chains take beyond those of one token, the part of rows that are verified whether they
        were drafted or not."""
        if self._fits_rows:
            return 0.0
        most, least = (self.seconds("none", round_.batch * rows) for rows in (1 + round_.shape.depth, 2))
        return max(0.0, most - least)

    def table(self) -> dict[str, dict[int, float]]:
        """Milliseconds by rows."""
        return {
            name: {m: round(t * 1e3, 4) for m, t in zip(*known, strict=True)} for name, known in self._known.items()
        }

    def rounds(self) -> dict[str, list[float]]:
        """Milliseconds of whole rounds, as RoundTime has them, those of so many sequences without drafts among them."""
        names = {at: f"none, {at} at once" if isinstance(at, int) else str(at) for at in self._rounds}
        return {name: [round(seconds * 1e3, 4) for seconds in self._rounds[at]] for at, name in names.items()}


def _device_seconds(run: Run, seconds: Mapping[int, float], idle: float) -> float:
    """Of a run's rounds, by what one takes with a number of sequences that was timed. Those that were asked, and began
    when everybody had ended, are idle."""
    num_rounds = [o.stats.passes + o.stats.fast_passes for o in run.outputs]
    return _total(num_rounds, seconds) + max(0, run.num_rounds - max(num_rounds)) * idle


class _Bursts(NamedTuple):
    """Few rounds and many, alike but for that; sequences end when they have `limit` tokens."""

    few: Pass
    many: Pass
    batch: int
    limit: int

    def timed(self, backend: Backend, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds of one round, and of what a burst takes beyond its rounds."""
        took = []
        for pass_ in (self.few, self.many):
            for seq_row in range(1, self.batch + 1):
                backend.bind(seq_row, Sampler(SamplingParams(temperature=1.0), SampleKey(0, 0), limit=self.limit))
            took.append(time_pass(backend, pass_, clock))
        seconds = (took[1] - took[0]) / (MANY_ROUNDS - FEW_ROUNDS)
        return seconds, max(0.0, took[0] - FEW_ROUNDS * seconds)


def _timed_rounds(
    backend: Backend, drafts: Mapping[str, Drafts], rounds: Sequence[Round], contexts: tuple[int, int], seconds: float,
    clock: Callable[[], float],
) -> dict[Round | int, RoundTime]:  # fmt: skip
    """By what a round is; by the number of sequences where nothing is drafted."""
    asked = dict.fromkeys([*rounds, *(r.shortest for r in rounds if r.shape.is_chain)])
    keys: list[Round | int] = [*asked, *dict.fromkeys(round_.batch for round_ in asked)]
    bursts = {key: _bursts_of(backend, drafts, key, contexts) for key in keys}
    times: dict[Round | int, list[RoundTime]] = {key: [] for key in keys}
    end = clock() + seconds
    for turn in range(8):
        for key in keys:
            if turn < 2 or clock() < end:
                (short, trip), (long, _), (idle, _) = [each.timed(backend, clock) for each in bursts[key]]
                times[key].append(RoundTime(short, long, idle, trip))
    return {
        key: RoundTime(*(typical_time(listed) for listed in zip(*rows[1:], strict=True))) for key, rows in times.items()
    }


def _bursts_of(
    backend: Backend, drafts: Mapping[str, Drafts], key: Round | int, contexts: tuple[int, int]
) -> list[_Bursts]:
    """Those that a RoundTime is timed by: the idle ones end behind their first token."""

    def passes(context_len: int) -> list[Pass]:
        if isinstance(key, int):
            return [probe_pass(backend, key, context_len, num_rounds=n - 1) for n in (FEW_ROUNDS, MANY_ROUNDS)]
        return [drafted_pass(backend, drafts[key.name], key, context_len, n) for n in (FEW_ROUNDS, MANY_ROUNDS)]

    batch = key if isinstance(key, int) else key.batch
    short, long = (passes(context_len) for context_len in contexts)
    return [_Bursts(*short, batch, FAR), _Bursts(*long, batch, FAR), _Bursts(*short, batch, contexts[0] + 1)]


def _counts(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    return ((run.num_tokens, run.total("drafted")) for run in runs)
