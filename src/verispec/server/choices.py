"""One sample of an answer, as far as it has come: its tokens, its text, and the items that it consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from verispec.server.tool_reader import Part, Reader
from verispec.types import FinishReason, SampleOutput, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Item:
    """A text, or the call of a tool with the name."""

    name: str | None
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False  # the arguments of a call
    begun: str = ""  # the arguments that the client gave, in front of the pieces

    @property
    def text(self) -> str:
        """The text that the client does not have yet; or the arguments, which are of use as a whole alone."""
        return self.begun + "".join(self.pieces)

    @property
    def is_told(self) -> bool:
        """Whether any of it is news to the client."""
        return bool(self.pieces)


class ItemPart(NamedTuple):
    """What became visible of the item with this number."""

    item: int
    part: Part


class Commit(NamedTuple):
    """What became visible of one choice: its event, less what the client has seen already. `end` counts its tokens."""

    choice: int
    event: TokenEvent
    logprobs: TokenLogprobs
    pieces: tuple[str, ...]
    parts: tuple[ItemPart, ...]
    end: int

    @property
    def text(self) -> str:
        """The text that became final."""
        return "".join([each.part.text for each in self.parts if each.part.name is None])


@dataclass(slots=True)
class Choice:
    """One sample, as far as it has come."""

    reader: Reader
    entry_parts: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    items: list[Item] = field(default_factory=list)
    accepted_lens: list[int] = field(default_factory=list)  # of each draft that was judged
    draft_lens: list[int] = field(default_factory=list)
    output: SampleOutput | None = None

    @property
    def entries(self) -> TokenLogprobs:
        """Its tokens so far."""
        if self.output is not None:
            return self.output.logprobs
        return TokenLogprobs.of(entry for part in self.entry_parts for entry in part)

    @property
    def text(self) -> str:
        """Its text so far, without calls, behind what the client gave."""
        return "".join([item.text for item in self.items if item.name is None])

    @property
    def calls(self) -> list[Item]:
        """The tools it calls, those aside whose calls the client gave."""
        return [item for item in self.items if item.name is not None and item.is_told]

    @property
    def has_called(self) -> bool:
        """Whether it ended with calls, all of them whole."""
        calls = [item for item in self.items if item.name is not None]
        is_stopped = self.output is not None and self.output.finish_reason is FinishReason.STOP
        return is_stopped and bool(calls) and all(item.is_complete for item in calls)

    def go_on_behind(self, text: str) -> None:
        """Begin behind what the client has: its items keep their numbers, and are not told again."""
        self.read([text])
        for item in self.items:
            item.begun, item.pieces = "" if item.name is None else item.text, []

    def take(self, event: TokenEvent) -> None:
        """Count an event's tokens and drafts."""
        self.entry_parts.append(event.logprobs)
        self.num_tokens += len(event.logprobs)
        if event.num_accepted or event.rejected_ids:
            self.accepted_lens.append(event.num_accepted)
            self.draft_lens.append(event.num_accepted + len(event.rejected_ids))
        self.output = event.output

    def read(self, pieces: Iterable[str], *, is_end: bool = False) -> tuple[ItemPart, ...]:
        """What these pieces of text, and perhaps the end behind them, make visible."""
        parts = self.reader.read("".join(pieces))
        if is_end:
            parts += self.reader.finish()
            if not parts and not any(item.is_told for item in self.items):
                self.items.append(Item(None, [""]))  # nothing was said, which is a text too
        return tuple([ItemPart(self._item(part), part) for part in parts])

    def _item(self, part: Part) -> int:
        """The number of the item that a part belongs to, which has it now."""
        if part.opens or not self.items or self.items[-1].name != part.name:
            self.items.append(Item(part.name))
        item = self.items[-1]
        item.pieces.append(part.text)
        item.is_complete |= part.closes
        return len(self.items) - 1
