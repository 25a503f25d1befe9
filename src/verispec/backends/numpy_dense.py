"""Matrix products of few rows with large weights, in numpy: row-pure by their shape, and fast where decoding needs it.

A library product of 4 rows with a large matrix spends most of its time repacking the matrix. Here weights are stored as
blocks of 64 outputs, and rows are taken 8 at a time, so every product is small: [8, in] @ [in, 64]. Libraries run those
without repacking, a block stays in the cache for all rows, and since the shape of a product does not depend on how many
rows the pass has, neither do its bits. Blocks are shared out to threads; which thread computes a block changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

ROW_BLOCK = 8
COLUMN_BLOCK = 64
_MIN_THREADED_ROWS = 12  # fewer rows are limited by memory traffic, which one thread saturates


class Workers:
    """A fixed set of threads; the caller's own is one of them."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "verispec") if num_threads > 1 else None

    def share(self, count: int, work: Callable[[int, int], None]) -> None:
        """Call `work(start, end)` over ranges that cover `count` items, and wait for all."""
        if self._pool is None:
            work(0, count)
            return
        bounds = [count * i // self.num_threads for i in range(self.num_threads + 1)]
        others = [self._pool.submit(work, start, end) for start, end in pairwise(bounds[1:])]
        try:
            work(bounds[0], bounds[1])
        finally:
            for other in others:
                other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


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
