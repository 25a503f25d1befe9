"""Counter-based noise: a pure function of (seed, t, sample index, domain, node, vocabulary id).

Philox4x32-10 in 64-bit signed lanes (products wrap, which leaves the low 64 bits right), so one source serves every
array library. The logarithm is the project's own (`maths.py`): every CPU gives the same bits, which libm does not
promise. The tail is bounded: u is never 0 and never 1, so the noise is always finite.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.maths import Array, log_f32

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
NODE_STRIDE = 256

# The largest Gumbel value: u is at least 2^-33, and -log(-log1p(-2^-33)) = 22.87...
MAX_GUMBEL = 22.88
# The smallest: u is at most 1 - 2^-24, and -log(24 log 2) = -2.81...
MIN_GUMBEL = -2.82


class Domain(IntEnum):
    """Independent uses of one seed. Draft noise and coins never share bits with token noise."""

    TOKEN = 0
    COIN = 1
    DRAFT = 2
    RESIDUAL = 3


def stream(domain: Domain, node: int = 0) -> int:
    """The counter's last word: what the noise is for, and the node of a draft it belongs to."""
    return int(domain) + NODE_STRIDE * node


def split_seed(seed: int) -> tuple[int, int]:
    """The two 32-bit key words of a 64-bit seed, low word first."""
    return seed & _MASK, seed >> 32


def split_seeds(seeds: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (seeds & np.uint64(_MASK)).astype(np.int64), (seeds >> np.uint64(32)).astype(np.int64)


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Ten rounds of Philox over int64 arrays that hold 32-bit words; returns four arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIER_0
        p1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform_f32(xp: Any, word: Array) -> Array:
    """u = min((r + 0.5) * 2^-32, 1 - 2^-24) in float32, in (0, 1)."""
    u = (xp.astype(word, xp.float32) + 0.5) * 2.0**-32
    return xp.minimum(u, xp.full_like(u, 1.0 - 2.0**-24))


def gumbel_f32(xp: Any, word: Array) -> Array:
    """g = -log(-log1p(-u)) of a 32-bit word, float32. A small word is a large g."""
    u = uniform_f32(xp, word)
    w = 1.0 - u
    # log1p(-u) = log(w) + the part of u that rounding 1 - u lost.
    e = -(log_f32(xp, w) - ((w - 1.0) + u) / w)
    return -log_f32(xp, e)


def noise_words(
    token_ids: Array, *, seed_low: Array, seed_high: Array, t: Array, sample_index: Array, stream: Array = 0
) -> Array:
    """The 32-bit word of each (row, vocabulary id) pair; all arrays are int64 and broadcast together."""
    zero = token_ids * 0
    counter = (token_ids >> 2, t + zero, sample_index + zero, zero + stream)
    words = philox4x32(counter, (seed_low + zero, seed_high + zero))
    lane = token_ids & 3
    low = words[0] * (lane == 0) + words[1] * (lane == 1)
    return low + words[2] * (lane == 2) + words[3] * (lane == 3)


def vocabulary_words(
    xp: Any,
    vocab_size: int,
    *,
    seed_low: Array,
    seed_high: Array,
    t: Array,
    sample_index: Array,
    stream: Array = 0,
    device: Any = None,
) -> Array:
    """The words of the whole vocabulary: `noise_words` without computing each counter four times.

    Keys are numbers, or [R, 1] for R rows at once. [..., vocab_size]
    """
    blocks = xp.arange((vocab_size + 3) >> 2, dtype=xp.int64, device=device)
    zero = blocks * 0
    counter = (blocks, zero + t, zero + sample_index, zero + stream)
    words = xp.stack(philox4x32(counter, (zero + seed_low, zero + seed_high)), axis=-1)
    return xp.reshape(words, (*words.shape[:-2], -1))[..., :vocab_size]
