"""Ways to break an engine on purpose, each at a seam that anybody can use: backend, drafter, pool, cache or policy.

A backend stands between the engine and what is watched; a device behind it. `is_drafted` tells rows of a draft from the
others: rows of a canonical pass that draw behind another row that draws for the same sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.adversaries import VOCAB_SIZE
from tests.support.faulty_backends import WrappedBackend
from verispec.backends.cost import CostTable
from verispec.backends.protocol import DrawWanted, Noise, Pass, PassKind, PassResult, ReadyTicket, Rows, Ticket
from verispec.engine.policy import Policy, RoundLoad
from verispec.engine.step_costs import StepCosts
from verispec.engine.windows import Windows
from verispec.kv import DUMP_SLOT, Lease, Published, RadixPrefixCache, SlotPool
from verispec.kv.prefix_cache import PrefixHit
from verispec.sampling.rows import Sampler
from verispec.spec.decode import DecodeDrafter
from verispec.spec.turn import Pending, Turn
from verispec.types import NO_DRAFT, Draft


def drafted_draws(pass_: Pass) -> list[tuple[int, int]]:
    """Of a canonical pass: pairs (draw i, row of the drafted token that the draw is compared with)."""
    wanted = pass_.wanted.draw
    if pass_.kind is not PassKind.CANONICAL or wanted is None:
        return []
    rows, seq_rows = wanted.rows.tolist(), pass_.rows.seq_rows
    return [(i, b) for i, (a, b) in enumerate(pairwise(rows)) if seq_rows[a] == seq_rows[b]]


def drafted_rows(pass_: Pass) -> NDArray[np.int64]:
    return np.array([row for _, row in drafted_draws(pass_)], np.int64)


def _kv(backend: Any) -> NDArray[np.uint64]:
    while not hasattr(backend, "kv"):
        backend = backend.inner
    return backend.kv[0]


def _as_kind(pass_: Pass, kind: PassKind) -> Pass:
    return replace(pass_, kind=kind)


# Devices.


class ReplaysWriteNowhere(WrappedBackend):
    def run(self, pass_: Pass) -> PassResult:
        slots, kv = pass_.rows.slots[drafted_rows(pass_)], _kv(self)
        before = kv[slots].copy()
        result = self.inner.run(pass_)
        kv[slots] = before
        return result


class ReplaysWriteToEachOthersSlots(WrappedBackend):
    def run(self, pass_: Pass) -> PassResult:
        result = self.inner.run(pass_)
        slots, kv = pass_.rows.slots[drafted_rows(pass_)], _kv(self)
        kv[slots] = kv[slots[::-1]]
        return result


class FastKvStays(WrappedBackend):
    """Canonical passes draw as they should, but leave the K/V of fast ones."""

    def run(self, pass_: Pass) -> PassResult:
        result = self.inner.run(pass_)
        if pass_.kind is PassKind.CANONICAL:
            self.inner.run(_as_kind(pass_, PassKind.FAST))
        return result


class ReplaysRunFast(WrappedBackend):
    def run(self, pass_: Pass) -> PassResult:
        return self.inner.run(_as_kind(pass_, PassKind.FAST) if drafted_draws(pass_) else pass_)


class EverythingRunsFast(WrappedBackend):
    def run(self, pass_: Pass) -> PassResult:
        return self.inner.run(_as_kind(pass_, PassKind.FAST))


@dataclass
class Confirming(WrappedBackend):
    """Draws that are compared with a drafted token give that token: all of them, the first wrong one, or the last."""

    inner: Any
    which: str

    def run(self, pass_: Pass) -> PassResult:
        result = self.inner.run(pass_)
        if result.draw is None:
            return result
        tokens, pairs = result.draw.token_ids.copy(), drafted_draws(pass_)
        seen: set[int] = set()
        for at, (i, row) in enumerate(pairs):
            seq_row, drafted = int(pass_.rows.seq_rows[row]), pass_.rows.token_ids[row]
            is_last = at + 1 == len(pairs) or pairs[at + 1][0] != i + 1
            is_first_wrong = tokens[i] != drafted and seq_row not in seen
            seen |= {seq_row} if tokens[i] != drafted else set()
            if (
                self.which == "all"
                or (self.which == "first wrong" and is_first_wrong)
                or (self.which == "last" and is_last)
            ):
                tokens[i] = drafted
        return replace(result, draw=result.draw._replace(token_ids=tokens))


@dataclass
class ShiftedNoise(WrappedBackend):
    """Drafted rows, or those of fast passes, use the noise of the token before."""

    inner: Any
    kind: PassKind

    def run(self, pass_: Pass) -> PassResult:
        wanted = pass_.wanted.draw
        if wanted is None or pass_.kind is not self.kind:
            return self.inner.run(pass_)
        t = pass_.rows.positions[wanted.rows].astype(np.int64) + 1
        t[np.isin(wanted.rows, drafted_rows(pass_)) if self.kind is PassKind.CANONICAL else slice(None)] -= 1
        noise = Noise(t, np.zeros(len(t), np.int64))
        return self.inner.run(replace(pass_, wanted=replace(pass_.wanted, draw=DrawWanted(wanted.rows, noise))))


@dataclass
class PenaltiesIgnoreThePath(WrappedBackend):
    """The tokens of drafted rows, or of those of fast passes, are taken for token 0 where penalties look."""

    inner: Any
    kind: PassKind

    def run(self, pass_: Pass) -> PassResult:
        if pass_.kind is self.kind:
            rows = drafted_rows(pass_) if self.kind is PassKind.CANONICAL else slice(None)
            slots = pass_.rows.slots[rows]
            self.resident.slot_tokens[slots[slots != DUMP_SLOT]] = 0
        return self.inner.run(pass_)


# Backends.


class ReplaysAreSubmittedFast(WrappedBackend):
    def submit(self, pass_: Pass) -> Ticket:
        return self.inner.submit(_as_kind(pass_, PassKind.FAST) if drafted_draws(pass_) else pass_)


class AnyShape(WrappedBackend):
    """Padding is cut off."""

    def submit(self, pass_: Pass) -> Ticket:
        rows = pass_.rows
        count = int((rows.seq_rows > 0).sum())
        columns = (getattr(rows, name) for name in Rows.__dataclass_fields__)
        cut = Rows(*(None if column is None else column[:count] for column in columns))
        return self.inner.submit(replace(pass_, rows=cut, head_shape=min(count, pass_.head_shape)))


class StaleResults(WrappedBackend):
    """A canonical pass gives the draws of the one before it, where they are as many."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._last: PassResult | None = None

    def submit(self, pass_: Pass) -> Ticket:
        result, last = self.inner.submit(pass_).result(), self._last
        if pass_.kind is not PassKind.CANONICAL:
            return ReadyTicket(result)
        self._last = result
        if last is None or result.draw is None or last.draw is None or len(last.draw[0]) != len(result.draw[0]):
            return ReadyTicket(result)
        return ReadyTicket(replace(result, draw=last.draw))


@dataclass
class Rebound(WrappedBackend):
    """Rows are bound with something changed."""

    inner: Any
    stop_ids: tuple[int, ...] | None = None
    limit: int | None = None
    next_seed: bool = False

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        if self.stop_ids is not None and not sampler.params.min_tokens:
            sampler = sampler._replace(stop_ids=self.stop_ids)
        if self.limit is not None:
            sampler = sampler._replace(limit=sampler.limit + self.limit)
        if self.next_seed:
            sampler = sampler._replace(key=sampler.key._replace(sample_index=sampler.key.sample_index + 1))
        self.inner.bind(seq_row, sampler)


class LateTables(WrappedBackend):
    """The slot table learns of new slots a pass too late, as if a stale table were read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._held: Any = None

    def submit(self, pass_: Pass) -> Ticket:
        update, self._held = self._held, pass_.table_update
        table = self.resident.table
        before = table[pass_.table_update.seq_rows, pass_.table_update.positions].copy()
        result = self.inner.submit(pass_).result()
        table[pass_.table_update.seq_rows, pass_.table_update.positions] = np.maximum(before, 2)
        if update is not None:
            table[update.seq_rows, update.positions] = update.slots
        return ReadyTicket(result)


# Drafters.


class WrappedDrafter:
    def __init__(self, inner: DecodeDrafter) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ForgetsReadyWindows(WrappedDrafter):
    def state(self, sequence: Any) -> Any:
        found = self.inner.state(sequence)
        if getattr(found, "is_ready", False):
            self.inner.forget(sequence)
            return self.inner.state(sequence)
        return found


class ReplaysNothing(WrappedDrafter):
    """Windows are thrown away when they should be verified."""

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Pending]:
        return [d if isinstance(d, Pending) else NO_DRAFT for d in self.inner.draft(turns)]


class ReplaysTooLittle(WrappedDrafter):
    """The last token of a window is not verified."""

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Pending]:
        return [d if isinstance(d, Pending) else Draft.chain(d.token_ids[:-1]) for d in self.inner.draft(turns)]


class KeepsTheRest(WrappedDrafter):
    """What stood behind a mismatch is put in front of the next window."""

    def __init__(self, inner: DecodeDrafter) -> None:
        super().__init__(inner)
        self._rest: dict[int, tuple[int, ...]] = {}

    def observe(self, turn: Turn) -> None:
        self.inner.observe(turn)
        if turn.verdict is not None:
            self._rest[turn.sequence.sequence_id] = tuple(turn.draft.token_ids[len(turn.verdict.path) + 1 :])  # type: ignore[union-attr]

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Pending]:
        found = []
        for turn, draft in zip(turns, self.inner.draft(turns), strict=True):
            rest = self._rest.pop(turn.sequence.sequence_id, ())
            opens = isinstance(draft, Pending) and not draft.token_ids and len(rest) < len(turn.slots)
            found.append(Pending(rest) if opens else draft)
        return found


class OverlooksStops(WrappedDrafter):
    def observe(self, turn: Turn) -> None:
        self.inner.observe(replace(turn, sequence=_NoStops(turn.sequence)))  # type: ignore[arg-type]


class _NoStops:
    stopping_ids = ()

    def __init__(self, sequence: Any) -> None:
        self._sequence = sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)


# Pools and caches.


class NeverTrims(SlotPool):
    def trim(self, lease: Lease, count: int) -> None:
        pass


class TrimsOneTooFew(SlotPool):
    def trim(self, lease: Lease, count: int) -> None:
        super().trim(lease, min(count + 1, len(lease.slots)))


class TrimmedSlotsAreUsed(SlotPool):
    """A lease goes on with slots that it has given back: a slot of a trimmed lease is written and read."""

    def trim(self, lease: Lease, count: int) -> None:
        slots = list(lease.slots)
        super().trim(lease, count)
        lease.slots = slots


class LendsTwice(SlotPool):
    """A slot that is lent stays free."""

    def extend(self, lease: Lease, count: int) -> bool:
        done = super().extend(lease, count)
        if done and count > 1:
            self._free.append(lease.slots[-1])
        return done


class ForgetsRollbacks(SlotPool):
    def rollback(self, lease: Lease) -> None:
        lease.slots = lease.slots[:1]
        super().rollback(lease)


class PublishesWhatIsNotCanonical(RadixPrefixCache):
    """A position more than it was given, where the caller holds one."""

    def publish(
        self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...], **rest: Any
    ) -> Published:
        if len(slots) > len(token_ids) and valid_lens[0] == len(token_ids):
            token_ids, valid_lens = [*token_ids, 0], (valid_lens[0] + 1, *valid_lens[1:])
        return super().publish(token_ids, slots, valid_lens, **rest)


class PublishesWrongSlots(RadixPrefixCache):
    def publish(
        self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...], **rest: Any
    ) -> Published:
        end = valid_lens[0]
        return super().publish(token_ids, [*slots[:end][::-1], *slots[end:]], valid_lens, **rest)


class MatchesOtherTokens(RadixPrefixCache):
    """The last token of what is cached may differ."""

    def match(self, token_ids: Sequence[int], *, limit: int, **salt: str) -> PrefixHit:
        if limit > 1:
            for last in range(VOCAB_SIZE):
                changed = [*token_ids[: limit - 1], last]
                hit = super().match(changed, limit=limit, **salt)
                if len(hit.slots) == limit:
                    return hit
                self.let_go(hit.node)
        return super().match(token_ids, limit=limit, **salt)


# Policies that lie.


class OfAnotherLoad(Policy):
    """Choices are those of a crowd eight times as large, with rows in the other pass."""

    def choose(self, turns: Sequence[Turn], *, other_rows: int, beside: int, **options: Any) -> None:
        super().choose(turns, other_rows=8 * other_rows + 7, beside=beside + 9, **options)


class _HastyWindows(Windows):
    def _waits(self, turns: Sequence[Turn], beside: int, host_seconds: float) -> bool:
        return False


class Hasty(Policy):
    """Windows that are ready are verified at once, whoever else is nearly ready."""

    def __init__(self, *args: Any, row_budget: int, **options: Any) -> None:
        super().__init__(*args, row_budget=row_budget, **options)
        self._windows = _HastyWindows(self.costs, row_budget=row_budget)


class Restless(Policy):
    """Who drafts nothing is asked again after a few rounds, whatever that holds up."""

    rests = False  # type: ignore[assignment]


class RandomCost(CostTable):
    def seconds(self, num_rows: int, context_tokens: int) -> float:
        return random.Random(num_rows * 1000 + context_tokens).uniform(1e-6, 1e-3)


class OfRandomCosts(Policy):
    """Every pass takes any time."""

    def __init__(self, family: Sequence[int], cost: CostTable, *args: Any, **options: Any) -> None:
        super().__init__(family, RandomCost(cost.shapes, cost.base, cost.per_context_token), *args, **options)


class _Lying(Policy):
    """Passes are made by these costs instead of the true ones."""

    costs_type: type[StepCosts]

    def __init__(self, family: Sequence[int], cost: CostTable, *args: Any, row_budget: int, **options: Any) -> None:
        super().__init__(family, cost, *args, row_budget=row_budget, **options)
        self.costs = self.costs_type(family, cost, row_budget=row_budget)


class _Joining(StepCosts):
    def joins(self, num_canonical: int, num_fast: int) -> bool:
        return bool(num_canonical) and num_canonical + num_fast <= self.family[-1]


class JoinsAlways(_Lying):
    costs_type = _Joining


class RoundsAtRandom(Policy):
    def num_rounds(self, load: RoundLoad, host_seconds: float) -> int:
        return 1 + (7 * load.context_len + 3 * load.num_going) % max(1, min(load.room, load.num_free, 9))


class _Largest(StepCosts):
    def canonical_shape(self, num_rows: int) -> int:
        return self.family[-1]


class LargestShape(_Lying):
    costs_type = _Largest


class _OfTheRows(StepCosts):
    def canonical_shape(self, num_rows: int) -> int:
        return num_rows


class ShapeOfTheRows(_Lying):
    """The one lie that is none of a policy's business: a shape that is not canonical."""

    costs_type = _OfTheRows
