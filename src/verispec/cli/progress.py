"""How waiting looks, on stderr: a bar on a terminal, one line for each slow stage elsewhere.

While a bar is shown, rich would send what is written to stdout to the bar's console, which is stderr: hence
`redirect_stdout=False`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_QUIET_SECONDS = 2.0  # off a terminal, what takes less than this is not mentioned


class LoadingDisplay:
    """Shows `update(stage, share)` calls; gone from a terminal when loading is done."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._is_terminal = _shows_bars(self._console)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False,
            disable=quiet or not self._is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._stage, self._since = "", time.monotonic()
        self._mentioned: set[str] = set()

    def update(self, stage: str, share: float) -> None:
        """Show where loading stands."""
        if self._is_terminal:
            if self._task is None:
                self._task = self._bar.add_task(stage, total=1.0)
            self._bar.update(self._task, description=stage, completed=share)
            return
        kind = stage.partition(" ")[0]  # "auditing" of "auditing attention"
        if kind != self._stage:
            self._stage, self._since = kind, time.monotonic()
        elif kind not in self._mentioned and time.monotonic() - self._since > _QUIET_SECONDS:
            self._mentioned.add(kind)
            self._console.print(f"{kind} ...", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()


class _RateColumn(ProgressColumn):
    """How many are done per second."""

    def render(self, task: Task) -> Text:
        """Nothing as long as nothing is known."""
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")


class CountDisplay:
    """How many of something are done, how fast, and the time left: a bar on a terminal, nothing elsewhere."""

    def __init__(self, what: str, total: int, *, quiet: bool = False) -> None:
        console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn(what), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn(),
            console=console, transient=True, redirect_stdout=False, redirect_stderr=False,
            disable=quiet or not _shows_bars(console),
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=total)
        self.num_done = 0

    def advance(self) -> None:
        """One more is done."""
        self.num_done += 1
        self._bar.advance(self._task)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar away while something is written to stdout, if both are on one terminal."""
        if self._bar.disable or not sys.stdout.isatty():
            yield
            return
        self._bar.stop()
        yield
        self._bar.start()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()


def _shows_bars(console: Console) -> bool:
    # rich takes FORCE_COLOR for a terminal; a bar in a log file helps nobody.
    return console.is_interactive and sys.stderr is not None and sys.stderr.isatty()
