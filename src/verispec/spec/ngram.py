"""Prompt lookup: what followed the last few tokens the previous time they occurred in this sequence.

The longest match wins, then the most recent one. Text that quotes, repeats or counts is drafted well; other text
costs a dictionary look-up. Acceptance is tracked per match length over all sequences, so that the planner knows what
a match is worth; it decides speed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verispec.errors import InputError
from verispec.spec.drafter import Offer
from verispec.spec.plan import SequencePlan
from verispec.types import NO_DRAFT, Draft, SequenceView, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Nodes of one draft, match lengths tried, longest first, and how fast the acceptance estimate moves."""

    max_draft: int = 16
    max_match: int = 4
    min_match: int = 2
    prior_acceptance: float = 0.5
    memory: float = 0.98

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise InputError(f"min_match {self.min_match} must be from 1 to max_match {self.max_match}")


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a sequence was last followed by something: n-gram -> position after it."""

    positions: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed_len: int = 0


@dataclass(slots=True)
class _Rate:
    """Accepted over tried nodes, older rounds fading out."""

    accepted: float
    tried: float

    def update(self, accepted: int, tried: int, memory: float) -> None:
        self.accepted = self.accepted * memory + accepted
        self.tried = self.tried * memory + tried


class NgramDrafter:
    """One index per live sequence, grown as tokens are committed."""

    def __init__(self, config: NgramConfig | None = None) -> None:
        self._config = config or NgramConfig()
        self._indices: dict[int, _Index] = {}
        prior = self._config.prior_acceptance
        lengths = range(self._config.min_match, self._config.max_match + 1)
        self._rates = {n: _Rate(accepted=4 * prior, tried=4.0) for n in lengths}

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """As many nodes as allowed if the last tokens occurred before: a match can be followed without end."""
        length, _ = self._match(sequence)
        if not length:
            return Offer.nothing(f"the last {self._config.min_match} tokens occurred nowhere before")
        rate = self._rates[length]
        return Offer(min(limit, self._config.max_draft), rate.accepted / rate.tried)

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """The chain that followed each match."""
        return [self._follow(p.sequence, p.draft_quota) for p in plans]

    def _follow(self, sequence: SequenceView, quota: int) -> Draft:
        """Where what follows the match reaches the end of the text, it goes on with its own beginning."""
        length, position = self._match(sequence)
        if not length:
            return NO_DRAFT
        tokens = sequence.token_ids
        period = len(tokens) - position
        return Draft.chain(tokens[position + i % period] for i in range(quota))

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Update the acceptance of the match length this draft came from."""
        sequence = plan.sequence
        start = len(sequence.token_ids) - len(verdict.path) - 1
        length, _ = self._match(sequence, start)
        if length:
            tried = min(len(draft), len(verdict.path) + 1)  # nodes behind the first rejection were never tried
            self._rates[length].update(len(verdict.path), tried, self._config.memory)

    def forget(self, sequence_id: int) -> None:
        """Drop the index."""
        self._indices.pop(sequence_id, None)

    def _match(self, sequence: SequenceView, end: int | None = None) -> tuple[int, int]:
        """Longest earlier occurrence of the tokens before `end`: its length and the position after it, or (0, 0)."""
        tokens = sequence.token_ids
        end = len(tokens) if end is None else end
        index = self._indices.setdefault(sequence.sequence_id, _Index())
        lengths = range(self._config.max_match, self._config.min_match - 1, -1)
        for position in range(index.indexed_len, end):
            for n in lengths:
                if position >= n:
                    index.positions[tuple(tokens[position - n : position])] = position
        index.indexed_len = max(index.indexed_len, end)
        for n in lengths:
            found = index.positions.get(tuple(tokens[end - n : end])) if end > n else None
            if found is not None and found < end:
                return n, found
        return 0, 0
