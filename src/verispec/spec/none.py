"""The drafter that drafts nothing: plain decoding, or the stand-in for one that cannot draft here."""

from __future__ import annotations

from collections.abc import Sequence

from verispec.spec.drafter import Offer
from verispec.spec.plan import SequencePlan
from verispec.types import NO_DRAFT, Draft, SequenceView, Verdict


class NoDrafter:
    """Off, as an object; `reason` is what the counters say."""

    def __init__(self, reason: str = "drafter none") -> None:
        self._reason = reason

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """Nothing to offer."""
        return Offer.nothing(self._reason)

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """Empty drafts."""
        return [NO_DRAFT] * len(plans)

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing kept."""
