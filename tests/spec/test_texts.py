"""Texts and what followed in them: the longest match is found, whatever stands behind it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from verispec.spec.texts import LENGTHS, Match, Texts


def texts_of(*texts: Sequence[int]) -> Texts:
    texts_ = Texts()
    for text in texts:
        texts_.extend(text)
        texts_.close()
    return texts_


def common_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at their ends are equal."""
    return next(
        (i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b))
    )


def level_of(length: int) -> int:
    return sum(n <= length for n in LENGTHS) - 1


@pytest.mark.parametrize("num_tokens", [2, 3, 5])
def test_the_longest_match_is_found_among_many_shorter_ones(num_tokens: int) -> None:
    """Texts of few different tokens, in which each short piece occurs hundreds of times."""
    rng = random.Random(num_tokens)
    reached: set[int] = set()
    for _ in range(60):
        text = [rng.randrange(num_tokens) for _ in range(300)]
        copied = rng.randrange(0, 250)
        text += text[copied : copied + rng.randrange(1, 40)]
        levels = {p: level_of(common_len(text[:p], text)) for p in range(1, len(text))}
        longest = max(levels.values())
        texts = Texts()
        texts.extend(text)
        match = texts.find_end()
        assert isinstance(match, Match)
        assert match.level == longest
        assert match.positions == sorted((p for p, level in levels.items() if level == longest), reverse=True)[:8]
        for above in range(-1, len(LENGTHS)):
            other = texts_of(text).find([99, *text[-20:]], above=above)
            assert (other is not None) == (above < level_of(20))
        reached.add(longest)
    assert len(reached) > 4


def test_a_long_match_is_found_behind_newer_copies_of_its_end() -> None:
    piece, end = list(range(100, 124)), [121, 122, 123]
    text = [1, *piece, 200, 2]
    for i in range(9):
        text += [*end, 300 + i]
    match = texts_of(text).find([3, *piece])
    assert isinstance(match, Match)
    assert LENGTHS[match.level] == len(piece)
    assert match.follow(2) == [200, 2]
