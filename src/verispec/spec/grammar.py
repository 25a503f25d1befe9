"""Drafts what the grammar leaves no choice about: keys, quotes and brackets of a schema, the end of a word in an enum.

The text is certain; how the model cuts it into tokens is not, so the tokens are drafts like any others, in the
tokenizer's own cut, and acceptance is learned. Works beside every other drafter: see `DrafterSet.members_of`.
"""

from collections.abc import Hashable, Sequence

from verispec.sampling.constraint import Constraint
from verispec.spec.drafter import Curve, Refusal
from verispec.spec.rate import Rate
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Draft

_ANY_SHAPE = Refusal("the answer may have any shape")
_A_CHOICE = Refusal("the grammar leaves a choice here")
_PRIOR_ACCEPTANCE = 0.9
_PRIOR_WEIGHT = 16.0  # tokens that the prior counts for
_MEMORY = 0.98


class GrammarDrafter:
    """Stateless but for one acceptance rate over all sequences."""

    MAX_DRAFT = 32
    has_probabilities = False
    has_trees = False
    is_companion = True

    def __init__(self, max_draft: int = MAX_DRAFT) -> None:
        self._max_draft = max_draft
        self._rate = Rate.fading(_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT, _MEMORY)

    @property
    def version(self) -> int:
        return self._rate.version

    def state(self, sequence: SequenceView) -> int | Refusal:
        """How many tokens are forced."""
        if sequence.constraint is None:
            return _ANY_SHAPE
        return min(len(sequence.constraint.forced_ids), self._max_draft) or _A_CHOICE

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, int)
        return (Curve.chain(key, self._rate.value),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [Draft.chain(_forced(turn.sequence.constraint)[: turn.choice.num_nodes]) for turn in turns]

    def observe(self, turn: Turn) -> None:
        if turn.verdict is not None:
            self._rate.observe_chain(len(turn.verdict.path), len(turn.draft))

    def forget(self, sequence: SequenceView) -> None:
        pass


def _forced(constraint: Constraint | None) -> tuple[int, ...]:
    return () if constraint is None else constraint.forced_ids
