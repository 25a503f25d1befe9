"""How waiting looks, on stderr: a bar on a terminal, one line for each slow stage elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

from verispec.cli import terminal

_QUIET_SECONDS = 2.0  # off a terminal, what takes less than this is not mentioned
_BAR_CHARS = 30
_CLEAR = "\r\x1b[K"


class _Bar:
    """A line that is written over; nothing where stderr is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self.is_shown = not quiet and sys.stderr is not None and terminal.shows_colour(sys.stderr)

    def draw(self, what: str, share: float, figures: str) -> None:
        if self.is_shown:
            full = round(_BAR_CHARS * min(1.0, share))
            line = f"{what} [{'=' * full}{' ' * (_BAR_CHARS - full)}] {figures}"
            terminal.styled_note(_CLEAR + terminal.safe(line)[: terminal.columns() - 1], end="")

    def clear(self) -> None:
        if self.is_shown:
            terminal.styled_note(_CLEAR, end="")


class LoadingDisplay:
    """Shows `update(stage, share)` calls; gone from a terminal when loading is done."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._bar = _Bar(quiet=quiet)
        self._stage, self._since = "", time.monotonic()
        self._mentioned = {""}
        self._quiet = quiet

    def update(self, stage: str, share: float) -> None:
        self._bar.draw(stage, share, f"{share:4.0%}")
        kind = stage.partition(" ")[0]  # "auditing" of "auditing attention"
        if kind != self._stage:
            self._stage, self._since = kind, time.monotonic()
        elif kind not in self._mentioned and time.monotonic() - self._since > _QUIET_SECONDS:
            self._mentioned.add(kind)
            if not self._quiet and not self._bar.is_shown:
                terminal.note(f"{kind} ...")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.clear()


class CountDisplay:
    """How many of something are done, how fast, and the time left: a bar on a terminal, nothing elsewhere.

    What was done before it began says nothing of how fast it is.
    """

    def __init__(self, what: str, total: int, *, quiet: bool = False, num_before: int = 0) -> None:
        self._bar = _Bar(quiet=quiet)
        self._what, self._total, self._quiet = what, total, quiet
        self._num_before = self.num_done = num_before

    def advance(self) -> None:
        self.reach(self.num_done + 1)

    def reach(self, num_done: int, *, since: int = 0) -> None:
        self.num_done = since + num_done
        self._draw()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar away while something is written to stdout, which may be the same terminal."""
        self._bar.clear()
        yield
        self._draw()

    def note(self, text: str) -> None:
        """Say something above the bar."""
        if not self._quiet:
            with self.aside():
                terminal.note(text)

    def _draw(self) -> None:
        figures = f"{self.num_done}/{self._total}"
        if self.num_done > self._num_before:
            each = max(1e-6, time.monotonic() - self._since) / (self.num_done - self._num_before)
            rate = f"{1 / each:.1f}/s" if each <= 1 else f"{each:.1f} s each"
            figures += f" {rate} {timedelta(seconds=round(each * (self._total - self.num_done)))} left"
        self._bar.draw(self._what, self.num_done / max(1, self._total), figures)

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        self._draw()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.clear()
