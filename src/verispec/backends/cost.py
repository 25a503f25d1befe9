"""What a pass costs: T(M, context), measured through the backend's own `submit`. It decides speed, never bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from verispec.backends.audit import Progress, no_progress
from verispec.backends.protocol import (
    FULL_VIEW,
    Backend,
    BackendLimits,
    DrawWanted,
    Pass,
    PassKind,
    RowsBuilder,
    TableUpdate,
    View,
    Wanted,
)
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.sampling.rows import History, SampleKey, SamplingRowsBuilder
from verispec.types import SamplingParams

SHORT_CONTEXT, LONG_CONTEXT = 32, 512
_SEQUENCES = 8  # large passes are prompts of a few sequences, not hundreds of them
_SMALL_SHAPE = 32
_SMALL_ROUNDS, _LARGE_ROUNDS = 5, 3  # small passes are quick, and most of what runs


class CostLine(NamedTuple):
    """T of one shape: seconds without context, and per context token."""

    base: float
    per_context_token: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """T(M, context): seconds of a pass of M rows whose contexts add up to so many tokens.

    For each measured shape: a fixed part and a part per context token. T is not monotone in M, so a shape between two
    measured ones is interpolated and nothing is assumed beyond that.
    """

    shapes: tuple[int, ...]
    base: tuple[float, ...]
    per_context_token: tuple[float, ...]
    _known: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _fast_shapes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, shapes: Sequence[int], lines: Sequence[CostLine]) -> CostTable:
        """From one line per shape."""
        return cls(tuple(shapes), tuple(x.base for x in lines), tuple(x.per_context_token for x in lines))

    def seconds(self, num_rows: int, context_tokens: int) -> float:
        """The predicted time of a pass."""
        found = self._known.get(num_rows)
        if found is None:
            beyond = max(1.0, num_rows / self.shapes[-1])
            base = float(np.interp(num_rows, self.shapes, self.base)) * beyond
            found = self._known[num_rows] = base, float(np.interp(num_rows, self.shapes, self.per_context_token))
        return found[0] + found[1] * context_tokens

    def cheapest(self, candidates: Iterable[int], context_tokens: int = 0) -> int:
        """The cheapest of the shapes given, the smallest on a tie."""
        return min(sorted(candidates), key=lambda m: self.seconds(m, context_tokens))

    def fast_shape(self, num_rows: int) -> int:
        """The shape a fast pass of so many rows runs in: its own, or a larger one that costs less."""
        found = self._fast_shapes.get(num_rows)
        if found is None:
            candidates = (num_rows, *(m for m in self.shapes if num_rows < m <= 2 * num_rows))
            found = self._fast_shapes[num_rows] = self.cheapest(candidates)
        return found


# What is assumed of a backend that nobody timed: a pass costs a pass.
FLAT_COST = CostTable((1, 1 << 20), (1.0, 1.0), (0.0, 0.0))


class Contexts(NamedTuple):
    """The two context lengths that passes are timed at."""

    short: int
    long: int

    @classmethod
    def of(cls, limits: BackendLimits) -> Contexts:
        """Those that fit a backend."""
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
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = no_progress,
) -> CostTable:
    """Time passes of every shape at a short and a long context. Overwrites K/V: run it before the first request.

    In rounds over all shapes: what slows the machine down for a second must not slow down one shape.
    """
    contexts = Contexts.of(backend.limits)
    # The first pass of a shape also pays for fresh memory; the typical one does not.
    order = [
        (shape, context)
        for i in range(_SMALL_ROUNDS)
        for shape in shapes
        for context in contexts
        if shape <= _SMALL_SHAPE or i < _LARGE_ROUNDS
    ]
    times: dict[tuple[int, int], list[float]] = {}
    for i, (shape, context) in enumerate(order):
        progress(f"timing {shape} rows", i / len(order))
        seconds = time_pass(backend, probe_pass(backend, shape, context, store=store), clock)
        times.setdefault((shape, context), []).append(seconds)
    progress("timed", 1.0)
    typical = {key: typical_time(listed) for key, listed in times.items()}
    lines = [contexts.line(typical[shape, contexts.short], typical[shape, contexts.long], shape) for shape in shapes]
    return CostTable.of(shapes, lines)


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


def probe_pass(
    backend: Backend, shape: int, context: int, *, view: View = FULL_VIEW, store: int = TARGET_STORE, draws: bool = True
) -> Pass:
    """A pass as the engine makes them: rows of a few sequences at the end of their contexts.

    All draw greedily; without `draws` nothing is wanted of them and the head does not run.
    """
    limits = backend.limits
    num_sequences = min(shape, _SEQUENCES, limits.num_seq_rows)
    rows, sampling = RowsBuilder(), SamplingRowsBuilder()
    positions = np.arange(context, dtype=np.int32)
    for i in range(shape):
        seq_row = 1 + i % num_sequences
        slot = NUM_RESERVED + (context - 1 + seq_row) % limits.num_slots
        rows.add(token_id=0, position=context - 1, slot=slot, seq_row=seq_row, prefix_len=context)
        sampling.add(
            SamplingParams(), SampleKey(0, 0), t=context, history=History(frozenset(), {}, 0), path_ids=(),
            stopping_ids=(), vocab_size=limits.vocab_size,
        )  # fmt: skip
    update = TableUpdate(
        np.repeat(np.arange(1, num_sequences + 1, dtype=np.int32), context),
        np.tile(positions, num_sequences),
        np.concatenate([NUM_RESERVED + (positions + s) % limits.num_slots for s in range(1, num_sequences + 1)]).astype(
            np.int32
        ),
    )
    wanted = Wanted(draw=DrawWanted(np.arange(shape, dtype=np.int32), sampling.build()) if draws else None)
    built, head_shape = rows.build(shape), shape if draws else 0
    return Pass(PassKind.CANONICAL, built, wanted, update, head_shape=head_shape, store=store, view=view)
