"""Takes a receipt from outside. Nothing in it is trusted: sizes, types and ranges are checked, unknown fields refused.

What is well formed may still be untrue or edited: a replay says so. No string of a receipt is ever used as a path or a
name to load; all of them are short and printable, so that messages may show them.

A *check* takes the place of a value, as messages name it, and the value; it returns what the receipt holds, or raises.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

from verispec.errors import InputError
from verispec.model.fields import quoted
from verispec.model.file_digest import CHECKSUM_DIGITS, FileDigest
from verispec.receipt.values import (
    FORMAT,
    MAX_NAME_CHARS,
    ConstraintRecord,
    ModelRecord,
    OutputRecord,
    ParametersRecord,
    ProfileRecord,
    PromptRecord,
    Receipt,
    SignatureRecord,
    check_recordable,
    with_floats,
)
from verispec.strict_json import load_object, numbered
from verispec.types import CONSTRAINTS, MAX_SEED, FinishReason, SamplingParams

Check = Callable[[str, Any], Any]
_SHA256_DIGITS = 64
_PROFILE_DIGITS = 16
_PUBLIC_KEY_DIGITS = 64
_SIGNATURE_DIGITS = 128
_MAX_INT32 = 2**31 - 1
# Bounds on what a hostile receipt costs to read.
_MAX_ITEMS = 2**20
_MAX_FINGERPRINT = 64
_MAX_VALUE_CHARS = 1000
_FINISHES = {str(reason): reason for reason in (FinishReason.STOP, FinishReason.LENGTH)}


def parse(text: str | bytes, *, name: str = "the receipt") -> Receipt:
    """The receipt that this JSON is. Raises InputError, one sentence that names the field."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    whole = load_object(data, name=name, example=f'{{"format": {FORMAT}, ...}}')
    found = whole.pop("format", None)  # before the rest: a receipt of another format may have other fields
    if type(found) is int and 1 <= found < FORMAT:
        raise InputError(f"{name}: its format is {found}, of an older verispec; this one reads format {FORMAT}")
    if type(found) is not int or found != FORMAT:
        raise InputError(f"{name}: format must be {FORMAT}, not {quoted(found)}")
    try:
        receipt: Receipt = _RECEIPT("", whole)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    return receipt


def _fail(where: str, expected: str, found: object) -> NoReturn:
    raise InputError(f"{where} must be {expected}, not {quoted(found)}")


def _plain(expected: str, is_good: Callable[[Any], bool]) -> Check:
    """A value that is taken as it is."""

    def check(where: str, value: Any) -> Any:
        if not is_good(value):
            _fail(where, expected, value)
        return value

    return check


def _integer(low: int, high: int) -> Check:
    return _plain(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _text(max_chars: int) -> Check:
    expected = f"printable text of 1 to {max_chars} characters"
    return _plain(expected, lambda v: isinstance(v, str) and 0 < len(v) <= max_chars and v.isprintable())


def _hex(digits: int) -> Check:
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")
    return _plain(f"{digits} hex digits", lambda v: isinstance(v, str) and pattern.fullmatch(v) is not None)


def _items(check_item: Check, low: int = 0) -> Check:
    def check(where: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not low <= len(value) <= _MAX_ITEMS:
            _fail(where, f"a list of {low} to {_MAX_ITEMS} items", value)
        return tuple(check_item(f"{where}[{i}]", item) for i, item in enumerate(value))

    return check


def _object(make: Callable[..., Any], optional: tuple[str, ...] = (), **checks: Check) -> Check:
    """An object with exactly these keys, some of them perhaps `optional`, made into a value."""

    def check(where: str, value: Any) -> Any:
        if not isinstance(value, dict):
            _fail(where, "an object", value)
        inside = f"{where}." if where else ""
        for key in sorted(checks.keys() - value.keys() - set(optional)):
            raise InputError(f"{inside}{key} is missing")
        for key in sorted(value.keys() - checks.keys()):
            raise InputError(f"the field {quoted(inside + key)} is unknown")
        return make(**{key: checks[key](f"{inside}{key}", each) for key, each in value.items()})

    return check


def _file_name(where: str, value: Any) -> str:
    name: str = _text(MAX_NAME_CHARS)(where, value)
    if "/" in name:
        _fail(where, "a file name without directories", name)
    return name


def _fingerprint(where: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or len(value) > _MAX_FINGERPRINT:
        _fail(where, f"an object of at most {_MAX_FINGERPRINT} strings", value)
    name, text = _text(MAX_NAME_CHARS), _text(_MAX_VALUE_CHARS)
    return tuple(sorted((name(f"{where} name", key), text(f"{where}.{key}", each)) for key, each in value.items()))


def _sampling(where: str, value: Any) -> SamplingParams:
    """`SamplingParams` checks its own values; a receipt also knows the seed, and has lists as lists."""
    checks: dict[str, Check] = {f.name: lambda _, each: each for f in fields(SamplingParams)}
    checks |= {name: _items(checks[name]) for name in ("stop", "stop_ids")}
    values = _object(dict, CONSTRAINTS, **{**checks, "seed": _integer(0, MAX_SEED)})(where, value)
    try:
        bias = numbered(values["logit_bias"], name="logit_bias")
        params = with_floats(SamplingParams(**{**values, "logit_bias": bias}))
        check_recordable(params)
    except InputError as error:
        raise InputError(f"{where}.{error}") from error
    return params


def _finish(where: str, value: Any) -> FinishReason:
    name: str = _plain(" or ".join(_FINISHES), lambda v: isinstance(v, str) and v in _FINISHES)(where, value)
    return _FINISHES[name]


_SHA256 = _hex(_SHA256_DIGITS)
_POSITIVE, _NATURAL = _integer(1, _MAX_INT32), _integer(0, _MAX_INT32)
_TOKEN_IDS = _items(_NATURAL, 1)
_BLOCKS = _items(_hex(CHECKSUM_DIGITS))
_FILE = _object(FileDigest, name=_file_name, nbytes=_integer(0, 2**63 - 1), sha256=_SHA256, blocks=_BLOCKS)
_RECEIPT = _object(
    Receipt,
    optional=("signature", "constraint"),
    verispec=_text(64),
    model=_object(ModelRecord, name=_text(MAX_NAME_CHARS), files=_items(_FILE, 1)),
    profile=_object(
        ProfileRecord,
        fingerprint=_fingerprint,
        family=_items(_POSITIVE, 1),
        weights_version=_NATURAL,
        hash=_hex(_PROFILE_DIGITS),
    ),
    prompt=_object(PromptRecord, optional=("token_ids",), sha256=_SHA256, token_ids=_TOKEN_IDS),
    parameters=_object(
        ParametersRecord,
        sampling=_sampling,
        sample_index=_NATURAL,
        max_len=_integer(2, _MAX_INT32),
        eos_ids=_items(_NATURAL),
    ),
    output=_object(
        OutputRecord,
        optional=("num_given",),
        token_ids=_TOKEN_IDS,
        finish_reason=_finish,
        logprob_digests=_items(_SHA256),
        num_given=_POSITIVE,
    ),
    digest=_SHA256,
    constraint=_object(ConstraintRecord, sha256=_SHA256, library=_text(MAX_NAME_CHARS)),
    signature=_object(SignatureRecord, public_key=_hex(_PUBLIC_KEY_DIGITS), value=_hex(_SIGNATURE_DIGITS)),
)
