"""Row-pure attention over per-token slots, in numpy.

Every row reduces over tiles of TILE absolute positions: one matrix product of fixed shape per row, tile and K/V head,
tiles summed in order from +0. So the bits of a row depend on its own query and context alone: not on which rows stand
beside it, and not on how many tiles are masked behind its end or before its window (they add exact zeros, and those
before every window of a group are left out). Rows whose contexts are prefixes of one another share the gathered K/V; a
tree row that branches off gathers its own. Sharing saves copies, never changes an operation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import Rows
from verispec.backends.workers import Workers
from verispec.kv import ZERO_SLOT

TILE = 128
_MAX_GATHERED = 1 << 18  # floats of K gathered at a time
_MIN_SHARED_WORK = 32 * TILE  # rows times positions below which threads cost more than they give
Float32 = NDArray[np.float32]
Int = NDArray[np.int64]


class Bucket(NamedTuple):
    """Groups of equal size: group j has rows `rows[j]` that read parts of the context `slots[j]`."""

    rows: Int  # [G, R]
    slots: Int  # [G, T * TILE] from the first tile that a row sees; ZERO_SLOT behind the end
    hidden: NDArray[np.bool_]  # [G, R, T, 1, 1, TILE] positions a row must not see


class _Group(NamedTuple):
    """Rows that share a gathered context, which begins at tile `first`."""

    rows: list[int]
    first: int
    context: Int


def group_contexts(rows: Rows, table: NDArray[np.int32], window: int | None = None) -> list[Bucket]:
    """Find the rows that can share one gathered context, and stack groups of like size: once a pass and window."""
    by_sequence: dict[int, list[int]] = {}
    for row in np.argsort(-rows.positions, kind="stable").tolist():  # longest context first
        by_sequence.setdefault(int(rows.seq_rows[row]), []).append(row)
    stacks: dict[tuple[int, int], list[_Group]] = {}
    for members in by_sequence.values():
        for group, context in _split_by_context(members, rows, table):
            shortest = int(rows.positions[group[-1]]) + 1
            first = max(0, shortest - window) // TILE if window is not None else 0
            num_tiles = -(-len(context) // TILE) - first
            stacks.setdefault((len(group), _round_up(num_tiles)), []).append(
                _Group(group, first, context[first * TILE :])
            )
    return [_stack(groups, num_tiles, rows, window) for (_, num_tiles), groups in stacks.items()]


def _split_by_context(
    members: list[int], rows: Rows, table: NDArray[np.int32]
) -> list[tuple[list[int], NDArray[np.int64]]]:
    """Groups of rows of one sequence whose contexts are prefixes of the first, longest one."""
    groups: list[tuple[list[int], Int]] = []
    for row in members:
        context = _context(row, rows, table)
        for group, longest in groups:
            if np.array_equal(longest[: len(context)], context):
                group.append(row)
                break
        else:
            groups.append(([row], context))
    return groups


def _context(row: int, rows: Rows, table: NDArray[np.int32]) -> Int:
    prefix = table[rows.seq_rows[row], : rows.prefix_lens[row]]
    return np.concatenate([prefix, rows.tails[row, : rows.tail_lens[row]]]).astype(np.int64)


def _round_up(num_tiles: int) -> int:
    """Tiles a group is stacked with: 1, 2, 3, 4, then steps of a quarter, so that few stacks waste little."""
    step = max(1, 1 << max(0, num_tiles.bit_length() - 3))
    return -(-num_tiles // step) * step


def _stack(groups: list[_Group], num_tiles: int, rows: Rows, window: int | None) -> Bucket:
    row_ids = np.array([group.rows for group in groups], np.int64)  # [G, R]
    slots = np.full((len(groups), num_tiles * TILE), ZERO_SLOT, np.int64)
    for i, group in enumerate(groups):
        slots[i, : len(group.context)] = group.context
    first = np.array([group.first for group in groups]).reshape(-1, 1, 1, 1, 1, 1)
    positions = first * TILE + np.arange(num_tiles * TILE).reshape(num_tiles, 1, 1, TILE)  # [G, 1, T, 1, 1, TILE]
    own = rows.positions[row_ids][:, :, None, None, None, None]  # [G, R, 1, 1, 1, 1]
    hidden = positions > own
    if window is not None:
        hidden |= positions <= own - window
    return Bucket(row_ids, slots, hidden)


def attend(
    q: Float32, k_store: Float32, v_store: Float32, buckets: list[Bucket], workers: Workers, *, scale: np.float32
) -> Float32:
    """Attention of q [M, heads, d] over one layer's stores [slots, kv_heads, d]; returns [M, heads * d]."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads = k_store.shape[1]
    out = np.empty((num_rows, num_heads * head_dim), np.float32)
    scaled = (q * scale).reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim)
    for bucket in buckets:
        _attend_bucket(scaled, k_store, v_store, bucket, workers, out)
    return out


def _attend_bucket(
    q: Float32, k_store: Float32, v_store: Float32, bucket: Bucket, workers: Workers, out: Float32
) -> None:
    """Write the rows of one bucket into `out`, shared out by groups, or by rows where one group has them all."""
    num_groups, group_rows = bucket.rows.shape

    # A gathered context should stay in the cache: groups are taken so many at a time.
    step = max(1, _MAX_GATHERED // (bucket.slots.shape[1] * k_store.shape[1] * k_store.shape[2]))

    def by_groups(start: int, end: int) -> None:
        for first in range(start, end, step):
            part = slice(first, min(first + step, end))
            rows, slots = bucket.rows[part], bucket.slots[part]
            k, v = _gather(k_store, slots), _gather(v_store, slots)
            out[rows] = _attend_tiles(q[rows], k, v, bucket.hidden[part]).reshape(*rows.shape, -1)

    if bucket.rows.size * bucket.slots.shape[1] < _MIN_SHARED_WORK:
        by_groups(0, num_groups)
    elif num_groups > 1:
        workers.share(num_groups, by_groups)
    else:
        k, v = _gather(k_store, bucket.slots), _gather(v_store, bucket.slots)

        def by_rows(start: int, end: int) -> None:
            rows = bucket.rows[:, start:end]
            out[rows] = _attend_tiles(q[rows], k, v, bucket.hidden[:, start:end]).reshape(*rows.shape, -1)

        workers.share(group_rows, by_rows)


def _gather(store: Float32, slots: Int) -> Float32:
    """[G, 1, T, TILE, kv_heads, d]"""
    return store.take(slots, axis=0).reshape(len(slots), 1, -1, TILE, *store.shape[1:])


def _attend_tiles(q: Float32, k: Float32, v: Float32, hidden: NDArray[np.bool_]) -> Float32:
    """q [G, R, kv_heads, group, d] over gathered K and V -> the same shape."""
    with np.errstate(all="ignore"):  # it is per thread, and NaN is a value here
        scores = np.matmul(q[:, :, None], k.transpose(0, 1, 2, 4, 5, 3))  # [G, R, T, kv_heads, group, TILE]
        np.copyto(scores, np.float32(-np.inf), where=hidden)
        scores -= scores.max(axis=(2, 5), keepdims=True)
        weights = np.exp(scores, out=scores)
        tile_sums = weights.sum(axis=-1, keepdims=True)  # [G, R, T, kv_heads, group, 1]
        tile_values = np.matmul(weights, v.transpose(0, 1, 2, 4, 3, 5))  # [G, R, T, kv_heads, group, d]
        total = np.zeros_like(tile_sums[:, :, 0])
        value = np.zeros_like(tile_values[:, :, 0])
        for tile in range(k.shape[2]):
            total += tile_sums[:, :, tile]
            value += tile_values[:, :, tile]
        return np.asarray(value / total)
