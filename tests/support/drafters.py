"""A drafter to derive from: it promises chains that are always accepted, and drafts what a subclass says."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from verispec.spec.drafter import Curve
from verispec.spec.turn import SequenceView, Turn
from verispec.types import NO_DRAFT, Draft


class Eager:
    has_probabilities = False
    has_trees = False
    is_companion = False
    needs_cheap_rows = False
    version = 0
    most_nodes = 64

    def state(self, sequence: SequenceView) -> Hashable:
        return "any"

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        return (Curve.chain(self.most_nodes, 1.0),)

    def guess(self, sequence: SequenceView, num_nodes: int) -> Draft:
        return NO_DRAFT

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [self.guess(t.sequence, t.choice.num_nodes) for t in turns]

    def observe(self, turn: Turn) -> None:
        pass

    def forget(self, sequence: SequenceView) -> None:
        pass
