"""What the audit measures of attention and of the draw, the same for every backend on the host.

A row's context follows from its own content, so that it is the same wherever the row stands. Lengths lie on both sides
of borders, some contexts end in a tail, and about half of the neighbours stand in the same sequence.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import BackendLimits, Float32, Int32, Rows
from verispec.kv import NUM_RESERVED
from verispec.model.architecture import Architecture
from verispec.sampling.draw import DrawResult
from verispec.sampling.rows import SampleKey, SamplingRows, plain_rows
from verispec.types import SamplingParams

# Of one kind of layer, by its first one's index: q [M, heads * d] over K and V [slots, kv_heads, d] by rows and table.
Attend = Callable[[int, Float32, Float32, Float32, Rows, Int32], Float32]


def probe_rows(x: Float32, table: Int32, lengths: Sequence[int], *, turn: int = 0) -> Rows:
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


def attention_probe(
    arch: Architecture, limits: BackendLimits, lengths: Sequence[int], attend: Attend, *, num_turns: int
) -> KernelProbe:
    """Attention of every kind of layer over scratch K/V; the outputs of all are joined."""
    num_slots = min(limits.num_slots, limits.context_len, max(lengths))
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, num_slots + NUM_RESERVED, arch.num_kv_heads, arch.head_dim)).astype(np.float32)
    k[:NUM_RESERVED], v[:NUM_RESERVED] = 0, 0
    table = rng.integers(NUM_RESERVED, num_slots + NUM_RESERVED, (3, num_slots)).astype(np.int32)
    fitting = [min(length, num_slots) for length in lengths]

    def run(x: Float32) -> Float32:
        turns = [probe_rows(x, table, fitting, turn=turn) for turn in range(num_turns)]
        return np.concatenate(
            [attend(i, x, k, v, rows, table) for i in arch.distinct_layers() for rows in turns], axis=1
        )

    return KernelProbe("attention", arch.num_heads * arch.head_dim, run)


def draw_probe(vocab_size: int, draw: Callable[[Float32, SamplingRows], DrawResult]) -> KernelProbe:
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=1)

    def run(logits: Float32) -> NDArray[np.generic]:
        return np.stack(draw(logits, plain_rows(params, SampleKey(7, 0), [5] * len(logits))), axis=1, dtype=np.float64)

    return KernelProbe("draw", vocab_size, run)
