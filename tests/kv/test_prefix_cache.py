"""RadixPrefixCache against a brute-force model: every cached prefix, its slot, its stores and its last use."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.support.scale import scaled
from verispec.kv import NUM_RESERVED, TARGET_STORE, NoPrefixCache, RadixPrefixCache, SlotPool

NUM_SLOTS, NUM_STORES, MAX_LEN = 24, 3, 8
MIN_RULES = 40_000  # this file's share of the 10^5 rules that the stateful tests of kv/ and engine/ execute
CI = settings(
    max_examples=scaled(900),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

Prefix = tuple[int, ...]
texts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN).map(tuple)
lengths = st.integers(0, MAX_LEN)
picks = st.integers(0, 2**16)


@dataclass
class Entry:
    """The last token of one cached prefix."""

    slot: int
    stores: set[int]
    last_used: int


@dataclass
class Holder:
    """A sequence as the pool sees it: tokens, and slots of a prefix of them."""

    token_ids: Prefix
    slots: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    num_rules = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS)
        self.cache = RadixPrefixCache(self.pool, NUM_STORES)
        self.model: dict[Prefix, Entry] = {}
        self.holders: list[Holder] = []
        self.drafted: dict[int, set[int]] = {}  # slot -> draft stores that hold its K/V
        self.clock = 0
        self.rules_here = -1  # the invariants also run once before the first rule

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.slots)
        assert self.cache.evict(NUM_SLOTS) == len(self.model)
        assert self.pool.num_free == NUM_SLOTS
        CacheMachine.num_rules += self.rules_here

    def held(self) -> Counter[int]:
        return Counter(s for holder in self.holders for s in holder.slots)

    def cached_part(self, token_ids: Prefix, limit: int) -> list[Entry]:
        found = []
        for end in range(1, limit + 1):
            if token_ids[:end] not in self.model:
                break
            found.append(self.model[token_ids[:end]])
        return found

    def valid_len(self, slots: list[int], store: int) -> int:
        return next((i for i, s in enumerate(slots) if store not in self.drafted.get(s, ())), len(slots))

    @rule(token_ids=texts, limit=lengths)
    def match(self, token_ids: Prefix, limit: int) -> None:
        limit = min(limit, len(token_ids))
        self.clock += 1
        expected = self.cached_part(token_ids, limit)
        hit = self.cache.match(token_ids, limit=limit)
        assert hit.slots == [entry.slot for entry in expected]
        assert hit.valid_lens == tuple(
            next((i for i, entry in enumerate(expected) if store not in entry.stores), len(expected))
            for store in range(NUM_STORES)
        )
        for entry in expected:
            entry.last_used = self.clock
        self.holders.append(Holder(token_ids, hit.slots))

    @precondition(lambda self: self.holders)
    @rule(pick=picks, count=lengths)
    def compute(self, pick: int, count: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        count = min(count, len(holder.token_ids) - len(holder.slots), self.pool.num_free)
        lease = self.pool.lease()
        assert self.pool.extend(lease, count)
        slots = self.pool.commit(lease, range(count))
        holder.slots = holder.slots + slots
        for slot in slots:
            self.drafted.pop(slot, None)  # what the last owner's draft store held is gone

    @precondition(lambda self: self.holders)
    @rule(pick=picks, store=st.integers(1, NUM_STORES - 1), count=lengths)
    def compute_draft_store(self, pick: int, store: int, count: int) -> None:
        for slot in self.holders[pick % len(self.holders)].slots[:count]:
            self.drafted.setdefault(slot, set()).add(store)

    @precondition(lambda self: self.holders)
    @rule(pick=picks, count=lengths)
    def publish(self, pick: int, count: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        target_len = min(count, len(holder.slots))
        drafts = (min(target_len, self.valid_len(holder.slots, s)) for s in range(1, NUM_STORES))
        valid_lens = (target_len, *drafts)
        self.clock += 1
        own = list(holder.slots)
        for end in range(1, target_len + 1):
            slot = own[end - 1]
            stores = {s for s in range(NUM_STORES) if valid_lens[s] >= end}
            entry = self.model.setdefault(holder.token_ids[:end], Entry(slot, stores, self.clock))
            if entry.slot == slot:
                entry.stores |= stores
            entry.last_used = self.clock
            own[end - 1] = entry.slot
        holder.slots = self.cache.publish(holder.token_ids, holder.slots, valid_lens)
        assert holder.slots == own

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.pool.release(self.holders.pop(pick % len(self.holders)).slots)

    @precondition(lambda self: self.model)
    @rule(count=st.integers(0, NUM_SLOTS))
    def evict(self, count: int) -> None:
        evictable = self.pool.num_evictable
        freed = self.cache.evict(count)
        assert freed == min(count, evictable)
        kept = set(self.cache.slots())
        gone = {prefix: entry for prefix, entry in self.model.items() if entry.slot not in kept}
        self.model = {prefix: entry for prefix, entry in self.model.items() if entry.slot in kept}
        held = self.held()
        assert len(gone) == freed
        assert not any(held[entry.slot] for entry in gone.values()), "a slot in use was evicted"
        newest = max((entry.last_used for entry in gone.values()), default=0)
        spared = [entry.last_used for entry in self.model.values() if not held[entry.slot]]
        assert newest <= min(spared, default=newest), "something older was spared"
        assert sum(entry.last_used < newest for entry in gone.values()) < max(1, count), "more than needed was evicted"

    @invariant()
    def tree_equals_model(self) -> None:
        self.rules_here += 1
        self.cache.check()
        self.pool.check()
        cached, held = Counter(entry.slot for entry in self.model.values()), self.held()
        assert Counter(self.cache.slots()) == cached
        assert all(prefix[:-1] in self.model for prefix in self.model if len(prefix) > 1)
        refs = cached + held
        assert all(self.pool.refs(s) == refs[s] for s in range(NUM_SLOTS + NUM_RESERVED))
        assert self.pool.num_evictable == sum(1 for s in cached if not held[s])
        assert self.pool.num_free == NUM_SLOTS - len(refs)


def test_the_tree_equals_the_model_after_every_rule() -> None:
    run_state_machine_as_test(CacheMachine, settings=CI)
    assert CacheMachine.num_rules >= min(MIN_RULES, scaled(MIN_RULES))


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(32)


@pytest.fixture
def cache(pool: SlotPool) -> RadixPrefixCache:
    return RadixPrefixCache(pool, num_stores=2)


def computed(pool: SlotPool, count: int) -> list[int]:
    lease = pool.lease()
    assert pool.extend(lease, count)
    return pool.commit(lease, range(count))


def published(cache: RadixPrefixCache, pool: SlotPool, token_ids: Prefix, draft_len: int = 0) -> list[int]:
    """Publish a text that nobody goes on holding; returns the tree's slots."""
    held = cache.publish(token_ids, computed(pool, len(token_ids)), (len(token_ids), draft_len))
    pool.release(held)
    return held


def test_publish_swaps_the_callers_slots_for_the_trees(cache: RadixPrefixCache, pool: SlotPool) -> None:
    tree = published(cache, pool, (1, 2, 3))
    own = computed(pool, 5)
    num_free = pool.num_free
    held = cache.publish((1, 2, 3, 4, 5), own, (4, 0))
    assert held == [*tree, own[3], own[4]]
    assert [pool.refs(s) for s in held] == [2, 2, 2, 2, 1]
    assert pool.num_free == num_free + 3, "the caller's copy of what the tree had is freed"


def test_match_stops_at_the_limit_inside_a_node(cache: RadixPrefixCache, pool: SlotPool) -> None:
    tree = published(cache, pool, (1, 2, 3, 4))
    for limit in range(5):
        hit = cache.match((1, 2, 3, 4), limit=limit)
        assert hit.slots == tree[:limit]
        assert pool.num_evictable == 4 - limit
        pool.release(hit.slots)


def test_a_hit_says_how_much_each_store_holds(cache: RadixPrefixCache, pool: SlotPool) -> None:
    published(cache, pool, (1, 2, 3, 4), draft_len=2)
    assert cache.match((1, 2, 3, 9), limit=4).valid_lens == (3, 2)


def test_the_trees_copy_keeps_its_own_marks(cache: RadixPrefixCache, pool: SlotPool) -> None:
    published(cache, pool, (1, 2, 3), draft_len=0)
    published(cache, pool, (1, 2, 3), draft_len=3)  # its slots are dropped, and the draft K/V in them
    assert cache.match((1, 2, 3), limit=3).valid_lens == (3, 0)


def test_only_what_the_target_holds_is_cached(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache.publish((1, 2, 3, 4), computed(pool, 4), (2, 4))
    cache.check()
    assert cache.match((1, 2, 3, 4), limit=4).valid_lens == (2, 2)


def test_eviction_goes_by_last_use_exactly(cache: RadixPrefixCache, pool: SlotPool) -> None:
    trunk = published(cache, pool, (0, 0))
    left, right = published(cache, pool, (0, 0, 1))[2:], published(cache, pool, (0, 0, 2, 2))[2:]
    other = published(cache, pool, (5, 5, 5))
    pool.release(cache.match((0, 0, 1), limit=3).slots)
    order = []
    while pool.num_evictable:
        before = set(cache.slots())
        cache.evict(1)
        order.append(before - set(cache.slots()))
    # `right` is oldest; `left` and its trunk were used last; a leaf goes before its parent, its end before its start
    assert order == [{slot} for branch in (right, other, left, trunk) for slot in reversed(branch)]


def test_an_eviction_frees_no_more_than_it_must(cache: RadixPrefixCache, pool: SlotPool) -> None:
    older = published(cache, pool, (1, 1, 1))
    newer = published(cache, pool, (2, 2, 2))
    assert cache.evict(2) == 2
    assert set(cache.slots()) == {older[0], *newer}
    assert cache.evict(2) == 2
    assert set(cache.slots()) == set(newer[:2])
    cache.check()


def test_a_node_in_use_is_never_evicted(cache: RadixPrefixCache, pool: SlotPool) -> None:
    tree = published(cache, pool, (1, 2, 3, 4))
    held = cache.match((1, 2), limit=2).slots
    assert cache.evict(100) == 2
    assert list(cache.slots()) == held == tree[:2]
    pool.release(held)
    assert cache.evict(100) == 2
    assert pool.num_free == pool.num_slots


def num_calls(evict: Callable[[], int]) -> int:
    """How many functions run while something is evicted."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        evict()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("num_held", [0, 50])
def test_eviction_costs_what_it_frees_however_large_the_tree(num_held: int) -> None:
    """The same work with 100 and with 3000 nodes, also where the oldest are held: they are passed over once."""

    def cost(num_nodes: int) -> list[int]:
        pool = SlotPool(num_nodes * 3)
        cache = RadixPrefixCache(pool)
        for i in range(num_nodes):
            held = cache.publish((i % 10, i, i), computed(pool, 3), (3,))
            if i >= num_held:
                pool.release(held)
        cache.evict(1)  # passes over what is held
        return [num_calls(lambda: cache.evict(1)) for _ in range(20)]

    assert cost(3000) == cost(100)


def test_what_was_passed_over_while_held_is_evicted_in_its_turn(cache: RadixPrefixCache, pool: SlotPool) -> None:
    texts = [(i, i) for i in range(6)]
    held = [cache.publish(text, computed(pool, 2), (2, 0)) for text in texts]
    for i in (4, 5):
        pool.release(held[i])
    assert cache.evict(1) == 1  # passes over 0 to 3
    order = []
    for released in (2, 0, 1, 3):
        pool.release(held[released])
        cache.check()
        before = set(cache.slots())
        assert cache.evict(1) == 1
        cache.check()
        order += [held.index(slots) for slots in held if (before - set(cache.slots())) & set(slots)]
    assert order == [2, 0, 0, 1], "each time the oldest that nobody holds"
    pool.release(cache.match((1,), limit=1).slots)  # what is left of 1 becomes the newest
    assert cache.evict(6) == 6
    assert set(cache.slots()) == {held[1][0]}


def test_a_node_held_again_is_not_evicted(cache: RadixPrefixCache, pool: SlotPool) -> None:
    held = cache.publish((1, 2), computed(pool, 2), (2, 0))
    assert cache.evict(1) == 0
    pool.release(held)
    assert cache.match((1, 2), limit=2).slots == held
    assert cache.evict(1) == 0
    pool.release(held)
    pool.retain(held)  # behind the cache's back
    assert cache.evict(1) == 0
    cache.check()
    pool.release(held)
    assert cache.evict(9) == 2


def test_tenants_share_nothing(cache: RadixPrefixCache, pool: SlotPool) -> None:
    mine, yours = (cache.publish((1, 2, 3), computed(pool, 3), (3, 0), salt=salt) for salt in ("mine", "yours"))
    assert not set(mine) & set(yours)
    assert cache.match((1, 2, 3), limit=3) == ([], (0, 0))
    hit = cache.match((1, 2, 9), limit=3, salt="yours")
    assert hit.slots == yours[:2]
    cache.check()
    for slots in (mine, yours, hit.slots):
        pool.release(slots)
    assert cache.evict(4) == 4, "one order of eviction for all"
    assert set(cache.slots()) == set(yours[:2])
    assert cache.evict(9) == 2
    assert pool.num_free == pool.num_slots
    assert not cache._roots, "a tenant whose prefixes are gone is forgotten"
    cache.publish((), [], (0, 0), salt="mine")
    cache.match((1,), limit=1, salt="yours")
    assert not cache._roots


def test_versions_of_the_weights_share_nothing(cache: RadixPrefixCache, pool: SlotPool) -> None:
    """What was computed with other weights is never found; it stays until it is evicted, or its weights come back."""
    old = cache.publish((1, 2, 3), computed(pool, 3), (3, 0))
    cache.weights_version = 1
    assert cache.match((1, 2, 3), limit=3) == ([], (0, 0))
    new = cache.publish((1, 2, 3), computed(pool, 3), (3, 0))
    assert not set(old) & set(new)
    cache.check()
    cache.weights_version = 0
    assert cache.match((1, 2, 3), limit=3).slots == old
    for slots in (old, old, new):
        pool.release(slots)
    assert cache.evict(9) == 6
    assert not cache._roots


def test_no_cache_keeps_nothing(pool: SlotPool) -> None:
    cache, slots = NoPrefixCache(num_stores=2), computed(pool, 3)
    assert cache.publish((1, 2, 3), slots, (3, 0)) == slots
    assert cache.match((1, 2, 3), limit=3) == ([], (0, 0))
    assert cache.evict(3) == 0
    assert list(cache.slots()) == []
    assert [pool.refs(s) for s in slots] == [1, 1, 1]


def _free_a_slot(cache: RadixPrefixCache, pool: SlotPool) -> None:
    pool._refs[next(cache.slots())] = 0


def _cache_a_slot_twice(cache: RadixPrefixCache, pool: SlotPool) -> None:
    first, second = cache._nodes()
    second.slots[0] = first.slots[0]


def root(cache: RadixPrefixCache) -> Any:
    (found,) = cache._roots.values()
    return found


def _misfile(cache: RadixPrefixCache, pool: SlotPool) -> None:
    root(cache).children[7] = root(cache).children.pop(1)


def _lose_a_token(cache: RadixPrefixCache, pool: SlotPool) -> None:
    root(cache).children[1].token_ids = [1]


def _hold_a_part(cache: RadixPrefixCache, pool: SlotPool) -> None:
    pool.retain(root(cache).children[1].slots[:1])


def _use_a_child_alone(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache.match((1,), limit=1)
    (child,) = root(cache).children[1].children.values()
    child.last_used = cache._clock + 1


def _lose_a_place(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache._by_use.popitem()


def _swap_places(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache._by_use.move_to_end(root(cache).children[1])


def _lose_the_target(cache: RadixPrefixCache, pool: SlotPool) -> None:
    root(cache).children[1].stores -= {TARGET_STORE}


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (_free_a_slot, "free or cached twice"),
        (_cache_a_slot_twice, "free or cached twice"),
        (_misfile, "wrong token"),
        (_lose_a_token, "malformed"),
        (_lose_the_target, "no valid target"),
        (_hold_a_part, "a part of a cached node is held"),
        (_use_a_child_alone, "without its parent"),
        (_lose_a_place, "twice or not at all"),
        (_swap_places, "order of eviction is wrong"),
    ],
)
def test_control_check_sees_each_problem(
    cache: RadixPrefixCache, pool: SlotPool, corrupt: Callable[[RadixPrefixCache, SlotPool], None], problem: str
) -> None:
    published(cache, pool, (1, 2))
    published(cache, pool, (3, 4))
    cache.check()
    corrupt(cache, pool)
    with pytest.raises(AssertionError, match=problem):
        cache.check()
