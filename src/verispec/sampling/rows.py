"""What sampling needs to know of each row, as flat arrays: the border between requests and logits.

`SamplingRows` is plain data that a backend can move to its device. Penalties and bias are sparse: one entry per (row,
vocabulary id), computed here from committed tokens plus the path to the row's node, so there is no state to undo.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.types import SamplingParams


class SampleKey(NamedTuple):
    """What keys a row's noise, beside its position: the request's seed and the index among its `n` samples."""

    seed: int
    sample_index: int


class History(NamedTuple):
    """Committed tokens as penalties see them. The caller keeps the counts current; nobody here changes them."""

    prompt_ids: frozenset[int]
    output_counts: Mapping[int, int]
    num_output: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling inputs of R rows. The arrays per row stay on the host; only the sparse edits need the logits' device."""

    seeds: NDArray[np.uint64]  # [R]
    t: NDArray[np.int64]  # [R] absolute index of the token being sampled
    sample_index: NDArray[np.int64]  # [R]
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

    def __len__(self) -> int:
        return len(self.t)


class SamplingRowsBuilder:
    """Collects rows one by one and freezes them into arrays."""

    def __init__(self) -> None:
        self._keys: list[SampleKey] = []
        self._t: list[int] = []
        self._params: list[SamplingParams] = []
        self._penalties: list[tuple[int, int, float, float]] = []
        self._bias: list[tuple[int, int, float]] = []

    def __len__(self) -> int:
        return len(self._t)

    def add(
        self,
        params: SamplingParams,
        key: SampleKey,
        *,
        t: int,
        history: History,
        path_ids: Sequence[int],
        stopping_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        """Add the row that samples token `t` after history and path; `stopping_ids` are banned before min_tokens."""
        row = len(self._t)
        self._keys.append(key)
        self._t.append(t)
        self._params.append(params)
        if params.has_penalties:
            self._penalties += [(row, *entry) for entry in _penalties(params, history, path_ids)]
        bias = {i: b for i, b in params.logit_bias if i < vocab_size}
        if history.num_output + len(path_ids) < params.min_tokens:
            bias |= {i: -math.inf for i in stopping_ids if 0 <= i < vocab_size}
        self._bias += [(row, i, b) for i, b in bias.items()]

    def build(self) -> SamplingRows:
        """Freeze."""
        params = self._params
        penalties = list(zip(*self._penalties, strict=True)) or [(), (), (), ()]
        bias = list(zip(*self._bias, strict=True)) or [(), (), ()]
        return SamplingRows(
            seeds=np.array([k.seed for k in self._keys], np.uint64),
            t=np.array(self._t, np.int64),
            sample_index=np.array([k.sample_index for k in self._keys], np.int64),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int64),
            top_p=np.array([p.top_p for p in params], np.float32),
            log_min_p=np.array([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], np.float32),
            penalty_rows=np.array(penalties[0], np.int64),
            penalty_ids=np.array(penalties[1], np.int64),
            repetition=np.array(penalties[2], np.float32),
            penalty=np.array(penalties[3], np.float32),
            bias_rows=np.array(bias[0], np.int64),
            bias_ids=np.array(bias[1], np.int64),
            bias=np.array(bias[2], np.float32),
        )


def _penalties(params: SamplingParams, history: History, path_ids: Sequence[int]) -> list[tuple[int, float, float]]:
    """(id, repetition factor, amount to subtract) of every id that occurred."""
    path_counts = Counter(path_ids)
    ids = set(history.output_counts) | path_counts.keys()
    if params.repetition_penalty != 1.0:
        ids |= history.prompt_ids
    entries = []
    for token_id in sorted(ids):
        count = history.output_counts.get(token_id, 0) + path_counts[token_id]
        amount = (params.presence_penalty + params.frequency_penalty * count) if count else 0.0
        entries.append((token_id, params.repetition_penalty, amount))
    return entries
