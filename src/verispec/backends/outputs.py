"""From the logits of a pass to exactly what was wanted: one path for every backend on the host.

A backend with kernels of its own gives its own `Logits`; the conformance suite compares them with the shared code's.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import DrawWanted, Float32, Int32, NoisyTopKWanted, Pass, PassResult, StaleHandleError
from verispec.backends.resident import Resident
from verispec.sampling import draw
from verispec.sampling.draw import DrawResult, NoisyTopK, TopKResult
from verispec.sampling.rows import SamplingRows

Int64 = NDArray[np.int64]


class Logits(Protocol):
    """Logits of some rows, and what can be made of those at `at`."""

    values: Float32  # [R, V]

    def draw(self, at: Int64, sampling: SamplingRows) -> DrawResult: ...
    def logprobs(self, at: Int64, token_ids: Int32) -> Float32: ...
    def top_k(self, at: Int64, k: int) -> TopKResult: ...
    def noisy_top_k(self, at: Int64, sampling: SamplingRows, k: int) -> NoisyTopK: ...


class HostLogits:
    """By the shared sampling code."""

    def __init__(self, values: Float32) -> None:
        self.values = values

    def _of(self, at: Int64) -> Float32:
        return self.values if np.array_equal(at, np.arange(len(self.values))) else self.values[at]

    def draw(self, at: Int64, sampling: SamplingRows) -> DrawResult:
        return draw.draw(np, self._of(at), sampling)

    def logprobs(self, at: Int64, token_ids: Int32) -> Float32:
        found: Float32 = draw.logprobs_of(np, self._of(at), token_ids)
        return found

    def top_k(self, at: Int64, k: int) -> TopKResult:
        return draw.top_logprobs(np, self._of(at), k)

    def noisy_top_k(self, at: Int64, sampling: SamplingRows, k: int) -> NoisyTopK:
        return draw.noisy_top_k(np, self._of(at), sampling, k)


class Handle:
    """Distributions of some rows of one pass, made from their logits when they are asked for.

    They are not for what is committed under `match`, so the shared code will do for every backend.
    """

    def __init__(self, logits: Logits, at: Int64, sampling: SamplingRows) -> None:
        self._logits: Logits | None = logits
        self._at, self._sampling = at, _with_own_masks(sampling)

    def probabilities(self) -> Float32:
        """[R, V]"""
        found: Float32 = draw.probabilities(np, self._alive().values[self._at], self._sampling)
        return found

    def logprobs(self, rows: Int64, token_ids: Int64) -> Float32:
        """Of one id at each of these rows, raw."""
        return self._alive().logprobs(self._at[rows], token_ids.astype(np.int32))

    def release(self) -> None:
        self._logits = None

    def _alive(self) -> Logits:
        if self._logits is None:
            raise StaleHandleError("the distribution was released")
        return self._logits


def _with_own_masks(sampling: SamplingRows) -> SamplingRows:
    """The same with a copy of the masks: the table is written again before a handle is read."""
    if sampling.masks is None or sampling.allowed is None:
        return sampling
    allowed = np.concatenate([sampling.allowed[:1], sampling.allowed[sampling.masks]])
    return replace(sampling, masks=np.where(sampling.masks, np.arange(1, len(allowed)), 0), allowed=allowed)


def collect(pass_: Pass, resident: Resident, head_rows: Int32, logits: Logits) -> PassResult:
    """Row i of the logits is that of row `head_rows[i]` of the pass; `head_rows` is ascending."""
    wanted = pass_.wanted
    drawn, given, top, noisy, shown = (
        wanted.draw,
        wanted.logprobs,
        wanted.top_k,
        wanted.noisy_top_k,
        wanted.distribution,
    )

    def at(rows: Int32) -> Int64:
        return np.searchsorted(head_rows, rows)

    def sampling(part: DrawWanted | NoisyTopKWanted) -> SamplingRows:
        return resident.sampling(pass_.rows, part.rows, part.noise)

    return PassResult(
        draw=drawn and logits.draw(at(drawn.rows), sampling(drawn)),
        logprobs=logits.logprobs(at(given.rows), given.token_ids) if given else None,
        top_k=top and logits.top_k(at(top.rows), top.k),
        noisy_top_k=noisy and logits.noisy_top_k(at(noisy.rows), sampling(noisy), noisy.k),
        distribution=shown and Handle(logits, at(shown.rows), resident.sampling(pass_.rows, shown.rows)),
    )
