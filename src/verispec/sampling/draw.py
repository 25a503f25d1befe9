"""Logit processing and the draw: pure functions of each row's own logits and `SamplingRows`.

Order: repetition penalty, presence and frequency penalties, bias and bans, masks, temperature, min-p, top-k, top-p. The
three filters all keep a prefix of the order by (-logit, id), so they reduce to one count per row. The draw is
argmax(z + gumbel), smallest id on a tie; temperature 0 is plain argmax. Log-probabilities are of the raw logits. What
is added up over the vocabulary is integers (`weights.py`), so a row's bits depend on nothing but the row.

Written against the Python array API, plus assignment through indices.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.maths import Array, exp_f32
from verispec.sampling.noise import gumbel_f32, noise_words, split_seeds, vocabulary_words
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import WEIGHT_BITS, below_top, log_total, logprobs, totals, weights

NO_TOKEN = -1  # the draw of a row whose logits hold NaN; the engine ends that request
_DENSE_SHARE = 8  # noise is computed for all ids when more than 1/8 of them survive the filters
_NOISE_BLOCK = 2**20  # values of noise made at once: rows are taken in groups of about that size


class DrawResult(NamedTuple):
    """One token per row and its log-probability under the raw logits."""

    token_ids: Array  # [R] int64, NO_TOKEN where there is nothing to draw
    logprobs: Array  # [R] float32, NaN there


class TopKResult(NamedTuple):
    """The k most likely ids of each row and their raw log-probabilities, ordered by (-logit, id)."""

    token_ids: Array  # [R, k]
    values: Array  # [R, k]


class NoisyTopK(NamedTuple):
    """The k largest of log p + gumbel, best first: k draws without replacement; at T = 0 without noise.

    NO_TOKEN where a filter leaves fewer than k.
    """

    token_ids: Array  # [R, k]
    values: Array  # [R, k] log p + gumbel
    logprobs: Array  # [R, k] log p, p after all processing


def logprobs_of(xp: Any, logits: Array, token_ids: Array) -> Array:
    """Log-softmax of the raw logits [R, V] at one id per row."""
    return logprobs(logits[xp.arange(logits.shape[0]), token_ids], totals(xp, logits))


def top_logprobs(xp: Any, logits: Array, k: int) -> TopKResult:
    ids = xp.argsort(-logits, axis=-1, stable=True)[:, :k]
    return TopKResult(ids, logprobs(xp.take_along_axis(logits, ids, axis=-1), totals(xp, logits)))


def process(xp: Any, logits: Array, rows: SamplingRows) -> Array:
    """Penalties, bias, bans and masks applied; a new array [R, V]. The raw logits stay: log-probabilities need them."""
    edited = xp.asarray(logits, copy=True)
    if len(rows.penalty_rows):
        at = (rows.penalty_rows, rows.penalty_ids)
        value = edited[at]
        scaled = xp.where(value > 0, value / rows.repetition, value * rows.repetition)
        edited[at] = scaled - rows.penalty
    if len(rows.bias_rows):
        at = (rows.bias_rows, rows.bias_ids)
        edited[at] = edited[at] + rows.bias
    if rows.masks is not None and rows.allowed is not None and len(masked := np.flatnonzero(rows.masks)):
        bits = rows.allowed[rows.masks[masked]].view(np.uint8)
        allowed = np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little").astype(np.bool_)
        part = edited[masked]
        banned = xp.where(part < xp.inf, xp.full_like(part, -xp.inf), xp.nan)  # a mask makes no row usable
        edited[masked] = xp.where(xp.asarray(allowed, device=part.device), part, banned)
    return edited


def scaled_logits(xp: Any, edited: Array, rows: SamplingRows) -> Array:
    """z = (l - max) / T with filtered ids at -inf: the distribution is softmax(z). At T = 0 only the argmax stays."""
    z = below_top(xp, edited)
    greedy = rows.temperature == 0
    z = z / _column(xp, np.where(greedy, np.float32(1), rows.temperature), z)
    if greedy.any():
        first = xp.argmax(edited, axis=-1)[:, None]
        ids = xp.arange(z.shape[-1], device=z.device)
        z = xp.where(_column(xp, greedy, z) & (ids != first), -xp.inf, z)
    filtering = np.flatnonzero(rows.filters & ~greedy)
    if len(filtering):
        z[filtering] = _filtered(xp, z[filtering], rows.top_k[filtering], rows.top_p[filtering],
                                 rows.log_min_p[filtering])  # fmt: skip
    return z


def _filtered(xp: Any, z: Array, top_k: Array, top_p: Array, log_min_p: Array) -> Array:
    """z with all but the kept prefix of the order (-z, id) at -inf. Filters that are off keep all. [R, V]"""
    top_k, top_p, log_min_p = (_column(xp, part, z) for part in (top_k, top_p, log_min_p))
    ordered = -xp.sort(-z, axis=-1)  # most likely first
    keep = _count(xp, ordered >= log_min_p)  # [R, 1]
    keep = xp.where(top_k > 0, xp.minimum(keep, top_k), keep)
    keep = xp.maximum(keep, xp.ones_like(keep))
    if (top_p < 1).any():
        ranks = xp.arange(z.shape[-1], device=z.device)
        reached = xp.cumulative_sum(xp.where(ranks < keep, weights(xp, ordered), 0), axis=-1)  # exact
        share = xp.astype(top_p, xp.float64) * xp.astype(reached[:, -1:], xp.float64)
        missed = _count(xp, reached < xp.astype(xp.ceil(share), xp.int64))  # prefixes that fall short of it
        keep = xp.where(top_p < 1, xp.minimum(keep, missed + 1), keep)
    threshold = xp.take_along_axis(ordered, keep - 1, axis=-1)
    above, tied = z > threshold, z == threshold
    room = keep - _count(xp, above)
    return xp.where(above | (tied & (xp.cumulative_sum(tied, axis=-1, dtype=xp.int64) <= room)), z, -xp.inf)


def _count(xp: Any, is_so: Array) -> Array:
    return xp.sum(is_so, axis=-1, keepdims=True, dtype=xp.int64)


def _column(xp: Any, per_row: NDArray[Any], like: Array) -> Array:
    """An array of the host, one entry per row, beside an array [R, V] of the device."""
    return xp.asarray(per_row, device=like.device)[:, None]


def noisy_logits(xp: Any, z: Array, rows: SamplingRows) -> Array:
    """z + gumbel(seed, t, id) where z is finite; T = 0 rows stay as they are. A new array [R, V]."""
    noisy = xp.asarray(z, copy=True)
    vocab_size = z.shape[-1]
    sampled = np.flatnonzero(rows.temperature > 0)
    if not len(sampled):
        return noisy
    num_kept = np.asarray(_count(xp, z > -xp.inf))[:, 0]
    is_dense = num_kept[sampled] * _DENSE_SHARE > vocab_size
    dense, sparse = sampled[is_dense], sampled[~is_dense]
    step = max(1, _NOISE_BLOCK // vocab_size)
    for part in (dense[i : i + step] for i in range(0, len(dense), step)):
        keys = {name: _column(xp, key, z) for name, key in _keys(rows, part).items()}
        noisy[part] += gumbel_f32(xp, vocabulary_words(xp, vocab_size, **keys, device=z.device))
    if len(sparse):
        at, ids = xp.nonzero(z[sparse] > -xp.inf)
        keys = {name: xp.asarray(key, device=z.device)[at] for name, key in _keys(rows, sparse).items()}
        at = xp.asarray(sparse, device=z.device)[at]
        noisy[at, ids] += gumbel_f32(xp, noise_words(ids, **keys))
    return noisy


def _keys(rows: SamplingRows, at: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    low, high = split_seeds(rows.seeds[at])
    return {
        "seed_low": low,
        "seed_high": high,
        "t": rows.t[at],
        "sample_index": rows.sample_index[at],
        "stream": rows.stream[at],
    }


def draw(xp: Any, logits: Array, rows: SamplingRows) -> DrawResult:
    """Sample one token per row. A row with NaN, or with nothing finite to choose from, gives NO_TOKEN.

    argmax gives the first of equal maxima (the array API says so): the smallest id wins a tie.
    """
    edited = process(xp, logits, rows)
    noisy = noisy_logits(xp, scaled_logits(xp, edited, rows), rows)
    usable = xp.isfinite(xp.max(edited, axis=-1))
    chosen = xp.argmax(noisy, axis=-1)
    return DrawResult(xp.where(usable, chosen, NO_TOKEN), xp.where(usable, logprobs_of(xp, logits, chosen), xp.nan))


def noisy_top_k(xp: Any, logits: Array, rows: SamplingRows, k: int) -> NoisyTopK:
    """What a drafter offers as children of each row. At T = 0 the k best processed logits, without filters or noise."""
    edited = process(xp, logits, rows)
    greedy = _column(xp, rows.temperature == 0, logits)
    z = xp.where(greedy, below_top(xp, edited), scaled_logits(xp, edited, rows))
    noisy = noisy_logits(xp, z, rows)
    # By the logits themselves at T = 0: the difference from the largest may round two of them to one value.
    ids = xp.argsort(-xp.where(greedy, edited, noisy), axis=-1, stable=True)[:, :k]
    total = log_total(xp, z)[:, None]
    values, scaled = (xp.take_along_axis(part, ids, axis=-1) for part in (noisy, z))
    exists = xp.isfinite(values)
    return NoisyTopK(*(xp.where(exists, part, none) for part, none in (
        (ids, NO_TOKEN), (values - total, -xp.inf), (scaled - total, -xp.inf)
    )))  # fmt: skip


def probabilities(xp: Any, logits: Array, rows: SamplingRows) -> Array:
    """The distribution each row samples from, after all processing; NaN throughout an unusable row. [R, V] float32

    exp(z) is not rounded to a weight here: after a rejection only the tail is left, and must be what was drawn from.
    """
    z = scaled_logits(xp, process(xp, logits, rows), rows)
    total = xp.sum(weights(xp, z), axis=-1)[:, None]
    share = exp_f32(xp, z) / (xp.astype(xp.where(total > 0, total, 1), xp.float32) * 2.0**-WEIGHT_BITS)
    return xp.where(total > 0, share, xp.nan)
