"""What identifies a model file: its size, its SHA-256, and a checksum of each block, which tells where two differ.

Knows bytes only. Names have no directories, so that a digest says nothing of the machine it was made on.
"""

import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

BLOCK_NBYTES = 16 * 1024 * 1024
CHECKSUM_DIGITS = 8


class FileStamp(NamedTuple):
    """A file and what the file system says of it. A program can set `modified_ns`, but not `changed_ns`."""

    path: Path
    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> "FileStamp":
        return cls(path.absolute(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class ByteRange(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file. `blocks` are the CRC-32 of each block of BLOCK_NBYTES, in hex and in order."""

    name: str
    nbytes: int
    sha256: str
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "FileDigest":
        digest, nbytes, checksums = hashlib.sha256(), 0, []
        with path.open("rb") as file:
            while block := file.read(BLOCK_NBYTES):
                digest.update(block)
                nbytes += len(block)
                checksums.append(f"{zlib.crc32(block):0{CHECKSUM_DIGITS}x}")
        return cls(path.name, nbytes, digest.hexdigest(), tuple(checksums))

    def has_same_bytes(self, other: "FileDigest") -> bool:
        """Whether both are the same file, whatever its name."""
        return (self.nbytes, self.sha256, self.blocks) == (other.nbytes, other.sha256, other.blocks)


def differing_ranges(one: FileDigest, other: FileDigest) -> list[ByteRange]:
    """The byte ranges, whole blocks joined where they touch, in which two files differ; up to the longer one's end."""
    end = max(one.nbytes, other.nbytes)
    pairs = zip_longest(one.blocks, other.blocks)
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b and i * BLOCK_NBYTES < end]
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
