"""Turns that are planned while the last ones of their sequences are in the air, for rounds that the backend drafts: the
same rounds once more, from wherever the backend is by then. What the host knows of them are upper bounds.
"""

import math
from dataclasses import replace

from verispec.engine.sequence import Sequence
from verispec.spec.turn import Choice, Recipe, Turn

_MOST_BEHIND = 8  # steps in a row with the same choices of drafts


def own(turn: Turn) -> Sequence:
    assert isinstance(turn.sequence, Sequence)
    return turn.sequence


def is_current(turn: Turn) -> bool:
    return own(turn).is_running and own(turn).kv.epoch == turn.epoch


def can_follow(turn: Turn) -> bool:
    """Whether the backend can go on from where it leaves a turn: it drafts chains, and the prompt is published."""
    is_chain = isinstance(turn.draft, Recipe) and turn.draft.rule.tree is None
    is_published = turn.start >= turn.sequence.prompt_len
    return is_chain and is_published and is_current(turn) and turn.num_behind < _MOST_BEHIND


def most_rows(turn: Turn) -> int:
    """Of all rounds of a turn that the backend drafts: as many as it can commit tokens."""
    assert isinstance(turn.draft, Recipe)
    return turn.num_rounds * (1 + turn.draft.num_nodes)


def rounds_for(num_tokens: float, choice: Choice) -> int:
    """Rounds in which so many tokens are expected: those behind the end of an answer would be in vain, and a further
    step costs less."""
    return max(1, math.ceil(num_tokens / choice.num_tokens))


def turn_behind(turn: Turn) -> Turn:
    """The same rounds once more, as late as they can begin; fewer where the answer is expected to end."""
    num_tokens, choice = most_rows(turn), turn.choice
    num_left = 1 + turn.room - turn.num_rounds * choice.num_tokens
    start, room, table_room = turn.start + num_tokens, turn.room - num_tokens, turn.table_room - num_tokens
    return replace(
        turn, start=start, room=room, table_room=table_room, num_behind=turn.num_behind + 1, num_draft_passes=0,
        rounds=[], num_rounds=min(turn.num_rounds, rounds_for(num_left, choice)),
    )  # fmt: skip


def num_missing(turn: Turn) -> int:
    lease = own(turn).kv.lease
    assert lease is not None
    return max(0, num_slots(turn) - len(lease.slots))


def num_slots(turn: Turn) -> int:
    """Of the lease, for a turn planned ahead: up to the last position that can have a row, a token behind it."""
    return turn.start + min(most_rows(turn), 1 + turn.room) - len(turn.sequence.slots)
