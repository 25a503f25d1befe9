"""`generate --prompts FILE`: many prompts as one batch, one JSON line each in input order.

A line that cannot be served becomes an error object in its place; the others run. Interrupted, what is finished is
printed all the same. Errors of a line name its fields, not the command line's flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from verispec.cli import terminal
from verispec.cli.progress import CountDisplay
from verispec.cli.receipt_file import NoReceipts, ReceiptFile
from verispec.cli.show import as_object
from verispec.engine import Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM, Completion
from verispec.receipt.values import check_recordable
from verispec.strict_json import load_object, numbered
from verispec.types import SamplingParams

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
    receipts: NoReceipts | ReceiptFile,
    name: str,
) -> None:
    """Run all lines as one batch and print their objects; afterwards raise if some failed."""
    prepend = () if system is None else ({"role": "system", "content": system},)
    to_ids = _raw_ids if raw else lambda llm, messages: _chat_ids(llm, prepend, messages)
    check = check_recordable if receipts.wanted else _take_any
    parsed = [parse_line(line, llm=llm, defaults=params, to_ids=to_ids, drafter=drafter, check=check) for line in lines]
    with CountDisplay("generating", len(parsed), quiet=quiet) as display:

        def put(result: dict[str, Any]) -> None:
            with display.aside():
                terminal.out_json(result)
            display.advance()

        try:
            bad = run_batch(llm, parsed, drafter=drafter, put=put, receipts=receipts)
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


def _take_any(params: SamplingParams) -> None:
    pass


def parse_line(
    line: bytes,
    *,
    llm: LLM,
    defaults: SamplingParams,
    to_ids: ToIds,
    drafter: str,
    check: Callable[[SamplingParams], None],
) -> BatchLine:
    """A line as a request; `to_ids` turns the text of "prompt", or "messages", into what the model gets.

    `check` raises for parameters that the command cannot serve.
    """
    try:
        data = load_line(line)
        given = [key for key in _PROMPT_KEYS if key in data]
        if len(given) != 1:
            raise InputError(
                f"the line needs exactly one of {', '.join(_PROMPT_KEYS)}; it has {', '.join(given) or 'none'}"
            )
        content = _content(given[0], data.pop(given[0]))
        params = replace(defaults, **_typed(data))
        check(params)
        prompt = content if given[0] == "token_ids" else to_ids(llm, content)
        return BatchLine(llm.request(prompt, params, drafter=drafter))
    except VerispecError as error:
        return BatchLine(error=str(error))


def load_line(line: bytes) -> dict[str, Any]:
    """The object on a line."""
    return load_object(line, name="the line", example='{"prompt": "..."}')


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
        typed["logit_bias"] = numbered(typed["logit_bias"], name="logit_bias")
    return typed


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
    receipts: NoReceipts | ReceiptFile,
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
        receipts.put(indices[position], completion.receipts)
        finish(indices[position], as_object(completion, drafter=drafter), completion.error)

    for i, line in enumerate(lines):
        if line.request is None:
            finish(i, {"error": line.error}, line.error)
    try:
        requests = [line.request for line in lines if line.request is not None]
        llm.run(requests, on_finish=finished, receipts=receipts.wanted)
    except terminal.OutputError:
        raise
    except BaseException:  # Ctrl-C above all: what is finished is not lost
        printer.flush()
        raise
    return bad
