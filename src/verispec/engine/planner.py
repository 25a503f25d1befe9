"""Decides how many draft nodes each sequence gets, by measured cost and running acceptance. No rules of thumb.

Padding is free within a shape, and shapes cost what the cost table says; so each canonical shape that holds the base
rows is one option, filled with the most promising nodes, and the option with the most expected tokens per second
wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verispec.backends.cost import CostTable
from verispec.spec.drafter import Offer


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses within the family; never changes what is committed, only when."""

    family: tuple[int, ...]
    cost: CostTable

    def quotas(self, offers: Sequence[Offer], *, base_rows: int, context_tokens: int) -> list[int]:
        """Nodes granted to each offer beside the rows that run anyway. One committed token per offer is sure."""
        nodes = sorted(
            ((o.acceptance**depth, i) for i, o in enumerate(offers) for depth in range(1, o.max_nodes + 1)),
            key=lambda node: (-node[0], node[1]),
        )
        context_per_row = context_tokens / base_rows if base_rows else 0.0
        best_count, best_rate = 0, 0.0
        for shape in (m for m in self.family if m >= base_rows):
            count = min(shape - base_rows, len(nodes))
            tokens = len(offers) + sum(value for value, _ in nodes[:count])
            context = context_tokens + int(context_per_row * count)
            rate = tokens / self.cost.seconds(shape, context)
            if rate > best_rate:
                best_count, best_rate = count, rate
        quotas = [0] * len(offers)
        for _, i in nodes[:best_count]:
            quotas[i] += 1
        return quotas
