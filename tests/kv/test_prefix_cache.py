"""RadixPrefixCache against a brute-force model: every cached prefix, its slot, its stores and its last use."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.support.scale import scaled
from verispec.kv import TARGET_STORE, Node, NoPrefixCache, RadixPrefixCache, SlotPool

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
    """A sequence: tokens, slots of a prefix of them, and how many of these the cache owns, up to a node."""

    token_ids: Prefix
    slots: list[int] = field(default_factory=list)
    node: Node | None = None
    num_shared: int = 0


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
        while self.holders:
            self.release(0)
        assert self.cache.evict(NUM_SLOTS) == len(self.model)
        assert self.pool.num_free == NUM_SLOTS
        CacheMachine.num_rules += self.rules_here

    def held(self) -> Counter[int]:
        return Counter(s for holder in self.holders for s in holder.slots[: holder.num_shared])

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
        self.holders.append(Holder(token_ids, hit.slots, hit.node, len(hit.slots)))

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
        target_len = max(holder.num_shared, min(count, len(holder.slots)))
        drafts = (min(target_len, self.valid_len(holder.slots, s)) for s in range(1, NUM_STORES))
        valid_lens = (target_len, *drafts)
        self.clock += 1
        own, held = list(holder.slots), self.held()
        for end in range(1, target_len + 1):
            slot = own[end - 1]
            stores = {s for s in range(NUM_STORES) if valid_lens[s] >= end}
            entry = self.model.setdefault(holder.token_ids[:end], Entry(slot, stores, self.clock))
            if entry.slot == slot:
                entry.stores |= stores
            elif entry.stores < stores and not held[entry.slot]:
                entry.slot, entry.stores = slot, stores
            own[end - 1] = entry.slot
        found = self.cache.publish(holder.token_ids, holder.slots, valid_lens, held=holder.node)
        holder.slots, holder.node, holder.num_shared = found.slots, found.node, target_len
        assert found.slots == own
        entries = [self.model[holder.token_ids[:end]] for end in range(1, target_len + 1)]
        for store in range(NUM_STORES):
            assert found.valid_lens[store] == len([*takewhile(lambda e, s=store: s in e.stores, entries)])

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        self.clock += 1
        for end in range(1, holder.num_shared + 1):
            self.model[holder.token_ids[:end]].last_used = self.clock
        self.cache.let_go(holder.node)
        self.pool.release(holder.slots[holder.num_shared :])

    @precondition(lambda self: self.model)
    @rule(count=st.integers(0, NUM_SLOTS))
    def evict(self, count: int) -> None:
        evictable = self.cache.num_evictable
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
        self.cache.check(holder.node for holder in self.holders)
        self.pool.check()
        cached, held = Counter(entry.slot for entry in self.model.values()), self.held()
        assert Counter(self.cache.slots()) == cached
        assert all(prefix[:-1] in self.model for prefix in self.model if len(prefix) > 1)
        own = [s for holder in self.holders for s in holder.slots[holder.num_shared :]]
        assert max(Counter([*cached, *own]).values(), default=1) == 1
        assert self.cache.num_evictable == sum(1 for s in cached if not held[s])
        assert self.pool.num_free == NUM_SLOTS - len(cached) - len(own)


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
    found = cache.publish(token_ids, computed(pool, len(token_ids)), (len(token_ids), draft_len))
    cache.let_go(found.node)
    return found.slots


def used(cache: RadixPrefixCache, token_ids: Prefix) -> list[int]:
    """Find a text and let go of it; returns the slots."""
    hit = cache.match(token_ids, limit=len(token_ids))
    cache.let_go(hit.node)
    return hit.slots


def test_publish_swaps_the_callers_slots_for_the_trees(cache: RadixPrefixCache, pool: SlotPool) -> None:
    tree = published(cache, pool, (1, 2, 3))
    own = computed(pool, 5)
    num_free = pool.num_free
    slots, _, node = cache.publish((1, 2, 3, 4, 5), own, (4, 0))
    assert slots == [*tree, own[3], own[4]]
    assert pool.num_free == num_free + 3, "the caller's copy of what the tree had is freed"
    assert cache.num_evictable == 0
    cache.check([node])


@pytest.mark.parametrize(
    ("tree_len", "is_held", "expected", "keeps_own"),
    [(3, False, 6, False), (2, False, 6, True), (2, True, 2, False), (0, False, 6, True), (0, True, 0, False)],
)
def test_whoever_publishes_keeps_what_a_draft_model_has_computed(
    tree_len: int, is_held: bool, expected: int, keeps_own: bool, cache: RadixPrefixCache, pool: SlotPool
) -> None:
    """In the tree's slots, if it has; in its own, if nobody holds those of the tree; and behind what it publishes."""
    tree = published(cache, pool, (1, 2, 3), draft_len=tree_len)
    other = cache.match((1, 2, 3), limit=3).node if is_held else None
    own, num_free = computed(pool, 6), pool.num_free
    found = cache.publish((1, 2, 3, 4), own, (4, 6))
    assert found.valid_lens == (4, expected)
    assert found.slots == [*tree[:tree_len], *(own if keeps_own else tree)[tree_len:3], *own[3:]]
    assert pool.num_free == num_free + 3
    cache.check([found.node, other])


def test_a_second_publication_goes_on_from_what_is_held(cache: RadixPrefixCache, pool: SlotPool) -> None:
    slots, _, node = cache.publish((1, 2), computed(pool, 2), (2, 0))
    other = cache.match((1,), limit=1)  # splits it
    slots, _, longer = cache.publish((1, 2, 3), slots + computed(pool, 1), (3, 1), held=node)
    cache.check([longer, other.node])
    assert used(cache, (1, 2, 3)) == slots
    assert cache.match((1, 2, 3), limit=3).valid_lens == (3, 1)


def test_match_stops_at_the_limit_inside_a_node(cache: RadixPrefixCache, pool: SlotPool) -> None:
    tree = published(cache, pool, (1, 2, 3, 4))
    for limit in range(5):
        hit = cache.match((1, 2, 3, 4), limit=limit)
        assert hit.slots == tree[:limit]
        assert cache.num_evictable == 4 - limit
        cache.let_go(hit.node)


def test_a_hit_says_how_much_each_store_holds(cache: RadixPrefixCache, pool: SlotPool) -> None:
    published(cache, pool, (1, 2, 3, 4), draft_len=2)
    assert cache.match((1, 2, 3, 9), limit=4).valid_lens == (3, 2)


def test_the_trees_copy_keeps_its_own_marks(cache: RadixPrefixCache, pool: SlotPool) -> None:
    published(cache, pool, (1, 2, 3), draft_len=0)
    cache.match((1, 2, 3), limit=3)  # somebody goes on with it
    published(cache, pool, (1, 2, 3), draft_len=3)  # its slots are dropped, and the draft K/V in them
    assert cache.match((1, 2, 3), limit=3).valid_lens == (3, 0)


def test_only_what_the_target_holds_is_cached(cache: RadixPrefixCache, pool: SlotPool) -> None:
    node = cache.publish((1, 2, 3, 4), computed(pool, 4), (2, 4)).node
    cache.check([node])
    assert cache.match((1, 2, 3, 4), limit=4).valid_lens == (2, 2)


def test_eviction_goes_by_last_use_exactly(cache: RadixPrefixCache, pool: SlotPool) -> None:
    trunk = published(cache, pool, (0, 0))
    left, right = published(cache, pool, (0, 0, 1))[2:], published(cache, pool, (0, 0, 2, 2))[2:]
    other = published(cache, pool, (5, 5, 5))
    used(cache, (0, 0, 1))
    order = []
    while cache.num_evictable:
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
    cache.check([])


def test_a_node_in_use_is_never_evicted(cache: RadixPrefixCache, pool: SlotPool) -> None:
    tree = published(cache, pool, (1, 2, 3, 4))
    hit = cache.match((1, 2), limit=2)
    assert cache.evict(100) == 2
    assert list(cache.slots()) == hit.slots == tree[:2]
    cache.let_go(hit.node)
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
    """The same work with 100 and with 3000 nodes, also where the oldest are held."""

    def cost(num_nodes: int) -> list[int]:
        pool = SlotPool(num_nodes * 3)
        cache = RadixPrefixCache(pool)
        for i in range(num_nodes):
            node = cache.publish((i % 10, i, i), computed(pool, 3), (3,)).node
            if i >= num_held:
                cache.let_go(node)
        return [num_calls(lambda: cache.evict(1)) for _ in range(20)]

    assert cost(3000) == cost(100)


def test_what_was_held_is_evicted_after_what_was_let_go_of_before(cache: RadixPrefixCache, pool: SlotPool) -> None:
    found = [cache.publish((i, i), computed(pool, 2), (2, 0)) for i in range(4)]
    for i in (2, 0, 3, 1):
        cache.let_go(found[i].node)
    cache.let_go(cache.match((3,), limit=1).node)  # used again: its first token, not its second
    order = []
    while cache.num_evictable:
        before = set(cache.slots())
        assert cache.evict(1) == 1
        (gone,) = before - set(cache.slots())
        order.append(next(i for i, each in enumerate(found) if gone in each.slots))
        cache.check([])
    assert order == [2, 2, 0, 0, 3, 1, 1, 3]


def test_a_node_held_again_is_not_evicted(cache: RadixPrefixCache, pool: SlotPool) -> None:
    slots, _, node = cache.publish((1, 2), computed(pool, 2), (2, 0))
    assert cache.evict(1) == 0
    cache.let_go(node)
    hit = cache.match((1, 2), limit=2)
    assert hit.slots == slots
    assert cache.evict(1) == 0
    cache.let_go(hit.node)
    assert cache.evict(9) == 2


def test_tenants_share_nothing(cache: RadixPrefixCache, pool: SlotPool) -> None:
    mine, yours = (cache.publish((1, 2, 3), computed(pool, 3), (3, 0), salt=salt) for salt in ("mine", "yours"))
    assert not set(mine.slots) & set(yours.slots)
    assert cache.match((1, 2, 3), limit=3).slots == []
    hit = cache.match((1, 2, 9), limit=3, salt="yours")
    assert hit.slots == yours.slots[:2]
    cache.check([mine.node, yours.node, hit.node])
    for node in (mine.node, yours.node, hit.node):
        cache.let_go(node)
    assert cache.evict(4) == 4, "one order of eviction for all"
    assert set(cache.slots()) == set(yours.slots[:2])
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
    assert cache.match((1, 2, 3), limit=3).slots == []
    new = cache.publish((1, 2, 3), computed(pool, 3), (3, 0))
    assert not set(old.slots) & set(new.slots)
    longer = cache.publish((1, 2, 3, 4), old.slots + computed(pool, 1), (4, 0), held=old.node)
    assert longer.slots[:3] == old.slots, "a sequence goes on with the weights that it began with"
    assert used(cache, (1, 2, 3, 4)) == new.slots
    cache.check([longer.node, new.node])
    cache.weights_version = 0
    assert used(cache, (1, 2, 3, 4)) == longer.slots
    for node in (longer.node, new.node):
        cache.let_go(node)
    assert cache.evict(9) == 7
    assert not cache._roots


def test_no_cache_keeps_nothing(pool: SlotPool) -> None:
    cache, slots = NoPrefixCache(num_stores=2), computed(pool, 3)
    assert cache.publish((1, 2, 3), slots, (3, 0)) == (slots, (3, 0), None)
    assert cache.match((1, 2, 3), limit=3) == ([], (0, 0), None)
    assert cache.evict(3) == 0
    assert list(cache.slots()) == []
    assert pool.num_free == pool.num_slots - 3


def _free_a_slot(cache: RadixPrefixCache, pool: SlotPool) -> None:
    pool.release([next(cache.slots())])


def _cache_a_slot_twice(cache: RadixPrefixCache, pool: SlotPool) -> None:
    first, second = cache._nodes()
    second.slots[0] = first.slots[0]


def root(cache: RadixPrefixCache) -> Node:
    (found,) = cache._roots.values()
    return found


def _misfile(cache: RadixPrefixCache, pool: SlotPool) -> None:
    root(cache).children[7] = root(cache).children.pop(1)


def _lose_a_token(cache: RadixPrefixCache, pool: SlotPool) -> None:
    root(cache).children[1].token_ids = [1]


def _forget_a_holder(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache.match((1, 2), limit=2)


def _evict_the_parent_first(cache: RadixPrefixCache, pool: SlotPool) -> None:
    used(cache, (1,))
    cache._unheld.move_to_end(root(cache).children[1], last=False)


def _lose_a_place(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache._unheld.popitem()


def _lose_a_node(cache: RadixPrefixCache, pool: SlotPool) -> None:
    del root(cache).children[1]


def _miscount(cache: RadixPrefixCache, pool: SlotPool) -> None:
    cache.num_evictable += 1


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
        (_forget_a_holder, "another number of holders"),
        (_lose_a_place, "another number of holders"),
        (_evict_the_parent_first, "after its parent"),
        (_lose_a_node, "not in the tree"),
        (_miscount, "evictable count is off"),
    ],
)
def test_control_check_sees_each_problem(
    cache: RadixPrefixCache, pool: SlotPool, corrupt: Callable[[RadixPrefixCache, SlotPool], None], problem: str
) -> None:
    published(cache, pool, (1, 2))
    published(cache, pool, (3, 4))
    cache.check([])
    corrupt(cache, pool)
    with pytest.raises(AssertionError, match=problem):
        cache.check([])
