"""Shapes of draft trees: how many children each level offers, and how many nodes it keeps.

`chain:N` is N nodes in a row, `branch:3,2,1` gives every node of a level the same number of children, and `beam:W,L`
keeps the W best sequences at each of L levels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from verispec.errors import InputError

MAX_NODES = 256
_PATTERN = re.compile(r"(chain|branch|beam):(\d{1,3}(?:,\d{1,3})*)")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Level by level: `branching[l]` children per expanded node of the level before, of which `keep[l]` stay."""

    branching: tuple[int, ...]
    keep: tuple[int, ...]
    kind: str = "chain"

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        return cls((1,) * length, (1,) * length)

    @classmethod
    def branch(cls, *children: int) -> TreeShape:
        keep, width = [], 1
        for count in children:
            width *= count
            keep.append(width)
        return cls(children, tuple(keep), "branch")

    @classmethod
    def beam(cls, width: int, depth: int) -> TreeShape:
        return cls((width,) * depth, (width,) * depth, "beam")

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """From `chain:N`, `branch:b1,b2,...` or `beam:W,L`; raises InputError with what is wrong."""
        match = _PATTERN.fullmatch(text)
        known = "chain:N, branch:b1,b2,... or beam:W,L with whole numbers from 1 to 999"
        if match is None:
            raise InputError(f"tree must be {known}, not {text[:80]!r}")
        kind, sizes = match[1], tuple(map(int, match[2].split(",")))
        wanted = {"chain": 1, "beam": 2}.get(kind, len(sizes))
        if len(sizes) != wanted or min(sizes) < 1:
            raise InputError(f"tree must be {known}, not {text!r}")
        if len(sizes) > MAX_NODES:
            raise InputError(f"tree has {len(sizes)} levels; at most {MAX_NODES} nodes are possible")
        make: dict[str, Callable[..., TreeShape]] = {"chain": cls.chain, "branch": cls.branch, "beam": cls.beam}
        shape = make[kind](*sizes)
        if shape.num_nodes > MAX_NODES:
            raise InputError(f"tree {text} has {shape.num_nodes} nodes; at most {MAX_NODES} are possible")
        return shape

    @property
    def depth(self) -> int:
        return len(self.keep)

    @property
    def num_nodes(self) -> int:
        return sum(self.keep)

    @property
    def is_chain(self) -> bool:
        return all(count == 1 for count in self.keep)

    def within(self, max_nodes: int, max_depth: int) -> TreeShape:
        """The whole levels that fit; a beam or the first level narrows instead of vanishing.

        Which nodes are left out depends on their number alone, never on their tokens: p/q rules need that.
        """
        depth = min(self.depth, max_depth)
        if self.kind == "beam" and depth:
            width = min(self.keep[0], max_nodes)
            return TreeShape.beam(width, min(depth, max_nodes // width)) if width else TreeShape((), (), "beam")
        while depth and sum(self.keep[:depth]) > max_nodes:
            depth -= 1
        if not depth and max_nodes and self.depth and max_depth:
            return TreeShape.branch(max_nodes)
        return TreeShape(self.branching[:depth], self.keep[:depth], self.kind)

    def __str__(self) -> str:
        if self.kind == "chain":
            return f"chain:{self.depth}"
        if self.kind == "beam":
            return f"beam:{self.keep[0] if self.keep else 0},{self.depth}"
        return "branch:" + ",".join(map(str, self.branching))
