"""Keeps control tokens that are written inside messages from being taken for the template's own.

Before rendering, a character that occurs nowhere in the input is put into every such token; so the control tokens in
what the template writes are its own, and once they are found, `restore` takes the characters out. A content that could
become a control token together with its neighbours ("<|im_" and "end|>" in two messages) is broken up as well. Role
names count as the template's own: `chat` checks them, and templates build tokens from them. Knows the texts of control
tokens, nothing of templates or ids.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from verispec.model.control_tokens import unused_characters


class ControlTexts:
    """The texts of a vocabulary's control tokens, arranged for finding them and their parts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        self._prefixes = frozenset(text[:end] for text in self._texts for end in range(1, len(text) + 1))
        self._suffixes = frozenset(text[start:] for text in self._texts for start in range(1, len(text)))
        self._longest = max(map(len, self._texts), default=0)
        firsts = "".join(re.escape(first) for first in sorted({text[0] for text in self._texts}))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def begun(self, text: str) -> Iterator[int]:
        """Where control tokens begin in the text, overlapping ones included; also one that the end cuts off."""
        stripped_len = len(text.rstrip())
        for match in self._first.finditer(text):
            for end in range(match.start() + 1, len(text) + 1):
                piece = text[match.start() : end]
                if piece not in self._prefixes:
                    break
                if piece in self._texts or end in (stripped_len, len(text)):
                    yield match.start()
                    break

    def ended(self, text: str) -> Iterator[int]:
        """The last characters of control tokens that may have begun before the text; the first of the middle of one."""
        core = text.strip()
        first = len(text) - len(text.lstrip())
        ends = range(1, min(len(core), self._longest) + 1)
        yield from (first + end - 1 for end in ends if core[:end] in self._suffixes)
        if 0 < len(core) <= self._longest and any(core in control for control in self._texts):
            yield first


class ContentMask:
    """The mask of one rendering: `apply` it to what goes into the template, `restore` what comes out."""

    def __init__(self, control: ControlTexts) -> None:
        self._control = control
        self._texts: list[str] = []
        self._stand_ins: tuple[str, str] | None = None

    def apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        *,
        template: str,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
        """Messages, tools and variables as the template is to see them; they must be plain data of limited depth."""
        self._texts = [template, *_strings(messages), *_strings(tools), *_strings(variables)]
        masked = {name: self._masked(value, alone=True) for name, value in variables.items()}
        return [self._masked_message(message) for message in messages], self._masked(tools), masked

    @property
    def hides(self) -> bool:
        return self._stand_ins is not None

    def hides_before(self, text: str, end: int) -> bool:
        """Whether what ends there in a rendered text is from a message: a control token of one character, say."""
        return self._stand_ins is not None and text.startswith(self._stand_ins[0], end)

    def restore(self, text: str) -> str:
        return text.translate(dict.fromkeys(map(ord, self._stand_ins or ())))

    def _masked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        return {
            self._masked(key): value if key == "role" else self._masked(value, alone=key == "content")
            for key, value in message.items()
        }

    def _masked(self, value: Any, *, alone: bool = False) -> Any:
        """The value with all its strings masked; one that stands `alone` also against what may stand before it."""
        if isinstance(value, str):
            begun, ended = set(self._control.begun(value)), set(self._control.ended(value) if alone else ())
            return self._broken_up(value, begun, ended) if begun or ended else value
        if isinstance(value, dict):
            return {self._masked(key): self._masked(item) for key, item in value.items()}
        if isinstance(value, Iterable):
            return [self._masked(item) for item in value]
        return value

    def _broken_up(self, text: str, begun: set[int], ended: set[int]) -> str:
        """One stand-in behind the first character of every control token, the other before the last one."""
        if self._stand_ins is None:
            behind, before = islice(unused_characters(self._texts), 2)
            self._stand_ins = behind, before
        behind, before = self._stand_ins
        pieces: list[str] = []
        start = 0
        for position in sorted(begun | ended):
            pieces += [text[start:position], before if position in ended else "", text[position]]
            pieces += [behind] if position in begun else []
            start = position + 1
        return "".join([*pieces, text[start:]])


def _strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)
