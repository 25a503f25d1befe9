"""The drafter that drafts nothing: plain decoding."""

from __future__ import annotations

from verispec.spec.drafter import Offer
from verispec.types import NO_DRAFT, Draft, SequenceView, Verdict


class NoDrafter:
    """Off, as an object."""

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """Nothing to offer."""
        return Offer.nothing("drafter none")

    def draft(self, sequence: SequenceView, quota: int) -> Draft:
        """The empty draft."""
        return NO_DRAFT

    def observe(self, sequence: SequenceView, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing kept."""
