"""What is believed of the drafts of live sequences, and when what is believed not to pay is tried after all.

Each sequence has a rate of its own, but draft passes are shared by all that draft, so what a step drafts is decided by
what they promise together: their average. One alone is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from verispec.spec.draft_rates import Chain, DraftRates, SequenceRate, step_of
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Draft

# Rounds until what is believed not to pay is tried again; if that was in vain, twice as many.
_FIRST_WAIT, _LONGEST_WAIT = 32, 128
_SHORT_ANSWERS = 6  # times as many, where no answer lasts for as long as the first wait


class Belief(NamedTuple):
    """How often first choices are right, in steps; of a trial, what is hoped."""

    step: int
    is_trial: bool


@dataclass(slots=True)
class Trials:
    """When to try: what nobody drafts nobody learns of. Drafting in earnest makes the next trial come early."""

    wait: int = _FIRST_WAIT
    since: float = 0.0  # rounds since the last one

    @property
    def is_due(self) -> bool:
        return self.since >= self.wait

    def observe(self, *, is_trial: bool) -> None:
        """A draft was judged. All sequences of one trial are judged together, so the first one ends it."""
        if not is_trial:
            self.wait = _FIRST_WAIT
        elif self.is_due:
            self.wait, self.since = min(2 * self.wait, _LONGEST_WAIT), 0.0


@dataclass(slots=True)
class _Seen:
    """A sequence: its rate, once a draft of it was judged, and how long it was when it was last asked, or judged."""

    asked_len: int
    judged_len: int
    rate: SequenceRate | None = None


class DraftBeliefs:
    """`find` says how often a model's first choices are believed to be right at first, greedily and sampled."""

    def __init__(self, find: Callable[[], tuple[float, float]]) -> None:
        self._find = find
        self._trials = Trials()
        self._seen: dict[int, _Seen] = {}  # live sequences
        self._num_judged, self._sum_right = 0, 0.0  # those that have a rate, and these added up

    @cached_property
    def _rates(self) -> tuple[DraftRates, DraftRates]:
        agreement, sampled_agreement = self._find()
        return DraftRates(agreement), DraftRates(sampled_agreement)

    @property
    def version(self) -> int:
        """A curve is its belief's, but for what all sequences share."""
        return self._rates[0].version + self._rates[1].version

    def rates(self, *, is_sampled: bool) -> DraftRates:
        return self._rates[is_sampled]

    def asked(self, sequence: SequenceView) -> Belief:
        """What is believed of a sequence now. Rounds are counted by what sequences have committed in between."""
        length, rates = len(sequence.token_ids), self._rates[sequence.params.temperature > 0]
        seen = self._seen.get(sequence.sequence_id)
        if seen is None:
            seen = self._seen[sequence.sequence_id] = _Seen(length, length)
        count = len(self._seen)
        self._trials.since += (length - seen.asked_len) / count**2  # all of several take part, so it is rarer
        seen.asked_len = length
        step = step_of((self._sum_right + (count - self._num_judged) * rates.right) / count)
        is_trial = self._trials.is_due and step < rates.hoped and self._may_be_tried(seen, length)
        return Belief(rates.hoped if is_trial else step, is_trial)

    def _may_be_tried(self, seen: _Seen, length: int) -> bool:
        """One that has lasted for a while; or a new one, for where answers are short none ever does."""
        is_long = length - seen.judged_len >= _FIRST_WAIT
        return is_long or (seen.rate is None and self._trials.since >= _SHORT_ANSWERS * self._trials.wait)

    def observe(self, turn: Turn, chain: Chain | None) -> None:
        """A draft was judged: one that might have ended early is a chain."""
        draft, verdict, shape = turn.draft, turn.verdict, turn.choice.shape
        seen = self._seen.get(turn.sequence.sequence_id)
        if seen is None or verdict is None or not isinstance(draft, Draft):
            return
        self._trials.observe(is_trial=turn.choice.is_trial)
        rates = self._rates[turn.sequence.params.temperature > 0]
        seen.judged_len = len(turn.sequence.token_ids)
        if seen.rate is None:
            seen.rate = rates.new_sequence()
            self._num_judged += 1
        else:
            self._sum_right -= seen.rate.right.value
        if chain is not None:
            rates.observe_ends(seen.rate, chain)
        rates.observe(seen.rate, draft, verdict, is_beam=shape is not None and shape.kind == "beam")
        self._sum_right += seen.rate.right.value

    def forget(self, sequence: SequenceView) -> None:
        """What its first rounds told is believed of others."""
        seen = self._seen.pop(sequence.sequence_id, None)
        if seen is not None and seen.rate is not None:
            self._num_judged -= 1
            self._sum_right = self._sum_right - seen.rate.right.value if self._num_judged else 0.0
