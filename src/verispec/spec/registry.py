"""Every drafter by name. Adding a drafter is one line here.

A factory takes the most nodes of one draft that the user wants, None for the drafter's own default.
"""

from __future__ import annotations

from collections.abc import Callable

from verispec.spec.decode import DecodeConfig, DecodeDrafter
from verispec.spec.drafter import AUTO, Drafter
from verispec.spec.ngram import NgramConfig, NgramDrafter
from verispec.spec.none import NoDrafter

DRAFTERS: dict[str, Callable[[int | None], Drafter]] = {
    "none": lambda draft_len: NoDrafter(),
    "ngram": lambda draft_len: NgramDrafter(None if draft_len is None else NgramConfig(max_draft=draft_len)),
    "decode": lambda draft_len: DecodeDrafter(None if draft_len is None else DecodeConfig(window_len=draft_len)),
}
DRAFTER_NAMES = (*DRAFTERS, AUTO)


def make_drafters(draft_len: int | None = None) -> dict[str, Drafter]:
    """One of each."""
    return {name: make(draft_len) for name, make in DRAFTERS.items()}
