"""Who is asked: the holder of the longest prefix, unless it is too busy or lost."""

from __future__ import annotations

from verispec.ray.prefixes import BLOCK_LEN, MAX_IMBALANCE, PrefixIndex, prefix_keys, ranked

PROMPT = list(range(3 * BLOCK_LEN + 5))
IDLE = {"a": 0, "b": 0, "c": 0}


def test_equal_beginnings_have_equal_names() -> None:
    keys = prefix_keys(PROMPT, "")
    assert len(keys) == len(set(keys)) == 3
    other = [*PROMPT[: 2 * BLOCK_LEN], 7, *PROMPT[2 * BLOCK_LEN + 1 :]]
    assert prefix_keys(other, "")[:2] == keys[:2]
    assert prefix_keys(other, "")[2] != keys[2]
    assert not set(keys) & set(prefix_keys(PROMPT, "another tenant"))
    assert prefix_keys(PROMPT[: BLOCK_LEN - 1], "") == ()


def test_the_holder_of_the_longest_prefix_is_preferred() -> None:
    index, keys = PrefixIndex(), prefix_keys(PROMPT, "")
    index.note(keys[:2], "b")
    index.note(keys[:1], "a")
    assert ranked(index, keys, IDLE)[0] == ["b"]
    assert ranked(index, keys[:1], IDLE)[0] == ["a"]
    assert ranked(index, keys, {"a": 0, "c": 0})[0] == ["a"]  # b is gone
    assert ranked(index, (), IDLE) == [["a", "b", "c"]]
    assert ranked(index, keys, {}) == []


def test_load_and_losses_come_first() -> None:
    index, keys = PrefixIndex(), prefix_keys(PROMPT, "")
    index.note(keys, "b")
    assert ranked(index, keys, {"a": 1, "b": 1 + MAX_IMBALANCE, "c": 2})[0] == ["b"]
    assert ranked(index, keys, {"a": 1, "b": 2 + MAX_IMBALANCE, "c": 2}) == [["a"], ["c"], ["b"]]
    assert ranked(index, keys, IDLE, avoid={"b"}) == [["a", "c"]]
    assert ranked(index, keys, {"b": 3}, avoid={"b"}) == [["b"], ["b"]]  # better than nobody


def test_the_oldest_are_forgotten() -> None:
    index = PrefixIndex(max_keys=2)
    for key, name in ((1, "a"), (2, "b"), (1, "a"), (3, "c")):
        index.note([key], name)
    assert [index.holder([key], IDLE) for key in (1, 2, 3)] == ["a", None, "c"]
