"""Takes a receipt from outside. Nothing in it is trusted: sizes, types and ranges are checked, unknown fields refused.

What is well formed may still be untrue or edited: `Receipt.edited_sections` and a replay say so. No string of a receipt
is ever used as a path or a name to load; all of them are short and printable, so that messages may show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar

from verispec.errors import InputError
from verispec.model.fields import quoted
from verispec.model.file_digest import CHECKSUM_DIGITS, FileDigest
from verispec.receipt.values import (
    FORMAT,
    MAX_NAME_CHARS,
    SEAL_DIGITS,
    ModelRecord,
    OutputRecord,
    ParametersRecord,
    ProfileRecord,
    PromptRecord,
    Receipt,
    Seals,
    check_recordable,
    with_floats,
)
from verispec.strict_json import load_object, numbered
from verispec.types import MAX_SEED, FinishReason, SamplingParams

T = TypeVar("T")
_SHA256_DIGITS = 64
_PROFILE_DIGITS = 16
_MAX_INT32 = 2**31 - 1
_MAX_FILES = 1024
_MAX_FINGERPRINT = 64
_MAX_VALUE_CHARS = 1000
_MAX_SHAPES = 1024
_MAX_EOS = 1024
_MAX_SAMPLES = 1024
_HEX = re.compile(r"[0-9a-f]*")


def parse(text: str | bytes, *, name: str = "the receipt") -> Receipt:
    """The receipt that this JSON is. Raises InputError, one sentence that names the field."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    whole = load_object(data, name=name, example='{"format": 2, ...}')
    # Before the rest: a receipt of another format may have other fields.
    if whole.get("format") != FORMAT or isinstance(whole["format"], bool):
        raise InputError(f"{name}: format must be {FORMAT}, not {quoted(whole.get('format'))}")
    root = _Table(whole, name, "", [f.name for f in fields(Receipt)])
    return Receipt(
        format=FORMAT,
        verispec=root.text("verispec", 64),
        model=_model(root.table("model", ("name", "files"))),
        profile=_profile(root.table("profile", ("fingerprint", "family", "kv_dtype", "hash"))),
        prompt=_prompt(root.table("prompt", ("num_tokens", "sha256"), optional=("token_ids",))),
        parameters=_parameters(root.table("parameters", ("sampling", "seed", "sample_index", "max_len", "eos_ids"))),
        output=_output(root.table("output", ("token_ids", "finish_reason", "chain"))),
        seals=_seals(root.table("seals", [f.name for f in fields(Seals)])),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """An object of the receipt at `path`, with exactly these keys; every error names its field."""

    values: dict[str, Any]
    name: str
    path: str
    keys: Collection[str]
    optional: Collection[str] = ()

    def __post_init__(self) -> None:
        for key in self.keys:
            if key not in self.values:
                raise InputError(f"{self.name}: {self.path}{key} is missing")
        for key in self.values:
            if key not in self.keys and key not in self.optional:
                raise InputError(f"{self.name}: the field {quoted(self.path + key)} is unknown")

    def table(self, key: str, keys: Collection[str], optional: Collection[str] = ()) -> _Table:
        """The object under `key`."""
        return self._as_table(key, self.values[key], keys, optional)

    def tables(self, key: str, keys: Collection[str], max_items: int) -> list[_Table]:
        """The objects of the list under `key`, at least one."""
        return self._items(key, max_items, lambda where, value: self._as_table(where, value, keys), min_items=1)

    def text(self, key: str, max_chars: int) -> str:
        """A short printable string."""
        return self._as_text(key, self.values[key], max_chars)

    def integer(self, key: str, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return self._as_integer(key, self.values[key], low, high)

    def integers(self, key: str, low: int, high: int, *, min_items: int = 0, max_items: int = _MAX_INT32) -> list[int]:
        """A list of whole numbers in [low, high]."""
        return self._items(
            key, max_items, lambda where, value: self._as_integer(where, value, low, high), min_items=min_items
        )

    def digest(self, key: str, digits: int) -> str:
        """Hex digits."""
        return self._as_digest(key, self.values[key], digits)

    def digests(self, key: str, digits: int, *, min_items: int = 0) -> list[str]:
        """A list of hex digits."""
        return self._items(
            key, _MAX_INT32, lambda where, value: self._as_digest(where, value, digits), min_items=min_items
        )

    def texts_by_name(self, key: str, max_items: int) -> dict[str, str]:
        """An object from short strings to strings."""
        value = self.values[key]
        if not isinstance(value, dict) or len(value) > max_items:
            self.fail(key, f"an object of at most {max_items} strings", value)
        return {
            self._as_text(f"{key} name", each, MAX_NAME_CHARS): self._as_text(f"{key}.{each}", text, _MAX_VALUE_CHARS)
            for each, text in value.items()
        }

    def fail(self, key: str, expected: str, found: object) -> NoReturn:
        """Refuse the value of `key`."""
        raise InputError(f"{self.name}: {self.path}{key} must be {expected}, not {quoted(found)}")

    def _items(self, key: str, max_items: int, read: Callable[[str, Any], T], *, min_items: int) -> list[T]:
        value = self.values[key]
        if not isinstance(value, list) or not min_items <= len(value) <= max_items:
            self.fail(key, f"a list of {min_items} to {max_items} items", value)
        return [read(f"{key}[{i}]", item) for i, item in enumerate(value)]

    def _as_table(self, key: str, value: Any, keys: Collection[str], optional: Collection[str] = ()) -> _Table:
        if not isinstance(value, dict):
            self.fail(key, "an object", value)
        return _Table(value, self.name, f"{self.path}{key}.", keys, optional)

    def _as_text(self, key: str, value: Any, max_chars: int) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= max_chars or not value.isprintable():
            self.fail(quoted(key).strip("'\""), f"printable text of 1 to {max_chars} characters", value)
        return value

    def _as_integer(self, key: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"a whole number from {low} to {high}", value)
        return value

    def _as_digest(self, key: str, value: Any, digits: int) -> str:
        if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
            self.fail(key, f"{digits} hex digits", value)
        return value


def _model(table: _Table) -> ModelRecord:
    files = table.tables("files", [f.name for f in fields(FileDigest)], _MAX_FILES)
    return ModelRecord(table.text("name", MAX_NAME_CHARS), tuple(map(_file, files)))


def _file(table: _Table) -> FileDigest:
    name = table.text("name", MAX_NAME_CHARS)
    if "/" in name:
        table.fail("name", "a file name without directories", name)
    return FileDigest(
        name=name,
        nbytes=table.integer("nbytes", 0, 2**63 - 1),
        sha256=table.digest("sha256", _SHA256_DIGITS),
        blocks=tuple(table.digests("blocks", CHECKSUM_DIGITS)),
    )


def _profile(table: _Table) -> ProfileRecord:
    return ProfileRecord(
        fingerprint=tuple(sorted(table.texts_by_name("fingerprint", _MAX_FINGERPRINT).items())),
        family=tuple(table.integers("family", 1, _MAX_INT32, min_items=1, max_items=_MAX_SHAPES)),
        kv_dtype=table.text("kv_dtype", 64),
        hash=table.digest("hash", _PROFILE_DIGITS),
    )


def _prompt(table: _Table) -> PromptRecord:
    ids = tuple(table.integers("token_ids", 0, _MAX_INT32, min_items=1)) if "token_ids" in table.values else None
    return PromptRecord(table.integer("num_tokens", 1, _MAX_INT32), table.digest("sha256", _SHA256_DIGITS), ids)


def _parameters(table: _Table) -> ParametersRecord:
    sampling = table.table("sampling", [f.name for f in fields(SamplingParams)])
    try:
        bias = numbered(sampling.values["logit_bias"], name="logit_bias")
        params = with_floats(SamplingParams(**{**sampling.values, "logit_bias": bias}))
        check_recordable(params)
    except InputError as error:
        raise InputError(f"{sampling.name}: {sampling.path}{error}") from error
    return ParametersRecord(
        sampling=params,
        seed=table.integer("seed", 0, MAX_SEED),
        sample_index=table.integer("sample_index", 0, _MAX_SAMPLES - 1),
        max_len=table.integer("max_len", 2, _MAX_INT32),
        eos_ids=tuple(table.integers("eos_ids", 0, _MAX_INT32, max_items=_MAX_EOS)),
    )


def _output(table: _Table) -> OutputRecord:
    reasons = {str(reason): reason for reason in (FinishReason.STOP, FinishReason.LENGTH)}
    reason = table.text("finish_reason", MAX_NAME_CHARS)
    if reason not in reasons:
        table.fail("finish_reason", " or ".join(reasons), reason)
    return OutputRecord(
        token_ids=tuple(table.integers("token_ids", 0, _MAX_INT32)),
        finish_reason=reasons[reason],
        chain=tuple(table.digests("chain", _SHA256_DIGITS, min_items=1)),
    )


def _seals(table: _Table) -> Seals:
    return Seals(**{f.name: table.digest(f.name, SEAL_DIGITS) for f in fields(Seals)})
