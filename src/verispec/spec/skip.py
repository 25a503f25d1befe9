"""Self-speculation: the model drafts for itself with sub-layers skipped, and verifies all drafts in one pass.

No second model and no further weights: a draft pass is a pass of a *view*. Its rows read the full model's K/V of
committed tokens and write their own, approximate, into leased slots that verification overwrites; skipped sub-layers
write nothing. Which view, and whether it pays at all, is what `verispec tune` measured.
"""

from collections.abc import Callable
from typing import Any

from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend
from verispec.spec.growth import DraftModel
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig, Source
from verispec.spec.skip_menu import SkipMenu

NOT_TUNED = "layer skipping has no skip sets for this model and device yet; `verispec tune` finds them"


def skip_drafter(
    backend: Backend,
    find_menu: Callable[[], SkipMenu | None],
    config: ModelDrafterConfig,
    *,
    cost: CostTable | None = None,
    **passes: Any,
) -> ModelDrafter:
    """The drafter that uses the entry of the menu which promises most.

    `cost` is T of the whole model as the policy knows it, `passes` are further fields of DraftModel.
    """

    def find() -> Source | str:
        menu = find_menu()
        if menu is None:
            return NOT_TUNED
        entry = menu.best(config.max_draft)
        if entry is None:
            return "layer skipping found no sub-layers of this model that could be skipped"
        profile = menu.profile
        draft_cost = profile.cost_of(entry.view) if cost is None else profile.draft_cost(entry.view, cost)
        model = DraftModel(backend, draft_cost, entry.view, **passes)
        return Source(model, entry.agreement, entry.sampled_agreement)

    return ModelDrafter("layer skipping", find, config)
