"""Where the rows of a pass stand on the device: rows that are attended to one by one first, then those of prompts.

Rows of one sequence that follow each other are attended to in groups, which read K and V once for all of them. Each
part is padded to one of few sizes, so that few graphs serve all passes; rows are pure, so their order changes no bit.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.cuda.shapes import SPAN
from verispec.backends.protocol import FROM_DRAFT, Rows
from verispec.kv import DUMP_SLOT

Int32 = NDArray[np.int32]
# Up to 64 rows tiles of eight cost the same; beyond that the steps are wider.
ROW_SIZES = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536,
    1792, 2048, 2560, 3072, 3584, 4096,
)  # fmt: skip
# Of passes with prompts: rows that are attended to one by one, all rows, and rows with logits. Single rows leave less
# than MAX_PLACES - MAX_ROWS places empty, so that whatever is beside them finds its own.
_SINGLE_SIZES = (
    0, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, *range(1024, 4097, 256),
)  # fmt: skip
_MIXED_SIZES = (
    16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1056, 1280, 1536, 1792, 2048, 2112, 2304, 2560, 3072,
    3584, 4096, 4352,
)  # fmt: skip
_HEAD_SIZES = (8, 32, 64, 128, 256, 512, 1024)
MAX_ROWS, MAX_HEAD_ROWS = ROW_SIZES[-1], _HEAD_SIZES[-1]
MAX_PLACES = _MIXED_SIZES[-1]
MIN_RUN = 24  # rows: a shorter run, as drafts are, is attended to row by row: fewer sizes to capture
PADDING = np.array([0, 0, DUMP_SLOT, 0, 1, 0], np.int32)  # its context is the first entry of the padding's table row


def at_least(sizes: tuple[int, ...], count: int) -> int:
    """The smallest of the sizes that has room; beyond the largest, the count itself."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else count


def spans_of(length: int) -> int:
    """Spans of a context, rounded up to a power of two."""
    return 1 << (-(-max(1, length) // SPAN) - 1).bit_length()


class Arranged(NamedTuple):
    """Columns for the device, and the place of every row of the pass."""

    columns: Int32  # [6, places]: tokens, positions, slots, sequence rows, lengths of prefixes and of what is ready
    places: Int32  # [rows], meaningless for padding
    groups: Int32  # [G, 2]: first place and number of rows
    single: int  # places of rows that are attended to one by one
    num_groups: int  # that the captured launch has
    head: int
    tails: Int32 | None = None  # [places, width]


def arrange(rows: Rows, num_head: int, rows_per_group: int) -> Arranged:
    """Rows to places."""
    real = np.flatnonzero((rows.seq_rows != 0) | (rows.slots != DUMP_SLOT))
    seq_rows, positions = rows.seq_rows[real], rows.positions[real]
    plain = (rows.tail_lens[real] == 0) & (rows.token_ids[real] >= 0)
    linked = plain[1:] & plain[:-1] & (seq_rows[1:] == seq_rows[:-1]) & (positions[1:] == positions[:-1] + 1)
    starts = np.flatnonzero(np.concatenate([[True], ~linked])) if len(real) else np.zeros(0, np.int64)
    lengths = np.diff(starts, append=len(real))
    is_long = lengths >= MIN_RUN
    in_group = np.repeat(is_long, lengths)
    order = np.concatenate([np.flatnonzero(~in_group), np.flatnonzero(in_group)])
    num_single = len(real) - int(in_group.sum())
    num_grouped = len(real) - num_single
    if num_grouped:
        single = at_least(_SINGLE_SIZES, num_single)
        grouped = at_least(_MIXED_SIZES, single + num_grouped) - single
        head = at_least(_HEAD_SIZES, num_head) if num_head else 0
    else:
        single, grouped = at_least(ROW_SIZES, max(1, num_single)), 0
        head = at_least(_HEAD_SIZES, num_head) if num_head else 0
        if single // 2 < num_head <= single <= MAX_HEAD_ROWS:
            head = single
    at = np.concatenate([np.arange(num_single), single + np.arange(num_grouped)])
    columns = np.repeat(PADDING[:, None], single + grouped, axis=1)
    ready = np.full(int(rows.seq_rows.max(initial=0)) + 1, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(ready, seq_rows, positions)  # what stands before the first of a sequence's rows was written before
    source = real[order]
    parts = (rows.token_ids, rows.positions, rows.slots, rows.seq_rows, rows.prefix_lens)
    for column, values in zip(columns, parts, strict=False):
        column[at] = values[source]
    columns[5, at] = ready[rows.seq_rows[source]]
    columns[:, at[rows.token_ids[source] == FROM_DRAFT]] = PADDING[:, None]  # the device knows them
    places = np.zeros(len(rows), np.int32)
    places[source] = at
    tails = None
    if (rows.tail_lens[real] > 0).any():
        tails = np.zeros((single + grouped, rows.tails.shape[1]), np.int32)
        tails[at] = rows.tails[source]
    num_groups = -(-grouped // rows_per_group) + grouped // MIN_RUN if grouped else 0
    return Arranged(columns, places, _groups(lengths[is_long], single, rows_per_group), single, num_groups, head, tails)


def _groups(lengths: NDArray[np.int64], first: int, most: int) -> Int32:
    found = []
    for length in lengths.tolist():
        found += [(first + i, min(most, length - i)) for i in range(0, length, most)]
        first += length
    return np.array(found, np.int32).reshape(-1, 2)
