"""Audit and cost of a backend, measured once per fingerprint and device, kept on disk; and the profile they make.

A cached file that is unreadable, from another version or for another fingerprint is measured again, never trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from verispec.backends.audit import Audit, ProbeOutcome, Progress, audit, common_families, no_progress
from verispec.backends.cost import CostTable, measure_cost
from verispec.backends.protocol import Backend
from verispec.kv import DRAFT_STORE

Items = tuple[tuple[str, str], ...]
_TIMED = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))  # others are interpolated or extrapolated
_COST_FIELDS = ("shapes", "base", "per_context_token")
FORMAT = 4  # raised when the audit or the file changes meaning


@dataclass(frozen=True, slots=True)
class Profile:
    """What a float result honestly depends on: the backend's fingerprint and the chosen family. Hashed and printed."""

    fingerprint: Items
    family: tuple[int, ...]

    @property
    def hash(self) -> str:
        """Sixteen hex digits that name the profile."""
        text = json.dumps([self.fingerprint, self.family], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a backend on this device. `draft_cost` is T of a second model's passes, if there is one."""

    audit: Audit
    cost: CostTable
    profile: Profile
    draft_cost: CostTable | None = None

    @property
    def family(self) -> tuple[int, ...]:
        """The canonical shapes."""
        return self.profile.family


def calibrate(
    backend: Backend,
    *,
    cache_dir: Path | None = None,
    family: Sequence[int] | None = None,
    fresh: bool = False,
    progress: Progress = no_progress,
) -> Calibration:
    """Audit and time the backend, or read what was measured before under the same fingerprint.

    `family` names canonical shapes instead of the fixed rule's, `fresh` measures again. The family is empty if no shape
    is pure.
    """
    fingerprint, device = _ordered(backend.fingerprint()), _ordered(backend.device())
    path = _path(cache_dir, fingerprint, device)
    measured = None if fresh else _read(path, fingerprint, backend.shapes)
    if measured is None:
        found = audit(backend.probes(), shapes=backend.shapes, progress=progress)
        measured = found, measure_cost(backend, _timed(backend.shapes), progress=progress)
        _write(path, fingerprint, *measured)
    found, cost = measured
    draft_cost = None
    if backend.limits.num_stores > 1:
        draft_cost = _draft_cost(backend, cache_dir, fresh=fresh, progress=progress)
    return Calibration(found, cost, Profile(fingerprint, found.choose(family)), draft_cost)


def _draft_cost(backend: Backend, cache_dir: Path | None, *, fresh: bool, progress: Progress) -> CostTable:
    """T of the second model's passes. Its bits are hints: it is not audited, and no part of the profile."""
    fingerprint, device = _ordered(backend.fingerprint(DRAFT_STORE)), _ordered(backend.device())
    path = _path(cache_dir, fingerprint, device, kind="draft")
    measured = None if fresh else _read(path, fingerprint, backend.shapes)
    if measured is None:
        cost = measure_cost(backend, _timed(backend.shapes), store=DRAFT_STORE, progress=progress)
        _write(path, fingerprint, Audit((), ()), cost)
        return cost
    return measured[1]


def cached_profile(fingerprint: Mapping[str, str], shapes: Sequence[int], cache_dir: Path) -> Profile | None:
    """The profile of a backend that was audited before on some device, without loading it; None if it was not."""
    ordered = _ordered(fingerprint)
    for path in sorted(cache_dir.glob("audit-*.json")):
        if (measured := _read(path, ordered, shapes)) is not None:
            return Profile(ordered, measured[0].choose())
    return None


def _ordered(items: Mapping[str, str]) -> Items:
    return tuple(sorted(items.items()))


def _timed(shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(m for m in shapes if m in _TIMED)


def _path(cache_dir: Path | None, fingerprint: Items, device: Items, *, kind: str = "audit") -> Path | None:
    """The profile depends on the fingerprint alone, but costs are the device's."""
    key = hashlib.sha256(json.dumps([FORMAT, fingerprint, device]).encode()).hexdigest()[:32]
    return None if cache_dir is None else cache_dir / f"{kind}-{key}.json"


def _read(path: Path | None, fingerprint: Items, shapes: Sequence[int]) -> tuple[Audit, CostTable] | None:
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["fingerprint"] != dict(fingerprint):
            return None
        outcomes = tuple(
            ProbeOutcome(str(o["name"]), tuple(map(tuple, o["classes"])), tuple(o["impure"])) for o in data["outcomes"]
        )
        cost = CostTable(*(tuple(data["cost"][name]) for name in _COST_FIELDS))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    seconds = (*cost.base, *cost.per_context_token)
    is_sound = (
        all({*chain(*o.classes), *o.impure} == set(shapes) for o in outcomes)
        and cost.shapes == _timed(shapes)
        and len(seconds) == 2 * len(cost.shapes)
        and all(isinstance(s, float) and 0 <= s < math.inf for s in seconds)
    )
    return (Audit(outcomes, common_families(outcomes)), cost) if is_sound else None


def _write(path: Path | None, fingerprint: Items, found: Audit, cost: CostTable) -> None:
    """Best effort: without a writable cache the next start measures again."""
    if path is None:
        return
    data = {
        "format": FORMAT,
        "fingerprint": dict(fingerprint),
        "outcomes": [o._asdict() for o in found.outcomes],
        "cost": {name: getattr(cost, name) for name in _COST_FIELDS},
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)
