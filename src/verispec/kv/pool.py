"""Slots: the addresses of K and V, one per token.

The pool knows nothing of tensors, sequences or tokens. A slot is free or has one owner: a lease (scratch), a sequence,
or the prefix cache, which lets sequences share what it owns. Only a lease may be written. `check()` verifies the books.
No operation walks over slots that it was not given, so none becomes slower with the size of the pool.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    """`num_slots` usable slots behind the reserved ones, with leases and a self-check."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(
            range(num_slots + NUM_RESERVED - 1, NUM_RESERVED - 1, -1)
        )  # taken from the end: low ids first
        self._owned: set[int] = set()
        self._leases: dict[int, Lease] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

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
            self._owned.update(taken)
            lease.slots += taken
        return True

    def commit(self, lease: Lease, indices: Sequence[int]) -> list[int]:
        """End the lease: the slots at `indices` pass to the caller, the others become free."""
        kept = [lease.slots[i] for i in indices]
        keep = set(kept)
        if len(keep) != len(kept):
            raise ValueError("a lease's slot can be committed once")
        self._close(lease)
        self.release([s for s in lease.slots if s not in keep])
        return kept

    def commit_all(self, lease: Lease) -> list[int]:
        """End the lease: all of its slots pass to the caller."""
        self._close(lease)
        return lease.slots

    def commit_front(self, lease: Lease, count: int) -> list[int]:
        """The first `count` slots pass to the caller; the lease goes on with the rest."""
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

    def release(self, slots: Collection[int]) -> None:
        """Make slots free that the caller owns."""
        if not self.owns(slots):
            raise ValueError(f"slot {next(s for s in slots if s not in self._owned)} is free already")
        self._owned.difference_update(slots)
        self._free += slots

    def owns(self, slots: Collection[int]) -> bool:
        """Whether somebody owns each of these slots."""
        return self._owned.issuperset(slots)

    def check(self) -> None:
        """Raise if the books do not balance: every slot free or owned, leases exclusive."""
        free = set(self._free)
        leased = [s for lease in self._leases.values() for s in lease.slots]
        usable = set(range(NUM_RESERVED, self.num_slots + NUM_RESERVED))
        problems = {
            "a slot is free twice": len(free) != len(self._free),
            "a free slot has an owner": bool(free & self._owned),
            "a slot is neither free nor owned": bool(usable - free - self._owned),
            "a reserved slot was handed out": not free | self._owned <= usable,
            "a leased slot has two owners": len(set(leased)) != len(leased),
            "a leased slot is free": not self._owned.issuperset(leased),
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise AssertionError("; ".join(found))
