"""Layers with a window see it and nothing else, and numpy and native agree on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.passes import Tape
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.native_backend import NativeBackend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NativeOptions, NumpyOptions
from verispec.backends.protocol import Backend

WINDOW, NUM_LAYERS = 30, 2
LENGTH = 280  # whole tiles of 128 positions lie before the last window
REACH = NUM_LAYERS * (WINDOW - 1) + 1  # positions that the last row sees through all layers
IDS = np.random.default_rng(3).integers(0, 80, LENGTH).tolist()


def numpy_backend(config: TinyConfig) -> Backend:
    model = LoadedModel(config.architecture, make_tensors(config).__getitem__)
    return NumpyBackend([model], NumpyOptions(num_slots=700, num_seq_rows=4))


def native_backend(config: TinyConfig) -> Backend:
    model = LoadedModel(config.architecture, make_tensors(config).__getitem__)
    return NativeBackend([model], NativeOptions(num_slots=700, num_seq_rows=4, kv_dtype="float32"))


def gemma(*, pattern: int, window: int = WINDOW) -> TinyConfig:
    return TinyConfig(family="gemma3", num_layers=NUM_LAYERS, pattern=pattern, window=window, context_len=300)


def last_row(backend: Backend, token_ids: list[int], *, seq_row: int = 1) -> np.ndarray:
    tape = Tape(backend, seq_row=seq_row, first_slot=300 * (seq_row - 1))
    tape.feed(token_ids[:-1], shape=LENGTH)
    return np.asarray(tape.feed(token_ids[-1:], shape=4)[0])


@pytest.mark.parametrize("make", [numpy_backend, native_backend])
def test_what_lies_before_all_windows_changes_no_bit(make: Callable[[TinyConfig], Backend]) -> None:
    """The controls: the first position that is seen does, and a layer without a window sees everything."""
    windowed, mixed = make(gemma(pattern=NUM_LAYERS + 1)), make(gemma(pattern=2))
    outside, inside = list(IDS), list(IDS)
    outside[: LENGTH - REACH] = [(t + 1) % 80 for t in IDS[: LENGTH - REACH]]
    inside[LENGTH - REACH] = (IDS[LENGTH - REACH] + 1) % 80
    plain = last_row(windowed, IDS)
    assert np.array_equal(last_row(windowed, outside, seq_row=2), plain)
    assert not np.array_equal(last_row(windowed, inside, seq_row=2), plain)
    assert not np.array_equal(last_row(mixed, outside, seq_row=2), last_row(mixed, IDS))


@pytest.mark.parametrize("make", [numpy_backend, native_backend])
def test_a_window_as_long_as_the_context_is_none(make: Callable[[TinyConfig], Backend]) -> None:
    wide, widest = (last_row(make(gemma(pattern=2, window=w)), IDS) for w in (LENGTH, 300))
    assert np.array_equal(wide, widest)
    assert not np.array_equal(last_row(make(gemma(pattern=2, window=LENGTH - 1)), IDS), wide)


def test_native_gives_what_numpy_gives() -> None:
    backends = [make(gemma(pattern=2)) for make in (numpy_backend, native_backend)]
    first, second = (Tape(b, seq_row=1, first_slot=0).feed(IDS, shape=LENGTH) for b in backends)
    assert np.abs(first - second).max() < 1e-4
