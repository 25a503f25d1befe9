"""What a pass costs: T(M, context), measured through the backend's own `submit`. It decides speed, never bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verispec.backends.audit import Progress, no_progress
from verispec.backends.protocol import Backend, DrawWanted, Pass, PassKind, RowsBuilder, TableUpdate, Wanted
from verispec.kv import NUM_RESERVED
from verispec.sampling.rows import History, SampleKey, SamplingRowsBuilder
from verispec.types import SamplingParams

SHORT_CONTEXT, LONG_CONTEXT = 32, 512
_SEQUENCES = 8  # large passes are prompts of a few sequences, not hundreds of them
_SMALL_SHAPE = 32


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
        return self.cheapest((num_rows, *(m for m in self.shapes if num_rows < m <= 2 * num_rows)))


# What is assumed of a backend that nobody timed: a pass costs a pass.
FLAT_COST = CostTable((1, 1 << 20), (1.0, 1.0), (0.0, 0.0))


def measure_cost(
    backend: Backend,
    shapes: Sequence[int],
    *,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = no_progress,
) -> CostTable:
    """Time passes of every shape at a short and a long context. Overwrites K/V: run it before the first request."""
    longest = min(LONG_CONTEXT, backend.limits.context_len - 1, backend.limits.num_slots - 1)
    shortest = max(1, min(SHORT_CONTEXT, longest // 4))
    base, slope = [], []
    for i, shape in enumerate(shapes):
        progress(f"timing {shape} rows", i / len(shapes))
        # The first pass of a shape also pays for fresh memory, so none is timed only once, but for the slowest.
        short = min(_time_pass(backend, shape, shortest, clock) for _ in range(repeats))
        long = min(_time_pass(backend, shape, longest, clock) for _ in range(repeats if shape <= _SMALL_SHAPE else 1))
        per_token = max(0.0, (long - short) / (shape * max(1, longest - shortest)))
        base.append(max(1e-9, short - per_token * shape * shortest))
        slope.append(per_token)
    progress("timed", 1.0)
    return CostTable(tuple(shapes), tuple(base), tuple(slope))


def _time_pass(backend: Backend, shape: int, context: int, clock: Callable[[], float]) -> float:
    pass_ = _probe_pass(backend, shape, context)
    start = clock()
    backend.submit(pass_).result()
    return clock() - start


def _probe_pass(backend: Backend, shape: int, context: int) -> Pass:
    """A pass as the engine makes them: rows of a few sequences at the end of their contexts, all drawing greedily."""
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
    draws = DrawWanted(np.arange(shape, dtype=np.int32), sampling.build())
    return Pass(PassKind.CANONICAL, rows.build(shape), Wanted(draw=draws), update, head_shape=shape)
