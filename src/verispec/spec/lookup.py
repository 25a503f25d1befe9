"""What followed the last few tokens before in the same text, looked up by the backend itself.

Every round of a burst looks up anew (`rounds.looked_up`), without the host and without a pass. Whether anything will be
found nobody knows beforehand; so what is promised is what came true in the sequence's rounds so far, those that found
nothing included. That is never nothing: where rows cost little, going on in bursts is worth more than a plain round
with the host. What was learned fades as the text grows: an answer may begin to quote, and is tried again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verispec.backends.pass_builder import LOOK_UP
from verispec.spec.drafter import Curve, Level, Refusal
from verispec.spec.rate import Rate
from verispec.spec.turn import Recipe, SequenceView, Turn
from verispec.types import NO_DRAFT, Draft

NO_LOOK_UP = "this backend does not look drafts up by itself; drafter suffix does it on the host"
_NEEDS_HOST = Refusal("what the request wants to know needs the host after each round; drafter suffix drafts there")
_NOT_COMPUTED = Refusal("the prompt is not computed yet")
_FIRST, _LATER = 0.3, 0.7  # believed of a round's first token, and of each that follows an accepted one
_WEIGHT, _MEMORY = 2.0, 0.9  # of the running rates
_HALF_LIFE = 1024  # tokens of text after which half of what was learned is forgotten
_STEPS = 32  # of rates, in keys: sequences that are nearly alike draft alike


@dataclass(slots=True)
class _Seen:
    """What came true in a sequence's rounds, and how long its text was then."""

    first: Rate = field(default_factory=lambda: Rate(_FIRST, _WEIGHT, _MEMORY))
    later: Rate = field(default_factory=lambda: Rate(_LATER, _WEIGHT, _MEMORY))
    num_tokens: int = 0


class _Key(NamedTuple):
    """Believed of the first token and of later ones, in steps."""

    first: int
    later: int


class LookupDrafter:
    """Chains of up to `max_draft` tokens, for sequences that need nothing of the host."""

    has_probabilities = False
    has_trees = False
    is_companion = False
    version = 0  # a curve is its key's alone

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._seen: dict[int, _Seen] = {}

    def state(self, sequence: SequenceView) -> _Key | Refusal:
        if sequence.needs_host or sequence.uses_probabilities:
            return _NEEDS_HOST
        num_tokens = len(sequence.token_ids)
        if sequence.computed_len + 1 != num_tokens:
            return _NOT_COMPUTED
        seen = self._seen.setdefault(sequence.sequence_id, _Seen(num_tokens=num_tokens))
        trust = 0.5 ** ((num_tokens - seen.num_tokens) / _HALF_LIFE)
        pairs = (seen.first.value, _FIRST), (seen.later.value, _LATER)
        return _Key(*(round(_STEPS * (trust * value + (1 - trust) * prior)) for value, prior in pairs))

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, _Key)
        first, later = key.first / _STEPS, key.later / _STEPS
        levels = tuple(Level(1, first * later**depth) for depth in range(self._max_draft))
        return (Curve(levels, by_backend=True),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Recipe]:
        return [Recipe(turn.choice.num_nodes, LOOK_UP) if turn.is_resident else NO_DRAFT for turn in turns]

    def observe(self, turn: Turn) -> None:
        """One round of a burst. A chain that was shorter than it might have been missed the next token."""
        seen, num_nodes = self._seen.get(turn.sequence.sequence_id), turn.choice.num_nodes
        if seen is None or turn.verdict is None or not num_nodes:
            return
        count = len(turn.verdict.path)
        seen.first.observe(count > 0)
        if count:
            seen.later.observe_chain(count - 1, num_nodes - 1)
        seen.num_tokens = len(turn.sequence.token_ids)

    def forget(self, sequence: SequenceView) -> None:
        self._seen.pop(sequence.sequence_id, None)
