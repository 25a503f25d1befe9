"""From the logits of a pass to exactly what was wanted, by the shared sampling code: one path for every backend.

A backend with fused kernels may bypass this; the conformance suite then compares it with this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verispec.backends.protocol import (
    DrawResult,
    DrawWanted,
    NoisyTopKResult,
    NoisyTopKWanted,
    Pass,
    PassResult,
    StaleHandleError,
    TopKResult,
)
from verispec.backends.resident import Resident
from verispec.sampling import draw
from verispec.sampling.maths import Array
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import Totals, logprobs, totals


class Handle:
    """Distributions of some rows of one pass, made from their logits when they are asked for.

    `total` is given where a backend's own kernels have computed it.
    """

    def __init__(self, xp: Any, logits: Array, sampling: SamplingRows, total: Totals | None = None) -> None:
        self._xp = xp
        self._logits: Array | None = logits
        self._sampling = sampling
        self._total = total

    def probabilities(self) -> Array:
        """[R, V]"""
        return draw.probabilities(self._xp, self._alive(), self._sampling)

    def logprobs(self, rows: Array, token_ids: Array) -> Array:
        """Of one id at each of these rows, raw."""
        logits = self._alive()
        if self._total is None:
            self._total = totals(self._xp, logits)
        return logprobs(logits[rows, token_ids], Totals(*(part[rows] for part in self._total)))

    def release(self) -> None:
        """Drop the logits."""
        self._logits = None

    def _alive(self) -> Array:
        if self._logits is None:
            raise StaleHandleError("the distribution was released")
        return self._logits


class Outputs:
    """Computes results in array namespace `xp`."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def collect(self, pass_: Pass, resident: Resident, head_rows: Any, logits: Array) -> PassResult:
        """`logits[i]` are those of row `head_rows[i]` of the pass; `head_rows` is ascending."""
        wanted, rows = pass_.wanted, pass_.rows

        def at(chosen: Any) -> Array:
            return logits if len(chosen) == len(head_rows) and (chosen == head_rows).all() else logits[
                np.searchsorted(head_rows, chosen)
            ]  # fmt: skip

        def sampling(part: DrawWanted | NoisyTopKWanted) -> SamplingRows:
            return resident.sampling(rows, part.rows, part.noise)

        xp = self._xp
        return PassResult(
            draw=DrawResult(*draw.draw(xp, at(wanted.draw.rows), sampling(wanted.draw))) if wanted.draw else None,
            logprobs=draw.logprobs_of(xp, at(wanted.logprobs.rows), wanted.logprobs.token_ids)
            if wanted.logprobs
            else None,
            top_k=TopKResult(*draw.top_logprobs(xp, at(wanted.top_k.rows), wanted.top_k.k)) if wanted.top_k else None,
            noisy_top_k=NoisyTopKResult(
                *draw.noisy_top_k(xp, at(wanted.noisy_top_k.rows), sampling(wanted.noisy_top_k), wanted.noisy_top_k.k)
            )
            if wanted.noisy_top_k
            else None,
            distribution=Handle(xp, at(wanted.distribution.rows), resident.sampling(rows, wanted.distribution.rows))
            if wanted.distribution
            else None,
        )
