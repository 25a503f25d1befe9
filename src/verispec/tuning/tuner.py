"""From a loaded model to its menu of skip sets: profile, own text, search, honest figures, and the file they go to.

Tuning overwrites the backend's K/V: nothing else may use it meanwhile. The file is written at the end, whole or not at
all, so an interruption leaves what was there before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verispec.arguments import check_int, check_number
from verispec.backends.audit import Progress, no_progress
from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend, View
from verispec.config import MAX_SIZE
from verispec.errors import VerispecError
from verispec.model.architecture import Architecture
from verispec.spec.skip_menu import BAYES, GREEDY, MenuEntry, MenuKey, SkipMenu, SkipProfile, read_menu, write_menu
from verispec.tuning.agreement import Evaluator
from verispec.tuning.own_text import REPORT_BEGINNINGS, SEARCH_BEGINNINGS, Runner, token_prompts, write_text
from verispec.tuning.profile import measure_profile
from verispec.tuning.search import Judge, bayes, best_of_each_size, check_optuna, greedy, removable

if TYPE_CHECKING:
    from verispec.runtime import Runtime

_NUM_BAYES_ENTRIES = 8  # of the sets that Bayesian optimisation found


class Search(StrEnum):
    """How skip sets are looked for. Bayesian optimisation begins from a quick greedy removal, or (both) a full one."""

    QUICK = "quick"
    GREEDY = "greedy"
    BAYES = "bayes"
    BOTH = "both"

    @property
    def optimises(self) -> bool:
        return self in (Search.BAYES, Search.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How much work a search is: how many tokens sets are searched with and then scored on, and how many are tried.

    `width`, `share` and `floor` are those of `search.greedy`, `trials` that of `search.bayes`.
    """

    search: Search = Search.GREEDY
    search_tokens: int = 384
    report_tokens: int = 384
    width: int = 10
    share: float = 0.5
    floor: float = 0.5
    trials: int = 200

    def __post_init__(self) -> None:
        for name in ("search_tokens", "report_tokens", "width", "trials"):
            check_int(name, getattr(self, name), 1, MAX_SIZE)
        for name in ("share", "floor"):
            check_number(name, getattr(self, name), 0, 1)


_QUICK_WIDTH = 4
QUICK = TuneOptions(search=Search.QUICK, search_tokens=96, report_tokens=192, width=_QUICK_WIDTH, share=0.4, floor=0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is tuned: a backend with its model, its calibrated `cost` and `family`, and prompts as token ids.

    Sets are found on what the model makes of `search_prompts`, and reported on what it makes of `report_prompts`.
    """

    backend: Backend
    architecture: Architecture
    cost: CostTable
    family: tuple[int, ...]
    search_prompts: Sequence[Sequence[int]]
    report_prompts: Sequence[Sequence[int]]
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, llm: Runtime) -> Subject:
        encode = llm.tokenizer.encode

        def chat(text: str) -> list[int]:
            try:
                return llm.chat_ids([{"role": "user", "content": text}])
            except VerispecError:  # without a template, or with one that fails, a question is a text
                return encode(text)

        return cls(
            backend=llm.backend,
            architecture=llm.architecture,
            cost=llm.calibration.cost,
            family=llm.calibration.family,
            search_prompts=token_prompts(SEARCH_BEGINNINGS, encode, chat),
            report_prompts=token_prompts(REPORT_BEGINNINGS, encode, chat),
            eos_ids=tuple(llm.tokenizer.eos_ids),
        )


def tune(
    subject: Subject,
    *,
    key: MenuKey,
    cache_dir: Path,
    options: TuneOptions | None = None,
    fresh: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = no_progress,
) -> SkipMenu:
    """Search for skip sets and keep them as the menu of `key`; raises OSError where the cache cannot be written.

    A profile that is kept there already is used again unless `fresh`: the same profile gives the same menu.
    """
    options = options or TuneOptions()
    if options.search.optimises:
        check_optuna()
    stored = None if fresh else read_menu(cache_dir, key)
    profile = stored.profile if stored is not None else _measured(subject, clock=clock, progress=progress)
    menu = find_menu(subject, profile, options, progress=progress)
    write_menu(cache_dir, key, menu)
    return menu


def quick_menu(
    subject: Subject, *, key: MenuKey, cache_dir: Path, options: TuneOptions = QUICK, progress: Progress = no_progress
) -> SkipMenu:
    """The menu that is kept for `key`; without one, a quick search, kept if the cache can be written."""
    if (stored := read_menu(cache_dir, key)) is not None:
        return stored
    menu = find_menu(subject, _measured(subject, progress=progress), options, progress=progress)
    with contextlib.suppress(OSError):
        write_menu(cache_dir, key, menu)
    return menu


def _measured(subject: Subject, **how: Any) -> SkipProfile:
    return measure_profile(subject.backend, subject.architecture.num_layers, subject.cost, **how)


def find_menu(
    subject: Subject, profile: SkipProfile, options: TuneOptions, *, progress: Progress = no_progress
) -> SkipMenu:
    """Search, and score what was found on text that the search has not seen. Writes no file."""
    num_layers = subject.architecture.num_layers
    if not removable(num_layers):
        return SkipMenu(profile, (), options.search.value, 0)
    runner = Runner(subject.backend, subject.family)

    def evaluator(prompts: Sequence[Sequence[int]], num_tokens: int) -> Evaluator:
        lines = write_text(runner, prompts, num_tokens=num_tokens, eos_ids=subject.eos_ids, progress=progress)
        return Evaluator(runner, lines)

    searched = evaluator(subject.search_prompts, options.search_tokens)
    found = _search(Judge(searched.soft_agreement, profile), num_layers, options, progress)
    reported = evaluator(subject.report_prompts, options.report_tokens)  # overwrites the K/V of the other
    entries = []
    for i, (view, found_by) in enumerate(found.items()):
        progress("scoring the sets found", i / len(found))
        agreement = reported.agreement(view)
        entries.append(MenuEntry(view, agreement.greedy, agreement.sampled, found_by))
    progress("scored", 1.0)
    return SkipMenu(profile, tuple(sorted(entries, key=_order)), options.search.value, reported.num_tokens)


def _search(judge: Judge, num_layers: int, options: TuneOptions, progress: Progress) -> dict[View, str]:
    """Each set, and what found it."""
    width = _QUICK_WIDTH if options.search is Search.BAYES else options.width
    nested = greedy(judge, num_layers, width=width, share=options.share, floor=options.floor, progress=progress)
    found = {scored.view: GREEDY for scored in nested}
    if options.search.optimises:
        tried = bayes(judge, num_layers, warm=list(found), trials=options.trials, progress=progress)
        more = [scored for scored in tried if scored.view not in found]
        found |= {scored.view: BAYES for scored in best_of_each_size(more, count=_NUM_BAYES_ENTRIES)}
    return found


def _order(entry: MenuEntry) -> tuple[int, float, list[int], list[int]]:
    """Fewest sub-layers first; then what agrees more, then by layers."""
    view = entry.view
    return entry.num_skipped, -entry.agreement, sorted(view.skipped_attention), sorted(view.skipped_mlp)
