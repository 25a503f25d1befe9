"""Greedy removal against Bayesian optimisation of skip sets: what each takes, and what it finds.

    python bench/skip_search.py [--model smollm2-135m] [--search-tokens 384] [--trials 200] [--plot FILE.png]

One search of both kinds, the second begun from the first, as `verispec tune --search both` does it; the menu is kept
as that command keeps it. Sets are scored on text that neither search has seen. With fewer --search-tokens than by
default it is a smaller search than the command's.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

from verispec import LLM
from verispec.backends.blas import cpu_name
from verispec.model import cache_dir
from verispec.spec.skip_menu import BAYES, GREEDY
from verispec.tuning import Search, Subject, TuneOptions, report, tune


class Phases:
    """Seconds by phase of a search, from its progress reports."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._start = "", time.perf_counter()

    def update(self, label: str, _: float) -> None:
        name = label.split(",")[0].removesuffix(" done")
        if name == self._name:
            return
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._start
        self._name, self._start = name, now
        print(f"  {time.strftime('%H:%M:%S')} {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend")
    parser.add_argument("--search", choices=[s.value for s in Search], default=Search.BOTH.value)
    parser.add_argument("--search-tokens", type=int, default=TuneOptions().search_tokens)
    parser.add_argument("--trials", type=int, default=TuneOptions().trials)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, drafter="none", backend=options.backend)
    print(f"{llm.identity.name}, {llm.backend.device().get('gpu', cpu_name())}, {platform.machine()}")
    chosen = TuneOptions(search=Search(options.search), search_tokens=options.search_tokens, trials=options.trials)
    phases = Phases()
    with llm.separate_engine():
        menu = tune(
            Subject.of(llm), key=llm.menu_key, cache_dir=cache_dir(), options=chosen, fresh=True,
            progress=phases.update,
        )  # fmt: skip
    print("\nSeconds: " + ", ".join(f"{name or 'start'} {s:.0f}" for name, s in phases.seconds.items()))
    print(f"\n{report.table(menu, llm.architecture)}\n\n{report.verdict(menu, llm.architecture.num_layers)}\n")
    best: dict[tuple[int, str], report.EntryReport] = {}
    for entry in menu.entries:
        found = report.EntryReport.of(entry, menu.profile, llm.architecture)
        key = entry.num_skipped, entry.found_by
        if key not in best or found.speedup > best[key].speedup:
            best[key] = found
    print("| sub-layers skipped | greedy: agreement, speed-up predicted | Bayesian: agreement, speed-up predicted |")
    print("|---|---|---|")
    for size in sorted({size for size, by in best if by == BAYES}):
        cells = [best.get((size, by)) for by in (GREEDY, BAYES)]
        print(
            f"| {size} | " + " | ".join(f"{c.entry.agreement:.2f}, {c.speedup:.2f}" if c else "-" for c in cells) + " |"
        )
    if options.plot:
        report.plot({llm.identity.name: menu}, options.plot)


if __name__ == "__main__":
    main()
