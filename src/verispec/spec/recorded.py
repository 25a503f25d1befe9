"""The drafter of a replay: drafts what a recording says comes next, so that the target checks it in parallel passes.

It is for the one sequence of an engine of its own, and no user can name it. Like every drafter it decides speed only:
where the recording is wrong, the target commits its own token, and the replay has found the difference.
"""

from collections.abc import Hashable, Sequence

from verispec.spec.drafter import Curve, Refusal
from verispec.spec.none import NoDrafter
from verispec.spec.tree import MAX_NODES
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Draft


class RecordedDrafter(NoDrafter):
    """`token_ids` is the whole recording, prompt included; nothing is learned from it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__("the recording ends here")
        self._token_ids = tuple(token_ids)

    def state(self, sequence: SequenceView) -> int | Refusal:
        """The tokens that are left but the last, which the target adds itself."""
        num_left = len(self._token_ids) - len(sequence.token_ids) - 1
        return min(num_left, MAX_NODES) if num_left > 0 else self._refusal

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, int)
        return (Curve.chain(key, 1.0, is_forced=True),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        """The chain that follows the committed tokens in the recording."""
        starts = [len(t.sequence.token_ids) for t in turns]
        ends = [min(s + t.choice.num_nodes, len(self._token_ids) - 1) for t, s in zip(turns, starts, strict=True)]
        return [Draft.chain(self._token_ids[start:end]) for start, end in zip(starts, ends, strict=True)]
