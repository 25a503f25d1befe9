"""The searches, on sets whose agreement is a formula."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise

import pytest

from tests.support.tunable import NUM_LAYERS, cheap_verification
from verispec.backends.protocol import FULL_VIEW, View
from verispec.errors import InputError
from verispec.tuning import search
from verispec.tuning.search import Judge, Scored, SubLayer, bayes, best_of_each_size, greedy, removable

PROFILE = cheap_verification()
LOSSES = {s: 0.01 + 0.09 * ((s.layer * 5 + 3 * s.is_mlp) % 8) / 8 for s in removable(NUM_LAYERS)}


class Formula:
    """Agreement as a product over skipped sub-layers; counts the sets it was asked about."""

    def __init__(self, losses: dict[SubLayer, float] | None = None) -> None:
        self.losses = losses or LOSSES
        self.asked: list[View] = []

    def __call__(self, view: View) -> float:
        self.asked.append(view)
        kept = 1.0
        for sub_layer, loss in self.losses.items():
            kept *= 1 - loss if sub_layer in view.skipped else 1
        return kept


def removed(found: list[Scored]) -> list[set[SubLayer]]:
    return [{s for s in removable(NUM_LAYERS) if s in scored.view.skipped} for scored in found]


def run_greedy(
    formula: Formula | None = None, *, width: int = 4, share: float = 1.0, floor: float = 0.0
) -> list[Scored]:
    return greedy(Judge(formula or Formula(), PROFILE), NUM_LAYERS, width=width, share=share, floor=floor)


def test_sets_are_nested_and_keep_the_first_and_the_last_layer() -> None:
    found = removed(run_greedy())
    assert [len(s) for s in found] == list(range(1, len(removable(NUM_LAYERS)) + 1))
    for smaller, larger in pairwise(found):
        assert smaller < larger
    assert {s.layer for s in found[-1]} == set(range(1, NUM_LAYERS - 1))


def test_each_round_removes_what_promises_most() -> None:
    """With every sub-layer tried again, each set is the best of all that have one sub-layer more."""
    judge, before = Judge(Formula(), PROFILE), FULL_VIEW
    for found in run_greedy(width=len(LOSSES)):
        others = [judge.score(View(before.skipped | {s})) for s in LOSSES if s not in before.skipped]
        assert found.rank == max(other.rank for other in others)
        before = found.view


def test_a_few_candidates_a_round_do_as_well_where_losses_are_independent() -> None:
    exhaustive, lazy = Formula(), Formula()
    assert run_greedy(lazy, width=2) == run_greedy(exhaustive, width=len(LOSSES))
    assert len(exhaustive.asked) == 1 + sum(range(1, 9))
    assert len(lazy.asked) == 1 + 8 + 6 * 2 + 1


def test_the_comparison_of_widths_can_fail() -> None:
    """Where the loss of one depends on another, a width of one goes by what it knew."""

    class Tangled(Formula):
        def __call__(self, view: View) -> float:
            return super().__call__(view) - 0.5 * ({1, 2} <= view.skipped_attention) - 0.4 * ({1} <= view.skipped_mlp)

    assert run_greedy(Tangled(), width=1) != run_greedy(Tangled(), width=len(LOSSES))


def test_what_costs_more_goes_first() -> None:
    """Equal losses: an MLP, which costs twice an attention, is worth more. Equal costs: the order is fixed."""
    equal = dict.fromkeys(LOSSES, 0.02)
    found = run_greedy(Formula(equal), width=len(LOSSES))
    assert removed(found)[0] == {SubLayer(1, is_mlp=True)}
    assert removed(found)[3] == {SubLayer(layer, is_mlp=True) for layer in range(1, 5)}
    assert removed(found)[4] - removed(found)[3] == {SubLayer(1, is_mlp=False)}


def test_the_search_ends_at_its_share_and_at_its_floor() -> None:
    assert len(run_greedy(share=0.25)) == 3
    assert len(run_greedy(share=0.0)) == 0
    found = run_greedy(floor=0.8)
    assert 0 < len(found) < len(LOSSES)
    assert found[-1].agreement >= 0.8
    assert run_greedy()[len(found)].agreement < 0.8


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_model_without_inner_layers_has_nothing_to_remove(num_layers: int) -> None:
    assert removable(num_layers) == ()
    assert greedy(Judge(Formula(), PROFILE), num_layers, width=4, share=0.5, floor=0.0) == []


def test_greedy_is_deterministic() -> None:
    assert run_greedy() == run_greedy()


def run_bayes(warm: list[View], trials: int = 30, formula: Formula | None = None) -> list[Scored]:
    pytest.importorskip("optuna")
    return bayes(Judge(formula or Formula(), PROFILE), NUM_LAYERS, warm=warm, trials=trials)


def test_bayesian_optimisation_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = [scored.view for scored in run_greedy(share=0.5)]
    first = run_bayes(warm)
    assert run_bayes(warm) == first
    monkeypatch.setattr(search, "_SEED", 2)
    assert run_bayes(warm) != first


def test_it_begins_with_the_warm_sets_and_goes_on_to_others() -> None:
    warm = [scored.view for scored in run_greedy(share=0.5)]
    formula = Formula()
    found = [scored.view for scored in run_bayes(warm, 25, formula)]
    assert found[: len(warm)] == warm
    assert len(set(found)) == len(found) > len(warm)
    assert len(formula.asked) == len(warm) + 25
    layers = {layer for view in found for layer in view.skipped_attention | view.skipped_mlp}
    assert layers <= set(range(1, NUM_LAYERS - 1))


def test_it_finds_what_greedy_removal_cannot() -> None:
    """Two sub-layers that only together are free: one after the other is no way to find them."""
    pair = {SubLayer(2, is_mlp=True), SubLayer(3, is_mlp=True)}

    class Paired(Formula):
        def __call__(self, view: View) -> float:
            skipped = [s in view.skipped for s in pair]
            return super().__call__(view) * (1.0 if all(skipped) else 0.3 if any(skipped) else 1.0)

    losses = {s: 0.0 if s in pair else 0.2 for s in LOSSES}
    nested = run_greedy(Paired(losses), share=0.25)
    found = run_bayes([s.view for s in nested], 120, Paired(losses))
    assert max(s.rank for s in found) > max(s.rank for s in nested)


def test_it_is_quiet_and_leaves_the_verbosity_alone(capfd: pytest.CaptureFixture[str]) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(logging.DEBUG)
    try:
        run_bayes([], 3)
        assert optuna.logging.get_verbosity() == logging.DEBUG
    finally:
        optuna.logging.set_verbosity(logging.INFO)
    assert "Trial" not in capfd.readouterr().err


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'verispec\[tune\]'"):
        bayes(Judge(Formula(), PROFILE), NUM_LAYERS, warm=[], trials=1)


def test_the_best_of_each_size() -> None:
    def scored(num: int, speedup: float) -> Scored:
        return Scored(View.without(range(num), (int(speedup * 10) + 50,)), 0.5, speedup)

    some = [scored(1, 0.9), scored(1, 1.1), scored(2, 1.3), scored(3, 0.7), Scored(FULL_VIEW, 1.0, 9.9)]
    assert best_of_each_size(some, count=2) == [some[2], some[1]]
    assert best_of_each_size(some, count=9) == [some[2], some[1], some[3]]
