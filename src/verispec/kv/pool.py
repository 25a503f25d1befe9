"""Slots: the addresses of K and V, one per token, counted by reference.

The pool knows nothing of tensors, sequences or tokens. A slot is free, leased (scratch, one owner), or held
with one or more references by sequences and by the prefix cache. A slot with more than one reference is never written;
only a lease may be written at all. `check()` verifies the books. No operation walks over slots that it
was not given, so none becomes slower with the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ZERO_SLOT = 0  # constant zero K/V: what masked context entries point to
DUMP_SLOT = 1  # where padding rows write; no real row ever reads it
NUM_RESERVED = 2


@dataclass(slots=True, eq=False)
class Lease:
    """Scratch slots lent to one sequence, for one step or many; ends with `commit` or `rollback`.

    Row i of the owner uses `slots[i]`.
    """

    slots: list[int] = field(default_factory=list)


class SlotPool:
    """`num_slots` usable slots behind the reserved ones, with reference counts, leases and a self-check."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        total = num_slots + NUM_RESERVED
        self._free = list(range(total - 1, NUM_RESERVED - 1, -1))  # taken from the end: low ids first
        self._refs = [0] * total
        self._cached = [False] * total
        self._num_cached_only = 0  # slots whose single reference is the prefix cache's
        self._watched: set[int] = set()  # cached slots that others hold, to be reported when they let go
        self._unheld: list[int] = []  # watched slots that only the prefix cache holds now
        self._leases: dict[int, Lease] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Slots that only the prefix cache holds."""
        return self._num_cached_only

    @property
    def num_available(self) -> int:
        """Slots that are free, or would be if the prefix cache were emptied."""
        return len(self._free) + self._num_cached_only

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The outstanding leases, oldest first."""
        return tuple(self._leases.values())

    def lease(self) -> Lease:
        """An empty lease; `extend` fills it."""
        lease = Lease()
        self._leases[id(lease)] = lease
        return lease

    def extend(self, lease: Lease, count: int) -> bool:
        """Add `count` free slots to the lease, all or none. Returns whether it did."""
        self._check_open(lease)
        if count > len(self._free):
            return False
        if count > 0:
            taken = self._free[: -count - 1 : -1]
            del self._free[-count:]
            for slot in taken:
                self._refs[slot] = 1
            lease.slots += taken
        return True

    def commit(self, lease: Lease, indices: Sequence[int]) -> list[int]:
        """End the lease: the slots at `indices` pass to the caller with one reference each, the others become free."""
        kept = [lease.slots[i] for i in indices]
        keep = set(kept)
        if len(keep) != len(kept):
            raise ValueError("a lease's slot can be committed once")
        self._close(lease)
        self.release(s for s in lease.slots if s not in keep)
        return kept

    def commit_all(self, lease: Lease) -> list[int]:
        """End the lease: all of its slots pass to the caller with one reference each."""
        self._close(lease)
        return lease.slots

    def commit_front(self, lease: Lease, count: int) -> list[int]:
        """The first `count` slots pass to the caller with one reference each; the lease goes on with the rest."""
        self._check_open(lease)
        if not 0 <= count <= len(lease.slots):
            raise ValueError(f"a lease of {len(lease.slots)} slots cannot give {count}")
        kept, lease.slots = lease.slots[:count], lease.slots[count:]
        return kept

    def trim(self, lease: Lease, count: int) -> None:
        """Free all slots of the lease but the first `count`."""
        self._check_open(lease)
        dropped, lease.slots = lease.slots[count:], lease.slots[:count]
        self.release(dropped)

    def rollback(self, lease: Lease) -> None:
        """End the lease and free all of its slots."""
        self._close(lease)
        self.release(lease.slots)

    def _check_open(self, lease: Lease) -> None:
        if self._leases.get(id(lease)) is not lease:
            raise ValueError("this lease has ended")

    def _close(self, lease: Lease) -> None:
        self._check_open(lease)
        del self._leases[id(lease)]

    def retain(self, slots: Iterable[int]) -> None:
        """Add one reference to each slot, which must be held."""
        refs, cached = self._refs, self._cached
        for slot in slots:
            before = refs[slot]
            if before < 2:
                if before < 1:
                    raise ValueError(f"slot {slot} is free and cannot be shared")
                self._num_cached_only -= cached[slot]
            refs[slot] = before + 1

    def release(self, slots: Iterable[int]) -> None:
        """Drop one reference from each slot; a slot without references becomes free."""
        refs, cached = self._refs, self._cached
        for slot in slots:
            left = refs[slot] - 1
            if left < 2:
                if left < 0:
                    raise ValueError(f"slot {slot} is free already")
                if left == 0:
                    if cached[slot]:
                        raise ValueError(f"slot {slot} is in the prefix cache, which still counts on it")
                    self._free.append(slot)
                elif cached[slot]:
                    self._num_cached_only += 1
                    if slot in self._watched:
                        self._watched.remove(slot)
                        self._unheld.append(slot)
            refs[slot] = left

    def mark_cached(self, slots: Iterable[int]) -> None:
        """Take one reference for the prefix cache."""
        for slot in slots:
            if self._cached[slot]:
                raise ValueError(f"slot {slot} is cached already")
            if self._refs[slot] < 1:
                raise ValueError(f"slot {slot} is free and cannot be shared")
            self._cached[slot] = True
            self._refs[slot] += 1

    def unmark_cached(self, slots: Iterable[int]) -> None:
        """Drop the prefix cache's reference."""
        for slot in slots:
            if not self._cached[slot]:
                raise ValueError(f"slot {slot} is not cached")
            self._cached[slot] = False
            self._watched.discard(slot)
            self._refs[slot] -= 1
            if self._refs[slot] == 0:
                self._num_cached_only -= 1
                self._free.append(slot)

    def watch(self, slot: int) -> None:
        """Report a cached slot in `take_unheld` as soon as only the prefix cache holds it."""
        if not self._cached[slot] or self._refs[slot] < 2:
            raise ValueError(f"slot {slot} is not both cached and held by others")
        self._watched.add(slot)

    def take_unheld(self) -> list[int]:
        """The watched slots that others have let go of since the last call; they are watched no more.

        They may be held again by now.
        """
        unheld, self._unheld = self._unheld, []
        return unheld

    def refs(self, slot: int) -> int:
        """The slot's reference count."""
        return self._refs[slot]

    def check(self) -> None:
        """Raise if the books do not balance: every slot free or held, leases exclusive, counters right."""
        free = set(self._free)
        leased = [s for lease in self._leases.values() for s in lease.slots]
        problems = {
            "a slot is free twice": len(free) != len(self._free),
            "a free slot has references": any(self._refs[s] for s in free),
            "a held slot has none": any(
                self._refs[s] < 1 for s in range(NUM_RESERVED, len(self._refs)) if s not in free
            ),
            "a reserved slot was handed out": any(self._refs[s] or s in free for s in range(NUM_RESERVED)),
            "a leased slot has two owners": len(set(leased)) != len(leased) or any(self._refs[s] != 1 for s in leased),
            "the evictable count is off": self._num_cached_only
            != sum(1 for s, r in enumerate(self._refs) if r == 1 and self._cached[s]),
            "a watched slot is held by the prefix cache alone": any(
                self._refs[s] < 2 or not self._cached[s] for s in self._watched
            ),
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise AssertionError("; ".join(found))
