"""A running acceptance: tokens accepted of tokens tried, old ones fading, with what was believed before as a start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rate:
    """`prior` counts as `weight` tokens tried, always; what is observed fades by `memory` with each token."""

    prior: float
    weight: float
    memory: float
    accepted: float = 0.0
    tried: float = 0.0

    @property
    def value(self) -> float:
        """The estimate, from 0 to 1."""
        return (self.prior * self.weight + self.accepted) / (self.weight + self.tried)

    def observe(self, accepted: int, tried: int) -> None:
        """So many of so many were accepted."""
        kept = self.memory**tried
        self.accepted = self.accepted * kept + accepted
        self.tried = self.tried * kept + tried

    def fade(self) -> None:
        """Trust what was observed half as much: something new begins."""
        self.accepted, self.tried = self.accepted / 2, self.tried / 2
