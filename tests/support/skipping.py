"""Menus of skip sets without a search: what `verispec tune` would store, made up."""

from __future__ import annotations

from dataclasses import replace

from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend, View
from verispec.spec.registry import DraftSetup
from verispec.spec.skip_menu import MenuEntry, SkipMenu, SkipProfile

SOME_SKIPPED = View.without({1}, {0})


def menu_of(
    view: View, *, agreement: float = 0.9, full: float = 1.0, attention: float = 0.1, mlp: float = 0.2
) -> SkipMenu:
    """One entry; every pass of the whole model takes `full` seconds, whatever its rows."""

    def flat(seconds: float) -> CostTable:
        return CostTable((1, 64), (seconds, seconds), (0.0, 0.0))

    profile = SkipProfile(flat(full), flat(attention), flat(mlp))
    return SkipMenu(profile, (MenuEntry(view, agreement, agreement),), "made up", 0)


def fake_setup(backend: Backend, *, draft_len: int | None = None, exits: bool = True) -> DraftSetup:
    """Every drafter drafts, whatever that promises; the backend needs a second store for `model`."""
    draft_cost = CostTable((1, 64), (0.1, 0.1), (0.0, 0.0)) if backend.limits.num_stores > 1 else None
    return replace(skip_setup(backend, draft_len=draft_len), draft_cost=draft_cost, exits=exits)


CHEAP = CostTable((1, 64), (1e-6, 1e-6), (0.0, 0.0))


def cheap_setup(backend: Backend, draft_len: int, *, exits: bool = True) -> DraftSetup:
    """Drafts take so little time that a stream may wait for several rounds of them."""
    menu = menu_of(SOME_SKIPPED, full=1e-6, attention=1e-7, mlp=1e-7)
    return DraftSetup(
        draft_len=draft_len, backend=backend, find_menu=lambda: menu, draft_cost=CHEAP, force=True, exits=exits
    )


def skip_setup(
    backend: Backend, view: View = SOME_SKIPPED, *, draft_len: int | None = None, force: bool = True
) -> DraftSetup:
    """Drafters whose `skip` drafts with this view, whatever that promises."""
    return DraftSetup(draft_len=draft_len, backend=backend, find_menu=lambda: menu_of(view), force=force)
