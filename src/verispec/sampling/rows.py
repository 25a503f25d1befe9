"""What sampling needs to know of each row, as flat arrays: the border between requests and logits.

A `Sampler` is told once per sequence; a backend makes `SamplingRows` of it for the rows of a pass. Penalties and bias
are sparse: one entry per (row, vocabulary id).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.maths import log_f32
from verispec.types import SamplingParams


class SampleKey(NamedTuple):
    """What keys a row's noise, beside its position: the request's seed and the index among its `n` samples."""

    seed: int
    sample_index: int


class Sampler(NamedTuple):
    """How a sequence samples and where it stops, for as long as it runs; `limit` is its most tokens, prompt too."""

    params: SamplingParams
    key: SampleKey
    prompt_len: int = 0
    limit: int = 1 << 31
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling inputs of R rows. The arrays per row stay on the host; only the sparse edits need the logits' device."""

    seeds: NDArray[np.uint64]  # [R]
    t: NDArray[np.int64]  # [R] absolute index of the token being sampled
    sample_index: NDArray[np.int64]  # [R]
    stream: NDArray[np.int64]  # [R] the counter's last word: 0 is token noise, others are a drafter's own
    temperature: NDArray[np.float32]  # [R]
    top_k: NDArray[np.int64]  # [R], 0 is off
    top_p: NDArray[np.float32]  # [R], 1 is off
    log_min_p: NDArray[np.float32]  # [R], -inf is off
    penalty_rows: NDArray[np.int64]  # [P]
    penalty_ids: NDArray[np.int64]  # [P]
    repetition: NDArray[np.float32]  # [P] divisor of positive logits, factor of negative ones
    penalty: NDArray[np.float32]  # [P] presence and frequency, to subtract
    bias_rows: NDArray[np.int64]  # [B]
    bias_ids: NDArray[np.int64]  # [B]
    bias: NDArray[np.float32]  # [B] to add; -inf bans
    masks: NDArray[np.int64] | None = None  # [R] row of `allowed` that says what may be drawn; 0, or None: every token
    allowed: NDArray[np.uint32] | None = None  # [masks, words] bit i % 32 of word i // 32 allows token i

    def __len__(self) -> int:
        return len(self.t)

    @property
    def filters(self) -> NDArray[np.bool_]:
        """Which rows have min-p, top-k or top-p on. [R]"""
        return (self.top_k > 0) | (self.top_p < 1) | (self.log_min_p > -np.inf)


_NO_IDS, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0, np.float32)
NO_EDITS: dict[str, NDArray[Any]] = {
    **dict.fromkeys(("penalty_rows", "penalty_ids", "bias_rows", "bias_ids"), _NO_IDS),
    **dict.fromkeys(("repetition", "penalty", "bias"), _NO_VALUES),
}  # fields of SamplingRows


def plain_rows(params: SamplingParams, key: SampleKey, t: Sequence[int]) -> SamplingRows:
    """Rows of one request that draw the tokens `t`, without penalties, bias or a least length: for probes."""
    count = len(t)
    return SamplingRows(
        seeds=np.full(count, key.seed, np.uint64),
        t=np.array(t, np.int64),
        sample_index=np.full(count, key.sample_index, np.int64),
        stream=np.zeros(count, np.int64),
        temperature=np.full(count, params.temperature, np.float32),
        top_k=np.full(count, params.top_k, np.int64),
        top_p=np.full(count, params.top_p, np.float32),
        log_min_p=log_or_off(np.full(count, params.min_p, np.float32)),
        **NO_EDITS,
    )


def log_or_off(min_p: NDArray[np.float32]) -> NDArray[np.float32]:
    """-inf for 0; what is subnormal counts as the smallest normal number: nothing so unlikely is ever drawn."""
    found = log_f32(np, np.maximum(min_p, np.finfo(np.float32).tiny))
    return np.where(min_p > 0, found, np.float32(-np.inf))
