"""`auto` with a draft model beside every fixed choice, on a simulated device: easy answers, hard ones, and both."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.far_pair import ARMS, cases, play
from verispec.engine import scheduler
from verispec.spec import draft_beliefs, draft_rates, model_drafter
from verispec.spec.draft_beliefs import Belief, DraftBeliefs, Trials
from verispec.spec.draft_rates import DraftRates, SequenceRate, step_of
from verispec.spec.rate import Rate
from verispec.spec.speculation import AUTO
from verispec.spec.turn import SequenceView

CLOSE = 0.965
CASES = cases()


@cache
def best(name: str) -> float:
    return max(play(CASES[name], arm).tokens_per_second for arm in ARMS if arm != AUTO)


def share(name: str) -> float:
    """Of the tokens a second of the best fixed choice."""
    return play(CASES[name], AUTO).tokens_per_second / best(name)


@pytest.mark.parametrize("name", CASES)
def test_auto_is_about_as_quick_as_the_best_fixed_choice(name: str) -> None:
    assert share(name) >= CLOSE


def test_whatever_is_drafted_the_answers_are_the_same() -> None:
    case = CASES["four short hard, one easy, by turns"]
    assert len({tuple(play(case, arm).digests) for arm in ARMS}) == 1


class OneForAll(DraftRates):
    """All sequences have the same rate, which is learned slowly."""

    def __init__(self, prior: float) -> None:
        super().__init__(prior)
        self.one = SequenceRate(Rate(prior, 32.0, 0.98))

    @property
    def right(self) -> float:
        return self.one.right.value

    def new_sequence(self) -> SequenceRate:
        return self.one


class Fading(DraftBeliefs):
    """When a sequence ends, what its rounds told counts half."""

    def forget(self, sequence: SequenceView) -> None:
        super().forget(sequence)
        shared = self._rates[0]
        for rate in (shared.one.right, *shared._later, shared._crowded):  # type: ignore[attr-defined]
            rate.accepted, rate.tried = rate.accepted / 2, rate.tried / 2


def test_control_one_rate_for_all_that_fades_drafts_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are too short to learn it anew each time."""
    case = cases(3)["short hard answers"]
    mine = play(case, AUTO).tokens_per_second
    monkeypatch.setattr(draft_beliefs, "DraftRates", OneForAll)
    monkeypatch.setattr(model_drafter, "DraftBeliefs", Fading)
    assert play(case, AUTO).tokens_per_second < 0.97 * mine


def test_control_one_rate_for_all_is_slower_where_tasks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "four short hard, one easy, by turns"
    mine = share(name)
    monkeypatch.setattr(draft_beliefs, "DraftRates", OneForAll)
    assert share(name) < 0.99 * mine


class EachByItself(DraftBeliefs):
    def asked(self, sequence: SequenceView) -> Belief:
        belief, rate = super().asked(sequence), self._seen[sequence.sequence_id].rate
        return belief if rate is None else belief._replace(step=step_of(rate.right.value))


def test_control_sequences_that_do_not_decide_together_pay_for_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "8 of one caller, easy"
    mine = share(name)
    monkeypatch.setattr(model_drafter, "DraftBeliefs", EachByItself)
    assert share(name) < 0.97 * mine


def test_control_without_trials_nobody_sees_that_it_would_pay_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind so many hard answers that nothing is drafted any more."""
    case = cases(3)["short hard, then easy"]
    mine = play(case, AUTO).tokens_per_second
    monkeypatch.setattr(Trials, "is_due", False)
    assert play(case, AUTO).tokens_per_second < 0.9 * mine


def test_control_who_learns_nothing_from_its_own_rounds_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "four short hard, one easy, by turns"
    mine = share(name)
    monkeypatch.setattr(draft_rates, "_OWN_WEIGHT", 1e9)
    assert share(name) < 0.985 * mine


def test_control_drafts_that_go_on_whatever_is_learned_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps are sent ahead before choices are made anew."""
    name = "8 of one caller, 3 of them easy"
    mine = share(name)
    monkeypatch.setattr(scheduler.Scheduler, "_would_draft_again", lambda self, turns: True)
    assert share(name) < 0.97 * mine
