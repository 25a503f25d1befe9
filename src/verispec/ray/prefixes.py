"""Which replica has seen the beginning of a prompt: hashes of prefixes, and who was last sent each of them.

A guess, made where requests are sent from: it costs no message, and a wrong one costs time, never a token.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

BLOCK_LEN = 32  # tokens between two prefixes that are named
MAX_BLOCKS = 256
MAX_KEYS = 200_000
MAX_IMBALANCE = 4  # requests that a replica may have more than the least busy one, and still be preferred


def prefix_keys(prompt_ids: Sequence[int], salt: str) -> tuple[int, ...]:
    """A name for each prefix whose length is a multiple of BLOCK_LEN. Salts share nothing, as in the cache itself."""
    key, found = zlib.crc32(salt.encode()), []
    ids = array("q", prompt_ids[: BLOCK_LEN * MAX_BLOCKS])
    for start in range(0, len(ids) - BLOCK_LEN + 1, BLOCK_LEN):
        key = hash((key, ids[start : start + BLOCK_LEN].tobytes()))
        found.append(key)
    return tuple(found)


class PrefixIndex:
    """Who was sent which prefix, the newest MAX_KEYS of them."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._holders: OrderedDict[int, str] = OrderedDict()
        self._max_keys = max_keys

    def note(self, keys: Sequence[int], replica: str) -> None:
        """A prompt with these prefixes went to this replica."""
        for key in keys:
            self._holders[key] = replica
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def holder(self, keys: Sequence[int], among: Collection[str]) -> str | None:
        """Who has the longest of these prefixes, of the replicas that can be asked."""
        return next((r for key in reversed(keys) if (r := self._holders.get(key)) in among), None)


def ranked(
    index: PrefixIndex, keys: Sequence[int], loads: Mapping[str, int], avoid: Collection[str] = ()
) -> list[list[str]]:
    """Replicas in ranks, the ones to ask first in front: the prompt's holder unless it is too busy, then the least
    busy. `loads` are requests by replica, of all that may be asked; those to `avoid` come last.
    """
    wanted = {name: load for name, load in loads.items() if name not in avoid} or dict(loads)
    if not wanted:
        return []
    least = min(wanted.values())
    holder = index.holder(keys, wanted)
    ranks = [[name for name, load in wanted.items() if load == level] for level in sorted(set(wanted.values()))]
    if holder is not None and wanted[holder] <= least + MAX_IMBALANCE:
        ranks.insert(0, [holder])
    return ranks
