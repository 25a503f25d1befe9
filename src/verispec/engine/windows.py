"""Windows under way: which of them are verified in the next step, which grow on, and which wait for others."""

from collections.abc import Sequence

from verispec.engine.step_costs import StepCosts
from verispec.spec.drafter import Held
from verispec.spec.turn import Choice, States, Turn


class Windows:
    """Chooses for turns that have a window."""

    def __init__(self, costs: StepCosts, *, row_budget: int) -> None:
        self._costs = costs
        self._row_budget = row_budget

    def choose(self, turns: Sequence[Turn], *, rows: int, other_rows: int, beside: int, host_seconds: float) -> int:
        """Choices of windows under way; returns the rows of those that are verified now.

        Oldest first. One that does not fit waits; but the first is verified as far as it fits. `rows` run anyway, of
        which `other_rows` are not these turns'; `beside` rows run in the step's other pass.
        """
        left = 0 if not rows and self._waits(turns, beside, host_seconds) else max(0, self._row_budget - rows)
        partial = self._partial(turns, other_rows) if left else set()
        taken = 0
        for turn in turns:
            for name, state in turn.states:
                if not isinstance(state, Held):
                    continue
                if not state.is_ready and turn.sequence.sequence_id not in partial:
                    turn.choice = Choice(name, state.target_len, grows=True, num_drawn=state.num_nodes)
                elif not left or (taken and taken + 1 + state.num_nodes > left):
                    turn.choice = Choice(name, state.num_nodes, waits=True)
                else:
                    num_nodes = min(state.num_nodes, max(0, left - taken - 1))
                    turn.choice = Choice(name, num_nodes, num_drawn=num_nodes, is_replay=True)
                    taken += 1 + num_nodes
        return taken

    def _waits(self, turns: Sequence[Turn], beside: int, host_seconds: float) -> bool:
        """Whether windows that are ready wait for those that grow, where nothing but them is canonical.

        They do while one more round gives more tokens a second than all since they were opened will, if verified now,
        and if a pass of their own costs more than the time in which they idle is worth.
        """
        held = [h for turn in turns if (h := held_window(turn.states)) is not None]
        growing, longest = [h for h in held if not h.is_ready], max(h.num_nodes for h in held)
        num_rows, num_late = (sum(1 + h.num_nodes for h in part) for part in (held, growing))
        if len(growing) in (0, len(held)) or num_rows + len(growing) > self._row_budget:
            return False
        context_len = sum(turn.start for turn in turns) // len(turns)
        seconds = self._costs.fast_seconds(len(growing) + beside, context_len)
        counts = num_rows, num_rows - num_late, num_late
        now, ready, late = (self._costs.canonical_seconds(n, context_len) for n in counts)
        total, num_tokens = longest * seconds + now + host_seconds, num_rows + longest * beside
        num_idle = (len(held) - len(growing)) * max(h.target_len - h.num_nodes for h in growing)
        gains = (len(growing) + beside) * total > num_tokens * seconds
        return gains and (ready + late - now) * num_tokens > num_idle * total

    def _partial(self, turns: Sequence[Turn], other_rows: int) -> set[int]:
        """Windows that are verified unfinished, because others are verified now; longest first."""
        held = [held_window(turn.states) for turn in turns]
        ready = [h for h in held if h is not None and h.is_ready]
        growing = [(h.num_nodes, t) for t, h in zip(turns, held, strict=True) if h and not h.is_ready and h.num_nodes]
        if not ready or not growing:
            return set()
        growing.sort(key=lambda pair: (-pair[0], pair[1].sequence.sequence_id))
        rows = other_rows + sum(1 + h.num_nodes for h in ready) + held.count(None)
        context_len = sum(t.start for t in turns) // len(turns)
        count = self._num_partial([length for length, _ in growing], rows, context_len)
        return {t.sequence.sequence_id for _, t in growing[:count]}

    def _num_partial(self, lengths: Sequence[int], num_rows: int, context_len: int) -> int:
        """How many unfinished windows, in this order, are best verified together with the rows that run anyway.

        A row of theirs costs now what the larger shape costs more; later it would cost its share of a full pass.
        """
        per_row = min(self._costs.canonical_seconds(m, context_len) / m for m in self._costs.family)
        best, best_gain, rows = 0, 0.0, 0
        now = self._costs.canonical_seconds(num_rows, context_len)
        for k, length in enumerate(lengths, start=1):
            rows += length + 1
            if num_rows + rows > self._row_budget:
                break
            gain = rows * per_row - (self._costs.canonical_seconds(num_rows + rows, context_len) - now)
            if gain >= best_gain:
                best, best_gain = k, gain
        return best


def held_window(states: States) -> Held | None:
    """The window that a sequence has under way."""
    for _, state in states:
        if isinstance(state, Held):
            return state
    return None
