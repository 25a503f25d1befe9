"""From the logits of a pass to exactly what was wanted, by the shared sampling code: one path for every backend.

A backend with fused kernels may bypass this; the conformance suite then compares it with this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verispec.backends.protocol import (
    DistributionHandle,
    DrawResult,
    PassResult,
    StaleHandleError,
    TopKResult,
    Wanted,
)
from verispec.sampling import draw
from verispec.sampling.noise import Array


class Handle:
    """Distributions of one pass, until the next one."""

    def __init__(self, probabilities: Array) -> None:
        self._probabilities: Array | None = probabilities

    def probabilities(self) -> Array:
        if self._probabilities is None:
            raise StaleHandleError("a distribution lives until the next pass")
        return self._probabilities

    def expire(self) -> None:
        self._probabilities = None


class Outputs:
    """Computes results in array namespace `xp` and remembers which handle is alive."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._handle: Handle | None = None

    def collect(self, wanted: Wanted, head_rows: Any, logits: Array) -> PassResult:
        """`logits[i]` are those of row `head_rows[i]` of the pass; `head_rows` is ascending."""
        if self._handle is not None:
            self._handle.expire()
            self._handle = None

        def at(rows: Any) -> Array:
            return logits if len(rows) == len(head_rows) and (rows == head_rows).all() else logits[
                np.searchsorted(head_rows, rows)
            ]  # fmt: skip

        xp = self._xp
        return PassResult(
            draw=DrawResult(*draw.draw(xp, at(wanted.draw.rows), wanted.draw.sampling)) if wanted.draw else None,
            logprobs=draw.logprobs_of(xp, at(wanted.logprobs.rows), wanted.logprobs.token_ids)
            if wanted.logprobs
            else None,
            top_k=TopKResult(*draw.top_logprobs(xp, at(wanted.top_k.rows), wanted.top_k.k)) if wanted.top_k else None,
            noisy_top_k=TopKResult(
                *draw.noisy_top_k(xp, at(wanted.noisy_top_k.rows), wanted.noisy_top_k.sampling, wanted.noisy_top_k.k)
            )
            if wanted.noisy_top_k
            else None,
            distribution=self._distribution(wanted, at),
        )

    def _distribution(self, wanted: Wanted, at: Any) -> DistributionHandle | None:
        if wanted.distribution is None:
            return None
        rows, sampling = wanted.distribution
        self._handle = Handle(draw.probabilities(self._xp, at(rows), sampling))
        return self._handle
