"""The one builder of passes: rows by sequences, then arrays padded to a shape.

Rows of a chain (a prompt, plain decoding, a draft without branches) stand in the slot table, so they need no tail; only
nodes of a tree do. Padding rows are ordinary rows that write to the dump slot.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import (
    FROM_DRAFT,
    FROM_STATE,
    FULL_VIEW,
    Backend,
    Burst,
    DistributionWanted,
    Drafting,
    DrawWanted,
    LogprobsWanted,
    Noise,
    NoisyTopKWanted,
    Pass,
    PassKind,
    Rows,
    TableUpdate,
    TopKWanted,
    Tree,
    View,
    Wanted,
)
from verispec.kv import DUMP_SLOT, TARGET_STORE
from verispec.sampling.constraint import Constraint, is_narrow

Ints = Sequence[int] | NDArray[np.generic]


def padded(
    token_ids: Ints,
    positions: Ints,
    slots: Ints,
    seq_rows: Ints,
    *,
    shape: int,
    tails: Sequence[tuple[int, Sequence[int]]] = (),
) -> Rows:
    """Rows, padded to `shape`. `tails` are those of tree rows, by row: the context behind the prefix, own slot last."""
    num_rows = len(token_ids)
    width = max([len(tail) for _, tail in tails]) if tails else 0
    if shape > num_rows:
        width = max(1, width)  # padding has its own slot as its tail
    columns = np.zeros((6, shape), np.int32)  # tokens, positions, slots, sequence rows, prefix and tail lengths
    columns[:4, :num_rows] = (token_ids, positions, slots, seq_rows)
    np.add(columns[1, :num_rows], 1, out=columns[4, :num_rows])
    tail_slots = np.zeros((shape, width), np.int32)  # ZERO_SLOT
    if shape > num_rows:
        columns[2, num_rows:], columns[5, num_rows:] = DUMP_SLOT, 1
        tail_slots[num_rows:, :1] = DUMP_SLOT
    for row, tail in tails:
        tail_slots[row, : len(tail)] = tail
        columns[4, row] -= len(tail)
        columns[5, row] = len(tail)
    return Rows(columns[0], columns[1], columns[2], columns[3], columns[4], tail_slots, columns[5])


def columns_pass(
    kind: PassKind,
    fit: Callable[[int], int],
    *,
    seq_rows: Sequence[int],
    positions: Sequence[int],
    token_ids: Sequence[int] | None,
    slots: Sequence[int],
    num_rounds: int,
    feeds: bool,
) -> Pass:
    """One row of each of many sequences, which draws, and further rounds of them.

    It is what `PassBuilder` would make of these columns, in a third of its time. Without tokens, the backend knows
    those, and where the sequences are.
    The slots are those of all rounds, one after the other; `positions` are those of the first, at most.
    """
    count = len(seq_rows)
    shape = fit(count)
    tokens, named = ([FROM_STATE] * count, [0] * count) if token_ids is None else (token_ids, positions)
    rows = padded(tokens, named, slots[:count], seq_rows, shape=shape)
    own_rows = rows.seq_rows[:count]
    if num_rounds == 1 and token_ids is not None:
        update = TableUpdate(own_rows, rows.positions[:count], rows.slots[:count])
    else:
        at = np.array(positions, np.int32) + np.arange(num_rounds, dtype=np.int32)[:, None]  # [rounds, sequences]
        update = TableUpdate(np.tile(own_rows, num_rounds), at.ravel(), np.array(slots, np.int32))
    drawn = np.arange(count, dtype=np.int32)
    burst = Burst(drawn, np.full(count, num_rounds - 1, np.int32), shape) if num_rounds > 1 or feeds else None
    return Pass(kind, rows, Wanted(DrawWanted(drawn)), update, head_shape=shape, burst=burst)


class Wish:
    """Rows that want one kind of result; `noise` has t and stream of each where some row's is not the target's own."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.noise: list[tuple[int, int]] = []

    def own_noise(self) -> Noise | None:
        if not self.noise or not any(stream for _, stream in self.noise):
            return None
        t, streams = np.array(self.noise, np.int64).T.copy()
        return Noise(t, streams)


class DraftRule(NamedTuple):
    """Who drafts the chains or trees of a burst, when chains end early, and the shape of a pass for some rows."""

    store: int
    view: View
    kind: PassKind
    shape: Callable[[int], int]
    least_logprob: float = -math.inf
    tree: Tree | None = None
    looks_up: bool = False
    only_drafts: bool = False  # by cheaper weights, where the backend has them
    by_probability: bool = False  # what judges them

    def drafting(self, sequences: Sequence[tuple[int, int]]) -> Drafting:
        """Of these sequences, by their index in the burst, and the lengths of their chains."""
        at, lengths = np.array(sequences, np.int32).T.copy()
        shape = self.shape(len(at) * (1 if self.tree is None else self.tree.most_rows))
        who = self.store, self.view, self.kind, self.least_logprob, self.tree, self.looks_up, self.only_drafts
        found = Drafting(at, lengths, 0, shape, *who, by_probability=self.by_probability)
        return found._replace(first_shape=self.shape(found.first_rows * len(at)))


LOOK_UP = DraftRule(TARGET_STORE, FULL_VIEW, PassKind.FAST, int, looks_up=True)  # there is no pass to have a shape


class PassBuilder:
    """Collects rows and wishes, sequence by sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.seq_rows: list[int] = []
        self.tails: list[tuple[int, Sequence[int]]] = []
        self.draw, self.noisy = Wish(), Wish()
        self.top_rows: list[int] = []
        self.top_k = 0
        self.noisy_k = 0
        self.given_rows: list[int] = []
        self.given_ids: list[int] = []
        self.shown_rows: list[int] = []  # whose distributions are wanted
        self.fed_rows: list[int] = []  # whose draws are fed back, for so many further rounds
        self.fed_rounds: list[int] = []
        self._followed: dict[int, _Followed] = {}  # by sequence of the burst
        self._drafts: dict[DraftRule, list[tuple[int, int]]] = {}  # by who drafts: sequences of the burst, lengths
        self.table_rows: list[int] = []  # what the backend's table does not have yet
        self.table_positions: list[int] = []
        self.table_slots: list[int] = []
        self.masked: list[tuple[int, NDArray[np.uint32]]] = []  # rows, and the tokens that may be drawn behind them
        self._mask_rows: dict[int, int] = {}  # where those are in the backend's mask table

    def __len__(self) -> int:
        return len(self.token_ids)

    def update_table(self, seq_row: int, start: int, slots: Sequence[int]) -> None:
        """The slots of positions `start`.. of a sequence."""
        self.table_rows += [seq_row] * len(slots)
        self.table_positions += range(start, start + len(slots))
        self.table_slots += slots

    def add_chain(self, seq_row: int, start: int, token_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Rows at positions `start`.. that stand in the table; returns the first one's index."""
        first, count = len(self.token_ids), len(token_ids)
        self.token_ids += token_ids
        self.positions += range(start, start + count)
        self.slots += slots
        self.seq_rows += [seq_row] * count
        return first

    def add_columns(self, seq_rows: list[int], positions: list[int], token_ids: list[int], slots: list[int]) -> range:
        """One row of each of many sequences, which draws; returns the rows."""
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.positions += positions
        self.slots += slots
        self.seq_rows += seq_rows
        rows = range(first, len(self.token_ids))
        self.draw.rows += rows
        return rows

    def add_node(self, seq_row: int, position: int, token_id: int, tail: Sequence[int]) -> int:
        """A node of a tree: its context is the table up to where the tail begins, then the tail."""
        row = self.add_chain(seq_row, position, (token_id,), tail[-1:])
        self.tails.append((row, tail))
        return row

    def feed_back(
        self, row: int, num_rounds: int, constraint: Constraint | None = None, *, until_narrow: bool = False
    ) -> None:
        """What a row draws is its sequence's next row, for `num_rounds` rounds with the pass's own.

        With `until_narrow`, the rounds end where the grammar leaves few tokens: those can be drafted.
        """
        if constraint is not None and num_rounds > 1:
            self._followed[len(self.fed_rows)] = _Followed(constraint, until_narrow)
        self.fed_rows.append(row)
        self.fed_rounds.append(num_rounds - 1)

    def add_drafted(
        self, seq_row: int, start: int, token_id: int, slots: Sequence[int], num_rounds: int, rule: DraftRule
    ) -> None:
        """The row of a sequence's last token, and those of what the backend drafts behind it; all draw."""
        length = len(slots) - 1
        row = self.add_chain(seq_row, start, (token_id, *[FROM_DRAFT] * length), slots)
        self._drafts.setdefault(rule, []).append((len(self.fed_rows), length))
        self.feed_back(row, num_rounds)
        self.draw.rows += range(row, row + 1 + length)

    def add_drafted_ahead(self, seq_row: int, length: int, num_rounds: int, rule: DraftRule) -> None:
        """The same of a sequence whose last token only the backend knows, and where it is."""
        first = len(self)
        self.add_drafted(seq_row, 0, FROM_STATE, [DUMP_SLOT] * (1 + length), num_rounds, rule)
        self.positions[first:] = [0] * (1 + length)

    def want_top(self, row: int, k: int) -> None:
        """The k most likely ids at a row; the largest k of a pass serves all."""
        self.top_rows.append(row)
        self.top_k = max(self.top_k, k)

    def send_masks(self, backend: Backend, first: int = 1) -> int:
        """Write what may be drawn into rows `first`.. of the backend's mask table; returns the next free one."""
        if not self.masked:
            return first
        moving = {self.fed_rows[i] for i in self._followed}  # their masks are rewritten, and cannot be shared
        keys = [-row if row in moving else id(mask) for row, mask in self.masked]
        allowed = dict(zip(keys, (mask for _, mask in self.masked), strict=True))
        numbers = dict(zip(allowed, range(first, first + len(allowed)), strict=True))
        backend.set_masks(first, np.stack([*allowed.values()]))
        self._mask_rows = {row: numbers[key] for (row, _), key in zip(self.masked, keys, strict=True)}
        return first + len(allowed)

    def rows(self, shape: int) -> Rows:
        """The rows alone, padded."""
        rows = padded(self.token_ids, self.positions, self.slots, self.seq_rows, shape=shape, tails=self.tails)
        if not self._mask_rows:
            return rows
        masks = np.zeros(shape, np.int32)
        masks[[*self._mask_rows]] = [*self._mask_rows.values()]
        return replace(rows, masks=masks)

    def build(
        self,
        kind: PassKind,
        fit: Callable[[int], int],
        *,
        vocab_size: int,
        store: int = TARGET_STORE,
        view: View = FULL_VIEW,
    ) -> Pass:
        """Freeze; `fit` gives the shape for a number of rows, for the layers, for the head and for further rounds."""
        draw = self.draw
        wanted = Wanted(
            DrawWanted(_ints(draw.rows), draw.own_noise()) if draw.rows else None,
            LogprobsWanted(_ints(self.given_rows), _ints(self.given_ids)) if self.given_rows else None,
            TopKWanted(np.unique(_ints(self.top_rows)), min(self.top_k, vocab_size)) if self.top_rows else None,
            self._noisy(vocab_size) if self.noisy.rows else None,
            DistributionWanted(_ints(self.shown_rows)) if self.shown_rows else None,
        )
        rows = self.rows(fit(len(self)))
        only_draws = not (self.given_rows or self.top_rows or self.noisy.rows or self.shown_rows)
        num_head = len(draw.rows) if only_draws else len(wanted.head_rows())
        burst = None
        if self.fed_rows:
            num_rows = len(self.fed_rows) + self.token_ids.count(FROM_DRAFT)
            drafts = tuple(rule.drafting(sequences) for rule, sequences in self._drafts.items())
            follow = partial(_allowed_behind, self._followed) if self._followed else None
            burst = Burst(_ints(self.fed_rows), _ints(self.fed_rounds), fit(num_rows), drafts, follow)
        table = np.array((self.table_rows, self.table_positions, self.table_slots), np.int32)
        update = TableUpdate(table[0], table[1], table[2])
        head_shape = fit(num_head) if num_head else 0
        return Pass(kind, rows, wanted, update, head_shape=head_shape, store=store, view=view, burst=burst)

    def _noisy(self, vocab_size: int) -> NoisyTopKWanted:
        return NoisyTopKWanted(_ints(self.noisy.rows), min(self.noisy_k, vocab_size), self.noisy.own_noise())


@dataclass(slots=True)
class _Followed:
    """Where a sequence of a burst stands in its grammar, and whether it stops where few tokens are left."""

    place: Constraint
    until_narrow: bool


def _allowed_behind(followed: dict[int, _Followed], sequence: int, token_id: int) -> NDArray[np.uint32] | None:
    """Move on in a grammar. What goes wrong ends the rounds: the commit of the token meets it again, and says so."""
    own = followed[sequence]
    try:
        place = own.place.after(token_id)
        allowed = None if place is None else place.allowed
    except Exception:
        return None
    if place is None or allowed is None or place.is_exhausted or (own.until_narrow and is_narrow(allowed)):
        return None
    own.place = place
    return allowed


def _ints(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)
