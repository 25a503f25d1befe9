"""Matrix products of few rows with large weights, in numpy: row-pure by their shape, and fast where decoding needs it.

A library product of 4 rows with a large matrix spends most of its time repacking the matrix. Here weights are stored as
blocks of 64 outputs, and rows are taken 8 at a time, so every product is small: [8, in] @ [in, 64]. Libraries run those
without repacking, a block stays in the cache for all rows, and since the shape of a product does not depend on how many
rows the pass has, neither do its bits. Blocks are shared out to threads; which thread computes a block changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verispec.backends.workers import Workers

Float32 = NDArray[np.float32]

ROW_BLOCK = 8
COLUMN_BLOCK = 64
_MIN_THREADED_ROWS = 12  # fewer rows are limited by memory traffic, which one thread saturates


class Dense:
    """A linear layer, `x @ weight.T`, with the weight [out, in] kept as blocks [N, in, COLUMN_BLOCK]."""

    def __init__(self, weights: list[Float32], workers: Workers) -> None:
        weight = np.concatenate(weights) if len(weights) > 1 else weights[0]
        self.num_outputs, num_inputs = weight.shape
        missing = -self.num_outputs % COLUMN_BLOCK
        if missing:
            weight = np.concatenate([weight, np.zeros((missing, num_inputs), np.float32)])
        blocks = weight.reshape(-1, COLUMN_BLOCK, num_inputs).transpose(0, 2, 1)
        self._blocks = np.ascontiguousarray(blocks)  # [N, in, COLUMN_BLOCK]
        self._workers = workers

    def __call__(self, x: Float32) -> Float32:
        """[M, in] -> [M, out]"""
        num_rows, num_blocks = len(x), len(self._blocks)
        out = np.empty((num_rows, num_blocks, COLUMN_BLOCK), np.float32)
        whole = num_rows - num_rows % ROW_BLOCK

        rows = x[:whole].reshape(-1, ROW_BLOCK, x.shape[1])  # [R, ROW_BLOCK, in]
        grouped = out[:whole].reshape(len(rows), ROW_BLOCK, num_blocks, COLUMN_BLOCK).transpose(2, 0, 1, 3)
        rest = out[whole:].transpose(1, 0, 2)  # [N, rest, COLUMN_BLOCK]

        def multiply(start: int, end: int) -> None:
            with np.errstate(all="ignore"):  # it is per thread, and NaN is a value here
                if whole:
                    np.matmul(rows, self._blocks[start:end, None], out=grouped[start:end])
                if whole < num_rows:
                    np.matmul(x[whole:], self._blocks[start:end], out=rest[start:end])

        if num_rows >= _MIN_THREADED_ROWS:
            self._workers.share(num_blocks, multiply)
        else:
            multiply(0, num_blocks)
        return out.reshape(num_rows, num_blocks * COLUMN_BLOCK)[:, : self.num_outputs]

    def outputs(self, indices: NDArray[np.int32]) -> Float32:
        """Rows of the weight [out, in]: an embedding look-up in a tied head."""
        return np.ascontiguousarray(self._blocks[indices // COLUMN_BLOCK, :, indices % COLUMN_BLOCK])
