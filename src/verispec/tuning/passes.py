"""Passes of a backend that tuning owns: all slots and table rows are its own to lay out.

Bits decide which tokens agree, so every pass is canonical where the backend has a family: the same menu comes out on
every run.
"""

from __future__ import annotations

from dataclasses import dataclass

from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import FULL_VIEW, Backend, Pass, PassKind, PassResult, View

MAX_ROWS = 128  # of one pass


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs passes in shapes of the family, or of any size where there is none."""

    backend: Backend
    family: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        """Rows that fit one pass."""
        return max((m for m in self.family if m <= MAX_ROWS), default=min(self.family, default=MAX_ROWS))

    def build(self, builder: PassBuilder, *, view: View = FULL_VIEW) -> Pass:
        """The pass, padded to a shape."""
        kind = PassKind.CANONICAL if self.family else PassKind.FAST
        shape = min((m for m in self.family if m >= len(builder)), default=0)
        return builder.build(
            kind, lambda num_rows: shape or num_rows, vocab_size=self.backend.limits.vocab_size, view=view
        )

    def run(self, builder: PassBuilder, *, view: View = FULL_VIEW) -> PassResult:
        """One pass, waited for."""
        return self.backend.submit(self.build(builder, view=view)).result()
