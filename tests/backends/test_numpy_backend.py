"""What is particular to the numpy backend: NaN stays with its row, skipped layers write nothing, tiles are in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.passes import NO_UPDATE, RowsBuilder, Tape, bind, run, run_logprobs
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends import numpy_attention
from verispec.backends.audit import audit
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NumpyOptions
from verispec.backends.protocol import DrawWanted, View, Wanted
from verispec.errors import InputError
from verispec.sampling.draw import NO_TOKEN
from verispec.types import NO_PARENT, Draft, SamplingParams

BAD_TOKEN = 7


def make_backend(*, bad: float | None = None, num_slots: int = 600, **changes: object) -> NumpyBackend:
    """A tiny Llama; with `bad`, the embedding of BAD_TOKEN holds that value."""
    config = TinyConfig(**changes)  # type: ignore[arg-type]
    tensors = {name: np.array(values) for name, values in make_tensors(config).items()}
    if bad is not None:
        tensors["embed"][BAD_TOKEN] = bad
    model = LoadedModel(config.architecture, tensors.__getitem__)
    return NumpyBackend([model], NumpyOptions(num_slots=num_slots, num_seq_rows=4))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_breaks_nobody_else(bad: float) -> None:
    """NaN in a draft node or in a later prompt row changes no bit of the rows that do not attend to it."""
    results = {}
    for name, token_id in {"good": 5, "bad": BAD_TOKEN}.items():
        tape = Tape(make_backend(bad=bad), seq_row=1, first_slot=0)
        tape.feed([1, 2, 3], shape=4)
        other = Tape(tape.backend, seq_row=2, first_slot=50)
        rows = RowsBuilder()
        nodes = tape.add_draft_rows(rows, Draft((token_id, 4, 6), (NO_PARENT, NO_PARENT, 0)), scratch=100)
        added, update = other.add_prompt_rows(rows, [9, 8, token_id])
        results[name] = run_logprobs(tape, rows, [nodes[1], *added[:2]], update, 8)
        rows = RowsBuilder()
        nodes = tape.add_draft_rows(rows, Draft((token_id, 4, 6), (NO_PARENT, NO_PARENT, 0)), scratch=100)
        bind(tape.backend, tape.seq_row, SamplingParams())
        below = Wanted(draw=DrawWanted(np.array(nodes[2:], np.int32)))
        drawn = run(tape, rows, below, NO_UPDATE, 4).draw
        assert drawn is not None
        assert (drawn.token_ids[0] == NO_TOKEN) == (name == "bad")  # the control: its own child is broken
    assert np.isfinite(results["good"]).all()
    assert np.array_equal(results["good"], results["bad"])


def tiles_backwards() -> Callable[..., np.ndarray]:
    plain = numpy_attention._attend_tiles

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        tiles = hidden.reshape(len(q), k.shape[1], -1)[:, ::-1]
        return plain(q, k[:, ::-1], v[:, ::-1], tiles.reshape(hidden.shape))

    return attend


def test_the_audit_notices_a_split_that_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classical impurity: tiles reduced in another order when there are more rows."""
    plain, backwards = numpy_attention._attend_tiles, tiles_backwards()

    def by_batch(q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        return (backwards if len(q) > 8 else plain)(q, k, v, hidden)

    def classes() -> dict[str, tuple[tuple[int, ...], ...]]:
        probes = make_backend(context_len=600).probes()
        return {o.name: o.classes for o in audit(probes, shapes=(4, 16, 64)).outcomes}

    assert classes()["attention"] == ((4, 16, 64),)
    monkeypatch.setattr(numpy_attention, "_attend_tiles", by_batch)
    assert classes()["attention"] != ((4, 16, 64),)


def test_a_skipped_attention_layer_writes_no_kv() -> None:
    backend = make_backend()
    tape = Tape(backend, seq_row=1, first_slot=0, view=View.without({1}))
    tape.feed([1, 2, 3], shape=4)
    slots = np.array([tape.slot(p) for p in range(3)])
    k, v = backend.kv(0, slots)
    assert (k[1] == 0).all()
    assert (v[1] == 0).all()
    assert (k[0] != 0).any()


def test_the_zero_slot_stays_zero() -> None:
    backend = make_backend()
    Tape(backend, seq_row=1, first_slot=0).feed(list(range(20)), shape=64)
    k, v = backend.kv(0, np.array([0]))
    assert (k == 0).all()
    assert (v == 0).all()


def test_models_of_one_backend_share_their_vocabulary() -> None:
    configs = [TinyConfig(), TinyConfig(vocab_size=96)]
    models = [LoadedModel(c.architecture, make_tensors(c).__getitem__) for c in configs]
    with pytest.raises(InputError, match="vocabulary"):
        NumpyBackend(models, NumpyOptions(num_slots=10, num_seq_rows=1))


def test_a_wrong_tile_order_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of tile order: summing tiles backwards changes bits on a long context, so the order is observable."""
    prompt = np.random.default_rng(1).integers(0, 16, 400).tolist()
    expected = Tape(make_backend(context_len=512), seq_row=1, first_slot=0).feed(prompt, shape=400)
    monkeypatch.setattr(numpy_attention, "_attend_tiles", tiles_backwards())
    found = Tape(make_backend(context_len=512), seq_row=1, first_slot=0).feed(prompt, shape=400)
    assert np.allclose(found, expected, atol=1e-4)
    assert not np.array_equal(found, expected)
