"""Continuous batching without phases: every sequence has pending tokens, and a plan gives them rows.

Oldest first, always: each sequence that decodes gets one row, prompts fill the row budget, then drafts what the policy
grants.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

from verispec.engine.ahead import (
    can_follow,
    is_current,
    num_missing,
    num_slots,
    own,
    rounds_for,
    turn_behind,
)
from verispec.engine.choices import NOT_ASKED, Choices, Plain, Resting, begins, reads_prompt
from verispec.engine.leases import Leases
from verispec.engine.looks import FIRST_LOOK, Looks
from verispec.engine.policy import Policy, RoundLoad, refusal
from verispec.engine.roster import Roster
from verispec.engine.sequence import Sequence
from verispec.spec.drafter import NotYet
from verispec.spec.speculation import AUTO, GRAMMAR
from verispec.spec.turn import PLAIN, Choice, Cohort, Step, Turn

_NOBODY: Plain = {True: (), False: ()}
_ENDLESS = 1 << 30
_TRIAL = 2  # rounds of a draft that is not believed to pay
_LOOK_AGAIN = 4  # rounds: who has drafted nothing for n of them looks for a draft again after 1 + n / 4 more


class _Parts(NamedTuple):
    """The running sequences: those that only decode, those that decode and may draft, and those that do neither."""

    plain: Plain
    single: list[Sequence]
    others: list[Sequence]


class Scheduler:
    """Plans steps for the sequences of a roster.

    `has_family` says whether there are canonical shapes; without them everything runs in fast passes. With
    `all_canonical` fast passes have nothing but windows: other rows would gain nothing by them, and lose company.
    `row_budget` bounds the rows of a pass, `stream_budget` while somebody streams; those of drafts are the policy's.
    `context_len` is the width of the backend's table. `feeds`: it remembers draws for turns that are planned ahead.
    `follows`: it asks for the next masks between rounds.
    """

    def __init__(
        self,
        roster: Roster,
        policy: Policy,
        *,
        row_budget: int,
        stream_budget: int,
        context_len: int,
        has_family: bool,
        all_canonical: bool = False,
        feeds: bool = False,
        follows: bool = False,
    ) -> None:
        self._roster = roster
        self._policy = policy
        self._choices = Choices(
            roster, policy, context_len=context_len, has_family=has_family, all_canonical=all_canonical
        )  # fmt: skip
        self.looks = Looks(roster, policy, self._choices, follows=follows)
        self._row_budget = row_budget
        self._stream_budget = stream_budget
        self._has_family = has_family
        self._all_canonical = all_canonical
        self._feeds = feeds
        self._leases = Leases(roster, context_len=context_len, feeds=feeds)
        self._follows = follows
        self.host_seconds = 0.0  # of a step, outside its passes
        self._all_plain: tuple[int, Plain] | None = None  # everybody, if nothing but decoding is left; by version

    def plan(self) -> Step:
        """The next step, with slots leased for all of its rows. Nothing is in the air."""
        self._roster.admit()
        if self._all_plain is not None and self._all_plain[0] == self._roster.version and self._has_rows():
            return self._plan_plain(self._all_plain[1])
        self._all_plain = None
        self.looks.rest_under_load()
        parts = self._part(self._roster.running)
        if self._prompts_come_first(parts.others):
            parts = parts._replace(plain=_NOBODY)
        if not parts.single and not parts.others:
            self._all_plain = self._roster.version, parts.plain
            return self._plan_plain(parts.plain)
        cohorts = self._leases.cohorts(parts.plain)
        granted = self._grants(parts)
        turns = [
            self._choices.turn(sequence)
            for sequence in parts.others
            if sequence.is_running and granted[sequence.sequence_id] and self._roster.secure_row(sequence)
        ]
        for turn in turns:
            self._leases.extend_prompt(turn, granted[turn.sequence.sequence_id], len(parts.single))
        resting = self._rest(parts.single, turns)
        turns.sort(key=_age)  # drafts have rows and slots in this order
        unasked = self.looks.unasked(turns)
        self._choices.choose(turns, parts.plain, resting)
        turns = self._secured(turns, resting)
        cohorts += [self._resting_cohort(group, is_canonical=kind) for kind, group in resting.items() if group]
        for turn in turns:
            if turn.choice.num_nodes and not self._leases.has_slots(turn):
                turn.choice = PLAIN._replace(reason="no slots are free for a draft")
        rested = [sequence for group in resting.values() for sequence, _ in group]
        waiting = self._waiting_for_prompt(turns, parts.plain, resting)
        newcomers = _undrafted([turn for turn in turns if own(turn) not in waiting])
        if self._policy.rests:
            self.looks.lie_down([s for s in rested + newcomers if s not in unasked])
            self.looks.lie_down(list(unasked), are_asked=False)
            for cohort in cohorts:
                cohort.feeds = self._feeds
        patience = min(map(_patience, rested), default=1)
        count = 1 if 0 in granted.values() else self._num_rounds(parts.plain, turns, rested, patience)
        if newcomers or waiting or any(turn.choice.drafter and begins(own(turn)) for turn in turns):
            count = min(count, FIRST_LOOK)
        if any(turn.choice.is_trial for turn in turns):
            count = min(count, _TRIAL)
        self._go_on(turns, cohorts, count, patience)
        return Step(turns, cohorts)

    def _has_rows(self) -> bool:
        return self._roster.make_room(len(self._roster.running))

    def _plan_plain(self, plain: Plain) -> Step:
        """Everybody only decodes; that stays so until somebody comes or goes."""
        cohorts = self._leases.cohorts(plain)
        self._go_on((), cohorts, self._num_rounds(plain))
        return Step((), cohorts)

    def plan_ahead(self, last: Step) -> Step:
        """A step behind those in the air: further rounds of their cohorts, and rows of whoever is in none of them; or
        further rounds of the turns in the last one, if the backend drafts all of them.

        Only for sequences that decode without the host, and prompts of any that have single rows behind them. Nothing
        is preempted for it; lengths are upper bounds: the backend knows better. A sequence whose prompt is in the air
        waits for its commit, and the others for it.
        """
        self._roster.admit()
        running = self._roster.running
        if not all(s.is_plain or reads_prompt(s) for s in running):
            return Step(self._turns_behind(last.turns))
        is_awaited = any(s.kv.num_flights and not s.kv.num_ahead for s in running)
        going = [s for s in running if s.kv.num_ahead and s.committed_len + s.kv.num_ahead < s.max_len]
        ahead: Plain = {kind: [s for s in going if self._choices.is_canonical(s) is kind] for kind in (True, False)}
        parts = self._part([s for s in running if not s.kv.num_flights])
        if self._prompts_come_first(parts.others):
            ahead, parts = _NOBODY, parts._replace(plain=_NOBODY)
        plain = {kind: [*ahead[kind], *fresh] for kind, fresh in parts.plain.items()}
        if is_awaited and not parts.others and _begin_together(plain[True] + plain[False]):
            return Step()
        if not self._roster.make_room(len(plain[True]) + len(plain[False])):
            return Step()
        cohorts = self._leases.cohorts(ahead, is_ahead=True) + self._leases.cohorts(parts.plain)
        granted = self._grants(parts._replace(plain=plain))
        turns = [self._choices.turn(s) for s in parts.others if granted[s.sequence_id] and self._roster.take(s, 1)]
        for turn in turns:
            self._leases.extend_prompt(turn, granted[turn.sequence.sequence_id], 0)
            turn.choice = NOT_ASKED
        if self._policy.rests:
            self.looks.lie_down(_undrafted(turns), are_asked=False)
        self._go_on(turns, cohorts, 1 if is_awaited or 0 in granted.values() else self._num_rounds(plain, turns))
        return Step(turns, cohorts)

    def _turns_behind(self, turns: SequenceOf[Turn]) -> list[Turn]:
        """The same rounds once more for everybody, if slots are free and somebody is sure to need them.

        Choices are made anew when nothing is in the air, so now and then nothing is planned ahead; nor where rounds
        that have landed since speak for other drafts.
        """
        if len(turns) != len(self._roster.running) or self._roster.may_admit or not all(map(can_follow, turns)):
            return []
        if not self._would_draft_again(turns):
            return []
        if all(own(turn).kv.num_flights == 1 for turn in turns):
            self.locate(turns)  # what was in the air before them is committed
        found = [turn_behind(turn) for turn in turns]
        is_needed = any(turn.room >= 0 for turn in found)
        if not is_needed or not self._roster.make_room(sum(map(num_missing, found))):
            return []
        for turn in found:
            if not self._roster.take(own(turn), num_slots(turn)):
                raise AssertionError("slots for rounds planned ahead were not kept free")
            self._leases.freeze(turn)
        return found

    def _would_draft_again(self, turns: SequenceOf[Turn]) -> bool:
        """Whether what is known by now leaves these turns their drafts; others are better by little, if at all."""
        if all(turn.choice.is_forced for turn in turns):
            return True
        last = {self._choices.turn(own(turn)): turn for turn in turns}
        self._choices.choose(list(last), _NOBODY, {}, last={again: turn.choice for again, turn in last.items()})
        return all(again.choice.is_like(turn.choice) for again, turn in last.items())

    def locate(self, turns: SequenceOf[Turn]) -> None:
        """Say where turns that were planned ahead begin, now that those before them are committed."""
        for turn in turns:
            if turn.num_behind:
                begin = self._choices.turn(own(turn))
                turn.start, turn.room, turn.table_room = begin.start, begin.room, begin.table_room
                turn.is_stale = not is_current(turn)

    def _prompts_come_first(self, others: SequenceOf[Sequence]) -> bool:
        """Whether those that decode wait, because nobody streams and a pass of prompts has no room for them.

        They start together then, and stay together in large passes to the end.
        """
        prompts, most = [s.num_pending for s in others if s.num_pending > 1], self._most_rows()
        num_others = len(self._roster.running) - len(prompts)
        return (
            sum(prompts) > max(most - num_others, most // 2)
            and not any(s.is_streamed for s in self._roster.running)
            and self._roster.make_room(most + len(self._roster.running))
        )

    def _most_rows(self) -> int:
        """Of a pass, drafts aside: whoever streams waits for it, and rows of prompts that are scored need memory."""
        is_bounded = any(s.is_streamed or s.needs_prompt_rows for s in self._roster.running)
        return self._stream_budget if is_bounded else self._row_budget

    def _go_on(self, turns: SequenceOf[Turn], cohorts: SequenceOf[Cohort], count: int, patience: int = 1) -> None:
        """Fix what runs: up to `count` rounds for whoever needs no host in between, `patience` for the resting."""
        for turn in turns:
            if turn.choice.grows:
                num_left = turn.choice.num_nodes - turn.choice.num_drawn
                turn.num_rounds = min(count, num_left) if turn.sequence.constraint is None else 1
            elif turn.is_resident:
                self._leases.stay(turn, count)
            elif self._goes_on(turn):
                self._leases.ride(turn, min(count, _patience(own(turn))))
            self._leases.freeze(turn)
        for cohort in cohorts:
            self._leases.lengthen(cohort, min(count, patience) if cohort.choices else count)
        planned = [turn.num_rounds for turn in turns] + [cohort.num_rounds for cohort in cohorts]
        self.looks.note_planned(max(planned, default=1))

    def _part(self, sequences: SequenceOf[Sequence]) -> _Parts:
        """Sequences of which nothing is in the air, by what their next step is.

        When slots are short every sequence is seen to one by one, oldest first.
        """
        plain: dict[bool, list[Sequence]] = {True: [], False: []}
        parts = _Parts(plain, [], [])
        has_family, all_canonical = self._has_family, self._all_canonical
        if not self._roster.make_room(len(sequences)):
            return parts._replace(others=list(sequences))
        for sequence in sequences:
            kv = sequence.kv
            num_held = len(kv.held)
            if not sequence.prompt_len <= num_held == len(sequence.token_ids) - 1 == kv.synced_len:
                parts.others.append(sequence)
            elif sequence.is_plain:
                plain[has_family and (all_canonical or sequence.params.deterministic)].append(sequence)
            elif sequence.has_single_rows:
                parts.single.append(sequence)
            else:
                parts.others.append(sequence)
        return parts

    def _rest(self, single: SequenceOf[Sequence], turns: list[Turn]) -> Resting:
        """Those whose drafters have nothing to offer; the others get a turn."""
        resting: Resting = {True: [], False: []}
        for sequence in single:
            states = self._policy.states(sequence)
            choice = refusal(states)
            if choice is not None:
                resting[self._choices.decodes_canonically(sequence)].append((sequence, choice))
            else:
                turns.append(self._choices.turn(sequence))
                turns[-1].states = states
        return resting

    def _secured(self, turns: SequenceOf[Turn], resting: Resting) -> list[Turn]:
        """The turns that run, with their first row leased; those that draft nothing after all join the resting."""
        secured = []
        for turn in turns:
            sequence, choice = turn.sequence, turn.choice
            assert isinstance(sequence, Sequence)
            assert sequence.kv.lease is not None
            if choice.waits:
                continue
            if sequence.kv.lease.slots:
                secured.append(turn)
            elif not choice.drafter:
                resting[turn.is_canonical].append((sequence, choice))
            elif self._roster.secure_row(sequence):
                secured.append(turn)
        return secured

    def _waiting_for_prompt(self, turns: SequenceOf[Turn], plain: Plain, resting: Resting) -> set[Sequence]:
        """Those whose prompts this step completes, and that would draft in the next by what is known now."""
        found = {turn: states for turn in turns if turn.completes and (states := self._policy.expected(turn))}
        if not found or not self._policy.rests:
            return set()
        asked = [
            replace(turn, states=found.get(turn, turn.states), start=turn.start + turn.num_pending - 1, num_pending=1)
            for turn in turns if turn in found or turn.choice.drafter
        ]  # fmt: skip
        self._choices.choose(asked, plain, resting)
        return {own(turn) for turn in asked if turn.choice.drafter} & {own(turn) for turn in found}

    def _resting_cohort(self, resting: SequenceOf[tuple[Sequence, Choice]], *, is_canonical: bool) -> Cohort:
        cohort = self._leases.cohort([sequence for sequence, _ in resting], is_canonical=is_canonical)
        cohort.choices, cohort.feeds = [choice for _, choice in resting], False
        return cohort

    def _num_rounds(
        self, plain: Plain, turns: SequenceOf[Turn] = (), resting: SequenceOf[Sequence] = (), patience: int = 1
    ) -> int:
        """How many rounds the backend runs by itself; one while somebody waits for the step to end.

        Whoever has a prompt in pieces waits, or a place to be admitted to, or streams and has no token yet. Sequences
        that rest go on for as many rounds as they have `patience`.
        """
        if self._policy.rates.max_burst == 1 or self._roster.may_admit:
            return 1
        going = [*plain[True], *plain[False]]
        going += [t.sequence for t in turns if self._goes_on(t)]  # type: ignore[misc]
        going += resting if patience > 1 else ()
        growing = [t for t in turns if t.choice.grows and t.sequence.constraint is None]
        drafted = [t for t in turns if t.is_resident]
        fed = growing + drafted
        is_awaited = any(not t.completes or t.is_streams_first for t in turns)
        if is_awaited or not (going or fed):
            return 1
        rooms = [s.max_len - len(s.token_ids) - s.kv.num_ahead for s in going]
        rooms += [rounds_for(1 + t.room, t.choice) for t in drafted]
        room = max(rooms, default=max((t.choice.num_nodes - t.choice.num_drawn for t in growing), default=1))
        num_nodes = sum(t.choice.num_nodes for t in drafted)
        load = RoundLoad(
            num_going=len(going) + len(fed),
            num_waiting=len(resting) + len(plain[True]) + len(plain[False]) + len(turns) - len(going) - len(fed),
            context_len=going[0].committed_len if going else fed[0].start,
            room=room,
            rooms=rooms if self._roster.waiting else (),
            num_free=self._roster.num_available // (len(going) + len(drafted) + num_nodes or 1),
            is_streamed=any(s.is_streamed for s in going) or any(t.sequence.is_streamed for t in turns),
            num_nodes=num_nodes,
            draft_seconds=sum({t.choice.drafter: t.choice.draft_seconds for t in drafted}.values()),
        )
        count = self._policy.num_rounds(load, self.host_seconds)
        return min(count, patience) if patience > 1 else count

    def _goes_on(self, turn: Turn) -> bool:
        """Whether the turn completes the tokens of a sequence that only decodes for a while, in passes like this."""
        sequence = turn.sequence
        assert isinstance(sequence, Sequence)
        is_canonical = self._choices.decodes_canonically(sequence)
        goes_on = sequence.is_plain or (self._follows and sequence.is_followed)
        if sequence.may_draft:
            # Its rounds may end early, and beside others it would idle from then on.
            is_alone = len(self._roster.running) == 1
            goes_on = goes_on and is_alone and not turn.choice.drafter and _patience(sequence) > 1
        return turn.completes and goes_on and turn.is_canonical is is_canonical

    def _grants(self, parts: _Parts) -> dict[int, int]:
        """How many rows each of the others may have: one where one is pending; prompts share the rest, oldest first."""
        most = self._most_rows()
        left = {kind: most - len(parts.plain[kind]) for kind in (True, False)}
        for sequence in parts.single:
            left[self._choices.is_canonical(sequence)] -= 1
        granted: dict[int, int] = {}
        prompts = []
        for sequence in parts.others:
            if sequence.num_pending > 1:
                prompts.append(sequence)
            else:
                granted[sequence.sequence_id] = 1
                left[self._choices.is_canonical(sequence)] -= 1
        for sequence in prompts:
            kind = self._choices.is_canonical(sequence)
            granted[sequence.sequence_id] = count = max(0, min(sequence.num_pending, left[kind]))
            left[kind] -= count
        return granted


def _age(turn: Turn) -> int:
    return turn.sequence.sequence_id


def _begin_together(sequences: SequenceOf[Sequence]) -> bool:
    """Whether they have waited for prompts in the air, and nobody streams: a round ahead of those is one more at the
    end."""
    return all(len(s.token_ids) == s.prompt_len + 1 and not s.is_streamed for s in sequences)


def _undrafted(turns: SequenceOf[Turn]) -> list[Sequence]:
    """Those that only decode from here on, unless they draft, and do not draft now. A drafter that was named and waits
    for the prompt is asked in the next step."""
    found = [turn for turn in turns if turn.completes and not turn.choice.drafter and own(turn).may_draft]
    return [own(turn) for turn in found if own(turn).has_single_rows and not _waits_for_prompt(turn)]


def _waits_for_prompt(turn: Turn) -> bool:
    is_named = turn.sequence.speculation.method != AUTO
    return is_named and any(isinstance(state, NotYet) for _, state in turn.states)


def _patience(sequence: Sequence) -> int:
    """Rounds until a sequence without a draft looks for one again. Where a grammar can draft, they end earlier."""
    if not sequence.may_draft or sequence.speculation.method == GRAMMAR:
        return _ENDLESS
    return 1 + sequence.num_rested // _LOOK_AGAIN
