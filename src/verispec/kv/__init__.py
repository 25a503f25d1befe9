"""K/V bookkeeping: slots, leases and the prefix cache. Pure Python, no tensors."""

from verispec.kv.pool import DUMP_SLOT, NUM_RESERVED, ZERO_SLOT, Lease, SlotPool
from verispec.kv.prefix_cache import (
    DRAFT_STORE,
    TARGET_STORE,
    Node,
    NoPrefixCache,
    PrefixCache,
    PrefixHit,
    Published,
    RadixPrefixCache,
)

__all__ = [
    "DRAFT_STORE",
    "DUMP_SLOT",
    "NUM_RESERVED",
    "TARGET_STORE",
    "ZERO_SLOT",
    "Lease",
    "NoPrefixCache",
    "Node",
    "PrefixCache",
    "PrefixHit",
    "Published",
    "RadixPrefixCache",
    "SlotPool",
]
