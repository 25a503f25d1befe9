"""How often what stands behind a match came true, by what the match is like: the promise of drafter `suffix`.

A draft is accepted exactly as far as it is what the target draws. So committed text alone tells what a match was worth,
whether it was drafted from or not: every look is learned from once, at the next one. What is believed before that was
measured: SmolLM2-135M, 96 answers to prompts of Spec-Bench and HumanEval, half of them at temperature 0, half at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verispec.spec.rate import Rate

ONE, ALL, MOST, FEW = range(4)  # votes for the most frequent next token: of the occurrences that there are
WIDTH = 4  # next tokens that are tried where occurrences disagree
TRAIL_LEN = 8  # tokens behind a match that are compared with what came, at most
_NO_TOKEN = -1  # what follows the end of a text
_WEIGHT, _MEMORY = 8.0, 0.98  # of the running rates
_MORE_LENGTH = 2  # behind a token that came true, a match is worth what one so much longer is


class MatchKind(NamedTuple):
    """At least `length` tokens, how far its occurrences agree, whether they are in the sequence's own text, and whether
    the sequence samples: at temperature 0 it repeats itself twice as often."""

    length: int
    votes: int
    is_own: bool
    samples: bool


class Chances(NamedTuple):
    """Of the most frequent next token; of each token behind it, if those before came true; and of the other next tokens
    together, if it is not the most frequent that comes."""

    first: float
    later: float
    other: float


def believed(kind: MatchKind) -> Chances:
    """What is promised before anything was learned."""
    behind = kind._replace(length=kind.length + _MORE_LENGTH, votes=ONE)
    return Chances(_first(kind), _first(behind), (0.15 if kind.samples else 0.25) * (1.0 if kind.is_own else 0.5))


def _first(kind: MatchKind) -> float:
    length = float(kind.length)
    missed: float = 0.85 * length**-0.5 if kind.samples else 0.7 * length**-0.75
    if kind.votes == ALL:
        missed *= 0.65
    elif kind.votes == FEW:
        missed = 0.92 if kind.samples else 0.82
    return (1 - missed) * (1.0 if kind.is_own else length / (length + 2))


def shares(num_others: int) -> list[float]:
    """What each of the other next tokens has of their chance: the second of them half as much as the first, ..."""
    parts = [1 / rank for rank in range(1, num_others + 1)]
    total = sum(parts)
    return [part / total for part in parts]


@dataclass(slots=True)
class MatchRates:
    """The running rates of matches of one kind."""

    first: Rate
    later: Rate
    other: Rate

    @classmethod
    def believed(cls, kind: MatchKind) -> MatchRates:
        return cls(*[Rate.fading(chance, _WEIGHT, _MEMORY) for chance in believed(kind)])

    @property
    def chances(self) -> Chances:
        return Chances(self.first.value, self.later.value, self.other.value)

    def learn(self, next_ids: Sequence[int], token_id: int) -> bool:
        """A token came where these were offered, the most frequent first; returns whether that one is it."""
        is_first = token_id == next_ids[0]
        self.first.observe(is_first)
        if not is_first and len(next_ids) > 1:
            self.other.observe(token_id in next_ids[1:WIDTH])
        return is_first


class Trail:
    """What a match offered behind its first token, compared with what comes until they differ."""

    __slots__ = ("_ahead", "_later")

    def __init__(self, later: Rate, offered: Sequence[int]) -> None:
        self._later = later
        self._ahead = [*offered, _NO_TOKEN][1:TRAIL_LEN]

    def read(self, came: Sequence[int]) -> bool:
        """Learn from further tokens; returns whether there is more to compare."""
        num_right = 0
        for offered, token_id in zip(self._ahead, came, strict=False):
            if offered != token_id:
                self._later.observe(num_right, num_right + 1)
                return False
            num_right += 1
        if num_right:
            self._later.observe(num_right, num_right)
            del self._ahead[:num_right]
        return bool(self._ahead)
