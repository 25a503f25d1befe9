"""Row purity by measurement: probes of a backend's kernels, and the families of shapes that agree.

The audit assumes nothing. It runs each kind of row kernel at every candidate shape, several times, with the probe row
moved and its neighbours replaced (random, huge, zero, NaN, Inf), and compares bits. Shapes that agree on every kernel
form a family. One family is chosen by a fixed rule, never by timing; timing chooses only within it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.errors import InputError

CANDIDATE_SHAPES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
NEIGHBOURS = ("random", "nan", "huge", "inf", "zero", "random")
_MAX_INDICES = 6
_LARGE_SHAPE = 16  # larger shapes are tried in half as many ways: they take most of the time
_NOISE_SHIFTS = 1024  # random neighbours are windows of one random vector: cheap, and no two alike

Progress = Callable[[str, float], None]


def no_progress(stage: str, share: float) -> None:
    """The progress callback that shows nothing."""


def _only_form(num_rows: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class KernelProbe:
    """One kind of row kernel: `run` maps inputs [M, width] to outputs [M, ...], each row on its own if it is pure.

    `form` names the implementation that `run` takes for so many rows, where it has several.
    """

    name: str
    width: int
    run: Callable[[NDArray[np.float32]], NDArray[np.generic]]
    form: Callable[[int], str] = _only_form


class Form(NamedTuple):
    """An implementation, and the shapes in which it was measured."""

    name: str
    shapes: tuple[int, ...]


class ProbeOutcome(NamedTuple):
    """What the audit saw of one kernel: shapes whose bits agree, class by class, and shapes that are not pure.

    `forms` are the implementations that were measured: those whose shapes share a class give the same bits.
    """

    name: str
    classes: tuple[tuple[int, ...], ...]
    impure: tuple[int, ...]
    forms: tuple[Form, ...] = ()


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit's findings: per kernel, and the families that hold for all kernels together."""

    outcomes: tuple[ProbeOutcome, ...]
    families: tuple[tuple[int, ...], ...]

    def choose(self, named: Sequence[int] | None = None) -> tuple[int, ...]:
        """The canonical family: the one with the largest pure shape, or the shapes an operator named.

        Empty if no shape is pure: the guarantee is then refused, never weakened.
        """
        if named is None:
            return max(self.families, key=max, default=())
        if not named or not any(set(named) <= set(f) for f in self.families):
            raise InputError(f"the shapes {list(named)} are not one pure family here\n{self.table()}")
        return tuple(sorted(named))

    def table(self) -> str:
        """The findings as lines of text: one for all kernels of which the same was found."""
        names: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            classes = " ".join("{" + ",".join(map(str, c)) + "}" for c in outcome.classes) or "none"
            impure = f"  impure: {','.join(map(str, outcome.impure))}" if outcome.impure else ""
            names.setdefault(f"pure: {classes}{impure}", []).append(outcome.name)
        families = " ".join("{" + ",".join(map(str, f)) + "}" for f in self.families) or "none"
        return "\n".join([*_lines(names), f"{'families':>12}  {families}"])

    def forms_table(self) -> str:
        """Which implementations were compared, by number of rows, in the same way; empty if there is one of each."""
        names: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.forms:
                every = sorted(shape for form in outcome.forms for shape in form.shapes)
                shown = [f"{form.name} ({_ranges(form.shapes, every)})" for form in outcome.forms]
                names.setdefault("; ".join(shown), []).append(outcome.name)
        return "\n".join(_lines(names))


def _lines(names: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{', '.join(alike):>12}  {found}" for found, alike in names.items()]


def _ranges(shapes: Sequence[int], every: Sequence[int]) -> str:
    """Shapes as ranges of those there are: of 1, 2, 4, 8 and 16, "1-4, 16"."""
    runs: list[list[int]] = []
    for shape in shapes:
        if runs and every.index(shape) == every.index(runs[-1][-1]) + 1:
            runs[-1].append(shape)
        else:
            runs.append([shape])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def audit(
    probes: Sequence[KernelProbe], *, shapes: Sequence[int] = CANDIDATE_SHAPES, progress: Progress = no_progress
) -> Audit:
    outcomes = []
    for i, probe in enumerate(probes):
        progress(f"auditing {probe.name}", i / len(probes))
        outcomes.append(_audit_kernel(probe, shapes))
    progress("audited", 1.0)
    return Audit(tuple(outcomes), common_families(outcomes))


def _audit_kernel(probe: KernelProbe, shapes: Sequence[int]) -> ProbeOutcome:
    rng = np.random.default_rng(0)
    row = rng.standard_normal(probe.width).astype(np.float32)
    noise = rng.standard_normal(probe.width + _NOISE_SHIFTS).astype(np.float32)
    classes: dict[bytes, list[int]] = {}
    impure = []
    forms: dict[str, list[int]] = {}
    for shape in shapes:
        if name := probe.form(shape):
            forms.setdefault(name, []).append(shape)
        seen = {_probe_bits(probe, row, noise, shape, index, kind) for index, kind in _placements(shape)}
        seen |= _bits_everywhere(probe, row, shape)
        if len(seen) > 1:
            impure.append(shape)
        else:
            classes.setdefault(seen.pop(), []).append(shape)
    compared = tuple(Form(name, tuple(found)) for name, found in forms.items())
    return ProbeOutcome(probe.name, tuple(tuple(c) for c in classes.values()), tuple(impure), compared)


def _placements(shape: int) -> Iterable[tuple[int, str]]:
    """Where the probe row stands and what surrounds it: first, last and spread indices, every kind of neighbour."""
    indices = sorted({round(i * (shape - 1) / (_MAX_INDICES - 1)) for i in range(_MAX_INDICES)})
    count = max(len(indices), len(NEIGHBOURS)) if shape <= _LARGE_SHAPE else len(indices) // 2
    for i in range(count):
        yield indices[i * 5 % len(indices)], NEIGHBOURS[i % len(NEIGHBOURS)]


def _probe_bits(
    probe: KernelProbe, row: NDArray[np.float32], noise: NDArray[np.float32], shape: int, index: int, kind: str
) -> bytes:
    """The bits of the probe row's result at `index` among `shape` rows, its neighbours being of one kind."""
    constants = {"zero": 0.0, "nan": np.nan, "inf": np.inf}
    if kind in constants:
        x = np.full((shape, probe.width), constants[kind], np.float32)
    else:
        shifts = (np.arange(shape) * 7 + index) % _NOISE_SHIFTS
        x = np.lib.stride_tricks.sliding_window_view(noise, probe.width)[shifts]
        x = x * np.float32(1e30) if kind == "huge" else x
    x[index] = row
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(probe.run(x)[index]).tobytes()


def _bits_everywhere(probe: KernelProbe, row: NDArray[np.float32], shape: int) -> set[bytes]:
    """The bits of the probe row's result at every index: one run in which all rows are the probe row."""
    results = probe.run(np.repeat(row[None], shape, axis=0))
    first = np.ascontiguousarray(results[0]).tobytes()
    differing = np.flatnonzero([(results[i] != results[0]).any() for i in range(shape)])
    return {first} | {np.ascontiguousarray(results[i]).tobytes() for i in differing}


def common_families(outcomes: Sequence[ProbeOutcome]) -> tuple[tuple[int, ...], ...]:
    """Shapes that are in the same class of every kernel, as families in order of their smallest shape."""
    shapes = sorted({shape for outcome in outcomes for c in outcome.classes for shape in c})
    families: dict[tuple[int, ...], list[int]] = {}
    for shape in shapes:
        found = [[i for i, c in enumerate(outcome.classes) if shape in c] for outcome in outcomes]
        if all(found):
            families.setdefault(tuple(i for (i,) in found), []).append(shape)
    return tuple(tuple(f) for f in families.values())
