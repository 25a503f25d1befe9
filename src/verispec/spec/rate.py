"""Running acceptance: how often what was drafted came true, old rounds fading, with a belief to start from."""

from __future__ import annotations

from dataclasses import dataclass, field

_NOTICEABLE = 0.02  # a change of acceptance that may change what pays


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

    def observe(self, num_accepted: float, num_tried: float = 1.0) -> None:
        """One try, or those of a whole chain."""
        self._set(self.accepted * self.memory + num_accepted, self.tried * self.memory + num_tried)

    def observe_chain(self, num_accepted: int, num_drafted: int) -> None:
        """Nodes behind the first rejection were never tried."""
        self.observe(num_accepted, min(num_drafted, num_accepted + 1))

    def _set(self, accepted: float, tried: float) -> None:
        self.accepted, self.tried = accepted, tried
        if abs(self.value - self._published) > _NOTICEABLE:
            self._published = self.value
            self.version += 1
