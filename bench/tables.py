"""What bench/speculation.py measured, as tables, and as one chart: speed-up of each system by task, one stream.

python bench/tables.py RESULTS.json ... --chart CHART.svg [--model NAME] [--temperature 0]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Cells = list[dict[str, Any]]
# Systems of the chart by arm: what they are called there, and their colours.
SYSTEMS = {
    "auto": ("auto: the policy chooses", "#222222"),
    "suffix": ("suffix matching", "#1b7837"),
    "lookup": ("looked up in the text", "#7fbf7b"),
    "model, beam": ("draft model, tree (RSD, shared noise)", "#762a83"),
    "model, forced": ("draft model, chains that end early", "#de77ae"),
    "skip, forced": ("draft and verify (layers skipped)", "#2166ac"),
    "decode": ("decode, verify, rollback", "#d6604d"),
}
# How `auto` compares with the best fixed choice: the figure and its names in a cell.
AGAINST_BEST = {
    "auto / best fixed, chosen on other rounds": ("auto_against_chosen", "chosen"),
    "auto / luckiest fixed, on the same rounds": ("auto_against_best", "best"),
}
# Arms of the part trees by kind.
TREE_KINDS = {
    "match chain": "chains", **dict.fromkeys(("match branch", "match beam", "one-hot"), "trees"),
    **dict.fromkeys(("SD", "RSD-C", "RSD-S"), "p/q rules"),
}  # fmt: skip
COMPARED = {"match beam": "RSD-S", "match branch": "RSD-C"}  # shared noise and p/q rules, by trees of the same shape
NEAR = 0.1  # an error of predictions that is counted as none
WIDTH, LEFT, RIGHT, BAR, GAP, TOP, BOTTOM = 860, 150, 70, 13, 14, 96, 62


def tables(data: Mapping[str, Any]) -> Iterator[str]:
    """Markdown of everything in a file of results, model by model."""
    for model, about in data["about"].items():
        cells = [cell for cell in data["cells"].values() if cell["model"] == model]
        yield f"\n## {model}"
        yield "; ".join(f"{name}: {value}" for name, value in about.items() if value and not isinstance(value, dict))
        for part, make in PARTS.items():
            if chosen := [cell for cell in cells if cell["part"] == part]:
                yield f"\n### {part}\n"
                yield from make(chosen)


def joined(files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cells of several files. Of one cell each arm is the last that was measured, beside the `none` of its own run."""
    about, cells = dict[str, Any](), dict[str, Any]()
    for file in files:
        about |= file["about"]
        for key, cell in file["cells"].items():
            cells[key] = {**cell, "arms": {**cells.get(key, {"arms": {}})["arms"], **cell["arms"]}}
    return {"about": about, "cells": cells}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _interval(figure: Sequence[float]) -> str:
    value, low, high = figure
    return f"{value:.2f} ({low:.2f}-{high:.2f})"


def _speed(arm: Mapping[str, Any] | None) -> str:
    """The speed-up, and in brackets what was predicted of it."""
    if arm is None:
        return ""
    return _interval(arm["speed_up"]) + (f" [{arm['predicted']:.2f}]" if "predicted" in arm else "")


def _names(cells: Cells) -> list[str]:
    return [name for name in dict.fromkeys(name for cell in cells for name in cell["arms"]) if name != "none"]


def _by_task(cells: Cells) -> Iterator[str]:
    """Speed-ups against `none`, with what was predicted of forced drafts."""
    names = _names(cells)
    more = list(AGAINST_BEST) if "best" in cells[0] else []
    yield from _table(
        ["task", "T", "batch", "none, tok/s", *names, *more],
        (
            [
                cell["task"], f"{cell['temperature']:g}", str(cell["batch"]),
                f"{cell['arms']['none']['tokens_per_second']:.0f}", *(_speed(cell["arms"].get(n)) for n in names),
                *(_against_best(cell, *AGAINST_BEST[title]) for title in more),
            ]
            for cell in cells
        ),
    )  # fmt: skip
    yield from _errors(cells, {})
    yield "\nTokens a pass, and accepted of drafted tokens:\n"
    yield from _table(
        ["task", "T", "batch", *names],
        (
            [
                cell["task"],
                f"{cell['temperature']:g}",
                str(cell["batch"]),
                *(_drafts(cell["arms"].get(n)) for n in names),
            ]
            for cell in cells
        ),
    )


def _against_best(cell: Mapping[str, Any], figure: str, best: str) -> str:
    """With whom it was compared; nothing in cells that have no such figure."""
    if figure not in cell:
        return ""
    names = [cell[best]] if isinstance(cell[best], str) else dict.fromkeys(cell[best])
    return f"{_interval(cell[figure])}, {' and '.join(names)}"


def _drafts(arm: Mapping[str, Any] | None) -> str:
    return "" if arm is None else f"{arm['per_pass'][0]:.2f}, {arm['accepted']:.0%} of {arm['drafted']:.2f} a token"


def _errors(cells: Cells, kinds: Mapping[str, str]) -> Iterator[str]:
    """How far predictions of whole answers were off, and how many were near, by kind of arm. An arm without a kind is
    one by itself."""
    off: dict[str, list[float]] = {}
    for cell in cells:
        for name, arm in cell["arms"].items():
            if "predicted" in arm:
                error = abs(arm["predicted"] / arm["speed_up"][0] - 1)
                off.setdefault(kinds.get(name, name), []).append(error)
    every = [error for errors in off.values() for error in errors]
    if every:
        yield (
            f"\nPredicted against measured: median error {statistics.median(every):.1%}, largest {max(every):.1%}, "
            f"{_num_near(every)} of {len(every)} within {NEAR:.0%}: "
            + ", ".join(f"{kind} {_num_near(errors)} of {len(errors)}" for kind, errors in off.items()) + "."
        )  # fmt: skip


def _num_near(errors: Sequence[float]) -> int:
    return sum(error <= NEAR for error in errors)


def _trees(cells: Cells) -> Iterator[str]:
    """Tokens a pass, and tokens a second against `none`."""
    columns = [cell["column"] for cell in cells]
    yield from _table(
        ["tokens a pass (95 %)", *columns],
        ([name, *(_interval(cell["arms"][name]["per_pass"]) for cell in cells)] for name in _names(cells)),
    )
    yield from _compared(cells)
    yield ""
    yield from _table(
        ["tokens a second against none (95 %) [predicted]", *columns],
        ([name, *(_speed(cell["arms"].get(name)) for cell in cells)] for name in _names(cells)),
    )
    yield from _errors(cells, TREE_KINDS)


def _compared(cells: Cells) -> Iterator[str]:
    """Tokens a pass of shared noise against the p/q rule of the same trees, prompt by prompt."""
    for name, other in COMPARED.items():
        figures = [(cell["column"], cell["arms"].get(name, {}).get("compared")) for cell in cells]
        if said := [f"{column} {_interval(figure)}" for column, figure in figures if figure is not None]:
            yield f"\nTokens a pass, {name} / {other}, same prompts (95 %): {', '.join(said)}."


def _replay(cells: Cells) -> Iterator[str]:
    """All there from the start, against the runs around them in the same rounds (all non-deterministic: the run at a
    round's end against the one at its beginning); then arriving one by one: medians of some runs, and their ranges."""
    every = [(cell, name, arm) for cell in cells for name, arm in cell["arms"].items()]
    yield from _table(
        ["deterministic", "drafter", "tok/s, all at once", "against all non-deterministic (95 %)", "rounds"],
        (
            [f"{cell['share']} %", name, f"{arm['tokens_per_second']:.0f}", _interval(arm["speed_up"]),
             str(arm.get("rounds", ""))]
            for cell, name, arm in every
        ),
    )  # fmt: skip
    yield "\nArriving as in the trace, medians (least-most):\n"
    kinds = ("deterministic", "other")
    yield from _table(
        ["deterministic", "drafter", "tok/s", *(f"latency of {kind}, s, {p}" for kind in kinds for p in ("p50", "p99")),
         *(f"between tokens of {kind}, ms, {p}" for kind in kinds for p in ("p50", "p99"))],
        (
            [f"{cell['share']} %", name, _range(arm["arrivals"], "tokens_per_second", 1, 0),
             *(_range(arm["arrivals"], f"{kind} latency {p}", 1, 2) for kind in kinds for p in ("p50", "p99")),
             *(_range(arm["arrivals"], f"{kind} gap {p}", 1e3, 1) for kind in kinds for p in ("p50", "p99"))]
            for cell, name, arm in every if "arrivals" in arm
        ),
    )  # fmt: skip


def _range(figures: Mapping[str, Sequence[float]], name: str, scale: float, digits: int) -> str:
    """A median with its range; nothing where nobody was of that kind."""
    if name not in figures:
        return ""
    value, low, high = (f"{figure * scale:.{digits}f}" for figure in figures[name])
    return f"{value} ({low}-{high})"


def _recomputed(cells: Cells) -> Iterator[str]:
    yield from _table(
        ["fast passes", "T", "N", "tokens", "replays", "mismatches", "recomputed (95 %)",
         "accepted of those tried (95 %)", "tok/s"],
        (
            [c["kind"], f"{c['temperature']:g}", str(c["N"]), str(c["committed"]), str(c["replays"]),
             str(c["mismatches"]), f"{c['recomputed']}: {_share(c['recomputed_share'], '.1%')}",
             _share(c["acceptance"], ".3f"), f"{c['tokens_per_second']:.0f}"]
            for c in cells
        ),
    )  # fmt: skip


def _share(figure: float | Sequence[float], digits: str) -> str:
    """With its interval; files from before have none."""
    if isinstance(figure, float):
        return f"{figure:{digits}}"
    value, low, high = (f"{each:{digits}}" for each in figure)
    return f"{value} ({low}-{high})"


PARTS = {"tasks": _by_task, "trees": _trees, "replay": _replay, "recomputed": _recomputed, "auto": _by_task}


def chart(data: Mapping[str, Any], model: str, temperature: float) -> str:
    """An SVG of bars with their intervals, task by task; a line where nothing is gained."""
    cells = [
        cell for cell in data["cells"].values()
        if (cell["part"], cell["model"], cell.get("batch"), cell.get("temperature")) == ("tasks", model, 1, temperature)
    ]  # fmt: skip
    if not cells:
        raise SystemExit(f"no cells of part tasks, {model}, T = {temperature:g}, batch 1")
    cells.sort(key=lambda cell: -cell["arms"].get("auto", cell["arms"]["none"])["speed_up"][0])
    systems = [name for name in SYSTEMS if any(name in cell["arms"] for cell in cells)]
    about = data["about"][model]
    most = max(cell["arms"][n]["speed_up"][2] for cell in cells for n in systems if n in cell["arms"])
    top = TOP + 18 * ((len(systems) + 1) // 2)
    height = top + len(cells) * (len(systems) * BAR + GAP) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(1.25, most)

    def text(x: float, y: float, said: str, **style: Any) -> str:
        named = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(said)}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'

    draft = f", drafts by {about['draft model']}" if about.get("draft model") else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(20, 28, f"Speed-up of each system by task, one stream, temperature {temperature:g}", font_size=15,
             font_weight="bold"),
        text(20, 50, "tokens per second against no drafts (1x); all give the same tokens, bit for bit; "
             "thin lines: 95 % intervals"),
        text(20, 68, f"{model}{draft}; {about['hardware']}, backend {about['backend']}", fill="#555555"),
    ]  # fmt: skip
    for i, name in enumerate(systems):
        x, y = 20 + i % 2 * 400, TOP - 8 + 18 * (i // 2)
        label, colour = SYSTEMS[name]
        parts += [f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>', text(x + 18, y, label)]
    bottom = height - BOTTOM + 4
    ticks = [i * (0.25 if most < 2.5 else 0.5) for i in range(1 + int(max(1.25, most) / (0.25 if most < 2.5 else 0.5)))]
    for tick in ticks:
        x = LEFT + tick * scale
        parts.append(line(x, top, x, bottom, "#dddddd"))
        parts.append(text(x, bottom + 16, f"{tick:g}x", text_anchor="middle"))
    y = float(top)
    for cell in cells:
        y += GAP / 2
        parts.append(text(LEFT - 10, y + len(systems) * BAR / 2 + 4, cell["task"], text_anchor="end"))
        for name in systems:
            if name in cell["arms"]:
                value, low, high = (LEFT + figure * scale for figure in cell["arms"][name]["speed_up"])
                middle = y + BAR / 2
                parts += [
                    f'<rect x="{LEFT}" y="{y + 1:.1f}" width="{value - LEFT:.1f}" height="{BAR - 2}" '
                    f'fill="{SYSTEMS[name][1]}"/>',
                    line(low, middle, high, middle, "#999999", ' stroke-width="1.5"'),
                    text(high + 5, middle + 4, f"{cell['arms'][name]['speed_up'][0]:.2f}", font_size=10),
                ]  # fmt: skip
            y += BAR
        y += GAP / 2
    parts.append(line(LEFT + scale, top, LEFT + scale, bottom, "black", ' stroke-width="1.5" stroke-dasharray="4 3"'))
    return "\n".join(
        [*parts, text(20, height - 14, "python bench/speculation.py --parts tasks", fill="#555555"), "</svg>\n"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of bench/speculation.py; arms of the later win")
    parser.add_argument("--chart", type=Path, help="the SVG to write; without it tables are printed")
    parser.add_argument("--model", help="default: the first in the file")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    data = joined([json.loads(path.read_text()) for path in options.results])
    if options.chart is None:
        print("\n".join(tables(data)))
    else:
        model = options.model or next(iter(data["about"]))
        options.chart.write_text(chart(data, model, options.temperature), encoding="utf-8")


if __name__ == "__main__":
    main()
