"""Self-speculation: the model drafts for itself with sub-layers skipped, and verifies all drafts in one pass.

No second model and no further weights: a draft pass is a pass of a *view*. Its rows read the full model's K/V of
committed tokens and write their own, approximate, into leased slots that verification overwrites; skipped sub-layers
write nothing. Which view, and whether it pays at all, is what `verispec tune` measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verispec.backends.protocol import Backend
from verispec.errors import InputError
from verispec.spec.draft_exit import DraftExit
from verispec.spec.drafter import Offer
from verispec.spec.growth import DraftModel, grow
from verispec.spec.plan import SequencePlan
from verispec.spec.rate import Rate
from verispec.spec.skip_menu import MAX_DRAFT, SkipMenu
from verispec.spec.tree import TreeShape
from verispec.types import Draft, SequenceView, Verdict

NOT_TUNED = "layer skipping has no skip sets for this model and device yet; `verispec tune` finds them"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipConfig:
    """The most tokens of one draft, and how acceptance is learned: the tuned agreement counts as so many tokens.

    `force` drafts whatever is predicted.
    """

    max_draft: int = MAX_DRAFT
    force: bool = False
    prior_weight: float = 32.0
    memory: float = 0.98

    def __post_init__(self) -> None:
        if self.max_draft < 0:
            raise InputError(f"max_draft must be at least 0, not {self.max_draft}")


@dataclass(frozen=True, slots=True)
class _Tuned:
    """The view that drafts, and what is known of its acceptance."""

    model: DraftModel
    greedy_rate: Rate
    sampled_rate: Rate

    def rate(self, sequence: SequenceView) -> Rate:
        """The one that the sequence's temperature asks for."""
        return self.sampled_rate if sequence.params.temperature else self.greedy_rate


class SkipDrafter:
    """Drafts chains with one entry of the menu; their length follows the adaptive exit, and what was accepted.

    `find_menu` is asked once, when a sequence first wants drafts.
    """

    def __init__(
        self,
        backend: Backend,
        find_menu: Callable[[], SkipMenu | None],
        config: SkipConfig | None = None,
        **passes: Any,
    ) -> None:
        self._config = config or SkipConfig()
        self._backend = backend
        self._find_menu = find_menu
        self._passes = passes
        self._exit = DraftExit()

    @cached_property
    def _tuned(self) -> _Tuned | None:
        menu = self._find_menu()
        entry = None if menu is None else menu.best(self._config.max_draft)
        if menu is None or entry is None:
            return None
        model = DraftModel(self._backend, menu.profile.cost_of(entry.view), entry.view, **self._passes)
        weight, memory = self._config.prior_weight, self._config.memory
        return _Tuned(model, Rate(entry.agreement, weight, memory), Rate(entry.sampled_agreement, weight, memory))

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        """A chain, at the cost of one draft pass per node."""
        if self._tuned is None:
            return Offer.nothing(NOT_TUNED)
        if sequence.computed_len + 1 != len(sequence.token_ids):
            return Offer.nothing("the prompt is not computed yet")
        length = min(limit, self._config.max_draft, self._backend.limits.max_tail)
        acceptance, cost = self._tuned.rate(sequence).value, self._tuned.model.cost
        return Offer(length, acceptance, cost=cost, what="layer skipping", is_forced=self._config.force)

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        """One pass per token, over all sequences that have not taken their exit."""
        assert self._tuned is not None
        return grow(self._tuned.model, plans, [TreeShape.chain(p.draft_quota) for p in plans], stops=self._exit.stops)

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None:
        """Move the exit and the acceptance; the exit's state shows in the sequence's counters."""
        matched, drafted = len(verdict.path), len(draft)
        self._exit.observe(matched=matched, drafted=drafted, most=plan.draft_quota)
        if self._tuned is not None:
            self._tuned.rate(plan.sequence).observe(matched, min(drafted, matched + 1))
        plan.sequence.stats.exit_threshold, plan.sequence.stats.exit_rate = self._exit.gamma, self._exit.rate

    def forget(self, sequence_id: int) -> None:
        """What was learned fades: the next text may be of another kind."""
        if self._tuned is not None:
            self._tuned.greedy_rate.fade()
            self._tuned.sampled_rate.fade()
