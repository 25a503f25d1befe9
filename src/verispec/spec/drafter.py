"""Drafters: guesses at the next tokens, behind four verbs. "No drafting" is a drafter too.

A drafter sees committed tokens and gives values; it never writes into a sequence, and nothing it says can change the
output, only the speed. Adding one takes one file and one line in `registry.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from verispec.backends.cost import CostTable
from verispec.spec.plan import Plan, SequencePlan
from verispec.tree import MAX_NODES, TreeShape
from verispec.types import NO_DRAFT, NO_PARENT, Draft, SequenceView, Verdict

logger = logging.getLogger(__name__)
T = TypeVar("T")
AUTO = "auto"  # a sequence that names this leaves the choice among all drafters to the planner


class Level(NamedTuple):
    """Nodes that come and go together, and the tokens they are expected to add."""

    num_nodes: int
    tokens: float


class Offer(NamedTuple):
    """What a drafter could do for a sequence now.

    Up to `max_nodes` nodes, each accepted with chance `acceptance` if the ones before it were. Without nodes, `reason`
    says why. Nodes `by_decoding` are not drafted by the drafter but by regular decoding in fast passes, one a step,
    until there are `max_nodes` of them. With a `cost`, each node takes one pass of it, shared by all sequences that
    draft so; such drafts must promise a real gain, unless they are forced. `what` names them in the reason why not.
    The nodes of a tree come in whole `levels`; without any, the nodes are a chain. `shape` is the tree's, which the
    plan will name again; `alternatives` are offers of other shapes.
    """

    max_nodes: int
    acceptance: float
    reason: str = ""
    by_decoding: bool = False
    cost: CostTable | None = None
    what: str = ""
    is_forced: bool = False
    levels: tuple[Level, ...] = ()
    shape: TreeShape | None = None
    alternatives: tuple[Offer, ...] = ()

    @property
    def shapes(self) -> tuple[Offer, ...]:
        """This offer and its alternatives."""
        return (self._replace(alternatives=()), *self.alternatives)

    @property
    def all_levels(self) -> tuple[Level, ...]:
        """The levels, those of a chain too."""
        return self.levels or tuple(Level(1, self.acceptance**depth) for depth in range(1, self.max_nodes + 1))

    @classmethod
    def nothing(cls, reason: str) -> Offer:
        """The offer not to draft."""
        return cls(0, 0.0, reason)


_MOST_REMEMBERED = 256  # checked offers: a limit is any number of tokens that are left


class Drafter(Protocol):
    """One way of drafting. `limit` is what the request has room for, and the caller's own limit if there is one."""

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """What could be drafted for this sequence, at most `limit` tokens deep. Changes nothing."""

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """A draft for each plan, of at most `draft_quota` nodes."""

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Learn what became of a draft. The sequence holds the committed tokens by now."""

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""


class DrafterSet:
    """All drafters of an engine, by name; each sequence names its own, or AUTO for all of them.

    A drafter that fails drafts nothing. Its output is untrusted: a draft that is not a tree over the vocabulary, too
    large, or a tree deeper than a backend can follow, is dropped.
    """

    def __init__(self, drafters: Mapping[str, Drafter], *, vocab_size: int, max_tail: int) -> None:
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._max_tail = max_tail
        self._checked_offers: dict[tuple[str, int], tuple[Offer, Offer]] = {}  # by drafter and limit: the last one

    @property
    def names(self) -> tuple[str, ...]:
        """The names a sequence can ask for."""
        return (*self._drafters, AUTO)

    def has_probabilities(self, name: str) -> bool:
        """Whether this drafter, or one of those that AUTO chooses from, knows how likely its tokens are."""
        names = tuple(self._drafters) if name == AUTO else (name,)
        return any(getattr(self._drafters[n], "has_probabilities", False) for n in names)

    def offers(self, sequence: SequenceView, limit: int) -> dict[str, Offer]:
        """The offers of the sequence's drafters by their names, brought into range."""
        return {name: self._offer(name, sequence, limit) for name in self._members(sequence)}

    def advance(self, plan: Plan) -> list[Draft]:
        """One valid draft per judged sequence plan, in the plan's order; each drafter drafts for all its sequences."""
        drafts = [Draft.chain(p.window[: p.draft_quota]) for p in plan.sequences]
        wanted: dict[str, list[int]] = {}
        for i, p in enumerate(plan.sequences):
            if p.draft_quota and not p.window:
                wanted.setdefault(p.drafter, []).append(i)
        for name, indices in wanted.items():
            for i, draft in zip(indices, self._draft(name, [plan.sequences[i] for i in indices]), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, plan: Plan, drafts: Sequence[Draft], verdicts: Sequence[Verdict | None]) -> None:
        """Tell each drafter what became of its draft."""
        for p, draft, verdict in zip(plan.sequences, drafts, verdicts, strict=True):
            if verdict is not None and p.window:
                draft, verdict = _with_last_position(p, verdict)
            if verdict is not None and len(draft):
                self._guarded(p.drafter, None, partial(self._observe, p, draft, verdict))

    def forget(self, sequence: SequenceView) -> None:
        """The sequence has ended."""
        for name in self._members(sequence):
            self._guarded(name, None, partial(self._drafters[name].forget, sequence.sequence_id))

    def _observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        self._drafters[plan.drafter].observe(plan, draft, verdict)

    def _members(self, sequence: SequenceView) -> tuple[str, ...]:
        return tuple(self._drafters) if sequence.drafter == AUTO else (sequence.drafter,)

    def _offer(self, name: str, sequence: SequenceView, limit: int) -> Offer:
        if not limit:
            return Offer.nothing("no room for a draft")
        failed = Offer.nothing("the drafter failed; see the log")
        offer = self._guarded(name, failed, lambda: self._drafters[name].offer(sequence, limit))
        known = self._checked_offers.get((name, limit))
        if known is not None and known[0] is offer:  # many sequences get the very same
            return known[1]
        if len(self._checked_offers) >= _MOST_REMEMBERED:
            self._checked_offers.clear()
        checked = self._guarded(name, failed, lambda: _in_range(offer, limit))
        self._checked_offers[name, limit] = offer, checked
        return checked

    def _draft(self, name: str, plans: Sequence[SequencePlan]) -> list[Draft]:
        def drafts() -> list[Draft]:
            found = self._drafters[name].draft(plans)
            if len(found) != len(plans):
                raise ValueError(f"{len(found)} drafts for {len(plans)} sequences")
            return found

        found = self._guarded(name, [NO_DRAFT] * len(plans), drafts)
        return [self._checked(plan, draft) for plan, draft in zip(plans, found, strict=True)]

    def _checked(self, plan: SequencePlan, draft: Draft) -> Draft:
        def valid_draft() -> Draft:
            if not draft.is_valid(vocab_size=self._vocab_size, max_nodes=plan.draft_quota):
                raise ValueError("the draft is not a tree over the vocabulary, or too large")
            if not draft.is_chain and draft.depth > self._max_tail:
                raise ValueError(f"the tree is {draft.depth} nodes deep; at most {self._max_tail} are possible")
            if not all(NO_PARENT <= p.node < len(draft) and p.row >= 0 for p in draft.proposals):
                raise ValueError("a proposal is for a node that is not there")
            stored, num_tokens = draft.stored, len(plan.sequence.token_ids)
            if stored and not (0 < stored.store < len(plan.store_lens) and 0 <= stored.num_tokens <= num_tokens):
                raise ValueError("the draft speaks of K/V that cannot be")
            return draft

        return self._guarded(plan.drafter, NO_DRAFT, valid_draft)

    def _guarded(self, name: str, fallback: T, call: Callable[[], T]) -> T:
        # Drafts are hints: a drafter's bug must cost speed, never a request. It is logged, with its traceback.
        try:
            return call()
        except Exception:
            logger.exception("drafter %s failed; it drafts nothing this time", name)
            return fallback


def _with_last_position(plan: SequencePlan, verdict: Verdict) -> tuple[Draft, Verdict]:
    """A replay also decides the token behind the last row it had: the target's own draw is compared with it."""
    compared = plan.window[: plan.draft_quota + 1]
    count = len(verdict.path)
    confirmed = count + (count < len(compared) and compared[count] == verdict.bonus_id)
    return Draft.chain(compared), Verdict(tuple(range(confirmed)), verdict.bonus_id)


def _in_range(offer: Offer, limit: int) -> Offer:
    """The offer, at most `limit` deep and with a probability for acceptance; NaN and negative ones offer nothing."""
    counts = (offer.max_nodes, *(level.num_nodes for level in offer.levels))
    if not all(isinstance(count, int) for count in counts):
        raise ValueError("an offer counts whole nodes")
    if not offer.acceptance > 0 or offer.max_nodes < 1:
        return Offer.nothing(offer.reason)._replace(by_decoding=offer.by_decoding is True)
    levels, room = [], MAX_NODES
    for level in offer.levels[:limit]:
        room -= level.num_nodes
        if room < 0 or level.num_nodes < 1:
            break
        levels.append(level._replace(tokens=min(1.0, max(0.0, level.tokens))))
    if offer.levels and not levels:
        return Offer.nothing("no room for a tree")
    return offer._replace(
        max_nodes=min(offer.max_nodes, sum(level.num_nodes for level in levels) if levels else limit),
        acceptance=min(offer.acceptance, 1.0),
        levels=tuple(levels),
        alternatives=tuple(_in_range(o, limit) for o in offer.alternatives),
    )
