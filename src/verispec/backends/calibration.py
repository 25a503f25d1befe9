"""Audit and cost of a backend, measured once per fingerprint and kept on disk; and the profile they make.

A cached file that is unreadable, from another version or for another fingerprint is measured again, never trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from verispec.backends.audit import CANDIDATE_SHAPES, Audit, ProbeOutcome, Progress, audit, common_families, no_progress
from verispec.backends.cost import CostTable, measure_cost
from verispec.backends.protocol import Backend

TIMED_SHAPES = tuple(m for m in CANDIDATE_SHAPES if m <= 128)  # larger ones are extrapolated
FORMAT = 2  # raised when the audit or the file changes meaning


@dataclass(frozen=True, slots=True)
class Profile:
    """What a float result honestly depends on: the backend's fingerprint and the chosen family. Hashed and printed."""

    fingerprint: tuple[tuple[str, str], ...]
    family: tuple[int, ...]

    @property
    def hash(self) -> str:
        """Sixteen hex digits that name the profile."""
        text = json.dumps([self.fingerprint, self.family], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a backend on this device."""

    audit: Audit
    cost: CostTable
    profile: Profile

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
    fingerprint = _ordered(backend.fingerprint())
    path = _path(cache_dir, fingerprint)
    measured = None if fresh else _read(path, fingerprint)
    if measured is None:
        found = audit(backend.probes(), progress=progress)
        measured = found, measure_cost(backend, TIMED_SHAPES, progress=progress)
        _write(path, fingerprint, *measured)
    found, cost = measured
    return Calibration(found, cost, Profile(fingerprint, found.choose(family)))


def cached_profile(fingerprint: Mapping[str, str], cache_dir: Path) -> Profile | None:
    """The profile of a backend that was audited before, without loading it; None if it was not."""
    ordered = _ordered(fingerprint)
    measured = _read(_path(cache_dir, ordered), ordered)
    return None if measured is None else Profile(ordered, measured[0].choose())


def _ordered(fingerprint: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(fingerprint.items()))


def _path(cache_dir: Path | None, fingerprint: tuple[tuple[str, str], ...]) -> Path | None:
    return None if cache_dir is None else cache_dir / f"audit-{_key(fingerprint)}.json"


def _key(fingerprint: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(json.dumps([FORMAT, fingerprint]).encode()).hexdigest()[:32]


def _read(path: Path | None, fingerprint: tuple[tuple[str, str], ...]) -> tuple[Audit, CostTable] | None:
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["fingerprint"] != dict(fingerprint):
            return None
        outcomes = tuple(
            ProbeOutcome(str(o["name"]), tuple(map(tuple, o["classes"])), tuple(o["impure"])) for o in data["outcomes"]
        )
        cost = CostTable(*(tuple(data["cost"][name]) for name in ("shapes", "base", "per_context_token")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    seconds = (*cost.base, *cost.per_context_token)
    is_sound = (
        all({*chain(*o.classes), *o.impure} == set(CANDIDATE_SHAPES) for o in outcomes)
        and cost.shapes == TIMED_SHAPES
        and len(seconds) == 2 * len(TIMED_SHAPES)
        and all(isinstance(s, float) and 0 <= s < math.inf for s in seconds)
    )
    return (Audit(outcomes, common_families(outcomes)), cost) if is_sound else None


def _write(path: Path | None, fingerprint: tuple[tuple[str, str], ...], found: Audit, cost: CostTable) -> None:
    """Best effort: without a writable cache the next start measures again."""
    if path is None:
        return
    data = {
        "format": FORMAT,
        "fingerprint": dict(fingerprint),
        "outcomes": [o._asdict() for o in found.outcomes],
        "cost": asdict(cost),
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)
