"""Running acceptance: how often what was drafted came true, old rounds fading, with a belief to start from."""

from __future__ import annotations

from dataclasses import dataclass, field

from verispec.types import NO_PARENT, Draft, Verdict

_NOTICEABLE = 0.02  # a change of acceptance that may change what pays
_LATER_SHARE = 0.35  # believed of each further child: its share of what the ones before it miss
_MOST_RANKS = 16
_SURE = 0.75  # believed: the chance that a chain goes on behind a token
_SURE_AND_RIGHT = 0.95  # believed: of the less likely of both, how often the other is the case too


@dataclass(slots=True)
class Rate:
    """`prior` counts as `weight` tries, always; what is observed fades by `memory` with each observation.

    `version` grows when the value has moved noticeably.
    """

    prior: float
    weight: float
    memory: float
    accepted: float = 0.0
    tried: float = 0.0
    version: int = 0
    _published: float = field(init=False)

    def __post_init__(self) -> None:
        self._published = self.value

    @classmethod
    def fading(cls, prior: float, weight: float, memory: float) -> Rate:
        """One whose prior is as if it had been observed, and fades with it."""
        return cls(0.0, 0.0, memory, prior * weight, weight)

    @property
    def value(self) -> float:
        return (self.prior * self.weight + self.accepted) / (self.weight + self.tried)

    def observe(self, num_accepted: int, num_tried: int = 1) -> None:
        """One try, or those of a whole chain."""
        self._set(self.accepted * self.memory + num_accepted, self.tried * self.memory + num_tried)

    def observe_chain(self, num_accepted: int, num_drafted: int) -> None:
        """Nodes behind the first rejection were never tried."""
        self.observe(num_accepted, min(num_drafted, num_accepted + 1))

    def fade(self) -> None:
        """Trust what was observed half as much: something new begins."""
        self._set(self.accepted / 2, self.tried / 2)

    def _set(self, accepted: float, tried: float) -> None:
        self.accepted, self.tried = accepted, tried
        if abs(self.value - self._published) > _NOTICEABLE:
            self._published = self.value
            self.version += 1


class Acceptance:
    """How often a node's first, second, ... child is the accepted one."""

    def __init__(self, prior: float, *, weight: float = 32.0, memory: float = 0.98) -> None:
        self._ranks: list[Rate] = []
        missed = 1.0
        for rank in range(_MOST_RANKS):
            share = prior if rank == 0 else _LATER_SHARE
            self._ranks.append(Rate(missed * share, weight, memory))
            missed *= 1 - share

    @property
    def version(self) -> int:
        """That of the first child's."""
        return self._ranks[0].version

    def reach(self, num_children: int) -> float:
        """The chance that one of so many children is accepted."""
        return min(1.0, sum(rate.value for rate in self._ranks[:num_children]))

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Learn from every node on the accepted path, and the one it ended at."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(node)
        for parent, accepted in zip((NO_PARENT, *verdict.path), (*verdict.path, None), strict=True):
            for rate, child in zip(self._ranks, children.get(parent, ()), strict=False):
                rate.observe(child == accepted)

    def fade(self) -> None:
        for rate in self._ranks:
            rate.fade()


class EarlyEnds:
    """What becomes of chains that may end early: how often a token is accepted, how often the chain goes on behind it,
    and how often both. Chains go on behind tokens they are sure of, so the three are no product."""

    def __init__(self, prior: float, *, weight: float = 32.0, memory: float = 0.98) -> None:
        self._accepted = Rate(prior, weight, memory)
        self._went_on = Rate(_SURE, weight, memory)
        self._both = Rate(_SURE_AND_RIGHT * min(prior, _SURE), weight, memory)

    @property
    def version(self) -> int:
        return self._accepted.version + self._went_on.version + self._both.version

    def tokens(self, depth: int) -> float:
        """The chance that token number `depth` of a chain, from 1 on, is drafted and accepted."""
        return self._accepted.value * self._both.value ** (depth - 1)

    def share(self, depth: int) -> float:
        """The chance that it is drafted."""
        return self._went_on.value ** (depth - 1)

    def observe(self, *, matched: int, drafted: int, most: int) -> None:
        """A chain of `drafted` of at most `most` tokens, of which `matched` were accepted. Of the last of `most` tokens
        nobody knows whether it would have gone on."""
        if not drafted:
            return
        has_ended = drafted < most
        tried = min(drafted, matched + 1)
        self._accepted.observe(matched, tried)
        self._went_on.observe(drafted - 1, drafted - 1 + has_ended)
        self._both.observe(min(matched, drafted - 1), tried if has_ended else min(tried, drafted - 1))

    def fade(self) -> None:
        for rate in (self._accepted, self._went_on, self._both):
            rate.fade()
