"""Drafts by a model that has probabilities: chains, or trees drawn without replacement.

Which model that is, a view of the target or a second one, is the `Source`'s business; drafters `skip` and `model` are
this class with different sources. What it drafts is a hint; what it costs is known, so it drafts where that pays.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from verispec.backends.protocol import first_draft_rows
from verispec.errors import InputError
from verispec.spec.draft_beliefs import Belief, DraftBeliefs
from verispec.spec.draft_rates import Chain
from verispec.spec.drafter import Curve, Level, NotYet, Refusal
from verispec.spec.growth import DraftModel, compute, grow, never
from verispec.spec.speculation import AUTO
from verispec.spec.tree import MAX_NODES, TreeShape
from verispec.spec.turn import CatchUp, Recipe, SequenceView, Turn
from verispec.types import NO_DRAFT, Draft, Stored

logger = logging.getLogger(__name__)
# What `auto` weighs against a chain.
TREES = tuple(map(TreeShape.parse, ("branch:2", "branch:2,1,1", "branch:3,2,1", "beam:2,3", "beam:3,4", "beam:4,5")))
_MOST_CAUGHT_UP = 128  # committed tokens that one step computes for the drafter, over all sequences
_MOST_CAUGHT_UP_FAR = 2048  # where the host is far from the device: every further step would cost trips
_CAUGHT_UP_AT_ONCE = 16  # committed tokens that the first pass of any draft may compute
_NOT_COMPUTED = "the prompt is not computed yet"


class _Key(NamedTuple):
    """What a sequence asks: its shape of draft (None: a chain), whether others will do, and how it samples; and what is
    believed of its drafts."""

    tree: TreeShape | None
    is_free: bool
    is_sampled: bool
    is_forced: bool
    belief: Belief


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafterConfig:
    """The most tokens of a chain; whether chains end early by the adaptive exit, where nobody asked for a shape;
    whether to draft in any case."""

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


@dataclass(slots=True)
class DraftExit:
    """Adaptive draft exit, as published: stop drafting once the draft is unsure, with a threshold that follows
    acceptance. `gamma` is the threshold on a token's raw draft probability, `rate` the smoothed acceptance that moves
    it: by at most a thousandth a round, so one state serves all sequences.
    """

    gamma: float = 0.6
    rate: float = 0.0
    target: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    gamma_memory: float = 0.9

    def stops(self, probability: float) -> bool:
        """Whether drafting ends behind such a token, which is still verified."""
        return not probability >= self.gamma

    def observe(self, *, matched: int, drafted: int, most: int) -> None:
        """Learn from a round that drafted `drafted` of at most `most` tokens, of which `matched` were accepted."""
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1 - self.rate_memory) * matched / drafted
        if self.rate < self.target:
            wanted = self.gamma + self.step
        elif drafted == most:
            wanted = self.gamma
        else:
            wanted = self.gamma - self.step
        gamma = self.gamma_memory * self.gamma + (1 - self.gamma_memory) * wanted
        self.gamma = min(1.0, max(0.0, gamma))  # beyond these nothing changes, but the way back would be long


class ModelDrafter:
    """`what` names its drafts, `find` gives the source when drafts are first wanted, or why there is none."""

    has_probabilities = True
    has_trees = True
    is_companion = False
    needs_cheap_rows = False

    def __init__(self, what: str, find: Callable[[], Source | str], config: ModelDrafterConfig) -> None:
        self._what = what
        self._find = find
        self._config = config
        self._exit = DraftExit()
        self._beliefs = DraftBeliefs(self._agreements)

    @property
    def version(self) -> int:
        return 0 if isinstance(self._source, str) else self._beliefs.version

    @cached_property
    def _source(self) -> Source | str:
        try:
            return self._find()
        except Exception as error:  # asked once: what failed would fail again, at every step
            logger.exception("%s cannot draft", self._what)
            return f"{self._what} cannot draft: {error}"

    def _agreements(self) -> tuple[float, float]:
        assert isinstance(self._source, Source)
        return self._source.agreement, self._source.sampled_agreement

    def state(self, sequence: SequenceView) -> _Key | Refusal:
        """What it asks for; whoever leaves the choice is offered trees beside the chain. Before its prompt is computed,
        what it will ask for."""
        if isinstance(self._source, str):
            return Refusal(self._source)
        key = self._key(sequence)
        return key if sequence.computed_len + 1 == len(sequence.token_ids) else NotYet.before(key, _NOT_COMPUTED)

    def _key(self, sequence: SequenceView) -> _Key:
        speculation = sequence.speculation
        is_auto = speculation.method == AUTO
        is_free = is_auto and speculation.tree is None
        is_forced = self._config.force and not is_auto
        is_sampled = sequence.params.temperature > 0
        return _Key(speculation.tree, is_free, is_sampled, is_forced, self._beliefs.asked(sequence))

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, _Key)
        assert isinstance(self._source, Source)
        offered = key.tree or TreeShape.chain(self._config.max_draft)
        deepest = self._source.model.backend.limits.max_tail
        shapes = dict.fromkeys(t.within(MAX_NODES, deepest) for t in ((offered, *TREES) if key.is_free else (offered,)))
        return tuple(self._curve(shape, key) for shape in shapes)

    def _exits(self, tree: TreeShape | None) -> bool:
        """Whether chains of a sequence that asks for this shape may end early."""
        return self._config.exits and tree is None

    def _levels(self, shape: TreeShape, key: _Key) -> list[Level]:
        rates, step = self._beliefs.rates(is_sampled=key.is_sampled), key.belief.step
        if shape.is_chain and self._exits(key.tree):
            depths = range(1, 1 + shape.depth)
            return [Level(1, rates.tokens(step, depth), rates.share(step, depth)) for depth in depths]
        levels, tokens = list[Level](), 1.0
        for depth, (children, count) in enumerate(zip(shape.branching, shape.keep, strict=True)):
            reach = rates.reach_below if shape.kind == "beam" and depth else rates.reach
            tokens *= reach(step, children)
            levels.append(Level(count, tokens))
        return levels

    def _curve(self, shape: TreeShape, key: _Key) -> Curve:
        assert isinstance(self._source, Source)
        return Curve(
            tuple(self._levels(shape, key)),
            shape,
            self._source.model.cost,
            is_window=shape.is_chain and self._source.model.is_target,
            is_forced=key.is_forced,
            by_backend=shape.is_chain or self._source.model.backend.limits.trees,
            is_trial=key.belief.is_trial,
            store=self._source.model.store,
            what=self._what,
        )

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Recipe]:
        """One pass per level, over all sequences that have not taken their exit; laggards catch up first.

        Drafts that need nothing of the host are left to the backend. Where the host is far from the device, laggards
        draft in the step that they catch up in, if its rows suffice, and nobody waits for the end of that pass.
        """
        assert isinstance(self._source, Source)
        model = self._source.model
        deepest = model.backend.limits.max_tail
        first_rows = first_draft_rows(model.store)
        drafts: list[Draft | Recipe] = [NO_DRAFT] * len(turns)
        ready: list[int] = []
        behind: list[tuple[Turn, range]] = []
        is_far = model.cost.trip > 0
        room = _MOST_CAUGHT_UP_FAR if is_far else _MOST_CAUGHT_UP
        for i, turn in enumerate(turns):
            last, first = len(turn.sequence.token_ids) - 1, model.first_row(turn)
            is_close = last - first < first_rows  # the first pass of a chain has these rows anyway
            missing = range(first, min(last, first + room))
            if turn.is_resident and first_rows <= last + 1 and (is_close or (is_far and missing.stop == last)):
                drafts[i] = self._recipe(turn, _shape(turn, deepest))
            elif last - first < _CAUGHT_UP_AT_ONCE:
                ready.append(i)
                continue
            elif missing:
                turn.note = f"{self._what} is catching up with the prompt"
                drafts[i] = Draft(stored=Stored(model.store, missing.stop))
            if missing and not is_close:
                behind.append((turn, missing))
                room -= len(missing)
        if behind:
            catch_up = CatchUp(compute(model, behind))
            if not is_far:
                catch_up.wait()
            for turn, _ in behind:
                turn.catch_up = catch_up
        shapes = [_shape(turns[i], deepest) for i in ready]
        stops = [self._exit.stops if self._exits(turns[i].sequence.speculation.tree) else never for i in ready]
        for i, draft in zip(ready, grow(model, [turns[i] for i in ready], shapes, stops), strict=True):
            drafts[i] = draft
        for turn in turns:
            if self._exits(turn.sequence.speculation.tree):
                turn.exit_state = self._exit.gamma, self._exit.rate
        return drafts

    def _recipe(self, turn: Turn, shape: TreeShape) -> Recipe:
        assert isinstance(self._source, Source)
        sequence = turn.sequence
        least = self._exit.gamma if self._exits(sequence.speculation.tree) else 0.0
        rule = self._source.model.rule(shape, least, by_probability=sequence.uses_probabilities)
        return Recipe(shape.num_nodes, rule)

    def observe(self, turn: Turn) -> None:
        """Move what is believed, and for chains the exit."""
        draft, verdict, chain = turn.draft, turn.verdict, None
        assert isinstance(draft, Draft)
        if verdict is not None and len(draft) and draft.is_chain and self._exits(turn.sequence.speculation.tree):
            chain = Chain(len(verdict.path), len(draft), turn.choice.num_nodes)
            self._exit.observe(matched=chain.matched, drafted=chain.drafted, most=chain.most)
            if draft.token_ids[-1] in turn.sequence.stopping_ids:
                chain = chain._replace(most=chain.drafted)  # whether the draft was sure of it nobody knows
        self._beliefs.observe(turn, chain)

    def forget(self, sequence: SequenceView) -> None:
        """The exit's state is carried on."""
        self._beliefs.forget(sequence)


def _shape(turn: Turn, deepest: int) -> TreeShape:
    """What was granted of the shape that was chosen."""
    num_nodes = turn.choice.num_nodes
    chosen = turn.choice.shape or TreeShape.chain(num_nodes)
    return chosen.within(num_nodes, deepest)
