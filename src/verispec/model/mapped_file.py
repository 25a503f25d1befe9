"""A model file mapped into memory read-only, with the operating system's refusals as `ModelFileError`.

The mapping lives until the last array made from it is gone, so arrays stay valid after `close`.
"""

import itertools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verispec.errors import ModelFileError
from verispec.model.fields import quoted
from verispec.model.file_digest import FileStamp


class Span(NamedTuple):
    """Bytes [start, end) of a file that belong to a tensor."""

    start: int
    end: int
    name: str


class MappedFile:
    """The bytes of one file. `buffer` is what parsers index; `bytes_at` makes arrays that copy nothing.

    `stamp` is of the file that was opened, from before its first byte was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.stamp = FileStamp.of(path, os.fstat(file.fileno()))
                self.size = file.seek(0, 2)
                # An empty file cannot be mapped.
                self.buffer: mmap.mmap | bytes = (
                    mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else b""
                )
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot be read: {error}") from error

    def bytes_at(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view of bytes that the caller has checked to be inside the file.

        What was read before leaves this process's memory, though not the system's cache: whoever goes through a model
        tensor by tensor holds one of them at a time. Older views stay valid.
        """
        if start + nbytes > len(self.buffer):
            raise ModelFileError(f"{self.path}: is closed")
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED)
        return np.frombuffer(self.buffer, dtype=np.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Drop this object's hold on the mapping; reading through it afterwards is an error."""
        self.buffer = b""


def check_no_overlap(spans: Sequence[Span], path: Path) -> None:
    """Refuse tensors that share bytes: no writer makes them, and each byte should mean one thing."""
    ordered = sorted(spans)
    for before, after in itertools.pairwise(ordered):
        if after.start < before.end:
            names = f"{quoted(before.name)} and {quoted(after.name)}"
            raise ModelFileError(f"{path}: tensors {names} overlap at byte {after.start}")
