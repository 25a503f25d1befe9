"""A cohort alone has a pass made from its columns: it is the one that the builder makes, array by array."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import Pass, PassKind
from verispec.kv import SlotPool
from verispec.spec.passes import add_cohort, cohort_pass
from verispec.spec.turn import Cohort

CASES = [c for c in product((1, 2, 9), (1, 2, 5), (False, True), (False, True)) if c[3] or not c[2]]


def cohort(size: int, num_rounds: int, is_ahead: bool, feeds: bool) -> Cohort:
    """Sequences of different lengths; only those that feed are planned ahead."""
    pool = SlotPool(100)
    lease = pool.lease()
    pool.extend(lease, size * num_rounds)
    sequences: Any = [SimpleNamespace(token_ids=[7, 8, 20 + i]) for i in range(size)]
    positions = [2 + 3 * i for i in range(size)]
    seq_rows = [size - i for i in range(size)]
    return Cohort(sequences, [0] * size, seq_rows, positions, True, lease, num_rounds, is_ahead, feeds)


def fit(num_rows: int) -> int:
    return -(-num_rows // 4) * 4


def differences(a: Any, b: Any, path: str = "pass") -> list[str]:
    """Where two values differ, types included."""
    if type(a) is not type(b):
        return [f"{path}: {type(a)} and {type(b)}"]
    if isinstance(a, np.ndarray):
        return [] if a.dtype == b.dtype and np.array_equal(a, b) else [f"{path}: {a} and {b}"]
    if is_dataclass(a):
        names = [f.name for f in fields(a)]
    elif isinstance(a, tuple) and hasattr(a, "_fields"):
        names = list(a._fields)
    else:
        return [] if a == b else [f"{path}: {a} and {b}"]
    return [d for name in names for d in differences(getattr(a, name), getattr(b, name), f"{path}.{name}")]


def built(alone: Cohort) -> Pass:
    builder = PassBuilder()
    add_cohort(builder, alone)
    return builder.build(PassKind.CANONICAL, fit, vocab_size=100)


@pytest.mark.parametrize(("size", "num_rounds", "is_ahead", "feeds"), CASES)
def test_a_pass_of_columns_is_the_builders(size: int, num_rounds: int, is_ahead: bool, feeds: bool) -> None:
    alone = cohort(size, num_rounds, is_ahead, feeds)
    assert not differences(cohort_pass(PassKind.CANONICAL, fit, alone), built(alone))


def test_the_comparison_sees_one_slot_and_one_round() -> None:
    alone, other = cohort(3, 2, False, True), cohort(3, 2, False, True)
    other.lease.slots[4] += 1
    assert differences(cohort_pass(PassKind.CANONICAL, fit, alone), built(other)) != []
    assert differences(cohort_pass(PassKind.CANONICAL, fit, alone), built(cohort(3, 3, False, True))) != []
