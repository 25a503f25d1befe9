"""Turns that are planned while the last ones of their sequences are in the air, for rounds that the backend drafts: the
same rounds once more, from wherever the backend is by then. What the host knows of them are upper bounds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from verispec.engine.sequence import Sequence
from verispec.spec.turn import Choice, Drafted, Recipe, Turn

_MOST_BEHIND = 8  # steps in a row with the same choices of drafts


def own(turn: Turn) -> Sequence:
    assert isinstance(turn.sequence, Sequence)
    return turn.sequence


def is_current(turn: Turn) -> bool:
    return own(turn).is_running and own(turn).kv.epoch == turn.epoch


def can_follow(turn: Turn) -> bool:
    """Whether the backend can go on from where it leaves a turn: it drafts by itself, which is no trial, the prompt is
    published, and a tree's places will be in the table."""
    if not isinstance(turn.draft, Recipe) or turn.choice.is_trial:
        return False
    is_published = turn.start >= turn.sequence.prompt_len
    fits = turn.draft.rule.tree is None or most_tokens(turn) + turn.draft.num_nodes <= turn.table_room
    return fits and is_published and is_current(turn) and turn.num_behind < _MOST_BEHIND


class RoundSize(NamedTuple):
    """What a round of the backend's drafts at most: nodes, and of them levels."""

    num_nodes: int
    depth: int
    is_tree: bool

    @classmethod
    def of(cls, draft: Drafted) -> RoundSize:
        """Those of a recipe."""
        assert isinstance(draft, Recipe)
        tree = draft.rule.tree
        return cls(draft.num_nodes, draft.num_nodes if tree is None else len(tree.keep), tree is not None)

    def rounds_in_table(self, num_rounds: int, room: int, table_room: int) -> int:
        """As many as have all of their places in the table: in the last one that drafts, a tree has some behind the
        sequence's end."""
        left = table_room - self.num_nodes
        return min(num_rounds, 1 + left // (1 + self.depth)) if self.is_tree and left < room - 1 else num_rounds

    def num_places(self, num_rounds: int, room: int) -> int:
        """Of so many rounds, up to the last that can have a row: fewer near the end of a sequence, but a tree has all
        of its nodes."""
        if not self.is_tree:
            return min(num_rounds * (1 + self.depth), 1 + room)
        return min((num_rounds - 1) * (1 + self.depth), max(0, room - 1)) + 1 + self.num_nodes


def most_tokens(turn: Turn) -> int:
    """That all rounds of a turn which the backend drafts can commit."""
    return turn.num_rounds * (1 + RoundSize.of(turn.draft).depth)


def rounds_for(num_tokens: float, choice: Choice) -> int:
    """Rounds in which so many tokens are expected: those behind the end of an answer would be in vain, and a further
    step costs less."""
    return max(1, math.ceil(num_tokens / choice.num_tokens))


def turn_behind(turn: Turn) -> Turn:
    """The same rounds once more, as late as they can begin; fewer where the answer is expected to end."""
    num_tokens, choice = most_tokens(turn), turn.choice
    num_left = 1 + turn.room - turn.num_rounds * choice.num_tokens
    start, room, table_room = turn.start + num_tokens, turn.room - num_tokens, turn.table_room - num_tokens
    num_rounds = min(turn.num_rounds, rounds_for(num_left, choice))
    return replace(
        turn, start=start, room=room, table_room=table_room, num_behind=turn.num_behind + 1, num_draft_passes=0,
        rounds=[], num_rounds=RoundSize.of(turn.draft).rounds_in_table(num_rounds, room, table_room),
    )  # fmt: skip


def num_missing(turn: Turn) -> int:
    lease = own(turn).kv.lease
    assert lease is not None
    return max(0, num_slots(turn) - len(lease.slots))


def num_slots(turn: Turn) -> int:
    """Of the lease, for a turn planned ahead."""
    return turn.start + RoundSize.of(turn.draft).num_places(turn.num_rounds, turn.room) - len(turn.sequence.slots)
