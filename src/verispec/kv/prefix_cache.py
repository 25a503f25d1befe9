"""A radix tree over committed tokens whose K/V is canonical, so that requests share what they have in common.

The cache holds one reference on each of its slots. Sequences hold whole nodes from the root down, never one without its
ancestors, so a node that nobody else holds has only such descendants: evicting unheld leaves, least recently used first
by a logical clock, can always free all of them. Which stores (target, draft model) hold valid K/V is marked per node.
Only the scheduler publishes, and only canonical K/V. Tenants that must not learn of each other's prompts by how fast
an answer comes have trees of their own, told apart by a salt; so has each version of the weights.

Eviction costs as much as it frees, however large the tree is:

    _by_use     every other node, least recently used first; using a path moves its nodes to the end, children before
                parents, so that the first node that nobody holds is always a leaf
    _parked     nodes that eviction came upon while somebody held them, out of its way until the pool reports them
    _returned   parked nodes that were let go of without being used again: a heap, to be merged with the front
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from verispec.kv.pool import SlotPool

TARGET_STORE = 0
DRAFT_STORE = 1
NO_SALT = ""


class PrefixHit(NamedTuple):
    """Slots of the longest cached prefix, retained for the caller, and how much of it each store holds."""

    slots: list[int]
    valid_lens: tuple[int, ...]


class PrefixCache(Protocol):
    """What the scheduler asks of a prefix cache. What is computed from now on is of `weights_version`."""

    weights_version: int

    def match(self, token_ids: Sequence[int], *, limit: int, salt: str = NO_SALT) -> PrefixHit: ...
    def publish(
        self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...], *, salt: str = NO_SALT
    ) -> list[int]: ...
    def evict(self, count: int) -> int: ...
    def slots(self) -> Iterator[int]: ...
    def check(self) -> None: ...


class NoPrefixCache:
    """The cache that caches nothing."""

    weights_version = 0

    def __init__(self, num_stores: int = 1) -> None:
        self._miss = (0,) * num_stores

    def match(self, token_ids: Sequence[int], *, limit: int, salt: str = NO_SALT) -> PrefixHit:
        """Never a hit."""
        return PrefixHit([], self._miss)

    def publish(
        self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...], *, salt: str = NO_SALT
    ) -> list[int]:
        """Keep nothing; the caller keeps its slots."""
        return slots

    def evict(self, count: int) -> int:
        """Nothing to free."""
        return 0

    def slots(self) -> Iterator[int]:
        """No slots."""
        return iter(())

    def check(self) -> None:
        """Nothing to check."""


@dataclass(slots=True, eq=False)
class _Node:
    token_ids: list[int]
    slots: list[int]
    parent: _Node | None
    stores: frozenset[int]
    last_used: int = 0  # no two nodes have the same
    children: dict[int, _Node] = field(default_factory=dict)


class _RootKey(NamedTuple):
    weights_version: int
    salt: str


@dataclass(slots=True, eq=False, kw_only=True)
class _Root(_Node):
    key: _RootKey


class RadixPrefixCache:
    """The real one. `num_stores` K/V stores share its slot ids; store 0 is the target's and is always valid."""

    def __init__(self, pool: SlotPool, num_stores: int = 1, *, weights_version: int = 0) -> None:
        self.weights_version = weights_version
        self._pool = pool
        self._num_stores = num_stores
        self._roots: dict[_RootKey, _Root] = {}  # they come and go with what hangs under them
        self._clock = 0
        self._by_use: OrderedDict[_Node, None] = OrderedDict()
        self._parked: dict[int, _Node] = {}  # by last slot, which a split does not change
        self._returned: list[tuple[int, _Node]] = []  # with `last_used`; stale where the node has been used since

    def match(self, token_ids: Sequence[int], *, limit: int, salt: str = NO_SALT) -> PrefixHit:
        """Find the longest cached prefix of at most `limit` tokens and retain its slots for the caller."""
        slots: list[int] = []
        valid_lens = [0] * self._num_stores
        path: list[_Node] = []
        node: _Node | None = self._roots.get(_RootKey(self.weights_version, salt))
        while node is not None and len(slots) < limit:
            node = self._step(node, token_ids, len(slots), limit)
            if node is not None:
                for store in node.stores:
                    if valid_lens[store] == len(slots):
                        valid_lens[store] += len(node.slots)
                slots += node.slots
                path.append(node)
        self._use(path)
        self._pool.retain(slots)
        return PrefixHit(slots, tuple(valid_lens))

    def publish(
        self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...], *, salt: str = NO_SALT
    ) -> list[int]:
        """Cache the first `valid_lens[TARGET_STORE]` tokens. Returns the slots the caller holds from now on.

        What another store holds beyond that is not cached: a prefix without the target's K/V is of no use.
        Where the tree has a prefix already, the caller's reference moves to the tree's slots: canonical K/V of equal
        tokens is equal bit for bit, so one copy is enough.
        """
        if not valid_lens[TARGET_STORE]:
            return slots
        held: list[int] = []
        path: list[_Node] = []
        key = _RootKey(self.weights_version, salt)
        if key not in self._roots:
            self._roots[key] = _Root([], [], None, frozenset(range(self._num_stores)), key=key)
        node: _Node = self._roots[key]
        valid_lens = tuple(min(valid_len, valid_lens[TARGET_STORE]) for valid_len in valid_lens)
        for end in sorted({*valid_lens}):
            stores = frozenset(s for s, valid_len in enumerate(valid_lens) if valid_len >= end)
            while len(held) < end:
                start = len(held)
                child = self._step(node, token_ids, start, end)
                if child is None:
                    child = self._grow(node, list(token_ids[start:end]), slots[start:end], stores)
                own = slots[start : start + len(child.slots)]
                if own == child.slots:
                    child.stores |= stores
                else:
                    self._pool.retain(child.slots)
                    self._pool.release(own)
                held += child.slots
                path.append(child)
                node = child
        self._use(path)
        return held + slots[len(held) :]

    def evict(self, count: int) -> int:
        """Free `count` slots, or as many as nobody holds; returns how many. Leaves lose their ends first."""
        freed = 0
        for slot in self._pool.take_unheld():
            if (node := self._parked.pop(slot, None)) is not None:
                heapq.heappush(self._returned, (node.last_used, node))
        while freed < count and (node := self._oldest()) is not None:
            if self._pool.refs(node.slots[-1]) > 1:
                self._take_out(node)
                self._parked[node.slots[-1]] = node
                self._pool.watch(node.slots[-1])
                continue
            kept = max(0, len(node.slots) - (count - freed))
            freed += len(node.slots) - kept
            self._pool.unmark_cached(node.slots[kept:])
            if kept:
                del node.token_ids[kept:], node.slots[kept:]
            else:
                self._take_out(node)
                self._cut_off(node)
        return freed

    def slots(self) -> Iterator[int]:
        """Every slot the cache holds a reference on."""
        for node in self._nodes():
            yield from node.slots

    def check(self) -> None:
        """Raise if the tree is malformed, holds a slot that is free, or would be evicted in a wrong order."""
        seen: set[int] = set()
        for node in self._nodes():
            parent = node.parent
            if parent is None or not node.token_ids or len(node.token_ids) != len(node.slots):
                raise AssertionError("a cached node is malformed")
            if parent.children.get(node.token_ids[0]) is not node:
                raise AssertionError("a cached node is filed under a wrong token")
            if seen & set(node.slots) or any(self._pool.refs(s) < 1 for s in node.slots):
                raise AssertionError("a cached slot is free or cached twice")
            if TARGET_STORE not in node.stores:
                raise AssertionError("a cached node has no valid target K/V")
            if len({self._pool.refs(s) for s in node.slots}) > 1:
                raise AssertionError("a part of a cached node is held")
            if parent.parent is not None and node.last_used >= parent.last_used:
                raise AssertionError("a cached node was used without its parent")
            seen |= set(node.slots)
        self._check_order()

    def _check_order(self) -> None:
        returned = [node for last_used, node in self._returned if last_used == node.last_used]
        places = [*self._by_use, *self._parked.values(), *returned]
        if len(places) != len(set(places)) or set(places) != set(self._nodes()):
            raise AssertionError("a cached node is in the order of eviction twice or not at all")
        uses = [node.last_used for node in self._by_use]
        if uses != sorted(set(uses)) or any(s != node.slots[-1] for s, node in self._parked.items()):
            raise AssertionError("the order of eviction is wrong")

    def _nodes(self) -> Iterator[_Node]:
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _use(self, path: Sequence[_Node]) -> None:
        """Note that a path from the root was used just now, its end before its start."""
        for node in reversed(path):
            self._clock += 1
            node.last_used = self._clock
            self._parked.pop(node.slots[-1], None)
            self._by_use[node] = None
            self._by_use.move_to_end(node)

    def _oldest(self) -> _Node | None:
        """The node used least recently of those that are not parked."""
        while self._returned and self._returned[0][0] != self._returned[0][1].last_used:
            heapq.heappop(self._returned)
        first = next(iter(self._by_use), None)
        if self._returned and (first is None or self._returned[0][0] < first.last_used):
            return self._returned[0][1]
        return first

    def _take_out(self, oldest: _Node) -> None:
        """Take the oldest node out of the order of eviction."""
        if self._returned and self._returned[0][1] is oldest:
            heapq.heappop(self._returned)
        else:
            del self._by_use[oldest]

    def _cut_off(self, leaf: _Node) -> None:
        assert not leaf.children, "only leaves are evicted"
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.token_ids[0]]
        if isinstance(parent, _Root) and not parent.children:
            del self._roots[parent.key]

    def _step(self, node: _Node, token_ids: Sequence[int], start: int, end: int) -> _Node | None:
        """The child that continues with token_ids[start:end], split so that all of it matches; None without one."""
        child = node.children.get(token_ids[start])
        if child is None:
            return None
        wanted = list(token_ids[start : min(end, start + len(child.token_ids))])
        if wanted == child.token_ids:
            return child
        pairs = enumerate(zip(child.token_ids, wanted, strict=False))
        same = next((i for i, (cached, token_id) in pairs if cached != token_id), len(wanted))
        return self._split(child, same)

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut `node` after `length` tokens; returns the upper half, which the caller must use."""
        assert node.parent is not None
        upper = _Node(node.token_ids[:length], node.slots[:length], node.parent, node.stores)
        node.parent.children[upper.token_ids[0]] = upper
        node.token_ids, node.slots, node.parent = node.token_ids[length:], node.slots[length:], upper
        upper.children[node.token_ids[0]] = node
        return upper

    def _grow(self, parent: _Node, token_ids: list[int], slots: list[int], stores: frozenset[int]) -> _Node:
        """Hang a new leaf under `parent` and take the cache's references; the caller must use it."""
        self._pool.mark_cached(slots)
        leaf = _Node(token_ids, slots, parent, stores)
        parent.children[token_ids[0]] = leaf
        return leaf
