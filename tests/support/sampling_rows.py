"""Sampling inputs row by row, from a history kept by hand: what `Resident` makes of its tables must equal this."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.rows import SampleKey, SamplingRows, log_or_off
from verispec.types import SamplingParams


class History(NamedTuple):
    """Committed tokens as penalties see them. The caller keeps the counts current; nobody here changes them."""

    prompt_ids: frozenset[int]
    output_counts: Mapping[int, int]
    num_output: int


class _RowPenalties(NamedTuple):
    """Penalties of one row: ids that occurred, the factor for all of them, the amount for each."""

    row: int
    ids: NDArray[np.int64]
    repetition: float
    amounts: NDArray[np.float64]


class SamplingRowsBuilder:
    """Collects rows one by one and freezes them into arrays."""

    def __init__(self) -> None:
        self._keys: list[SampleKey] = []
        self._t: list[int] = []
        self._streams: list[int] = []
        self._params: list[SamplingParams] = []
        self._penalties: list[_RowPenalties] = []
        self._histories: dict[
            int, tuple[History, _Occurred]
        ] = {}  # by the counts' identity: once per sequence and pass
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
        stream: int = 0,
    ) -> None:
        """Add the row that samples token `t` after history and path; `stopping_ids` are banned before min_tokens.

        `stream` other than 0 gives noise of its own (`noise.stream`), with `t` as whatever tells its rounds apart.
        """
        row = len(self._t)
        self._keys.append(key)
        self._t.append(t)
        self._streams.append(stream)
        self._params.append(params)
        if params.has_penalties:
            self._penalties.append(self._row_penalties(row, params, history, path_ids))
        bias = {i: b for i, b in params.logit_bias if i < vocab_size}
        if history.num_output + len(path_ids) < params.min_tokens:
            bias |= {i: -math.inf for i in stopping_ids if 0 <= i < vocab_size}
        self._bias += [(row, i, b) for i, b in bias.items()]

    def _row_penalties(
        self, row: int, params: SamplingParams, history: History, path_ids: Sequence[int]
    ) -> _RowPenalties:
        key = id(history.output_counts)
        if key not in self._histories:
            self._histories[key] = history, _occurred(params, history)
        occurred = _with_path(self._histories[key][1], path_ids)
        amounts = np.where(
            occurred.counts > 0, params.presence_penalty + params.frequency_penalty * occurred.counts, 0.0
        )
        return _RowPenalties(row, occurred.ids, params.repetition_penalty, amounts)

    def build(self) -> SamplingRows:
        """Freeze."""
        params = self._params
        penalties = self._penalties or [_RowPenalties(0, np.zeros(0, np.int64), 1.0, np.zeros(0))]
        lengths = [len(p.ids) for p in penalties]
        bias = list(zip(*self._bias, strict=True)) or [(), (), ()]
        return SamplingRows(
            seeds=np.array([k.seed for k in self._keys], np.uint64),
            t=np.array(self._t, np.int64),
            sample_index=np.array([k.sample_index for k in self._keys], np.int64),
            stream=np.array(self._streams, np.int64),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int64),
            top_p=np.array([p.top_p for p in params], np.float32),
            log_min_p=log_or_off(np.array([p.min_p for p in params], np.float32)),
            penalty_rows=np.repeat(np.array([p.row for p in penalties], np.int64), lengths),
            penalty_ids=np.concatenate([p.ids for p in penalties]),
            repetition=np.repeat(np.array([p.repetition for p in penalties], np.float32), lengths),
            penalty=np.concatenate([p.amounts for p in penalties]).astype(np.float32),
            bias_rows=np.array(bias[0], np.int64),
            bias_ids=np.array(bias[1], np.int64),
            bias=np.array(bias[2], np.float32),
        )


class _Occurred(NamedTuple):
    """Ids that occurred, ascending, and how often in the output."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]


def _occurred(params: SamplingParams, history: History) -> _Occurred:
    ids = set(history.output_counts)
    if params.repetition_penalty != 1.0:
        ids |= history.prompt_ids
    ordered = sorted(ids)
    counts = [history.output_counts.get(token_id, 0) for token_id in ordered]
    return _Occurred(np.array(ordered, np.int64), np.array(counts, np.int64))


def _with_path(base: _Occurred, path_ids: Sequence[int]) -> _Occurred:
    """The same after the path's tokens as well."""
    if not path_ids:
        return base
    path = np.array(path_ids, np.int64)
    ids = np.union1d(base.ids, path)
    counts = np.zeros(len(ids), np.int64)
    counts[np.searchsorted(ids, base.ids)] = base.counts
    np.add.at(counts, np.searchsorted(ids, path), 1)
    return _Occurred(ids, counts)
