"""What identifies a model: its files, each by its size, its SHA-256 and a checksum of each block, which tells where two
differ. Names have no directories, so that a digest says nothing of the machine it was made on.

Hashing reads every byte, which loading should not wait for; so the files are read again when the digests are first
asked for, and refused unless the file system says that nothing was done to them since they were opened. What was loaded
is no view of them: a change that comes after the digests changes no answer.
"""

import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from verispec.errors import ModelFileError

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


@dataclass(frozen=True)
class ModelIdentity:
    """A loaded model. `name` is a known name, a hub id, or a file's or folder's own name without directories."""

    name: str
    stamps: tuple[FileStamp, ...]

    @cached_property
    def files(self) -> tuple[FileDigest, ...]:
        return tuple(map(_digest, self.stamps))


def _digest(loaded: FileStamp) -> FileDigest:
    """The digest of the file as it was loaded; `loaded` is from before its first byte was read."""
    try:
        digest = FileDigest.of(loaded.path)
        now = FileStamp.of(loaded.path, loaded.path.stat())
    except OSError as error:
        raise ModelFileError(f"{loaded.path}: cannot be read: {error}") from error
    if now != loaded:
        raise ModelFileError(f"{loaded.path}: has changed since it was loaded; load it again")
    return digest
