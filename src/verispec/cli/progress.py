"""How waiting looks, on stderr: a bar on a terminal, plain lines for slow stages elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_QUIET_SECONDS = 2.0  # off a terminal, what takes less than this is not mentioned


class LoadingDisplay:
    """Shows `update(stage, share)` calls; gone from a terminal when loading is done."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            console=self._console, transient=True, disable=quiet or not self._console.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._shown = time.monotonic()

    def update(self, stage: str, share: float) -> None:
        """Show where loading stands."""
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task(stage, total=1.0)
            self._bar.update(self._task, description=stage, completed=share)
        elif time.monotonic() - self._shown > _QUIET_SECONDS:
            self._shown = time.monotonic()
            self._console.print(f"{stage}, {share:.0%}", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()


class BatchDisplay:
    """How many prompts of a batch are done, on stderr; a bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("generating", total=total)

    def advance(self) -> None:
        """One more is done."""
        self._bar.advance(self._task)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
