"""Grows drafts in passes of a draft model: one pass per level, for all sequences and branches together.

Rows read the K/V of committed tokens and write only leased slots: node i of a draft uses the slot behind the pending
ones that its verification will use too. Nodes of the last level are never computed. For rule `match` children are drawn
with the target's own noise, which makes them likely to be the target's draws too. For p/q rules the noise is fresh,
one stream per parent and round, and the distributions drawn from are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from verispec.backends.cost import CostTable
from verispec.backends.protocol import (
    FULL_VIEW,
    Backend,
    DistributionWanted,
    DrawWanted,
    NoisyTopKWanted,
    Pass,
    PassKind,
    PassResult,
    RowsBuilder,
    TableUpdate,
    View,
    Wanted,
)
from verispec.kv import TARGET_STORE
from verispec.sampling.beam import NOBODY, Paths, greedy_level, race_level, root
from verispec.sampling.draw import NoisyTopK
from verispec.sampling.noise import Domain, stream
from verispec.sampling.rows import SamplingRows, SamplingRowsBuilder
from verispec.spec.plan import SequencePlan
from verispec.tree import TreeShape
from verispec.types import NO_PARENT, Draft, Proposal, Stored

Exit = Callable[[float], bool]


def never(probability: float) -> bool:
    """The exit that no token takes."""
    return False


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What drafts: a view of the model behind `store`, and T(M, context) of its passes.

    `kind` and `fit`, the shape for a number of rows, are those of fast passes; tests draft in canonical ones.
    """

    backend: Backend
    cost: CostTable
    view: View = FULL_VIEW
    store: int = TARGET_STORE
    kind: PassKind = PassKind.FAST
    fit: Callable[[int], int] | None = None

    def shape(self, num_rows: int) -> int:
        """The shape of a pass of so many rows."""
        return self.cost.fast_shape(num_rows) if self.fit is None else self.fit(num_rows)

    def first_row(self, plan: SequencePlan) -> int:
        """The first committed position that this model has to compute; the target's own store lacks the last alone."""
        known = len(plan.sequence.token_ids) - 1
        return known if self.store == TARGET_STORE else min(known, plan.store_lens[self.store])


class _Child(NamedTuple):
    """A token offered under a node."""

    parent: int
    token_id: int
    probability: float


@dataclass(slots=True)
class _Growth:
    """A draft under way. `paths` are those of the frontier, in its order, for a beam."""

    plan: SequencePlan
    shape: TreeShape
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [NO_PARENT])  # nodes whose children come next
    paths: Paths = field(default_factory=root)
    computed: set[int] = field(default_factory=set)  # nodes that had a row: not those that end the sequence

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        found = []
        while node != NO_PARENT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def slot(self, node: int) -> int:
        """The leased slot of a node."""
        return self.plan.lease.slots[self.plan.num_pending + node]

    def add(self, children: Sequence[_Child], paths: Paths | None, stops: Exit) -> None:
        """Hang a level into the tree; the next one grows under those that do not end it."""
        stopping_ids = self.plan.sequence.stopping_ids
        self.computed.update(node for node in self.frontier if node != NO_PARENT)
        self.frontier, going = [], []
        for i, child in enumerate(children):
            self.token_ids.append(child.token_id)
            self.parents.append(child.parent)
            self.probabilities.append(child.probability)
            if child.token_id not in stopping_ids and not stops(child.probability):
                self.frontier.append(len(self.token_ids) - 1)
                going.append(i)
        if paths is not None:
            self.paths = Paths(paths.phi[going], paths.log_tau[going])

    def draft(self, store: int) -> Draft:
        """What has grown."""
        committed_len = len(self.plan.sequence.token_ids)
        return Draft(
            tuple(self.token_ids),
            tuple(self.parents),
            tuple(self.probabilities),
            tuple(self.proposals),
            None if store == TARGET_STORE else Stored(store, committed_len, frozenset(self.computed)),
        )


def grow(
    model: DraftModel, plans: Sequence[SequencePlan], shapes: Sequence[TreeShape], *, stops: Exit = never
) -> list[Draft]:
    """One draft per plan, of its shape; a chain also ends behind a token whose raw probability `stops` it.

    The model's first pass computes what its store lacks of the committed tokens.
    """
    growths = [_Growth(p, shape) for p, shape in zip(plans, shapes, strict=True)]
    for level in range(max((shape.depth for shape in shapes), default=0)):
        live = [g for g in growths if g.frontier and level < g.shape.depth]
        if not live:
            break
        builder = _LevelBuilder(model.backend.limits.vocab_size)
        for growth in live:
            builder.add(growth, level, model)
            growth.plan.sequence.stats.draft_passes += 1
        result = model.backend.submit(builder.build(model)).result()
        builder.note_proposals(live, result)
        for growth, (children, paths) in zip(live, builder.children(live, level, result), strict=True):
            growth.add(children, paths, stops if growth.shape.is_chain else never)
    return [g.draft(model.store) for g in growths]


def compute(model: DraftModel, parts: Sequence[tuple[SequencePlan, range]]) -> None:
    """Compute committed positions in the model's own store, without drafting."""
    builder = _LevelBuilder(model.backend.limits.vocab_size)
    for plan, positions in parts:
        builder.add_committed(plan, positions)
        plan.sequence.stats.draft_passes += 1
    model.backend.submit(builder.build(model)).result()


class _Asked:
    """Rows that want one kind of result, and their sampling inputs."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._sampling = SamplingRowsBuilder()

    def add(self, growth: _Growth, row: int, node: int, path: Sequence[int], vocab_size: int) -> None:
        sequence = growth.plan.sequence
        committed_len = len(sequence.token_ids)
        own_noise = sequence.uses_probabilities
        self.rows.append(row)
        self._sampling.add(
            sequence.params,
            sequence.sample_key,
            t=committed_len if own_noise else committed_len + len(path),
            history=sequence.history(),
            path_ids=tuple(growth.token_ids[i] for i in path),
            stopping_ids=sequence.stopping_ids,
            vocab_size=vocab_size,
            stream=stream(Domain.DRAFT, 1 + node) if own_noise else 0,
        )

    def build(self) -> tuple[np.ndarray, SamplingRows]:
        return np.array(self.rows, np.int32), self._sampling.build()


@dataclass(slots=True)
class _LevelBuilder:
    """The rows of one level: the nodes whose children are wanted. Chains draw, trees take the k best."""

    vocab_size: int
    rows: RowsBuilder = field(default_factory=RowsBuilder)
    drawn: _Asked = field(default_factory=_Asked)
    branched: _Asked = field(default_factory=_Asked)
    proposed: _Asked = field(default_factory=_Asked)
    most_children: int = 0
    updates: list[tuple[int, int, int]] = field(default_factory=list)

    def add_committed(self, plan: SequencePlan, positions: range) -> int:
        """Add rows of committed tokens; returns the last one's index."""
        self.updates += [(plan.seq_row, plan.table_start + i, slot) for i, slot in enumerate(plan.table_slots)]
        row = -1
        for position in positions:
            leased = position - plan.start
            row = self.rows.add(
                token_id=plan.sequence.token_ids[position],
                position=position,
                slot=plan.lease.slots[leased] if leased >= 0 else plan.sequence.slots[position],
                seq_row=plan.seq_row,
                prefix_len=position + 1,
            )
        return row

    def add(self, growth: _Growth, level: int, model: DraftModel) -> None:
        """Add the rows of one draft's frontier."""
        plan, committed_len = growth.plan, len(growth.plan.sequence.token_ids)
        chains = growth.shape.is_chain
        for node in growth.frontier:
            path = growth.path(node)
            if path:
                row = self.rows.add(
                    token_id=growth.token_ids[node],
                    position=committed_len + level - 1,
                    slot=growth.slot(node),
                    seq_row=plan.seq_row,
                    prefix_len=committed_len,
                    tail=tuple(map(growth.slot, path)),
                )
            else:
                row = self.add_committed(plan, range(model.first_row(plan), committed_len))
            (self.drawn if chains else self.branched).add(growth, row, node, path, self.vocab_size)
            if plan.sequence.uses_probabilities:
                self.proposed.add(growth, row, node, path, self.vocab_size)
        if not chains:
            self.most_children = max(self.most_children, growth.shape.branching[level])

    def build(self, model: DraftModel) -> Pass:
        """The pass of this level."""
        update = np.array(self.updates, np.int32).reshape(-1, 3)
        wanted = Wanted()
        if self.drawn.rows or self.branched.rows:
            noisy_rows, sampling = self.branched.build()
            k = min(self.most_children, self.vocab_size)
            wanted = Wanted(
                draw=DrawWanted(*self.drawn.build()) if self.drawn.rows else None,
                noisy_top_k=NoisyTopKWanted(noisy_rows, k, sampling) if self.branched.rows else None,
                distribution=DistributionWanted(*self.proposed.build()) if self.proposed.rows else None,
            )
        num_head = len(wanted.head_rows())
        return Pass(
            model.kind,
            self.rows.build(model.shape(len(self.rows))),
            wanted,
            TableUpdate(update[:, 0], update[:, 1], update[:, 2]),
            head_shape=model.shape(num_head) if num_head else 0,
            store=model.store,
            view=model.view,
        )

    def note_proposals(self, live: Sequence[_Growth], result: PassResult) -> None:
        """Keep the distributions that children are drawn from, for those who are judged by them."""
        row = 0
        for growth in live:
            if growth.plan.sequence.uses_probabilities:
                for node in growth.frontier:
                    growth.proposals.append(Proposal(node, result.distribution, row))
                    row += 1

    def children(
        self, live: Sequence[_Growth], level: int, result: PassResult
    ) -> Iterator[tuple[list[_Child], Paths | None]]:
        """The next level of each draft, in the order of `add`; of a beam also its paths."""
        next_drawn = next_branched = 0
        for growth in live:
            count = len(growth.frontier)
            if growth.shape.is_chain:
                assert result.draw is not None
                drawn = slice(next_drawn, next_drawn + count)
                next_drawn += count
                tokens, logprobs = result.draw.token_ids[drawn], result.draw.logprobs[drawn]
                yield _existing(growth.frontier, tokens[:, None], logprobs[:, None]), None
                continue
            assert result.noisy_top_k is not None
            rows, k = slice(next_branched, next_branched + count), growth.shape.branching[level]
            next_branched += count
            offered = NoisyTopK(*(part[rows, :k] for part in result.noisy_top_k))
            if growth.shape.kind == "beam":
                yield _beam(growth, offered, growth.shape.keep[level])
            else:
                yield _existing(growth.frontier, offered.token_ids, offered.logprobs), None


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
    """The children that stay in the beam."""
    rank = race_level if growth.plan.sequence.params.temperature else greedy_level
    kept = rank(growth.paths, offered, width=width)
    there = np.flatnonzero(kept.parents != NOBODY)
    at = kept.parents[there], kept.ranks[there]
    tokens, probabilities = offered.token_ids[at].tolist(), np.exp(offered.logprobs[at]).tolist()
    children = [
        _Child(growth.frontier[parent], token_id, probability)
        for parent, token_id, probability in zip(at[0].tolist(), tokens, probabilities, strict=True)
    ]
    return children, Paths(kept.paths.phi[there], kept.paths.log_tau[there])
