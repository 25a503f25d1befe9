"""Answers as parts, as they come: text, and calls of tools with their arguments.

What has been told after some text depends on that text alone, not on how it was cut into pieces, and nothing is taken
back. So text that may become a call is held until that is known. Where a grammar guides the answer, a call is known by
its name, and its arguments are told as they come; otherwise it is told once it is whole, and what turns out to be no
call of a known tool is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from verispec.server.tool_formats import ToolFormat


class Part(NamedTuple):
    """A piece of text; or, with a name, of the arguments of a call: `opens` is the first piece, `closes` the last."""

    text: str
    name: str | None = None
    opens: bool = False
    closes: bool = False


class Reader(Protocol):
    """Reads one answer."""

    def read(self, text: str) -> list[Part]:
        """What more text tells."""

    def finish(self) -> list[Part]:
        """What is told by the end of the answer."""


class TextReader:
    """An answer without tools is its text."""

    def read(self, text: str) -> list[Part]:
        return [Part(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class _Written(msgspec.Struct):
    """A call as models write it; `parameters` is Llama's word."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


class ToolReader:
    """Finds calls of the tools with these `names`. `is_exact`: a grammar allows nothing but text and calls of this
    format. `is_leading`: what does not begin with a call has none.
    """

    def __init__(self, fmt: ToolFormat, names: Sequence[str], *, is_exact: bool, is_leading: bool) -> None:
        self._format = fmt
        self._names = frozenset(names)
        self._is_exact = is_exact
        self._is_leading = is_leading or fmt.is_leading
        opened = "" if fmt.is_leading else fmt.open + fmt.begin
        heads = fmt.heads(names)
        self._first = {opened + head: name for head, name in heads.items()}
        self._next = {fmt.tail + (fmt.between or "") + head: name for head, name in heads.items()}
        self._held = ""
        self._name = ""  # of the call whose arguments are being read
        self._arguments = _ObjectEnd()
        self._has_called = False
        self._state: Callable[[list[Part]], bool] = self._before_call

    def read(self, text: str) -> list[Part]:
        self._held += text
        found: list[Part] = []
        while self._held and self._state(found):
            pass
        return found

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == self._in_body and (calls := self._calls(held.lstrip().removeprefix(self._mark))):
            return calls
        is_syntax = self._state == self._after_call or (self._has_called and not held.strip())
        return [Part(held)] if held and not is_syntax else []

    @property
    def _mark(self) -> str:
        """What is no part of a call's JSON."""
        return "" if self._format.is_leading else self._format.open

    # Each of these takes a step from what is held, and tells whether there may be another one.

    def _before_call(self, found: list[Part]) -> bool:
        mark, begun = self._format.open, self._held.lstrip()
        if self._is_leading:
            if begun.startswith(mark):
                return self._go(self._in_head if self._is_exact else self._in_body)
            return False if mark.startswith(begun) else self._go(self._in_text)
        start = self._held.find(mark)
        if start >= 0:
            self._tell_text(found, len(self._held[:start].rstrip()))
            return self._go(self._in_head if self._is_exact else self._in_body)
        partial_len = next(n for n in range(len(mark) - 1, -1, -1) if self._held.endswith(mark[:n]))
        self._tell_text(found, len(self._held[: len(self._held) - partial_len].rstrip()))
        return False

    def _in_text(self, found: list[Part]) -> bool:
        self._tell_text(found, len(self._held))
        return False

    def _in_body(self, found: list[Part]) -> bool:
        """A call that no grammar guides. Without a mark behind it, it goes on to the end."""
        close = self._format.close
        end = self._held.find(close) if close else -1
        if end < 0:
            return False
        calls = self._calls(self._held[:end].lstrip().removeprefix(self._mark))
        if not calls:
            self._tell_text(found, end + len(close))
        found += calls
        self._held = self._held[end + len(close) :] if calls else self._held
        return self._go(self._before_call)

    def _in_head(self, found: list[Part]) -> bool:
        return self._opened(found, self._held.lstrip(), self._first)

    def _in_arguments(self, found: list[Part]) -> bool:
        end = self._arguments.find(self._held)
        text, self._held = self._held[:end], self._held[end:]
        found.append(Part(text, self._name, closes=self._arguments.is_found))
        return self._arguments.is_found and self._go(self._after_call)

    def _after_call(self, found: list[Part]) -> bool:
        return self._opened(found, self._held, self._next)

    def _opened(self, found: list[Part], text: str, heads: dict[str, str]) -> bool:
        for head, name in heads.items():
            if text.startswith(head):
                self._held, self._name, self._has_called = text[len(head) :], name, True
                self._arguments = _ObjectEnd()
                found.append(Part("", name, opens=True))
                return self._go(self._in_arguments)
        is_possible = self._state == self._after_call or any(head.startswith(text) for head in heads)
        return False if is_possible else self._go(self._in_text)

    def _go(self, state: Callable[[list[Part]], bool]) -> bool:
        self._state = state
        return True

    def _tell_text(self, found: list[Part], end: int) -> None:
        if end:
            found.append(Part(self._held[:end]))
        self._held = self._held[end:]

    def _calls(self, body: str) -> list[Part]:
        """The calls that a text is; none if it is something else."""
        try:
            listed = self._by_marks(body) if self._format.args else _by_json(body)
            arguments = [(bytes(call.arguments) or bytes(call.parameters) or b"{}").decode() for call in listed]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return []
        if not all(call.name in self._names for call in listed) or not all(a.startswith("{") for a in arguments):
            return []
        self._has_called = self._has_called or bool(listed)
        return [Part(text, call.name, opens=True, closes=True) for call, text in zip(listed, arguments, strict=True)]

    def _by_marks(self, body: str) -> list[_Written]:
        found = []
        for part in body.split(self._format.open):
            name, _, text = part.partition(self._format.args)
            arguments = msgspec.json.decode(text.strip(), type=msgspec.Raw)
            found.append(_Written(name.partition(self._format.call_id)[0].strip(), arguments))
        return found


def _by_json(body: str) -> list[_Written]:
    written = msgspec.json.decode(body, type=_Written | list[_Written])
    return written if isinstance(written, list) else [written]


class _ObjectEnd:
    """Finds where a JSON object ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self.is_found = False
        self._depth = 0
        self._is_quoted = self._is_escaped = False

    def find(self, text: str) -> int:
        """The end of what belongs to the object."""
        for i, char in enumerate(text, start=1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_quoted, self._is_escaped = char != '"', char == "\\"
            elif char == '"':
                self._is_quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_found = True
                    return i
        return len(text)
