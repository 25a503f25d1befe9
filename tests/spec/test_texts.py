"""Texts and what followed in them: the longest match is found, whatever stands behind it, and answers are forgotten."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from verispec.spec.match_rates import Chances
from verispec.spec.suffix import grown
from verispec.spec.texts import LENGTHS, History, Match, Texts
from verispec.spec.tree import TreeShape


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


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_match_is_found_and_followed(seed: int) -> None:
    """Against a search of the whole text, which is short enough for every occurrence to be looked at."""
    rng = random.Random(seed)
    piece = [rng.randrange(30) for _ in range(rng.randrange(2, 40))]
    text = [rng.randrange(30) for _ in range(30)] + piece + [30, 31] + piece[: rng.randrange(1, len(piece) + 1)]
    texts = Texts()
    for start in range(0, len(text), 3):
        texts.extend(text[start : start + 3])
    reach = {p: common_len(text[:p], text) for p in range(1, len(text))}
    longest = max(reach.values())
    match = texts.find_end()
    assert (match is not None) == (longest > 0)
    if match is None:
        return
    pad = len(texts.text) - len(text)
    assert match.level == level_of(longest)
    assert {p - pad for p in match.positions} == {p for p, n in reach.items() if level_of(n) == match.level}
    expected = list(text)
    positions = [p - pad for p in match.positions]
    for _ in range(9):
        votes = Counter(expected[p] for p in positions)
        expected.append(votes.most_common(1)[0][0])
        positions = [p + 1 for p in positions if expected[p] == expected[-1]]
    assert match.follow(9) == expected[len(text) :]
    chain = grown(match, 9, TreeShape.chain(9), Chances(0.5, 0.5, 0.5))
    assert (list(chain.token_ids), chain.is_chain) == (expected[len(text) :], True)


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


def test_a_match_in_another_text_ends_with_it() -> None:
    match = texts_of([1, 2, 3, 4], [5, 6, 3, 4, 7]).find([9, 3, 4])
    assert isinstance(match, Match)
    assert LENGTHS[match.level] == 2
    assert match.follow(5) == [7]
    assert texts_of([1, 2, 3]).find([8, 8, 3]).follow(4) == []  # type: ignore[union-attr]
    assert texts_of([1, 2, 3]).find([4]) is None


def test_the_path_is_that_of_the_most_frequent_child_at_each_node() -> None:
    """Whatever the occurrences agree on is taken at once, which changes nothing; closed texts and loops included."""
    rng, num_splits = random.Random(5), 0
    for _ in range(3000):
        texts = Texts()
        for is_last in (False, False, True):
            texts.extend([rng.randrange(2) for _ in range(rng.randrange(1, 12))] * rng.choice((1, 1, 3)))
            if not is_last or rng.random() < 0.2:
                texts.close()
        end = len(texts.text)
        positions = sorted(rng.sample(range(end), min(end, rng.randrange(1, 6))), reverse=True)
        match, num_tokens = Match(texts.text, 0, positions), rng.randrange(1, 20)
        path: list[int] = []
        while len(path) < num_tokens and (children := match.children(path, positions)):
            num_splits += len(children) > 1
            path.append(children[0][0])
            positions = children[0][1]
        assert match.follow(num_tokens) == path
    assert num_splits > 1000


def test_every_token_of_a_large_vocabulary_is_a_character() -> None:
    """Also those whose numbers are surrogates or no characters at all."""
    ids = [0, 10, 0xD800, 0xDFFF, 0xFFFF, 0x10000, 0x10FFFE]
    match = texts_of(ids).find(ids[:3])
    assert isinstance(match, Match)
    assert match.follow(9) == ids[3:]


def test_history_is_bounded_and_the_oldest_goes() -> None:
    history = History(64)
    for i in range(50):
        history.add("a", [100 + i, 200 + i, 300 + i])
        kept = sum(len(t.text) for half in (history._newer, history._older) for t in half.values())
        assert kept <= 64 + 2 * 3, "beside what stands before the first text of each half"
    assert history.find("a", [149, 249]) is not None
    assert history.find("a", [100, 200]) is None
    history.add("a", range(1000))
    assert history.find("a", [997]) is not None
    assert history.find("a", [500]) is None
    nothing = History(0)
    nothing.add("a", [1, 2, 3])
    assert nothing.find("a", [1, 2]) is None
