"""Drafts by a model that has probabilities: chains, or trees drawn without replacement.

Which model that is, a view of the target or a second one, is the `Source`'s business; drafters `skip` and `model` are
this class with different sources. What it drafts is a hint; what it costs is known, so it drafts where that pays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from verispec.errors import InputError
from verispec.spec.draft_exit import DraftExit
from verispec.spec.drafter import AUTO, Level, Offer
from verispec.spec.growth import DraftModel, compute, grow, never
from verispec.spec.plan import SequencePlan
from verispec.spec.rate import Acceptance
from verispec.tree import MAX_NODES, TreeShape
from verispec.types import Draft, SequenceView, Stored, Verdict

logger = logging.getLogger(__name__)
# What `auto` weighs against a chain.
TREES = tuple(map(TreeShape.parse, ("branch:2", "branch:2,1,1", "branch:3,2,1", "beam:2,3", "beam:3,4", "beam:4,5")))
_DEEPEST_TREE = max(tree.depth for tree in TREES)
_MOST_CAUGHT_UP = 128  # committed tokens that one step computes for the drafter, over all sequences
_CAUGHT_UP_AT_ONCE = 16  # so many are computed in the first pass of a draft
_MOST_REMEMBERED = 256  # offers: requests may name any number of shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafterConfig:
    """The most tokens of a chain; whether chains end early by the adaptive exit; whether to draft in any case."""

    max_draft: int
    exits: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.max_draft < 0:
            raise InputError(f"max_draft must be at least 0, not {self.max_draft}")


@dataclass(frozen=True, slots=True)
class Source:
    """The model that drafts, and what is believed of its acceptance until it is seen: greedily, and sampled."""

    model: DraftModel
    agreement: float
    sampled_agreement: float


class ModelDrafter:
    """`what` names its drafts, `find` gives the source when drafts are first wanted, or why there is none."""

    has_probabilities = True

    def __init__(self, what: str, find: Callable[[], Source | str], config: ModelDrafterConfig) -> None:
        self._what = what
        self._find = find
        self._config = config
        self._exit = DraftExit()
        self._offers: dict[tuple[TreeShape, bool, int, bool, bool], tuple[int, Offer]] = {}

    @cached_property
    def _source(self) -> Source | str:
        try:
            return self._find()
        except Exception as error:  # asked once: what failed would fail again, at every step
            logger.exception("%s cannot draft", self._what)
            return f"{self._what} cannot draft: {error}"

    @cached_property
    def _acceptances(self) -> tuple[Acceptance, Acceptance]:
        """Greedy and sampled."""
        assert isinstance(self._source, Source)
        return Acceptance(self._source.agreement), Acceptance(self._source.sampled_agreement)

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """The tree that was asked for, or a chain; whoever leaves the choice gets trees as alternatives."""
        if isinstance(self._source, str):
            return Offer.nothing(self._source)
        if sequence.computed_len + 1 != len(sequence.token_ids):
            return Offer.nothing("the prompt is not computed yet")
        offered = sequence.tree or TreeShape.chain(self._config.max_draft)
        is_free = sequence.drafter == AUTO and sequence.tree is None
        deepest = min(limit, self._source.model.backend.limits.max_tail, max(offered.depth, is_free * _DEEPEST_TREE))
        acceptance = self._acceptance(sequence)
        is_forced = self._config.force and sequence.drafter != AUTO
        # The same offer again, as the same object, as long as nothing new was learned: it is asked for at every step.
        key = (offered, is_free, deepest, sequence.params.temperature > 0, is_forced)
        known = self._offers.get(key)
        if known is None or known[0] != acceptance.num_observed:
            if len(self._offers) >= _MOST_REMEMBERED:
                self._offers.clear()
            shapes = dict.fromkeys(t.within(MAX_NODES, deepest) for t in ((offered, *TREES) if is_free else (offered,)))
            offer, *others = (self._new_offer(acceptance, shape, is_forced) for shape in shapes)
            known = self._offers[key] = acceptance.num_observed, offer._replace(alternatives=tuple(others))
        return known[1]

    def _new_offer(self, acceptance: Acceptance, shape: TreeShape, is_forced: bool) -> Offer:
        assert isinstance(self._source, Source)
        levels, tokens = [], 1.0
        for depth, (children, count) in enumerate(zip(shape.branching, shape.keep, strict=True)):
            # A beam's slots are shared by all its paths; the one that matters has the better half of them.
            tokens *= acceptance.reach(-(-children // 2) if shape.kind == "beam" and depth else children)
            levels.append(Level(count, tokens))
        return Offer(
            shape.num_nodes,
            acceptance.reach(1),
            cost=self._source.model.cost,
            what=self._what,
            is_forced=is_forced,
            levels=tuple(levels),
            shape=shape,
        )

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """One pass per level, over all sequences that have not taken their exit; laggards catch up first."""
        assert isinstance(self._source, Source)
        model, drafts = self._source.model, [Draft()] * len(plans)
        ready: list[int] = []
        late: list[tuple[int, range]] = []
        room = _MOST_CAUGHT_UP
        for i, plan in enumerate(plans):
            last, first = len(plan.sequence.token_ids) - 1, model.first_row(plan)
            if last - first < _CAUGHT_UP_AT_ONCE:
                ready.append(i)
            elif room:
                late.append((i, range(first, min(last, first + room))))
                room -= len(late[-1][1])
        if late:
            compute(model, [(plans[i], positions) for i, positions in late])
        for i, positions in late:
            plans[i].sequence.stats.no_draft_reason = f"{self._what} is catching up with the prompt"
            drafts[i] = replace(drafts[i], stored=Stored(model.store, positions.stop))
        deepest = model.backend.limits.max_tail
        shapes = [_shape(plans[i], deepest) for i in ready]
        stops = self._exit.stops if self._config.exits else never
        for i, draft in zip(ready, grow(model, [plans[i] for i in ready], shapes, stops=stops), strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Move the acceptance, and for chains the exit, whose state shows in the sequence's counters."""
        self._acceptance(plan.sequence).observe(draft, verdict)
        if self._config.exits and draft.is_chain:
            self._exit.observe(matched=len(verdict.path), drafted=len(draft), most=plan.draft_quota)
            plan.sequence.stats.exit_threshold, plan.sequence.stats.exit_rate = self._exit.gamma, self._exit.rate

    def forget(self, sequence_id: int) -> None:
        """What was learned fades: the next text may be of another kind. The exit's state is carried on."""
        if isinstance(self._source, Source):
            for acceptance in self._acceptances:
                acceptance.fade()

    def _acceptance(self, sequence: SequenceView) -> Acceptance:
        return self._acceptances[sequence.params.temperature > 0]


def _shape(plan: SequencePlan, deepest: int) -> TreeShape:
    """What was granted of the shape that was offered."""
    offered = plan.shape or TreeShape.chain(plan.draft_quota)
    return offered.within(plan.draft_quota, deepest)
