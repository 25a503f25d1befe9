"""Every drafter by name. Adding a drafter is one line here."""

from __future__ import annotations

from collections.abc import Callable

from verispec.spec.drafter import Drafter
from verispec.spec.ngram import NgramDrafter
from verispec.spec.none import NoDrafter

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
}
