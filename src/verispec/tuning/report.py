"""What tuning found, for people: a table, one honest sentence, plain data for JSON, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from verispec.backends.cost import CostTable
from verispec.backends.protocol import FULL_VIEW, SubLayer, View
from verispec.errors import InputError
from verispec.model.architecture import Architecture, expected_tensors
from verispec.spec.skip_menu import (
    BAYES,
    GREEDY,
    MAX_DRAFT,
    TYPICAL_CONTEXT,
    WORTH_IT,
    MenuEntry,
    SkipMenu,
    SkipProfile,
    expected_tokens,
)

LENGTHS = range(1, MAX_DRAFT + 1)
_MLP_TENSORS = frozenset(("mlp_norm", "gate", "up", "down", "mlp_post_norm"))
_MARKERS = {GREEDY: ("o", "greedy removal"), BAYES: ("^", "Bayesian optimisation")}


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One entry with everything that follows from the profile. `c` and `v` are those at the best draft length."""

    entry: MenuEntry
    weights_left: float
    c: float
    v: float
    speedups: tuple[float, ...]  # by draft length, from 1
    best_len: int

    @classmethod
    def of(cls, entry: MenuEntry, profile: SkipProfile, architecture: Architecture) -> EntryReport:
        best = profile.best(entry.view, entry.agreement)
        c, v = profile.ratios(entry.view, best.draft_len)
        speedups = tuple(profile.speedup(entry.view, entry.agreement, n) for n in LENGTHS)
        return cls(entry, weights_left(architecture, entry.view), c, v, speedups, best.draft_len)

    @property
    def speedup(self) -> float:
        return self.speedups[self.best_len - 1]


def weights_left(architecture: Architecture, view: View) -> float:
    """The share of the model's weights, embedding and head included, that a pass of the view still uses."""
    total = skipped = 0
    for name, spec in expected_tensors(architecture).items():
        total += prod(spec.shape)
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            skipped += prod(spec.shape) * (SubLayer(int(layer), part in _MLP_TENSORS) in view.skipped)
    return 1 - skipped / total


def table(menu: SkipMenu, architecture: Architecture) -> str:
    """The profile in a sentence and a line per entry; each one's best draft length is marked, and the best entry."""
    reports = [EntryReport.of(entry, menu.profile, architecture) for entry in menu.entries]
    best = menu.best()
    lengths = "".join(f"{n:>6}" for n in LENGTHS)
    lines = [
        _profile_line(menu.profile, architecture.num_layers),
        f"Sets of {2 * architecture.num_layers} sub-layers (search: {menu.search}), scored on {menu.num_tokens} tokens "
        "of the model's own that the search has not seen:",
        "",
        f"  {'skipped':>7}  attn  mlp  weights  agree  at T=1      c      v   predicted speed-up for drafts of",
        f"  {'':7}  {'':4}  {'':3}  {'left':>7}  {'':5}  {'':6}  {'':5}  {'':5}  {lengths}",
    ]
    return "\n".join(lines + [_entry_line(r, is_best=r.entry is best) for r in reports]) + "\n"


def _profile_line(profile: SkipProfile, num_layers: int) -> str:
    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.2f} ms"

    costs = {name: table.seconds(1, TYPICAL_CONTEXT) for name, table in _tables(profile).items()}
    whole, attention, mlp, head = (costs.get(name, 0.0) for name in ("seconds", "attention", "mlp", "head"))
    parts = [f"{num_layers} x {ms(attention)} attention", f"{num_layers} x {ms(mlp)} MLP"]
    parts += [f"{ms(head)} head"] if "head" in costs else []
    parts.append(f"{ms(max(0.0, whole - num_layers * (attention + mlp) - head))} fixed")
    return f"One row at {TYPICAL_CONTEXT} tokens of context takes {ms(whole)}: {', '.join(parts)}."


def _entry_line(report: EntryReport, *, is_best: bool) -> str:
    entry = report.entry
    attention, mlp = len(entry.view.skipped_attention), len(entry.view.skipped_mlp)
    speedups = "".join(
        f"{speedup:5.2f}{'*' if n == report.best_len else ' '}"
        for n, speedup in zip(LENGTHS, report.speedups, strict=True)
    )
    mark = ">" if is_best else " "
    origin = "  bayes" if entry.found_by == BAYES else ""
    return (
        f"{mark} {entry.num_skipped:7}  {attention:4}  {mlp:3}  {report.weights_left:7.2f}  {entry.agreement:5.2f}  "
        f"{entry.sampled_agreement:6.2f}  {report.c:5.2f}  {report.v:5.2f}   {speedups}{origin}"
    ).rstrip()


def verdict(menu: SkipMenu, num_layers: int) -> str:
    """What layer skipping is predicted to give here, and what the drafter will make of it."""
    best = menu.best()
    if best is None:
        return (
            "there is nothing to skip: the first and the last layer are always kept"
            if num_layers <= 2
            else "no set of sub-layers agrees with the model often enough: --drafter skip will not draft"
        )
    found = menu.profile.best(best.view, best.agreement)
    sets = f"with {best.num_skipped} of {2 * num_layers} sub-layers skipped and drafts of {found.draft_len}"
    if found.speedup < WORTH_IT:
        return (
            f"layer skipping is predicted to give at most {found.speedup:.2f}x here, {sets}: --drafter skip will not "
            "draft unless --force is given"
        )
    return f"layer skipping is predicted to give {found.speedup:.2f}x here, {sets}"


def as_object(menu: SkipMenu, architecture: Architecture) -> dict[str, Any]:
    best = menu.best()
    return {
        "search": menu.search,
        "num_tokens": menu.num_tokens,
        "num_sub_layers": 2 * architecture.num_layers,
        "profile": _profile_object(menu.profile),
        "entries": [
            _entry_object(EntryReport.of(e, menu.profile, architecture), is_best=e is best) for e in menu.entries
        ],
        "verdict": verdict(menu, architecture.num_layers),
    }


def _profile_object(profile: SkipProfile) -> list[dict[str, float]]:
    return [
        {"rows": rows, **{name: t.seconds(rows, rows * TYPICAL_CONTEXT) for name, t in _tables(profile).items()}}
        for rows in profile.full.shapes
    ]


def _tables(profile: SkipProfile) -> dict[str, CostTable]:
    tables = {"seconds": profile.full, "attention": profile.attention, "mlp": profile.mlp, "head": profile.head}
    return {name: table for name, table in tables.items() if table is not None}


def _entry_object(report: EntryReport, *, is_best: bool) -> dict[str, Any]:
    entry = report.entry
    return {
        "skipped_attention": sorted(entry.view.skipped_attention),
        "skipped_mlp": sorted(entry.view.skipped_mlp),
        "found_by": entry.found_by,
        "weights_left": report.weights_left,
        "agreement": entry.agreement,
        "sampled_agreement": entry.sampled_agreement,
        "c": report.c,
        "v": report.v,
        "speedups": list(report.speedups),
        "best_draft_len": report.best_len,
        "speedup": report.speedup,
        "best": is_best,
    }


def break_even(profile: SkipProfile, c: float, *, speedup: float = 1.0) -> float | None:
    """The agreement at which drafts of cost `c` give this speed-up, whatever their length; None if none can."""
    verify_costs = [profile.ratios(FULL_VIEW, n)[1] for n in LENGTHS]

    def best(agreement: float) -> float:
        return max(expected_tokens(agreement, n) / (n * c + v) for n, v in zip(LENGTHS, verify_costs, strict=True))

    low, high = 0.0, 1.0
    if best(high) < speedup:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if best(middle) >= speedup else (middle, high)
    return high


def plot(menus: Mapping[str, SkipMenu], path: Path) -> None:
    """Agreement against draft cost of every entry, by menu and search, and where drafting breaks even.

    Raises InputError without matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'verispec[tune]'") from error
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (label, menu) in enumerate(menus.items()):
        colour = f"C{i}"
        for found_by, (marker, name) in _MARKERS.items():
            chosen = [e for e in menu.entries if e.found_by == found_by]
            if chosen:
                costs = [menu.profile.ratios(e.view, 1)[0] for e in chosen]
                axes.plot(
                    costs, [e.agreement for e in chosen], linestyle="-" if found_by == GREEDY else "", marker=marker,
                    markerfacecolor=colour if found_by == GREEDY else "white", color=colour, alpha=0.8, linewidth=0.8,
                    markersize=5, label=f"{label}: {name}",
                )  # fmt: skip
        _plot_break_even(axes, menu.profile, colour)
    axes.set(xlabel="draft cost c (draft step / full step)", ylabel="agreement with the full model", xlim=(0, 1.02))
    axes.set_ylim(0, 1.02)
    axes.set_title("Layer skipping: above a line, drafts pay")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=150)


def _plot_break_even(axes: Any, profile: SkipProfile, colour: str) -> None:
    costs = [i / 100 for i in range(1, 101)]
    for speedup, style in ((1.0, "--"), (WORTH_IT, ":")):
        points = [(c, a) for c in costs if (a := break_even(profile, c, speedup=speedup)) is not None]
        if points:
            label = "breaks even" if speedup == 1.0 else f"{speedup:g}x"
            axes.plot(*zip(*points, strict=True), linestyle=style, color=colour, linewidth=1.2, label=label)
