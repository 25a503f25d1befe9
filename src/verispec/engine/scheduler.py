"""Continuous batching without phases: every sequence has pending tokens, and a plan gives them rows.

Oldest first, always: each running sequence gets one row, prompts fill the row budget, then drafts what the policy
grants. When slots run out the cache is evicted, then the youngest sequence is preempted and later recomputed; the
oldest can always run, so every admitted request ends. `commit` is the only writer of sequence state.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from verispec.engine.policy import Policy, RoundLoad
from verispec.engine.sequence import Sequence
from verispec.kv import PrefixCache, SlotPool
from verispec.sampling.rows import Sampler
from verispec.spec.speculation import OFF
from verispec.spec.turn import PLAIN, Cohort, Pending, Step, Turn
from verispec.types import Draft, DraftTrace, FinishReason, Stored, TokenEvent, TokenLogprob, Verdict

logger = logging.getLogger(__name__)
NO_DRAW = "no token can be drawn: the model's logits are NaN or infinite, or every token is banned"
Bind = Callable[[int, Sampler], None]


class Scheduler:
    """Owns the queue, the running sequences and their slots.

    `bind` tells the backend who has a row of its table. `has_family` says whether there are canonical shapes; without
    them everything runs in fast passes. `feeds`: the backend remembers draws for turns that are planned ahead.
    """

    def __init__(
        self,
        *,
        pool: SlotPool,
        cache: PrefixCache,
        policy: Policy,
        bind: Bind,
        row_budget: int,
        max_running: int,
        has_family: bool,
        feeds: bool = False,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._policy = policy
        self._bind = bind
        self._row_budget = row_budget
        self._has_family = has_family
        self._feeds = feeds
        self._free_seq_rows = list(range(max_running, 0, -1))  # row 0 of the table is the padding's
        self._cohorts: list[Cohort] = []  # in the air
        self.departing: list[Sequence] = []  # have ended; their slots wait for the flights that use them
        self.changed: dict[int, Sequence] = {}  # by sequence id: to be told to clients
        self._earlier: list[TokenEvent] = []  # of all rounds of a step but the last
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.host_seconds = 0.0  # of a step, outside its passes

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others. One that the tokens it was given have ended never runs."""
        if sequence.finish_reason is not None:
            self.changed[sequence.sequence_id] = sequence
        else:
            self.waiting.append(sequence)

    # Planning.

    def plan(self) -> Step:
        """The next step, with slots leased for all of its rows. Nothing is in the air."""
        self.void()
        self._admit()
        plain, others = self._part()
        cohorts = [self._cohort(group, is_canonical=kind) for kind, group in plain.items() if group]
        canonical: list[Turn] = []
        fast: list[Turn] = []
        for sequence in others:
            if sequence.is_running and self._secure_row(sequence):
                turn = self._turn(sequence)
                (canonical if turn.is_canonical else fast).append(turn)
        self._extend_prompts(canonical, self._row_budget - len(canonical) - len(plain[True]))
        self._extend_prompts(fast, self._row_budget - len(fast) - len(plain[False]))
        self._choose(canonical, fast, plain)
        turns = [t for t in (*canonical, *fast) if not t.choice.waits]
        for turn in turns:
            if turn.choice.num_nodes and not self._has_slots(turn):
                turn.choice = PLAIN._replace(reason="no slots are free for a draft")
        count = self._num_rounds(plain, turns)
        for turn in turns:
            if turn.choice.grows:
                turn.num_rounds = min(count, turn.choice.num_nodes - turn.choice.num_drawn)
            elif count > 1 and turn.is_resident and self._has_rounds(turn, count):
                turn.num_rounds = count
            self._freeze(turn)
        for cohort in cohorts:
            self._lengthen(cohort, count)
        return Step(turns, cohorts)

    def plan_ahead(self) -> Step:
        """Further rounds of the cohorts in the air, if they are all there is: nothing else may need the host.

        Nothing is admitted or preempted for them, and lengths are upper bounds: the backend knows better.
        """
        if self.departing or (self.waiting and self._free_seq_rows):
            return Step()
        if not self.running or not all(s.kv.num_ahead for s in self.running):
            return Step()
        going = [s for s in self.running if s.committed_len + s.kv.num_ahead < s.max_len]
        groups = {kind: [s for s in going if self._is_canonical(s) is kind] for kind in (True, False)}
        count = self._num_rounds(groups, ())
        if not going or not self._make_room(len(going) * count):
            return Step()
        cohorts = [self._cohort(group, is_canonical=kind) for kind, group in groups.items() if group]
        for cohort in cohorts:
            cohort.is_ahead = True
            self._lengthen(cohort, count)
        return Step((), cohorts)

    def _part(self) -> tuple[dict[bool, list[Sequence]], list[Sequence]]:
        """The running sequences that only decode, by whether that is canonical, and the others.

        When slots are short there are no such: then every sequence is seen to one by one, oldest first.
        """
        plain: dict[bool, list[Sequence]] = {True: [], False: []}
        if not self._make_room(len(self.running)):
            return plain, list(self.running)
        others = []
        for sequence in self.running:
            kv = sequence.kv
            num_held = len(kv.held)
            if sequence.is_plain and sequence.prompt_len <= num_held == len(sequence.token_ids) - 1 == kv.synced_len:
                plain[self._has_family and sequence.params.deterministic].append(sequence)
            else:
                others.append(sequence)
        return plain, others

    def _num_rounds(self, plain: Mapping[bool, SequenceOf[Sequence]], turns: SequenceOf[Turn]) -> int:
        """How many rounds the backend runs by itself; one while somebody waits for the step to end."""
        going = [*plain[True], *plain[False]]
        growing = [t for t in turns if t.choice.grows]
        drafted = [t for t in turns if t.is_resident]
        fed = growing + drafted
        if (self.waiting and self._free_seq_rows) or not all(t.completes for t in turns) or not (going or fed):
            return 1
        room = max(
            (*(s.max_len - len(s.token_ids) - s.kv.num_ahead for s in going), *(1 + t.room for t in drafted)),
            default=max((t.choice.num_nodes - t.choice.num_drawn for t in growing), default=1),
        )
        num_nodes = sum(t.choice.num_nodes for t in drafted)
        load = RoundLoad(
            num_going=len(going) + len(fed),
            num_waiting=len(turns) - len(fed),
            context_len=going[0].committed_len if going else fed[0].start,
            room=room,
            num_free=(self._pool.num_free + self._pool.num_evictable) // (len(going) + len(drafted) + num_nodes or 1),
            is_streamed=any(s.is_streamed for s in going) or any(t.sequence.is_streamed for t in turns),
            num_nodes=num_nodes,
            draft_seconds=sum({t.choice.drafter: t.choice.draft_seconds for t in drafted}.values()),
        )
        return self._policy.num_rounds(load, self.host_seconds)

    def _cohort(self, sequences: SequenceOf[Sequence], *, is_canonical: bool) -> Cohort:
        """One round of plain decoding, with a slot leased for each sequence."""
        lease = self._pool.lease()
        self._pool.extend(lease, len(sequences))
        cohort = Cohort(
            list(sequences),
            [s.kv.epoch for s in sequences],
            [s.kv.seq_row for s in sequences],
            [len(s.token_ids) - 1 + s.kv.num_ahead for s in sequences],
            is_canonical,
            lease,
            feeds=self._feeds,
        )
        for sequence in sequences:
            sequence.kv.num_flights += 1
        self._cohorts.append(cohort)
        return cohort

    def _lengthen(self, cohort: Cohort, num_rounds: int) -> None:
        """Lease the slots of further rounds, if all of them are free."""
        count = len(cohort.sequences)
        further = count * (num_rounds - 1)
        if further and self._make_room(further) and self._pool.extend(cohort.lease, further):
            cohort.num_rounds = num_rounds
        if self._feeds:
            for sequence in cohort.sequences:
                sequence.kv.num_ahead += cohort.num_rounds  # type: ignore[attr-defined]

    def void(self) -> None:
        """Take back what was leased for turns that failed or were abandoned: their rows are planned again."""
        for cohort in self._cohorts:
            self._pool.rollback(cohort.lease)
        self._cohorts.clear()
        for sequence in self.running:
            if sequence.kv.num_flights:
                kv = sequence.kv
                kv.num_flights = kv.num_ahead = 0
                self._trim(sequence, 0)
                kv.synced_len = 0  # what was sent may never have arrived
                kv.epoch += 1
                kv.draft_epoch += 1
        for sequence in self.departing:
            sequence.kv.num_flights = 0
        self._depart()

    def _admit(self) -> None:
        """Move waiting sequences to running while there are slots for their prompts; first come, first served."""
        while self.waiting and self._free_seq_rows:
            sequence = self.waiting[0]
            leader = sequence.leader
            if leader is not None and leader.finish_reason is None and leader.computed_len < leader.prompt_len:
                return
            limit = 0 if sequence.needs_prompt_rows else sequence.committed_len - 1
            hit = self._cache.match(sequence.token_ids, limit=limit, salt=sequence.salt)
            needed = sequence.committed_len - len(hit.slots) + len(self.running)
            if self.running and needed > self._pool.num_free + self._pool.num_evictable:
                self._pool.release(hit.slots)
                return
            self.waiting.popleft()
            kv = sequence.kv
            kv.held, kv.canonical_len, kv.synced_len, kv.store_lens = hit.slots, len(hit.slots), 0, hit.valid_lens
            if not sequence.stats.preemptions:
                sequence.stats.cached_tokens = len(hit.slots)
            kv.seq_row, kv.lease, sequence.is_running = self._free_seq_rows.pop(), self._pool.lease(), True
            self._bind(kv.seq_row, _sampler(sequence))
            self.running.append(sequence)
            if len(self.running) > 1 and self.running[-2].sequence_id > sequence.sequence_id:
                self.running.sort(key=lambda s: s.sequence_id)

    def _secure_row(self, sequence: Sequence) -> bool:
        """Lease the next row of a sequence, taking slots from younger sequences if it must. False if it was the one."""
        while not self._take(sequence, 1):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _is_canonical(self, sequence: Sequence) -> bool:
        """Prompts run in canonical passes whoever asks, so that their K/V can be shared."""
        if not self._has_family or sequence.params.deterministic:
            return self._has_family
        return len(sequence.kv.held) < sequence.prompt_len or sequence.num_pending > 1

    def _turn(self, sequence: Sequence) -> Turn:
        """The next row of a sequence."""
        kv = sequence.kv
        start = len(kv.held)
        return Turn(
            sequence,
            kv.epoch,
            kv.seq_row,
            self._is_canonical(sequence),
            start,
            1,
            start + 1 == len(sequence.token_ids),
            [],
            kv.synced_len,
            (),
            sequence.max_len - len(sequence.token_ids) - 1,
            kv.store_lens,
        )

    def _extend_prompts(self, turns: SequenceOf[Turn], left: int) -> None:
        """Give the rows that are left to tokens that are pending beyond the first, oldest sequence first."""
        for turn in turns:
            sequence = turn.sequence
            assert isinstance(sequence, Sequence)
            missing = sequence.num_pending - 1
            if missing <= 0:
                continue
            count = min(missing, left, self._pool.num_free + self._pool.num_evictable)
            if count > 0 and self._take(sequence, 1 + count):
                left -= count
                turn.num_pending += count
            turn.completes = turn.start + turn.num_pending == sequence.committed_len

    def _choose(
        self, canonical: SequenceOf[Turn], fast: SequenceOf[Turn], plain: Mapping[bool, SequenceOf[Sequence]]
    ) -> None:
        """What every turn that completes drafts."""
        num_fast = len(plain[False]) + sum(t.num_pending for t in fast)
        for turns, is_canonical, beside in ((canonical, True, num_fast), (fast, False, 0)):
            free = [t for t in turns if t.completes and t.sequence.speculation.method != OFF]
            if free:
                others = sum(t.num_pending for t in turns) - sum(t.num_pending for t in free)
                num_plain = len(plain[is_canonical])
                self._policy.choose(
                    free,
                    is_canonical=is_canonical,
                    other_rows=others + num_plain,
                    other_tokens=sum(t.completes for t in turns) - len(free) + num_plain,
                    beside=beside,
                )

    def _has_slots(self, turn: Turn) -> bool:
        """Lease the slots of the draft chosen; a whole window's, when it is opened. Rows of others come first."""
        sequence, choice = turn.sequence, turn.choice
        assert isinstance(sequence, Sequence)
        assert sequence.kv.lease is not None
        needed = turn.num_pending + choice.num_nodes - len(sequence.kv.lease.slots)
        if needed > 0 and choice.grows and needed + len(self.running) > self._pool.num_free + self._pool.num_evictable:
            return False
        return self._take(sequence, turn.num_pending + choice.num_nodes)

    def _has_rounds(self, turn: Turn, num_rounds: int) -> bool:
        """Lease the slots of so many rounds, up to the last token that can have a row."""
        assert isinstance(turn.sequence, Sequence)
        return self._take(turn.sequence, min(num_rounds * (1 + turn.choice.num_nodes), 1 + turn.room))

    def _freeze(self, turn: Turn) -> None:
        """Note the slots leased, and what the backend's table lacks."""
        sequence = turn.sequence
        assert isinstance(sequence, Sequence)
        assert sequence.kv.lease is not None
        turn.slots = sequence.kv.lease.slots
        self._send_table(turn, sequence)
        sequence.kv.num_flights += 1

    def _send_table(self, turn: Turn, sequence: Sequence) -> None:
        kv = sequence.kv
        assert kv.lease is not None
        held, leased = len(kv.held), kv.lease.slots
        turn.table_start = kv.synced_len
        if kv.synced_len >= held:
            turn.table_slots = leased[kv.synced_len - held :]
        else:
            turn.table_slots = kv.held[kv.synced_len :] + leased
        kv.synced_len = held + len(leased)

    def _take(self, sequence: Sequence, count: int) -> bool:
        """Bring the sequence's lease to at least `count` slots, evicting cached prefixes if needed; all or none."""
        lease = sequence.kv.lease
        assert lease is not None
        count -= len(lease.slots)
        if count <= 0:
            return True
        return self._make_room(count) and self._pool.extend(lease, count)

    def _make_room(self, count: int) -> bool:
        """Whether so many slots are free, if need be by evicting cached prefixes."""
        missing = count - self._pool.num_free
        return missing <= 0 or self._cache.evict(missing) >= missing

    # Committing.

    def commit(self, step: Step, now: float) -> list[TokenEvent]:
        """Turn verdicts into committed tokens and slots; returns what clients should hear of."""
        for turn in step.turns:
            sequence = turn.sequence
            assert isinstance(sequence, Sequence)
            if self._is_stale(sequence, turn.epoch):
                continue
            if isinstance(turn.draft, Pending):
                self._commit_pending(turn, sequence)
            else:
                self._commit_turn(turn, sequence)
        for cohort in step.cohorts:
            self._commit_cohort(cohort)
        self._note_stalls(step)
        return self.told(list(self.changed.values()), now)

    def _is_stale(self, sequence: Sequence, epoch: int) -> bool:
        """Whether the sequence was released since; a turn of it that has landed lets go of its slots."""
        kv = sequence.kv
        is_current = sequence.is_running and kv.epoch == epoch
        if is_current or sequence in self.departing:
            kv.num_flights -= 1
        if not is_current:
            self._depart()
        return not is_current

    def _commit_cohort(self, cohort: Cohort) -> None:
        """Plain rounds: every draw is a token, and its row's slot the sequence's next."""
        count, size, is_canonical = cohort.num_rounds, len(cohort.sequences), cohort.is_canonical
        slots = self._pool.commit_front(cohort.lease, len(cohort.lease.slots))
        self._pool.rollback(cohort.lease)
        self._cohorts.remove(cohort)
        interrupt: BaseException | None = None
        for i, (sequence, epoch) in enumerate(zip(cohort.sequences, cohort.epochs, strict=True)):
            assert isinstance(sequence, Sequence)
            own = slots[i::size]
            kv = sequence.kv
            if not (sequence.is_running and kv.epoch == epoch):
                self._pool.release(own)
                self._is_stale(sequence, epoch)
                continue
            kv.num_flights -= 1
            if cohort.feeds:
                kv.num_ahead -= count
            draws = cohort.draws[i]
            num_drawn = count if draws[-1] >= 0 else max(1, sum(token_id >= 0 for token_id in draws))
            if num_drawn < count:
                self._pool.release(own[num_drawn:])
                del own[num_drawn:]
            if is_canonical and kv.canonical_len == len(kv.held):
                kv.canonical_len += num_drawn
            kv.held += own
            kv.synced_len = len(kv.held)
            if not kv.num_flights:
                kv.epoch += 1
            stats = sequence.stats
            if is_canonical:
                stats.passes += num_drawn
            else:
                stats.fast_passes += num_drawn
            stats.chosen["plain"] += 1
            try:
                self._commit_draws(sequence, draws, cohort.logprobs[i])
            except BaseException as error:  # it ended one sequence; the others' slots must not be lost
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _commit_draws(self, sequence: Sequence, draws: SequenceOf[int], logprobs: SequenceOf[float]) -> None:
        """Append draws, one by one, up to the first that ends the sequence; whatever happens, it ends alone."""
        if sequence.is_streamed:
            self.changed[sequence.sequence_id] = sequence
        try:
            for token_id, logprob in zip(draws, logprobs, strict=True):
                if token_id < 0:
                    sequence.fail(NO_DRAW)
                else:
                    sequence.append(TokenLogprob(token_id, logprob))
                if sequence.finish_reason is not None:
                    break
        except BaseException as error:
            self._fail(sequence, error)
        if sequence.finish_reason is not None:
            self._end(sequence)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """One request's text or stop rules may fail: that request alone ends. Interrupted, it cannot be trusted."""
        if isinstance(error, Exception):
            logger.error("request %d failed", sequence.request_id, exc_info=error)
            sequence.fail(f"{type(error).__name__}: {error}")
            return
        sequence.fail("interrupted while its tokens were committed")
        self._end(sequence)
        raise error

    def _end(self, sequence: Sequence) -> None:
        self.changed[sequence.sequence_id] = sequence
        if sequence.is_running:
            self._release(sequence)

    def told(self, sequences: SequenceOf[Sequence], now: float) -> list[TokenEvent]:
        """The events of these sequences: what clients have not been told."""
        events, self._earlier = self._earlier, []
        for sequence in sequences:
            if sequence.finish_reason is not None:
                sequence.stats.finish_time = now
            event = sequence.take_event()
            sequence.stats.record_commit(now, len(event.logprobs))
            events.append(event)
            self.changed.pop(sequence.sequence_id, None)
        return events

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is: waiting, running or in flight."""
        if sequence.is_running:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _commit_pending(self, turn: Turn, sequence: Sequence) -> None:
        """Fast rounds have drawn further tokens of a draft; nothing is committed."""
        num_drawn = sum(token_id >= 0 for token_id in turn.score.draws)
        sequence.stats.fast_passes += max(1, num_drawn)
        sequence.stats.drafted += num_drawn
        sequence.stats.chosen[turn.choice.drafter] += 1
        if turn.choice.because:
            sequence.stats.chosen_because = turn.choice.because

    def _commit_turn(self, turn: Turn, sequence: Sequence) -> None:
        """Round by round, each told by itself, up to the one that ends the sequence."""
        rounds = turn.rounds or (turn,)
        for i, part in enumerate(rounds):
            if i and sequence.is_streamed:
                self._earlier.append(sequence.take_event())
            self._commit_one(part, sequence)
            if sequence.finish_reason is not None:
                self._end(sequence)
                return
        sequence.kv.epoch += 1
        self._trim(sequence, 0)
        if turn.start < sequence.prompt_len <= sequence.computed_len:
            self._publish(sequence)  # the prompt is complete: others may share it from now on

    def _commit_one(self, turn: Turn, sequence: Sequence) -> None:
        draft = turn.draft
        assert isinstance(draft, Draft)
        if turn.verdict is not None and sequence.is_streamed:
            self.changed[sequence.sequence_id] = sequence
        try:
            self._commit_slots(turn, sequence, draft, turn.verdict)
            self._count(turn, sequence, draft, turn.verdict)
            _commit_tokens(sequence, turn)
        except BaseException as error:
            self._fail(sequence, error)

    def _commit_slots(self, turn: Turn, sequence: Sequence, draft: Draft, verdict: Verdict | None) -> None:
        """Accepted rows' slots join the sequence; the others go back to the pool."""
        kv, pool = sequence.kv, self._pool
        assert kv.lease is not None
        path = verdict.path if verdict else ()
        num_kept = turn.num_pending + len(path)
        if turn.is_canonical and kv.canonical_len == len(kv.held):
            kv.canonical_len += num_kept
        if draft.stored is not None:
            kv.store_lens = _with_stored(kv.store_lens, turn, draft.stored, path)
        if not len(draft) or draft.is_chain:
            kv.held += pool.commit_front(kv.lease, num_kept)
            kv.synced_len = min(kv.synced_len, len(kv.held) + len(kv.lease.slots))
        else:
            kept = [*range(turn.num_pending), *(turn.num_pending + node for node in path)]
            kv.held += pool.commit(kv.lease, kept)
            kv.lease = pool.lease()
            kv.synced_len = turn.start + turn.num_pending

    def _trim(self, sequence: Sequence, count: int) -> None:
        """Give back all but the first `count` slots of the lease."""
        kv = sequence.kv
        assert kv.lease is not None
        if len(kv.lease.slots) > count:
            self._pool.trim(kv.lease, count)
        kv.synced_len = min(kv.synced_len, len(kv.held) + count)

    def _count(self, turn: Turn, sequence: Sequence, draft: Draft, verdict: Verdict | None) -> None:
        """Counters, and what the next event tells of the draft."""
        stats, choice = sequence.stats, turn.choice
        stats.passes += turn.is_canonical
        stats.fast_passes += not turn.is_canonical
        if verdict is None:
            return
        stats.chosen[choice.drafter or "plain"] += 1
        if choice.because:
            stats.chosen_because = choice.because
        if not choice.num_nodes or turn.note:
            reason = turn.note or choice.reason
            if reason and (turn.room > 0 or not stats.no_draft_reason):
                stats.no_draft_reason = reason
        stats.draft_passes += turn.num_draft_passes
        if turn.exit_state is not None:
            stats.exit_threshold, stats.exit_rate = turn.exit_state
        if not len(draft):
            return
        num_accepted, outbox = len(verdict.path), sequence.outbox
        outbox.num_accepted = num_accepted
        outbox.rejected_ids = tuple(t for node, t in enumerate(draft.token_ids) if node not in verdict.path)
        stats.accepted += num_accepted
        if choice.is_replay:
            stats.replays += 1
            stats.mismatches += num_accepted < len(draft)
            stats.recomputed += len(draft) - num_accepted
        else:
            stats.drafted += len(draft)
        if turn.score.node_logprobs:
            outbox.trace = DraftTrace(draft, verdict, tuple(map(math.exp, turn.score.node_logprobs)))

    def _note_stalls(self, step: Step) -> None:
        """What the replays of this step cost those who had nothing to do with them: rows of final fast passes."""
        turns = step.turns
        replays = [t for t in turns if t.choice.is_replay and t.verdict is not None]
        if not replays:
            return
        waiting = [t.sequence for t in turns if not t.is_canonical]
        waiting += [s for c in step.cohorts if not c.is_canonical for s in c.sequences]
        if not waiting:
            return
        canonical = [t for t in turns if t.is_canonical and isinstance(t.draft, Draft)]
        num_rows = sum(t.num_pending + t.choice.num_nodes for t in canonical)
        num_rows += sum(len(c.sequences) for c in step.cohorts if c.is_canonical)
        for sequence in waiting:
            stats = sequence.stats  # type: ignore[attr-defined]
            stats.longest_stall = max(stats.longest_stall, replays[0].seconds)
        for turn in replays:
            share = (turn.num_pending + turn.choice.num_nodes) / num_rows
            turn.sequence.stats.stall_caused += turn.seconds * share  # type: ignore[attr-defined]

    # Giving back.

    def _publish(self, sequence: Sequence) -> None:
        """Put the canonical prefix into the cache; the sequence goes on with the cache's copy of it.

        A sequence that ended inside an accepted path holds slots for tokens it never committed: those are left out.
        """
        kv = sequence.kv
        canonical_len = min(kv.canonical_len, sequence.committed_len)
        valid_lens = (canonical_len, *kv.store_lens[1:])
        held = self._cache.publish(sequence.token_ids[:canonical_len], kv.held, valid_lens, salt=sequence.salt)
        if held != kv.held:  # a drafter's store may lack what the cache's slots hold for the target
            same = next(i for i, (a, b) in enumerate(zip(held, kv.held, strict=True)) if a != b)
            kv.store_lens = tuple(min(length, same) for length in kv.store_lens)
            kv.held, kv.synced_len = held, min(kv.synced_len, same)

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a sequence and queue it first in line by age; it is recomputed later."""
        sequence.stats.preemptions += 1
        self._release(sequence)
        behind = next(
            (i for i, s in enumerate(self.waiting) if s.sequence_id > sequence.sequence_id), len(self.waiting)
        )
        self.waiting.insert(behind, sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take a sequence out of the running; its row and slots are given back once nothing in the air uses them."""
        self.running.remove(sequence)
        sequence.is_running = False
        sequence.kv.epoch += 1
        self.departing.append(sequence)
        self._depart()

    def _depart(self) -> None:
        """Give back rows, leases and slots; publish what is canonical first, unless the request failed."""
        for sequence in [s for s in self.departing if not s.kv.num_flights]:
            kv = sequence.kv
            self.departing.remove(sequence)
            assert kv.lease is not None
            self._pool.rollback(kv.lease)
            if sequence.finish_reason is not FinishReason.ERROR:
                self._publish(sequence)
            self._pool.release(kv.held)
            self._free_seq_rows.append(kv.seq_row)
            kv.held, kv.lease, kv.canonical_len, kv.synced_len, kv.seq_row = [], None, 0, 0, 0
            kv.store_lens, kv.num_ahead = (), 0
            kv.draft_epoch += 1


def _sampler(sequence: Sequence) -> Sampler:
    return Sampler(
        sequence.params,
        sequence.sample_key,
        prompt_len=sequence.prompt_len,
        limit=sequence.max_len,
        stop_ids=tuple(sorted(sequence.stopping_ids)),
    )


def _with_stored(store_lens: tuple[int, ...], turn: Turn, stored: Stored, path: SequenceOf[int]) -> tuple[int, ...]:
    """How much each store holds once the path is committed: of a drafter's, the tokens and nodes it computed."""
    length = stored.num_tokens
    if length == turn.start + turn.num_pending:
        length += sum(node in stored.nodes for node in path)
    lengths = list(store_lens)
    lengths[stored.store] = length
    return tuple(lengths)


def _commit_tokens(sequence: Sequence, turn: Turn) -> None:
    """Append the accepted path and the target's own token, one by one, up to the first that ends the sequence."""
    score, verdict = turn.score, turn.verdict
    if score.prompt_logprobs:
        known = len(sequence.prompt_logprobs) - turn.start  # a preempted prompt is scored again, to the same bits
        sequence.prompt_logprobs += score.prompt_logprobs[max(0, known) :]
        if any(math.isnan(entry.logprob) for entry in score.prompt_logprobs):
            sequence.fail(NO_DRAW)
            return
    if sequence.scores_only and sequence.num_pending == 0:
        sequence.finish(FinishReason.LENGTH)
    if verdict is None:
        return
    draws, logprobs, alternatives = score.draws, score.logprobs, score.alternatives
    # The draw at a node is the token of the next node on the path, or the bonus.
    for i in (0, *(node + 1 for node in verdict.path)):
        token_id = draws[i]
        if token_id < 0:
            sequence.fail(NO_DRAW)
            return
        sequence.append(TokenLogprob(token_id, logprobs[i], alternatives[i] if alternatives else ()))
        if sequence.finish_reason is not None:
            return
