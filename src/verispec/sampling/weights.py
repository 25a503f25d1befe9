"""Sums in sampling, one rule for every backend: whatever is added up is an integer, so its sum is exact in any order.

A token's weight is w = rint(exp(z) * 2^40), with z its logit less the row's largest: 2^40 for the best token, 0 below
about z = -28.4. Up to 2^22 weights fit into 63 bits. So a sum over the vocabulary may be cut and ordered as suits the
device, and the log-probability and the nucleus that follow from it have the same bits everywhere.

The noise spans less than 25.8, so a token of weight 0 is never drawn: filters and the draw agree about it.
"""

from typing import Any, NamedTuple

from verispec.sampling.maths import Array, exp_f32, log_f32

SAMPLING = "2"  # part of every profile; raised when the rules of drawing change bits
WEIGHT_BITS = 40
MAX_VOCAB_SIZE = 2**22


class Totals(NamedTuple):
    """What turns a row's logits into log-probabilities. NaN for a row with NaN in it or without a finite maximum."""

    top: Array  # [R] float32, the largest logit; +0 if that is a zero of either sign
    log_total: Array  # [R] float32, log of the sum of exp(l - top)


def below_top(xp: Any, logits: Array) -> Array:
    """z = l - max; -inf throughout a row that holds NaN or has no finite maximum, which then weighs nothing. [R, V]"""
    top = xp.max(logits, axis=-1)[:, None] + 0.0  # NaN if there is one: tested for before anything becomes an integer
    usable = xp.isfinite(top)
    return xp.where(usable, logits - xp.where(usable, top, 0.0), -xp.inf)


def weights(xp: Any, z: Array) -> Array:
    """Of z from -inf to 0. The product is exact and a float32 rounds to an integer that it can hold. int64"""
    return xp.astype(xp.round(exp_f32(xp, z) * 2.0**WEIGHT_BITS), xp.int64)


def log_total(xp: Any, z: Array) -> Array:
    """log of the sum of exp(z) over each row, at least one z being 0; NaN where a row weighs nothing. [R] float32"""
    total = xp.sum(weights(xp, z), axis=-1)
    exists = total > 0
    found = log_f32(xp, xp.astype(xp.where(exists, total, 1), xp.float32) * 2.0**-WEIGHT_BITS)
    return xp.where(exists, found, xp.nan)


def totals(xp: Any, logits: Array) -> Totals:
    top = xp.max(logits, axis=-1) + 0.0  # -0 + 0 is +0: libraries differ in which zero is the larger
    return Totals(xp.where(xp.isfinite(top), top, xp.nan), log_total(xp, below_top(xp, logits)))


def logprobs(logits: Array, total: Totals) -> Array:
    """Log-softmax of some logits of each row. [R, ...] float32"""
    top, log_total = (part[(..., *[None] * (logits.ndim - 1))] for part in total)
    return (logits - top) - log_total
