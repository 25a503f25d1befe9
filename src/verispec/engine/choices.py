"""What running sequences draft in a step: their next turns, brought before the policy in groups that share a pass."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType

from verispec.engine.ahead import own
from verispec.engine.policy import Policy
from verispec.engine.roster import Roster
from verispec.engine.sequence import Sequence
from verispec.spec.turn import PLAIN, Choice, Turn

Plain = Mapping[bool, SequenceOf[Sequence]]  # by whether their passes are canonical
Resting = dict[bool, list[tuple[Sequence, Choice]]]  # the same, with what kept them from drafting

NOT_ASKED = PLAIN._replace(reason="its drafters were not asked yet")


class Choices:
    """For the sequences of a roster. `has_family` says whether there are canonical shapes; with `all_canonical` fast
    passes have nothing but windows. `context_len` is the width of the backend's table."""

    def __init__(
        self, roster: Roster, policy: Policy, *, context_len: int, has_family: bool, all_canonical: bool
    ) -> None:  # fmt: skip
        self._roster, self._policy, self._context_len = roster, policy, context_len
        self._has_family, self._all_canonical = has_family, all_canonical

    def decodes_canonically(self, sequence: Sequence) -> bool:
        return self._has_family and (sequence.params.deterministic or self._all_canonical)

    def is_canonical(self, sequence: Sequence) -> bool:
        """Prompts run in canonical passes whoever asks, so that their K/V can be shared."""
        if not self._has_family or self.decodes_canonically(sequence):
            return self._has_family
        return len(sequence.kv.held) < sequence.prompt_len or sequence.num_pending > 1

    def turn(self, sequence: Sequence) -> Turn:
        """The next row of a sequence."""
        kv = sequence.kv
        start = len(kv.held)
        return Turn(
            sequence,
            kv.epoch,
            kv.seq_row,
            self.is_canonical(sequence),
            start,
            1,
            start + 1 == len(sequence.token_ids),
            [],
            kv.synced_len,
            (),
            sequence.max_len - len(sequence.token_ids) - 1,
            self._context_len - len(sequence.token_ids),
            kv.store_lens,
        )

    def choose(
        self,
        turns: SequenceOf[Turn],
        plain: Plain,
        resting: Resting,
        last: Mapping[Turn, Choice] = MappingProxyType({}),
    ) -> None:
        """What every turn that completes drafts; by little its `last` choice is not changed."""
        num_resting = {kind: len(group) for kind, group in resting.items()}
        num_fast = (
            len(plain[False]) + num_resting.get(False, 0) + sum(t.num_pending for t in turns if not t.is_canonical)
        )
        undrafted = [s for group in (*plain.values(), map(own, turns)) for s in group if not s.may_draft]
        undrafted += [own(turn) for turn in turns if turn.choice is NOT_ASKED]
        undrafted += [s for group in resting.values() for s, _ in group]
        room = max(map(room_of, undrafted), default=-1)
        for is_canonical, beside in ((True, num_fast), (False, 0)):
            together = [t for t in turns if t.is_canonical is is_canonical]
            free = [t for t in together if t.completes and own(t).may_draft and t.choice is not NOT_ASKED]
            if free:
                others = sum(t.num_pending for t in together) - sum(t.num_pending for t in free)
                num_plain = len(plain[is_canonical]) + num_resting.get(is_canonical, 0)
                self._policy.choose(
                    free,
                    is_canonical=is_canonical,
                    other_rows=others + num_plain,
                    other_tokens=sum(t.completes for t in together) - len(free) + num_plain,
                    beside=beside,
                    room_of_others=room if self.is_joint() else None,
                    last=last,
                )

    def is_joint(self) -> bool:
        """Whether what counts is when the last one ends: one caller waits for all, and nobody for a place."""
        running = self._roster.running
        if self._roster.waiting or any(s.is_streamed for s in running):
            return False
        return len({(s.batch, 0 if s.batch else s.request_id) for s in running}) == 1


def room_of(sequence: Sequence) -> int:
    """Tokens behind the next one that it may still draw."""
    return sequence.max_len - len(sequence.token_ids) - 1 - sequence.kv.num_ahead


def reads_prompt(sequence: Sequence) -> bool:
    """Whether nothing of it needs the host yet: drafters are asked when its prompt is computed."""
    return sequence.has_single_rows and len(sequence.kv.held) < sequence.prompt_len


def begins(sequence: Sequence) -> bool:
    """Whether nothing of its answer is known, and so nothing of what drafts are worth in it."""
    return len(sequence.token_ids) == sequence.prompt_len
