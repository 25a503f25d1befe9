"""What a step would give: tokens a second by measured cost T(M, context), plainly or with the drafts of a curve.

All that draft are taken to draft alike. What the host takes is measured: where it is far from the device it works on
one step while the next one runs, so of both only the longer time counts; where it is near they add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verispec.backends.cost import SHORT_CONTEXT, CostTable
from verispec.engine.step_costs import StepCosts
from verispec.spec.drafter import Curve

LEFT_OUT = 3e-5  # seconds of a draft pass that nobody wants and that is left out, though it was sent before; H200
_NEAR_HOST = 1e-3  # seconds for a round that the host drafts, believed: a pass leaves its caches cold
_ROUND_STEP, _MANY_ROUNDS = 0.2, 64  # towards what the host last took for a round
# Of rounds that the backend drafts, beyond their passes: seconds that are believed where the host is far, as if seen in
# so many rounds; the most that are remembered; a change that entries are made anew for; and by how many times rounds
# may take more or less than their passes.
_BEYOND, _BELIEVED_ROUNDS, _MOST_ROUNDS, _NOTICEABLE_BEYOND, _FARTHEST = 4e-5, 64.0, 512.0, 1e-5, 3.0
_BEST_GAIN, _MOST_ROWS = 1.1, 3  # at best so many times the tokens a second, by at most so many times the rows


class Crowd(NamedTuple):
    """What runs anyway: rows of the canonical pass, or of the fast one; the tokens they will commit; the rows of the
    other pass; the average context of a row; whether those that may draft need the host in every round anyway; and
    whether draft passes that nobody wants are left out."""

    rows: int
    tokens: int
    beside: int
    context_len: int
    is_canonical: bool
    needs_host: bool = False
    leaves_out: bool = True


@dataclass(frozen=True, slots=True)
class Offer:
    num_nodes: int
    rate: float
    draft_seconds: float = 0.0
    tokens: float = 0.0  # of the draft that are expected to be accepted


NOTHING = Offer(0, 0.0)


@dataclass(slots=True)
class _Beyond:
    """Seconds of a round, and how many rounds they are the mean of."""

    seconds: float
    num_rounds: float = _BELIEVED_ROUNDS


class StepRates:
    """`host_seconds` are those of a round that the host drafts, beyond T; `round_seconds` those of one that the backend
    drafts, for each sequence, of the host; the engine measures both. `fits_rows`: what was not drafted after all has no
    rows. `version` grows when what rounds take beyond their passes has moved noticeably."""

    def __init__(
        self, costs: StepCosts, cost: CostTable, *, row_budget: int, max_draft: int | None, max_burst: int,
        fits_rows: bool,
    ) -> None:  # fmt: skip
        self._costs, self._cost = costs, cost
        self._row_budget, self._max_draft, self.max_burst = row_budget, max_draft, max_burst
        self._fits_rows = fits_rows
        near = _NEAR_HOST if cost.learns else 0.0
        self.host_seconds = cost.trip / 2 or near
        self.round_seconds = 0.0
        self._beyond: dict[tuple[str, int], _Beyond] = {}
        self.version = 0

    def plain(self, crowd: Crowd) -> float:
        """Without drafts."""
        return self.rate(crowd, 0, 0.0, self.host(is_needed=crowd.needs_host))

    def plain_seconds(self, crowd: Crowd) -> float:
        """Of a step without drafts."""
        return (crowd.tokens + crowd.beside) / self.plain(crowd)

    def note_rounds(self, seconds: float, num_rounds: int = _MANY_ROUNDS) -> None:
        """What the host took for each round that the backend drafted, of each sequence; few of them say little."""
        step = min(_ROUND_STEP if self.round_seconds else 1.0, num_rounds / _MANY_ROUNDS)
        self.round_seconds += (seconds - self.round_seconds) * step

    def beyond(self, name: str, drafting: int) -> float:
        """Seconds of a round in which the backend drafts for so many by this drafter, beyond T and its draft passes:
        what it looks up, judges and moves between passes. Nothing where the host is near, whose time has them."""
        return self._of_rounds(name, drafting).seconds if self._cost.trip else 0.0

    def _of_rounds(self, name: str, drafting: int) -> _Beyond:
        return self._beyond.setdefault((name, drafting.bit_length()), _Beyond(_BEYOND))

    def note_burst(self, name: str, drafting: int, seconds: float, predicted: float, num_rounds: int) -> None:
        """What a burst of so many rounds took, and should have taken by T and draft passes."""
        if not predicted / _FARTHEST <= seconds <= _FARTHEST * predicted:  # the host was late for it, or the one before
            return
        found = self._of_rounds(name, drafting)
        before, found.num_rounds = found.seconds, min(_MOST_ROUNDS, found.num_rounds + num_rounds)
        found.seconds += ((seconds - predicted) / num_rounds - before) * num_rounds / found.num_rounds
        if round(before / _NOTICEABLE_BEYOND) != round(found.seconds / _NOTICEABLE_BEYOND):
            self.version += 1

    def has_faster_rounds(self, drafting: int, crowd: Crowd) -> bool:
        """Whether a round is shorter if these sequences draw in fast passes: replays come on top of that. Rounds of a
        window need the host for none of its tokens."""
        if not self._costs.family:
            return False
        others = max(0, crowd.rows - drafting)
        drawn = self._costs.seconds(others, crowd.beside + drafting, crowd.context_len)
        host = self.host(is_needed=crowd.needs_host)
        return drawn < self._costs.seconds(crowd.rows, crowd.beside, crowd.context_len) + host

    def offers(self, name: str, curve: Curve, drafting: int, crowd: Crowd) -> list[Offer]:
        """Whole levels of a drafter's curve, at least one, up to as many as fit."""
        offers = list[Offer]()
        by_backend = curve.by_backend and not crowd.needs_host
        beyond = self.beyond(name, drafting) if by_backend else 0.0
        nodes, tokens, seconds, width, saved_rows = 0, 0.0, 0.0, 1, 0.0
        for level in curve.levels[: self.limit(len(curve.levels))]:
            if self._fits_rows:
                saved_rows += (1.0 - level.share) * self._verifying(crowd, drafting * nodes, drafting * level.num_nodes)
            nodes += level.num_nodes
            tokens += level.tokens
            if curve.cost is not None:
                # Timed beside the target's passes, on the same machine.
                drafted = self._cost.speed * draft_seconds(curve.cost, drafting * width, crowd.context_len)
                wanted = 1.0 - (1.0 - level.share) ** drafting  # the chance that anybody wants this pass
                if not by_backend:  # the host knows before it sends it
                    seconds += wanted * (self._cost.trip + drafted)
                else:
                    seconds += wanted * drafted + (1.0 - wanted) * self._in_vain(crowd, drafted)
            width = level.num_nodes
            if crowd.rows + nodes > self._row_budget:
                break
            host, hidden = self.host(is_needed=True), 0.0
            if by_backend:
                host = drafting * self.round_seconds
                host, hidden = (0.0, host) if self._cost.trip else (host, 0.0)
            if beyond < 0.0:  # learned of other drafts, perhaps of longer rounds
                passes = self.seconds(crowd, crowd.rows + drafting * nodes) + seconds
                host += max(beyond, passes / _FARTHEST - passes)
            else:
                host += beyond
            added = seconds + host - saved_rows
            rate = self.rate(crowd, drafting * nodes, drafting * tokens, added, hidden)
            offers.append(Offer(nodes, rate, seconds, tokens))
        return offers

    def best_of(self, offers: Sequence[Offer], curve: Curve, drafting: int, crowd: Crowd) -> Offer:
        """The offer that promises most, or the largest if the curve is forced."""
        if curve.is_forced or not offers:
            return offers[-1] if offers else NOTHING
        if not curve.stays:
            return max(offers, key=lambda offer: offer.rate)
        plain = self.plain(crowd)

        def saved(offer: Offer) -> float:
            return (crowd.tokens + crowd.beside + drafting * offer.tokens) * (1 / plain - 1 / offer.rate)

        best = max(offers, key=saved)
        return best if saved(best) > 0.0 else NOTHING

    def _in_vain(self, crowd: Crowd, seconds: float) -> float:
        """What a draft pass that would take so long takes if nobody wants it: where the host is far, it was sent."""
        if not self._cost.trip:
            return 0.0
        return min(LEFT_OUT, seconds) if crowd.leaves_out else seconds

    def limit(self, num_levels: int) -> int:
        return num_levels if self._max_draft is None else min(num_levels, self._max_draft)

    def host(self, *, is_needed: bool) -> float:
        """What a round takes beyond its passes: where the host is not needed the backend goes on by itself."""
        return self.host_seconds if is_needed or self.max_burst == 1 else 0.0

    def rate(
        self, crowd: Crowd, num_nodes: int, tokens: float, draft_seconds: float, host_seconds: float = 0.0
    ) -> float:
        """Tokens a second of a step with further nodes, which take further seconds to draft, while the host is busy
        with the step before for `host_seconds`.

        Rows that give no token, those of prompts, are left out, but nodes cost what they add to the pass with them:
        time is worth what it gives in the steps to come.
        """
        seconds = self.seconds(crowd, crowd.rows + num_nodes) + draft_seconds
        if crowd.rows > crowd.tokens:
            seconds += self.seconds(crowd, crowd.tokens) - self.seconds(crowd, crowd.rows)
        return (crowd.tokens + crowd.beside + tokens) / max(1e-12, seconds, host_seconds)

    def _verifying(self, crowd: Crowd, num_before: int, num_nodes: int) -> float:
        """Seconds that so many nodes add to a step with this crowd and the nodes before them."""
        rows = crowd.rows + num_before
        return self.seconds(crowd, rows + num_nodes) - self.seconds(crowd, rows)

    def seconds(self, crowd: Crowd, num_rows: int) -> float:
        """A step of this crowd with so many rows of its own kind."""
        if crowd.is_canonical and self._costs.family:
            return self._costs.seconds(num_rows, crowd.beside, crowd.context_len)
        return self._costs.fast_seconds(num_rows, crowd.context_len)

    def window_rate(self, curve: Curve, num_nodes: int, drafting: int, crowd: Crowd) -> float:
        """Tokens a second if these sequences draw so many tokens in fast rounds and then replay them, together.

        Replays are packed into passes beside the rows that run anyway.
        """
        others, tokens = max(0, crowd.rows - drafting), crowd.tokens - drafting + crowd.beside
        room = self._row_budget - others
        if not self._costs.family or room <= 0:
            return 0.0
        fitting = max(1, room // (num_nodes + 1))
        full, rest = divmod(drafting, fitting)
        context_len = crowd.context_len
        seconds = num_nodes * self._costs.seconds(others, crowd.beside + drafting, context_len)
        for count, num_passes in ((fitting, full), (rest, bool(rest))):
            if num_passes:
                num_rows = min(self._row_budget, others + count * (num_nodes + 1))
                seconds += num_passes * (self._costs.seconds(num_rows, crowd.beside, context_len) + self.host_seconds)
        confirmed = 1.0 + sum([level.tokens for level in curve.levels[:num_nodes]])
        num_steps = num_nodes + full + bool(rest)
        return (num_steps * tokens + drafting * confirmed) / max(1e-12, seconds)

    def best_could_pay(self, num_running: int, *, is_canonical: bool) -> bool:
        """Whether drafts of so many sequences, all accepted, would give clearly more tokens a second than rounds that
        need no host."""
        crowd = Crowd(num_running, num_running, 0, SHORT_CONTEXT, is_canonical)
        most = min(self._row_budget, _MOST_ROWS * num_running)
        rows = {most, *(m for m in self._cost.shapes if num_running < m < most)}
        host = self.host(is_needed=True)
        rates = [self.rate(crowd, m - num_running, m - num_running, host) for m in rows]
        return max(rates) > _BEST_GAIN * self.rate(crowd, 0, 0.0, 0.0)


def draft_seconds(cost: CostTable, num_rows: int, context_len: int) -> float:
    return cost.seconds(cost.fast_shape(num_rows), num_rows * context_len)
