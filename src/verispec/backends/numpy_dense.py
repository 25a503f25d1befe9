"""Matrix products of few rows with large weights, in numpy: row-pure by their shape, and fast where decoding needs it.

A library product of 4 rows with a large matrix spends most of its time repacking the matrix. Here weights are stored as
blocks of 64 outputs, and rows are taken 8 at a time, so every product is small: [8, in] @ [in, 64]. Libraries run those
without repacking, a block stays in the cache for all rows, and since the shape of a product does not depend on how many
rows the pass has, neither do its bits.
"""

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

ROW_BLOCK = 8
COLUMN_BLOCK = 64


class Dense:
    """A linear layer, `x @ weight.T`, with the weight [out, in] kept as blocks [N, in, COLUMN_BLOCK]."""

    def __init__(self, *weights: Float32) -> None:
        weight = np.concatenate(weights)
        self.num_outputs, num_inputs = weight.shape
        padded = np.pad(weight, ((0, -self.num_outputs % COLUMN_BLOCK), (0, 0)))
        blocks = padded.reshape(-1, COLUMN_BLOCK, num_inputs).transpose(0, 2, 1)
        self._blocks = np.ascontiguousarray(blocks)  # [N, in, COLUMN_BLOCK]

    def __call__(self, x: Float32) -> Float32:
        """[M, in] -> [M, out]"""
        whole = len(x) - len(x) % ROW_BLOCK
        rows = x[:whole].reshape(-1, ROW_BLOCK, x.shape[1])
        grouped = np.matmul(rows, self._blocks[:, None])  # [N, whole / ROW_BLOCK, ROW_BLOCK, COLUMN_BLOCK]
        rest = np.matmul(x[whole:], self._blocks)  # [N, rest, COLUMN_BLOCK]
        out = np.concatenate([grouped.reshape(len(rest), whole, COLUMN_BLOCK), rest], axis=1)
        return out.transpose(1, 0, 2).reshape(len(x), len(rest) * COLUMN_BLOCK)[:, : self.num_outputs]

    def outputs(self, indices: NDArray[np.int32]) -> Float32:
        """Rows of the weight [out, in]: an embedding look-up in a tied head."""
        return np.ascontiguousarray(self._blocks[indices // COLUMN_BLOCK, :, indices % COLUMN_BLOCK])
