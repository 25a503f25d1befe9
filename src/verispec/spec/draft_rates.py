"""What is believed of a draft model's drafts: of each sequence by its own rounds, of a new one by those of others.

Sequences differ by how often the model's first choice is right, which their own rounds tell within a few. Everything
else is learned over all of them and follows from it: how often a chain goes on, because the model is sure of a token,
and what a node's later children catch of what its first one misses, are so many times that rate; and below its first
level a beam, whose paths take places from each other, loses the right one so many times as often as on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verispec.spec.rate import Rate
from verispec.types import NO_PARENT, Draft, Verdict

# Believed, for each time that first choices are right: how often the model is sure of one, and the share of what the
# children before it miss that a later child catches: a model that is seldom right spreads its hopes thinly.
_SURE, _LATER_SHARE = 1.0, 0.45
_SURE_AND_RIGHT = 0.95  # believed: of the less likely of both, how often the other is the case too
_MOST_RANKS = 16
_SURE_WEIGHT, _LATER_WEIGHT, _COMMON_MEMORY = 16.0, 4.0, 0.98  # of what is learned over all rounds
# Believed: so many times as often as behind its root a beam loses the path, which others take places from there.
_CROWDED, _CROWDED_WEIGHT, _CROWDED_MEMORY = 1.5, 4.0, 0.99  # the weight in paths that are expected to end
_FIRST_ROUNDS = 2  # of a sequence: what a new one is believed to be like
_FIRST_WEIGHT, _FIRST_MEMORY = 4.0, 0.9  # of those, of which the last five sequences or so count
_OWN_WEIGHT, _OWN_MEMORY = 4.0, 0.95  # of a sequence's rounds
_STEPS = 16  # of the rate: sequences that are nearly alike draft alike


def step_of(rate: float) -> int:
    return max(1, round(_STEPS * rate))


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
        self._right = Rate(prior, _FIRST_WEIGHT, _FIRST_MEMORY)
        self._sure = Rate(_SURE, _SURE_WEIGHT, _COMMON_MEMORY)
        self._together = Rate(_SURE_AND_RIGHT, _SURE_WEIGHT, _COMMON_MEMORY)
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
        return 1.0 - self._missed(step / _STEPS, num_children)

    def reach_below(self, step: int, width: int) -> float:
        """The chance that a beam of this width has the child of a right node that is not its root."""
        right = step / _STEPS
        return max(1e-3, 1.0 - self._crowded.value * self._missed(right, width))

    def _missed(self, right: float, num_children: int) -> float:
        missed = 1.0 - right
        for rate in self._later[: num_children - 1]:
            missed *= 1.0 - min(1.0, rate.value * right)
        return missed

    def tokens(self, step: int, depth: int) -> float:
        """The chance that token number `depth` of a chain that may end early, from 1 on, is drafted and accepted."""
        right = step / _STEPS
        return right * (self._together.value * min(right, self._sure_of(right))) ** (depth - 1)

    def share(self, step: int, depth: int) -> float:
        """The chance that it is drafted."""
        return self._sure_of(step / _STEPS) ** (depth - 1)

    def _sure_of(self, right: float) -> float:
        return min(1.0, self._sure.value * right)

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
            expected = self._missed(own.right.value, draft.parents.count(NO_PARENT))
            self._crowded.observe(path_len < depth, num_tried * expected)

    def observe_ends(self, own: SequenceRate, chain: Chain) -> None:
        """Learn how often a chain that might have ended early went on, and how often behind a right token."""
        matched, drafted, most = chain
        num_decided = drafted - (drafted == most)
        if not num_decided:
            return
        self._sure.observe(drafted - 1, num_decided * own.right.value)
        num_known = min(matched + 1, num_decided)
        is_right_rarer = self._sure.value > 1.0
        num_rarer = min(matched if is_right_rarer else drafted - 1, num_known)
        if num_rarer:
            self._together.observe(min(matched, drafted - 1), num_rarer)
