"""When the drafters of sequences that draft nothing are asked again, and who gets up for what they offer.

Where the host is far from the device, whoever drafts nothing rests: it decodes as with drafter `none`. A look asks its
drafters by what is committed, mostly while rounds are in the air, and getting up ends what is planned ahead; so both
have to be worth what they take.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from verispec.engine.ahead import own
from verispec.engine.choices import NOT_ASKED, Choices, begins, reads_prompt, room_of
from verispec.engine.commit import note_choice
from verispec.engine.policy import NOT_WORTH_IT, STAYS_PLAIN, Policy, refusal
from verispec.engine.rests import Rests
from verispec.engine.roster import Roster
from verispec.engine.sequence import Sequence
from verispec.spec.speculation import AUTO
from verispec.spec.turn import Turn

FIRST_LOOK = 4  # rounds behind a prompt until it is known what drafts are worth
_LOAD_REST = 16  # rounds in which nobody looks where no draft can pay


class Looks:
    """At the running sequences of a roster. `follows`: the backend asks for the next masks between rounds.

    `are_late`: those that are due take too long for nothing to be in the air.
    """

    def __init__(self, roster: Roster, policy: Policy, choices: Choices, *, follows: bool) -> None:
        self._roster, self._policy, self._choices, self._follows = roster, policy, choices, follows
        self._rests = Rests()
        self.are_late = False

    def note_planned(self, num_rounds: int) -> None:
        self._rests.num_planned += num_rounds

    def unasked(self, turns: SequenceOf[Turn]) -> set[Sequence]:
        """Answers that begin here and whose looks together take long: their drafters are asked while the first rounds
        are in the air."""
        found = [turn for turn in turns if turn.completes and begins(own(turn)) and own(turn).may_draft]
        found = [turn for turn in found if own(turn).has_single_rows and self._may_wait(own(turn))]
        if not found or not self._policy.are_long_looks(len(found), found[0].start, max(turn.room for turn in found)):
            return set()
        for turn in found:
            turn.choice = NOT_ASKED
        return set(map(own, found))

    def _may_wait(self, sequence: Sequence) -> bool:
        """Whether it is no loss to draft a few rounds later: who drafts by force begins at once."""
        return sequence.speculation.method == AUTO or self._policy.needs_cheap_rows(sequence)

    def lie_down(self, sequences: SequenceOf[Sequence], *, are_asked: bool = True) -> None:
        """They are plain until they would draft: nothing of them holds others up."""
        for sequence in sequences:
            length = sequence.committed_len
            num_output = length - sequence.prompt_len
            rest_len = self._policy.rest_len(len(sequences), length, num_output, in_vain=sequence.num_rested > 0)
            rest_len //= 2 if reads_prompt(sequence) else 1  # what an answer begins with tells most
            is_alone = len(self._roster.running) == 1  # several would wait for each other's looks
            if is_alone and not sequence.num_rested and self._policy.is_short_look(length, room_of(sequence)):
                rest_len = min(rest_len, FIRST_LOOK)
            self._rests.lie_down(sequence, rest_len * are_asked)

    def look(self, *, in_air: bool) -> int:
        """Ask the drafters of those that have rested, by what is committed so far; returns how many were asked.

        Who would draft now gets up: nothing more is planned ahead then, and it is asked again when all has landed. The
        others rest on. So looks are made while others' rounds, and their own, are in the air; where nothing is, those
        that take long are put off until something is. Where the host is near all get up, and are asked when the next
        step is planned.
        """
        turns, num_asked = [], 0
        due = self._rests.due(together=self._choices.is_joint())
        self.are_late = not in_air and bool(due) and self._are_long(due)
        if self.are_late:
            return 0
        if any(map(self._needs_other_load, due)):
            self._policy.forget_host()
        for sequence in due:
            if self._needs_other_load(sequence):
                self._rests.lie_down(sequence, _LOAD_REST)
            elif not self._policy.rests:
                self._get_up(sequence)
            elif not reads_prompt(sequence):
                num_asked += 1
                length = sequence.committed_len
                num_output = length - sequence.prompt_len
                rest_len = self._policy.rest_len(len(self._rests), length, num_output, in_air=True)
                self._rests.lie_down(sequence, rest_len)
                states = self._policy.states(sequence)
                if (refused := refusal(states)) is not None:
                    note_choice(sequence, refused)
                else:
                    turns.append(self._choices.turn(sequence))
                    turns[-1].states = states
                    turns[-1].room -= sequence.kv.num_ahead
                    sequence.rest(is_resting=False)
        if turns:
            asked = {own(turn) for turn in turns}
            others, drafting = list[Sequence](), list[Sequence]()  # who drafts shares passes with those asked
            for sequence in self._roster.running:
                if sequence not in asked:
                    (drafting if sequence.may_draft and not reads_prompt(sequence) else others).append(sequence)
            plain = {kind: [s for s in others if self._choices.is_canonical(s) is kind] for kind in (True, False)}
            last = dict.fromkeys(turns, STAYS_PLAIN)  # who gets up waits for what is in the air
            self._choices.choose([*turns, *map(self._choices.turn, drafting)], plain, {}, last=last)
        for turn in turns:
            if turn.choice.drafter:
                self._get_up(own(turn))
            else:
                own(turn).rest(is_resting=True)
                if turn.room > 0:  # behind what is in the air
                    note_choice(own(turn), turn.choice)
        return num_asked

    def _are_long(self, due: SequenceOf[Sequence]) -> bool:
        return self._policy.are_long_looks(len(due), due[0].committed_len, max(map(room_of, due)))

    def _get_up(self, sequence: Sequence) -> None:
        self._rests.get_up(sequence)
        self._roster.version += 1

    def rest_under_load(self) -> None:
        """Who would need the host in every round for its drafts does without, where even the best could not pay."""
        if not self._follows:
            return
        for sequence in self._roster.running:
            if sequence.is_followed and sequence.may_draft and self._needs_other_load(sequence):
                self._rests.lie_down(sequence, _LOAD_REST)
                if not sequence.stats.drafted:
                    sequence.stats.no_draft_reason = NOT_WORTH_IT

    def _needs_other_load(self, sequence: Sequence) -> bool:
        if not sequence.is_followed or not self._policy.needs_cheap_rows(sequence):
            return False
        kind = self._choices.decodes_canonically(sequence)
        return not self._policy.drafts_can_pay(len(self._roster.running), is_canonical=kind)
