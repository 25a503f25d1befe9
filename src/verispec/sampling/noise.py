"""Counter-based noise: a pure function of (seed, t, sample index, domain, node, vocabulary id).

Philox4x32-10 in 64-bit signed lanes (products wrap, which leaves the low 64 bits right), so one source serves every
array library. The logarithm uses IEEE + - * / in float32 only, one rounding per written operation: every CPU gives
the same bits, which libm does not promise. The tail is bounded: u is never 0 and never 1, so the noise is always
finite.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

Array = Any  # an array of the namespace `xp`, which follows the Python array API (numpy itself, or torch behind a shim)

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
NODE_STRIDE = 256

# The largest Gumbel value: u is at least 2^-33, and -log(-log1p(-2^-33)) = 22.87...
MAX_GUMBEL = 22.88


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


def log_f32(xp: Any, x: Array) -> Array:
    """Natural logarithm of positive normal float32 values, from IEEE operations alone; error below 2 ulp.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), as an odd series to s^9.
    """
    bits = x.view(xp.int32)
    e = (bits - 0x3F3504F3) >> 23  # 0x3F3504F3 is sqrt(1/2)
    m = (bits - (e << 23)).view(xp.float32)
    f = m - 1.0
    s = f / (m + 1.0)
    z = s * s
    series = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9))))
    exponent = xp.astype(e, xp.float32)
    # ln 2 in two parts: e * high is exact for |e| < 2^8, so the large term adds no rounding of its own.
    twice = s + s
    return exponent * 0.693145751953125 + (twice + (twice * series + exponent * 1.428606765330187e-06))


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


def vocabulary_words(xp: Any, vocab_size: int, *, seed: int, t: int, sample_index: int, stream: int = 0) -> Array:
    """The words of the whole vocabulary for one position: `noise_words` without computing each counter four times."""
    blocks = xp.arange((vocab_size + 3) >> 2, dtype=xp.int64)
    zero = blocks * 0
    low, high = split_seed(seed)
    counter = (blocks, zero + t, zero + sample_index, zero + stream)
    return xp.reshape(xp.stack(philox4x32(counter, (zero + low, zero + high)), axis=-1), (-1,))[:vocab_size]
