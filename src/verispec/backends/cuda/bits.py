"""The arithmetic of Hopper's tensor cores and of our kernels in numpy, bit for bit.

bf16 values are kept in float32 arrays. One tensor-core step adds 16 exact products and the accumulator as one sum: all
terms are aligned to the largest exponent (at least -133), cut off 25 bits below it, added exactly, and cut to float32,
always towards zero; a sum of 2^128 or more is infinite. A sum with terms that are not finite is NaN, or that infinity.
Everything else is one IEEE float32 operation at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

STEP = 16  # products of one tensor-core step
_FRACTION_BITS = 25
_LEAST_POWER = 2.0**-133
_LOG2E = np.float32(1.44269504)
_EXP2 = tuple(
    map(np.float32, (1.3264726149e-3, 9.6715129912e-3, 5.5507335812e-2, 2.4022242427e-1, 6.9314700365e-1, 1.0))
)
_GELU_LINEAR = np.float32(-2.3022082)  # -2 sqrt(2 / pi) log2 e
_GELU_CUBIC = np.float32(-0.10294324)  # 0.044715 of it
_SHIFTER = np.float32(12582912.0)  # 1.5 * 2^23


def bf16(x: Float32) -> Float32:
    """Rounded to the nearest bf16, ties to even; every NaN is one NaN."""
    return (bf16_bits(x).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x: Float32) -> NDArray[np.uint16]:
    """The bits of the nearest bf16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _powers(x: Float64) -> Float64:
    """2^floor(log2 |x|), that of subnormal float32 values as if they were normal; 0 for a zero."""
    powers = (np.ascontiguousarray(x).view(np.int64) & np.int64(0x7FF << 52)).view(np.float64)
    return np.where(x == 0, 0.0, np.maximum(powers, 2.0**-126))


def _towards_zero(x: Float64) -> Float32:
    """float64 to float32, cut off; infinite from 2^128 on, and what is cut to zero has no sign."""
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    cut = np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    return np.where(np.abs(x) < 2.0**128, cut + np.float32(0), nearest)


def chain(a: Float32, b: Float32, start: Float32 | None = None) -> Float32:
    """a [..., M, K] times b [..., N, K] transposed: ascending steps of 16 columns, from zero or from `start`."""
    columns = a.shape[-1] + -a.shape[-1] % STEP
    left, right = _padded(a, columns), _padded(b, columns)
    left_powers, right_powers = _powers(left), _powers(right)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])
    total = np.zeros(shape, np.float32) if start is None else start
    for at in range(0, columns, STEP):
        step = range(at, at + STEP)
        wide = total.astype(np.float64)
        # The exponent of a product is the sum of its factors' exponents: its significand lies in [1, 4).
        largest = _powers(wide)
        for k in step:
            np.maximum(largest, left_powers[k][..., :, None] * right_powers[k][..., None, :], out=largest)
        least = np.maximum(largest, _LEAST_POWER)
        scale = np.divide(2.0**_FRACTION_BITS, least, out=np.zeros_like(largest), where=largest > 0)
        whole, plain = np.trunc(wide * scale), wide
        for k in step:
            term = left[k][..., :, None] * right[k][..., None, :]
            plain = plain + term
            term *= scale
            whole += np.trunc(term, out=term)
        total = _towards_zero(np.divide(whole, scale, out=np.zeros_like(whole), where=scale > 0))
        total[~np.isfinite(plain)] = plain[~np.isfinite(plain)]
    return total


def _padded(x: Float32, columns: int) -> Float64:
    """The last axis first, with zeros up to `columns`."""
    first = np.moveaxis(x.astype(np.float64), -1, 0)
    return np.ascontiguousarray(np.pad(first, [(0, columns - len(first))] + [(0, 0)] * (x.ndim - 1)))


def tree(x: Float32) -> Float32:
    """Neighbours of the last axis added pairwise, level by level, with zeros up to a power of two."""
    size = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def product(x: Float32, w: Float32, parts: int) -> Float32:
    """x [M, K] times w [N, K] transposed, not yet rounded: one chain per part of K, then their tree."""
    size = x.shape[-1] // parts
    p = [chain(x[:, i * size : (i + 1) * size], w[:, i * size : (i + 1) * size]) for i in range(parts)]
    low = p[0] + p[1] if parts > 1 else p[0]
    return low if parts < 3 else low + (p[2] if parts == 3 else p[2] + p[3])


def fused(a: Float32, b: Float32 | np.float32, c: Float32 | np.float32) -> Float32:
    """a * b + c with one rounding: the float64 sum is rounded to odd, so that rounding it again is harmless."""
    exact = a.astype(np.float64) * b.astype(np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = exact + addend
    back = total - exact
    error = (exact - (total - back)) + (addend - back)
    bits = np.atleast_1d(total).view(np.int64)
    up = (np.atleast_1d(error) > 0) == (np.atleast_1d(total) > 0)  # away from zero
    is_odd = ((bits & 1) != 0) | ~np.isfinite(np.atleast_1d(total))
    bits = np.where((np.atleast_1d(error) != 0) & ~is_odd, np.where(up, bits + 1, bits - 1), bits)
    return bits.view(np.float64).reshape(total.shape).astype(np.float32)


def exp2(x: Float32) -> Float32:
    """2^x: 0 below -126, 2^126 above 126."""
    clipped = np.clip(x, np.float32(-200), np.float32(126))
    shifted = clipped + _SHIFTER
    whole = shifted - _SHIFTER
    f = clipped - whole
    p = np.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = fused(p, f, coefficient)
    y = p * np.ldexp(np.float32(1), np.maximum(whole, np.float32(-126)).astype(np.int32))
    return np.where(x < np.float32(-126), np.float32(0), y).astype(np.float32)


def silu(g: Float32) -> Float32:
    """g / (1 + 2^(-g log2 e))"""
    return g / (np.float32(1) + exp2(g * -_LOG2E))


def gelu(g: Float32) -> Float32:
    """g / (1 + e^(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3): the tanh form of GELU, without a tanh."""
    exponent: Float32 = g * fused(g * g, _GELU_CUBIC, _GELU_LINEAR)
    return g / (np.float32(1) + exp2(exponent))


def norm_factor(sum_of_squares: Float32, size: int, eps: float) -> Float32:
    """1 / sqrt(ss / size + eps)"""
    mean = fused(sum_of_squares, np.float32(1) / np.full_like(sum_of_squares, size), np.float32(eps))
    return np.asarray(np.float32(1) / np.sqrt(mean), np.float32)
