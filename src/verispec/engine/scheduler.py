"""Continuous batching without phases: every sequence has pending tokens, and a plan gives them rows.

Oldest first, always: each running sequence gets one row, then prompts fill the row budget, then drafts what the
planner grants. When slots run out the cache is evicted, then the youngest sequence is preempted and later recomputed;
the oldest can always run, so every admitted request ends. `commit` is the only writer of sequence state.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence as SequenceOf

from verispec.engine.planner import Planner
from verispec.engine.sequence import Sequence
from verispec.kv import PrefixCache, SlotPool
from verispec.spec.drafter import DrafterSet
from verispec.spec.plan import Plan, SequencePlan
from verispec.spec.verifier import Score
from verispec.types import Draft, FinishReason, Verdict

logger = logging.getLogger(__name__)
NO_DRAW = "no token can be drawn: the model's logits are NaN or infinite, or every token is banned"
_NOT_WORTH_IT = "verifying a draft was not predicted to pay at this load"


class Scheduler:
    """Owns the queue, the running sequences and their slots."""

    def __init__(
        self,
        *,
        pool: SlotPool,
        cache: PrefixCache,
        planner: Planner,
        drafters: DrafterSet,
        row_budget: int,
        max_running: int,
        max_draft: int,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._planner = planner
        self._drafters = drafters
        self._row_budget = row_budget
        self._max_draft = max_draft
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
        self._extend_prompts()
        return self._with_drafts()

    def commit(
        self, plan: Plan, drafts: SequenceOf[Draft], scores: SequenceOf[Score], verdicts: SequenceOf[Verdict | None]
    ) -> None:
        """Turn verdicts into committed tokens and slots; `changed` lists the sequences that clients should hear of."""
        canonical = set(map(id, plan.canonical))
        for p, draft, score, verdict in zip(plan.sequences, drafts, scores, verdicts, strict=True):
            sequence = p.sequence
            assert isinstance(sequence, Sequence)
            if sequence.epoch != p.epoch:
                continue  # aborted or preempted since: its lease is gone, the result is stale
            if verdict is not None:
                self.changed[sequence.sequence_id] = sequence
            try:
                self._commit_slots(p, sequence, verdict.path if verdict else (), is_canonical=id(p) in canonical)
                _commit_tokens(sequence, p.start, draft, score, verdict)
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
            elif p.start < sequence.prompt_len <= sequence.computed_len:
                self._publish(sequence)  # the prompt is complete: others may share it from now on

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is: waiting, running or in flight."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release(sequence)

    def _void_uncommitted(self) -> None:
        """Take back the leases of a plan whose pass failed or was interrupted: the rows are simply planned again."""
        for sequence in self.running:
            if sequence.lease is not None:
                self._pool.rollback(sequence.lease)
                sequence.lease = None
                sequence.epoch += 1

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
            if not sequence.stats.preemptions:
                sequence.stats.cached_tokens = len(hit.slots)
            sequence.seq_row = self._free_seq_rows.pop()
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.sequence_id)

    def _secure_row(self, sequence: Sequence) -> None:
        """Lease the first row of a sequence, taking slots from younger sequences if it must."""
        sequence.lease = self._pool.lease()
        while not self._take(sequence, 1):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _extend_prompts(self) -> None:
        """Give the rest of the row budget to tokens that are pending beyond the first, oldest sequence first."""
        left = self._row_budget - sum(1 for s in self.running if not _runs_fast(s))
        for sequence in self.running:
            available = self._pool.num_free + self._pool.num_evictable
            count = min(sequence.num_pending - 1, left, available)
            if count > 0 and self._take(sequence, count):
                left -= count

    def _with_drafts(self) -> Plan:
        """Freeze the plan, with the draft nodes the planner grants each complete sequence."""
        quotas: dict[int, int] = {}
        rows = {s.sequence_id: len(s.lease.slots) for s in self.running if s.lease is not None}
        for fast in (False, True):
            group = [s for s in self.running if _runs_fast(s) is fast]
            complete = [s for s in group if rows[s.sequence_id] == s.committed_len - s.computed_len]
            offers = [self._drafters.offer(s, self._draft_limit(s)) for s in complete]
            base_rows = sum(rows[s.sequence_id] for s in group)
            context = sum(rows[s.sequence_id] * s.committed_len for s in group)
            granted = self._planner.quotas(offers, base_rows=base_rows, context_tokens=context)
            for sequence, offer, quota in zip(complete, offers, granted, strict=True):
                if quota and self._take(sequence, quota):
                    quotas[sequence.sequence_id] = quota
                else:
                    sequence.stats.no_draft_reason = offer.reason or _NOT_WORTH_IT
        plans = [(s, self._sequence_plan(s, rows[s.sequence_id], quotas.get(s.sequence_id, 0))) for s in self.running]
        return Plan(
            canonical=tuple(p for s, p in plans if not _runs_fast(s)), fast=tuple(p for s, p in plans if _runs_fast(s))
        )

    def _draft_limit(self, sequence: Sequence) -> int:
        """Nodes that could still be committed: the token after the draft must fit too."""
        return max(0, min(self._max_draft, sequence.max_len - sequence.committed_len - 1))

    def _sequence_plan(self, sequence: Sequence, num_pending: int, draft_quota: int) -> SequencePlan:
        assert sequence.lease is not None
        table_slots = sequence.slots[sequence.synced_len :] + sequence.lease.slots[:num_pending]
        return SequencePlan(
            sequence=sequence,
            epoch=sequence.epoch,
            seq_row=sequence.seq_row,
            start=sequence.computed_len,
            num_pending=num_pending,
            draft_quota=draft_quota,
            lease=sequence.lease,
            table_start=sequence.synced_len,
            table_slots=table_slots,
            completes=sequence.computed_len + num_pending == sequence.committed_len,
        )

    def _take(self, sequence: Sequence, count: int) -> bool:
        """Extend the sequence's lease, evicting cached prefixes if needed; all or none."""
        assert sequence.lease is not None
        missing = count - self._pool.num_free
        if missing > 0 and self._cache.evict(missing) < missing:
            return False
        return self._pool.extend(sequence.lease, count)

    def _commit_slots(
        self, plan: SequencePlan, sequence: Sequence, path: tuple[int, ...], *, is_canonical: bool
    ) -> None:
        """Accepted rows' slots join the sequence, the others go back to the pool."""
        kept = [*range(plan.num_pending), *(plan.num_pending + node for node in path)]
        if is_canonical and sequence.canonical_len == sequence.computed_len:
            sequence.canonical_len += len(kept)
        sequence.stats.passes += is_canonical
        sequence.stats.fast_passes += not is_canonical
        sequence.slots += self._pool.commit(plan.lease, kept)
        sequence.synced_len = plan.start + plan.num_pending
        sequence.lease = None

    def _publish(self, sequence: Sequence) -> None:
        """Put the canonical prefix into the cache; the sequence goes on with the cache's copy of it.

        A sequence that ended inside an accepted path holds slots for tokens it never committed: those are left out.
        """
        canonical_len = min(sequence.canonical_len, sequence.committed_len)
        held = self._cache.publish(sequence.token_ids[:canonical_len], sequence.slots, (canonical_len,))
        if held != sequence.slots:
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
        if sequence.lease is not None:
            self._pool.rollback(sequence.lease)
            sequence.lease = None
        if sequence.finish_reason is not FinishReason.ERROR:
            self._publish(sequence)
        self._pool.release(sequence.slots)
        self._free_seq_rows.append(sequence.seq_row)
        self.running.remove(sequence)
        sequence.slots, sequence.canonical_len, sequence.synced_len, sequence.seq_row = [], 0, 0, 0
        sequence.epoch += 1


def _runs_fast(sequence: Sequence) -> bool:
    """Whether the sequence's rows run in the fast pass: generation of a request that asked for no determinism.

    Prompts always run in canonical passes, so that their K/V can be shared.
    """
    return not sequence.params.deterministic and sequence.num_pending == 1 and bool(sequence.output)


def _commit_tokens(sequence: Sequence, start: int, draft: Draft, score: Score, verdict: Verdict | None) -> None:
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
    sequence.note_draft(draft, verdict.path)
    for node in (-1, *verdict.path):
        entry = score.logprobs[node + 1]  # the draw at a node is the token of the next node on the path, or the bonus
        if entry.token_id < 0:
            sequence.fail(NO_DRAW)
        else:
            sequence.append(entry)
        if sequence.finish_reason is not None:
            return
