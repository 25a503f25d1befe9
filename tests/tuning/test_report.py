"""Tuning told to people: the table, the sentence below it, and the plot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tunable import CONFIG, NUM_LAYERS, cheap_verification
from verispec.backends.cost import CostTable
from verispec.backends.protocol import FULL_VIEW, View
from verispec.errors import InputError
from verispec.spec.skip_menu import BAYES, MenuEntry, SkipMenu, SkipProfile, expected_tokens
from verispec.tuning import report

ARCHITECTURE = CONFIG.architecture
SMALL, LARGE = View.without((1,)), View.without((1, 2), (2, 3, 4))


def menu(agreement: float = 0.9, profile: SkipProfile | None = None) -> SkipMenu:
    entries = (MenuEntry(SMALL, 0.95, 0.9), MenuEntry(LARGE, agreement, 0.7, BAYES))
    return SkipMenu(profile or cheap_verification(), entries, "both", 384)


def slow_verification() -> SkipProfile:
    profile = cheap_verification()
    return replace(profile, full=CostTable((1, 16), (1.0, 16.0), (0.0, 0.0)))


def test_the_share_of_weights_left() -> None:
    hidden, mlp_size, vocab_size = 32, 48, 80
    attention = hidden + 2 * hidden * hidden + 2 * 16 * hidden  # norm; q and o; k and v of one head of 16
    mlp = hidden + 3 * hidden * mlp_size
    total = NUM_LAYERS * (attention + mlp) + 2 * vocab_size * hidden + hidden
    assert report.weights_left(ARCHITECTURE, FULL_VIEW) == 1.0
    assert report.weights_left(ARCHITECTURE, SMALL) == pytest.approx(1 - attention / total)
    assert report.weights_left(ARCHITECTURE, LARGE) == pytest.approx(1 - (2 * attention + 3 * mlp) / total)
    everything = View.without(range(NUM_LAYERS), range(NUM_LAYERS))
    assert report.weights_left(ARCHITECTURE, everything) == pytest.approx((2 * vocab_size * hidden + hidden) / total)


def test_the_best_length_of_drafts_is_found_among_as_many_as_anybody_allows() -> None:
    profile = cheap_verification()
    found = profile.best(SMALL, 0.5, max_draft=2**30)
    assert found == profile.best(SMALL, 0.5, max_draft=40)
    by_hand = [profile.speedup(SMALL, 0.5, n) for n in range(1, 41)]
    assert found.speedup == pytest.approx(max(by_hand))
    assert found.draft_len == 1 + by_hand.index(max(by_hand))


def test_an_entry_says_what_follows_from_its_profile() -> None:
    profile = cheap_verification()
    found = report.EntryReport.of(menu().entries[1], profile, ARCHITECTURE)
    assert found.c == pytest.approx(1 - 0.9 * (2 + 3 * 2) / (3 * NUM_LAYERS))
    assert found.v == pytest.approx(1 + 0.1 * found.best_len / 15)
    assert found.speedups[found.best_len - 1] == found.speedup == max(found.speedups)
    by_hand = expected_tokens(0.9, found.best_len) / (found.best_len * found.c + found.v)
    assert found.speedup == pytest.approx(by_hand)


def test_the_table_has_a_line_per_entry_and_marks_the_best() -> None:
    lines = report.table(menu(), ARCHITECTURE).splitlines()
    first, second = lines[-2:]
    assert first.split()[:3] == ["1", "1", "0"]
    assert second.split()[:4] == [">", "5", "2", "3"]
    assert second.endswith("bayes")
    assert (first.count("*"), second.count("*")) == (1, 1)
    assert len(first.split()) == 3 + 5 + 12  # counts; shares and costs; a prediction for each draft length
    assert "12 sub-layers (search: both), scored on 384 tokens" in lines[1]
    assert max(map(len, lines)) <= 140


def test_the_parts_of_a_pass_add_up() -> None:
    head = CostTable((1, 16), (0.06, 0.06), (0.0, 0.0))
    line = report.table(menu(profile=replace(cheap_verification(), head=head)), ARCHITECTURE).splitlines()[0]
    assert line == (
        "One row at 256 tokens of context takes 1000.00 ms: 6 x 50.00 ms attention, 6 x 100.00 ms MLP, 60.00 ms head, "
        "40.00 ms fixed."
    )


def test_the_verdict_says_what_to_expect() -> None:
    good = report.verdict(menu(), NUM_LAYERS)
    assert good.startswith("layer skipping is predicted to give 1.")
    assert "with 5 of 12 sub-layers skipped and drafts of" in good
    assert "--force" not in good
    bad = report.verdict(menu(profile=slow_verification()), NUM_LAYERS)
    assert bad.startswith("layer skipping is predicted to give at most 0.")
    assert bad.endswith("--drafter skip will not draft unless --force is given")
    empty = replace(menu(), entries=())
    assert "nothing to skip" in report.verdict(empty, 2)
    assert "no set of sub-layers agrees" in report.verdict(empty, NUM_LAYERS)
    assert report.table(empty, ARCHITECTURE)


def test_plain_data_holds_what_the_table_shows() -> None:
    found = report.as_object(menu(), ARCHITECTURE)
    assert [e["best"] for e in found["entries"]] == [False, True]
    assert found["entries"][1]["skipped_mlp"] == [2, 3, 4]
    assert len(found["entries"][0]["speedups"]) == 12
    assert found["profile"][0] == {
        "rows": 1,
        "seconds": 1.0,
        "attention": pytest.approx(0.05),
        "mlp": pytest.approx(0.1),
    }
    assert found["verdict"] == report.verdict(menu(), NUM_LAYERS)


@pytest.mark.parametrize("c", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("speedup", [1.0, 1.05])
def test_on_the_line_drafts_give_just_that(c: float, speedup: float) -> None:
    profile = cheap_verification()
    agreement = report.break_even(profile, c, speedup=speedup)
    assert agreement is not None

    def best(a: float) -> float:
        return max(expected_tokens(a, n) / (n * c + profile.ratios(FULL_VIEW, n)[1]) for n in range(1, 13))

    assert best(agreement) == pytest.approx(speedup)
    assert best(agreement - 0.05) < speedup < best(min(1.0, agreement + 0.05))


def test_there_may_be_no_line() -> None:
    assert report.break_even(slow_verification(), 0.5) is None


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "menu.png"
    report.plot({"one": menu(), "none": replace(menu(profile=slow_verification()), entries=())}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'verispec\[tune\]'"):
        report.plot({"one": menu()}, tmp_path / "menu.png")
    assert list(tmp_path.iterdir()) == []
