"""What each running sequence does in the next step: verify something, draft by regular decoding, or neither.

Ready windows are verified first, then unfinished ones where that is cheaper than later; sequences without a window open
one or verify a draft, as their drafters offer and the planner chooses. Reads sequences, changes only their counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from verispec.engine.planner import NO_LOAD, Load, Planner
from verispec.engine.sequence import Sequence
from verispec.spec.drafter import DrafterSet, Offer
from verispec.tree import TreeShape

_NOT_WORTH_IT = "verifying a draft was not predicted to pay at this load"


@dataclass(frozen=True, slots=True)
class Action:
    """Verify `draft_quota` nodes of `drafter`; or, with a `target_len`, decode one more token of a window."""

    draft_quota: int = 0
    drafter: str = ""
    target_len: int = 0
    shape: TreeShape | None = None

    @property
    def decodes(self) -> bool:
        """Whether the sequence's row of this step is one of regular decoding."""
        return self.target_len > 0


PLAIN = Action()


@dataclass(frozen=True, slots=True)
class Assigner:
    """Assigns actions. `row_budget` bounds the canonical pass, `max_draft` a draft (None: only by its drafter)."""

    planner: Planner
    drafters: DrafterSet
    row_budget: int
    max_draft: int | None

    def replays(self, exact: SequenceOf[Sequence]) -> dict[int, Action]:
        """The nodes that ready windows verify, by sequence id: all of theirs, within the rows the others leave."""
        left = self.row_budget - sum(1 for s in exact if s.window is None or s.window.is_ready)
        actions = {}
        for sequence in exact:
            if sequence.window is not None and sequence.window.is_ready:
                nodes = max(0, min(len(sequence.window) - 1, left))
                left -= nodes
                actions[sequence.sequence_id] = Action(nodes, sequence.window.drafter)
        return actions

    def assign(
        self,
        exact: SequenceOf[Sequence],
        fast: SequenceOf[Sequence],
        *,
        num_rows: Mapping[int, int],
        replays: Mapping[int, Action],
    ) -> dict[int, Action]:
        """The action of every sequence whose pending tokens all get their rows, by sequence id.

        `num_rows` are the pending rows of every sequence, `replays` what was assigned to ready windows.
        """
        actions = dict(replays)
        actions |= self._partial_replays(exact, num_rows, actions)
        for s in exact:
            if s.window is not None and s.sequence_id not in actions:
                actions[s.sequence_id] = Action(drafter=s.window.drafter, target_len=s.window.target_len)
        actions |= self._bonus_rows(exact, num_rows, actions)
        without = [s for s in exact if s.window is None and _completes(s, num_rows)]
        offers = {s.sequence_id: self.drafters.offers(s, self.limit(s)) for s in without}
        actions |= self._opened(without, offers, _steady_load(exact), _fast_load(exact, fast, actions))
        decided = [s for s in without if s.sequence_id not in actions]
        beside = _fast_load(exact, fast, actions)
        actions |= self._drafts(decided, offers, _exact_load(exact, num_rows, actions), canonical=True, beside=beside)
        free = [s for s in fast if _completes(s, num_rows)]
        offers = {s.sequence_id: self.drafters.offers(s, self.limit(s)) for s in free}
        actions |= self._drafts(free, offers, _fast_load(exact, fast, actions), canonical=False)
        return actions

    def joins(
        self,
        exact: SequenceOf[Sequence],
        fast: SequenceOf[Sequence],
        *,
        num_rows: Mapping[int, int],
        actions: Mapping[int, Action],
    ) -> bool:
        """Whether one canonical pass is to have the fast rows too."""
        return self.planner.joins(_exact_load(exact, num_rows, actions), _fast_load(exact, fast, actions))

    def limit(self, sequence: Sequence) -> int:
        """Tokens of a draft that could still be committed: the one after it must fit too."""
        room = max(0, sequence.max_len - sequence.committed_len - 1)
        return room if self.max_draft is None else min(self.max_draft, room)

    def _partial_replays(
        self, exact: SequenceOf[Sequence], num_rows: Mapping[int, int], replays: Mapping[int, Action]
    ) -> dict[int, Action]:
        """Windows that are verified unfinished, because others are verified now; longest first."""
        windows = [
            (s.window, s) for s in exact if s.window is not None and s.window.token_ids and s.sequence_id not in replays
        ]
        if not replays or not windows:
            return {}
        windows.sort(key=lambda pair: (-len(pair[0]), pair[1].sequence_id))
        count = self.planner.num_partial([len(w) for w, _ in windows], _exact_load(exact, num_rows, replays))
        return {s.sequence_id: Action(len(w), w.drafter) for w, s in windows[:count]}

    def _bonus_rows(
        self, exact: SequenceOf[Sequence], num_rows: Mapping[int, int], actions: Mapping[int, Action]
    ) -> dict[int, Action]:
        """A row more for each window that is replayed whole, as far as rows are free: the target's token behind it."""
        spare = self.planner.spare_rows(_exact_load(exact, num_rows, actions).num_rows)
        granted = {}
        for s in exact:
            action = actions.get(s.sequence_id, PLAIN)
            if s.window and not action.decodes and action.draft_quota == len(s.window) - 1 and spare > 0:
                granted[s.sequence_id] = Action(len(s.window), action.drafter)
                spare -= 1
        return granted

    def _opened(
        self, sequences: SequenceOf[Sequence], offers: Mapping[int, Mapping[str, Offer]], exact: Load, fast: Load
    ) -> dict[int, Action]:
        """Windows to open: for those who ask for nothing else, and for those who leave the choice if it is the best.

        A prompt's last row runs canonically, so that its first token comes at once.
        """
        candidates = [s for s in sequences if s.num_pending == 1 and s.output and s.params.deterministic]
        windows = {s.sequence_id: found for s in candidates if (found := _window_offer(offers[s.sequence_id]))}
        bound = {i for i in windows if all(o.by_decoding for o in offers[i].values())}
        free = [s for s in candidates if s.sequence_id in windows and s.sequence_id not in bound]
        for s in candidates:
            if s.sequence_id in bound:  # its row will be a fast one
                exact, fast = exact.plus(-1, s.committed_len), fast.plus(1, s.committed_len)
        if free:
            drafts = [self._draft_offer(offers[s.sequence_id], exact)[1] for s in free]
            choice = self.planner.choose(drafts, [windows[s.sequence_id][1] for s in free], exact=exact, fast=fast)
            for s in free:
                s.stats.chosen_because = choice.reason
            bound |= {s.sequence_id for s in free if choice.by_decoding}
        return {i: Action(drafter=windows[i][0], target_len=windows[i][1].max_nodes) for i in sorted(bound)}

    def _drafts(
        self,
        sequences: SequenceOf[Sequence],
        offers: Mapping[int, Mapping[str, Offer]],
        load: Load,
        *,
        canonical: bool,
        beside: Load = NO_LOAD,
    ) -> dict[int, Action]:
        """Drafts that are verified in this step."""
        best = [self._draft_offer(offers[s.sequence_id], load) for s in sequences]
        granted, predicted = self.planner.quotas([offer for _, offer in best], load, canonical=canonical, beside=beside)
        for s, (_, offer), quota in zip(sequences, best, granted, strict=True):
            if not quota and (self.limit(s) or not s.stats.no_draft_reason):
                s.stats.no_draft_reason = offer.reason or _why_not(offer, predicted)
        return {
            s.sequence_id: Action(quota, name, shape=offer.shape)
            for s, (name, offer), quota in zip(sequences, best, granted, strict=True)
            if quota
        }

    def _draft_offer(self, offers: Mapping[str, Offer], load: Load) -> tuple[str, Offer]:
        """The offer, not by decoding, that promises most tokens a second; nothing where there is none."""
        drafts = [(name, o) for name, offer in offers.items() if not offer.by_decoding for o in offer.shapes]
        useful = [(name, o) for name, o in drafts if o.max_nodes]
        if len(useful) > 1:
            return max(useful, key=lambda pair: self.planner.promise(pair[1], load))
        nothing = ("", Offer.nothing("regular decoding is all that was asked for"))
        return next(iter(useful or drafts), nothing)


def _completes(sequence: Sequence, num_rows: Mapping[int, int]) -> bool:
    return num_rows[sequence.sequence_id] == sequence.committed_len - sequence.computed_len


def _window_offer(offers: Mapping[str, Offer]) -> tuple[str, Offer] | None:
    return next(((name, o) for name, o in offers.items() if o.by_decoding and o.max_nodes), None)


def _why_not(offer: Offer, predicted: float | None) -> str:
    """Why an offer with nodes got none."""
    if offer.cost is None or predicted is None:
        return _NOT_WORTH_IT
    if offer.is_forced:
        return "the draft does not fit into a pass"
    return f"{offer.what} predicted {predicted:.2f}x on this model and device; not drafting; --force to draft anyway"


def _exact_load(exact: Iterable[Sequence], num_rows: Mapping[int, int], actions: Mapping[int, Action]) -> Load:
    """The canonical rows: pending ones and assigned nodes. Windows that no action replays have none."""
    load = Load()
    for s in exact:
        action = actions.get(s.sequence_id, PLAIN if s.window is None else None)
        if action is not None and not action.decodes:
            load = load.plus(num_rows[s.sequence_id] + action.draft_quota, s.committed_len)
    return load


def _steady_load(exact: Iterable[Sequence]) -> Load:
    """One canonical row for each sequence without a window: a window lives for many steps, a prompt's rows for few."""
    load = Load()
    for s in exact:
        if s.window is None:
            load = load.plus(1, s.committed_len)
    return load


def _fast_load(exact: Iterable[Sequence], fast: Iterable[Sequence], actions: Mapping[int, Action]) -> Load:
    """The rows of the fast pass: those of `fast` with their drafts, and those of regular decoding."""
    load = Load()
    for s in fast:
        load = load.plus(s.num_pending + actions.get(s.sequence_id, PLAIN).draft_quota, s.committed_len)
    for s in exact:
        if actions.get(s.sequence_id, PLAIN).decodes:
            load = load.plus(1, s.committed_len)
    return load
