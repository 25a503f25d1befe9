"""What a step is going to run: rows of at most two passes, and the slots leased for them. Plain values.

The scheduler makes plans, drafters and the verifier read them; nobody changes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from verispec.kv import Lease
from verispec.sampling.rows import History, SampleKey
from verispec.types import SamplingParams, SequenceView


class PlannedSequence(SequenceView, Protocol):
    """What the verifier reads of a sequence: committed state only."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def sample_key(self) -> SampleKey: ...
    @property
    def stopping_ids(self) -> Iterable[int]: ...
    def history(self) -> History: ...


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's rows in one pass: `num_pending` committed tokens from `start`, then up to `draft_quota` nodes.

    `table_slots` are the slots of positions `table_start`.. that the backend's table does not have yet. Row i of the
    plan uses `lease.slots[i]`. `epoch` tells a stale result from a current one.
    """

    sequence: PlannedSequence
    epoch: int
    seq_row: int
    start: int
    num_pending: int
    draft_quota: int
    lease: Lease
    table_start: int
    table_slots: Sequence[int]
    completes: bool  # whether every pending token gets its row, so that the target draws a new token


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the canonical pass and the fast pass. Either may be empty."""

    canonical: tuple[SequencePlan, ...] = ()
    fast: tuple[SequencePlan, ...] = ()

    @property
    def sequences(self) -> tuple[SequencePlan, ...]:
        """All sequence plans, canonical ones first; drafts, scores and verdicts are listed in this order."""
        return self.canonical + self.fast
