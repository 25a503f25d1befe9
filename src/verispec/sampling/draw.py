"""Logit processing and the draw: pure functions of each row's own logits and `SamplingRows`.

Order: repetition penalty, presence and frequency penalties, bias and bans, temperature, min-p, top-k, top-p. The three
filters all keep a prefix of the order by (-logit, id), so they reduce to one count per row. The draw is
argmax(z + gumbel), smallest id on a tie; temperature 0 is plain argmax. Log-probabilities are of the raw logits.

Written against the Python array API, plus assignment through indices. Every reduction runs along the last axis of one
row, so a row's bits do not depend on its neighbours; the audit checks that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from verispec.sampling.noise import Array, gumbel_f32, noise_words, split_seed, vocabulary_words
from verispec.sampling.rows import SamplingRows

NO_TOKEN = -1  # the draw of a row whose logits hold NaN; the engine ends that request
_DENSE_SHARE = 8  # noise is computed for all ids when more than 1/8 of them survive the filters


class Draws(NamedTuple):
    """One token per row and its log-probability under the raw logits."""

    token_ids: Array  # [R] int64, NO_TOKEN where the logits are NaN
    logprobs: Array  # [R] float32


def normalisers(xp: Any, logits: Array) -> Array:
    """log sum exp of each row, float32."""
    top = xp.max(logits, axis=-1)
    total = xp.sum(xp.exp(logits - top[:, None]), axis=-1)
    return top + xp.log(total)


def logprobs_of(xp: Any, logits: Array, token_ids: Array) -> Array:
    """Log-softmax of the raw logits [R, V] at one id per row."""
    rows = xp.arange(logits.shape[0])
    return logits[rows, token_ids] - normalisers(xp, logits)


def top_logprobs(xp: Any, logits: Array, k: int) -> tuple[Array, Array]:
    """The k most likely ids of each row and their log-probabilities, ordered by (-logit, id)."""
    ids = xp.argsort(-logits, axis=-1, stable=True)[:, :k]
    return ids, xp.take_along_axis(logits, ids, axis=-1) - normalisers(xp, logits)[:, None]


def process(xp: Any, logits: Array, rows: SamplingRows) -> Array:
    """Penalties, bias and bans applied; a new array [R, V]. Raw logits are left alone: log-probabilities need them."""
    edited = xp.asarray(logits, copy=True)
    if len(rows.penalty_rows):
        at = (rows.penalty_rows, rows.penalty_ids)
        value = edited[at]
        scaled = xp.where(value > 0, value / rows.repetition, value * rows.repetition)
        edited[at] = scaled - rows.penalty
    if len(rows.bias_rows):
        at = (rows.bias_rows, rows.bias_ids)
        edited[at] = edited[at] + rows.bias
    return edited


def scaled_logits(xp: Any, edited: Array, rows: SamplingRows) -> Array:
    """z = (l - max) / T with filtered ids at -inf: the distribution is softmax(z). At T = 0 only the argmax stays."""
    z = edited - xp.max(edited, axis=-1)[:, None]
    for row in range(len(rows)):
        if rows.temperature[row] == 0:
            first = int(xp.argmax(edited[row]))
            z[row] = -xp.inf
            z[row, first] = 0.0
            continue
        z[row] /= rows.temperature[row]
        if rows.top_k[row] or rows.top_p[row] < 1 or rows.log_min_p[row] > -xp.inf:
            _filter(xp, z[row], int(rows.top_k[row]), float(rows.top_p[row]), float(rows.log_min_p[row]))
    return z


def _filter(xp: Any, z: Array, top_k: int, top_p: float, log_min_p: float) -> None:
    """Set all but the kept prefix of the order (-z, id) to -inf, in place."""
    ordered = -xp.sort(-z)  # most likely first
    keep = max(1, int(xp.sum(ordered >= log_min_p)))  # NaN compares false; such a row gives NO_TOKEN later
    if top_k:
        keep = min(keep, top_k)
    if top_p < 1:
        weights = xp.astype(xp.exp(ordered[:keep]), xp.float64)
        total = xp.cumulative_sum(weights)
        keep = max(1, int(xp.sum(total - weights < top_p * total[-1])))
    threshold = ordered[keep - 1]
    above, tied = z > threshold, z == threshold
    room = keep - int(xp.sum(above))
    z[~(above | (tied & (xp.cumulative_sum(tied) <= room)))] = -xp.inf


def noisy_logits(xp: Any, z: Array, rows: SamplingRows) -> Array:
    """z + gumbel(seed, t, id) where z is finite; T = 0 rows stay as they are. A new array [R, V]."""
    noisy = xp.asarray(z, copy=True)
    vocab_size = z.shape[-1]
    for row in range(len(rows)):
        if rows.temperature[row] == 0:
            continue
        seed, t, sample_index = int(rows.seeds[row]), int(rows.t[row]), int(rows.sample_index[row])
        stream = int(rows.stream[row])
        (ids,) = xp.nonzero(z[row] > -xp.inf)
        if len(ids) * _DENSE_SHARE > vocab_size:
            words = vocabulary_words(xp, vocab_size, seed=seed, t=t, sample_index=sample_index, stream=stream)
            noisy[row] += gumbel_f32(xp, words)
        else:
            low, high = split_seed(seed)
            words = noise_words(ids, seed_low=low, seed_high=high, t=t, sample_index=sample_index, stream=stream)
            noisy[row, ids] = noisy[row, ids] + gumbel_f32(xp, words)
    return noisy


def draw(xp: Any, logits: Array, rows: SamplingRows) -> Draws:
    """Sample one token per row. A row with NaN, or with nothing finite to choose from, gives NO_TOKEN.

    argmax gives the first of equal maxima (the array API says so): the smallest id wins a tie.
    """
    edited = process(xp, logits, rows)
    noisy = noisy_logits(xp, scaled_logits(xp, edited, rows), rows)
    usable = xp.isfinite(xp.max(noisy, axis=-1)) & xp.isfinite(xp.max(edited, axis=-1))
    chosen = xp.where(usable, xp.argmax(noisy, axis=-1), 0)
    return Draws(xp.where(usable, chosen, NO_TOKEN), logprobs_of(xp, logits, chosen))


class NoisyTopK(NamedTuple):
    """The k largest of log p + gumbel, best first: k draws without replacement.

    NO_TOKEN where a filter leaves fewer than k.
    """

    token_ids: Array  # [R, k]
    values: Array  # [R, k] log p + gumbel
    logprobs: Array  # [R, k] log p, p after all processing


def noisy_top_k(xp: Any, logits: Array, rows: SamplingRows, k: int) -> NoisyTopK:
    """What a drafter offers as children of each row. At T = 0 the k best processed logits, without filters or noise."""
    edited = process(xp, logits, rows)
    z = scaled_logits(xp, edited, rows)
    for row in range(len(rows)):
        if rows.temperature[row] == 0:
            z[row] = edited[row]
    noisy = noisy_logits(xp, z, rows)
    ids = xp.argsort(-noisy, axis=-1, stable=True)[:, :k]
    values = xp.take_along_axis(noisy, ids, axis=-1)
    total = normalisers(xp, z)[:, None]
    logprobs = xp.take_along_axis(z, ids, axis=-1) - total
    return NoisyTopK(xp.where(xp.isfinite(values), ids, NO_TOKEN), values - total, logprobs)


def probabilities(xp: Any, logits: Array, rows: SamplingRows) -> Array:
    """The distribution each row samples from, after all processing. [R, V] float32"""
    weights = xp.exp(scaled_logits(xp, process(xp, logits, rows), rows))
    return weights / xp.sum(weights, axis=-1)[:, None]
