"""`generate --prompts FILE`: many prompts as one batch, one JSON line each in input order.

A line that cannot be served becomes an error object in its place; the others run. Interrupted, what is finished is
printed all the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

from verispec.batch.prompts import LineReader, as_object
from verispec.cli import terminal
from verispec.cli.progress import CountDisplay
from verispec.cli.receipt_file import NoReceipts, ReceiptFile
from verispec.errors import InputError, VerispecError
from verispec.llm import Completion


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
