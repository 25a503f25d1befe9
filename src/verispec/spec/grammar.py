"""Drafts what the grammar leaves no choice about, and guesses at its choices by what the answer has chosen before.

Forced text is certain; how the model cuts it into tokens is not, so it is drafted in the tokenizer's own cut. Where a
few tokens are allowed, the one is drafted that was drawn where the same tokens were allowed last time, behind the same
token if that is known: a comma and not a bracket, the next digit, the next key. All are drafts like any others, and
acceptance is learned. Works beside every other drafter: see `DrafterSet.members_of`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from verispec.errors import ConstraintError
from verispec.sampling.constraint import Constraint, is_narrow
from verispec.spec.drafter import Curve, Level, Refusal
from verispec.spec.rate import Rate
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Draft

_ANY_SHAPE = Refusal("the answer may have any shape")
_A_CHOICE = Refusal("the grammar leaves a choice here")
_MOST_GUESSES = 4  # in one draft
_PRIOR_WEIGHT = 16.0  # tokens that the prior counts for
_MEMORY = 0.98


class _Kind(IntEnum):
    """Why a token is drafted."""

    FORCED = 0
    AGAIN = 1  # drawn at such a choice behind the same token
    ALIKE = 2  # drawn at such a choice


_PRIOR_ACCEPTANCE = {_Kind.FORCED: 0.9, _Kind.AGAIN: 0.7, _Kind.ALIKE: 0.5}


@dataclass(slots=True)
class _Own:
    """A sequence's next draft, made when it had `num_tokens`; and what it has drawn, by choice."""

    num_tokens: int = -1
    token_ids: list[int] = field(default_factory=list)
    kinds: list[_Kind] = field(default_factory=list)
    choices: list[int | None] = field(default_factory=list)  # before each token of the draft, and behind it
    drawn: dict[Hashable, int] = field(default_factory=dict)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Remember the tokens drawn since the draft was made, as far as its choices were met."""
        drafted: list[int | None] = [*self.token_ids, None]
        for at, (choice, guess) in enumerate(zip(self.choices, drafted, strict=False), start=self.num_tokens):
            if at >= len(token_ids):
                return
            if choice is not None:
                self.drawn[choice] = self.drawn[token_ids[at - 1], choice] = token_ids[at]
            if token_ids[at] != guess:
                return


class GrammarDrafter:
    """Remembers choices of each sequence, and acceptance by kind over all of them."""

    MAX_DRAFT = 32
    has_probabilities = False
    has_trees = False
    is_companion = True
    needs_cheap_rows = True

    def __init__(self, max_draft: int = MAX_DRAFT) -> None:
        self._max_draft = max_draft
        self._rates = {kind: Rate.fading(prior, _PRIOR_WEIGHT, _MEMORY) for kind, prior in _PRIOR_ACCEPTANCE.items()}
        self._sequences: dict[int, _Own] = {}

    @property
    def version(self) -> int:
        return sum(rate.version for rate in self._rates.values())

    def state(self, sequence: SequenceView) -> tuple[_Kind, ...] | Refusal:
        """Why each token of the draft is in it."""
        if sequence.constraint is None:
            return _ANY_SHAPE
        own = self._sequences.setdefault(sequence.sequence_id, _Own())
        if own.num_tokens != len(sequence.token_ids):
            own.learn(sequence.token_ids)
            self._look_ahead(own, sequence.constraint, sequence.token_ids)
        return tuple(own.kinds) or _A_CHOICE

    def _look_ahead(self, own: _Own, place: Constraint | None, token_ids: Sequence[int]) -> None:
        own.num_tokens, own.token_ids, own.kinds, own.choices = len(token_ids), [], [], []
        last_id, forced = token_ids[-1], tuple[int, ...]()
        while place is not None and len(own.kinds) < self._max_draft:
            try:
                choice = _choice(place)
                forced = forced or place.forced_ids
                is_end = place.is_exhausted
            except ConstraintError:
                is_end = True
            if is_end:  # the token that leads here is drawn before it, and its own row draws nothing
                del own.token_ids[-1:], own.kinds[-1:]
                return
            own.choices.append(choice)
            token_id, kind = own.drawn.get((last_id, choice)), _Kind.AGAIN
            if forced and token_id in (None, forced[0]):
                token_id, kind = forced[0], _Kind.FORCED
            elif token_id is None:
                token_id, kind = own.drawn.get(choice), _Kind.ALIKE
            if token_id is None or (kind and own.kinds.count(kind) == _MOST_GUESSES):
                return
            forced = forced[1:] if kind is _Kind.FORCED else ()
            own.token_ids.append(token_id)
            own.kinds.append(kind)
            place, last_id = place.after(token_id), token_id

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, tuple)
        levels, reach = [], 1.0
        for kind in key:
            reach *= self._rates[kind].value
            levels.append(Level(1, reach))
        return (Curve(tuple(levels), stays=True),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        chains = [self._sequences[turn.sequence.sequence_id].token_ids for turn in turns]
        return [Draft.chain(ids[: turn.choice.num_nodes]) for ids, turn in zip(chains, turns, strict=True)]

    def observe(self, turn: Turn) -> None:
        if turn.verdict is None:
            return
        num_accepted = len(turn.verdict.path)
        tried = self._sequences[turn.sequence.sequence_id].kinds[: min(len(turn.draft), num_accepted + 1)]
        for node, kind in enumerate(tried):
            self._rates[kind].observe(node < num_accepted)

    def forget(self, sequence: SequenceView) -> None:
        self._sequences.pop(sequence.sequence_id, None)


def _choice(place: Constraint) -> int | None:
    """What names a choice among few tokens. Two may have the same name, rarely: drafts are guesses."""
    return hash(place.allowed.tobytes()) if is_narrow(place.allowed) else None
