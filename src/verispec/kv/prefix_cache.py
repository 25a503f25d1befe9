"""A radix tree over committed tokens whose K/V is canonical, so that requests share what they have in common.

The cache owns the slots of its nodes. A sequence holds a path of whole nodes from the root down, never a part of one,
and names it by its last node; nodes that nobody holds are evicted, those let go of first before others, each before its
parent. Which stores (target, draft model) hold valid K/V is marked per node. Only the roster publishes, and only
canonical K/V. Tenants that must not learn of each other's prompts by how fast an answer comes have trees of their own,
told apart by a salt; so has each version of the weights.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from verispec.kv.pool import SlotPool

TARGET_STORE = 0
DRAFT_STORE = 1
NO_SALT = ""


class _RootKey(NamedTuple):
    weights_version: int
    salt: str


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of the parent. `num_holders` sequences hold it. A root has no tokens and a key."""

    token_ids: list[int]
    slots: list[int]
    parent: Node | None
    stores: frozenset[int]
    num_holders: int = 0
    children: dict[int, Node] = field(default_factory=dict)
    key: _RootKey | None = None


class PrefixHit(NamedTuple):
    """The longest cached prefix, held for the caller up to `node`: its slots, and how much of it each store holds."""

    slots: list[int]
    valid_lens: tuple[int, ...]
    node: Node | None = None


class Published(NamedTuple):
    """The slots a sequence has from now on, and how many of them each store holds; the cache owns those up to `node`,
    which it holds for the sequence."""

    slots: list[int]
    valid_lens: tuple[int, ...]
    node: Node | None


class NoPrefixCache:
    """The cache that caches nothing."""

    weights_version = 0
    num_evictable = 0

    def __init__(self, num_stores: int = 1) -> None:
        self._miss = PrefixHit([], (0,) * num_stores)

    def match(self, token_ids: Sequence[int], *, limit: int, salt: str = NO_SALT) -> PrefixHit:
        """Never a hit."""
        return self._miss._replace(slots=[])

    def publish(
        self,
        token_ids: Sequence[int],
        slots: list[int],
        valid_lens: tuple[int, ...],
        *,
        held: Node | None = None,
        salt: str = NO_SALT,
    ) -> Published:
        """Keep nothing; the caller keeps its slots."""
        return Published(slots, valid_lens, None)

    def let_go(self, node: Node | None) -> None:
        """Nothing was held."""

    def evict(self, count: int) -> int:
        """Nothing to free."""
        return 0

    def slots(self) -> Iterator[int]:
        """No slots."""
        return iter(())

    def check(self, held: Iterable[Node | None]) -> None:
        """Nothing to check."""


class RadixPrefixCache:
    """The real one. `num_stores` K/V stores share its slot ids; store 0 is the target's and is always valid. What is
    computed from now on is of `weights_version`.
    """

    def __init__(self, pool: SlotPool, num_stores: int = 1, *, weights_version: int = 0) -> None:
        self.weights_version = weights_version
        self.num_evictable = 0  # slots of nodes that nobody holds
        self._pool = pool
        self._num_stores = num_stores
        self._roots: dict[_RootKey, Node] = {}  # they come and go with what hangs under them
        self._unheld: OrderedDict[Node, None] = OrderedDict()  # in the order of eviction: children before parents

    def match(self, token_ids: Sequence[int], *, limit: int, salt: str = NO_SALT) -> PrefixHit:
        """Find the longest cached prefix of at most `limit` tokens and hold it for the caller."""
        slots: list[int] = []
        valid_lens = [0] * self._num_stores
        found: Node | None = None
        node = self._roots.get(_RootKey(self.weights_version, salt))
        while node is not None and len(slots) < limit:
            node = self._step(node, token_ids, len(slots), limit)
            if node is not None:
                _extend(valid_lens, node, len(slots))
                slots += node.slots
                found = node
        self._hold(found)
        return PrefixHit(slots, tuple(valid_lens), found)

    def publish(
        self,
        token_ids: Sequence[int],
        slots: list[int],
        valid_lens: tuple[int, ...],
        *,
        held: Node | None = None,
        salt: str = NO_SALT,
    ) -> Published:
        """Cache the first `valid_lens[TARGET_STORE]` tokens, of which the caller holds those up to `held` already.

        The cache then owns their slots, and holds them for the caller up to the node it returns. What another store
        holds beyond that is not cached: a prefix without the target's K/V is of no use. Where the tree has a prefix
        already, the caller's own slots are freed: canonical K/V of equal tokens is equal bit for bit, so one copy is
        enough; unless nobody holds the tree's, and the caller's are valid in more stores.
        """
        length = valid_lens[TARGET_STORE]
        if not length:
            return Published(slots, valid_lens, held)
        node = self._root(held, salt)
        kept: list[int] = []
        valid = [0] * self._num_stores
        for end in sorted({min(valid_len, length) for valid_len in valid_lens}):
            stores = frozenset(s for s, valid_len in enumerate(valid_lens) if valid_len >= end)
            while len(kept) < end:
                start = len(kept)
                child = self._step(node, token_ids, start, end)
                if child is None:
                    child = self._grow(node, list(token_ids[start:end]), slots[start:end], stores)
                elif (own := slots[start : start + len(child.slots)]) == child.slots:
                    child.stores |= stores
                elif child.num_holders or not child.stores < stores:
                    self._pool.release(own)
                else:
                    self._pool.release(child.slots)
                    child.slots, child.stores = own, stores
                _extend(valid, child, start)
                kept += child.slots
                node = child
        self._hold(node)
        self.let_go(held)
        valid_lens = tuple(max(n, own) if n == length else n for n, own in zip(valid, valid_lens, strict=True))
        return Published(kept + slots[length:], valid_lens, node)

    def let_go(self, node: Node | None) -> None:
        """End a hold: what nobody holds any longer can be evicted, after all that was let go of before."""
        for each in _path(node):
            each.num_holders -= 1
            if not each.num_holders:
                self.num_evictable += len(each.slots)
                self._unheld[each] = None

    def _hold(self, node: Node | None) -> None:
        for each in _path(node):
            if not each.num_holders:
                self.num_evictable -= len(each.slots)
                del self._unheld[each]
            each.num_holders += 1

    def evict(self, count: int) -> int:
        """Free `count` slots, or as many as nobody holds; returns how many. Leaves lose their ends first."""
        freed = 0
        while freed < count and self._unheld:
            leaf = next(iter(self._unheld))
            num_kept = max(0, len(leaf.slots) - (count - freed))
            freed += len(leaf.slots) - num_kept
            self._pool.release(leaf.slots[num_kept:])
            if num_kept:
                del leaf.token_ids[num_kept:], leaf.slots[num_kept:]
            else:
                del self._unheld[leaf]
                self._cut_off(leaf)
        self.num_evictable -= freed
        return freed

    def slots(self) -> Iterator[int]:
        """Every slot the cache owns."""
        for node in self._nodes():
            yield from node.slots

    def check(self, held: Iterable[Node | None]) -> None:
        """Raise if the tree is malformed, has a slot that is free, or if these nodes are not what sequences hold."""
        holders = Counter(node for end in held for node in _path(end))
        seen: set[int] = set()
        order = {node: i for i, node in enumerate(self._unheld)}
        for node in self._nodes():
            parent = node.parent
            if parent is None or not node.token_ids or len(node.token_ids) != len(node.slots):
                raise AssertionError("a cached node is malformed")
            if parent.children.get(node.token_ids[0]) is not node:
                raise AssertionError("a cached node is filed under a wrong token")
            if seen & set(node.slots) or not self._pool.owns(node.slots):
                raise AssertionError("a cached slot is free or cached twice")
            if TARGET_STORE not in node.stores:
                raise AssertionError("a cached node has no valid target K/V")
            if node.num_holders != holders.pop(node, 0) or (node in order) is bool(node.num_holders):
                raise AssertionError("a cached node has another number of holders")
            if order.get(node, -1) > order.get(parent, len(order)):
                raise AssertionError("a cached node would be evicted after its parent")
            seen |= set(node.slots)
        if holders or len(order) != sum(not node.num_holders for node in self._nodes()):
            raise AssertionError("a node that is held or could be evicted is not in the tree")
        if self.num_evictable != sum(len(node.slots) for node in order):
            raise AssertionError("the evictable count is off")

    def _nodes(self) -> Iterator[Node]:
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _root(self, held: Node | None, salt: str) -> Node:
        """The root above what a sequence holds, or the one for what is computed now."""
        for node in _path(held):
            if node.parent is not None and node.parent.key is not None:
                return node.parent
        key = _RootKey(self.weights_version, salt)
        if key not in self._roots:
            self._roots[key] = Node([], [], None, frozenset(range(self._num_stores)), key=key)
        return self._roots[key]

    def _cut_off(self, leaf: Node) -> None:
        assert not leaf.children, "only leaves are evicted"
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.token_ids[0]]
        if parent.key is not None and not parent.children:
            del self._roots[parent.key]

    def _step(self, node: Node, token_ids: Sequence[int], start: int, end: int) -> Node | None:
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

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` tokens; returns the upper half. Whoever holds the node holds both."""
        assert node.parent is not None
        upper = Node(node.token_ids[:length], node.slots[:length], node.parent, node.stores, node.num_holders)
        node.parent.children[upper.token_ids[0]] = upper
        node.token_ids, node.slots, node.parent = node.token_ids[length:], node.slots[length:], upper
        upper.children[node.token_ids[0]] = node
        if not upper.num_holders:
            self._unheld[upper] = None  # at the end, until the caller holds it
        return upper

    def _grow(self, parent: Node, token_ids: list[int], slots: list[int], stores: frozenset[int]) -> Node:
        """Hang a new leaf under `parent`; the caller, who must hold it, gives the cache its slots."""
        leaf = Node(token_ids, slots, parent, stores)
        parent.children[token_ids[0]] = leaf
        self._unheld[leaf] = None
        self.num_evictable += len(slots)
        return leaf


PrefixCache: TypeAlias = NoPrefixCache | RadixPrefixCache


def _path(node: Node | None) -> Iterator[Node]:
    """The node and those above it, without the root."""
    while node is not None and node.key is None:
        yield node
        node = node.parent


def _extend(valid_lens: list[int], node: Node, start: int) -> None:
    """Count a node that begins at `start` for every store that holds all before it."""
    for store in node.stores:
        if valid_lens[store] == start:
            valid_lens[store] += len(node.slots)
