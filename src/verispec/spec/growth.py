"""Grows drafts in passes of a draft model: one pass per level, for all sequences and branches together.

Rows read the K/V of committed tokens and write only leased slots: node i of a draft uses the slot behind the pending
ones that its verification will use too. Nodes of the last level are never computed. For rule `match` children are drawn
with the target's own noise, which makes them likely to be the target's draws too. For p/q rules the noise is fresh,
one stream per parent and round, and the distributions drawn from are kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from verispec.backends.cost import CostTable
from verispec.backends.pass_builder import DraftRule, PassBuilder
from verispec.backends.protocol import FULL_VIEW, Backend, PassKind, PassResult, Ticket, Tree, View
from verispec.kv import TARGET_STORE
from verispec.sampling.beam import NOBODY, Paths, ranking, root
from verispec.sampling.constraint import Constraint
from verispec.sampling.draw import NoisyTopK
from verispec.sampling.noise import Domain, stream
from verispec.spec.tree import TreeShape
from verispec.spec.turn import Turn
from verispec.types import NO_PARENT, Draft, Proposal, Stored

Exit = Callable[[float], bool]


def never(probability: float) -> bool:
    """The exit that no token takes."""
    return False


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What drafts: a view of the model behind `store`, and T(M, context) of its passes.

    `kind` and `fit`, the shape for a number of rows, are those of fast passes; tests draft in canonical ones. With
    `only_drafts` its passes run on cheaper weights, where the backend has them.
    """

    backend: Backend
    cost: CostTable
    view: View = FULL_VIEW
    store: int = TARGET_STORE
    kind: PassKind = PassKind.FAST
    fit: Callable[[int], int] | None = None
    only_drafts: bool = False

    @property
    def is_target(self) -> bool:
        """Whether it is the whole target: a chain of its own tokens is a window."""
        return self.store == TARGET_STORE and self.view == FULL_VIEW

    def shape(self, num_rows: int) -> int:
        return self.cost.fast_shape(num_rows) if self.fit is None else self.fit(num_rows)

    def first_row(self, turn: Turn) -> int:
        """The first committed position that this model has to compute; the target's own store lacks the last alone."""
        known = len(turn.sequence.token_ids) - 1
        return known if self.store == TARGET_STORE else min(known, turn.store_lens[self.store])

    def rule(self, shape: TreeShape, least_probability: float, *, by_probability: bool = False) -> DraftRule:
        """How a backend drafts with it: chains end behind a token less likely than that."""
        least = math.log(least_probability) if least_probability > 0 and shape.is_chain else -math.inf
        tree = None if shape.is_chain else Tree(shape.branching, shape.keep, shape.kind == "beam")
        return DraftRule(
            self.store, self.view, self.kind, self.shape, least, tree, only_drafts=self.only_drafts,
            by_probability=by_probability,
        )  # fmt: skip

    def submit(self, builder: PassBuilder) -> Ticket:
        builder.send_masks(self.backend)
        pass_ = builder.build(
            self.kind, self.shape, vocab_size=self.backend.limits.vocab_size, store=self.store, view=self.view
        )
        return self.backend.submit(replace(pass_, only_drafts=self.only_drafts))


class _Child(NamedTuple):
    """A token offered under a node."""

    parent: int
    token_id: int
    probability: float


@dataclass(slots=True)
class _Growth:
    """A draft under way. `paths` are those of the frontier, in its order, for a beam."""

    turn: Turn
    shape: TreeShape
    stops: Exit
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [NO_PARENT])  # nodes whose children come next
    paths: Paths = field(default_factory=root)
    computed: set[int] = field(default_factory=set)  # nodes that had a row: not those that end the sequence
    places: dict[int, Constraint] = field(default_factory=dict)  # of the frontier, under a constraint

    def __post_init__(self) -> None:
        if self.turn.sequence.constraint is not None:
            self.places = {NO_PARENT: self.turn.sequence.constraint}

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        found = []
        while node != NO_PARENT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def slot(self, node: int) -> int:
        return self.turn.slots[self.turn.num_pending + node]

    def add(self, children: Sequence[_Child], paths: Paths | None) -> None:
        """Hang a level into the tree; the next one grows under those that do not end it."""
        stopping_ids = self.turn.sequence.stopping_ids
        self.computed.update(node for node in self.frontier if node != NO_PARENT)
        self.frontier, going = [], []
        before, self.places = self.places, {}
        for i, child in enumerate(children):
            place = before[child.parent].after(child.token_id) if before else None
            self.token_ids.append(child.token_id)
            self.parents.append(child.parent)
            self.probabilities.append(child.probability)
            ends = child.token_id in stopping_ids or (before and (place is None or place.is_exhausted))
            if not ends and not (self.shape.is_chain and self.stops(child.probability)):
                self.frontier.append(len(self.token_ids) - 1)
                going.append(i)
                if place is not None:
                    self.places[self.frontier[-1]] = place
        if paths is not None:
            self.paths = Paths(paths.phi[going], paths.log_tau[going])

    def draft(self, store: int) -> Draft:
        committed_len = len(self.turn.sequence.token_ids)
        return Draft(
            tuple(self.token_ids),
            tuple(self.parents),
            tuple(self.probabilities),
            tuple(self.proposals),
            None if store == TARGET_STORE else Stored(store, committed_len, frozenset(self.computed)),
        )


def grow(model: DraftModel, turns: Sequence[Turn], shapes: Sequence[TreeShape], stops: Sequence[Exit]) -> list[Draft]:
    """One draft per turn, of its shape; a chain also ends behind a token whose raw probability stops it.

    The model's first pass computes what its store lacks of the committed tokens.
    """
    growths = [_Growth(*made) for made in zip(turns, shapes, stops, strict=True)]
    for level in range(max((shape.depth for shape in shapes), default=0)):
        live = [g for g in growths if g.frontier and level < g.shape.depth]
        if not live:
            break
        builder = PassBuilder()
        firsts = [_add_frontier(builder, growth, level, model) for growth in live]
        result = model.submit(builder).result()
        for growth, (first, first_shown) in zip(live, firsts, strict=True):
            growth.turn.num_draft_passes += 1
            if growth.turn.sequence.uses_probabilities:  # it is judged by what its children are drawn from
                rows = enumerate(growth.frontier, first_shown)
                growth.proposals += [Proposal(node, result.distribution, row) for row, node in rows]
            children, paths = _children(growth, level, result, slice(first, first + len(growth.frontier)))
            growth.add(children, paths)
    return [g.draft(model.store) for g in growths]


def compute(model: DraftModel, parts: Sequence[tuple[Turn, range]]) -> Ticket:
    """Start to compute committed positions in the model's own store, without drafting."""
    builder = PassBuilder()
    for turn, positions in parts:
        _add_committed(builder, turn, positions)
        turn.num_draft_passes += 1
    return model.submit(builder)


def _add_committed(builder: PassBuilder, turn: Turn, positions: range) -> int:
    """Add rows of committed tokens; returns the last one's index."""
    builder.update_table(turn.seq_row, turn.table_start, turn.table_slots)
    tokens, held, leased = turn.sequence.token_ids, turn.sequence.slots, turn.slots
    slots = [held[p] if p < turn.start else leased[p - turn.start] for p in positions]
    builder.add_chain(turn.seq_row, positions.start, tokens[positions.start : positions.stop], slots)
    return len(builder) - 1


def _add_frontier(builder: PassBuilder, growth: _Growth, level: int, model: DraftModel) -> tuple[int, int]:
    """Add the rows of the nodes whose children are wanted. Chains draw, trees take the k best.

    Returns where its results begin among those of its kind, and where its distributions do.
    """
    turn, sequence = growth.turn, growth.turn.sequence
    committed_len = len(sequence.token_ids)
    wish = builder.draw if growth.shape.is_chain else builder.noisy
    first, first_shown = len(wish.rows), len(builder.shown_rows)
    for node in growth.frontier:
        path = growth.path(node)
        if path:
            tail = [growth.slot(i) for i in path]
            row = builder.add_node(turn.seq_row, committed_len + level - 1, growth.token_ids[node], tail)
        else:
            row = _add_committed(builder, turn, range(model.first_row(turn), committed_len))
        wish.rows.append(row)
        if growth.places:
            builder.masked.append((row, growth.places[node].allowed))
        if sequence.uses_probabilities:
            wish.noise.append((committed_len, stream(Domain.DRAFT, 1 + node)))
            builder.shown_rows.append(row)
        else:
            wish.noise.append((committed_len + len(path), stream(Domain.TOKEN)))
    if not growth.shape.is_chain:
        builder.noisy_k = max(builder.noisy_k, growth.shape.branching[level])
    return first, first_shown


def _children(growth: _Growth, level: int, result: PassResult, rows: slice) -> tuple[list[_Child], Paths | None]:
    """The next level of a draft, in the order of its rows; of a beam also its paths."""
    if growth.shape.is_chain:
        assert result.draw is not None
        tokens, logprobs = result.draw.token_ids[rows], result.draw.logprobs[rows]
        return _existing(growth.frontier, tokens[:, None], logprobs[:, None]), None
    assert result.noisy_top_k is not None
    offered = NoisyTopK(*(part[rows, : growth.shape.branching[level]] for part in result.noisy_top_k))
    if growth.shape.kind == "beam":
        return _beam(growth, offered, growth.shape.keep[level])
    return _existing(growth.frontier, offered.token_ids, offered.logprobs), None


def _existing(parents: Sequence[int], token_ids: np.ndarray, logprobs: np.ndarray) -> list[_Child]:
    """All children that there are, parent by parent, in the order drawn."""
    listed = zip(parents, token_ids.tolist(), np.exp(logprobs).tolist(), strict=True)
    return [
        _Child(node, token_id, probability)
        for node, ids, values in listed
        for token_id, probability in zip(ids, values, strict=True)
        if token_id >= 0
    ]


def _beam(growth: _Growth, offered: NoisyTopK, width: int) -> tuple[list[_Child], Paths]:
    sequence = growth.turn.sequence
    rank = ranking(is_greedy=not sequence.params.temperature, by_probability=sequence.uses_probabilities)
    kept = rank(growth.paths, offered, width=width)
    there = np.flatnonzero(kept.parents != NOBODY)
    at = kept.parents[there], kept.ranks[there]
    tokens, probabilities = offered.token_ids[at].tolist(), np.exp(offered.logprobs[at]).tolist()
    children = [
        _Child(growth.frontier[parent], token_id, probability)
        for parent, token_id, probability in zip(at[0].tolist(), tokens, probabilities, strict=True)
    ]
    return children, Paths(kept.paths.phi[there], kept.paths.log_tau[there])
