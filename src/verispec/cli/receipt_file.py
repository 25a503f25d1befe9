"""The file of `generate --receipt`: one receipt per line, in input order, all of them or none.

Whether it can be written is found out before anything is generated. What is finished when the command ends, however it
ends, is written to a temporary file beside it, which then takes its place: a reader never sees half a file.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from verispec.cli import terminal
from verispec.errors import InputError
from verispec.receipt import Receipt


class NoReceipts:
    """Off, as an object."""

    wanted = False

    def put(self, index: int, receipts: Sequence[Receipt]) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class ReceiptFile:
    """Collects receipts inside the block and writes them when it is left, if there are any."""

    wanted = True

    def __init__(self, path: str, *, private: bool, quiet: bool) -> None:
        self._name = f"--receipt {path}"
        self._shown = path
        self._target = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
        self._partial = self._target.with_name(f".{self._target.name[:100]}.{os.getpid()}.partial")
        self._private = private
        self._quiet = quiet
        self._receipts: dict[int, Sequence[Receipt]] = {}

    def put(self, index: int, receipts: Sequence[Receipt]) -> None:
        self._receipts[index] = receipts

    def __enter__(self) -> Self:
        if self._target.exists() and not (self._target.is_file() and os.access(self._target, os.W_OK)):
            raise InputError(f"{self._name}: is not a file that can be written")
        try:
            with self._partial.open("xb"):
                pass
        except OSError as error:
            raise InputError(f"{self._name}: {error.strerror or error}") from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        lines = [
            (receipt.private() if self._private else receipt).to_json() + "\n"
            for _, receipts in sorted(self._receipts.items())
            for receipt in receipts
        ]
        try:
            if lines:
                self._write("".join(lines).encode("ascii"))
        finally:
            with contextlib.suppress(OSError):
                self._partial.unlink()
        if lines and not self._quiet:
            terminal.note(f"{len(lines)} receipts in {self._shown}" if len(lines) > 1 else f"receipt in {self._shown}")

    def _write(self, data: bytes) -> None:
        try:
            with self._partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._partial.replace(self._target)
        except OSError as error:
            raise terminal.OutputError(f"{self._name}: {error.strerror or error}") from error


def open_receipts(path: str | None, *, private: bool, quiet: bool) -> NoReceipts | ReceiptFile:
    """What takes the receipts of a command: the file, or nothing if none was named."""
    return NoReceipts() if path is None else ReceiptFile(path, private=private, quiet=quiet)
