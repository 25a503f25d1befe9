"""SlotPool against an obvious model, rule by rule, and the misuse that must raise."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.support.scale import scaled
from verispec.kv import NUM_RESERVED, Lease, SlotPool

NUM_SLOTS = 12
MIN_RULES = 55_000  # this file's share of the 10^5 rules that the stateful tests of kv/ and engine/ execute
CI = settings(
    max_examples=scaled(1350),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

picks = st.integers(0, 2**16)
counts = st.integers(0, NUM_SLOTS // 2)


class PoolMachine(RuleBasedStateMachine):
    """Owners have lists of slots; the model counts them from scratch after every rule."""

    num_rules = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS)
        self.leases: list[Lease] = []
        self.ended: list[Lease] = []
        self.owned: list[list[int]] = []
        self.rules_here = -1  # the invariants also run once before the first rule

    def teardown(self) -> None:
        PoolMachine.num_rules += self.rules_here

    @rule()
    def lease(self) -> None:
        self.leases.append(self.pool.lease())

    @precondition(lambda self: self.leases)
    @rule(pick=picks, count=counts)
    def extend(self, pick: int, count: int) -> None:
        lease, free = self.leases[pick % len(self.leases)], self.pool.num_free
        before = list(lease.slots)
        assert self.pool.extend(lease, count) is (count <= free)
        added = lease.slots[len(before) :]
        assert lease.slots[: len(before)] == before
        assert len(added) == (count if count <= free else 0)
        assert not set(added) & self.held_before

    @precondition(lambda self: self.leases)
    @rule(pick=picks, order=st.randoms(use_true_random=False))
    def commit(self, pick: int, order) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        indices = order.sample(range(len(lease.slots)), order.randint(0, len(lease.slots)))
        slots = list(lease.slots)
        kept = self.pool.commit(lease, indices)
        assert kept == [slots[i] for i in indices]
        self.owned.append(kept)
        self.ended.append(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, count=picks)
    def commit_front(self, pick: int, count: int) -> None:
        lease = self.leases[pick % len(self.leases)]
        slots, count = list(lease.slots), count % (len(lease.slots) + 1)
        assert self.pool.commit_front(lease, count) == slots[:count]
        assert lease.slots == slots[count:]
        self.owned.append(slots[:count])

    @precondition(lambda self: self.leases)
    @rule(pick=picks, count=counts)
    def trim(self, pick: int, count: int) -> None:
        lease = self.leases[pick % len(self.leases)]
        slots = list(lease.slots)
        self.pool.trim(lease, count)
        assert lease.slots == slots[:count]

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def rollback(self, pick: int) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        self.pool.rollback(lease)
        self.ended.append(lease)

    @precondition(lambda self: self.owned)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.pool.release(self.owned.pop(pick % len(self.owned)))

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def misuse_a_free_slot(self) -> None:
        slot = next(s for s in range(NUM_RESERVED, NUM_SLOTS + NUM_RESERVED) if s not in self.held_before)
        with pytest.raises(ValueError, match=f"slot {slot} is free already"):
            self.pool.release([*self.held_before, slot])

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def misuse_an_ended_lease(self, pick: int) -> None:
        lease = self.ended[pick % len(self.ended)]
        verbs: tuple[Callable[[], object], ...] = (
            lambda: self.pool.rollback(lease),
            lambda: self.pool.commit_front(lease, 0),
            lambda: self.pool.trim(lease, 0),
        )
        with pytest.raises(ValueError, match="ended"):
            verbs[pick % len(verbs)]()

    @invariant()
    def books_balance(self) -> None:
        self.rules_here += 1
        self.pool.check()
        holders = (*(lease.slots for lease in self.leases), *self.owned)
        held = Counter(s for slots in holders for s in slots)
        assert max(held.values(), default=1) == 1
        assert [self.pool.owns([s]) for s in range(NUM_SLOTS + NUM_RESERVED)] == [
            s in held for s in range(NUM_SLOTS + NUM_RESERVED)
        ]
        assert self.pool.num_free == NUM_SLOTS - len(held)
        assert self.pool.leases == tuple(self.leases)
        self.held_before = frozenset(held)


def test_the_books_balance_after_every_rule() -> None:
    run_state_machine_as_test(PoolMachine, settings=CI)
    assert PoolMachine.num_rules >= min(MIN_RULES, scaled(MIN_RULES))


def leased(pool: SlotPool, count: int) -> Lease:
    lease = pool.lease()
    assert pool.extend(lease, count)
    return lease


def owned(pool: SlotPool, count: int) -> list[int]:
    return pool.commit(leased(pool, count), range(count))


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(8)


def test_a_double_free_raises(pool: SlotPool) -> None:
    slots = owned(pool, 3)
    pool.release(slots)
    with pytest.raises(ValueError, match=f"slot {slots[0]} is free already"):
        pool.release(slots)
    pool.check()


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("again", ["commit", "rollback", "extend", "commit_front", "trim"])
def test_a_lease_ends_once(pool: SlotPool, end: str, again: str) -> None:
    lease = leased(pool, 2)
    verbs: dict[str, Callable[[], object]] = {
        "commit": lambda: pool.commit(lease, [0]),
        "rollback": lambda: pool.rollback(lease),
        "extend": lambda: pool.extend(lease, 1),
        "commit_front": lambda: pool.commit_front(lease, 1),
        "trim": lambda: pool.trim(lease, 0),
    }
    verbs[end]()
    num_free = pool.num_free
    with pytest.raises(ValueError, match="this lease has ended"):
        verbs[again]()
    assert pool.num_free == num_free
    pool.check()


def test_a_lease_of_another_pool_is_refused(pool: SlotPool) -> None:
    with pytest.raises(ValueError, match="ended"):
        pool.commit(leased(SlotPool(8), 2), [0])


def test_committing_a_slot_twice_raises_and_leaves_the_lease_open(pool: SlotPool) -> None:
    lease = leased(pool, 2)
    with pytest.raises(ValueError, match="once"):
        pool.commit(lease, [1, 1])
    assert pool.commit(lease, [1]) == [lease.slots[1]]


def test_the_front_of_a_lease_is_committed_and_the_rest_goes_on(pool: SlotPool) -> None:
    """As a replay does that confirms the first tokens of a window."""
    lease = leased(pool, 4)
    slots = list(lease.slots)
    assert pool.commit_front(lease, 3) == slots[:3]
    assert (lease.slots, pool.leases, pool.num_free) == (slots[3:], (lease,), 4)
    pool.release(slots[:3])
    assert pool.extend(lease, 2)
    assert pool.commit(lease, [0]) == slots[3:]
    assert (pool.leases, pool.num_free) == ((), 7)
    pool.check()


@pytest.mark.parametrize("count", [-1, 3])
def test_a_lease_cannot_give_what_it_does_not_have(pool: SlotPool, count: int) -> None:
    lease = leased(pool, 2)
    with pytest.raises(ValueError, match=f"a lease of 2 slots cannot give {count}"):
        pool.commit_front(lease, count)
    assert (len(lease.slots), pool.num_free) == (2, 6)
    pool.check()


@pytest.mark.parametrize("count", [0, 2, 3, 9])
def test_trimming_frees_all_but_the_first_slots(pool: SlotPool, count: int) -> None:
    lease = leased(pool, 3)
    slots = list(lease.slots)
    pool.trim(lease, count)
    assert lease.slots == slots[:count]
    assert pool.num_free == 8 - min(count, 3)
    assert pool.leases == (lease,), "an empty lease is open until it is rolled back"
    pool.check()


@pytest.mark.parametrize("slot", range(NUM_RESERVED))
def test_a_reserved_slot_cannot_be_freed(pool: SlotPool, slot: int) -> None:
    with pytest.raises(ValueError):
        pool.release([slot])
    pool.check()


def test_extend_is_all_or_none(pool: SlotPool) -> None:
    lease = leased(pool, 6)
    assert not pool.extend(lease, 3)
    assert len(lease.slots) == 6
    assert pool.extend(lease, 2)
    assert pool.num_free == 0


def _free_twice(pool: SlotPool) -> None:
    pool._free.append(pool._free[0])


def _own_a_free_slot(pool: SlotPool) -> None:
    pool._owned.add(pool._free[0])


def _lose_a_slot(pool: SlotPool) -> None:
    pool._free.pop()


def _free_a_reserved_slot(pool: SlotPool) -> None:
    pool._free.append(0)


def _lease_a_slot_twice(pool: SlotPool) -> None:
    pool.leases[0].slots.append(pool.leases[1].slots[0])


def _lease_a_free_slot(pool: SlotPool) -> None:
    pool.leases[0].slots.append(pool._free[0])


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (_free_twice, "a slot is free twice"),
        (_own_a_free_slot, "a free slot has an owner"),
        (_lose_a_slot, "a slot is neither free nor owned"),
        (_free_a_reserved_slot, "a reserved slot was handed out"),
        (_lease_a_slot_twice, "a leased slot has two owners"),
        (_lease_a_free_slot, "a leased slot is free"),
    ],
)
def test_control_check_sees_each_problem(pool: SlotPool, corrupt: Callable[[SlotPool], None], problem: str) -> None:
    leased(pool, 1)
    leased(pool, 1)
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError, match=f"^{problem}$"):
        pool.check()
