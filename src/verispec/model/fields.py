"""Typed reads from an untrusted mapping: GGUF metadata, or a JSON file of a Hugging Face folder.

A missing or mistyped value is a `ModelFileError` that names the file, the key and what was found. What a file says is
quoted in messages only through `quoted`: it may be megabytes long, or hold line breaks and terminal codes.
"""

import math
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from verispec.errors import InputError, ModelFileError
from verispec.strict_json import load_object

_REQUIRED = object()
_MAX_QUOTED_CHARS = 80
_MAX_QUOTED_ITEMS = 8


def quoted(value: object) -> str:
    """A value of an untrusted file as messages show it: one line, printable, short."""
    if isinstance(value, list) and len(value) <= _MAX_QUOTED_ITEMS:
        return _shortened(f"[{', '.join(map(_quoted_scalar, value))}]")
    return _quoted_scalar(value)


def _quoted_scalar(value: object) -> str:
    if isinstance(value, str):
        return _shortened(repr(value[: _MAX_QUOTED_CHARS + 1]))
    if value is None or isinstance(value, int | float):
        return _shortened(repr(value))
    return f"{type(value).__name__} of {len(value)} items" if isinstance(value, Sized) else type(value).__name__


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "..."


def json_object(data: bytes, where: Path, *, max_nbytes: int) -> dict[str, Any]:
    try:
        return load_object(data, name=str(where), example='{"name": ...}', max_nbytes=max_nbytes)
    except InputError as error:
        raise ModelFileError(str(error)) from error


class Fields:
    """The values of `mapping`, which came from `where`. A key whose value is None counts as missing."""

    def __init__(self, mapping: Mapping[str, Any], where: str) -> None:
        self.mapping, self.where = mapping, where

    def __contains__(self, key: str) -> bool:
        return self.mapping.get(key) is not None

    def fail(self, key: str, expected: str) -> NoReturn:
        raise ModelFileError(f"{self.where}: {key} must be {expected}, not {quoted(self.mapping.get(key))}")

    def _get(self, key: str, default: Any) -> Any:
        if key in self:
            return self.mapping[key]
        if default is _REQUIRED:
            raise ModelFileError(f"{self.where}: {key} is missing")
        return default

    def integer(self, key: str, default: int | object = _REQUIRED) -> int:
        value = self._get(key, default)
        if type(value) is not int or abs(value) >= 1 << 63:
            self.fail(key, "an integer")
        return value

    def real(self, key: str, default: float | object = _REQUIRED) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or abs(value) > 1e308 or not math.isfinite(value):
            self.fail(key, "a finite number")
        return float(value)

    def text(self, key: str, default: str | object = _REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty when missing."""
        value = self._get(key, [])
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            self.fail(key, "a list of strings")
        return value

    def array(self, key: str) -> list[Any]:
        """A list; GGUF's arrays are lists, tuples or numpy arrays."""
        value = self._get(key, _REQUIRED)
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ModelFileError(f"{self.where}: {key} is not an array")
        return value.tolist() if isinstance(value, np.ndarray) else list(value)

    def table(self, key: str) -> "Fields":
        """A nested mapping; empty when missing."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return Fields(value, f"{self.where}: {key}")
