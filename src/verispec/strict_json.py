"""JSON that comes from outside: bounded, UTF-8, one object, no key twice, no NaN, not nested without end.

Every refusal is an `InputError` of one sentence that begins with the name the caller gives the input. What the object
means is the caller's business.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from verispec.errors import InputError

MAX_OBJECT_NBYTES = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


def decode(data: bytes, *, name: str) -> str:
    """UTF-8 bytes as text, without a byte order mark."""
    start = len(_BOM) if data.startswith(_BOM) else 0
    try:
        return data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        position = error.start + start
        raise InputError(f"{name}: byte {position} (0x{data[position]:02x}) is not UTF-8") from error


def load_object(data: bytes, *, name: str, example: str, max_nbytes: int = MAX_OBJECT_NBYTES) -> dict[str, Any]:
    """The one object that the bytes are; `example` shows what was expected where they are something else."""
    value = load_value(data, name=name, max_nbytes=max_nbytes)
    if not isinstance(value, dict):
        raise InputError(f"{name} must be an object such as {example}")
    return value


def load_value(data: bytes, *, name: str, max_nbytes: int = MAX_OBJECT_NBYTES) -> Any:
    """The one JSON value that the bytes are."""
    if len(data) > max_nbytes:
        raise InputError(f"{name} has {len(data)} bytes; the limit is {max_nbytes}")
    text = decode(data, name=name).rstrip()
    if not text:
        raise InputError(f"{name} is blank")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise InputError(f"{name} has the key {repeated[:100]!r} twice")
        return found

    def refuse_constant(constant: str) -> NoReturn:
        raise InputError(f"{name} is not JSON: {constant} is not a number there")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not JSON: {error.msg} at byte {len(text[: error.pos].encode())}") from error
    except RecursionError as error:
        raise InputError(f"{name} is nested too deeply") from error
    except ValueError as error:  # Python's limit on the digits of a number
        raise InputError(f"{name} holds a number with too many digits") from error


def numbered(value: Any, *, name: str) -> dict[int, Any]:
    """An object whose keys are token ids: JSON's keys are strings, {"42": -1.5} is token 42."""
    if not isinstance(value, Mapping) or not all(_is_number(key) for key in value):
        raise InputError(f'{name} must be an object from token ids to numbers, such as {{"42": -1.5}}')
    return {int(key): each for key, each in value.items()}


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 12 and key == str(int(key))
