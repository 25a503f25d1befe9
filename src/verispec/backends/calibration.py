"""What is known of a backend on this device: its purity, what its passes cost, and the profile they make.

A backend with a known-answer test proves itself by it at every load; one without is audited once per fingerprint and
device. Audits and costs are kept on disk. A file that is unreadable, from another version or for another fingerprint is
made again, never trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from verispec.backends import kept
from verispec.backends.audit import Audit, Form, ProbeOutcome, Progress, audit, common_families, no_progress
from verispec.backends.cost import BUDGET_SECONDS, CostTable, measure_cost
from verispec.backends.protocol import Backend
from verispec.kv import DRAFT_STORE, TARGET_STORE

Items = tuple[tuple[str, str], ...]
_TIMED = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))  # others are interpolated or extrapolated
_MIN_OBSERVED = 16  # passes: fewer teach a table too little to be worth a file
FORMAT = 8  # raised when the audit or the file changes meaning


@dataclass(frozen=True, slots=True)
class Profile:
    """What a float result honestly depends on: the backend's fingerprint, the chosen family, and the version of the
    weights, which is 0 for those of the model's files. Hashed and printed.
    """

    fingerprint: Items
    family: tuple[int, ...]
    weights_version: int = 0

    @property
    def hash(self) -> str:
        """Sixteen hex digits that name the profile."""
        text = json.dumps([self.fingerprint, self.family, self.weights_version], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a backend on this device. `draft_cost` is T of a second model's passes, if there is one.

    `wrong_answers` are the cases of a known-answer test that failed; None if the backend has no such test.
    """

    audit: Audit
    cost: CostTable
    profile: Profile
    draft_cost: CostTable | None = None
    wrong_answers: tuple[str, ...] | None = None
    records: tuple[_Record, ...] = field(default=(), repr=False, compare=False)

    @property
    def family(self) -> tuple[int, ...]:
        return self.profile.family

    @property
    def no_family_reason(self) -> str:
        """Why deterministic requests are refused if there is no family."""
        if self.wrong_answers:
            return (
                f"the kernels fail their known-answer test ({'; '.join(self.wrong_answers)}), so the library was "
                "damaged or built wrongly: install verispec again, or use the numpy backend"
            )
        return f"no shape of a pass is row-pure for every kernel\n{self.audit.table()}\n"

    def save(self) -> None:
        """Keep what the cost tables have learned since they were read."""
        for record in self.records:
            if record.cost.num_observed >= _MIN_OBSERVED:
                record.write()


def calibrate(
    backend: Backend,
    *,
    cache_dir: Path | None = None,
    family: Sequence[int] | None = None,
    full: bool = False,
    fresh: bool = False,
    progress: Progress = no_progress,
) -> Calibration:
    """Prove the backend's purity and time it, or read what was measured before under the same fingerprint.

    `family` names canonical shapes instead of the fixed rule's. `full` audits a backend whose known answers would do,
    `fresh` measures everything again. The family is empty if no shape is pure, or if a known answer is wrong.
    """
    progress("checking", 0.0)
    wrong = backend.wrong_answers()
    audits = full or fresh or wrong is None
    stores = range(min(2, backend.limits.num_stores))
    records = [
        _measured(backend, store, cache_dir, audits=audits and store == TARGET_STORE, fresh=fresh, progress=progress)
        for store in stores
    ]
    if len(records) > 1 and records[DRAFT_STORE].is_new:  # its costs stand beside the target's, as first timed
        draft = records[DRAFT_STORE]
        records[DRAFT_STORE] = replace(draft, cost=draft.cost.slower(1 / records[TARGET_STORE].cost.speed))
    found = records[TARGET_STORE].audit or Audit((), (backend.shapes,))
    if wrong:
        found, records = replace(found, families=()), [replace(record, path=None) for record in records]
    for record in records:
        if record.is_new:
            record.write()
    return Calibration(
        found,
        records[TARGET_STORE].cost,
        Profile(records[TARGET_STORE].fingerprint, found.choose(family), backend.weights_version),
        records[DRAFT_STORE].cost if len(records) > 1 else None,
        wrong,
        tuple(records),
    )


def _measured(
    backend: Backend, store: int, cache_dir: Path | None, *, audits: bool, fresh: bool, progress: Progress
) -> _Record:
    """What is known of one store's model, measured where it is not. A draft model's bits are hints: no audit."""
    fingerprint, device = _ordered(backend.fingerprint(store)), _ordered(backend.device())
    # The profile depends on the fingerprint alone, but costs are the device's.
    name = kept.file_name("audit" if store == TARGET_STORE else "draft", FORMAT, fingerprint, device)
    path = None if cache_dir is None else cache_dir / name
    record = None if fresh else _read(path, fingerprint, backend.shapes)
    if record is None:
        shapes, budget = _timed(backend.shapes), BUDGET_SECONDS / (1 + store)
        only_drafts = store != TARGET_STORE
        cost = measure_cost(
            backend, shapes, store=store, only_drafts=only_drafts, budget_seconds=budget, progress=progress
        )  # fmt: skip
        record = _Record(path, fingerprint, None, cost, is_new=True)
    fast_weights = "" if store else backend.limits.fast_weights
    if record.fast_weights != fast_weights:
        record.cost.fast = _fast_cost(backend, progress) if fast_weights else None
        record = replace(record, fast_weights=fast_weights, is_new=True)
    if audits and record.audit is None:
        found = audit(backend.probes(), shapes=backend.shapes, progress=progress)
        record = replace(record, audit=found, is_new=True)
    return record


def _fast_cost(backend: Backend, progress: Progress) -> CostTable:
    shapes, budget = _timed(backend.shapes), BUDGET_SECONDS / 2
    return measure_cost(backend, shapes, only_drafts=True, budget_seconds=budget, progress=progress)


def cached_profile(fingerprint: Mapping[str, str], shapes: Sequence[int], cache_dir: Path) -> Profile | None:
    """The profile of a backend that was loaded before on some device, without loading it; None if it was not."""
    ordered = _ordered(fingerprint)
    for path in sorted(cache_dir.glob("audit-*.json")):
        if (measured := _read(path, ordered, shapes)) is not None:
            return Profile(ordered, tuple(shapes) if measured.audit is None else measured.audit.choose())
    return None


def _ordered(items: Mapping[str, str]) -> Items:
    return tuple(sorted(items.items()))


def _timed(shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(m for m in shapes if m in _TIMED)


@dataclass(frozen=True, slots=True)
class _Record:
    """One file: what was measured of a model, and where that is kept. Without `audit` the known answers had to do."""

    path: Path | None
    fingerprint: Items
    audit: Audit | None
    cost: CostTable
    fast_weights: str = ""  # what `cost.fast` is of
    is_new: bool = False

    def write(self) -> None:
        """Best effort: without a writable cache the next start measures again."""
        if self.path is None:
            return
        data = {
            "format": FORMAT,
            "fingerprint": dict(self.fingerprint),
            "outcomes": None if self.audit is None else [o._asdict() for o in self.audit.outcomes],
            "cost": self.cost.to_data(),
            "fast_weights": self.fast_weights,
            "fast_cost": self.cost.fast and self.cost.fast.to_data(),
        }
        with contextlib.suppress(OSError):
            kept.write(self.path, data)


def _read(path: Path | None, fingerprint: Items, shapes: Sequence[int]) -> _Record | None:
    if path is None:
        return None
    try:
        data = kept.read(path)
        if data["format"] != FORMAT or data["fingerprint"] != dict(fingerprint):
            return None
        outcomes = None if data["outcomes"] is None else tuple(map(_outcome, data["outcomes"]))
        cost = CostTable.from_data(data["cost"], learns=True)
        if fast_weights := data.get("fast_weights", ""):
            cost.fast = CostTable.from_data(data["fast_cost"], learns=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    measured = all({*chain(*o.classes), *o.impure} == set(shapes) for o in outcomes or ())
    is_sound = measured and cost.shapes == _timed(shapes)
    found = None if outcomes is None else Audit(outcomes, common_families(outcomes))
    return _Record(path, fingerprint, found, cost, fast_weights) if is_sound else None


def _outcome(data: Mapping[str, Any]) -> ProbeOutcome:
    forms = tuple(Form(str(name), tuple(shapes)) for name, shapes in data["forms"])
    return ProbeOutcome(str(data["name"]), tuple(map(tuple, data["classes"])), tuple(data["impure"]), forms)
