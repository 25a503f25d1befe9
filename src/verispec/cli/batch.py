"""`generate --prompts FILE`: many prompts as one batch, one JSON line each in input order.

A line that cannot be served becomes an error object in its place; the others run. Interrupted, what is finished is
printed all the same. Errors of a line name its fields, not the command line's flags. Keys that mean nothing here go
through to the output; those that look like a misspelt parameter are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from verispec.cli import terminal
from verispec.cli.progress import CountDisplay
from verispec.cli.receipt_file import NoReceipts, ReceiptFile
from verispec.cli.show import OBJECT_KEYS, as_object
from verispec.engine import Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM, Completion
from verispec.receipt.values import check_recordable
from verispec.strict_json import load_object
from verispec.text.prompts import CONTENT_KEYS, PARAMETERS, PromptSpec, spec
from verispec.types import SamplingParams

_LIKENESS = 0.8  # of a key to one that is known, from which on it is taken for a slip


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the file: a request, or why there is none; and what goes through to the output."""

    request: Request | None = None
    error: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LineReader:
    """Turns lines into requests. `defaults` hold where a line says nothing; without a seed, line i has seed i."""

    llm: LLM
    defaults: SamplingParams
    drafter: str
    raw: bool = False
    system: str | None = None
    recorded: bool = False

    def parse(self, index: int, line: bytes) -> BatchLine:
        extra: dict[str, Any] = {}
        try:
            data = load_object(line, name="the line", example='{"prompt": "..."}')
            extra = {key: data.pop(key) for key in list(data) if key not in (*CONTENT_KEYS, *PARAMETERS)}
            _check_extra(extra)
            if data.get("seed") is None:
                data["seed"] = index if self.defaults.seed is None else self.defaults.seed
            asked = spec(data, self.defaults, name="the line")
            if self.recorded:
                check_recordable(asked.params)
            return BatchLine(self.llm.request(self._prompt(asked), asked.params, drafter=self.drafter), extra=extra)
        except VerispecError as error:
            return BatchLine(error=str(error), extra={key: extra[key] for key in extra if key not in OBJECT_KEYS})

    def _prompt(self, asked: PromptSpec) -> str | list[int]:
        """Text or ids as the model gets them; a line's own system message replaces the command's."""
        content, messages = asked.content, asked.messages
        if isinstance(content, list):
            return content
        if content is not None:
            if not content.strip():
                raise InputError("prompt must be text that is not empty")
            if self.raw:
                return content
            messages = [{"role": "user", "content": content}]
        if self.raw:
            raise InputError("messages need the chat template, which --raw turns off")
        if self.system is not None and _lacks_system(messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return self.llm.chat_ids(messages)


def _lacks_system(messages: Any) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and first.get("role") != "system"


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
    lines: Sequence[bytes],
    reader: LineReader,
    *,
    stats: bool,
    quiet: bool,
    receipts: NoReceipts | ReceiptFile,
    name: str,
) -> None:
    """Run all lines as one batch and print their objects; afterwards raise if some failed."""
    parsed = [reader.parse(i, line) for i, line in enumerate(lines)]
    running = [i for i, line in enumerate(parsed) if line.request is not None]
    bad = {i: line.error for i, line in enumerate(parsed) if line.request is None}
    with CountDisplay("generating", len(parsed), quiet=quiet) as display:

        def put(result: dict[str, Any]) -> None:
            with display.aside():
                terminal.out_json(result)

        def finish(index: int, result: dict[str, Any]) -> None:
            display.advance()
            printer.put(index, {**parsed[index].extra, **result})

        def finished(position: int, completion: Completion) -> None:
            index = running[position]
            receipts.put(index, completion.receipts)
            if completion.error is not None:
                bad[index] = completion.error
            finish(index, as_object(completion, drafter=reader.drafter, stats=stats))

        printer = OrderedPrinter(put)
        for index, error in list(bad.items()):
            finish(index, {"error": error})
        try:
            requests = [line.request for line in parsed if line.request is not None]
            reader.llm.run(requests, on_finish=finished, receipts=receipts.wanted)
        except terminal.OutputError:
            raise
        except BaseException as error:  # Ctrl-C above all: what is finished is not lost
            printer.flush()
            if isinstance(error, KeyboardInterrupt):
                terminal.note(f"{name}: interrupted; {display.num_done} of {len(parsed)} lines are finished")
            raise
    if bad:
        count = f"{len(bad)} of {len(parsed)} lines" if len(parsed) > 1 else "the only line"
        raise VerispecError(f"{name}: {count} failed; line {min(bad) + 1}: {bad[min(bad)]}")


def _check_extra(extra: Mapping[str, Any]) -> None:
    for key in extra:
        plain = key.lower().replace("-", "_")
        meant = get_close_matches(plain, (*CONTENT_KEYS, *PARAMETERS), n=1, cutoff=_LIKENESS)
        if meant:
            raise InputError(f"unknown key {key!r}; did you mean {meant[0]}?")
        if key in OBJECT_KEYS:
            raise InputError(f"the key {key!r} is one of the output's own; it cannot go through under that name")


class OrderedPrinter:
    """Puts objects out in input order: each as soon as everything before it is there, the rest at the end."""

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put = put
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0

    def put(self, index: int, result: dict[str, Any]) -> None:
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
