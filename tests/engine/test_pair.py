"""`auto` with a draft model beside every fixed choice, on a simulated device: easy answers, hard ones, and both."""

from __future__ import annotations

import math
from functools import cache

import pytest

from tests.support.adversaries import collect
from tests.support.far_pair import ARMS, RealDrafts, cases, far_engine, play
from tests.support.world import Second, models
from verispec.backends.native_backend import NativeBackend
from verispec.backends.options import LoadedModel, NativeOptions
from verispec.config import EngineConfig
from verispec.engine import Engine, Request, policy, scheduler
from verispec.spec import draft_beliefs, draft_rates, model_drafter
from verispec.spec.draft_beliefs import Belief, DraftBeliefs, Trials
from verispec.spec.draft_rates import DraftRates, SequenceRate, step_of
from verispec.spec.none import NoDrafter
from verispec.spec.rate import Rate
from verispec.spec.speculation import AUTO
from verispec.spec.turn import SequenceView
from verispec.types import SamplingParams

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


def test_control_short_answers_that_are_never_tried_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "short hard, then short easy"
    mine = share(name)
    monkeypatch.setattr(draft_beliefs, "_SHORT_ANSWERS", math.inf)
    assert share(name) < 0.85 * mine


def test_control_bursts_that_outlast_answers_leave_places_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others wait for them."""
    case = CASES["32 at once, short and hard"]
    mine = {arm: play(case, arm).tokens_per_second for arm in ("none", AUTO)}
    monkeypatch.setattr(policy, "_best_filled", lambda rooms, most, added: most)
    for arm, rate in mine.items():
        assert play(case, arm).tokens_per_second < 0.97 * rate


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


# A real draft model on the simulated device


def real_model() -> NativeBackend:
    ((config, tensors),) = models("llama", Second.NONE)
    loaded, num_slots = LoadedModel(config.architecture, tensors.__getitem__), 4 * config.architecture.context_len
    return NativeBackend([loaded], NativeOptions(num_slots=num_slots, num_seq_rows=1, threads=1))


def accepted_of_real_drafts(text: list[int], num_prompt: int) -> float:
    """The share of drafted chains that is accepted, of a tiny model's greedy drafts for a target that draws this."""
    draft = real_model()
    context_len, vocab_size = draft.limits.context_len, draft.limits.vocab_size
    backend = RealDrafts(draft, lambda seed: text, vocab_size=vocab_size, context_len=context_len, num_running=1)
    engine = far_engine(backend, 1)
    params = SamplingParams(max_tokens=len(text) - num_prompt - 2, temperature=0.0, ignore_eos=True)
    engine.add(Request(text[:num_prompt], params, ARMS["chain of 4"], is_streamed=False))
    (output,) = collect(engine).values()
    assert list(output.token_ids) == text[num_prompt:-2]
    draft.close()
    return output.stats.accepted / output.stats.drafted


def test_real_drafts_are_those_of_the_model_behind_its_own_text() -> None:
    """What a model drafts for its own greedy text is right, from the first token to the last: so it has read what was
    committed. The control draws other tokens."""
    model = real_model()
    engine = Engine(
        model, family=(1, 8, 64), drafters={"none": NoDrafter()}, config=EngineConfig(num_slots=model.limits.num_slots)
    )
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), ARMS["none"]))
    (output,) = collect(engine).values()
    model.close()
    text = [1, 2, 3, *output.token_ids]
    assert accepted_of_real_drafts(text, 3) > 0.9
    others = [(token + 1) % model.limits.vocab_size for token in text]
    assert accepted_of_real_drafts(others, 3) < 0.5
