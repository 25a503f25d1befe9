"""A device that is far from the host, on a clock of its own: where the device idles, time is lost.

Passes run one after the other and take what T(rows) says for each of their rounds. The clock is what `host` counts, CPU
time or nothing at all, without what this backend itself takes, and what the host waits for results. Sending a pass and
reading its result take half a trip each. What is drawn is a text that each request names by its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import BackendLimits, Pass, PassResult, Ticket
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.sampling.draw import DrawResult
from verispec.sampling.rows import Sampler

Text = NDArray[np.int64]
ROWS = (1, 8, 64, 128)
SECONDS = (0.36e-3, 0.41e-3, 0.70e-3, 1.03e-3)  # SmolLM2-135M on an H200; of 128 rows in the direction of the others
TRIP = 0.27e-3


def pass_seconds(num_rows: int) -> float:
    return float(np.interp(num_rows, ROWS, SECONDS)) * max(1.0, num_rows / ROWS[-1])


class FarBackend:
    """`text(seed)` is all that a request of this seed ever draws, by position."""

    shapes = tuple(2**i for i in range(12))
    arithmetics = ("far",)
    weights_version = 0

    def __init__(
        self, text: Callable[[int], Sequence[int]], *, vocab_size: int, num_slots: int, context_len: int,
        num_seq_rows: int, host: Callable[[], float] = lambda: 0.0, trip: float = TRIP,
        drafted: float = 0.0,
    ) -> None:  # fmt: skip
        self.limits = BackendLimits(
            vocab_size, context_len, num_slots, num_seq_rows, max_tail=64, prepares=True, looks_up=True
        )
        self.resident = Resident(self.limits)
        self._text, self._texts = text, np.zeros((num_seq_rows + 1, context_len + 1), np.int64)
        self._host = host
        self.trip = trip
        self._beyond = drafted  # seconds of a round in which it drafts, beyond the pass
        self._own = self._waited = self._free = 0.0
        self.busy = 0.0  # seconds of the device so far
        self.rounds: list[int] = []  # of every pass

    @property
    def now(self) -> float:
        return self._host() - self._own + self._waited

    @property
    def host_seconds(self) -> float:
        """Of the clock, what the host did not wait for."""
        return self._host() - self._own

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        start = self._host()
        self.resident.bind(seq_row, sampler)
        self._bound(seq_row, sampler.key.seed)
        self._own += self._host() - start

    def _bound(self, seq_row: int, seed: int) -> None:
        text = self._text(seed)
        self._texts[seq_row, : len(text)] = text

    def submit(self, pass_: Pass) -> Ticket:
        start = self._host()
        seconds: list[float] = []
        beyond = self._beyond if pass_.burst is not None and pass_.burst.drafts else 0.0

        def run(part: Pass) -> PassResult:
            seconds.append(self._seconds(part) + beyond)
            return self._found(part)

        result = run_rounds(self.resident, pass_, run)
        seconds[-1] += self._left_out(pass_)
        self._own += self._host() - start
        self._waited += self.trip / 2
        self._free = max(self.now, self._free) + sum(seconds)
        self.busy += sum(seconds)
        self.rounds.append(len(seconds))
        return _FarTicket(self, self._free, result)

    def _seconds(self, part: Pass) -> float:
        return pass_seconds(len(part.rows))

    def _left_out(self, pass_: Pass) -> float:
        """What passes took that were sent, and nobody wanted."""
        return 0.0

    def _found(self, part: Pass) -> PassResult:
        assert part.wanted.draw is not None
        rows = part.wanted.draw.rows
        found = self._texts[part.rows.seq_rows[rows], part.rows.positions[rows] + 1]
        return PassResult(DrawResult(found, np.full(len(rows), -1, np.float32)))

    def wait_until(self, end: float) -> None:
        self._waited += max(0.0, end - self.now) + self.trip / 2

    def close(self) -> None:
        pass


class _FarTicket:
    def __init__(self, backend: FarBackend, end: float, ready: PassResult) -> None:
        self._backend, self._end, self._ready = backend, end, ready

    def result(self) -> PassResult:
        self._backend.wait_until(self._end)
        return self._ready
