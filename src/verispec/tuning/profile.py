"""What parts of a pass cost: timed as differences between passes with and without all sub-layers of a kind.

A clock's noise is divided by the number of layers, and passes with and without take turns, so that a machine that
changes its speed meanwhile changes it for all of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from verispec.backends.audit import Progress, no_progress
from verispec.backends.cost import Contexts, CostLine, CostTable, Probe, typical_time
from verispec.backends.protocol import FULL_VIEW, Backend, View
from verispec.spec.skip_menu import TYPICAL_CONTEXT, SkipProfile

_LARGEST_TIMED = 16  # sequences that may draft together; larger shapes are scaled
_ROUNDS = 7
_MOST_IN_A_ROUND = 3  # times that the quickest passes, which noise disturbs most, are run


class _Times(NamedTuple):
    """Seconds of passes of one shape and context; without any sub-layer, `bare` has no head either."""

    full: float
    no_attention: float
    no_mlp: float
    neither: float
    bare: float

    @property
    def attention(self) -> float:
        """All attention sub-layers: what skipping them saves, on average of both ways there are to see it."""
        return max(0.0, (self.full - self.no_attention + self.no_mlp - self.neither) / 2)

    @property
    def mlp(self) -> float:
        """All MLP sub-layers; with those of attention this adds up to what skipping everything saves."""
        return max(0.0, (self.full - self.no_mlp + self.no_attention - self.neither) / 2)

    @property
    def head(self) -> float:
        """Final norm, logits and draws."""
        return max(0.0, self.neither - self.bare)


class _Lines(NamedTuple):
    """The parts of a pass of one shape."""

    full: CostLine
    attention: CostLine
    mlp: CostLine
    head: CostLine


def measure_profile(
    backend: Backend,
    num_layers: int,
    full: CostTable,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = no_progress,
) -> SkipProfile:
    """Time passes of views at the small shapes of `full`, the calibration's table. Overwrites K/V.

    Larger shapes are those of `full` at this session's speed, with the same shares of a pass for its parts.
    """
    contexts = Contexts.of(backend.limits)
    shapes = tuple(m for m in full.shapes if m <= _LARGEST_TIMED) or full.shapes[:1]
    probes = {shape: [_probes(backend, shape, context, num_layers) for context in contexts] for shape in shapes}
    times: dict[int, list[list[_Times]]] = {shape: [[] for _ in contexts] for shape in shapes}
    # All shapes in every round: what disturbs the machine for a second must not disturb one shape alone.
    for i in range(_ROUNDS):
        for j, shape in enumerate(shapes):
            progress("timing sub-layers", (i + j / len(shapes)) / _ROUNDS)
            for _ in range(max(1, _MOST_IN_A_ROUND // shape)):
                for each, found in zip(probes[shape], times[shape], strict=True):
                    found.append(_Times(*(p.time(clock, full.trip) for p in each)))
    progress("timed", 1.0)
    typical = {
        shape: [_Times(*map(typical_time, zip(*each, strict=True))) for each in times[shape]] for shape in shapes
    }
    lines = [_lines(typical[shape], shape, contexts, num_layers) for shape in shapes]
    lines += _scaled(full, shapes[-1], lines[-1])
    return SkipProfile(*(CostTable.of(full.shapes, part) for part in zip(*lines, strict=True)))


def _probes(backend: Backend, shape: int, context: int, num_layers: int) -> list[Probe]:
    """In the order of `_Times`."""
    layers = range(num_layers)
    views = (FULL_VIEW, View.without(attention=layers), View.without(mlp=layers), View.without(layers, layers))
    bare = Probe(backend, shape, context, view=views[-1], draws=False)
    return [*(Probe(backend, shape, context, view=view) for view in views), bare]


def _lines(times: Sequence[_Times], shape: int, contexts: Contexts, num_layers: int) -> _Lines:
    short, long = times
    return _Lines(
        full=contexts.line(short.full, long.full, shape),
        attention=contexts.line(short.attention / num_layers, long.attention / num_layers, shape),
        mlp=CostLine((short.mlp + long.mlp) / 2 / num_layers, 0.0),  # sees no context: both measure the same
        head=CostLine((short.head + long.head) / 2, 0.0),
    )


def _scaled(full: CostTable, last: int, timed: _Lines) -> list[_Lines]:
    """The shapes of `full` beyond the last one that was timed."""
    context_tokens = last * TYPICAL_CONTEXT
    now = timed.full.base + timed.full.per_context_token * context_tokens
    speed = now / full.seconds(last, context_tokens)
    lines = []
    for shape, base, slope in zip(full.shapes, full.base, full.per_context_token, strict=True):
        if shape > last:
            whole = CostLine(base * speed, slope * speed)
            lines.append(_Lines(whole, *(_share(part, timed.full, whole) for part in timed[1:])))
    return lines


def _share(part: CostLine, of: CostLine, whole: CostLine) -> CostLine:
    """What is to `whole` as `part` is to `of`."""
    shares = (p / o if o else 0.0 for p, o in zip(part, of, strict=True))
    return CostLine(*(w * share for w, share in zip(whole, shares, strict=True)))
