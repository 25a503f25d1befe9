"""Drafters: guesses at the next tokens. "No drafting" is a drafter too.

A drafter sees committed tokens and gives values; it never writes into a sequence, and nothing it says can change the
output, only the speed. It states what it promises as curves, which the policy turns into a table now and then; a step
asks it only which curve a sequence is on. Adding one takes one file and one line in `registry.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from verispec.backends.cost import CostTable
from verispec.kv import TARGET_STORE
from verispec.spec.constrained import followed
from verispec.spec.speculation import AUTO, OFF
from verispec.spec.tree import MAX_NODES, TreeShape
from verispec.spec.turn import Drafted, Pending, Recipe, SequenceView, States, Turn
from verispec.types import NO_PARENT

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Refusal(str):
    """Why a drafter drafts nothing for a sequence now."""

    __slots__ = ()


class NotYet(Refusal):
    """One that ends with this step: the prompt comes first. `then` names the curves of the next, where known."""

    then: Hashable = None

    @classmethod
    def before(cls, then: Hashable, reason: str) -> NotYet:
        found = cls(reason)
        found.then = then
        return found


_FAILED = Refusal("the drafter failed; see the log")


class Held(NamedTuple):
    """A draft under way: it has `num_nodes` of `target_len` nodes; it wants to be verified now, or goes on growing."""

    num_nodes: int
    target_len: int
    is_ready: bool


class Level(NamedTuple):
    """Nodes that come and go together, the tokens they are expected to add, and the chance that they are drafted at
    all: behind an early end there are none."""

    num_nodes: int
    tokens: float
    share: float = 1.0


class Curve(NamedTuple):
    """What a drafter promises: tokens by levels of nodes.

    With a `cost`, each level takes one pass of it, shared by all sequences that draft so; such drafts must promise a
    real gain, unless they are forced. `by_fast_rounds`: the nodes are drawn one by one in fast rounds of the target.
    `is_window`: they are a window all the same, drawn and replayed in one step.
    `by_backend`: a backend can draft them by itself, and run several rounds: `draft` then gives recipes. `stays`: what
    is not drafted now can be in the next step, so as many nodes are best as save most time. `is_trial`: what is
    promised is hoped for, to see whether it is so. What `store` lacks of the committed tokens is computed before the
    first draft, at the same `cost`. `what` names the drafts in the reason why not.
    """

    levels: tuple[Level, ...]
    shape: TreeShape | None = None
    cost: CostTable | None = None
    by_fast_rounds: bool = False
    is_window: bool = False
    by_backend: bool = False
    is_forced: bool = False
    is_trial: bool = False
    stays: bool = False
    store: int = TARGET_STORE
    what: str = ""

    @classmethod
    def chain(cls, num_nodes: int, acceptance: float, **fields: object) -> Curve:
        """Each node is accepted with the same chance if the ones before it were."""
        levels = tuple(Level(1, acceptance**depth) for depth in range(1, num_nodes + 1))
        return cls(levels, **fields)  # type: ignore[arg-type]


class Drafter(Protocol):
    """One way of drafting.

    `has_probabilities`: it knows the distributions its tokens are drawn from, so rules that need them can judge it.
    `has_trees`: it can draft trees of a shape that is asked for. `is_companion`: it drafts under constraints, beside
    whichever drafter a request names. `needs_cheap_rows`: nothing else makes its drafts pay, and it is not forced.
    """

    has_probabilities: bool
    has_trees: bool
    is_companion: bool
    needs_cheap_rows: bool

    @property
    def version(self) -> int:
        """Grows when curves have changed noticeably."""

    def state(self, sequence: SequenceView) -> Hashable | Refusal | Held:
        """Where a sequence stands: what names its curves, a draft under way, or why there is nothing. Cheap."""

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        """What is promised to sequences in this state, one curve per shape of draft."""

    def draft(self, turns: Sequence[Turn]) -> Sequence[Drafted]:
        """A draft for each turn, of at most `choice.num_nodes` nodes; or one that is not ready; or how the backend
        drafts it, where the turn `is_resident`."""

    def observe(self, turn: Turn) -> None:
        """Learn what became of a turn. The sequence holds the committed tokens by now."""

    def forget(self, sequence: SequenceView) -> None:
        """A sequence has ended, whichever drafter it had."""


class DrafterSkills(NamedTuple):
    """The drafters of an engine by name, and which of them know their probabilities, or draft trees."""

    names: tuple[str, ...]
    with_probabilities: frozenset[str]
    with_trees: frozenset[str]


class DrafterSet:
    """All drafters of an engine, by name; each sequence names its own, or AUTO for all of them.

    A drafter that fails drafts nothing. Its output is untrusted: a draft that is not a tree over the vocabulary, too
    large, or a tree deeper than a backend can follow, is dropped.
    """

    def __init__(self, drafters: Mapping[str, Drafter], *, vocab_size: int, max_tail: int) -> None:
        self._drafters = dict(drafters)
        self._companions = tuple(name for name, drafter in drafters.items() if drafter.is_companion)
        self._by_cheap_rows = frozenset(name for name, drafter in drafters.items() if drafter.needs_cheap_rows)
        free = tuple(name for name in drafters if name not in self._companions)
        self._members = {**{name: (name,) for name in drafters}, AUTO: free}
        self._vocab_size = vocab_size
        self._max_tail = max_tail

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._drafters, AUTO)

    def members(self, name: str) -> tuple[str, ...]:
        return self._members.get(name, (name,))

    def members_of(self, sequence: SequenceView) -> tuple[str, ...]:
        """The drafters of a sequence. Under a constraint companions draft too, beside any of them but none.

        Not where probabilities judge: they have none.
        """
        members = self.members(sequence.speculation.method)
        if sequence.constraint is None or sequence.uses_probabilities or sequence.speculation.method == OFF:
            return members
        return (*members, *(name for name in self._companions if name not in members))

    def leaves_choice(self, names: Iterable[str]) -> bool:
        """Whether several of these drafters were asked for: companions are not."""
        return sum(name not in self._companions for name in names) > 1

    def needs_cheap_rows(self, sequence: SequenceView) -> bool:
        """Whether nothing but rows that cost little beside others could make drafts of this sequence pay."""
        return self._by_cheap_rows.issuperset(self.members_of(sequence))

    @property
    def skills(self) -> DrafterSkills:
        """What can be asked of them by name."""
        drafters = {name: [self._drafters[member] for member in self.members(name)] for name in self.names}
        return DrafterSkills(
            self.names,
            frozenset(name for name, members in drafters.items() if any(d.has_probabilities for d in members)),
            frozenset(name for name, members in drafters.items() if any(d.has_trees for d in members)),
        )

    def version(self, name: str) -> int:
        return self._drafters[name].version

    def states(self, sequence: SequenceView) -> States:
        """Where a sequence stands with each of its drafters."""
        members, drafters = self.members_of(sequence), self._drafters
        try:
            return tuple([(name, drafters[name].state(sequence)) for name in members])
        except Exception:  # one of them failed: the others are asked again, one by one
            return tuple([(name, self.state(name, sequence)) for name in members])

    def state(self, name: str, sequence: SequenceView) -> Hashable:
        """Where it stands with one of them."""
        try:
            return self._drafters[name].state(sequence)
        except Exception:
            return _failed(name, _FAILED)

    def curves(self, name: str, key: Hashable) -> tuple[Curve, ...]:
        """What a drafter promises, brought into range."""
        try:
            return tuple(filter(None, map(_in_range, self._drafters[name].curves(key))))
        except Exception:
            return _failed(name, ())

    def draft(self, turns: Sequence[Turn]) -> None:
        """Fill in a valid draft for every turn that was granted nodes; a drafter drafts for all its turns at once.

        Those planned ahead have the draft of the turn before them.
        """
        wanted: dict[str, list[Turn]] = {}
        for turn in turns:
            if turn.choice.drafter and not turn.num_behind:
                wanted.setdefault(turn.choice.drafter, []).append(turn)
        for name, group in wanted.items():
            try:
                found = self._drafters[name].draft(group)
                if len(found) != len(group):
                    raise ValueError(f"{len(found)} drafts for {len(group)} sequences")
            except Exception:
                found = _failed(name, [])
            for turn, draft in zip(group, found, strict=False):
                try:
                    self._check(turn, draft)
                    if turn.sequence.constraint is not None:
                        draft, turn.places = followed(turn.sequence.constraint, draft)
                    turn.draft = draft
                except Exception:
                    _failed(name, None)

    def observe(self, turns: Sequence[Turn]) -> None:
        """Tell each drafter what became of its drafts."""
        for turn in turns:
            name = turn.choice.drafter
            if name and not turn.is_stale and (isinstance(turn.draft, Pending) or len(turn.draft)):
                try:
                    for part in turn.rounds or (turn,):
                        self._drafters[name].observe(part)
                except Exception:
                    _failed(name, None)

    def forget(self, sequence: SequenceView) -> None:
        """Tell every drafter: what one has drawn, another may draft from."""
        for name, drafter in self._drafters.items():
            try:
                drafter.forget(sequence)
            except Exception:
                _failed(name, None)

    def _check(self, turn: Turn, draft: Drafted) -> None:
        if isinstance(draft, Pending):
            room = len(turn.slots) - len(draft.token_ids)
            if room < 1 or not all(isinstance(t, int) and 0 <= t < self._vocab_size for t in draft.token_ids):
                raise ValueError("the draft under way does not fit into its slots, or into the vocabulary")
            return
        num_leased = len(turn.slots) - turn.num_pending
        if isinstance(draft, Recipe):
            if not turn.is_resident or not 0 < draft.num_nodes <= min(turn.choice.num_nodes, num_leased):
                raise ValueError("the backend cannot draft this turn, or not so much")
            return
        if not draft.is_valid(vocab_size=self._vocab_size, max_nodes=min(turn.choice.num_nodes, num_leased)):
            raise ValueError("the draft is not a tree over the vocabulary, or too large")
        if not draft.is_chain and draft.depth > self._max_tail:
            raise ValueError(f"the tree is {draft.depth} nodes deep; at most {self._max_tail} are possible")
        if not all(NO_PARENT <= p.node < len(draft) and p.row >= 0 for p in draft.proposals):
            raise ValueError("a proposal is for a node that is not there")
        stored, num_tokens = draft.stored, len(turn.sequence.token_ids)
        if stored and not (0 < stored.store < len(turn.store_lens) and 0 <= stored.num_tokens <= num_tokens):
            raise ValueError("the draft speaks of K/V that cannot be")


def _failed(name: str, fallback: T) -> T:
    # Drafts are hints: a drafter's bug must cost speed, never a request. It is logged, with its traceback.
    logger.exception("drafter %s failed; it drafts nothing this time", name)
    return fallback


def _is_in_range(level: Level) -> bool:
    if type(level) is not Level:
        return False
    num_nodes, tokens, share = level
    return type(num_nodes) is int and num_nodes > 0 and 0.0 < tokens <= 1.0 and 0.0 < share <= 1.0


def _in_range(curve: Curve) -> Curve | None:
    """The curve with at most MAX_NODES nodes and chances for tokens; None where nothing is left of it."""
    is_usual = type(curve.levels) is tuple and all(map(_is_in_range, curve.levels))
    if is_usual and 0 < sum([level.num_nodes for level in curve.levels]) <= MAX_NODES:
        return curve
    levels: list[Level] = []
    room = MAX_NODES
    for num_nodes, tokens, share in curve.levels:
        if not isinstance(num_nodes, int):
            raise ValueError("a curve counts whole nodes")
        room -= num_nodes
        if room < 0 or num_nodes < 1 or not tokens > 0:  # also NaN
            break
        levels.append(Level(num_nodes, min(1.0, tokens), min(1.0, share) if share > 0 else 1.0))
    return curve._replace(levels=tuple(levels)) if levels else None
