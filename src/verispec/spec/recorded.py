"""The drafter of a replay: drafts what a recording says comes next, so that the target checks it in parallel passes.

It is for the one sequence of an engine of its own, and no user can name it. Like every drafter it decides speed only:
where the recording is wrong, the target commits its own token, and the replay has found the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from verispec.spec.drafter import Offer
from verispec.spec.plan import SequencePlan
from verispec.types import Draft, SequenceView, Verdict


class RecordedDrafter:
    """`token_ids` is the whole recording, prompt included."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """All that is left but the last token, which the target adds itself."""
        num_left = len(self._token_ids) - len(sequence.token_ids) - 1
        return Offer(min(limit, num_left), 1.0) if num_left > 0 else Offer.nothing("the recording ends here")

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """The chain that follows the committed tokens in the recording."""
        starts = [len(p.sequence.token_ids) for p in plans]
        return [Draft.chain(self._token_ids[s : s + p.draft_quota]) for p, s in zip(plans, starts, strict=True)]

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing kept."""
