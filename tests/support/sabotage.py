"""Backends that break the promise on purpose: results of the real ones, changed by what they must not depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from verispec.backends.native_backend import NativeBackend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.protocol import (
    PADDING_SEQ_ROW,
    Backend,
    BurstResult,
    DrawResult,
    DrawWanted,
    Pass,
    PassKind,
    PassResult,
    ReadyTicket,
    Wanted,
)

Submit = Callable[..., ReadyTicket]
Spoil = Callable[[Pass, DrawResult], DrawResult]


def num_sequences(pass_: Pass) -> int:
    """Sequences that have rows in the pass."""
    return len(set(pass_.rows.seq_rows.tolist()) - {PADDING_SEQ_ROW})


def by_index(pass_: Pass, drawn: DrawResult) -> DrawResult:
    """The last bit of every row but the first is another."""
    assert pass_.wanted.draw is not None
    other = np.nextafter(drawn.logprobs, np.float32(0))
    return DrawResult(drawn.token_ids, np.where(pass_.wanted.draw.rows > 0, other, drawn.logprobs))


def by_neighbours(pass_: Pass, drawn: DrawResult) -> DrawResult:
    """The last bit of every row tells whether its sequence has company."""
    other = np.nextafter(drawn.logprobs, np.float32(0))
    return DrawResult(drawn.token_ids, other if num_sequences(pass_) > 1 else drawn.logprobs)


def shifted_by_neighbours(pass_: Pass, drawn: DrawResult) -> DrawResult:
    """Log-probabilities that tell how many sequences there are."""
    return DrawResult(drawn.token_ids, drawn.logprobs - np.float32(num_sequences(pass_)))


def other_tokens(pass_: Pass, drawn: DrawResult) -> DrawResult:
    """Other tokens as soon as there are several sequences."""
    return DrawResult(np.abs(drawn.token_ids - (num_sequences(pass_) > 1)), drawn.logprobs)


def indifferent(pass_: Pass, drawn: DrawResult) -> DrawResult:
    """The same log-probability for everything."""
    return DrawResult(drawn.token_ids, np.full_like(drawn.logprobs, -1.0))


def _spoilt(pass_: Pass, result: PassResult, spoil: Spoil) -> BurstResult | None:
    """Further rounds, each as if a pass of its rows had drawn it; what idled still does."""
    burst, found = pass_.burst, result.burst
    if burst is None or found is None or not burst.num_rounds:
        return found
    again = replace(pass_, wanted=Wanted(draw=DrawWanted(np.arange(len(burst.rows), dtype=np.int32))))
    rounds = [spoil(again, DrawResult(*drawn)) for drawn in zip(found.token_ids.T, found.logprobs.T, strict=True)]
    tokens, logprobs = (np.stack(parts, axis=1) for parts in zip(*rounds, strict=True))
    idle = found.token_ids < 0
    return found._replace(
        token_ids=np.where(idle, found.token_ids, tokens), logprobs=np.where(idle, found.logprobs, logprobs)
    )


def sabotage(monkeypatch: pytest.MonkeyPatch, kind: PassKind, spoil: Spoil) -> None:
    """Spoil what passes of one kind draw, until the test is over."""
    for backend in (NumpyBackend, NativeBackend):

        def spoilt(self: Backend, pass_: Pass, submit: Submit = backend.submit) -> ReadyTicket:
            result = submit(self, pass_).result()
            if pass_.kind is not kind or result.draw is None:
                return ReadyTicket(result)
            return ReadyTicket(replace(result, draw=spoil(pass_, result.draw), burst=_spoilt(pass_, result, spoil)))

        monkeypatch.setattr(backend, "submit", spoilt)
