"""The border between engine and tensors: a pass is flat, fixed-width arrays; small arrays come back.

A backend loads weights, owns one K/V store per model, and runs passes. It knows nothing of requests, drafts or
scheduling. The context of a row is `table[seq_row, :prefix_len]` followed by its tail; the row's own slot is the last
of it, so `prefix_len + tail_len == position + 1` always. Rows are written before any row reads, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.kv import DUMP_SLOT, TARGET_STORE, ZERO_SLOT
from verispec.sampling.rows import SamplingRows

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
PADDING_SEQ_ROW = 0  # a table row no sequence uses


class PassKind(Enum):
    """Canonical: a shape of the family, the only source of what a deterministic request commits. Fast: any shape."""

    CANONICAL = "canonical"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class View:
    """A model with some sub-layers skipped (identity on the residual stream). No copy of weights."""

    skipped_attention: frozenset[int] = frozenset()
    skipped_mlp: frozenset[int] = frozenset()


FULL_VIEW = View()


@dataclass(frozen=True, slots=True)
class Rows:
    """One entry per row, padding included; M = len(rows) is the shape the kernels see."""

    token_ids: Int32  # [M]
    positions: Int32  # [M]
    slots: Int32  # [M] where the row's K/V is written
    seq_rows: Int32  # [M] row of the slot table
    prefix_lens: Int32  # [M] how much of that table row is context
    tails: Int32  # [M, D] context behind the prefix, own slot last; padded with ZERO_SLOT
    tail_lens: Int32  # [M]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Entries to set in the backend's slot table before the pass: table[seq_rows, positions] = slots."""

    seq_rows: Int32
    positions: Int32
    slots: Int32


class DrawWanted(NamedTuple):
    """Sample a token at each of these rows."""

    rows: Int32  # [R]
    sampling: SamplingRows


class LogprobsWanted(NamedTuple):
    """The raw log-probability of one given id at each of these rows."""

    rows: Int32  # [R]
    token_ids: Int32  # [R]


class TopKWanted(NamedTuple):
    """The k most likely ids at each of these rows, with raw log-probabilities."""

    rows: Int32  # [R]
    k: int


class NoisyTopKWanted(NamedTuple):
    """The k largest of log p plus noise at each of these rows, p being the processed distribution; see `draw.py`."""

    rows: Int32  # [R]
    k: int
    sampling: SamplingRows


class DistributionWanted(NamedTuple):
    """A handle to the distributions of these rows, which lives until it is released."""

    rows: Int32  # [R]
    sampling: SamplingRows


@dataclass(frozen=True, slots=True)
class Wanted:
    """The closed set of what a pass can give. None means not wanted."""

    draw: DrawWanted | None = None
    logprobs: LogprobsWanted | None = None
    top_k: TopKWanted | None = None
    noisy_top_k: NoisyTopKWanted | None = None
    distribution: DistributionWanted | None = None

    def head_rows(self) -> Int32:
        """Every row that needs logits, once, ascending."""
        parts = (self.draw, self.logprobs, self.top_k, self.noisy_top_k, self.distribution)
        rows = [part.rows for part in parts if part is not None]
        return np.unique(np.concatenate(rows)).astype(np.int32) if rows else np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward over flat rows. The head runs on the rows that want logits, padded to `head_shape` rows."""

    kind: PassKind
    rows: Rows
    wanted: Wanted
    table_update: TableUpdate
    head_shape: int
    store: int = TARGET_STORE
    view: View = FULL_VIEW


class DrawResult(NamedTuple):
    """Sampled tokens (NO_TOKEN where the logits are NaN) and their raw log-probabilities."""

    token_ids: NDArray[np.int64]  # [R]
    logprobs: Float32  # [R]


class TopKResult(NamedTuple):
    """Ids and values, best first; NO_TOKEN where fewer than k ids are possible."""

    token_ids: NDArray[np.int64]  # [R, k]
    values: Float32  # [R, k]


class NoisyTopKResult(NamedTuple):
    """Children of each row, best first; NO_TOKEN where fewer than k ids are possible."""

    token_ids: NDArray[np.int64]  # [R, k]
    values: Float32  # [R, k] log p + noise, p after all processing; at T = 0 without noise
    logprobs: Float32  # [R, k] log p


class DistributionHandle(Protocol):
    """Distributions that stay where they were computed, until whoever wanted them lets go: at the end of a step."""

    def probabilities(self) -> Any:
        """The backend's own array [R, V], after all processing; raises StaleHandleError after `release`."""

    def logprobs(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> Float32:
        """Raw log-probabilities of one id at each of these rows of the handle."""

    def release(self) -> None:
        """Give back the memory. Releasing twice is fine."""


class StaleHandleError(RuntimeError):
    """A distribution handle was used after its release."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Exactly what was wanted, as host arrays."""

    draw: DrawResult | None = None
    logprobs: Float32 | None = None
    top_k: TopKResult | None = None
    noisy_top_k: NoisyTopKResult | None = None
    distribution: DistributionHandle | None = None


class Ticket(Protocol):
    """A pass under way."""

    def result(self) -> PassResult:
        """Wait for the pass and give its result; the same object every time."""


@dataclass(frozen=True, slots=True)
class ReadyTicket:
    """The ticket of a backend that computes in `submit`."""

    ready: PassResult

    def result(self) -> PassResult:
        """The result."""
        return self.ready


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What a pass may ask of this backend."""

    vocab_size: int  # width of the logits
    context_len: int
    num_slots: int
    num_seq_rows: int  # rows of the slot table that sequences can use: 1..num_seq_rows
    max_tail: int
    num_stores: int = 1


class Backend(Protocol):
    """What the engine asks of a backend."""

    @property
    def limits(self) -> BackendLimits: ...
    @property
    def shapes(self) -> tuple[int, ...]:
        """The shapes that may become canonical: what the audit measures."""

    def submit(self, pass_: Pass) -> Ticket:
        """Start a pass. Raises InputError for arrays that do not fit the limits."""

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        """Everything a float result of one of its models depends on: device, libraries, arithmetic, dtypes, shapes."""

    def device(self) -> dict[str, str]:
        """What its speed depends on beside that."""

    def wrong_answers(self) -> tuple[str, ...] | None:
        """The cases of its known-answer test that fail; None if it has no such test: its purity has to be measured."""

    def probes(self) -> list[KernelProbe]:
        """Every kind of row kernel of the target's model that the audit has to measure."""

    def close(self) -> None:
        """Give back memory and threads."""


@dataclass(slots=True)
class RowsBuilder:
    """Collects rows and pads them to a shape. Padding rows are ordinary rows that write to the dump slot."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    seq_rows: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    tails: list[tuple[int, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(
        self, *, token_id: int, position: int, slot: int, seq_row: int, prefix_len: int, tail: tuple[int, ...] = ()
    ) -> int:
        """Add one row; returns its index. Without a tail the row's own slot must be the prefix's last."""
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.slots.append(slot)
        self.seq_rows.append(seq_row)
        self.prefix_lens.append(prefix_len)
        self.tails.append(tail)
        return len(self.token_ids) - 1

    def build(self, shape: int) -> Rows:
        """Freeze, padded to `shape` rows."""
        while len(self) < shape:
            self.add(token_id=0, position=0, slot=DUMP_SLOT, seq_row=PADDING_SEQ_ROW, prefix_len=0, tail=(DUMP_SLOT,))
        width = max((len(t) for t in self.tails), default=0)
        tails = np.full((len(self), width), ZERO_SLOT, np.int32)
        for i, tail in enumerate(self.tails):
            tails[i, : len(tail)] = tail
        return Rows(
            token_ids=np.array(self.token_ids, np.int32),
            positions=np.array(self.positions, np.int32),
            slots=np.array(self.slots, np.int32),
            seq_rows=np.array(self.seq_rows, np.int32),
            prefix_lens=np.array(self.prefix_lens, np.int32),
            tails=tails,
            tail_lens=np.array([len(t) for t in self.tails], np.int32),
        )
