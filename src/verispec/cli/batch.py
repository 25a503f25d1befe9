"""`generate --prompts FILE`: many prompts as one batch, one JSON line each in input order.

A line that cannot be served becomes an error object in its place; the others run. Interrupted, what is finished is
printed all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from verispec.cli.show import as_object
from verispec.engine import Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM, Completion
from verispec.types import SamplingParams

MAX_LINE_CHARS = 16 * 1024 * 1024
_PROMPT_KEYS = ("prompt", "token_ids", "messages")
_PARAMETERS = {f.name for f in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the file: a request, or why there is none."""

    request: Request | None = None
    error: str = ""


def read_lines(path: str) -> list[str]:
    """The file's lines, blank ones at the end dropped; `-` is stdin."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--prompts {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path}: byte {error.start} is not UTF-8") from error
    lines = text.rstrip().split("\n")
    if lines == [""]:
        raise InputError(f"--prompts {path}: the file is empty")
    return lines


def parse_line(
    line: str, *, llm: LLM, defaults: SamplingParams, chat: Callable[[str], list[int]] | None, drafter: str
) -> BatchLine:
    """A line as a request. `chat` turns the text of "prompt" into tokens; without it the text is taken as it is."""
    try:
        prompt, options = _split(_load(line), llm=llm, chat=chat)
        params = replace(defaults, **_known(options))
        return BatchLine(llm.request(prompt, params, drafter=drafter))
    except VerispecError as error:
        return BatchLine(error=str(error))


def _load(line: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_CHARS:
        raise InputError(f"the line has {len(line)} characters; the limit is {MAX_LINE_CHARS}")
    try:
        data = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"the line is not JSON{where}") from error
    if not isinstance(data, dict):
        raise InputError('the line must be an object such as {"prompt": "..."}')
    return data


def _split(
    data: dict[str, Any], *, llm: LLM, chat: Callable[[str], list[int]] | None
) -> tuple[str | list[int], Mapping[str, Any]]:
    """The prompt of a line and its other keys."""
    given = [key for key in _PROMPT_KEYS if key in data]
    if len(given) != 1:
        raise InputError(
            f"the line needs exactly one of {', '.join(_PROMPT_KEYS)}; it has {', '.join(given) or 'none'}"
        )
    value = data[given[0]]
    options = {key: v for key, v in data.items() if key != given[0]}
    if given[0] == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise InputError("prompt must be text that is not empty")
        return (value if chat is None else chat(value)), options
    if not isinstance(value, list):
        raise InputError(f"{given[0]} must be a list")
    return (value if given[0] == "token_ids" else llm.chat_ids(value)), options


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - _PARAMETERS)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; a line takes a prompt and sampling parameters")
    return dict(options)


class OrderedPrinter:
    """Prints objects in input order: each as soon as everything before it is there, the rest at the end."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0

    def put(self, index: int, result: dict[str, Any]) -> None:
        """Result number `index` is there."""
        self._ready[index] = result
        while self._next in self._ready:
            self._print(self._next)
            self._next += 1

    def flush(self) -> None:
        """Print what is left, gaps or not."""
        for index in sorted(self._ready):
            self._print(index)

    def _print(self, index: int) -> None:
        self._write(json.dumps({"index": index, **self._ready.pop(index)}, ensure_ascii=False) + "\n")


def run_batch(
    llm: LLM, lines: Iterable[BatchLine], *, drafter: str, printer: OrderedPrinter, on_done: Callable[[], None]
) -> int:
    """Run all requests as one batch; returns how many lines failed."""
    listed = list(lines)
    indices = [i for i, line in enumerate(listed) if line.request is not None]
    failed = 0
    for i, line in enumerate(listed):
        if line.request is None:
            printer.put(i, {"error": line.error})
            failed += 1
            on_done()

    def finished(position: int, completion: Completion) -> None:
        nonlocal failed
        failed += completion.error is not None
        printer.put(indices[position], as_object(completion, drafter=drafter))
        on_done()

    try:
        llm.run([line.request for line in listed if line.request is not None], on_finish=finished)
    finally:
        printer.flush()
    return failed
