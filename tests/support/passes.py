"""Small helpers to run passes on a backend by hand, for the conformance suite and golden tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verispec.backends.pass_builder import padded
from verispec.backends.protocol import (
    FULL_VIEW,
    Backend,
    Pass,
    PassKind,
    PassResult,
    Rows,
    TableUpdate,
    TopKWanted,
    View,
    Wanted,
)
from verispec.kv import NUM_RESERVED
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import Draft, SamplingParams

NO_UPDATE = TableUpdate(*(np.zeros(0, np.int32) for _ in range(3)))


class RowsBuilder:
    """Rows one by one, in the words of the protocol."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []
        self._tails: list[tuple[int, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, *, token_id: int, position: int, slot: int, seq_row: int, prefix_len: int, tail: tuple[int, ...] = ()
    ) -> int:
        assert prefix_len + len(tail) == position + 1
        self._rows.append((token_id, position, slot, seq_row))
        if tail:
            self._tails.append((len(self._rows) - 1, tail))
        return len(self._rows) - 1

    def build(self, shape: int) -> Rows:
        columns = np.array(self._rows, np.int32).reshape(-1, 4).T
        return padded(columns[0], columns[1], columns[2], columns[3], shape=shape, tails=self._tails)


def bind(backend: Backend, seq_row: int, params: SamplingParams, *, seed: int = 7, sample_index: int = 0) -> None:
    """The row samples so from now on."""
    backend.bind(seq_row, Sampler(params, SampleKey(seed, sample_index)))


@dataclass
class Tape:
    """One sequence on a backend, driven by hand: its slots, its table row, and what the rows gave."""

    backend: Backend
    seq_row: int
    first_slot: int
    store: int = 0
    view: View = FULL_VIEW
    kind: PassKind = PassKind.CANONICAL
    token_ids: list[int] = field(default_factory=list)

    def slot(self, position: int) -> int:
        return NUM_RESERVED + self.first_slot + position

    def add_prompt_rows(self, rows: RowsBuilder, token_ids: Sequence[int]) -> tuple[list[int], TableUpdate]:
        """Append tokens as table rows; returns their row indices and the update the pass needs."""
        start = len(self.token_ids)
        positions = range(start, start + len(token_ids))
        update = TableUpdate(
            np.full(len(token_ids), self.seq_row, np.int32),
            np.array(positions, np.int32),
            np.array([self.slot(p) for p in positions], np.int32),
        )
        added = [
            rows.add(token_id=t, position=p, slot=self.slot(p), seq_row=self.seq_row, prefix_len=p + 1)
            for p, t in zip(positions, token_ids, strict=True)
        ]
        self.token_ids += token_ids
        return added, update

    def add_draft_rows(self, rows: RowsBuilder, draft: Draft, *, scratch: int) -> list[int]:
        """Add a draft's nodes behind the tokens so far; node i uses slot `scratch + i`. Changes nothing here."""
        slots = [NUM_RESERVED + scratch + i for i in range(len(draft))]
        prefix_len = len(self.token_ids)
        added = []
        for node, token_id in enumerate(draft.token_ids):
            path = draft.path_to(node)
            added.append(
                rows.add(
                    token_id=token_id,
                    position=prefix_len + len(path) - 1,
                    slot=slots[node],
                    seq_row=self.seq_row,
                    prefix_len=prefix_len,
                    tail=tuple(slots[i] for i in path),
                )
            )
        return added

    def feed(self, token_ids: Sequence[int], *, shape: int) -> np.ndarray:
        """Run tokens as one pass; returns all log-probabilities after each, [tokens, vocab], ordered by id."""
        rows = RowsBuilder()
        wanted_rows, update = self.add_prompt_rows(rows, token_ids)
        return run_logprobs(self, rows, wanted_rows, update, shape)


def run_logprobs(
    tape: Tape, rows: RowsBuilder, wanted_rows: Sequence[int], update: TableUpdate, shape: int
) -> np.ndarray:
    """Log-probabilities of the whole vocabulary at the wanted rows, ordered by id."""
    vocab_size = tape.backend.limits.vocab_size
    wanted = Wanted(top_k=TopKWanted(np.array(wanted_rows, np.int32), vocab_size))
    top_k = run(tape, rows, wanted, update, shape).top_k
    assert top_k is not None
    by_id = np.empty_like(top_k.values)
    np.put_along_axis(by_id, top_k.token_ids, top_k.values, axis=-1)
    return by_id


def run(tape: Tape, rows: RowsBuilder, wanted: Wanted, update: TableUpdate, shape: int) -> PassResult:
    head = len(wanted.head_rows())
    head_shape = shape if head and tape.kind is PassKind.CANONICAL else head
    pass_ = Pass(tape.kind, rows.build(shape), wanted, update, head_shape, store=tape.store, view=tape.view)
    return tape.backend.submit(pass_).result()


def joined(*updates: TableUpdate) -> TableUpdate:
    return TableUpdate(*(np.concatenate(parts) for parts in zip(*(_parts(u) for u in updates), strict=True)))


def _parts(update: TableUpdate) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return update.seq_rows, update.positions, update.slots
