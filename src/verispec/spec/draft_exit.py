"""Adaptive draft exit, as published: stop drafting once the draft is unsure, with a threshold that follows acceptance.

One state for all sequences: the threshold moves by at most a thousandth a round, so it is carried from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftExit:
    """The threshold `gamma` on a token's raw draft probability, and the smoothed acceptance `rate` that moves it."""

    gamma: float = 0.6
    rate: float = 0.0
    target: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    gamma_memory: float = 0.9

    def stops(self, probability: float) -> bool:
        """Whether drafting ends behind a token of this probability; the token itself is still verified."""
        return not probability >= self.gamma

    def observe(self, *, matched: int, drafted: int, most: int) -> None:
        """Learn from a round that drafted `drafted` of at most `most` tokens, of which `matched` were accepted."""
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1 - self.rate_memory) * matched / drafted
        if self.rate < self.target:
            wanted = self.gamma + self.step
        elif drafted == most:
            wanted = self.gamma
        else:
            wanted = self.gamma - self.step
        gamma = self.gamma_memory * self.gamma + (1 - self.gamma_memory) * wanted
        self.gamma = min(1.0, max(0.0, gamma))  # beyond these nothing changes, but the way back would be long
