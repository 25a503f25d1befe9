"""What sampling needs to know of a shape that an answer must have: which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_FEW = 256  # tokens


def is_narrow(allowed: NDArray[np.uint32]) -> bool:
    """Whether a mask leaves few tokens: keys, digits, brackets; where there are more, it is text."""
    return int(np.bitwise_count(allowed).sum()) <= _FEW


class Constraint(Protocol):
    """Where an answer stands in its grammar: a value, never moved or rolled back; `after` gives other ones."""

    @property
    def allowed(self) -> NDArray[np.uint32]:
        """Bit i % 32 of word i // 32 allows token i next; the end only where the answer is complete."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""

    @property
    def is_exhausted(self) -> bool:
        """Whether it has to: nothing can follow."""

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """Tokens that write what the grammar leaves no choice about; how text is cut into tokens stays free."""

    def after(self, token_id: int) -> Constraint | None:
        """Where it stands behind one more token; None if that is not allowed."""

    def committed(self, token_id: int) -> Constraint:
        """`after` for good: forgets what else was tried. Raises ConstraintError if it is not allowed."""


class Grammar(Protocol):
    """A constraint at its beginning, for any number of answers."""

    def start(self, stop_ids: Iterable[int]) -> Constraint:
        """These tokens end the answer; those without text are allowed where it is complete, and only there."""
