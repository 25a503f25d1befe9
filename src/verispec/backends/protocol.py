"""The border between engine and tensors: a pass is flat, fixed-width arrays; small arrays come back.

A backend loads weights, owns one K/V store per model, and runs passes. It knows nothing of requests, drafts or
scheduling. The context of a row is `table[seq_row, :prefix_len]` followed by its tail; the row's own slot is the last
of it, so `prefix_len + tail_len == position + 1` always. Rows are written before any row reads, layer by layer.

What does not change while a sequence runs is told once, by `bind`; everything else a draw depends on (the tokens before
it) the backend has seen as rows. So a pass of n plain sequences is n tokens, positions and slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.kv import TARGET_STORE
from verispec.sampling.draw import DrawResult, NoisyTopK, TopKResult
from verispec.sampling.rows import Sampler

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
PADDING_SEQ_ROW = 0  # a table row no sequence uses


class PassKind(Enum):
    """Canonical: a shape of the family, the only source of what a deterministic request commits. Fast: any shape."""

    CANONICAL = "canonical"
    FAST = "fast"


class SubLayer(NamedTuple):
    """The attention or the MLP of one layer."""

    layer: int
    is_mlp: bool


@dataclass(frozen=True, slots=True)
class View:
    """A model with some sub-layers skipped (identity on the residual stream). No copy of weights."""

    skipped: frozenset[SubLayer] = frozenset()

    @classmethod
    def without(cls, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> View:
        """The view that skips the attention of these layers, and the MLP of those."""
        return cls(frozenset([*(SubLayer(i, False) for i in attention), *(SubLayer(i, True) for i in mlp)]))

    @property
    def skipped_attention(self) -> frozenset[int]:
        return frozenset(s.layer for s in self.skipped if not s.is_mlp)

    @property
    def skipped_mlp(self) -> frozenset[int]:
        return frozenset(s.layer for s in self.skipped if s.is_mlp)


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
    masks: Int32 | None = None  # [M] rows of the mask table: what may be drawn behind each; 0, or None: every token

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Entries to set in the backend's slot table before the pass: table[seq_rows, positions] = slots."""

    seq_rows: Int32
    positions: Int32
    slots: Int32

    def __len__(self) -> int:
        return len(self.seq_rows)

    def followed_by(self, other: TableUpdate) -> TableUpdate:
        """Both; entries that the other sets again are its own."""
        if not len(self):
            return other
        places, others = ((u.seq_rows.astype(np.int64) << 32) + u.positions for u in (self, other))
        kept = ~np.isin(places, others)
        columns = ((getattr(self, name)[kept], getattr(other, name)) for name in ("seq_rows", "positions", "slots"))
        return TableUpdate(*(np.concatenate(column) for column in columns))


NO_UPDATE = TableUpdate(*(np.zeros(0, np.int32) for _ in range(3)))


class Noise(NamedTuple):
    """Which noise draws use: `t` tells rounds apart, `stream` whose they are (`sampling.noise.stream`)."""

    t: NDArray[np.int64]  # [R]
    stream: NDArray[np.int64]  # [R]


class DrawWanted(NamedTuple):
    """Sample a token at each of these rows, as the rows' sequences are bound; by default with the target's own noise,
    that of the position behind the row."""

    rows: Int32  # [R]
    noise: Noise | None = None


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
    noise: Noise | None = None


class DistributionWanted(NamedTuple):
    """A handle to the distributions of these rows, which lives until it is released."""

    rows: Int32  # [R]


class HiddenWanted(NamedTuple):
    """The residual stream of these rows before each of these layers; the one behind the last is what the head reads.

    It stays where it was computed, and alive until the drafter that wanted it drafts again.
    """

    rows: Int32  # [R]
    layers: tuple[int, ...]  # 0 to num_layers


@dataclass(frozen=True, slots=True)
class Wanted:
    """The closed set of what a pass can give. None means not wanted."""

    draw: DrawWanted | None = None
    logprobs: LogprobsWanted | None = None
    top_k: TopKWanted | None = None
    noisy_top_k: NoisyTopKWanted | None = None
    distribution: DistributionWanted | None = None
    hidden: HiddenWanted | None = None

    def head_rows(self) -> Int32:
        """Every row that needs logits, once, ascending."""
        parts = (self.draw, self.logprobs, self.top_k, self.noisy_top_k, self.distribution)
        rows = [part.rows for part in parts if part is not None]
        if len(rows) == 1 and (rows[0][1:] > rows[0][:-1]).all():
            return rows[0]
        return np.unique(np.concatenate(rows)).astype(np.int32) if rows else np.zeros(0, np.int32)


def first_draft_rows(store: int) -> int:
    """Rows of a sequence in the first pass of a chain: a second model may lack the last two committed tokens."""
    return 1 if store == TARGET_STORE else 2


class Tree(NamedTuple):
    """A shape of drafts: each node of a level is offered so many children, of which `keep` stay in all: every one, or
    of a beam the best paths.

    Nodes have places, level by level: of a beam the best path first, otherwise parent by parent, in the order drawn,
    with places left free where there are fewer children.
    """

    branching: tuple[int, ...]
    keep: tuple[int, ...]
    is_beam: bool = False

    @property
    def num_nodes(self) -> int:
        return sum(self.keep)

    @property
    def most_rows(self) -> int:
        """Of one sequence in a pass that drafts: nodes of the last level have no children."""
        return max((1, *self.keep[:-1]))


class Drafting(NamedTuple):
    """How some sequences of a burst draft: every round begins with a chain by a view of the model behind `store`.

    A chain has up to `lengths` tokens, drawn with the target's noise, one pass each for all sequences. It ends behind a
    stop id, behind a token whose raw log-probability lies below `least_logprob`, and where no more can be committed.
    Its rows stand in the table like those of its verification, which overwrite them. The first pass of a second model
    has the last two committed tokens, whether its store lacks both or only the last.

    With a `tree` of as many nodes as `lengths` say, each round begins with that, one pass for each level, of children
    with the target's noise; nodes behind a stop id have none. Node i has the slot of the table's position i + 1 behind
    the last token; when a path was accepted, its slots change places with those of its positions, in every round. The
    host knows that from the result, and sends none of these entries again. Levels that could no longer be committed are
    left out. Places may lie behind the sequence's limit, but not behind the end of the table's row: there is no tree
    where they would.

    A chain that is looked up needs no pass and no model: it is what followed the sequence's last tokens before
    (`rounds.looked_up`), and ends as others do. With `only_drafts` cheaper weights may serve, as in a `Pass`.

    Drafts `by_probability` are drawn with noise of their own, and judged by `sampling/recursive.py`: what that commits
    takes the place of the target's draws along the path. Nodes are counted without the places that were left free.
    Where nothing was drafted, the target's own draw stands.
    """

    sequences: Int32  # [D], indices of the burst's sequences
    lengths: Int32  # [D], at least 1
    first_shape: int  # of the first pass of a round
    shape: int  # of the others
    store: int = TARGET_STORE
    view: View = FULL_VIEW
    kind: PassKind = PassKind.FAST
    least_logprob: float = -math.inf
    tree: Tree | None = None
    looks_up: bool = False
    only_drafts: bool = False
    by_probability: bool = False

    @property
    def first_rows(self) -> int:
        return first_draft_rows(self.store)


Follow = Callable[[int, int], NDArray[np.uint32] | None]


class Burst(NamedTuple):
    """Further rounds without the host: what is drawn at these rows is fed back, round after round.

    A round has one row per sequence that goes on, and one per token it drafted; tokens up to the first that the target
    does not draw itself are accepted, its own draw behind them is fed back; or as probabilities say (see `Drafting`).
    Slots are the table's at their positions, rows are padded to `shape`. A sequence that draws a stop id, reaches its
    limit, cannot draw or has had its rounds idles from then on. With no rounds, the backend only remembers where the
    sequences are: a `FROM_STATE` row of a later pass goes on from there. Those that draft do so in the pass's own
    round, too: `FROM_DRAFT` rows behind theirs, which have no places either where that one is a `FROM_STATE` row.
    Sequences whose rows have masks draft nothing; `follow(i, token_id)` says what sequence i may draw behind its next
    token, as a row of the mask table, or None if it idles from then on. Their rows of that table are nobody else's.
    """

    rows: Int32  # [S], rows of the pass that draw
    rounds: Int32  # [S], further rounds of each
    shape: int
    drafts: tuple[Drafting, ...] = ()
    follow: Follow | None = None

    @property
    def num_rounds(self) -> int:
        """The most of any sequence."""
        return int(self.rounds.max())

    @property
    def draft_lens(self) -> Int32:
        """[S], the most that each sequence drafts in a round."""
        lengths = np.zeros(len(self.rows), np.int32)
        for part in self.drafts:
            lengths[part.sequences] = part.lengths
        return lengths


FROM_STATE = -1  # as a row's token: the backend knows token and position; the host has not read them yet
FROM_DRAFT = -2  # as a row's token: the backend drafts it; padding, if the draft is shorter


class HiddenStart(NamedTuple):
    """Rows that start from a hidden state, not from the embedding of their token."""

    rows: Int32  # [R]
    states: Any  # [R, width], as `PassResult.hidden` gives them


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward over flat rows. The head runs on the rows that want logits, padded to `head_shape` rows.

    With `only_drafts` nothing of it is ever committed, K/V included: cheaper weights may serve.
    """

    kind: PassKind
    rows: Rows
    wanted: Wanted
    table_update: TableUpdate
    head_shape: int
    store: int = TARGET_STORE
    view: View = FULL_VIEW
    burst: Burst | None = None
    start: HiddenStart | None = None
    only_drafts: bool = False


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


class BurstResult(NamedTuple):
    """What the further rounds drew, one after the other: NO_TOKEN where a sequence idled, or could not draw.

    Round i of a sequence gave `accepted[i]` tokens that were drafted and one more; -1 where it idled. The round of the
    pass itself is round 0, whose draws are the pass's; whoever had ended before the pass idles in it, too.
    """

    token_ids: NDArray[np.int64]  # [S, rounds * (1 + K)]
    logprobs: Float32  # the same
    drafts: NDArray[np.int64] = np.zeros((0, 0, 0), np.int64)  # [S, 1 + rounds, K], NO_TOKEN where nothing was drafted
    accepted: Int32 = np.zeros((0, 0), np.int32)  # [S, 1 + rounds]
    parents: NDArray[np.int64] = np.zeros((0, 0, 0), np.int64)  # as drafts, of trees; empty if there are none


@dataclass(frozen=True, slots=True)
class PassResult:
    """Exactly what was wanted, as host arrays, but for what stays where it was computed."""

    draw: DrawResult | None = None
    logprobs: Float32 | None = None
    top_k: TopKResult | None = None
    noisy_top_k: NoisyTopK | None = None
    distribution: DistributionHandle | None = None
    burst: BurstResult | None = None
    hidden: Any = None  # the backend's own array [R, layers, width]
    host_seconds: float = 0.0  # of the time since it was submitted: what the host took, where the backend knows


class Ticket(Protocol):
    """A pass under way."""

    def result(self) -> PassResult:
        """Wait for the pass and give its result; the same object every time."""


@dataclass(frozen=True, slots=True)
class ReadyTicket:
    """The ticket of a backend that computes in `submit`."""

    ready: PassResult

    def result(self) -> PassResult:
        return self.ready


class HiddenShape(NamedTuple):
    """Where a model's hidden states can be had, and how wide they are."""

    num_layers: int
    width: int


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What a pass may ask of this backend."""

    vocab_size: int  # width of the logits
    context_len: int
    num_slots: int
    num_seq_rows: int  # rows of the slot table that sequences can use: 1..num_seq_rows
    max_tail: int
    num_stores: int = 1
    num_masks: int = 0  # rows of the mask table, with row 0; 0: no masks
    follows: bool = False  # bursts may have rows with masks
    hidden: tuple[HiddenShape, ...] = ()  # of each store's model; (): hidden states neither go out nor in
    prepares: bool = False  # the first pass of a shape takes long: it is compiled
    fast_weights: str = ""  # the name of cheaper ones that serve passes which only draft
    trees: bool = False  # bursts may draft trees
    by_probability: bool = False  # and what they draft may be judged by probabilities
    looks_up: bool = False  # chains that are looked up cost a burst next to nothing
    fits_rows: bool = False  # a round has as many rows as were drafted, not as many as might have been
    leaves_out: bool = True  # draft passes of a burst that nobody wants, all chains having ended, hardly cost anything


class Backend(Protocol):
    """What the engine asks of a backend."""

    @property
    def limits(self) -> BackendLimits: ...
    @property
    def arithmetics(self) -> tuple[str, ...]:
        """What defines its bits, by name: one of them is in its fingerprint. Another backend may serve the same."""

    @property
    def weights_version(self) -> int:
        """How often the target's weights were replaced since they were read from its files."""

    @property
    def shapes(self) -> tuple[int, ...]:
        """The shapes that may become canonical: what the audit measures."""

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        """A sequence takes this row of the table: how it samples, and where it stops."""

    def set_masks(self, first: int, allowed: NDArray[np.uint32]) -> None:
        """Rows `first`.. of the mask table: bit i % 32 of word i // 32 allows token i. Row 0 allows all, and stays."""

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
