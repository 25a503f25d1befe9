"""Texts seen before, and what followed in them: a suffix trie whose nodes are made when they are looked at.

The texts stand in a row. For n-grams of three lengths every position knows where the same n-gram ended before, so the
occurrences of what was written last are a chain of positions, newest first. How far each of them reaches back tells the
longest matches; the tokens behind them are the children of a node of the trie, and their counts its probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from verispec.sampling.draw import NO_TOKEN

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of matches that are told apart
_ORDERS = (3, 2, 1)  # n-grams that are looked up, the longer ones first
_MOST_LOOKED_AT = 8  # occurrences of an n-gram


class Match(NamedTuple):
    """What was written last stands before these positions of `texts`, at least `LENGTHS[level]` tokens of it."""

    texts: Texts
    level: int
    positions: list[int]  # newest first

    def children(self, path: Sequence[int], positions: Sequence[int]) -> list[tuple[int, list[int]]]:
        """What follows behind `path` at these positions: each token with the positions that it follows, the most
        frequent first, of those that are as frequent the newest.

        A text that is still being written goes on, behind its end, with the path itself.
        """
        ids, end, depth = self.texts.token_ids, len(self.texts.token_ids), len(path)
        found: dict[int, list[int]] = {}
        for position in positions:
            at = position + depth
            found.setdefault(ids[at] if at < end else path[at - end], []).append(position)
        found.pop(NO_TOKEN, None)
        return sorted(found.items(), key=lambda child: -len(child[1])) if len(found) > 1 else list(found.items())

    def follow(self, num_tokens: int) -> list[int]:
        """The path of the most frequent children."""
        path: list[int] = []
        positions = self.positions
        while len(positions) > 1 and len(path) < num_tokens:
            children = self.children(path, positions)
            if not children:
                return path
            token_id, positions = children[0]
            path.append(token_id)
        if len(path) == num_tokens:
            return path
        path = self.texts.token_ids[positions[0] : positions[0] + num_tokens]
        if NO_TOKEN in path:
            return path[: path.index(NO_TOKEN)]
        while len(path) < num_tokens:  # what is behind the end of the text is the path itself
            path += path[: num_tokens - len(path)]
        return path


class Texts:
    """Texts in a row. NO_TOKEN stands before each."""

    def __init__(self) -> None:
        self.token_ids = [NO_TOKEN] * max(_ORDERS)
        self._newest: list[dict[int, int]] = [{} for _ in _ORDERS]  # hash of an n-gram -> position behind it
        self._earlier = [[0] * len(self.token_ids) for _ in _ORDERS]  # by the position, less one; 0: nowhere

    def extend(self, token_ids: Iterable[int]) -> None:
        """Go on with the last text."""
        ids = self.token_ids
        (threes, twos, ones), (before_three, before_two, before_one) = self._newest, self._earlier
        _, a, b = ids[-3:]
        for end, c in enumerate(token_ids, start=len(ids) + 1):
            three, two, one = hash((a, b, c)), hash((b, c)), hash((c,))
            before_three.append(threes.get(three, 0))
            before_two.append(twos.get(two, 0))
            before_one.append(ones.get(one, 0))
            threes[three] = twos[two] = ones[one] = end
            ids.append(c)
            a, b = b, c

    def find_end(self) -> Match | None:
        """Where the end of the last text stands in what is before it."""
        for order, earlier in enumerate(self._earlier):
            if earlier[-1]:
                return self._match(order, earlier[-1], self.token_ids, above=-1)
        return None

    def find(self, token_ids: Sequence[int], *, above: int = -1) -> Match | None:
        """Where the end of another text stands here; a match above a level, or none."""
        for order, n in enumerate(_ORDERS):
            if order and LENGTHS.index(n) <= above:
                return None
            position = self._newest[order].get(hash(tuple(token_ids[-n:])))
            found = self._match(order, position, token_ids, above=above) if position else None
            if found is not None:
                return found
        return None

    def _match(self, order: int, position: int, token_ids: Sequence[int], *, above: int) -> Match | None:
        """The longest of the occurrences of an n-gram, the newest of which ends at `position`."""
        earlier, level = self._earlier[order], LENGTHS.index(_ORDERS[order])
        found: list[int] = []
        if order:  # a longer one would be an occurrence of the longer n-gram
            while position and len(found) < _MOST_LOOKED_AT:
                found.append(position)
                position = earlier[position - 1]
            return Match(self, level, found)
        level = max(level, above + 1)
        for _ in range(_MOST_LOOKED_AT):
            reached = self._reach(position, token_ids, level)
            if reached > level:
                level, found = reached, [position]
            elif reached == level:
                found.append(position)
            position = earlier[position - 1]
            if not position:
                break
        return Match(self, level, found) if found else None

    def _reach(self, position: int, token_ids: Sequence[int], level: int) -> int:
        """The level of a match before `position`, if it is this one or above; -1 otherwise."""
        ids, end, reached = self.token_ids, len(token_ids), -1
        for higher in range(level, len(LENGTHS)):
            length = LENGTHS[higher]
            if length > position or ids[position - length : position] != token_ids[end - length : end]:
                break
            reached = higher
        return reached
