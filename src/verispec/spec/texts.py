"""Texts seen before, and what followed in them: a suffix trie whose nodes are made when they are looked at.

The texts stand in a row, as one string with a character for every token: nothing has to be noted to search it, and a
thousand tokens are taken in within 10 us and searched within one. The occurrences of what was written last are found
newest first. How far each of them reaches back tells the longest matches; the tokens behind them are the children of a
node of the trie, and their counts its probabilities.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of matches that are told apart
_MOST_LOOKED_AT = 8  # occurrences of the longest match: the newest
_CODE = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_END = "\U0010ffff"  # behind each text: the last code point, larger than any token
_END_ID = ord(_END)


def characters(token_ids: Sequence[int]) -> str:
    """A text of one character for every token."""
    return array("I", token_ids).tobytes().decode(_CODE, "surrogatepass")


class Match(NamedTuple):
    """What was written last stands before these positions of `text`, at least `LENGTHS[level]` tokens of it."""

    text: str
    level: int
    positions: list[int]  # newest first

    def children(self, path: Sequence[int], positions: Sequence[int]) -> list[tuple[int, list[int]]]:
        """What follows behind `path` at these positions: each token with the positions that it follows, the most
        frequent first, of those that are as frequent the newest.

        A text that is still being written goes on, behind its end, with the path itself.
        """
        text, end, depth = self.text, len(self.text), len(path)
        found: dict[int, list[int]] = {}
        for position in positions:
            at = position + depth
            found.setdefault(ord(text[at]) if at < end else path[at - end], []).append(position)
        found.pop(_END_ID, None)
        return sorted(found.items(), key=lambda child: -len(child[1])) if len(found) > 1 else list(found.items())

    def follow(self, num_tokens: int) -> list[int]:
        """The path of the most frequent children."""
        text, end, path, positions = self.text, len(self.text), "", self.positions
        while len(path) < num_tokens:
            depth = len(path)
            behind = [
                text[p + depth : p + num_tokens] + path[max(0, p + depth - end) : max(0, p + num_tokens - end)]
                for p in positions
            ]
            agreed = _common(min(behind), max(behind)).partition(_END)[0]
            if agreed:
                path += agreed
                continue
            children = self.children([*map(ord, path)], positions)
            if not children:
                break
            token_id, positions = children[0]
            path += chr(token_id)
        return [*map(ord, path)]


def _common(one: str, other: str) -> str:
    """What both begin with."""
    if one == other:
        return one
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return one[:i]
    return min(one, other, key=len)


class Texts:
    """Texts in a row; the last is being written until it is closed."""

    def __init__(self) -> None:
        self.text = ""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Go on with the last text."""
        self.text += characters(token_ids)

    def close(self) -> None:
        self.text += _END

    def find_end(self) -> Match | None:
        """Where the end of the last text stands in what is before it."""
        return self._find(self.text, len(self.text) - 1, above=-1)

    def find(self, token_ids: Sequence[int], *, above: int = -1) -> Match | None:
        """Where the end of another text stands here; a match above a level, or none."""
        return self._find(characters(token_ids[-LENGTHS[-1] :]), len(self.text), above=above)

    def _find(self, written: str, end: int, *, above: int) -> Match | None:
        """The newest of the longest occurrences, before `end`, of what was `written` last.

        A longer match ends where a shorter one does, so each search goes on where the last one ended: all of them
        together read the text once.
        """
        text, level = self.text, above
        while level + 1 < len(LENGTHS) and LENGTHS[level + 1] <= len(written):
            length = LENGTHS[level + 1]
            found = text.rfind(written[-length:], 0, end)
            if found < 0:
                break
            level, end = level + 1, found + length
        if level == above:
            return None
        gram, positions = written[-LENGTHS[level] :], [end]
        while len(positions) < _MOST_LOOKED_AT and (found := text.rfind(gram, 0, positions[-1] - 1)) >= 0:
            positions.append(found + len(gram))
        return Match(text, level, positions)


class History:
    """Answers by salt. When the newer half of the tokens is full, the older half goes."""

    def __init__(self, num_tokens: int) -> None:
        self._half = num_tokens // 2
        self._newer: dict[str, Texts] = {}
        self._older: dict[str, Texts] = {}
        self._num_newer = 0

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep a text, or the end of it that fits."""
        if not self._half:
            return
        kept = token_ids[max(0, len(token_ids) + 1 - self._half) :]
        if self._num_newer + len(kept) + 1 > self._half:
            self._older, self._newer, self._num_newer = self._newer, {}, 0
        self._num_newer += len(kept) + 1
        texts = self._newer.setdefault(salt, Texts())
        texts.extend(kept)
        texts.close()

    def find(self, salt: str, token_ids: Sequence[int], *, above: int = -1) -> Match | None:
        """The longest match of the end of a text, if it is above a level; of two that are as long, the newer."""
        best = None
        for half in (self._newer, self._older):
            texts = half.get(salt)
            found = texts.find(token_ids, above=above) if texts is not None else None
            if found is not None:
                best, above = found, found.level
        return best
