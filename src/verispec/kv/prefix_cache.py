"""A radix tree over committed tokens whose K/V is canonical, so that requests share what they have in common.

The cache holds one reference on each of its slots. Sequences hold prefixes from the root down, never a slot without
the slots before it, so a node that nobody else references has only such descendants: evicting unreferenced leaves,
least recently used first by a logical clock, can always free all of them. Which stores (target, draft model) hold
valid K/V is marked per node. Only the scheduler publishes, and only canonical K/V.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from verispec.kv.pool import SlotPool

TARGET_STORE = 0
DRAFT_STORE = 1


class PrefixHit(NamedTuple):
    """Slots of the longest cached prefix, retained for the caller, and how much of it each store holds."""

    slots: list[int]
    valid_lens: tuple[int, ...]


class PrefixCache(Protocol):
    """What the scheduler asks of a prefix cache."""

    def match(self, token_ids: Sequence[int], *, limit: int) -> PrefixHit: ...
    def publish(self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...]) -> list[int]: ...
    def evict(self, count: int) -> int: ...
    def slots(self) -> Iterator[int]: ...
    def check(self) -> None: ...


class NoPrefixCache:
    """The cache that caches nothing."""

    def __init__(self, num_stores: int = 1) -> None:
        self._miss = (0,) * num_stores

    def match(self, token_ids: Sequence[int], *, limit: int) -> PrefixHit:
        """Never a hit."""
        return PrefixHit([], self._miss)

    def publish(self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...]) -> list[int]:
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
    token_ids: tuple[int, ...]
    slots: list[int]
    parent: _Node | None
    stores: frozenset[int]
    last_used: int
    children: dict[int, _Node] = field(default_factory=dict)


class RadixPrefixCache:
    """The real one. `num_stores` K/V stores share its slot ids; store 0 is the target's and is always valid."""

    def __init__(self, pool: SlotPool, num_stores: int = 1) -> None:
        self._pool = pool
        self._num_stores = num_stores
        self._root = _Node((), [], None, frozenset(range(num_stores)), 0)
        self._clock = 0

    def match(self, token_ids: Sequence[int], *, limit: int) -> PrefixHit:
        """Find the longest cached prefix of at most `limit` tokens and retain its slots for the caller."""
        self._clock += 1
        slots: list[int] = []
        valid_lens = [0] * self._num_stores
        node = self._root
        while len(slots) < limit:
            child = self._step(node, token_ids, len(slots), limit)
            if child is None:
                break
            child.last_used = self._clock
            for store in child.stores:
                if valid_lens[store] == len(slots):
                    valid_lens[store] += len(child.slots)
            slots += child.slots
            node = child
        self._pool.retain(slots)
        return PrefixHit(slots, tuple(valid_lens))

    def publish(self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...]) -> list[int]:
        """Cache the first `valid_lens[TARGET_STORE]` tokens. Returns the slots the caller holds from now on.

        What another store holds beyond that is not cached: a prefix without the target's K/V is of no use.
        Where the tree has a prefix already, the caller's reference moves to the tree's slots: canonical K/V of equal
        tokens is equal bit for bit, so one copy is enough.
        """
        self._clock += 1
        held: list[int] = []
        node = self._root
        valid_lens = tuple(min(valid_len, valid_lens[TARGET_STORE]) for valid_len in valid_lens)
        for end in sorted({*valid_lens}):
            stores = frozenset(s for s, valid_len in enumerate(valid_lens) if valid_len >= end)
            while len(held) < end:
                start = len(held)
                child = self._step(node, token_ids, start, end)
                if child is None:
                    child = self._grow(node, tuple(token_ids[start:end]), slots[start:end], stores)
                own = slots[start : start + len(child.slots)]
                if own == child.slots:
                    child.stores |= stores
                else:
                    self._pool.retain(child.slots)
                    self._pool.release(own)
                child.last_used = self._clock
                held += child.slots
                node = child
        return held + slots[len(held) :]

    def evict(self, count: int) -> int:
        """Free `count` slots, or as many as are unreferenced; returns how many. Leaves lose their ends first."""
        leaves = [(n.last_used, n.slots[0], n) for n in self._nodes() if not n.children and self._is_unreferenced(n)]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < count:
            _, _, node = heapq.heappop(leaves)
            kept = max(0, len(node.slots) - (count - freed))
            freed += len(node.slots) - kept
            self._pool.unmark_cached(node.slots[kept:])
            if kept:
                node.token_ids, node.slots = node.token_ids[:kept], node.slots[:kept]
                break
            parent = node.parent
            assert parent is not None
            del parent.children[node.token_ids[0]]
            if parent is not self._root and not parent.children and self._is_unreferenced(parent):
                heapq.heappush(leaves, (parent.last_used, parent.slots[0], parent))
        return freed

    def slots(self) -> Iterator[int]:
        """Every slot the cache holds a reference on."""
        for node in self._nodes():
            yield from node.slots

    def check(self) -> None:
        """Raise if the tree is malformed or holds a slot that is free."""
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
            seen |= set(node.slots)

    def _is_unreferenced(self, node: _Node) -> bool:
        return all(self._pool.refs(s) == 1 for s in node.slots)

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _step(self, node: _Node, token_ids: Sequence[int], start: int, end: int) -> _Node | None:
        """The child that continues with token_ids[start:end], split so that all of it matches; None without one."""
        child = node.children.get(token_ids[start])
        if child is None:
            return None
        longest = min(len(child.token_ids), end - start)
        same = next((i for i in range(longest) if child.token_ids[i] != token_ids[start + i]), longest)
        return self._split(child, same) if same < len(child.token_ids) else child

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut `node` after `length` tokens; returns the upper half."""
        assert node.parent is not None
        upper = _Node(node.token_ids[:length], node.slots[:length], node.parent, node.stores, node.last_used)
        node.parent.children[upper.token_ids[0]] = upper
        node.token_ids, node.slots, node.parent = node.token_ids[length:], node.slots[length:], upper
        upper.children[node.token_ids[0]] = node
        return upper

    def _grow(self, parent: _Node, token_ids: tuple[int, ...], slots: list[int], stores: frozenset[int]) -> _Node:
        """Hang a new leaf under `parent` and take the cache's references."""
        self._pool.mark_cached(slots)
        leaf = _Node(token_ids, list(slots), parent, stores, self._clock)
        parent.children[token_ids[0]] = leaf
        return leaf
