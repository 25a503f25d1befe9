"""Drafters: guesses at the next tokens, behind four verbs. "No drafting" is a drafter too.

A drafter sees committed tokens and gives values; it never writes into a sequence, and nothing it says can change the
output, only the speed. Adding one takes one file and one line in `registry.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from verispec.spec.plan import Plan, SequencePlan
from verispec.types import NO_DRAFT, Draft, SequenceView, Verdict

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Offer(NamedTuple):
    """What a drafter could do for a sequence now.

    Up to `max_nodes` nodes, each accepted with chance `acceptance` if the ones before it were. Without nodes, `reason`
    says why.
    """

    max_nodes: int
    acceptance: float
    reason: str = ""

    @classmethod
    def nothing(cls, reason: str) -> Offer:
        """The offer not to draft."""
        return cls(0, 0.0, reason)


class Drafter(Protocol):
    """One way of drafting."""

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """What could be drafted for this sequence, at most `limit` nodes. Changes nothing the output depends on."""

    def draft(self, sequence: SequenceView, quota: int) -> Draft:
        """At most `quota` nodes."""

    def observe(self, sequence: SequenceView, draft: Draft, verdict: Verdict) -> None:
        """Learn what became of a draft. The sequence holds the committed tokens by now."""

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""


class DrafterSet:
    """All drafters of an engine, by name; each sequence names its own. A drafter that fails drafts nothing.

    A drafter's output is untrusted: a draft that is not a tree over the vocabulary, or too large, is dropped.
    """

    def __init__(self, drafters: Mapping[str, Drafter], *, vocab_size: int) -> None:
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size

    @property
    def names(self) -> tuple[str, ...]:
        """The names a sequence can ask for."""
        return tuple(self._drafters)

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """The offer of the sequence's own drafter, brought into range."""
        if not limit:
            return Offer.nothing("no room for a draft")
        drafter = self._drafters[sequence.drafter]
        failed = Offer.nothing("the drafter failed; see the log")
        return self._guarded(sequence, failed, lambda: _in_range(drafter.offer(sequence, limit), limit))

    def advance(self, plan: Plan) -> list[Draft]:
        """One valid draft per sequence plan, in the plan's order."""
        return [self._draft(p) if p.draft_quota else NO_DRAFT for p in plan.sequences]

    def observe(self, plan: Plan, drafts: Sequence[Draft], verdicts: Sequence[Verdict | None]) -> None:
        """Tell each drafter what became of its draft."""
        for p, draft, verdict in zip(plan.sequences, drafts, verdicts, strict=True):
            if verdict is not None and len(draft):
                self._observe(p.sequence, draft, verdict)

    def forget(self, sequence: SequenceView) -> None:
        """The sequence has ended."""
        self._guarded(sequence, None, lambda: self._drafters[sequence.drafter].forget(sequence.sequence_id))

    def _draft(self, plan: SequencePlan) -> Draft:
        sequence, drafter = plan.sequence, self._drafters[plan.sequence.drafter]

        def valid_draft() -> Draft:
            draft = drafter.draft(sequence, plan.draft_quota)
            if not draft.is_valid(vocab_size=self._vocab_size, max_nodes=plan.draft_quota):
                raise ValueError("the draft is not a tree over the vocabulary, or too large")
            return draft

        return self._guarded(sequence, NO_DRAFT, valid_draft)

    def _observe(self, sequence: SequenceView, draft: Draft, verdict: Verdict) -> None:
        drafter = self._drafters[sequence.drafter]
        self._guarded(sequence, None, lambda: drafter.observe(sequence, draft, verdict))

    def _guarded(self, sequence: SequenceView, fallback: T, call: Callable[[], T]) -> T:
        # Drafts are hints: a drafter's bug must cost speed, never a request. It is logged, with its traceback.
        try:
            return call()
        except Exception:
            logger.exception("drafter %s failed; it drafts nothing this time", sequence.drafter)
            return fallback


def _in_range(offer: Offer, limit: int) -> Offer:
    """The offer with at most `limit` nodes and a probability for acceptance; NaN and negative ones offer nothing."""
    if not offer.acceptance > 0 or offer.max_nodes < 1:
        return Offer.nothing(offer.reason)
    return offer._replace(max_nodes=min(offer.max_nodes, limit), acceptance=min(offer.acceptance, 1.0))
