"""The journal of a batch: what is finished, and what unfinished lines have committed. Append-only, one record a line:

    CRC32 {"journal": 1, "input": "...", "model": "...", ...}                 what all the rest is a function of
    CRC32 {"line": 4, "sample": 0, "at": 16, "ids": [...], "logprobs": [...], "text": "..."}     more of a sample
    CRC32 {"line": 4, "result": "...", ...}                                   a finished line

A record counts if its line ends and its checksum fits; others are as if never written. That is always right: what is
missing is computed again, to the same bits. So nothing that happens to a journal can change a result, and a journal cut
at any byte is a journal. One process has it open at a time.

>>> with Journal.open(path) as journal:
...     journal.begin({"input": input_digest, "model": llm_digest})   # refuses a journal of something else
...     samples = journal.samples(line)             # to go on with, see `resume`
...     journal.commit(line, new_tokens)            # now and then
...     journal.finish(line, {"result": text})      # at the end; `line in journal.finished` from now on
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from verispec.errors import InputError, VerispecError
from verispec.types import Alternatives, TokenLogprobs

FORMAT = 1
_CHECKSUM_DIGITS = 8
_MODE = 0o644


class StoppedError(VerispecError):
    """A batch ended before its time. What was finished is in the journal, and the same command goes on from there."""


class InUseError(InputError):
    """Another process has the journal open."""


class Commit(NamedTuple):
    """Tokens of one sample, from number `at` of those drawn, and the text they released."""

    sample: int
    at: int
    entries: TokenLogprobs
    text: str

    def to_plain(self) -> dict[str, Any]:
        entries = self.entries
        plain = {"sample": self.sample, "at": self.at, "ids": entries.token_ids, "logprobs": entries.values}
        if entries.all_alternatives:
            plain["alternatives"] = entries.all_alternatives
        return {**plain, "text": self.text}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        alternatives = tuple(tuple((i, value) for i, value in each) for each in plain.get("alternatives", ()))
        entries = TokenLogprobs(tuple(plain["ids"]), tuple(plain["logprobs"]), alternatives)
        return cls(plain["sample"], plain["at"], entries, plain["text"])


@dataclass(slots=True)
class Sample:
    """What one sample has committed: its tokens, and the text they released."""

    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    text: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, entries: TokenLogprobs, text: str) -> None:
        self.token_ids += entries.token_ids
        self.values += entries.values
        self.alternatives += entries.all_alternatives or [()] * len(entries)
        self.text += text

    def since(self, at: int) -> TokenLogprobs:
        """The tokens from number `at` on."""
        alternatives = tuple(self.alternatives[at:])
        return TokenLogprobs(
            tuple(self.token_ids[at:]), tuple(self.values[at:]), alternatives if any(alternatives) else ()
        )


class _Place(NamedTuple):
    """Where a record lies in the file."""

    start: int
    nbytes: int


class Journal:
    """An open journal. `finished` holds the lines that are, in the order in which they came to be."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.finished: dict[int, _Place] = {}
        self.num_damaged = 0
        self._file = file
        self._committed: dict[int, dict[int, Sample]] = {}
        self._end = 0
        self._read()

    @classmethod
    def open(cls, path: Path, *, fresh: bool = False) -> Self:
        """Open it, new or not, for this process alone. A record cut off at its end is removed; all are, if `fresh`."""
        while True:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
            except OSError as error:
                raise InputError(f"{path}: {error.strerror or error}") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file), os.stat(path)):  # else it was replaced before it was locked
                    if fresh:
                        os.ftruncate(file, 0)
                    return cls(path, file)
            except FileNotFoundError:
                pass
            except BlockingIOError:
                os.close(file)
                raise InUseError(f"{path}: another batch is writing it; wait for its end") from None
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def begin(self, parts: Mapping[str, str]) -> None:
        """Write what the results are a function of; raises InputError if the journal was begun with something else."""
        self.check(parts)
        if not self.header:
            self.header = dict(parts)
            self._append({"journal": FORMAT, **parts})
            self.sync()

    def check(self, parts: Mapping[str, str]) -> None:
        """Raise InputError if the journal was begun with other parts than these."""
        for name, value in parts.items():
            if self.header and self.header.get(name) != value:
                raise InputError(
                    f"{self.path} was begun by a run that differed in its {name}; go on as it was begun, give another "
                    "output, or --restart to throw away what it holds"
                )

    def samples(self, line: int) -> dict[int, Sample]:
        """What an unfinished line has committed, by sample; the journal forgets it."""
        return self._committed.pop(line, {})

    def commit(self, line: int, commit: Commit) -> None:
        """Note what a sample has committed since the last time."""
        self._append({"line": line, **commit.to_plain()})

    def finish(self, line: int, record: Mapping[str, Any]) -> None:
        """Note that a line is finished, with what there is to know of it."""
        self.finished[line] = self._append({"line": line, "result": None, **record})

    def record(self, line: int) -> dict[str, Any]:
        """What was noted of a finished line."""
        place = self.finished[line]
        found = _parsed(os.pread(self._file, place.nbytes, place.start))
        if found is None:
            raise StoppedError(f"{self.path}: the record of line {line + 1} has changed since it was written")
        return found

    def sync(self) -> None:
        """From now on what was written outlives the machine's power."""
        with self._stopping():
            os.fsync(self._file)

    def replace(self, record: Mapping[str, Any]) -> None:
        """Forget everything but the header, and add this record; all of it or nothing."""
        with self._stopping(), atomic(self.path) as file:
            file.write(_line({"journal": FORMAT, **self.header}) + _line(record))

    def close(self) -> None:
        try:
            if not self._end:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self) -> None:
        with os.fdopen(os.dup(self._file), "rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    os.ftruncate(self._file, self._end)
                    break
                place, self._end = _Place(self._end, len(data)), self._end + len(data)
                found = _parsed(data)
                if found is None:
                    self.num_damaged += 1
                else:
                    self._take(found, place)
        if (self.finished or self._committed) and not self.header:
            raise InputError(f"{self.path}: its first record is damaged; --restart throws away what it holds")

    def _take(self, found: dict[str, Any], place: _Place) -> None:
        if "journal" in found:
            if found.pop("journal") != FORMAT:
                raise InputError(f"{self.path}: it was written by another version; --restart throws away what it holds")
            self.header = found
        elif "line" not in found:
            self.header |= found  # `replace`: of a batch that is complete
        elif "result" in found:
            self.finished[found["line"]] = place
            self._committed.pop(found["line"], None)
        elif found["line"] not in self.finished:
            commit = Commit.from_plain(found)
            sample = self._committed.setdefault(found["line"], {}).setdefault(commit.sample, Sample())
            if commit.at == len(sample):  # otherwise what it goes on from is damaged
                sample.extend(commit.entries, commit.text)

    def _append(self, record: Mapping[str, Any]) -> _Place:
        data = _line(record)
        with self._stopping():
            try:
                _write_all(self._file, data, self._end)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)
                raise
        place, self._end = _Place(self._end, len(data)), self._end + len(data)
        return place

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """A full disk, above all."""
        try:
            yield
        except OSError as error:
            raise StoppedError(
                f"{self.path}: {error.strerror or error}; {len(self.finished)} finished lines are kept, and the same "
                "command goes on from there"
            ) from error


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Any]:
    """A file to write that takes `path`'s place at the end of the block, whole and on the disk, or never does."""
    partial = path.with_name(f".{path.name[:100]}.partial")  # one writer at a time: the journal is locked
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _line(record: Mapping[str, Any]) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b"%0*x %s\n" % (_CHECKSUM_DIGITS, zlib.crc32(data), data)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if it is damaged."""
    checksum, _, data = line[:-1].partition(b" ")
    if len(checksum) != _CHECKSUM_DIGITS or checksum != b"%0*x" % (_CHECKSUM_DIGITS, zlib.crc32(data)):
        return None
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _write_all(file: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(file, view, start)
        view, start = view[num_written:], start + num_written
