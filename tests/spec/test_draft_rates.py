"""What is believed of a draft model: its own rounds move a sequence, its first ones what is believed of the next."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import pytest

from verispec.spec import draft_beliefs, draft_rates
from verispec.spec.draft_beliefs import Belief, DraftBeliefs
from verispec.spec.draft_rates import Chain, DraftRates, rate_of, step_of
from verispec.spec.speculation import Speculation
from verispec.spec.turn import Choice, Turn
from verispec.types import NO_PARENT, Draft, SamplingParams, Verdict

RIGHT, WRONG = Verdict((0,), 9), Verdict((), 9)
ONE = Draft.chain([1])


# Of one sequence


def rounds_until(step: int, believed: float, verdict: Verdict) -> int:
    """How many of a new sequence's rounds it takes to be believed at most, or at least, as good as that."""
    rates = DraftRates(believed)
    own = rates.new_sequence()
    is_below = step_of(own.right.value) < step
    for number in range(1, 100):
        rates.observe(own, ONE, verdict)
        if (step_of(own.right.value) < step) is not is_below:
            return number
    raise AssertionError("never")


def test_a_few_rounds_tell() -> None:
    """From what pays to what does not, and back."""
    assert rounds_until(step_of(0.5), 0.85, WRONG) <= 4
    assert rounds_until(step_of(0.5), 0.3, RIGHT) <= 4


def test_a_new_sequence_is_believed_to_be_like_the_last_ones() -> None:
    """Their first rounds: however long one goes on, it is one."""
    rates = DraftRates(0.75)
    for _ in range(4):
        own = rates.new_sequence()
        for _ in range(50):
            rates.observe(own, ONE, WRONG)
    assert rates.right < 0.45
    for number in range(2):
        own = rates.new_sequence()
        for _ in range(50):
            rates.observe(own, ONE, RIGHT)
        assert (rates.right > 0.5) is (number == 1), "one may be an exception, two are not"


# Of trees

TREE = Draft((1, 2, 3, 4, 5), (NO_PARENT, NO_PARENT, 0, 0, 1))


@pytest.mark.parametrize(
    ("path", "right", "later"),
    [
        ((), (0, 1), (0, 1)),  # both children of the root were wrong; the others were never looked at
        ((0,), (1, 2), (0, 1)),  # the first, then neither of its own
        ((1,), (0, 2), (1, 1)),  # the second, then not its only child
        ((0, 3), (1, 2), (1, 1)),
        ((0, 2), (2, 2), (0, 0)),
        ((1, 4), (1, 2), (1, 1)),
    ],
)
def test_every_node_on_the_path_tells_of_its_children(
    path: tuple[int, ...], right: tuple[int, int], later: tuple[int, int]
) -> None:
    """Accepted, and tried: a later child only where the ones before it were wrong."""
    rates = DraftRates(0.5)
    own = rates.new_sequence()
    rates.observe(own, TREE, Verdict(path, 9))
    assert (own.right.accepted, own.right.tried) == right
    assert (rates._later[0].accepted, rates._later[0].tried / 0.5) == later, "each try counts as much as was believed"


@pytest.mark.parametrize(
    ("path", "right", "later"),
    [
        ((), (0, 1), (0, 1)),
        ((0,), (1, 2), (0, 0)),  # neither of its children was right, but what the second would catch is another beam's
        ((0, 3), (1, 2), (0, 0)),
        ((0, 2), (2, 2), (0, 0)),
        ((1,), (0, 2), (1, 1)),
    ],
)
def test_of_a_beam_only_the_roots_later_children_tell(
    path: tuple[int, ...], right: tuple[int, int], later: tuple[int, int]
) -> None:
    """Below it a node has several children where the model was sure of it; its first one tells all the same."""
    rates = DraftRates(0.5)
    own = rates.new_sequence()
    rates.observe(own, TREE, Verdict(path, 9), is_beam=True)
    assert (own.right.accepted, own.right.tried) == right
    assert (rates._later[0].accepted, rates._later[0].tried / 0.5) == later


def test_a_node_that_the_beam_gave_no_child_missed_its_first() -> None:
    """At the last level nobody has any."""
    beam = Draft((1, 2, 3, 4), (NO_PARENT, NO_PARENT, 0, 0))
    for path, right in (((1,), (0, 2)), ((0, 2), (2, 2))):
        rates = DraftRates(0.5)
        own = rates.new_sequence()
        rates.observe(own, beam, Verdict(path, 9), is_beam=True)
        assert (own.right.accepted, own.right.tried) == right


class RealBeam:
    """Beams of width 2 and some depth, of a path that each level below the first loses with one chance, and of which
    the root's children catch another share."""

    def __init__(self, seed: int, *, caught: float, kept: float) -> None:
        self._rng, self._chances = random.Random(seed), (caught, kept, kept)
        self.draft = Draft((1, 2, 3, 4, 5, 6), (NO_PARENT, NO_PARENT, 0, 0, 2, 2))

    def round(self) -> Verdict:
        """The right path is that of first children, as far as it goes."""
        path: list[int] = []
        for node, chance in zip((0, 2, 4), self._chances, strict=True):
            if self._rng.random() >= chance:
                break
            path.append(node)
        return Verdict(tuple(path), 9)


def promised_below(kept: float) -> float:
    """What is promised on average of beams that keep so much there."""
    rates, beam, promised = DraftRates(0.8), RealBeam(1, caught=0.85, kept=kept), []
    own = rates.new_sequence()
    for _ in range(2000):
        promised.append(rates.reach_below(step_of(own.right.value), 2))
        rates.observe(own, beam.draft, beam.round(), is_beam=True)
    return fmean(promised[500:])


@pytest.mark.parametrize("kept", [0.5, 0.75, 0.95])
def test_what_a_beam_keeps_below_its_root_is_learned(kept: float) -> None:
    assert promised_below(kept) == pytest.approx(kept, abs=0.05)


def test_control_what_is_believed_at_first_is_not_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rates, "_CROWDED_WEIGHT", 1e9)
    assert max(abs(promised_below(kept) - kept) for kept in (0.5, 0.75, 0.95)) > 0.08


def test_wider_beams_keep_more() -> None:
    reached = [DraftRates(0.8).reach_below(10, width) for width in range(1, 6)]
    assert reached == sorted(set(reached))


def test_each_further_child_catches_less_where_first_ones_are_seldom_right() -> None:
    rates = DraftRates(0.6)
    caught = []
    for step in map(step_of, (0.25, 0.5, 0.875)):
        reached = [rates.reach(step, count) for count in range(1, 40)]
        assert reached == sorted(reached)
        assert reached[0] == pytest.approx(rate_of(step))
        assert reached[-1] <= 1.0
        caught.append((reached[1] - reached[0]) / (1 - reached[0]))
    assert caught == sorted(caught)
    assert caught[-1] > 2.5 * caught[0]


def test_steps_are_fine_where_a_model_is_nearly_always_right() -> None:
    """The grid that beliefs are rounded to: within 9 % of how often it is wrong, over all that can be believed."""
    for right in (0.2, 0.5, 0.75, 0.9, 0.97, 0.98):
        assert 1 - rate_of(step_of(right)) == pytest.approx(1 - right, rel=0.095)
    assert step_of(0.0) == 1
    assert step_of(1.0) == step_of(0.9999)


def test_more_children_than_ranks_are_no_error() -> None:
    rates = DraftRates(0.5)
    own = rates.new_sequence()
    rates.observe(own, Draft(tuple(range(40)), (NO_PARENT,) * 40), Verdict((30,), 9))
    rates.observe(own, Draft(), Verdict((), 9))
    assert 0 < rates.reach(8, 40) <= 1


# Of chains that may end early


def random_chain(rng: random.Random, most: int) -> tuple[Chain, Draft, Verdict]:
    """Seven tokens of ten are sure, and 95 % of those are right; of the others 40 % are, and the chain ends there."""
    matched = drafted = 0
    is_right = is_sure = True
    while is_sure and drafted < most:
        is_sure, drafted = rng.random() < 0.7, drafted + 1
        is_right &= rng.random() < (0.95 if is_sure else 0.4)
        matched += is_right
    return Chain(matched, drafted, most), Draft.chain([1] * drafted), Verdict(tuple(range(matched)), 9)


def test_chains_that_end_early_promise_what_they_gave() -> None:
    """Tokens and passes by depth, against the same counted by hand. The control takes the chances for independent."""
    rng, rates = random.Random(1), DraftRates(0.785)
    own, chains = rates.new_sequence(), []
    for _ in range(3000):
        chain, draft, verdict = random_chain(rng, 5)
        rates.observe_ends(own, chain)
        rates.observe(own, draft, verdict)
        chains.append(chain)
    step, (num_matched, num_drafted, _) = step_of(0.785), zip(*chains, strict=True)
    for depth in range(1, 6):
        drafted, matched = (sum(n >= depth for n in column) / 3000 for column in (num_drafted, num_matched))
        assert rates.share(step, depth) == pytest.approx(drafted, abs=0.07)
        assert rates.tokens(step, depth) == pytest.approx(matched, abs=0.07)
    assert rates.share(step, 3) * rates.tokens(step, 1) ** 3 < rates.tokens(step, 3) - 0.05


def test_what_some_sequences_tell_holds_for_surer_ones() -> None:
    """A model that is wrong half as often is unsure half as often, as models are. In proportion to being right, which
    both kinds would share, too, the surer ones would promise far less than they give."""
    rng, rates = random.Random(2), DraftRates(0.8)
    kinds = {right: rates.new_sequence() for right in (0.7, 0.97)}
    went_on, promised = dict.fromkeys(kinds, 0.0), {right: list[float]() for right in kinds}
    for right in [right for _ in range(600) for right in kinds]:
        sure, drafted = right**2, 1
        while drafted < 7 and rng.random() < sure:  # and right, then
            drafted += 1
        matched = drafted - (drafted < 7 and rng.random() < (1 - right) / (1 - sure))
        went_on[right] += (drafted > 1) / 600
        promised[right].append(rates.share(step_of(right), 2))
        rates.observe_ends(kinds[right], Chain(matched, drafted, 7))
        rates.observe(kinds[right], Draft.chain([1] * drafted), Verdict(tuple(range(matched)), 9))
    for right, share in went_on.items():
        assert fmean(promised[right][100:]) == pytest.approx(share, abs=0.06)
    in_proportion = sum(went_on.values()) / sum(went_on)
    assert in_proportion * 0.97 < went_on[0.97] - 0.1


def test_an_end_by_the_longest_length_says_nothing_of_the_next_token() -> None:
    rates = DraftRates(0.5)
    own = rates.new_sequence()
    step = step_of(0.9)
    believed = rates.share(step, 9)
    for _ in range(20):
        rates.observe_ends(own, Chain(3, 3, 3))  # of two tokens it is known that the draft was sure
    assert rates.share(step, 9) > 2 * believed
    before = rates.version
    for _ in range(20):
        rates.observe_ends(own, Chain(0, 1, 1))
    assert rates.version == before


# Of live sequences together


@dataclass
class Asking:
    sequence_id: int
    token_ids: list[int]
    params: SamplingParams
    speculation: Speculation


class Live:
    """Sequences that all commit a token in each round."""

    def __init__(self, count: int) -> None:
        self.beliefs = DraftBeliefs(lambda: (0.75, 0.75))
        params = SamplingParams(temperature=0.0)
        self.sequences = [Asking(i, [1], params, Speculation("model")) for i in range(count)]

    def ask(self) -> list[Belief]:
        for sequence in self.sequences:
            sequence.token_ids.append(1)
        return [self.beliefs.asked(sequence) for sequence in self.sequences]  # type: ignore[arg-type]

    def judge(self, index: int, verdict: Verdict, *, is_trial: bool = False) -> None:
        turn = Turn(self.sequences[index], 0, 1, True, 0, 1, True, [], 0, ())  # type: ignore[arg-type]
        turn.draft, turn.verdict, turn.choice = ONE, verdict, Choice("model", 1, is_trial=is_trial)
        self.beliefs.observe(turn, None)


def test_those_that_share_passes_are_believed_to_be_what_they_are_together() -> None:
    live = Live(4)
    assert set(live.ask()) == {Belief(step_of(0.75), is_trial=False)}
    for _ in range(20):
        live.judge(0, WRONG)
        live.judge(1, RIGHT)
    beliefs = set(live.ask())
    assert len(beliefs) == 1
    live.beliefs.forget(live.sequences.pop(0))  # type: ignore[arg-type]
    assert min(live.ask()).step > max(beliefs).step
    for sequence in live.sequences:
        live.beliefs.forget(sequence)  # type: ignore[arg-type]
    assert live.beliefs._sum_right == live.beliefs._num_judged == len(live.beliefs._seen) == 0


def trials(live: Live, num_rounds: int, *, verdict: Verdict) -> list[int]:
    """The rounds in which something is tried; what is tried comes true or not, for everybody."""
    found = []
    for number in range(num_rounds):
        if any(belief.is_trial for belief in live.ask()):
            found.append(number)
            for i in range(len(live.sequences)):
                live.judge(i, verdict, is_trial=True)
    return found


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_believed_not_to_pay_is_tried_again_ever_more_rarely(count: int) -> None:
    """And as many times more rarely as there are sequences, because all of them take part."""
    live = Live(count)
    for _ in range(10):
        live.ask()
        for i in range(count):
            live.judge(i, WRONG)
    found = [number / count for number in trials(live, count * 600, verdict=WRONG)]
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert 30 <= found[0] <= 40
    assert gaps == [64, 128, 128, 128]


def trials_in_short_answers(num_answers: int, *, num_tokens: int) -> list[int]:
    """In which of them something is tried, one behind the other, in vain."""
    beliefs = DraftBeliefs(lambda: (0.75, 0.75))
    live, found = Live(0), list[int]()
    live.beliefs = beliefs
    for number in range(num_answers):
        live.sequences = [Asking(number, [1], SamplingParams(temperature=0.0), Speculation("model"))]
        for _ in range(num_tokens):
            (belief,) = live.ask()
            if number < 4 or belief.is_trial:
                found += [number] * belief.is_trial
                live.judge(0, WRONG, is_trial=belief.is_trial)
        beliefs.forget(live.sequences[0])  # type: ignore[arg-type]
    return found


def test_answers_that_are_all_short_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though none lasts for as long as a sequence is left alone; and rarely. The control: they never are."""
    found = trials_in_short_answers(400, num_tokens=24)
    gaps = [24 * (later - earlier) for earlier, later in pairwise(found)]
    assert len(found) > 5
    assert min(gaps) > 300
    assert max(gaps) < 1000
    monkeypatch.setattr(draft_beliefs, "_SHORT_ANSWERS", math.inf)
    assert trials_in_short_answers(400, num_tokens=24) == []


def test_a_trial_that_comes_true_is_believed() -> None:
    live = Live(1)
    for _ in range(10):
        live.ask()
        live.judge(0, WRONG)
    (before,) = live.ask()
    assert before.step < step_of(0.4)
    (tried,) = [belief for _ in range(40) for belief in live.ask() if belief.is_trial][:1]
    assert tried.step == step_of(0.75)
    for _ in range(6):
        live.judge(0, RIGHT, is_trial=True)
    assert live.ask()[0].step >= step_of(0.5)
