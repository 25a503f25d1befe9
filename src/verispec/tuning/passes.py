"""Passes of a backend that tuning owns: all slots and table rows are its own to lay out.

Bits decide which tokens agree, so every pass is canonical where the backend has a family: the same menu comes out on
every run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verispec.backends.protocol import (
    FULL_VIEW,
    Backend,
    Pass,
    PassKind,
    PassResult,
    Rows,
    RowsBuilder,
    TableUpdate,
    View,
    Wanted,
)

MAX_ROWS = 128  # of one pass
NO_UPDATE = TableUpdate(*(np.zeros(0, np.int32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs passes in shapes of the family, or of any size where there is none."""

    backend: Backend
    family: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        """Rows that fit one pass."""
        return max((m for m in self.family if m <= MAX_ROWS), default=min(self.family, default=MAX_ROWS))

    def build(self, rows: RowsBuilder) -> Rows:
        """The rows, padded to a shape."""
        return rows.build(min((m for m in self.family if m >= len(rows)), default=len(rows)))

    def run(self, rows: Rows, wanted: Wanted, *, update: TableUpdate = NO_UPDATE, view: View = FULL_VIEW) -> PassResult:
        """One pass, waited for."""
        num_head = len(wanted.head_rows())
        head_shape = len(rows) if self.family and num_head else num_head
        kind = PassKind.CANONICAL if self.family else PassKind.FAST
        return self.backend.submit(Pass(kind, rows, wanted, update, head_shape, view=view)).result()


def table_update(entries: Iterable[tuple[int, int, int]]) -> TableUpdate:
    """From (seq_row, position, slot) triples."""
    columns = np.array(list(entries), np.int32).reshape(-1, 3).T
    return TableUpdate(*(np.ascontiguousarray(column) for column in columns))
