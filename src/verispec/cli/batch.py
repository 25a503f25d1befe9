"""`generate --prompts FILE`: many prompts as one batch, one JSON line each in input order.

A line that cannot be served becomes an error object in its place; the others run. Interrupted, what is finished is
printed all the same. Errors of a line name its fields, not the command line's flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from verispec.cli import terminal
from verispec.cli.progress import CountDisplay
from verispec.cli.show import as_object
from verispec.engine import Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM, Completion
from verispec.types import SamplingParams

MAX_LINE_NBYTES = 16 * 1024 * 1024
_PROMPT_KEYS = ("prompt", "token_ids", "messages")
_PARAMETERS = {f.name for f in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the file: a request, or why there is none."""

    request: Request | None = None
    error: str = ""


def read_lines(path: str) -> list[bytes]:
    """The file's lines, blank ones at the end dropped; `-` is stdin."""
    name = f"--prompts {path}"
    data = terminal.read_bytes(path, name=name)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{name}: byte 0 is not UTF-8 but the mark of UTF-16")
    lines = data.rstrip().split(b"\n")
    if lines == [b""]:
        raise InputError(f"{name}: the file is empty")
    return lines


def run_file(
    llm: LLM,
    lines: Sequence[bytes],
    params: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    drafter: str,
    quiet: bool,
    name: str,
) -> None:
    """Run all lines as one batch and print their objects; afterwards raise if some failed."""
    prepend = () if system is None else ({"role": "system", "content": system},)
    to_ids = _raw_ids if raw else lambda llm, messages: _chat_ids(llm, prepend, messages)
    parsed = [parse_line(line, llm=llm, defaults=params, to_ids=to_ids, drafter=drafter) for line in lines]
    with CountDisplay("generating", len(parsed), quiet=quiet) as display:

        def put(result: dict[str, Any]) -> None:
            with display.aside():
                terminal.out_json(result)
            display.advance()

        try:
            bad = run_batch(llm, parsed, drafter=drafter, put=put)
        except KeyboardInterrupt:
            terminal.note(f"{name}: interrupted; {display.num_done} of {len(parsed)} lines are finished")
            raise
    if bad:
        count = f"{len(bad)} of {len(parsed)} lines" if len(parsed) > 1 else "the only line"
        raise VerispecError(f"{name}: {count} failed; line {min(bad) + 1}: {bad[min(bad)]}")


ToIds = Callable[[LLM, "str | list[Any]"], "str | list[int]"]


def _raw_ids(llm: LLM, content: str | list[Any]) -> str | list[int]:
    if isinstance(content, str):
        return content
    raise InputError("messages need the chat template, which --raw turns off")


def _chat_ids(llm: LLM, prepend: Sequence[Mapping[str, str]], content: str | list[Any]) -> list[int]:
    """Text or messages through the chat template; a line's own system message replaces the command's."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    first = messages[0] if messages else None
    has_system = isinstance(first, dict) and first.get("role") == "system"
    return llm.chat_ids(messages if has_system or not messages else [*prepend, *messages])


def parse_line(line: bytes, *, llm: LLM, defaults: SamplingParams, to_ids: ToIds, drafter: str) -> BatchLine:
    """A line as a request; `to_ids` turns the text of "prompt", or "messages", into what the model gets."""
    try:
        data = load_line(line)
        given = [key for key in _PROMPT_KEYS if key in data]
        if len(given) != 1:
            raise InputError(
                f"the line needs exactly one of {', '.join(_PROMPT_KEYS)}; it has {', '.join(given) or 'none'}"
            )
        content = _content(given[0], data.pop(given[0]))
        params = replace(defaults, **_typed(data))
        prompt = content if given[0] == "token_ids" else to_ids(llm, content)
        return BatchLine(llm.request(prompt, params, drafter=drafter))
    except VerispecError as error:
        return BatchLine(error=str(error))


def load_line(line: bytes) -> dict[str, Any]:
    """The object on a line: strict JSON, no key twice."""
    if len(line) > MAX_LINE_NBYTES:
        raise InputError(f"the line has {len(line)} bytes; the limit is {MAX_LINE_NBYTES}")
    text = terminal.decode(line, name="the line").rstrip()
    if not text:
        raise InputError("the line is blank")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"the line is not JSON: {error.msg} at byte {len(text[: error.pos].encode())}") from error
    except RecursionError as error:
        raise InputError("the line is nested too deeply") from error
    except ValueError as error:  # Python's limit on the digits of a number
        raise InputError("the line holds a number with too many digits") from error
    if not isinstance(data, dict):
        raise InputError('the line must be an object such as {"prompt": "..."}')
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"the line has the key {key!r} twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise InputError(f"the line is not JSON: {name} is not a number there")


def _content(key: str, value: Any) -> Any:
    if key == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise InputError("prompt must be text that is not empty")
    elif not isinstance(value, list):
        raise InputError(f"{key} must be a list")
    return value


def _typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """A line's sampling parameters by name; SamplingParams checks their values."""
    unknown = sorted(set(options) - _PARAMETERS)
    if unknown:
        raise InputError(
            f"unknown key {unknown[0]!r}; a line takes a prompt and any of {', '.join(sorted(_PARAMETERS))}"
        )
    typed = dict(options)
    if "logit_bias" in typed:
        typed["logit_bias"] = _bias(typed["logit_bias"])
    return typed


def _bias(value: Any) -> dict[int, Any]:
    """JSON's keys are strings: {"42": -1.5} is token 42."""
    if not isinstance(value, dict) or not all(key.isascii() and key.isdecimal() and len(key) < 12 for key in value):
        raise InputError('logit_bias must be an object from token ids to numbers, such as {"42": -1.5}')
    return {int(key): bias for key, bias in value.items()}


class OrderedPrinter:
    """Puts objects out in input order: each as soon as everything before it is there, the rest at the end."""

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put = put
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0

    def put(self, index: int, result: dict[str, Any]) -> None:
        """Result number `index` is there."""
        self._ready[index] = result
        while self._next in self._ready:
            self._pop(self._next)
            self._next += 1

    def flush(self) -> None:
        """Put out what is left, gaps or not."""
        for index in sorted(self._ready):
            self._pop(index)

    def _pop(self, index: int) -> None:
        result = self._ready.pop(index)  # before it is written: an object cut off by a full disk is not tried again
        self._put({"index": index, **result})


def run_batch(
    llm: LLM,
    lines: Sequence[BatchLine],
    *,
    drafter: str,
    put: Callable[[dict[str, Any]], None],
) -> dict[int, str]:
    """Run all requests as one batch; returns what went wrong, by line."""
    printer = OrderedPrinter(put)
    indices = [i for i, line in enumerate(lines) if line.request is not None]
    bad: dict[int, str] = {}

    def finish(index: int, result: dict[str, Any], error: str | None) -> None:
        if error is not None:
            bad[index] = error
        printer.put(index, result)

    def finished(position: int, completion: Completion) -> None:
        finish(indices[position], as_object(completion, drafter=drafter), completion.error)

    for i, line in enumerate(lines):
        if line.request is None:
            finish(i, {"error": line.error}, line.error)
    try:
        llm.run([line.request for line in lines if line.request is not None], on_finish=finished)
    except terminal.OutputError:
        raise
    except BaseException:  # Ctrl-C above all: what is finished is not lost
        printer.flush()
        raise
    return bad
