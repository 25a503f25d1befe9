"""Row-pure attention over per-token slots, in numpy.

Every row reduces over tiles of TILE absolute positions: one matrix product of fixed shape per row, tile and K/V head,
tiles summed in order from +0. So the bits of a row depend on its own query and context alone: not on which rows stand
beside it, and not on how many tiles are masked behind its end or before its window (they add exact zeros).
"""

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import Rows
from verispec.kv import ZERO_SLOT
from verispec.model.architecture import LayerSpec

TILE = 128
_MAX_GATHERED = 1 << 20  # floats of K gathered at a time
Float32 = NDArray[np.float32]
Int = NDArray[np.int64]


def contexts(rows: Rows, table: NDArray[np.int32]) -> Int:
    """The slot of every position that a row sees, up to the pass's longest context; ZERO_SLOT behind. [M, T * TILE]"""
    num_tiles = int(rows.positions.max()) // TILE + 1
    positions = np.arange(num_tiles * TILE)
    known = positions[: table.shape[1]]
    slots = np.full((len(rows), len(positions)), ZERO_SLOT, np.int64)
    slots[:, : len(known)] = np.where(known < rows.prefix_lens[:, None], table[rows.seq_rows, : len(known)], ZERO_SLOT)
    row, i = np.nonzero(np.arange(rows.tails.shape[1]) < rows.tail_lens[:, None])
    slots[row, rows.prefix_lens[row] + i] = rows.tails[row, i]
    return slots


def attend(
    spec: LayerSpec, q: Float32, k_store: Float32, v_store: Float32, slots: Int, own: NDArray[np.int32]
) -> Float32:
    """Attention of q [M, heads, d] over one layer's stores [slots, kv_heads, d]; returns [M, heads * d].

    `own` are the rows' positions.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads = k_store.shape[1]
    q = (q * np.float32(spec.query_scalar**-0.5)).reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim)
    positions, last = np.arange(slots.shape[1]), own[:, None]
    hidden = positions > last
    if spec.window is not None:
        hidden |= positions <= last - spec.window
    step = max(1, _MAX_GATHERED // (slots.shape[1] * kv_heads * head_dim))
    parts = [slice(first, first + step) for first in range(0, num_rows, step)]
    return np.concatenate([
        _attend_tiles(q[p], _gathered(k_store, slots[p]), _gathered(v_store, slots[p]), hidden[p]) for p in parts
    ]).reshape(num_rows, -1)  # fmt: skip


def _gathered(store: Float32, slots: Int) -> Float32:
    """[R, T, TILE, kv_heads, d]"""
    return store.take(slots, axis=0).reshape(len(slots), -1, TILE, *store.shape[1:])


def _attend_tiles(q: Float32, k: Float32, v: Float32, hidden: NDArray[np.bool_]) -> Float32:
    """q [R, kv_heads, group, d] over gathered K and V -> the same shape."""
    scores = np.matmul(q[:, None], k.transpose(0, 1, 3, 4, 2))  # [R, T, kv_heads, group, TILE]
    np.copyto(scores, np.float32(-np.inf), where=hidden.reshape(len(q), -1, 1, 1, TILE))
    weights = np.exp(scores - scores.max(axis=(1, 4), keepdims=True))
    sums = weights.sum(axis=-1, keepdims=True)  # [R, T, kv_heads, group, 1]
    values = np.matmul(weights, v.transpose(0, 1, 3, 2, 4))  # [R, T, kv_heads, group, d]
    total, value = np.zeros_like(sums[:, 0]), np.zeros_like(values[:, 0])
    for tile in range(k.shape[1]):
        total += sums[:, tile]
        value += values[:, tile]
    return np.asarray(value / total)
