"""Slots for what is planned: rows of prompts, cohorts, drafts and further rounds, and what the backend's table lacks.

Nothing is planned that has no slots. Whoever plans has made room for one row of everybody; further rows and rounds are
taken as far as slots are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from verispec.engine.ahead import RoundSize, own
from verispec.engine.roster import Roster
from verispec.engine.sequence import Sequence
from verispec.spec.turn import Cohort, Turn


class Leases:
    """Of sequences in the roster, whose rows of the table are `context_len` long. With `feeds`, cohorts can go on
    before they are read."""

    def __init__(self, roster: Roster, *, context_len: int, feeds: bool) -> None:
        self._roster, self._context_len, self._feeds = roster, context_len, feeds

    def cohorts(self, groups: Mapping[bool, SequenceOf[Sequence]], *, is_ahead: bool = False) -> list[Cohort]:
        found = [self.cohort(group, is_canonical=kind) for kind, group in groups.items() if group]
        for cohort in found:
            cohort.is_ahead = is_ahead
        return found

    def cohort(self, sequences: SequenceOf[Sequence], *, is_canonical: bool) -> Cohort:
        """One round of plain decoding, with a slot leased for each sequence."""
        lease = self._roster.pool.lease()
        if not self._roster.make_room(len(sequences)) or not self._roster.pool.extend(lease, len(sequences)):
            raise AssertionError("slots for the rows of a cohort were not kept free")
        cohort = Cohort(
            list(sequences),
            [s.kv.epoch for s in sequences],
            [s.kv.seq_row for s in sequences],
            [len(s.token_ids) - 1 + s.kv.num_ahead for s in sequences],
            is_canonical,
            lease,
            feeds=self._feeds,
        )
        for sequence in sequences:
            sequence.kv.num_flights += 1
        self._roster.cohorts.append(cohort)
        return cohort

    def ride(self, turn: Turn, num_rounds: int) -> None:
        """A sequence that only decodes for a while takes part in further rounds, if slots for them are free."""
        sequence = own(turn)
        num_rounds = min(num_rounds, sequence.max_len - sequence.committed_len)
        if num_rounds > 1 and self._roster.take(sequence, turn.num_pending + num_rounds - 1):
            turn.num_rounds = num_rounds

    def stay(self, turn: Turn, num_rounds: int) -> None:
        """Rounds that the backend drafts by itself, if slots are free up to the last token that can have a row."""
        num_nodes, shape = turn.choice.num_nodes, turn.choice.shape
        size = RoundSize(num_nodes, num_nodes, is_tree=False)
        if shape is not None and not shape.is_chain:  # the curve's: of it there are so many nodes
            size = RoundSize(num_nodes, shape.within(num_nodes, shape.depth).depth, is_tree=True)
        num_rounds = size.rounds_in_table(num_rounds, turn.room, turn.table_room)
        if num_rounds > 1 and self._roster.take(own(turn), size.num_places(num_rounds, turn.room)):
            turn.num_rounds = num_rounds

    def lengthen(self, cohort: Cohort, num_rounds: int) -> None:
        """Lease the slots of further rounds, if all of them are free and the table has places for them."""
        count = len(cohort.sequences)
        num_rounds = min(num_rounds, self._context_len - max(cohort.positions))
        further = count * (num_rounds - 1)
        if further and self._roster.make_room(further) and self._roster.pool.extend(cohort.lease, further):
            cohort.num_rounds = num_rounds
        if cohort.feeds:
            for sequence in cohort.sequences:
                sequence.kv.num_ahead += cohort.num_rounds  # type: ignore[attr-defined]

    def extend_prompt(self, turn: Turn, granted: int, num_reserved: int) -> None:
        """Give a turn all the rows granted to it, as far as slots are free and not reserved for others' rows."""
        sequence = own(turn)
        count = min(granted - 1, self._roster.num_available - num_reserved)
        if count > 0 and self._roster.take(sequence, 1 + count):
            turn.num_pending += count
            turn.completes = turn.start + turn.num_pending == sequence.committed_len

    def has_slots(self, turn: Turn) -> bool:
        """Lease the slots of the draft chosen; a whole window's, when it is opened. Rows of others come first."""
        sequence, choice = own(turn), turn.choice
        assert sequence.kv.lease is not None
        needed = turn.num_pending + choice.num_nodes - len(sequence.kv.lease.slots)
        if needed > 0 and choice.grows and needed + len(self._roster.running) > self._roster.num_available:
            return False
        return self._roster.take(sequence, turn.num_pending + choice.num_nodes)

    def freeze(self, turn: Turn) -> None:
        """Note the slots leased, and what the backend's table lacks."""
        sequence = own(turn)
        assert sequence.kv.lease is not None
        turn.slots = sequence.kv.lease.slots
        self._send_table(turn, sequence)
        sequence.kv.num_flights += 1

    def _send_table(self, turn: Turn, sequence: Sequence) -> None:
        """Nodes of a tree that the host grows need no place in the table: its row may end before them."""
        kv = sequence.kv
        assert kv.lease is not None
        held, leased = len(kv.held), kv.lease.slots[: self._context_len - len(kv.held)]
        turn.table_start = kv.synced_len
        if kv.synced_len >= held:
            turn.table_slots = leased[kv.synced_len - held :]
        else:
            turn.table_slots = kv.held[kv.synced_len :] + leased
        kv.synced_len = held + len(leased)
