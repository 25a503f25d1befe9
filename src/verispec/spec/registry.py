"""Every drafter by name. Adding a drafter is one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verispec.backends.protocol import Backend
from verispec.spec.decode import DecodeConfig, DecodeDrafter
from verispec.spec.drafter import AUTO, Drafter
from verispec.spec.ngram import NgramConfig, NgramDrafter
from verispec.spec.none import NoDrafter
from verispec.spec.skip import NOT_TUNED, SkipConfig, SkipDrafter
from verispec.spec.skip_menu import MAX_DRAFT, SkipMenu


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """What drafters are made of. Those that lack something here draft nothing, and say what.

    `draft_len` is the most nodes of one draft that the user wants, None for each drafter's own default. `backend` is
    for those that run passes, `find_menu` for `skip`. `force` drafts whatever is predicted.
    """

    draft_len: int | None = None
    backend: Backend | None = None
    find_menu: Callable[[], SkipMenu | None] = lambda: None
    force: bool = False


def _ngram(setup: DraftSetup) -> Drafter:
    return NgramDrafter(None if setup.draft_len is None else NgramConfig(max_draft=setup.draft_len))


def _decode(setup: DraftSetup) -> Drafter:
    return DecodeDrafter(None if setup.draft_len is None else DecodeConfig(window_len=setup.draft_len))


def _skip(setup: DraftSetup) -> Drafter:
    if setup.backend is None:
        return NoDrafter(NOT_TUNED)
    config = SkipConfig(max_draft=MAX_DRAFT if setup.draft_len is None else setup.draft_len, force=setup.force)
    return SkipDrafter(setup.backend, setup.find_menu, config)


DRAFTERS: dict[str, Callable[[DraftSetup], Drafter]] = {
    "none": lambda setup: NoDrafter(),
    "ngram": _ngram,
    "decode": _decode,
    "skip": _skip,
}
DRAFTER_NAMES = (*DRAFTERS, AUTO)


def make_drafters(setup: DraftSetup | None = None) -> dict[str, Drafter]:
    """One of each."""
    return {name: make(setup or DraftSetup()) for name, make in DRAFTERS.items()}
