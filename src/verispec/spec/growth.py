"""Grows drafts in passes of a draft model: one pass per level, for all sequences and branches together.

Rows read the K/V of committed tokens and write only leased slots: node i of a draft uses the slot behind the pending
ones that its verification will use too. Nodes of the last level are never computed. Children are drawn with the
target's own noise, which makes them likely to be the target's draw too.
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
from verispec.sampling.rows import SamplingRowsBuilder
from verispec.spec.plan import SequencePlan
from verispec.spec.tree import TreeShape
from verispec.types import NO_PARENT, Draft

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


class _Child(NamedTuple):
    """A token offered under a node."""

    token_id: int
    probability: float


@dataclass(slots=True)
class _Growth:
    """A draft under way."""

    plan: SequencePlan
    shape: TreeShape
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [NO_PARENT])  # nodes whose children come next

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

    def add(self, children: Sequence[tuple[int, _Child]], stops: Exit) -> None:
        """Hang (parent, child) pairs into the tree; the next level grows under those that do not end it."""
        self.frontier = []
        stopping_ids = self.plan.sequence.stopping_ids
        for parent, child in children:
            self.token_ids.append(child.token_id)
            self.parents.append(parent)
            self.probabilities.append(child.probability)
            if child.token_id not in stopping_ids and not stops(child.probability):
                self.frontier.append(len(self.token_ids) - 1)

    def draft(self) -> Draft:
        """What has grown."""
        return Draft(tuple(self.token_ids), tuple(self.parents), tuple(self.probabilities))


def grow(
    model: DraftModel, plans: Sequence[SequencePlan], shapes: Sequence[TreeShape], *, stops: Exit = never
) -> list[Draft]:
    """One draft per plan, of its shape; a chain also ends behind a token whose raw probability `stops` it.

    The sequences' committed tokens must all be computed in the model's store but for the last.
    """
    growths = [_Growth(p, shape) for p, shape in zip(plans, shapes, strict=True)]
    for level in range(max((shape.depth for shape in shapes), default=0)):
        live = [g for g in growths if g.frontier and level < g.shape.depth]
        if not live:
            break
        builder = _LevelBuilder(model.backend.limits.vocab_size)
        for growth in live:
            builder.add(growth, level)
            growth.plan.sequence.stats.draft_passes += 1
        result = model.backend.submit(builder.build(model)).result()
        for growth, offered in zip(live, builder.children(live, level, result), strict=True):
            growth.add(offered, stops if growth.shape.is_chain else never)
    return [g.draft() for g in growths]


@dataclass(slots=True)
class _LevelBuilder:
    """The rows of one level: the nodes whose children are wanted. Chains draw, trees take the k best."""

    vocab_size: int
    rows: RowsBuilder = field(default_factory=RowsBuilder)
    drawn: tuple[list[int], SamplingRowsBuilder] = field(default_factory=lambda: ([], SamplingRowsBuilder()))
    branched: tuple[list[int], SamplingRowsBuilder] = field(default_factory=lambda: ([], SamplingRowsBuilder()))
    most_children: int = 0
    updates: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, growth: _Growth, level: int) -> None:
        """Add the rows of one draft's frontier."""
        plan, committed_len = growth.plan, len(growth.plan.sequence.token_ids)
        if not level:
            self.updates += [(plan.seq_row, plan.table_start + i, slot) for i, slot in enumerate(plan.table_slots)]
        for node in growth.frontier:
            path = growth.path(node)
            row = self.rows.add(
                token_id=growth.token_ids[node] if path else plan.sequence.token_ids[-1],
                position=committed_len + level - 1,
                slot=growth.slot(node) if path else plan.lease.slots[plan.num_pending - 1],
                seq_row=plan.seq_row,
                prefix_len=committed_len,
                tail=tuple(map(growth.slot, path)),
            )
            if not growth.shape.is_chain:
                self.most_children = max(self.most_children, growth.shape.branching[level])
            self._want(self.drawn if growth.shape.is_chain else self.branched, growth, row, path)

    def _want(
        self, wanted: tuple[list[int], SamplingRowsBuilder], growth: _Growth, row: int, path: Sequence[int]
    ) -> None:
        sequence, (rows, sampling) = growth.plan.sequence, wanted
        rows.append(row)
        sampling.add(
            sequence.params,
            sequence.sample_key,
            t=len(sequence.token_ids) + len(path),
            history=sequence.history(),
            path_ids=tuple(growth.token_ids[i] for i in path),
            stopping_ids=sequence.stopping_ids,
            vocab_size=self.vocab_size,
        )

    def build(self, model: DraftModel) -> Pass:
        """The pass of this level."""
        ints, update = np.int32, np.array(self.updates, np.int32).reshape(-1, 3)
        k = min(self.most_children, self.vocab_size)
        wanted = Wanted(
            draw=DrawWanted(np.array(self.drawn[0], ints), self.drawn[1].build()) if self.drawn[0] else None,
            noisy_top_k=NoisyTopKWanted(np.array(self.branched[0], ints), k, self.branched[1].build())
            if self.branched[0]
            else None,
        )
        shape = model.shape(len(self.rows))
        table_update = TableUpdate(update[:, 0], update[:, 1], update[:, 2])
        rows = self.rows.build(shape)
        return Pass(model.kind, rows, wanted, table_update, head_shape=shape, store=model.store, view=model.view)

    def children(self, live: Sequence[_Growth], level: int, result: PassResult) -> Iterator[list[tuple[int, _Child]]]:
        """What each draft's nodes are offered, in the order of `add`."""
        next_drawn = next_branched = 0
        for growth in live:
            count, offered = len(growth.frontier), []
            if growth.shape.is_chain:
                assert result.draw is not None
                for i, node in enumerate(growth.frontier, start=next_drawn):
                    token_id = int(result.draw.token_ids[i])
                    if token_id >= 0:
                        offered.append((node, _Child(token_id, float(np.exp(result.draw.logprobs[i])))))
                next_drawn += count
            else:
                assert result.noisy_top_k is not None
                for i, node in enumerate(growth.frontier, start=next_branched):
                    ids, _, logprobs = (part[i, : growth.shape.branching[level]] for part in result.noisy_top_k)
                    offered += [
                        (node, _Child(int(t), float(np.exp(p)))) for t, p in zip(ids, logprobs, strict=True) if t >= 0
                    ]
                next_branched += count
            yield offered
