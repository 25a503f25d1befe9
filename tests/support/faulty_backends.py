"""Backends whose fast passes are wrong on purpose, so that replays find mismatches. Canonical passes are untouched.

Real devices round differently in other shapes; `Bf16FastPasses` does so on the numpy backend. `FaultyFastPasses` wraps
any backend and redraws tokens by a rule: at a rate, or at chosen positions. `AgreeingFastPasses` is the opposite: its
fast passes give the bits of canonical ones, so that every mismatch is one that a rule made.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.backends.checks import check_pass
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.numpy_model import Layer, NumpyModel
from verispec.backends.protocol import Backend, BackendLimits, Pass, PassKind, PassResult, ReadyTicket, Ticket
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.sampling.rows import Sampler

Float32 = NDArray[np.float32]
Redraw = Callable[[int, int, int], int]  # absolute index t, row of the slot table, token drawn -> token given


class WrappedBackend:
    """Hands everything on to `inner`, round by round: `run` is what a test changes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def limits(self) -> BackendLimits:
        return self.inner.limits

    @property
    def shapes(self) -> tuple[int, ...]:
        return self.inner.shapes

    @property
    def weights_version(self) -> int:
        return self.inner.weights_version

    @property
    def resident(self) -> Resident:
        return self.inner.resident

    def device(self) -> dict[str, str]:
        return self.inner.device()

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        self.inner.bind(seq_row, sampler)

    def set_masks(self, first: int, allowed: np.ndarray) -> None:
        self.inner.set_masks(first, allowed)

    def submit(self, pass_: Pass) -> Ticket:
        check_pass(pass_, self.limits)
        with np.errstate(all="ignore"):
            return ReadyTicket(run_rounds(self.resident, pass_, self.run))

    def run(self, pass_: Pass) -> PassResult:
        return self.inner.run(pass_)

    def fingerprint(self) -> dict[str, str]:
        return self.inner.fingerprint()

    def wrong_answers(self) -> tuple[str, ...] | None:
        return self.inner.wrong_answers()

    def probes(self) -> list[KernelProbe]:
        return self.inner.probes()

    def close(self) -> None:
        self.inner.close()


class AgreeingFastPasses(WrappedBackend):
    """Fast passes run as if they were canonical: on a backend that is pure in every shape they agree to the bit."""

    def run(self, pass_: Pass) -> PassResult:
        return self.inner.run(replace(pass_, kind=PassKind.CANONICAL))


class Bf16FastPasses(WrappedBackend):
    """Fast passes keep their activations in bf16: the embedding, q, k and v, what attention and the MLP give."""

    inner: NumpyBackend

    def __init__(self, inner: NumpyBackend) -> None:
        super().__init__(inner)
        self._rounded = [_RoundedModel(model) for model in inner._models]

    def run(self, pass_: Pass) -> PassResult:
        if pass_.kind is not PassKind.FAST:
            return self.inner.run(pass_)
        exact, self.inner._models = self.inner._models, self._rounded  # type: ignore[assignment]
        try:
            return self.inner.run(pass_)
        finally:
            self.inner._models = exact


def bf16(x: Float32) -> Float32:
    """The nearest bf16 values, ties to even; NaN and Inf as they are."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


class _RoundedModel:
    """What a forward asks of a NumpyModel, rounded."""

    def __init__(self, model: NumpyModel) -> None:
        self._model = model
        self.layers = model.layers
        self.embed = _rounded(model.embed)
        self.logits = model.logits

    def qkv(self, layer: Layer, x: Float32, positions: NDArray[np.int32]) -> tuple[Float32, ...]:
        return tuple(map(bf16, self._model.qkv(layer, x, positions)))

    def attention_output(self, layer: Layer, attended: Float32) -> Float32:
        return bf16(self._model.attention_output(layer, bf16(attended)))

    def mlp(self, layer: Layer, x: Float32) -> Float32:
        return bf16(self._model.mlp(layer, x))


def _rounded(kernel: Callable[..., Float32]) -> Callable[..., Float32]:
    return lambda x: bf16(kernel(bf16(x) if x.dtype == np.float32 else x))


class FaultyFastPasses(WrappedBackend):
    """Every token that a fast pass draws goes through `redraw`."""

    def __init__(self, inner: Backend, redraw: Redraw) -> None:
        super().__init__(inner)
        self._redraw = redraw

    def run(self, pass_: Pass) -> PassResult:
        result, wanted = self.inner.run(pass_), pass_.wanted.draw
        if pass_.kind is not PassKind.FAST or wanted is None or result.draw is None:
            return result
        seq_rows, positions = (a[wanted.rows].tolist() for a in (pass_.rows.seq_rows, pass_.rows.positions))
        drawn = zip([p + 1 for p in positions], seq_rows, result.draw.token_ids.tolist(), strict=True)
        token_ids = np.array([self._redraw(*row) if row[2] >= 0 else row[2] for row in drawn], np.int64)
        return replace(result, draw=result.draw._replace(token_ids=token_ids))


class AtRate:
    """Another token with chance `rate`: a pure function of the seed, the position and the sequence's row."""

    def __init__(self, rate: float, *, vocab_size: int, seed: int = 0) -> None:
        self._rate = rate
        self._vocab_size = vocab_size
        self._seed = seed
        self.num_faults = 0

    def __call__(self, t: int, seq_row: int, token_id: int) -> int:
        digest = hashlib.blake2b(struct.pack("<3q", self._seed, t, seq_row), digest_size=16).digest()
        chance, step = struct.unpack("<2Q", digest)
        if chance >= self._rate * 2**64:
            return token_id
        self.num_faults += 1
        return (token_id + 1 + step % (self._vocab_size - 1)) % self._vocab_size


class AtPositions:
    """Another token at these absolute positions, the next so many times or (None) always; `token_id` if one is named.

    `made` counts the faults by position; a draw that gave `token_id` anyway is none.
    """

    def __init__(self, times: Mapping[int, int | None], *, vocab_size: int, token_id: int | None = None) -> None:
        self._left = dict(times)
        self._vocab_size = vocab_size
        self._token_id = token_id
        self.made: Counter[int] = Counter()

    def __call__(self, t: int, seq_row: int, token_id: int) -> int:
        left = self._left.get(t, 0)
        if left == 0:
            return token_id
        if left is not None:
            self._left[t] = left - 1
        given = (token_id + 1) % self._vocab_size if self._token_id is None else self._token_id
        self.made[t] += given != token_id
        return given
