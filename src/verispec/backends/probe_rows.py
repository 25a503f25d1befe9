"""Rows for the audit of attention: each row's context follows from its own content, so that it is the same wherever the
row stands. Lengths lie on both sides of borders, some contexts end in a tail, and about half of the neighbours stand in
the same sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import Rows


def probe_rows(x: NDArray[np.float32], table: NDArray[np.int32], lengths: Sequence[int], *, turn: int = 0) -> Rows:
    """One row per row of `x` over the sequences 1 and 2 of the table; another `turn` gives each another length."""
    builder = PassBuilder()
    for values in x:
        seed = int(np.frombuffer(values[:4].tobytes(), np.uint32).sum())
        length, context = lengths[(seed + turn) % len(lengths)], table[1 + seed % 2]
        tail_len = min(length, (seed + turn) % 3)
        tail = context[length - tail_len : length].tolist()
        if tail:
            builder.add_node(1 + seed % 2, length - 1, 0, tail)
        else:
            builder.add_chain(1 + seed % 2, length - 1, (0,), (int(context[length - 1]),))
    return builder.rows(len(x))
