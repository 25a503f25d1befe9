"""The input of a batch: lines of a file that must not change while the batch lives, with the ids they go by.

A line with `prompt`, `token_ids` or `messages` is a prompt line (see `prompts`); any other is a line of OpenAI's batch
files. Rows of a parquet file become such lines. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verispec.errors import InputError
from verispec.text.prompts import CONTENT_KEYS

PARQUET = ".parquet"
MAX_SEED_DIGITS = 13  # of a hash, in hex: as many bits as survive JSON in JavaScript


class LineFile(Sequence[bytes]):
    """The lines of a JSONL file, read as they are asked for; blank ones at its end are none. `sha256` is the file's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        try:
            self._stamp = _stamp(os.fstat(self._file.fileno()))
            self.sha256, self._starts = self._scan()
            if not len(self):
                raise InputError(f"{path}: the file is empty")
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise InputError(f"{path}: {error.strerror or error}") from error
            raise

    def _scan(self) -> tuple[str, array[int]]:
        digest, starts, end = hashlib.sha256(), array("q", [0]), 0
        num_lines = 0
        for line in self._file:
            digest.update(line)
            end += len(line)
            starts.append(end)
            if line.strip():
                num_lines = len(starts) - 1
        del starts[num_lines + 1 :]
        return digest.hexdigest(), starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        start, end = self._starts[index], self._starts[index + 1]
        return os.pread(self._file.fileno(), end - start, start).rstrip(b"\r\n")

    def close(self) -> None:
        self._file.close()

    def check_unchanged(self) -> None:
        """Raise InputError if somebody wrote to the file since it was opened."""
        try:
            now = _stamp(self._path.stat())
        except OSError as error:
            raise InputError(f"{self._path}: {error.strerror or error}") from error
        if now != self._stamp:
            raise InputError(f"{self._path}: it was changed while the batch ran")


class ParquetFile(LineFile):
    """The rows of a parquet file as lines. A `body` may be a struct or a JSON object as text; nulls are left out."""

    def _scan(self) -> tuple[str, array[int]]:
        parquet = import_parquet()
        digest = hashlib.sha256()
        while block := self._file.read(1 << 20):
            digest.update(block)
        self._file.seek(0)
        self._lines = [_row_line(row) for row in parquet.read_table(self._file).to_pylist()]
        return digest.hexdigest(), array("q", range(len(self._lines) + 1))

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index]


def open_lines(path: Path) -> LineFile:
    return ParquetFile(path) if path.suffix == PARQUET else LineFile(path)


def import_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise InputError("parquet files need the package pyarrow: pip install pyarrow") from error
    return parquet


def write_parquet(file: Any, lines: Iterator[str]) -> None:
    """Result lines as a table: its columns are the id of the line, its text where it has one, and the line itself."""
    import_parquet()
    import pyarrow

    columns: dict[str, list[Any]] = {"id": [], "text": [], "line": []}
    for line in lines:
        found = json.loads(line)
        columns["id"].append(str(found["custom_id"] if "custom_id" in found else found["index"]))
        columns["text"].append(_text(found))
        columns["line"].append(line)
    import_parquet().write_table(
        pyarrow.table({k: pyarrow.array(v, pyarrow.string()) for k, v in columns.items()}), file
    )


def _text(found: dict[str, Any]) -> Any:
    """The first answer in a result line."""
    if "custom_id" not in found:
        return found.get("text")
    body = (found["response"] or {}).get("body", {})
    for choice in body.get("choices", ()):
        return choice.get("text", choice.get("message", {}).get("content"))
    parts = [part.get("text", "") for item in body.get("output", ()) for part in item.get("content", ())]
    return "".join(parts) if parts else None


def is_prompt_line(data: object) -> bool:
    return isinstance(data, dict) and any(key in data for key in CONTENT_KEYS)


def find_repeated(lines: Sequence[bytes]) -> dict[int, int]:
    """Lines whose `custom_id` an earlier line has, with that line."""
    first: dict[str, int] = {}
    repeated = {}
    for index in range(len(lines)):
        try:
            data = json.loads(lines[index])
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and isinstance(data.get("custom_id"), str) and not is_prompt_line(data):
            earlier = first.setdefault(data["custom_id"], index)
            if earlier != index:
                repeated[index] = earlier
    return repeated


def derived(*parts: str) -> str:
    """A hash, in hex, that stands for these texts."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _row_line(row: dict[str, Any]) -> bytes:
    body = row.get("body")
    if isinstance(body, str):
        with contextlib.suppress(ValueError):  # refused as what it is
            row = {**row, "body": json.loads(body)}
    return json.dumps(_without_nulls(row)).encode()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
