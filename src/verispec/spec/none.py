"""The drafter that drafts nothing: plain decoding."""

from __future__ import annotations

from verispec.spec.drafter import NO_OFFER, Offer
from verispec.types import NO_DRAFT, Draft, SequenceView, Verdict


class NoDrafter:
    """Off, as an object."""

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """Nothing to offer."""
        return NO_OFFER

    def draft(self, sequence: SequenceView, quota: int) -> Draft:
        """The empty draft."""
        return NO_DRAFT

    def observe(self, sequence: SequenceView, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing kept."""
