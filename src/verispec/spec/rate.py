"""Running acceptance: how often what was drafted came true, old rounds fading, with a belief to start from."""

from __future__ import annotations

from dataclasses import dataclass

from verispec.types import NO_PARENT, Draft, Verdict

_NOTICEABLE = 0.02  # a change of acceptance that may change what pays
_LATER_SHARE = 0.35  # believed of each further child: its share of what the ones before it miss
_MOST_RANKS = 16


@dataclass(slots=True)
class Fading:
    """Accepted over tried nodes of whole drafts, older ones fading by `memory`. `version` grows as the value moves."""

    accepted: float
    tried: float
    memory: float
    version: int = 0
    _published: float = -1.0

    @property
    def value(self) -> float:
        """The estimate, from 0 to 1."""
        return self.accepted / self.tried

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        """One draft; nodes behind the first rejection were never tried."""
        self.accepted = self.accepted * self.memory + num_accepted
        self.tried = self.tried * self.memory + min(num_drafted, num_accepted + 1)
        if abs(self.value - self._published) > _NOTICEABLE:
            self._published = self.value
            self.version += 1


@dataclass(slots=True)
class Rate:
    """`prior` counts as `weight` tries, always; what is observed fades by `memory` with each try."""

    prior: float
    weight: float
    memory: float
    accepted: float = 0.0
    tried: float = 0.0

    @property
    def value(self) -> float:
        """The estimate, from 0 to 1."""
        return (self.prior * self.weight + self.accepted) / (self.weight + self.tried)

    def observe(self, is_accepted: bool) -> None:
        """One try."""
        self.accepted = self.accepted * self.memory + is_accepted
        self.tried = self.tried * self.memory + 1

    def fade(self) -> None:
        """Trust what was observed half as much: something new begins."""
        self.accepted, self.tried = self.accepted / 2, self.tried / 2


class Acceptance:
    """How often a node's first, second, ... child is the accepted one."""

    def __init__(self, prior: float, *, weight: float = 32.0, memory: float = 0.98) -> None:
        self._ranks: list[Rate] = []
        self.version = 0  # grows when the estimates have moved noticeably
        self._published = prior
        missed = 1.0
        for rank in range(_MOST_RANKS):
            share = prior if rank == 0 else _LATER_SHARE
            self._ranks.append(Rate(missed * share, weight, memory))
            missed *= 1 - share

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
        self._publish()

    def fade(self) -> None:
        """Something new begins."""
        for rate in self._ranks:
            rate.fade()
        self._publish()

    def _publish(self) -> None:
        if abs(self._ranks[0].value - self._published) > _NOTICEABLE:
            self._published = self._ranks[0].value
            self.version += 1
