"""Who waits, who runs, and the slots they hold: taking them and giving them back.

When slots run out the cache is evicted, then the youngest sequence is preempted and later recomputed; the oldest can
always run, so every admitted request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from verispec.engine.sequence import Sequence
from verispec.kv import PrefixCache, SlotPool
from verispec.sampling.rows import Sampler
from verispec.spec.turn import Cohort
from verispec.types import FinishReason


class Roster:
    """The queue, the running sequences and their slots. `bind` tells the backend who has a row of its table."""

    def __init__(
        self,
        pool: SlotPool,
        cache: PrefixCache,
        bind: Callable[[int, Sampler], None],
        clock: Callable[[], float],
        *,
        max_running: int,
    ) -> None:
        self.pool = pool
        self._clock = clock
        self._cache = cache
        self._bind = bind
        self.free_seq_rows = list(range(max_running, 0, -1))  # row 0 of the table is the padding's
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.version = 0  # moves when somebody comes or goes, gets up, or has to send everything again
        self.departing: list[Sequence] = []  # have ended; their slots wait for the flights that use them
        self.cohorts: list[Cohort] = []  # in the air
        self.changed: dict[int, Sequence] = {}  # by sequence id: to be told to clients

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits, and there is a row for them."""
        return bool(self.waiting and self.free_seq_rows)

    @property
    def num_available(self) -> int:
        """Slots that are free, or would be if the prefix cache were emptied."""
        return self.pool.num_free + self._cache.num_evictable

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others. One that the tokens it was given have ended never runs."""
        if sequence.finish_reason is not None:
            self.changed[sequence.sequence_id] = sequence
        else:
            self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is: waiting, running or in flight."""
        self.changed.pop(sequence.sequence_id, None)
        if sequence.is_running:
            self.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def void(self) -> None:
        """Take back what was leased for turns that failed or were abandoned: their rows are planned again."""
        self.version += 1
        for cohort in self.cohorts:
            self.pool.rollback(cohort.lease)
        self.cohorts.clear()
        for sequence in self.running:
            if sequence.kv.num_flights:
                kv = sequence.kv
                kv.num_flights = kv.num_ahead = 0
                self.trim(sequence, 0)
                kv.synced_len = 0  # what was sent may never have arrived
                kv.epoch += 1
                kv.draft_epoch += 1
        for sequence in self.departing:
            sequence.kv.num_flights = 0
        self.depart()

    def admit(self) -> None:
        """Move waiting sequences to running while there are slots for their prompts; first come, first served."""
        while self.may_admit:
            sequence = self.waiting[0]
            leader = sequence.leader
            if leader is not None and leader.finish_reason is None and leader.computed_len < leader.prompt_len:
                return
            limit = 0 if sequence.needs_prompt_rows else sequence.committed_len - 1
            hit = self._cache.match(sequence.token_ids, limit=limit, salt=sequence.salt)
            needed = sequence.committed_len - len(hit.slots) + len(self.running)
            if self.running and needed > self.num_available:
                self._cache.let_go(hit.node)
                return
            self.waiting.popleft()
            kv = sequence.kv
            kv.held, kv.node, kv.store_lens = hit.slots, hit.node, hit.valid_lens
            kv.num_shared = kv.canonical_len = len(hit.slots)
            kv.synced_len = 0
            if not sequence.stats.preemptions:
                sequence.stats.start_time = self._clock()
                sequence.stats.cached_tokens = min(len(hit.slots), sequence.prompt_len - 1)  # the rest is output
            kv.seq_row, kv.lease, sequence.is_running = self.free_seq_rows.pop(), self.pool.lease(), True
            self._bind(kv.seq_row, _sampler(sequence))
            self.version += 1
            self.running.append(sequence)
            if len(self.running) > 1 and self.running[-2].sequence_id > sequence.sequence_id:
                self.running.sort(key=lambda s: s.sequence_id)

    def secure_row(self, sequence: Sequence) -> bool:
        """Lease the next row of a sequence, taking slots from younger sequences if it must. False if it was the one."""
        while not self.take(sequence, 1):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def take(self, sequence: Sequence, count: int) -> bool:
        """Bring the sequence's lease to at least `count` slots, evicting cached prefixes if needed; all or none."""
        lease = sequence.kv.lease
        assert lease is not None
        count -= len(lease.slots)
        if count <= 0:
            return True
        return self.make_room(count) and self.pool.extend(lease, count)

    def make_room(self, count: int) -> bool:
        """Whether so many slots are free, if need be by evicting cached prefixes."""
        missing = count - self.pool.num_free
        return missing <= 0 or self._cache.evict(missing) >= missing

    def trim(self, sequence: Sequence, count: int) -> None:
        """Give back all but the first `count` slots of the lease."""
        kv = sequence.kv
        assert kv.lease is not None
        if len(kv.lease.slots) > count:
            self.pool.trim(kv.lease, count)
        kv.synced_len = min(kv.synced_len, len(kv.held) + count)

    def publish(self, sequence: Sequence) -> None:
        """Put the canonical prefix into the cache; the sequence goes on with the cache's copy of it.

        A sequence that ended inside an accepted path holds slots for tokens it never committed: those are left out.
        """
        kv = sequence.kv
        canonical_len, num_shared = min(kv.canonical_len, sequence.committed_len), kv.num_shared
        valid_lens = (canonical_len, *kv.store_lens[1:])
        held, kv.store_lens, kv.node = self._cache.publish(
            sequence.token_ids[:canonical_len], kv.held, valid_lens, held=kv.node, salt=sequence.salt
        )
        kv.num_shared = canonical_len if kv.node is not None else 0
        if held != kv.held:
            # What it shared, the cache has held for it and not moved.
            same = next(i for i in range(num_shared, len(held)) if held[i] != kv.held[i])
            kv.held, kv.synced_len = held, min(kv.synced_len, same)

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a sequence and queue it first in line by age; it is recomputed later."""
        sequence.stats.preemptions += 1
        self.release(sequence)
        behind = next(
            (i for i, s in enumerate(self.waiting) if s.sequence_id > sequence.sequence_id), len(self.waiting)
        )
        self.waiting.insert(behind, sequence)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out of the running; its row and slots are given back once nothing in the air uses them."""
        self.version += 1
        self.running.remove(sequence)
        sequence.is_running = False
        sequence.kv.epoch += 1
        self.departing.append(sequence)
        self.depart()

    def depart(self) -> None:
        """Give back rows, leases and slots; publish what is canonical first, unless the request failed."""
        for sequence in [s for s in self.departing if not s.kv.num_flights]:
            kv = sequence.kv
            self.departing.remove(sequence)
            assert kv.lease is not None
            self.pool.rollback(kv.lease)
            if sequence.finish_reason is not FinishReason.ERROR:
                self.publish(sequence)
            self._cache.let_go(kv.node)
            self.pool.release(kv.held[kv.num_shared :])
            self.free_seq_rows.append(kv.seq_row)
            kv.held, kv.node, kv.lease, kv.store_lens = [], None, None, ()
            kv.num_shared = kv.canonical_len = kv.synced_len = kv.seq_row = kv.num_ahead = 0
            kv.draft_epoch += 1


def _sampler(sequence: Sequence) -> Sampler:
    return Sampler(
        sequence.params,
        sequence.sample_key,
        prompt_len=sequence.prompt_len,
        limit=sequence.max_len,
        stop_ids=tuple(sorted(sequence.stopping_ids)),
    )
