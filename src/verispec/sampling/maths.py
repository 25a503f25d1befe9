"""exp and log in float32 from IEEE operations alone, one rounding per written operation and no fused ones.

Library functions differ in the last bit from one library, vector unit or device to the next; these do not differ
anywhere. `docs/determinism.md` writes them out for those who make kernels, and `native/maths.h` has them in C++.
"""

from typing import Any

Array = Any  # an array of the namespace `xp`, which follows the Python array API (numpy itself, or torch behind a shim)

LEAST_EXPONENT = -87.0  # exp is 0 below it, so that no result is subnormal
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest whole number


def exp_f32(xp: Any, x: Array) -> Array:
    """exp of float32 values from -inf to 0, relative error below 2e-7; not for NaN.

    x = n ln 2 + r; exp(r) = 1 + r + r^2 p(r), times 2^n.
    """
    c = xp.maximum(x, xp.full_like(x, LEAST_EXPONENT))
    n = (c * 1.44269504 + _ROUNDER) - _ROUNDER
    r = (c - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = (p * r * r + r) + 1.0
    power = ((xp.astype(n, xp.int32) << 23) + 0x3F800000).view(xp.float32)  # 2^n
    return xp.where(x < LEAST_EXPONENT, 0.0, y * power)


def log_f32(xp: Any, x: Array) -> Array:
    """Natural logarithm of positive normal float32 values; error below 2 ulp.

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
