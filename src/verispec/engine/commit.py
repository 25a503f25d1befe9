"""The end of a step: verdicts become committed tokens and slots, and events. Nothing else writes into a sequence."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from verispec.engine.roster import Roster
from verispec.engine.sequence import NO_DRAW, DraftNews, Sequence
from verispec.errors import VerispecError
from verispec.sampling.draw import NO_TOKEN
from verispec.spec.turn import Choice, Cohort, Pending, Step, Turn
from verispec.types import Draft, DraftTrace, FinishReason, Stored, TokenEvent, Verdict

logger = logging.getLogger(__name__)


class Committer:
    """Commits steps into the sequences of a roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._earlier: list[TokenEvent] = []  # of all rounds of a step but the last

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
        changed, self._roster.changed = self._roster.changed, {}
        return self.told(changed.values(), now)

    def _is_stale(self, sequence: Sequence, epoch: int) -> bool:
        """Whether the sequence was released since; a turn of it that has landed lets go of its slots."""
        kv = sequence.kv
        is_current = sequence.is_running and kv.epoch == epoch
        if is_current or sequence in self._roster.departing:
            kv.num_flights -= 1
        if not is_current:
            self._roster.depart()
        return not is_current

    def _commit_cohort(self, cohort: Cohort) -> None:
        """Plain rounds: every draw is a token, and its row's slot the sequence's next."""
        count, size, is_canonical = cohort.num_rounds, len(cohort.sequences), cohort.is_canonical
        pool = self._roster.pool
        slots = pool.commit_all(cohort.lease)
        self._roster.cohorts.remove(cohort)
        interrupt: BaseException | None = None
        columns = zip(cohort.sequences, cohort.epochs, cohort.draws, cohort.logprobs, strict=True)
        for i, (sequence, epoch, draws, logprobs) in enumerate(columns):
            assert isinstance(sequence, Sequence)
            own, kv, stats = slots[i::size], sequence.kv, sequence.stats
            if kv.epoch != epoch or not sequence.is_running:
                pool.release(own)
                self._is_stale(sequence, epoch)
                continue
            num_drawn = count
            if draws[-1] < 0:
                num_drawn = max(1, sum(token_id >= 0 for token_id in draws))
                pool.release(own[num_drawn:])
                del own[num_drawn:]
            num_held = len(kv.held)
            kv.held += own
            kv.synced_len = num_held + num_drawn
            if is_canonical:
                stats.passes += num_drawn
                if kv.canonical_len == num_held:
                    kv.canonical_len = kv.synced_len
            else:
                stats.fast_passes += num_drawn
            stats.chosen["plain"] += 1
            if cohort.choices:
                sequence.num_rested += num_drawn
                note_choice(sequence, cohort.choices[i])
            kv.num_flights -= 1
            if cohort.feeds:
                kv.num_ahead -= count
            if not kv.num_flights:
                kv.epoch += 1
            try:
                self._commit_draws(sequence, draws, logprobs)
            except BaseException as error:  # it ended one sequence; the others' slots must not be lost
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _commit_draws(self, sequence: Sequence, draws: SequenceOf[int], logprobs: SequenceOf[float]) -> None:
        """Append draws up to the first that ends the sequence; whatever happens, it ends alone."""
        if sequence.is_streamed:
            self._roster.changed[sequence.sequence_id] = sequence
        try:
            sequence.append_all(draws, logprobs)
        except BaseException as error:
            self._fail(sequence, error)
        if sequence.finish_reason is not None:
            self._end(sequence)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """One request's text or stop rules may fail: that request alone ends. Interrupted, it cannot be trusted."""
        if isinstance(error, Exception):
            is_known = isinstance(error, VerispecError)  # then its sentence says all
            logger.error("request %d failed: %s", sequence.request_id, error, exc_info=None if is_known else error)
            sequence.fail(f"{type(error).__name__}: {error}")
            return
        sequence.fail("interrupted while its tokens were committed")
        self._end(sequence)
        raise error

    def _end(self, sequence: Sequence) -> None:
        self._roster.changed[sequence.sequence_id] = sequence
        if sequence.is_running:
            self._roster.release(sequence)

    def told(self, sequences: Iterable[Sequence], now: float) -> list[TokenEvent]:
        """The events of these sequences: what clients have not been told."""
        events, self._earlier = self._earlier, []
        for sequence in sequences:
            if sequence.finish_reason is not None:
                sequence.stats.finish_time = now
            if len(sequence.logprobs) > sequence.outbox.next:
                sequence.stats.record_commit(now)
            events += sequence.take_events()
        return events

    def _commit_pending(self, turn: Turn, sequence: Sequence) -> None:
        """Fast rounds have drawn further tokens of a draft; nothing is committed."""
        num_drawn = sum(token_id >= 0 for token_id in turn.score.draws)
        sequence.num_rested = 0
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
                self._earlier += sequence.take_events()
            self._commit_one(part, sequence)
            if sequence.finish_reason is not None:
                self._end(sequence)
                return
        if sequence.kv.num_flights:  # another turn counts on the lease
            return
        sequence.kv.epoch += 1
        self._roster.trim(sequence, 0)
        if turn.start < sequence.prompt_len <= sequence.computed_len:
            self._roster.publish(sequence)  # the prompt is complete: others may share it from now on

    def _commit_one(self, turn: Turn, sequence: Sequence) -> None:
        draft = turn.draft
        assert isinstance(draft, Draft)
        if turn.verdict is not None and sequence.is_streamed:
            self._roster.changed[sequence.sequence_id] = sequence
        try:
            self._commit_slots(turn, sequence, draft, turn.verdict)
            self._count(turn, sequence, draft, turn.verdict)
            _commit_tokens(sequence, turn)
        except BaseException as error:
            self._fail(sequence, error)

    def _commit_slots(self, turn: Turn, sequence: Sequence, draft: Draft, verdict: Verdict | None) -> None:
        """Accepted rows' slots join the sequence; the others go back to the pool."""
        kv, pool = sequence.kv, self._roster.pool
        assert kv.lease is not None
        path = verdict.path if verdict else ()
        num_kept = turn.num_pending + len(path) + (_num_drawn(turn) - 1 if turn.rides else 0)
        if turn.is_canonical and kv.canonical_len == len(kv.held):
            kv.canonical_len += num_kept
        if draft.stored is not None and not (turn.catch_up and turn.catch_up.has_lost):
            kv.store_lens = _with_stored(kv.store_lens, turn, draft.stored, path)
        if turn.path_places is not None:  # the backend has changed the slots' places in its table in the same way
            slots = kv.lease.slots
            for i, place in enumerate(turn.path_places, turn.num_pending):
                other = turn.num_pending + place
                slots[i], slots[other] = slots[other], slots[i]
        if turn.path_places is not None or not len(draft) or draft.is_chain:
            kv.held += pool.commit_front(kv.lease, num_kept)
            kv.synced_len = min(kv.synced_len, len(kv.held) + len(kv.lease.slots))
        else:
            kept = [*range(turn.num_pending), *(turn.num_pending + node for node in path)]
            kv.held += pool.commit(kv.lease, kept)
            kv.lease = pool.lease()
            kv.synced_len = turn.start + turn.num_pending

    def _count(self, turn: Turn, sequence: Sequence, draft: Draft, verdict: Verdict | None) -> None:
        """Counters, and what the next event tells of the draft."""
        stats, choice = sequence.stats, turn.choice
        num_passes = _num_drawn(turn) if turn.rides else 1
        if turn.is_canonical:
            stats.passes += num_passes
        else:
            stats.fast_passes += num_passes
        if verdict is None:
            return
        stats.chosen[choice.drafter or "plain"] += 1
        note_choice(sequence, choice._replace(num_nodes=0, reason=turn.note) if turn.note else choice)
        stats.draft_passes += turn.num_draft_passes
        if turn.exit_state is not None:
            stats.exit_threshold, stats.exit_rate = turn.exit_state
        if not len(draft):
            sequence.num_rested += num_passes if sequence.is_followed else 0
            return
        sequence.num_rested = 0
        num_accepted = len(verdict.path)
        stats.accepted += num_accepted
        stats.accepted_by[choice.drafter] += num_accepted
        if choice.is_replay:
            stats.replays += 1
            stats.mismatches += num_accepted < len(draft)
            stats.recomputed += len(draft) - num_accepted
        if not choice.num_drawn:  # those were counted when they were drawn
            stats.drafted += len(draft)
        if sequence.tells_drafts:
            sequence.outbox.draft = _news(turn, draft, verdict)

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


def _news(turn: Turn, draft: Draft, verdict: Verdict) -> DraftNews:
    trace = None
    if turn.score.node_logprobs:
        probabilities = tuple(map(math.exp, turn.score.node_logprobs))
        trace = DraftTrace(draft, verdict, probabilities, turn.choice.drafter)
    rejected_ids = draft.token_ids[len(verdict.path) :]
    if not draft.is_chain:
        rejected_ids = tuple([t for node, t in enumerate(draft.token_ids) if node not in verdict.path])
    return DraftNews(len(verdict.path), rejected_ids, trace)


def _num_drawn(turn: Turn) -> int:
    """Rounds of a ride that drew; at least one. A later draw that failed is met again, as the first of another turn."""
    draws = turn.score.draws
    return max(1, len(draws) - draws.count(NO_TOKEN))


def note_choice(sequence: Sequence, choice: Choice) -> None:
    """What was chosen, and why. At the very end of a sequence there is no room for a draft, which tells nothing."""
    stats = sequence.stats
    if choice.because:
        stats.chosen_because = choice.because
    is_open = sequence.max_len - len(sequence.token_ids) > 1
    if choice.reason and not choice.num_nodes and (is_open or not stats.no_draft_reason):
        stats.no_draft_reason = choice.reason


def _with_stored(store_lens: tuple[int, ...], turn: Turn, stored: Stored, path: SequenceOf[int]) -> tuple[int, ...]:
    """How much each store holds once the path is committed: of a drafter's, the tokens and nodes it computed."""
    length = stored.num_tokens
    if length == turn.start + turn.num_pending:
        length += sum(node in stored.nodes for node in path)
    lengths = list(store_lens)
    lengths[stored.store] = length
    return tuple(lengths)


def _commit_tokens(sequence: Sequence, turn: Turn) -> None:
    """Append the accepted path and the target's own token, up to the first that ends the sequence."""
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
    chosen = range(_num_drawn(turn)) if turn.rides else (0, *(node + 1 for node in verdict.path))
    sequence.append_all(
        [draws[i] for i in chosen],
        [logprobs[i] for i in chosen],
        [alternatives[i] for i in chosen] if alternatives else (),
    )
