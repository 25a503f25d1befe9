"""From a model to its menu: what is in it, that it comes out again, and that nothing is left half done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny_models import TinyConfig
from tests.support.tunable import KEY, NUM_LAYERS, ChargingBackend, cheap_verification, subject, tiny_backend
from verispec.backends.protocol import FULL_VIEW
from verispec.errors import InputError
from verispec.spec.skip_menu import BAYES, GREEDY, SkipMenu, read_menu
from verispec.tuning import Search, TuneOptions, quick_menu, tune
from verispec.tuning.tuner import QUICK, find_menu

pytestmark = pytest.mark.slow

OPTIONS = TuneOptions(search_tokens=32, report_tokens=40, width=3, share=0.5, floor=0.0)
BOTH = replace(OPTIONS, search=Search.BOTH, trials=15)


def charging(factor: float = 1.0) -> ChargingBackend:
    return ChargingBackend(tiny_backend(), factor=factor)


def tuned(
    folder: Path,
    backend: ChargingBackend | None = None,
    *,
    options: TuneOptions = OPTIONS,
    fresh: bool = False,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> SkipMenu:
    backend = backend or charging()
    return tune(
        subject(backend),
        key=KEY,
        cache_dir=folder,
        options=options,
        fresh=fresh,
        clock=backend.clock,
        progress=progress,
    )


def test_a_menu_is_made_and_kept(tmp_path: Path) -> None:
    menu = tuned(tmp_path)
    assert read_menu(tmp_path, KEY) == menu
    assert [e.num_skipped for e in menu.entries] == [1, 2, 3, 4, 5, 6]
    assert {e.found_by for e in menu.entries} == {GREEDY}
    assert menu.search == "greedy"
    assert menu.num_tokens == 40
    for entry in menu.entries:
        assert 0 < entry.agreement < 1
        assert not {0, NUM_LAYERS - 1} & (entry.view.skipped_attention | entry.view.skipped_mlp)


def test_figures_come_from_text_that_the_search_has_not_seen() -> None:
    """With other prompts for the report the same sets are found, and score otherwise."""
    found = [
        find_menu(replace(subject(), report_prompts=p), cheap_verification(), OPTIONS).entries
        for p in (subject().search_prompts, subject().report_prompts)
    ]
    assert [e.view for e in found[0]] == [e.view for e in found[1]]
    assert [e.agreement for e in found[0]] != [e.agreement for e in found[1]]


def test_the_same_menu_comes_out_again(tmp_path: Path) -> None:
    """A clock that shows something else is not even looked at: the profile is kept with the menu."""
    first = tuned(tmp_path)
    again = charging(factor=7.0)
    assert tuned(tmp_path, again) == first
    assert not any(len(p.view.skipped_mlp) == NUM_LAYERS for p in again.passes)
    assert tuned(tmp_path / "elsewhere") == first


def test_fresh_measures_again(tmp_path: Path) -> None:
    first = tuned(tmp_path)
    second = tuned(tmp_path, charging(factor=7.0), fresh=True)
    assert second.profile.full.seconds(1, 0) == pytest.approx(7 * first.profile.full.seconds(1, 0))
    assert read_menu(tmp_path, KEY) == second


def test_bayesian_optimisation_adds_to_the_nested_sets(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    nested = tuned(tmp_path / "greedy")
    menu = tuned(tmp_path, options=BOTH)
    views = [e.view for e in menu.entries]
    assert {e.view for e in nested.entries} == {e.view for e in menu.entries if e.found_by == GREEDY}
    assert 1 <= sum(e.found_by == BAYES for e in menu.entries) <= 8
    assert len(set(views)) == len(views)
    assert FULL_VIEW not in views
    assert [e.num_skipped for e in menu.entries] == sorted(e.num_skipped for e in menu.entries)
    assert tuned(tmp_path, options=BOTH) == menu
    alone = tuned(tmp_path, options=replace(BOTH, search=Search.BAYES))
    assert (alone.search, menu.search) == ("bayes", "both")


def test_two_layers_leave_nothing_to_skip(tmp_path: Path) -> None:
    config = TinyConfig(num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, mlp_size=48)
    small = subject(config=config)
    menu = tune(small, key=KEY, cache_dir=tmp_path, options=OPTIONS)
    assert menu.entries == ()
    assert menu.best() is None
    assert read_menu(tmp_path, KEY) == menu


class Interrupter:
    """Raises at the n-th report of progress."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[str] = []

    def __call__(self, stage: str, share: float) -> None:
        assert 0 <= share <= 1
        self.seen.append(stage)
        if len(self.seen) == self.at:
            raise KeyboardInterrupt


def num_reports(folder: Path) -> int:
    watch = Interrupter(at=-1)
    tuned(folder, options=BOTH, progress=watch)
    assert {s.partition(",")[0] for s in watch.seen} == {
        "timing sub-layers", "timed", "generating text", "greedy removal", "greedy removal done",
        "Bayesian optimisation", "Bayesian optimisation done", "scoring the sets found", "scored",
    }  # fmt: skip
    return len(watch.seen)


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    count = num_reports(tmp_path / "whole")
    kept = tuned(tmp_path / "old")
    before = sorted((tmp_path / "old").iterdir())
    for at in {1, 2, count // 4, count // 2, 3 * count // 4, count - 1, count}:
        for folder in ("old", "new"):
            with pytest.raises(KeyboardInterrupt):
                tuned(tmp_path / folder, options=BOTH, fresh=True, progress=Interrupter(at))
        assert read_menu(tmp_path / "old", KEY) == kept
        assert sorted((tmp_path / "old").iterdir()) == before
        assert not (tmp_path / "new").exists()


def test_the_check_of_interruptions_can_fail(tmp_path: Path) -> None:
    """What is not interrupted does replace the old menu."""
    kept = tuned(tmp_path)
    count = len(sorted(tmp_path.iterdir()))
    tuned(tmp_path, options=replace(OPTIONS, share=0.2), progress=Interrupter(at=10**6))
    assert read_menu(tmp_path, KEY) != kept
    assert len(sorted(tmp_path.iterdir())) == count


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError):
        tuned(blocked / "below")
    quick = replace(OPTIONS, search=Search.QUICK)
    assert quick_menu(subject(), key=KEY, cache_dir=blocked / "below", options=quick).entries


def test_a_quick_menu_is_searched_for_only_if_there_is_none(tmp_path: Path) -> None:
    quick = replace(OPTIONS, search=Search.QUICK)
    first = quick_menu(subject(), key=KEY, cache_dir=tmp_path, options=quick)
    assert first.search == "quick"
    backend = charging()
    assert quick_menu(subject(backend), key=KEY, cache_dir=tmp_path) == first
    assert backend.passes == []
    better = tuned(tmp_path)
    assert quick_menu(subject(backend), key=KEY, cache_dir=tmp_path) == better


def test_quick_is_less_work() -> None:
    full = TuneOptions()
    assert QUICK.search_tokens < full.search_tokens
    assert QUICK.width < full.width


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"search_tokens": 0}, "search_tokens must be from 1 to .*, not 0"),
        ({"width": 0}, "width must be from 1"),
        ({"trials": -1}, "trials must be from 1"),
        ({"share": 1.5}, r"share must be in \[0, 1\], not 1\.5"),
        ({"floor": -0.1}, "floor must be in"),
    ],
)
def test_options_are_checked(options: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TuneOptions(**options)  # type: ignore[arg-type]


def test_a_missing_optuna_is_found_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    backend = charging()
    with pytest.raises(InputError, match=r"verispec\[tune\]"):
        tuned(tmp_path, backend, options=BOTH)
    assert backend.passes == []
