"""Decides what canonical passes verify, by measured cost T(M, context) and running acceptance. No rules of thumb.

Padding is free within a shape, and shapes cost what the cost table says; so each shape that holds the rows that run
anyway is one option, filled with the most promising rows, and the option that promises most wins. Nothing here changes
what is committed, only when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verispec.backends.cost import CostTable
from verispec.spec.drafter import Offer


class Load(NamedTuple):
    """Rows that run anyway in the next pass of a kind, and the context tokens they read in total."""

    num_rows: int = 0
    context_tokens: int = 0

    def joined(self, other: Load) -> Load:
        """The rows of both."""
        return Load(self.num_rows + other.num_rows, self.context_tokens + other.context_tokens)

    def plus(self, num_rows: int, context_len: float) -> Load:
        """With so many rows more, each reading so much context."""
        return Load(self.num_rows + num_rows, self.context_tokens + round(num_rows * context_len))


class Choice(NamedTuple):
    """Whether to draft by regular decoding, and the prediction that decided it."""

    by_decoding: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses among the canonical shapes `family`, which may be empty, and the shapes of fast passes."""

    family: tuple[int, ...]
    cost: CostTable

    def joins(self, exact: Load, fast: Load) -> bool:
        """Whether one canonical pass for all rows is cheaper than a canonical and a fast one."""
        if not exact.num_rows or not fast.num_rows or exact.num_rows + fast.num_rows > self.family[-1]:
            return False
        apart = self._exact_seconds(exact) + self._fast_seconds(fast)
        return self._exact_seconds(exact.joined(fast)) < apart

    def quotas(self, offers: Sequence[Offer], load: Load, *, canonical: bool) -> list[int]:
        """Nodes granted to each offer beside the rows that run anyway. One committed token per offer is sure."""
        nodes, best_count = self._best_fill(offers, load, self._shapes(canonical))[:2]
        quotas = [0] * len(offers)
        for i in nodes[:best_count]:
            quotas[i] += 1
        return quotas

    def choose(self, drafts: Sequence[Offer], windows: Sequence[Offer], *, exact: Load, fast: Load) -> Choice:
        """Whether sequences decode canonically, with these drafts, or regularly, in these windows to be replayed.

        `drafts` and `windows` are the two kinds of offers of the same sequences; `exact` and `fast` are what runs
        beside them: canonical rows, theirs included, and the rows of others in the fast pass.
        """
        count = len(windows)
        context_len = exact.context_tokens / max(1, exact.num_rows)
        others = Load(exact.num_rows - count, exact.context_tokens - round(count * context_len))
        other_tokens = fast.num_rows
        num_nodes, tokens = self._best_fill(drafts, exact, self.family)[1:]
        plain_rate = (tokens + other_tokens) / self._step_seconds(exact.plus(num_nodes, context_len), fast)
        window_tokens = sum(_expected_tokens(w) / w.max_nodes for w in windows)
        replay_seconds = count * self._replay_seconds_per_row(count * max(w.max_nodes for w in windows), context_len)
        window_seconds = self._step_seconds(others, fast.plus(count, context_len)) + replay_seconds
        window_rate = (window_tokens + other_tokens) / window_seconds
        reason = f"canonical passes predicted {plain_rate:.1f} tokens a second, replays {window_rate:.1f}"
        return Choice(window_rate > plain_rate, reason)

    def num_partial(self, lengths: Sequence[int], load: Load) -> int:
        """How many unfinished windows, in this order, are best verified together with the rows that run anyway.

        A row of theirs costs now what the larger shape costs more; later it would cost its share of a full pass.
        """
        context_len = load.context_tokens / max(1, load.num_rows)
        per_row = self._replay_seconds_per_row(self.family[-1], context_len)
        best, best_gain, rows = 0, 0.0, 0
        now = self._exact_seconds(load)
        for k, length in enumerate(lengths, start=1):
            rows += length + 1
            if load.num_rows + rows > self.family[-1]:
                break
            gain = rows * per_row - (self._exact_seconds(load.plus(rows, context_len)) - now)
            if gain >= best_gain:
                best, best_gain = k, gain
        return best

    def spare_rows(self, num_rows: int) -> int:
        """Rows that cost nothing more beside so many: those up to the end of the shape that the pass will have."""
        return self.cost.cheapest(m for m in self.family if m >= num_rows) - num_rows if num_rows else 0

    def _best_fill(self, offers: Sequence[Offer], load: Load, shapes: Iterable[int]) -> tuple[list[int], int, float]:
        """Offers' nodes by their worth, how many of them to take, and the tokens of a pass with those."""
        ranked = sorted(
            ((o.acceptance**depth, i) for i, o in enumerate(offers) for depth in range(1, o.max_nodes + 1)),
            key=lambda node: (-node[0], node[1]),
        )
        if not ranked:
            return [], 0, float(len(offers))
        context_len = load.context_tokens / load.num_rows if load.num_rows else 0.0
        best_count, best_tokens, best_seconds = 0, 0.0, 1.0
        for shape in (m for m in shapes if m >= load.num_rows):
            count = min(shape - load.num_rows, len(ranked))
            tokens = len(offers) + sum(value for value, _ in ranked[:count])
            seconds = self.cost.seconds(shape, load.plus(count, context_len).context_tokens)
            if tokens * best_seconds > best_tokens * seconds:
                best_count, best_tokens, best_seconds = count, tokens, seconds
        return [i for _, i in ranked], best_count, best_tokens

    def _shapes(self, canonical: bool) -> tuple[int, ...]:
        return self.family if canonical else self.family or self.cost.shapes

    def _step_seconds(self, exact: Load, fast: Load) -> float:
        """What a step with these rows takes, in one pass or two."""
        if self.joins(exact, fast):
            return self._exact_seconds(exact.joined(fast))
        return self._exact_seconds(exact) + self._fast_seconds(fast)

    def _exact_seconds(self, load: Load) -> float:
        if not load.num_rows:
            return 0.0
        return min(self.cost.seconds(m, load.context_tokens) for m in self.family if m >= load.num_rows)

    def _fast_seconds(self, load: Load) -> float:
        if not load.num_rows:
            return 0.0
        return self.cost.seconds(self.cost.fast_shape(load.num_rows), load.context_tokens)

    def _replay_seconds_per_row(self, num_rows: int, context_len: float) -> float:
        """What a row costs when so many are replayed, in the shape that is cheapest per row."""
        return min(self.cost.seconds(m, round(min(m, num_rows) * context_len)) / min(m, num_rows) for m in self.family)


def _expected_tokens(window: Offer) -> float:
    """Committed tokens of a replay of a whole window: 1 + a + a^2 + ..., one term per token."""
    return sum(window.acceptance**i for i in range(window.max_nodes))
