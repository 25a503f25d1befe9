"""What is believed of a draft model's drafts: of each sequence by its own rounds, of a new one by those of others.

Sequences differ by how often the model's first choice is right, which their own rounds tell within a few. Everything
else follows from that by figures that are learned over all of them, because they hardly differ between sequences, as
measured with models of 0.5B and 1.5B parameters at temperatures 0 and 1:

- the chance that the model is sure of a token is that of being right to some power, and so is that of being both;
- a node's later children catch a share of what the ones before missed that is proportional to being right;
- below its root a beam, whose paths take places from each other, loses the right one in proportion to what two children
  of the root miss, and hardly less often if it is wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from verispec.spec.rate import Rate
from verispec.types import NO_PARENT, Draft, Verdict

_SURE, _SURE_AND_RIGHT = 1.8, 2.2  # believed powers
_LATER_SHARE = 0.65  # believed: of what the first misses the second child catches, for each time the first is right
_MOST_RANKS = 16
# What is learned over all rounds; the weights of powers and of beams are in ends that are expected.
_POWER_WEIGHT, _LATER_WEIGHT, _COMMON_MEMORY = 8.0, 4.0, 0.98
_CROWDED, _CROWDED_BY_WIDTH = 1.8, 0.3  # believed of beams of width 2; wider ones lose less by this power of the width
_CROWDED_WEIGHT, _CROWDED_MEMORY = 4.0, 0.99
_FIRST_ROUNDS = 2  # of a sequence: what a new one is believed to be like
_FIRST_WEIGHT, _FIRST_MEMORY = 4.0, 0.9  # of those, of which the last five sequences or so count
_OWN_WEIGHT, _OWN_MEMORY = 4.0, 0.95  # of a sequence's rounds
_STEPS, _MOST_STEPS = 4, 24  # steps to each half of being wrong: sequences that are nearly alike draft alike


def step_of(rate: float) -> int:
    """Steps are finer where a model is nearly always right: there they make the difference in long drafts."""
    return min(_MOST_STEPS, max(1, round(-_STEPS * math.log2(max(1e-9, 1.0 - rate)))))


def rate_of(step: int) -> float:
    return 1.0 - math.pow(0.5, step / _STEPS)


@dataclass(slots=True)
class SequenceRate:
    """How often first choices are right in one sequence, of which `num_rounds` were judged."""

    right: Rate
    num_rounds: int = 0


class Chain(NamedTuple):
    """One of `drafted` of at most `most` tokens, of which `matched` were accepted. Of the last of `most` tokens nobody
    knows whether it would have gone on."""

    matched: int
    drafted: int
    most: int


class DraftRates:
    """Of a model whose first choices are believed to be right so often. `version` grows when what all sequences share
    has moved."""

    def __init__(self, prior: float) -> None:
        self._right = Rate.fading(prior, _FIRST_WEIGHT, _FIRST_MEMORY)
        self._sure = Rate(_SURE, _POWER_WEIGHT, _COMMON_MEMORY)
        self._together = Rate(_SURE_AND_RIGHT, _POWER_WEIGHT, _COMMON_MEMORY)
        self._later = [Rate(_LATER_SHARE / rank, _LATER_WEIGHT, _COMMON_MEMORY) for rank in range(1, _MOST_RANKS)]
        self._crowded = Rate(_CROWDED, _CROWDED_WEIGHT, _CROWDED_MEMORY)
        self.hoped = step_of(prior)

    @property
    def version(self) -> int:
        shared = (self._sure, self._together, self._crowded, *self._later)
        return sum([rate.version for rate in shared])

    @property
    def right(self) -> float:
        """What is believed of a sequence without rounds."""
        return self._right.value

    def new_sequence(self) -> SequenceRate:
        return SequenceRate(Rate(self.right, _OWN_WEIGHT, _OWN_MEMORY))

    def reach(self, step: int, num_children: int) -> float:
        """The chance that one of so many children is accepted."""
        return 1.0 - self._missed(rate_of(step), num_children)

    def reach_below(self, step: int, width: int) -> float:
        """The chance that a beam of this width has the child of a right node that is not its root."""
        return max(1e-3, 1.0 - self._crowded.value * self._missed_below(rate_of(step), width))

    def _missed(self, right: float, num_children: int) -> float:
        missed = 1.0 - right
        for rate in self._later[: num_children - 1]:
            missed *= 1.0 - min(1.0, rate.value * right)
        return missed

    def _missed_below(self, right: float, width: int) -> float:
        """What a beam misses in proportion to."""
        return self._missed(right, 2) * math.pow(2.0 / width, _CROWDED_BY_WIDTH)

    def tokens(self, step: int, depth: int) -> float:
        """The chance that token number `depth` of a chain that may end early, from 1 on, is drafted and accepted."""
        right = rate_of(step)
        return math.pow(right, 1.0 + max(1.0, self._sure.value, self._together.value) * (depth - 1))

    def share(self, step: int, depth: int) -> float:
        """The chance that it is drafted."""
        return math.pow(rate_of(step), self._sure.value * (depth - 1))

    def observe(self, own: SequenceRate, draft: Draft, verdict: Verdict, *, is_beam: bool = False) -> None:
        """Learn from every node on the accepted path, and the one it ended at. Of a beam the root's children alone tell
        what later ones catch: others have some where the model was sure; and who has none missed its first."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(node)
        num_right = num_tried = 0
        for parent, accepted in zip((NO_PARENT, *verdict.path), (*verdict.path, None), strict=True):
            if parent in children:
                num_right, num_tried = num_right + (children[parent][0] == accepted), num_tried + 1
                if not is_beam or parent == NO_PARENT:
                    self._observe_later(own, children[parent], accepted)
        if is_beam:
            path_len, depth = len(verdict.path), draft.depth
            num_tried += 0 < path_len < depth and verdict.path[-1] not in children
            self._observe_below(own, draft, path_len, depth)
        own.num_rounds += 1
        for rate in (own.right, self._right) if own.num_rounds <= _FIRST_ROUNDS else (own.right,):
            rate.observe(num_right, num_tried)

    def _observe_later(self, own: SequenceRate, children: list[int], accepted: int | None) -> None:
        """Each that was not accepted leaves the next to be tried."""
        for i, child in enumerate(children[:_MOST_RANKS]):
            if i:
                self._later[i - 1].observe(child == accepted, own.right.value)
            if child == accepted:
                return

    def _observe_below(self, own: SequenceRate, draft: Draft, path_len: int, depth: int) -> None:
        """How often a beam's path ended below its root, of how often one would by itself."""
        num_tried = min(path_len, depth - 1)
        if num_tried > 0:
            expected = self._missed_below(own.right.value, draft.parents.count(NO_PARENT))
            self._crowded.observe(path_len < depth, num_tried * expected)

    def observe_ends(self, own: SequenceRate, chain: Chain) -> None:
        """Learn how often a chain that might have ended early went on, and how often behind a right token."""
        matched, drafted, most = chain
        num_decided = drafted - (drafted == most)
        if not num_decided:
            return
        _observe_power(self._sure, own, drafted - 1, num_decided)
        _observe_power(self._together, own, min(matched, drafted - 1), min(matched + 1, num_decided))


def _observe_power(power: Rate, own: SequenceRate, num_met: int, num_tried: int) -> None:
    """Something was met so often, of tries of which all but the last met it: those may have ended halfway."""
    num_ended = num_tried - num_met
    power.observe(num_ended, (num_met + num_ended / 2) * -math.log(min(own.right.value, 1.0 - 1e-3)))
