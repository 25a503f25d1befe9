"""Decides what canonical passes verify, by measured cost T(M, context) and running acceptance. No rules of thumb.

Padding is free within a shape, and shapes cost what the cost table says; so each shape that holds the rows that run
anyway is one option, filled with the most promising rows, and the option that promises most wins. Nothing here changes
what is committed, only when.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from verispec.backends.cost import CostTable
from verispec.spec.drafter import Offer
from verispec.spec.skip_menu import WORTH_IT


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


NO_LOAD = Load()
NOTHING = Offer.nothing("")
_CONTEXT_STEP = 256  # context tokens that change no choice
_MOST_REMEMBERED = 4096
_LONG = 1 << 40  # context tokens: a cost is linear in them, so two points compare two costs


class Grants(NamedTuple):
    """Nodes granted to each offer, and the speed-up predicted for drafts that cost passes of their own, if any."""

    quotas: tuple[int, ...]
    predicted: float | None


class Fill(NamedTuple):
    """So many of the ranked levels; the tokens and seconds of a step with them."""

    num_levels: int
    tokens: float
    seconds: float
    quotas: tuple[int, ...] = ()


class Choice(NamedTuple):
    """Whether to draft by regular decoding, and the prediction that decided it."""

    by_decoding: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses among the canonical shapes `family`, which may be empty, and the shapes of fast passes."""

    family: tuple[int, ...]
    cost: CostTable
    _candidates: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shapes: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _promises: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _refused: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def joins(self, exact: Load, fast: Load) -> bool:
        """Whether one canonical pass for all rows is cheaper than a canonical and a fast one."""
        if not exact.num_rows or not fast.num_rows or exact.num_rows + fast.num_rows > self.family[-1]:
            return False
        apart = self._exact_seconds(exact) + self._fast_seconds(fast)
        return self._exact_seconds(exact.joined(fast)) < apart

    def quotas(self, offers: Sequence[Offer], load: Load, *, canonical: bool, beside: Load = NO_LOAD) -> Grants:
        """Nodes granted to each offer with the rows `load` that run anyway. One committed token per offer is sure.

        `beside` are the rows of the step's other pass, which may be joined to this one.
        """
        best, predicted = self._worthwhile(offers, load, beside, canonical=canonical)
        return Grants(best.quotas, predicted)

    def choose(self, drafts: Sequence[Offer], windows: Sequence[Offer], *, exact: Load, fast: Load) -> Choice:
        """Whether sequences decode canonically, with these drafts, or regularly, in these windows to be replayed.

        `drafts` and `windows` are the two kinds of offers of the same sequences; `exact` and `fast` are what runs
        beside them: canonical rows, theirs included, and the rows of others in the fast pass.
        """
        count = len(windows)
        context_len = exact.context_tokens / max(1, exact.num_rows)
        others = Load(exact.num_rows - count, exact.context_tokens - round(count * context_len))
        other_tokens = fast.num_rows
        best, _ = self._worthwhile(drafts, exact, fast, canonical=True)
        plain_rate = (best.tokens + other_tokens) / best.seconds
        window_tokens = sum(_expected_tokens(w) / w.max_nodes for w in windows)
        replay_seconds = count * self._replay_seconds_per_row(count * max(w.max_nodes for w in windows), context_len)
        window_seconds = self._step_seconds(others, fast.plus(count, context_len)) + replay_seconds
        window_rate = (window_tokens + other_tokens) / window_seconds
        reason = f"canonical passes predicted {plain_rate:.3g} tokens a second, replays {window_rate:.3g}"
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

    def promise(self, offer: Offer, load: Load) -> float:
        """Tokens a second that a sequence is predicted to get from an offer alone, beside the rows that run anyway."""
        # Sequences of one drafter offer the same again and again.
        context = load.context_tokens // _CONTEXT_STEP
        key = (load.num_rows, context, offer.max_nodes, offer.acceptance, id(offer.cost), offer.levels, offer.is_forced)
        if key not in self._promises:
            if len(self._promises) >= _MOST_REMEMBERED:
                self._promises.clear()
            best, _ = self._worthwhile([offer], load, NO_LOAD, canonical=bool(self.family))
            self._promises[key] = best.tokens / best.seconds
        return self._promises[key]

    def _worthwhile(
        self, offers: Sequence[Offer], load: Load, beside: Load, *, canonical: bool
    ) -> tuple[Fill, float | None]:
        """The best fill, and the speed-up predicted for those drafts that cost passes of their own, if there are any.

        Those are taken only if they promise a real gain, or are forced.
        """
        free = [o if o.cost is None else NOTHING for o in offers]
        without = self._best_fill(free, load, beside, canonical=canonical)
        if all(o.cost is None for o in offers):
            return without, None
        # What was refused is asked again every step, and nothing has changed but a little context.
        key = (
            canonical, load.num_rows, load.context_tokens // _CONTEXT_STEP, beside.num_rows,
            tuple((o.max_nodes, o.acceptance, id(o.cost), o.levels, o.is_forced) for o in offers),
        )  # fmt: skip
        if key in self._refused:
            return without, self._refused[key]
        best = self._best_fill(offers, load, beside, canonical=canonical, needs_paid=True)
        predicted = (best.tokens + beside.num_rows) * without.seconds
        predicted /= best.seconds * (without.tokens + beside.num_rows)
        if predicted >= WORTH_IT or any(o.is_forced for o in offers):
            return best, predicted
        if len(self._refused) >= _MOST_REMEMBERED:
            self._refused.clear()
        self._refused[key] = predicted
        return without, predicted

    def _best_fill(
        self, offers: Sequence[Offer], load: Load, beside: Load, *, canonical: bool, needs_paid: bool = False
    ) -> Fill:
        """The levels to take of each offer: those worth most per node, as many as promise most tokens a second.

        With `needs_paid` at least one of those that cost passes of their own is taken, where any fits.
        """
        context_len = load.context_tokens / load.num_rows if load.num_rows else 0.0
        ranked = _ranked(offers)
        if not ranked:
            seconds = self._step_seconds(load, beside) if canonical else self._fast_seconds(load)
            return Fill(0, float(len(offers)), max(1e-12, seconds), (0,) * len(offers))
        least = 0
        if needs_paid:
            forced = [i for i, block in enumerate(ranked) if block.offer.is_forced]
            paid = (i for i, block in enumerate(ranked) if block.offer.cost is not None)
            least = max(forced) + 1 if forced else next(paid, -1) + 1
        sums = list(accumulate(ranked, _Sum.plus(context_len), initial=_Sum()))
        nodes = [s.num_nodes for s in sums]
        best: Fill | None = None
        rooms = self._fills(load, beside, nodes[-1], canonical=canonical)
        if needs_paid:  # a shorter draft leaves rows of a shape empty, but saves a pass
            rooms = sorted({*rooms, *(nodes[i] for i in _opening(ranked) if nodes[i] <= rooms[-1])})
        for room in rooms:
            count = bisect_right(nodes, room) - 1
            tokens, filled = len(offers) + sums[count].tokens, load.plus(nodes[count], context_len)
            seconds = self._step_seconds(filled, beside) if canonical else self._fast_seconds(filled)
            seconds = max(1e-12, seconds + sums[count].seconds)
            found = Fill(count, tokens, seconds)
            if best is None or (best.num_levels < least and count > best.num_levels):
                best = found
                continue
            gained = (tokens + beside.num_rows) * best.seconds > (best.tokens + beside.num_rows) * seconds
            if count >= least and gained:
                best = found
        assert best is not None
        quotas = [0] * len(offers)
        for block in ranked[: best.num_levels]:
            quotas[block.at] += block.num_nodes
        return best._replace(quotas=tuple(quotas))

    def _fills(self, load: Load, beside: Load, most: int, *, canonical: bool) -> list[int]:
        """Numbers of nodes worth a look: none, and those that fill a shape, with or without the rows beside."""
        shapes = self.family if canonical else self.family or self.cost.shapes
        taken = {load.num_rows, load.num_rows + beside.num_rows}
        rooms = {min(most, shape - rows) for shape in shapes for rows in taken if shape >= rows}
        return sorted({0, *rooms}) if any(shape >= load.num_rows for shape in shapes) else [0]

    def _step_seconds(self, exact: Load, fast: Load) -> float:
        """What a step with these rows takes, in one pass or two."""
        if self.joins(exact, fast):
            return self._exact_seconds(exact.joined(fast))
        return self._exact_seconds(exact) + self._fast_seconds(fast)

    def _exact_seconds(self, load: Load) -> float:
        if not load.num_rows:
            return 0.0
        key = load.num_rows, load.context_tokens // _CONTEXT_STEP
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MOST_REMEMBERED:
                self._shapes.clear()
            shape = self._shapes[key] = self.cost.cheapest(self._cheap_shapes(load.num_rows), load.context_tokens)
        return self.cost.seconds(shape, load.context_tokens)

    def _cheap_shapes(self, num_rows: int) -> tuple[int, ...]:
        """Canonical shapes for so many rows, without those that a smaller one beats whatever the context is."""
        if num_rows not in self._candidates:
            kept: list[int] = []
            for m in (m for m in self.family if m >= num_rows):
                at_most = [(self.cost.seconds(k, 0), self.cost.seconds(k, _LONG)) for k in kept]
                if not any(a <= self.cost.seconds(m, 0) and b <= self.cost.seconds(m, _LONG) for a, b in at_most):
                    kept.append(m)
            self._candidates[num_rows] = tuple(kept)
        return self._candidates[num_rows]

    def _fast_seconds(self, load: Load) -> float:
        if not load.num_rows:
            return 0.0
        return self.cost.seconds(self.cost.fast_shape(load.num_rows), load.context_tokens)

    def _replay_seconds_per_row(self, num_rows: int, context_len: float) -> float:
        """What a row costs when so many are replayed, in the shape that is cheapest per row."""
        return min(self.cost.seconds(m, round(min(m, num_rows) * context_len)) / min(m, num_rows) for m in self.family)


class _Block(NamedTuple):
    """A level of offer number `at`; `num_rows` are the rows of the draft pass that makes it."""

    at: int
    depth: int
    num_nodes: int
    tokens: float
    num_rows: int
    offer: Offer


def _ranked(offers: Sequence[Offer]) -> list[_Block]:
    """All levels of all offers: forced ones, then by their worth per node; an offer's own in their order."""
    ranked: list[tuple[tuple[bool, float, int, int], _Block]] = []
    for i, offer in enumerate(offers):
        worth, num_rows = math.inf, 1
        for depth, level in enumerate(offer.all_levels):
            worth = min(worth, level.tokens / level.num_nodes)
            block = _Block(i, depth, level.num_nodes, level.tokens, num_rows, offer)
            ranked.append(((not offer.is_forced, -worth, depth, i), block))
            num_rows = level.num_nodes
    ranked.sort(key=lambda pair: pair[0])
    return [block for _, block in ranked]


def _opening(ranked: Sequence[_Block]) -> list[int]:
    """Where in the list a draft pass is needed that no level before needs."""
    first: dict[tuple[int, int], int] = {}
    for i, block in enumerate(ranked):
        if block.offer.cost is not None:
            first.setdefault((id(block.offer.cost), block.depth), i)
    return list(first.values())


@dataclass(slots=True)
class _Sum:
    """What the first of the ranked levels add up to; `rows` are those of each draft pass, by its cost and depth."""

    num_nodes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    rows: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def plus(context_len: float) -> Callable[[_Sum, _Block], _Sum]:
        """Adds a level; draft passes of all sequences that share a cost are one."""

        def add(before: _Sum, block: _Block) -> _Sum:
            seconds, cost, key = before.seconds, block.offer.cost, (id(block.offer.cost), block.depth)
            if cost is not None:  # the rows are one running count for all sums: they are read in order
                count = before.rows.get(key, 0)
                before.rows[key] = count + block.num_rows
                seconds += _pass_seconds(cost, count + block.num_rows, context_len)
                seconds -= _pass_seconds(cost, count, context_len) if count else 0.0
            return _Sum(before.num_nodes + block.num_nodes, before.tokens + block.tokens, seconds, before.rows)

        return add


def _pass_seconds(cost: CostTable, num_rows: int, context_len: float) -> float:
    return cost.seconds(cost.fast_shape(num_rows), round(num_rows * context_len))


def _expected_tokens(window: Offer) -> float:
    """Committed tokens of a replay of a whole window: 1 + a + a^2 + ..., one term per token."""
    return sum(window.acceptance**i for i in range(window.max_nodes))
