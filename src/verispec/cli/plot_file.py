"""The file of `--plot`: whether it can be written is found out before any work, and half a picture is never left."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from verispec.cli import terminal
from verispec.errors import InputError


def check_plot(path: str | None, *, extra: str) -> None:
    """Raise InputError for what would only fail in the end; `extra` is the install that brings matplotlib."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib: pip install 'verispec[{extra}]'") from error
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise InputError(f"--plot {path}: the name of a plot ends in .png")
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(target if target.exists() else folder, os.W_OK):
        raise InputError(f"--plot {path}: is not a file that can be written")


def write_plot(path: str | None, draw: Callable[[Path], None]) -> None:
    """Let `draw` make the picture, if one is wanted."""
    if path is None:
        return
    try:
        draw(Path(path))
    except OSError as error:
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)
        raise terminal.OutputError(f"--plot {path}: {error.strerror or error}") from error
    terminal.note(f"plot in {path}")
