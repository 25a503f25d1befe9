"""What is known of skipping sub-layers of a model on a device: what parts of a pass cost, and a menu of skip sets.

`verispec tune` makes menus, the drafter `skip` reads them. A menu is kept on disk under everything it depends on: the
model's files, the backend's fingerprint and the device. One that is unreadable or for anything else is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from verispec.backends import kept
from verispec.backends.cost import CostTable
from verispec.backends.protocol import View

FORMAT = 3  # raised when the search or the file changes meaning
MAX_DRAFT = 12  # the longest draft, as published
_MOST_TRIED = 256  # lengths of drafts; longer ones promise no more tokens and cost more
WORTH_IT = 1.05  # a smaller predicted speed-up is not worth drafting
TYPICAL_CONTEXT = 256
GREEDY, BAYES = "greedy", "bayes"  # what finds skip sets
_SUB_LAYERS = ("attention", "mlp")
_PARTS = ("full", *_SUB_LAYERS, "head")


def expected_tokens(acceptance: float, draft_len: int) -> float:
    """Tokens a round commits: E = 1 + a + a^2 + ... + a^N."""
    return sum(acceptance**depth for depth in range(draft_len + 1))


@dataclass(frozen=True, slots=True)
class SkipProfile:
    """T(M, context) of a whole pass, and of one sub-layer of each kind: what skipping it saves.

    `head`, if it was timed, is what of a pass goes into logits and draws; only reports read it.
    """

    full: CostTable
    attention: CostTable
    mlp: CostTable
    head: CostTable | None = None

    def cost_of(self, view: View) -> CostTable:
        """T of a pass of this view; never below a hundredth of the whole one, however noisy the clock was."""
        skipped = ((len(view.skipped_attention), self.attention), (len(view.skipped_mlp), self.mlp))

        def left(name: str) -> tuple[float, ...]:
            whole = getattr(self.full, name)
            saved = [sum(count * getattr(part, name)[i] for count, part in skipped) for i in range(len(whole))]
            return tuple(max(t * 0.01, t - s) for t, s in zip(whole, saved, strict=True))

        return CostTable(self.full.shapes, left("base"), left("per_context_token"))

    def draft_cost(self, view: View, target: CostTable) -> CostTable:
        """T of a pass of this view on the scale of `target` when it was timed, which was at another time.

        What a pass of the view costs in passes of the whole model is the profile's; what that is in seconds, the
        other's: machines are not equally fast from day to day.
        """
        part = self.cost_of(view)
        shares = [
            part.seconds(m, m * TYPICAL_CONTEXT) / self.full.seconds(m, m * TYPICAL_CONTEXT) for m in target.shapes
        ]
        scaled = [
            tuple(value * share / target.speed for value, share in zip(values, shares, strict=True))
            for values in (target.base, target.per_context_token)
        ]
        return CostTable(target.shapes, *scaled)

    def ratios(self, view: View, draft_len: int, num_sequences: int = 1) -> tuple[float, float]:
        """c and v: a draft step and the verification of such drafts, in full steps of so many sequences."""
        draft = _seconds(self.cost_of(view), num_sequences)
        return draft / _seconds(self.full, num_sequences), self._verification(draft_len, num_sequences)

    def _verification(self, draft_len: int, num_sequences: int) -> float:
        return _seconds(self.full, num_sequences * (1 + draft_len)) / _seconds(self.full, num_sequences)

    def speedup(self, view: View, acceptance: float, draft_len: int, num_sequences: int = 1) -> float:
        """S = E / (N c + v): predicted tokens a second against plain decoding."""
        c, v = self.ratios(view, draft_len, num_sequences)
        return expected_tokens(acceptance, draft_len) / (draft_len * c + v)

    def best(self, view: View, acceptance: float, max_draft: int = MAX_DRAFT, num_sequences: int = 1) -> Prediction:
        """The draft length of at least 1 that promises most; the shortest on a tie."""
        c, _ = self.ratios(view, 1, num_sequences)  # once: a menu has many views
        lengths = range(1, min(max(1, max_draft), _MOST_TRIED) + 1)
        expected = accumulate((acceptance**n for n in lengths), initial=1.0)
        found = [
            Prediction(tokens / (n * c + self._verification(n, num_sequences)), n)
            for n, tokens in zip(lengths, islice(expected, 1, None), strict=True)
        ]
        return max(found, key=lambda p: (p.speedup, -p.draft_len))


def _seconds(cost: CostTable, num_rows: int) -> float:
    """T of so many rows at a typical context, padded where that costs less: plain decoding does it too."""
    return cost.seconds(cost.fast_shape(num_rows), num_rows * TYPICAL_CONTEXT)


@dataclass(frozen=True, slots=True)
class Prediction:
    speedup: float
    draft_len: int


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """A skip set, and how often its next token was the full model's: greedily, and at temperature 1 with one noise.

    `found_by` names the search that found it.
    """

    view: View
    agreement: float
    sampled_agreement: float
    found_by: str = GREEDY

    @property
    def num_skipped(self) -> int:
        return len(self.view.skipped)


@dataclass(frozen=True, slots=True)
class SkipMenu:
    """Skip sets, fewest sub-layers first, with the profile that says what they cost.

    `search` names what found them, `num_tokens` how many of the model's own tokens they were scored on.
    """

    profile: SkipProfile
    entries: tuple[MenuEntry, ...]
    search: str
    num_tokens: int

    def best(self, max_draft: int = MAX_DRAFT, num_sequences: int = 1) -> MenuEntry | None:
        """The entry that promises most; None without entries."""
        return max(
            self.entries,
            key=lambda e: self.profile.best(e.view, e.agreement, max_draft, num_sequences).speedup,
            default=None,
        )


@dataclass(frozen=True, slots=True)
class MenuKey:
    """Everything a menu depends on; `model` is the digest of the model's files."""

    model: str
    fingerprint: Mapping[str, str]
    device: Mapping[str, str]

    def path(self, cache_dir: Path) -> Path:
        pairs = {name: sorted(getattr(self, name).items()) for name in ("fingerprint", "device")}
        return cache_dir / kept.file_name("skip", FORMAT, {"model": self.model, **pairs})


def has_menus(cache_dir: Path, fingerprint: Mapping[str, str], device: Mapping[str, str]) -> bool:
    """Whether a menu of any model is kept for this fingerprint and device. A whole key takes reading the model."""
    for path in cache_dir.glob("skip-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            key = kept.read(path)["key"]
            if key["fingerprint"] == fingerprint and key["device"] == device:
                return True
    return False


def read_menu(cache_dir: Path, key: MenuKey) -> SkipMenu | None:
    """The menu kept for exactly this model, fingerprint and device; None if there is none that can be trusted."""
    try:
        data = kept.read(key.path(cache_dir))
        if data["format"] != FORMAT or data["key"] != asdict(key):
            return None
        menu = SkipMenu(
            profile=_profile(data["profile"]),
            entries=tuple(_entry(e) for e in data["entries"]),
            search=str(data["search"]),
            num_tokens=int(data["num_tokens"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    shapes = {table.shapes for table in (menu.profile.full, menu.profile.attention, menu.profile.mlp)}
    sound = len(shapes) == 1 and all(0 <= e.agreement <= 1 and 0 <= e.sampled_agreement <= 1 for e in menu.entries)
    return menu if sound else None


def write_menu(cache_dir: Path, key: MenuKey, menu: SkipMenu) -> Path:
    """Keep a menu, whole or not at all; raises OSError where the cache cannot be written."""
    data = {
        "format": FORMAT,
        "key": asdict(key),
        "search": menu.search,
        "num_tokens": menu.num_tokens,
        "profile": _plain_profile(menu.profile),
        "entries": [_plain_entry(e) for e in menu.entries],
    }
    path = key.path(cache_dir)
    kept.write(path, data)
    return path


def _plain_profile(profile: SkipProfile) -> dict[str, Any]:
    tables = {name: getattr(profile, name) for name in _PARTS}
    return {name: None if table is None else table.to_data() for name, table in tables.items()}


def _profile(data: Mapping[str, Any]) -> SkipProfile:
    full, attention, mlp = (CostTable.from_data(data[name]) for name in ("full", *_SUB_LAYERS))
    return SkipProfile(full, attention, mlp, None if data["head"] is None else CostTable.from_data(data["head"]))


def _plain_entry(entry: MenuEntry) -> dict[str, Any]:
    return {
        "attention": sorted(entry.view.skipped_attention),
        "mlp": sorted(entry.view.skipped_mlp),
        "agreement": entry.agreement,
        "sampled_agreement": entry.sampled_agreement,
        "found_by": entry.found_by,
    }


def _entry(data: Mapping[str, Any]) -> MenuEntry:
    view = View.without(*(map(int, data[name]) for name in _SUB_LAYERS))
    return MenuEntry(view, float(data["agreement"]), float(data["sampled_agreement"]), str(data["found_by"]))
