"""The chi-square test, without a library for it: the regularised incomplete gamma function and rare cells joined."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_RARE = 5.0  # cells that expect fewer are joined: below, the statistic is not chi-square distributed
_TINY = 1e-300


def upper_gamma(a: float, x: float) -> float:
    """Q(a, x), the regularised upper incomplete gamma function, for a > 0 and x >= 0."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        return 1.0 - scale * _lower_series(a, x)
    return scale * _upper_fraction(a, x)


def _lower_series(a: float, x: float) -> float:
    """P(a, x) / scale = sum of x^n / (a (a + 1) .. (a + n))."""
    term = total = 1.0 / a
    n = a
    while term > total * 1e-16:
        n += 1
        term *= x / n
        total += term
    return total


def _upper_fraction(a: float, x: float) -> float:
    """Q(a, x) / scale as Legendre's continued fraction 1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - ..)), from the top."""
    b = x + 1 - a
    c, d = 1 / _TINY, 1 / b
    value = d
    for i in range(1, 10_000):
        b += 2
        d = 1 / ((i * (a - i) * d + b) or _TINY)
        c = (i * (a - i) / c + b) or _TINY
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def chi_square_p(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """How likely counts at least this far from the probabilities p are. A count where p is 0 is impossible."""
    counts, p = counts.ravel(), p.ravel()
    if counts[p == 0].any():
        return 0.0
    order = np.argsort(p)
    observed, wanted = counts[order], p[order] / p.sum() * counts.sum()
    # The joined cell must not be rare itself: it takes in common cells until it is not.
    joined = 0 if wanted[0] >= _RARE else int(np.sum((wanted < _RARE) | (np.cumsum(wanted) - wanted < _RARE)))
    observed = np.append(observed[joined:], observed[:joined].sum() if joined else [])
    wanted = np.append(wanted[joined:], wanted[:joined].sum() if joined else [])
    if len(wanted) < 2:
        raise ValueError("one cell alone shows nothing")
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return upper_gamma((len(wanted) - 1) / 2, statistic / 2)
