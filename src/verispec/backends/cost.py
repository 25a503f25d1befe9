"""What a pass costs: T(M, context), measured through the backend's own `submit`. It decides speed, never bits."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import Progress, no_progress
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import FULL_VIEW, NO_UPDATE, Backend, BackendLimits, Pass, PassKind, View
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import SamplingParams

SHORT_CONTEXT, LONG_CONTEXT = 32, 512
BUDGET_SECONDS = 2.0  # for timing a model at its first load; what it serves refines the table
_SEQUENCES = 8  # large passes are prompts of a few sequences, not hundreds of them
_SMALL_SHAPE = 32
_PROBE_ROUNDS = 8
_SMALL_ROUNDS, _LARGE_ROUNDS = 5, 3  # small passes are quick, and most of what runs
_NUM_CERTAIN = 2  # points that are timed whatever they take: a line needs two
# What is timed first, as shapes at the short context and at the long one: if the budget ends, the rest follows from it.
_FIRST_SHORT, _FIRST_LONG, _NEXT_SHORT = (1, 2, 4, 8, 16), (1, 8), (32, 64, 128)
# What is believed of a table's errors, as variances of logarithms: the machine's speed, which moves everything; what
# differs more the more octaves are between two shapes, as by what drawing a row takes; and each line by itself.
_SPEED_ERROR, _TILT_ERROR, _LINE_ERROR, _TILT_OCTAVES = 0.5, 0.1, 0.01, 4.0
_FORGETTING = 2e-4  # with every pass observed doubt returns by this part of the way to that
_FASTER_NOISE, _SLOWER_NOISE = 0.02, 0.08  # the same of one pass: it is slower than usual more often than faster
_QUICK, _ALL_OF, _ONE_IN = 0.005, 16, 8  # of quick passes (seconds) those are observed: learning takes its time too
_NOTICEABLE = 0.03  # a move, as a logarithm: looked-up values are kept until then
_NOTICEABLE_SPEED = 0.1  # of everything together, which changes fewer choices
_HELD_UP = 8.0  # times what reading a context token usually takes: other work held up the passes of that shape
_CLEARLY = 0.97  # a larger shape is taken for fewer rows if it costs less than this part of theirs
_FIELDS = ("shapes", "base", "per_context_token")


class CostLine(NamedTuple):
    """T of one shape: seconds without context, and per context token."""

    base: float
    per_context_token: float


@dataclass(slots=True)
class CostTable:
    """T(M, context): seconds of a pass of M rows whose contexts add up to so many tokens.

    For each measured shape: a fixed part and a part per context token. T is not monotone in M, so a shape between two
    measured ones is interpolated and nothing is assumed beyond that. A table that `learns` follows what is observed;
    its `version` grows when that may change a choice. `fast` is T of passes on cheaper weights, where there are.
    `trip` is what a pass takes beyond T where the host is far from the device: rounds of a burst do without it.
    """

    shapes: tuple[int, ...]
    base: tuple[float, ...]
    per_context_token: tuple[float, ...]
    learns: bool = field(default=False, kw_only=True)
    fast: CostTable | None = field(default=None, kw_only=True)
    trip: float = field(default=0.0, kw_only=True)
    num_observed: int = field(default=0, init=False, compare=False)
    version: int = field(default=0, init=False, compare=False)
    speed: float = field(default=1.0, init=False, compare=False)  # how much longer passes take than was timed
    # Logarithms of factors: of the fixed parts, then of those per context token. [2 * shapes]
    _moves: NDArray[np.float64] = field(init=False, repr=False, compare=False)  # not applied yet
    _drift: NDArray[np.float64] = field(init=False, repr=False, compare=False)  # applied since the version was raised
    _doubt: NDArray[np.float64] = field(init=False, repr=False, compare=False)  # their covariance
    _first_doubt: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _num_seen: Counter[int] = field(default_factory=Counter, init=False, repr=False, compare=False)  # passes, by shape
    _known: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _near: dict[int, NDArray[np.float64]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _fast_shapes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = 2 * len(self.shapes)
        self._moves, self._drift = np.zeros(count), np.zeros(count)
        octaves = np.log2(self.shapes)
        alike = np.exp(-(np.subtract.outer(octaves, octaves) ** 2) / (2 * _TILT_OCTAVES**2))
        self._first_doubt = _SPEED_ERROR + np.kron(np.eye(2), _TILT_ERROR * alike) + _LINE_ERROR * np.eye(count)
        self._doubt = self._first_doubt.copy()

    @classmethod
    def of(cls, shapes: Sequence[int], lines: Sequence[CostLine]) -> CostTable:
        return cls(tuple(shapes), tuple(x.base for x in lines), tuple(x.per_context_token for x in lines))

    @classmethod
    def from_data(cls, data: Mapping[str, Sequence[float]], *, learns: bool = False) -> CostTable:
        """What `to_data` gave; ValueError, TypeError or KeyError for anything else."""
        shapes, base, slope = (tuple(data[name]) for name in _FIELDS)
        if not shapes or not len(base) == len(slope) == len(shapes):
            raise ValueError("a cost table has a line for every shape")
        if not all(isinstance(x, float) and 0 <= x < math.inf for x in (*base, *slope)):
            raise ValueError("costs are finite numbers of seconds")
        table = cls(tuple(map(int, shapes)), base, slope, learns=learns, trip=max(0.0, float(data["trip"][0])))
        table.speed = float(data["speed"][0])
        if not 0 < table.speed < math.inf:
            raise ValueError("a speed is a finite factor")
        return table

    def to_data(self) -> dict[str, tuple[float, ...]]:
        return {name: getattr(self, name) for name in _FIELDS} | {"trip": (self.trip,), "speed": (self.speed,)}

    def slower(self, factor: float) -> CostTable:
        """What a machine would take that is so much slower."""
        base, slope = (tuple(value * factor for value in values) for values in (self.base, self.per_context_token))
        return CostTable(self.shapes, base, slope, learns=self.learns, fast=self.fast, trip=self.trip)

    def seconds(self, num_rows: int, context_tokens: int) -> float:
        found = self._known.get(num_rows)
        if found is None:
            beyond = max(1.0, num_rows / self.shapes[-1])
            base = float(np.interp(num_rows, self.shapes, self.base)) * beyond
            found = self._known[num_rows] = base, float(np.interp(num_rows, self.shapes, self.per_context_token))
        return found[0] + found[1] * context_tokens

    def cheapest(self, candidates: Iterable[int], context_tokens: int = 0) -> int:
        """The cheapest of the shapes given; a smaller one if that is not clearly cheaper."""
        ordered = sorted(candidates)
        least = min([self.seconds(m, context_tokens) for m in ordered])
        return next(m for m in ordered if _CLEARLY * self.seconds(m, context_tokens) <= least)

    def fast_shape(self, num_rows: int) -> int:
        """The shape a fast pass of so many rows runs in: its own, or a larger one that costs less."""
        found = self._fast_shapes.get(num_rows)
        if found is None:
            candidates = (num_rows, *(m for m in self.shapes if num_rows < m <= 2 * num_rows))
            found = self._fast_shapes[num_rows] = self.cheapest(candidates)
        return found

    def observe(self, shape: int, context_tokens: int, seconds: float) -> None:
        """A pass took so long: a table that learns moves towards it, less and less, and never past it.

        A Kalman filter over all lines: what is in doubt moves most, at first the whole speed, later the shapes that
        were rarely observed. A pass held up by other work moves it hardly further than any other.
        """
        if not self.learns or not 0 < seconds < math.inf:
            return
        near = self._near_to(shape)
        fixed = self.seconds(shape, 0)
        reading = self.seconds(shape, context_tokens) - fixed
        moves = self._moves.reshape(2, -1) @ near
        fixed, reading = fixed * math.exp(moves[0]), reading * math.exp(moves[1])
        predicted = fixed + reading
        parts = np.concatenate((fixed / predicted * near, reading / predicted * near))
        shared = self._doubt @ parts
        variance = float(parts @ shared) + (_SLOWER_NOISE if seconds > predicted else _FASTER_NOISE)
        most = 2 * math.sqrt(variance)
        error = max(-most, min(most, math.log(seconds / predicted)))
        self._moves += shared * (error / variance)
        self._doubt += _FORGETTING * (self._first_doubt - self._doubt) - np.outer(shared, shared / variance)
        self.num_observed += 1
        if np.abs(self._moves).max() > _NOTICEABLE:
            self._apply()

    def observe_pass(self, pass_: Pass, seconds: float, num_rounds: int = 1) -> None:
        """`observe` for a pass of the kind that is timed, and its rounds: every row of the whole model draws.

        One that the host waited for says little of T where it is far away.
        """
        if self.trip and num_rounds == 1:
            return
        seconds /= num_rounds
        shape = len(pass_.rows)
        if not self.learns or pass_.head_shape != shape or pass_.view != FULL_VIEW:
            return
        self._num_seen[shape] += 1
        num_seen = self._num_seen[shape]
        if seconds > _QUICK or num_seen <= _ALL_OF or num_seen % _ONE_IN == 0:
            self.observe(shape, _num_read(pass_), seconds)

    def pass_seconds(self, pass_: Pass) -> float:
        """The predicted time of this pass, with all its rounds."""
        num_rounds = 1 if pass_.burst is None else 1 + pass_.burst.num_rounds
        return num_rounds * self.seconds(len(pass_.rows), _num_read(pass_))

    def _near_to(self, shape: int) -> NDArray[np.float64]:
        """The parts of the measured shapes in the interpolation of a shape. [shapes]"""
        found = self._near.get(shape)
        if found is None:
            indices = np.arange(len(self.shapes))
            found = np.maximum(0.0, 1 - np.abs(indices - np.interp(shape, self.shapes, indices)))
            self._near[shape] = found
        return found

    def _apply(self) -> None:
        """Take over what was observed; forget what was looked up."""
        factors = np.exp(self._moves).reshape(2, -1)
        lines = factors * (self.base, self.per_context_token)
        self.speed *= float(np.median(factors[0]))
        self.base, self.per_context_token = map(tuple, lines.tolist())
        self._drift += self._moves
        self._moves = np.zeros_like(self._moves)
        if np.ptp(self._drift) > _NOTICEABLE or np.abs(self._drift).max() > _NOTICEABLE_SPEED:
            self._drift[:] = 0.0
            self.version += 1
        self._known.clear()
        self._fast_shapes.clear()


def _num_read(pass_: Pass) -> int:
    """Context tokens that the rows of a pass attend to."""
    return int(pass_.rows.prefix_lens.sum() + pass_.rows.tail_lens.sum())


# What is assumed of a backend that nobody timed: a pass costs a pass.
FLAT_COST = CostTable((1, 1 << 20), (1.0, 1.0), (0.0, 0.0))


class Contexts(NamedTuple):
    """The two context lengths that passes are timed at."""

    short: int
    long: int

    @classmethod
    def of(cls, limits: BackendLimits) -> Contexts:
        long = min(LONG_CONTEXT, limits.context_len - 1, limits.num_slots - 1)
        return cls(max(1, min(SHORT_CONTEXT, long // 4)), long)

    def line(self, short: float, long: float, shape: int) -> CostLine:
        """From the seconds of passes of `shape` rows at both lengths."""
        per_token = max(0.0, (long - short) / (shape * max(1, self.long - self.short)))
        return CostLine(max(1e-9, short - per_token * shape * self.short), per_token)


def measure_cost(
    backend: Backend,
    shapes: Sequence[int],
    *,
    store: int = TARGET_STORE,
    only_drafts: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    budget_seconds: float = BUDGET_SECONDS,
    progress: Progress = no_progress,
) -> CostTable:
    """Time passes at a short and a long context, as many as the budget allows. Overwrites K/V: run it first of all.

    In rounds over all shapes: what slows the machine down for a second must not slow down one shape. The most telling
    shapes come first, and those that were not reached follow from them. `only_drafts`: passes by cheaper weights.
    """
    contexts = Contexts.of(backend.limits)
    points = _points(shapes, contexts)
    probes = {point: Probe(backend, *point, store=store, only_drafts=only_drafts) for point in points}
    trips: list[float] = []

    def timed(point: _Point) -> float:
        probe = probes[point]
        seconds = probe.time(clock, min(trips, default=0.0))
        if probe.has_rounds:
            trips.append(probe.trip)
        return seconds

    times: dict[_Point, list[float]] = {}
    slow_once = points if backend.limits.prepares else points[:1]  # fresh memory, or a compiler
    for i, point in enumerate(slow_once):
        progress(f"preparing {point.shape} rows", i / len(slow_once))
        timed(point)
    trips.clear()
    start = clock()
    for i in range(_SMALL_ROUNDS):
        for point in points:
            spent = clock() - start
            is_due = point.shape <= _SMALL_SHAPE or i < _LARGE_ROUNDS
            if not is_due or (len(times) >= _NUM_CERTAIN and spent + _expected(times, point) > budget_seconds):
                continue
            progress(f"timing {point.shape} rows", min(1.0, spent / budget_seconds))
            times.setdefault(point, []).append(timed(point))
    progress("timed", 1.0)
    table = _table(shapes, contexts, {point: typical_time(listed) for point, listed in times.items()})
    table.trip = max(0.0, typical_time(trips)) if trips else 0.0
    return table


class _Point(NamedTuple):
    shape: int
    context: int


def _points(shapes: Sequence[int], contexts: Contexts) -> list[_Point]:
    """Every shape at both contexts, the most telling first."""
    short, long = contexts
    first = [
        *(_Point(shape, short) for shape in _FIRST_SHORT),
        *(_Point(shape, long) for shape in _FIRST_LONG),
        *(_Point(shape, short) for shape in _NEXT_SHORT),
    ]
    every = [_Point(shape, context) for shape in shapes for context in contexts]
    return [point for point in dict.fromkeys([*first, *every]) if point in every]


def _expected(times: dict[_Point, list[float]], point: _Point) -> float:
    """What timing a point will take: as last time, or in proportion to the nearest smaller shape."""
    if point in times:
        return times[point][-1]
    below = max((p for p in times if p.shape <= point.shape), default=min(times))
    return times[below][-1] * point.shape / below.shape


def _table(shapes: Sequence[int], contexts: Contexts, seconds: dict[_Point, float]) -> CostTable:
    """Lines through the points that were timed; between them, and beyond the last in its direction, the others."""
    short, long = contexts
    both = [m for m in shapes if (m, short) in seconds and (m, long) in seconds]
    lines = {m: contexts.line(seconds[_Point(m, short)], seconds[_Point(m, long)], m) for m in both}
    rising = [m for m in both if lines[m].per_context_token > 0]
    usual = float(np.median([lines[m].per_context_token for m in rising])) if rising else 0.0
    rising = [m for m in rising if lines[m].per_context_token <= _HELD_UP * usual]
    timed = [m for m in shapes if (m, short) in seconds]
    slopes = (
        np.interp(shapes, rising, [lines[m].per_context_token for m in rising]) if rising else np.zeros(len(shapes))
    )
    slope_of = dict(zip(shapes, slopes.tolist(), strict=True))
    bases = [max(1e-9, seconds[_Point(m, short)] - slope_of[m] * m * short) for m in timed]
    per_row = max(0.0, (bases[-1] - bases[-2]) / (timed[-1] - timed[-2])) if len(timed) > 1 else 0.0
    filled = np.interp(shapes, timed, bases) + per_row * np.maximum(0, np.asarray(shapes) - timed[-1])
    return CostTable(tuple(shapes), tuple(filled.tolist()), tuple(slopes.tolist()), learns=True)


def typical_time(times: Sequence[float]) -> float:
    """About the lower quartile; the median of three.

    Other work makes passes slower, often, and they should not seem so. But not the best: passes that wait for memory
    are now and then much faster than usual, and a cost means something only beside others of the same moment.
    """
    return sorted(times)[(len(times) + 1) // 4]


def time_pass(backend: Backend, pass_: Pass, clock: Callable[[], float]) -> float:
    """Seconds of one pass, from `submit` to its result."""
    start = clock()
    backend.submit(pass_).result()
    return clock() - start


class Probe:
    """Passes of one shape, to be timed. Where the host is far from the device, T is that of a burst's further round."""

    def __init__(
        self, backend: Backend, shape: int, context: int, *, view: View = FULL_VIEW, store: int = TARGET_STORE,
        draws: bool = True, only_drafts: bool = False,
    ) -> None:  # fmt: skip
        limits = backend.limits
        self.has_rounds = limits.prepares and draws and shape <= limits.num_seq_rows
        self.trip = 0.0  # what the last pass took beyond T
        self._backend = backend
        self._passes = []
        for num_rounds in (0, _PROBE_ROUNDS) if self.has_rounds else (0,):
            pass_ = probe_pass(backend, shape, context, view=view, store=store, draws=draws, num_rounds=num_rounds)
            if only_drafts:
                pass_ = replace(pass_, kind=PassKind.FAST, only_drafts=True)
            self._passes.append(pass_)

    def time(self, clock: Callable[[], float], trip: float = 0.0) -> float:
        """T, by one pass or two; a trip that is known is taken off where there are no rounds."""
        seconds = [time_pass(self._backend, pass_, clock) for pass_ in self._passes]
        if not self.has_rounds:
            return max(seconds[0] / 10, seconds[0] - trip)
        self._passes = [replace(pass_, table_update=NO_UPDATE) for pass_ in self._passes]  # it is there now
        round_ = max(seconds[0] / 100, (seconds[1] - seconds[0]) / _PROBE_ROUNDS)
        self.trip = seconds[0] - round_
        return round_


def probe_pass(
    backend: Backend, shape: int, context: int, *, view: View = FULL_VIEW, store: int = TARGET_STORE,
    draws: bool = True, num_rounds: int = 0,
) -> Pass:  # fmt: skip
    """A pass as the engine makes them: rows of a few sequences at the end of their contexts.

    All draw greedily; without `draws` nothing is wanted of them and the head does not run. With further rounds each row
    is of a sequence of its own.
    """
    limits = backend.limits
    num_sequences = shape if num_rounds else min(shape, _SEQUENCES, limits.num_seq_rows)
    builder = PassBuilder()
    for seq_row in range(1, num_sequences + 1):
        backend.bind(seq_row, Sampler(SamplingParams(), SampleKey(0, 0)))
        slots = NUM_RESERVED + (np.arange(min(context + num_rounds, limits.context_len)) + seq_row) % limits.num_slots
        builder.update_table(seq_row, 0, slots.tolist())
    for i in range(shape):
        seq_row = 1 + i % num_sequences
        slot = NUM_RESERVED + (context - 1 + seq_row) % limits.num_slots
        row = builder.add_chain(seq_row, context - 1, (0,), (slot,))
        if draws:
            builder.draw.rows.append(row)
        if num_rounds:
            builder.feed_back(row, 1 + num_rounds)
    return builder.build(
        PassKind.CANONICAL, lambda num_rows: shape, vocab_size=limits.vocab_size, store=store, view=view
    )
