"""What identifies a model file: its size, its SHA-256, and a short hash of each block, which tells where two differ.

Knows bytes only. Names have no directories, so that a digest says nothing of the machine it was made on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

BLOCK_NBYTES = 16 * 1024 * 1024
BLOCK_HASH_DIGITS = 16


class FileContent(NamedTuple):
    """A file and all of its bytes."""

    path: Path
    data: memoryview


class ByteRange(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file. `blocks` are the first hex digits of the SHA-256 of each block of BLOCK_NBYTES, in order."""

    name: str
    nbytes: int
    sha256: str
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, content: FileContent) -> "FileDigest":
        """Read all bytes and hash them."""
        starts = range(0, len(content.data), BLOCK_NBYTES)
        blocks = (hashlib.sha256(content.data[start : start + BLOCK_NBYTES]).hexdigest() for start in starts)
        short = tuple(block[:BLOCK_HASH_DIGITS] for block in blocks)
        return cls(content.path.name, len(content.data), hashlib.sha256(content.data).hexdigest(), short)

    def has_same_bytes(self, other: "FileDigest") -> bool:
        """Whether both are the same file, whatever its name."""
        return (self.nbytes, self.sha256, self.blocks) == (other.nbytes, other.sha256, other.blocks)


def differing_ranges(one: FileDigest, other: FileDigest) -> list[ByteRange]:
    """The byte ranges, whole blocks joined where they touch, in which two files differ; up to the longer one's end."""
    end = max(one.nbytes, other.nbytes)
    wrong = [i for i, (a, b) in enumerate(zip_longest(one.blocks, other.blocks)) if a != b]
    return [ByteRange(first * BLOCK_NBYTES, min((last + 1) * BLOCK_NBYTES, end)) for first, last in _runs(wrong)]


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of neighbours, first and last of each."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs
