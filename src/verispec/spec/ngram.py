"""Prompt lookup: what followed the last few tokens the previous time they occurred in this sequence.

The longest match wins, then the most recent one. Text that quotes, repeats or counts is drafted well; other text
costs a dictionary look-up. Acceptance is tracked per match length over all sequences, so that the policy knows what
a match is worth; it decides speed only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verispec.errors import InputError
from verispec.spec.drafter import Curve, Refusal
from verispec.spec.rate import Rate
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Draft

_PRIOR_WEIGHT = 4.0  # tokens that the prior acceptance counts for


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
    """Where each n-gram of a sequence occurred last: n-gram -> position after it.

    `match` is that of the last look-up: its length, the position after it, and the sequence's length then.
    """

    positions: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed_len: int = 0
    match: tuple[int, int, int] = (0, 0, 0)


class NgramDrafter:
    """One index per live sequence, grown as tokens are committed."""

    has_probabilities = False
    reads_text = True

    def __init__(self, config: NgramConfig | None = None) -> None:
        self._config = config or NgramConfig()
        self._lengths = range(self._config.max_match, self._config.min_match - 1, -1)
        self._indices: dict[int, _Index] = {}
        prior, memory = self._config.prior_acceptance, self._config.memory
        self._rates = {n: Rate.fading(prior, _PRIOR_WEIGHT, memory) for n in self._lengths}
        self._nothing = Refusal(f"the last {self._config.min_match} tokens occurred nowhere before")

    @property
    def version(self) -> int:
        return sum(rate.version for rate in self._rates.values())

    def state(self, sequence: SequenceView) -> int | Refusal:
        """The length of the match: as many nodes as allowed can follow it, for it can be followed without end."""
        return self._match(sequence)[0] or self._nothing

    def curves(self, key: object) -> tuple[Curve, ...]:
        assert isinstance(key, int)
        return (Curve.chain(self._config.max_draft, self._rates[key].value),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [self._follow(t.sequence, t.choice.num_nodes) for t in turns]

    def _follow(self, sequence: SequenceView, num_nodes: int) -> Draft:
        """Where what follows the match reaches the end of the text, it goes on with its own beginning."""
        _, position = self._match(sequence)
        tokens = sequence.token_ids
        followed = list(tokens[position : position + num_nodes])
        while len(followed) < num_nodes:
            followed += followed[: num_nodes - len(followed)]
        return Draft.chain(followed)

    def observe(self, turn: Turn) -> None:
        """Update the acceptance of the match length this draft came from."""
        index = self._indices.get(turn.sequence.sequence_id)
        if index is not None and index.match[0] and turn.verdict is not None:
            self._rates[index.match[0]].observe_chain(len(turn.verdict.path), len(turn.draft))

    def forget(self, sequence_id: int) -> None:
        self._indices.pop(sequence_id, None)

    def _match(self, sequence: SequenceView) -> tuple[int, int]:
        """Longest earlier occurrence of the last tokens: its length and the position after it, or (0, 0)."""
        index = self._indices.get(sequence.sequence_id)
        if index is None:
            index = self._indices[sequence.sequence_id] = _Index()
        tokens, positions = sequence.token_ids, index.positions
        end = len(tokens)
        if index.match[2] == end:
            return index.match[:2]
        found = (0, 0)
        for position in range(index.indexed_len + 1, end + 1):
            found = (0, 0)
            for n in self._lengths:
                if position >= n:
                    ngram = tuple(tokens[position - n : position])
                    if not found[0] and ngram in positions:
                        found = n, positions[ngram]
                    positions[ngram] = position
        index.indexed_len = end
        index.match = (*found, end)
        return found
