"""The known-answer test of the hopper-1 arithmetic on a CPU: tiny models must have the digests that an H200 gave.

The models and passes are those of the CUDA backend's own test; `steps` gives what the passes leave to be seen.
"""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from verispec.backends.cuda import tiny
from verispec.backends.options import HopperOptions, LoadedModel, NativeOptions
from verispec.backends.protocol import HiddenWanted, Pass, PassKind, Rows, TableUpdate, Wanted
from verispec.kv import NUM_RESERVED, TARGET_STORE

if TYPE_CHECKING:
    from verispec.backends.native_backend import NativeBackend

MakeBackend = Callable[[LoadedModel, NativeOptions], "NativeBackend"]
_OPTIONS = HopperOptions(num_slots=tiny.NUM_SLOTS - NUM_RESERVED, num_seq_rows=tiny.TABLE_ROWS - 1)


def wrong_answers(make_backend: MakeBackend) -> tuple[str, ...]:
    """The passes whose logits differ; `make_backend(model, options)` has what is to be tested."""
    goldens = json.loads(tiny.GOLDENS.read_text(encoding="utf-8"))
    return tuple(
        f"{name}, pass {i}"
        for name in tiny.ARCHITECTURES
        for i, found in enumerate(steps(name, make_backend))
        if tiny.digest(found["logits"]) != goldens[name][f"{i}/logits"]
    )


def steps(name: str, make_backend: MakeBackend) -> Iterator[dict[str, tiny.Float32]]:
    """Of each pass: the residual stream behind every layer, and the logits."""
    source, table = tiny.tiny_model(name), tiny.slot_table().astype(np.int32)
    backend = make_backend(LoadedModel(source.arch, source.tensors.__getitem__), _OPTIONS)
    try:
        backend.resident.table[:] = table
        store, given = backend.stores[TARGET_STORE], table[1, : tiny.GIVEN_A]
        k, v = tiny.given_kv(source)
        store.k[:, given], store.v[:, given] = store.kept(k), store.kept(v)
        for rows in tiny.passes():
            x, hidden = backend.forward(_pass(rows, source.arch.num_layers))
            assert hidden is not None
            logits = backend.logits(TARGET_STORE, x).values
            yield {**{f"layers.{i}.x": hidden[:, i] for i in range(hidden.shape[1])}, "logits": logits}
    finally:
        backend.close()


def _pass(rows: tiny.TinyRows, num_layers: int) -> Pass:
    count = len(rows.positions)
    columns = (rows.token_ids, rows.positions, rows.slots, rows.seq_rows, rows.positions + 1, np.zeros((count, 0)))
    every, none = np.arange(count, dtype=np.int32), np.zeros(0, np.int32)
    return Pass(
        PassKind.CANONICAL,
        Rows(*(c.astype(np.int32) for c in (*columns, np.zeros(count)))),
        Wanted(hidden=HiddenWanted(every, tuple(range(1, num_layers + 1)))),
        TableUpdate(none, none, none),
        head_shape=count,
    )
