"""Trees that sequences of a burst draft, by passes of the host's: the counterpart of chains in `rounds.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.pass_builder import padded
from verispec.backends.protocol import (
    NO_UPDATE,
    DistributionWanted,
    Drafting,
    NoisyTopKWanted,
    Pass,
    PassResult,
    TableUpdate,
    Tree,
    Wanted,
)
from verispec.backends.resident import Fed, Resident
from verispec.backends.weighing import Offered, draft_noise
from verispec.sampling.beam import NOBODY, Paths, Ranking, ranking, root
from verispec.sampling.draw import NO_TOKEN, NoisyTopK
from verispec.types import NO_PARENT

Ints = NDArray[np.int64]


class Drafts(NamedTuple):
    """What the sequences of a burst have drafted in one round, by places."""

    token_ids: Ints  # [S, K], NO_TOKEN where nothing was drafted
    parents: Ints  # the same: places; chains are trees, too
    is_tree: NDArray[np.bool_]  # [S]
    offered: list[Offered]  # what it was drawn from, where probabilities judge it

    @classmethod
    def none(cls, num_sequences: int, most: int, parts: tuple[Drafting, ...]) -> "Drafts":
        shape, is_tree = (num_sequences, most), np.zeros(num_sequences, np.bool_)
        for part in parts:
            is_tree[part.sequences] = part.tree is not None
        parents = np.tile(np.arange(most) - 1, (num_sequences, 1))
        return cls(np.full(shape, NO_TOKEN, np.int64), parents, is_tree, [])

    def path_to(self, sequence: int, place: int) -> list[int]:
        """Places from the root's child down."""
        found = []
        while place != NO_PARENT:
            found.append(place)
            place = int(self.parents[sequence, place])
        return found[::-1]

    def nodes_at(self, sequence: int, places: list[int]) -> Ints:
        """Their numbers among the nodes, places that were left free not counted."""
        is_node = self.token_ids[sequence] >= 0
        return np.array([is_node[:place].sum() if place != NO_PARENT else NO_PARENT for place in places], np.int64)

    def accepted(self, sequence: int, draws: Ints) -> list[int]:
        """The path that the target drew itself; `draws[0]` follows the last token, `draws[1 + i]` place i."""
        found, drawn, last = list[int](), int(draws[0]), NO_PARENT
        nodes = zip(self.token_ids[sequence].tolist(), self.parents[sequence].tolist(), strict=True)
        for place, (token, parent) in enumerate(nodes):
            if parent == last and token == drawn >= 0:
                found.append(place)
                drawn, last = int(draws[1 + place]), place
        return found


class _Front(NamedTuple):
    """Places whose children come next, and of a beam the paths to them."""

    places: list[int]
    paths: Paths


def grow(
    resident: Resident, part: Drafting, fed: Fed, live: NDArray[np.int32], depths: Ints, drafts: Drafts,
    run: Callable[[Pass], PassResult],
) -> None:  # fmt: skip
    """The trees of these sequences, one pass for each level, of up to `depths` levels for each of the burst's."""
    tree = part.tree
    assert tree is not None
    fronts, first = {int(s): _Front([NO_PARENT], root()) for s in live}, 0
    for level, keep in enumerate(tree.keep):
        if not fronts:
            return
        result = run(resident.take(_level(resident, part, fed, fronts, drafts, level)))
        offered, shown = result.noisy_top_k, result.distribution
        assert offered is not None
        at, going = 0, {}
        for s, front in fronts.items():
            own = NoisyTopK(*(values[at : at + len(front.places)] for values in offered))
            if shown is not None:
                drafts.offered.extend(Offered(s, place, shown, row) for row, place in enumerate(front.places, at))
            at += len(front.places)
            rank = ranking(is_greedy=resident.is_greedy(int(fed.seq_rows[s])), by_probability=part.by_probability)
            left = _hang(drafts, s, front, own, tree, level, first, rank)
            t = np.full(len(left.places), fed.t[s] + 1 + level)
            ids = drafts.token_ids[s, left.places]
            goes_on = np.flatnonzero(resident.goes_on(Fed(np.repeat(fed.seq_rows[s], len(t)), ids, t)))
            if len(goes_on) and level + 1 < depths[s]:
                paths = Paths(*(values[goes_on] for values in left.paths)) if tree.is_beam else left.paths
                going[s] = _Front([left.places[i] for i in goes_on], paths)
        fronts, first = going, first + keep


def _hang(
    drafts: Drafts, s: int, front: _Front, offered: NoisyTopK, tree: Tree, level: int, first: int, rank: Ranking
) -> _Front:
    """The next level of a tree, whose places begin at `first`."""
    width = tree.keep[level]
    if tree.is_beam:
        kept = rank(front.paths, offered, width=width)
        there = np.flatnonzero(kept.parents != NOBODY)
        of, ranks = kept.parents[there], kept.ranks[there]
        places, paths = first + there, Paths(*(values[there] for values in kept.paths))
    else:
        of, ranks = np.nonzero(offered.token_ids != NO_TOKEN)
        before = np.array(front.places) - (first - tree.keep[level - 1] if level else NO_PARENT)
        places, paths = first + before[of] * tree.branching[level] + ranks, front.paths
    drafts.token_ids[s, places] = offered.token_ids[of, ranks]
    drafts.parents[s, places] = np.array(front.places)[of]
    return _Front(places.tolist(), paths)


def _level(resident: Resident, part: Drafting, fed: Fed, fronts: dict[int, _Front], drafts: Drafts, level: int) -> Pass:
    """The pass that finds the children of all these places."""
    builder, asked, t_of, nodes = _Rows(resident.table), list[int](), list[int](), list[Ints]()
    for s, front in fronts.items():
        t_of += [int(fed.t[s])] * len(front.places)
        nodes.append(drafts.nodes_at(s, front.places))
        seq_row, t = int(fed.seq_rows[s]), int(fed.t[s])
        if level:
            for place in front.places:
                asked.append(builder.add_node(seq_row, t, int(drafts.token_ids[s, place]), drafts.path_to(s, place)))
        else:
            for p in range(t + 1 - part.first_rows, t):
                builder.add(seq_row, p, int(resident.slot_tokens[resident.table[seq_row, p]]))
            asked.append(builder.add(seq_row, t, int(fed.token_ids[s])))
    assert part.tree is not None
    rows = padded(*builder.columns, shape=part.shape if level else part.first_shape, tails=builder.tails)
    at, noise = np.array(asked, np.int32), None
    if part.by_probability:
        noise = draft_noise(np.array(t_of), np.concatenate(nodes))
    wanted = Wanted(
        noisy_top_k=NoisyTopKWanted(at, part.tree.branching[level], noise),
        distribution=DistributionWanted(at) if part.by_probability else None,
    )
    return Pass(
        part.kind, rows, wanted, NO_UPDATE, head_shape=part.shape, store=part.store, view=part.view,
        only_drafts=part.only_drafts,
    )  # fmt: skip


class _Rows:
    """Rows of a pass: tokens, positions, slots and rows of the table."""

    def __init__(self, table: NDArray[np.int32]) -> None:
        self._table = table
        self.columns: tuple[list[int], ...] = ([], [], [], [])
        self.tails: list[tuple[int, list[int]]] = []

    def add(self, seq_row: int, position: int, token_id: int, slot: int | None = None) -> int:
        slot = int(self._table[seq_row, position]) if slot is None else slot
        for column, value in zip(self.columns, (token_id, position, slot, seq_row), strict=True):
            column.append(value)
        return len(self.columns[0]) - 1

    def add_node(self, seq_row: int, t: int, token_id: int, path: list[int]) -> int:
        """A node of a tree behind position t; `path` are its places."""
        tail = self._table[seq_row, t + 1 + np.array(path)].tolist()
        row = self.add(seq_row, t + len(path), token_id, tail[-1])
        self.tails.append((row, tail))
        return row


def placed(
    resident: Resident, fed: Fed, drafts: Drafts, sequence: Ints, column: Ints
) -> tuple[Ints, list[tuple[int, list[int]]]]:
    """Positions and tails of the rows that verify: row 0 of a sequence is its last token, row 1 + i its place i."""
    positions, tails = fed.t[sequence] + column, []
    for row in np.flatnonzero(drafts.is_tree[sequence] & (column > 0)):
        s = int(sequence[row])
        path = drafts.path_to(s, int(column[row]) - 1)
        positions[row] = fed.t[s] + len(path)
        tails.append((int(row), resident.table[fed.seq_rows[s], fed.t[s] + 1 + np.array(path)].tolist()))
    return positions, tails


class Settling:
    """Accepted paths of trees: their slots change places with those of their positions, in the table of the host, and
    in the backend's by the next pass that `run` gets."""

    def __init__(self, resident: Resident, run: Callable[[Pass], PassResult]) -> None:
        self._resident, self._run = resident, run
        self.update = NO_UPDATE  # what the backend's table lacks

    def __call__(self, pass_: Pass) -> PassResult:
        """Run a pass that brings no entries of the table itself."""
        pass_, self.update = replace(pass_, table_update=self.update), NO_UPDATE
        return self._run(pass_)

    def settle(self, fed: Fed, drafts: Drafts, draws: Ints, going: NDArray[np.bool_], most: Ints) -> tuple[Ints, Ints]:
        """What was drafted along accepted paths, and in which order the draws are along them. [S, K] and [S, 1 + K]

        No more than `most` of each draft is accepted.
        """
        along, order = drafts.token_ids.copy(), np.tile(np.arange(draws.shape[1]), (len(draws), 1))
        along[np.arange(along.shape[1]) >= most[:, None]] = NO_TOKEN
        for s in np.flatnonzero(drafts.is_tree & going).tolist():
            path, seq_row, start = drafts.accepted(s, draws[s])[: most[s]], int(fed.seq_rows[s]), int(fed.t[s]) + 1
            along[s] = NO_TOKEN
            along[s, : len(path)] = drafts.token_ids[s, path]
            order[s, 1 : 1 + len(path)] = 1 + np.array(path, np.int64)
            slots = self._resident.table[seq_row, start:]
            for i, place in enumerate(path):
                slots[[i, place]] = slots[[place, i]]
            moved = np.arange(path[-1] + 1 if path else 0, dtype=np.int32)
            here = TableUpdate(np.full(len(moved), seq_row, np.int32), start + moved, slots[moved])
            self.update = self.update.followed_by(here)
        return along, order
