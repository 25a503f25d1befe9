"""What a step is going to run: rows of at most two passes, and the slots leased for them. Plain values.

The scheduler makes plans, drafters and the verifier read them; nobody changes one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from verispec.kv import Lease
from verispec.sampling.rows import History, SampleKey
from verispec.tree import TreeShape
from verispec.types import SequenceStats, SequenceView


class PlannedSequence(SequenceView, Protocol):
    """What the verifier reads of a sequence, committed state only, and the counters it is reported in."""

    @property
    def slots(self) -> Sequence[int]: ...
    @property
    def uses_probabilities(self) -> bool: ...
    @property
    def is_traced(self) -> bool: ...
    @property
    def sample_key(self) -> SampleKey: ...
    @property
    def stopping_ids(self) -> Collection[int]: ...
    @property
    def stats(self) -> SequenceStats: ...
    def history(self) -> History: ...


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's rows in one pass: `num_pending` committed tokens from `start`, then up to `draft_quota` nodes.

    The nodes are the first of `window`, or where that is empty, what `drafter` drafts. `table_slots` are the slots of
    positions `table_start`.. that the backend's table does not have yet. Row i of the plan uses `lease.slots[i]`.
    `epoch` tells a stale result from a current one. `shape` is what the drafter offered, if that was a tree;
    `store_lens` says how many committed tokens have K/V in each store.
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
    drafter: str = ""
    window: tuple[int, ...] = ()  # regularly decoded tokens behind the committed ones
    shape: TreeShape | None = None
    store_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The next row of regular decoding: the one after `window`, in the fast pass. Its draw is drafted, not judged."""

    sequence: PlannedSequence
    epoch: int
    seq_row: int
    lease: Lease
    table_start: int
    table_slots: Sequence[int]
    window: tuple[int, ...]
    target_len: int
    drafter: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the canonical pass, and the fast pass with its two kinds of rows. Any of them may be empty.

    `is_joined`: one canonical pass has all the rows, because that is cheaper. Canonical rows do not notice (they are
    pure), and the others may run in any shape.
    """

    canonical: tuple[SequencePlan, ...] = ()
    fast: tuple[SequencePlan, ...] = ()
    drafting: tuple[WindowPlan, ...] = ()
    is_joined: bool = False

    @property
    def sequences(self) -> tuple[SequencePlan, ...]:
        """What is judged, canonical rows first; drafts, scores and verdicts are listed in this order."""
        return self.canonical + self.fast
