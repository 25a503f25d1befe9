"""The drafter that drafts nothing: plain decoding, or the stand-in for one that cannot draft here."""

from collections.abc import Hashable, Sequence

from verispec.spec.drafter import Curve, Refusal
from verispec.spec.turn import SequenceView, Turn
from verispec.types import NO_DRAFT, Draft


class NoDrafter:
    """Off, as an object; `reason` is what the counters say."""

    has_probabilities = False
    has_trees = False
    is_companion = False
    needs_cheap_rows = False
    version = 0

    def __init__(self, reason: str = "drafter none") -> None:
        self._refusal = Refusal(reason)

    def state(self, sequence: SequenceView) -> int | Refusal:
        return self._refusal

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        return ()

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [NO_DRAFT] * len(turns)

    def observe(self, turn: Turn) -> None:
        pass

    def forget(self, sequence: SequenceView) -> None:
        pass
