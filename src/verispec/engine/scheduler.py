"""Continuous batching without phases: every sequence has pending tokens, and a plan gives them rows.

Oldest first, always: each running sequence gets one row, then replays and prompts fill the row budget, then drafts what
the planner grants. When slots run out the cache is evicted, then the youngest sequence is preempted and later
recomputed; the oldest can always run, so every admitted request ends. `commit` is the only writer of sequence state.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from verispec.engine.assignment import PLAIN, Action, Assigner
from verispec.engine.sequence import Sequence
from verispec.kv import PrefixCache, SlotPool
from verispec.spec.plan import Plan, SequencePlan, WindowPlan
from verispec.spec.verifier import Score, Scores
from verispec.types import Draft, DraftTrace, FinishReason, Stored, Verdict

logger = logging.getLogger(__name__)
NO_DRAW = "no token can be drawn: the model's logits are NaN or infinite, or every token is banned"


class Scheduler:
    """Owns the queue, the running sequences and their slots.

    `has_family` says whether there are canonical shapes; without them everything runs in fast passes.
    """

    def __init__(
        self, *, pool: SlotPool, cache: PrefixCache, assigner: Assigner, max_running: int, has_family: bool
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._assigner = assigner
        self._has_family = has_family
        self._free_seq_rows = list(range(max_running, 0, -1))  # row 0 of the table is the padding's
        self.changed: dict[int, Sequence] = {}  # by sequence id: committed to, or ended, since events were last made
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others."""
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Rows for the next step, with slots leased for all of them. Voids a plan that was never committed."""
        self._void_uncommitted()
        self._admit()
        for sequence in list(self.running):
            if sequence in self.running:
                self._secure_row(sequence)
        exact = [s for s in self.running if not self._runs_fast(s)]
        fast = [s for s in self.running if self._runs_fast(s)]
        replays = self._assigner.replays(exact)
        taken = sum(1 for s in exact if s.window is None) + sum(1 + a.draft_quota for a in replays.values())
        num_rows = self._extend_prompts(exact, self._assigner.row_budget - taken)
        num_rows |= self._extend_prompts(fast, self._assigner.row_budget - len(fast))
        actions = self._assigner.assign(exact, fast, num_rows=num_rows, replays=replays)
        is_joined = self._assigner.joins(exact, fast, num_rows=num_rows, actions=actions)
        return replace(self._freeze(exact, fast, num_rows, actions), is_joined=is_joined)

    def commit(
        self, plan: Plan, drafts: SequenceOf[Draft], scores: Scores, verdicts: SequenceOf[Verdict | None]
    ) -> None:
        """Turn verdicts into committed tokens and slots; `changed` lists the sequences that clients should hear of."""
        for w, token_id in zip(plan.drafting, scores.drafted, strict=True):
            if _is_current(w):
                self._commit_window(w, token_id)
        canonical = set(map(id, plan.canonical))
        for p, draft, score, verdict in zip(plan.sequences, drafts, scores.judged, verdicts, strict=True):
            if _is_current(p):
                self._commit_one(p, draft, score, verdict, is_canonical=id(p) in canonical)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is: waiting, running or in flight."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release(sequence)

    def _void_uncommitted(self) -> None:
        """Take back what was leased for a plan whose pass failed or was interrupted: its rows are planned again.

        The slots of a window stay: what was decoded into them before still stands.
        """
        for sequence in self.running:
            if sequence.is_in_flight:
                sequence.is_in_flight = False
                sequence.epoch += 1
                self._trim_lease(sequence)

    def _trim_lease(self, sequence: Sequence) -> None:
        """Give back the leased slots that no token of the window needs; without a window, the lease."""
        if sequence.lease is not None and sequence.window is not None:
            self._pool.trim(sequence.lease, len(sequence.window))
        elif sequence.lease is not None:
            self._pool.rollback(sequence.lease)
            sequence.lease = None

    def _admit(self) -> None:
        """Move waiting sequences to running while there are slots for their prompts; first come, first served."""
        while self.waiting and self._free_seq_rows:
            sequence = self.waiting[0]
            leader = sequence.leader
            if leader is not None and leader.finish_reason is None and leader.computed_len < leader.prompt_len:
                return
            limit = 0 if sequence.needs_prompt_rows else sequence.committed_len - 1
            hit = self._cache.match(sequence.token_ids, limit=limit)
            needed = sequence.committed_len - len(hit.slots) + len(self.running)
            if self.running and needed > self._pool.num_free + self._pool.num_evictable:
                self._pool.release(hit.slots)
                return
            self.waiting.popleft()
            sequence.slots, sequence.canonical_len, sequence.synced_len = hit.slots, len(hit.slots), 0
            sequence.store_lens = hit.valid_lens
            if not sequence.stats.preemptions:
                sequence.stats.cached_tokens = len(hit.slots)
            sequence.seq_row = self._free_seq_rows.pop()
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.sequence_id)

    def _secure_row(self, sequence: Sequence) -> None:
        """Lease the next row of a sequence, taking slots from younger sequences if it must."""
        if sequence.lease is None:
            sequence.lease = self._pool.lease()
        sequence.is_in_flight = True
        decoded = 0 if sequence.window is None else len(sequence.window)
        while not self._take(sequence, decoded + 1 - len(sequence.lease.slots)):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _extend_prompts(self, sequences: SequenceOf[Sequence], left: int) -> dict[int, int]:
        """Give so many rows to tokens that are pending beyond the first, oldest sequence first.

        Returns every sequence's pending rows by its id.
        """
        num_rows = {}
        for sequence in sequences:
            available = self._pool.num_free + self._pool.num_evictable
            count = min(sequence.num_pending - 1, left, available)
            if count <= 0 or not self._take(sequence, count):
                count = 0
            left -= count
            num_rows[sequence.sequence_id] = 1 + count
        return num_rows

    def _freeze(
        self,
        exact: SequenceOf[Sequence],
        fast: SequenceOf[Sequence],
        num_rows: Mapping[int, int],
        actions: Mapping[int, Action],
    ) -> Plan:
        """Lease the slots of the nodes assigned, as far as there are any, and make the plan."""
        canonical: list[SequencePlan] = []
        regular: list[SequencePlan] = []
        drafting: list[WindowPlan] = []
        for sequences, plans in ((exact, canonical), (fast, regular)):
            for s in sequences:
                action = actions.get(s.sequence_id, PLAIN)
                if s.computed_len + num_rows[s.sequence_id] == s.committed_len:
                    s.stats.chosen[action.drafter or "plain"] += 1
                if action.decodes:
                    drafting.append(_window_plan(s, action))
                else:
                    plans.append(self._sequence_plan(s, num_rows[s.sequence_id], action))
        return Plan(tuple(canonical), tuple(regular), tuple(drafting))

    def _sequence_plan(self, sequence: Sequence, num_pending: int, action: Action) -> SequencePlan:
        assert sequence.lease is not None
        window = () if sequence.window is None else tuple(sequence.window.token_ids)
        quota = action.draft_quota
        if not self._take(sequence, num_pending + quota - len(sequence.lease.slots)):
            quota = len(window) - 1 if window else 0  # rows that are leased already
        return SequencePlan(
            sequence=sequence,
            epoch=sequence.epoch,
            seq_row=sequence.seq_row,
            start=sequence.computed_len,
            num_pending=num_pending,
            draft_quota=quota,
            lease=sequence.lease,
            table_start=sequence.synced_len,
            table_slots=_unsynced(sequence, num_pending),
            completes=sequence.computed_len + num_pending == sequence.committed_len,
            drafter=action.drafter,
            window=window,
            shape=action.shape,
            store_lens=sequence.store_lens,
        )

    def _take(self, sequence: Sequence, count: int) -> bool:
        """Extend the sequence's lease, evicting cached prefixes if needed; all or none."""
        assert sequence.lease is not None
        missing = count - self._pool.num_free
        if missing > 0 and self._cache.evict(missing) < missing:
            return False
        return count <= 0 or self._pool.extend(sequence.lease, count)

    def _commit_window(self, plan: WindowPlan, token_id: int) -> None:
        """A regularly decoded token joins its sequence's window; nothing is committed."""
        sequence = plan.sequence
        assert isinstance(sequence, Sequence)
        sequence.stats.fast_passes += 1
        sequence.decode(token_id, target_len=plan.target_len, drafter=plan.drafter)
        self._end_flight(sequence)
        self._trim_lease(sequence)
        sequence.synced_len = sequence.computed_len + len(sequence.window or ())

    def _commit_one(
        self, plan: SequencePlan, draft: Draft, score: Score, verdict: Verdict | None, *, is_canonical: bool
    ) -> None:
        sequence = plan.sequence
        assert isinstance(sequence, Sequence)
        if verdict is not None:
            self.changed[sequence.sequence_id] = sequence
        try:
            self._commit_slots(plan, sequence, draft, verdict, is_canonical=is_canonical)
            if verdict is not None and score.node_logprobs:
                sequence.note_trace(DraftTrace(draft, verdict, tuple(map(math.exp, score.node_logprobs))))
            _commit_tokens(sequence, plan.start, score, verdict)
        except Exception as error:  # one request's text or stop rules may fail; that request alone ends
            logger.exception("request %d failed", sequence.request_id)
            sequence.fail(f"{type(error).__name__}: {error}")
        except BaseException:  # interrupted half-way: this request's state cannot be trusted any more
            sequence.fail("interrupted while its tokens were committed")
            self.changed[sequence.sequence_id] = sequence
            self._release(sequence)
            raise
        if sequence.finish_reason is not None:
            self.changed[sequence.sequence_id] = sequence
            self._release(sequence)
        elif plan.start < sequence.prompt_len <= sequence.computed_len:
            self._publish(sequence)  # the prompt is complete: others may share it from now on

    def _commit_slots(
        self, plan: SequencePlan, sequence: Sequence, draft: Draft, verdict: Verdict | None, *, is_canonical: bool
    ) -> None:
        """Accepted rows' slots join the sequence; the others go back to the pool, unless a window goes on in them."""
        path = verdict.path if verdict else ()
        if verdict is not None and sequence.window is not None:
            sequence.note_replay(sequence.window, verdict)
        elif verdict is not None:
            sequence.note_draft(draft, path)
        num_kept = plan.num_pending + len(path)
        if is_canonical and sequence.canonical_len == sequence.computed_len:
            sequence.canonical_len += num_kept
        if draft.stored is not None:
            sequence.store_lens = _with_stored(sequence, plan, draft.stored, path)
        sequence.stats.passes += is_canonical
        sequence.stats.fast_passes += not is_canonical
        if draft.is_chain:
            sequence.slots += self._pool.commit_front(plan.lease, num_kept)
            sequence.synced_len = plan.start + num_kept
        else:
            kept = [*range(plan.num_pending), *(plan.num_pending + node for node in path)]
            sequence.slots += self._pool.commit(plan.lease, kept)
            sequence.lease = None
            sequence.synced_len = plan.start + plan.num_pending
        self._end_flight(sequence)
        self._trim_lease(sequence)

    def _end_flight(self, sequence: Sequence) -> None:
        sequence.is_in_flight = False
        sequence.epoch += 1

    def _publish(self, sequence: Sequence) -> None:
        """Put the canonical prefix into the cache; the sequence goes on with the cache's copy of it.

        A sequence that ended inside an accepted path holds slots for tokens it never committed: those are left out.
        """
        canonical_len = min(sequence.canonical_len, sequence.committed_len)
        valid_lens = (canonical_len, *sequence.store_lens[1:])
        held = self._cache.publish(sequence.token_ids[:canonical_len], sequence.slots, valid_lens)
        if held != sequence.slots:  # a drafter's store may lack what the cache's slots hold for the target
            same = next(i for i, (a, b) in enumerate(zip(held, sequence.slots, strict=True)) if a != b)
            sequence.store_lens = tuple(min(length, same) for length in sequence.store_lens)
            sequence.slots, sequence.synced_len = held, 0

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a sequence and queue it first in line by age; it is recomputed later."""
        sequence.stats.preemptions += 1
        self._release(sequence)
        behind = next(
            (i for i, s in enumerate(self.waiting) if s.sequence_id > sequence.sequence_id), len(self.waiting)
        )
        self.waiting.insert(behind, sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back row, lease and slots; publish what is canonical first, unless the request failed."""
        sequence.window = None
        self._trim_lease(sequence)
        if sequence.finish_reason is not FinishReason.ERROR:
            self._publish(sequence)
        self._pool.release(sequence.slots)
        self._free_seq_rows.append(sequence.seq_row)
        self.running.remove(sequence)
        sequence.slots, sequence.canonical_len, sequence.synced_len, sequence.seq_row = [], 0, 0, 0
        sequence.store_lens = ()
        self._end_flight(sequence)

    def _runs_fast(self, sequence: Sequence) -> bool:
        """Whether the sequence's rows run in the fast pass: generation of a request that asked for no determinism.

        Prompts run in canonical passes, so that their K/V can be shared, unless there are none.
        """
        if sequence.params.deterministic:
            return False
        return not self._has_family or (sequence.num_pending == 1 and bool(sequence.output))


def _is_current(plan: SequencePlan | WindowPlan) -> bool:
    """Whether the sequence is as it was planned; else the result is stale, and its lease is gone."""
    assert isinstance(plan.sequence, Sequence)
    return plan.sequence.epoch == plan.epoch


def _unsynced(sequence: Sequence, num_leased: int) -> list[int]:
    """The slots that the backend's table does not have yet, up to so many leased ones."""
    assert sequence.lease is not None
    return (sequence.slots + sequence.lease.slots[:num_leased])[sequence.synced_len :]


def _window_plan(sequence: Sequence, action: Action) -> WindowPlan:
    assert sequence.lease is not None
    window = () if sequence.window is None else tuple(sequence.window.token_ids)
    return WindowPlan(
        sequence=sequence,
        epoch=sequence.epoch,
        seq_row=sequence.seq_row,
        lease=sequence.lease,
        table_start=sequence.synced_len,
        table_slots=_unsynced(sequence, len(window) + 1),
        window=window,
        target_len=action.target_len,
        drafter=action.drafter,
    )


def _with_stored(sequence: Sequence, plan: SequencePlan, stored: Stored, path: SequenceOf[int]) -> tuple[int, ...]:
    """How much each store holds once the path is committed: of a drafter's, the tokens and nodes it computed."""
    length = stored.num_tokens
    if length == plan.start + plan.num_pending:
        length += sum(node in stored.nodes for node in path)
    lengths = list(sequence.store_lens)
    lengths[stored.store] = length
    return tuple(lengths)


def _commit_tokens(sequence: Sequence, start: int, score: Score, verdict: Verdict | None) -> None:
    """Append the accepted path and the target's own token, one by one, up to the first that ends the sequence."""
    known = len(sequence.prompt_logprobs) - start  # a preempted prompt is scored again, to the same bits
    sequence.prompt_logprobs += score.prompt_logprobs[max(0, known) :]
    if any(math.isnan(entry.logprob) for entry in score.prompt_logprobs):
        sequence.fail(NO_DRAW)
        return
    if sequence.scores_only and sequence.num_pending == 0:
        sequence.finish(FinishReason.LENGTH)
    if verdict is None:
        return
    for node in (-1, *verdict.path):
        entry = score.logprobs[node + 1]  # the draw at a node is the token of the next node on the path, or the bonus
        if entry.token_id < 0:
            sequence.fail(NO_DRAW)
        else:
            sequence.append(entry)
        if sequence.finish_reason is not None:
            return
