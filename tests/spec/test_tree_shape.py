"""Shapes of draft trees: what is written, what is refused, and what fits into a budget."""

from __future__ import annotations

import pytest

from verispec.errors import InputError
from verispec.spec.tree import TreeShape


@pytest.mark.parametrize(
    ("text", "branching", "keep"),
    [
        ("chain:3", (1, 1, 1), (1, 1, 1)),
        ("branch:3,2,1", (3, 2, 1), (3, 6, 6)),
        ("branch:4", (4,), (4,)),
        ("beam:3,3", (3, 3, 3), (3, 3, 3)),
        ("beam:1,2", (1, 1), (1, 1)),
    ],
)
def test_what_is_written_is_what_grows(text: str, branching: tuple[int, ...], keep: tuple[int, ...]) -> None:
    shape = TreeShape.parse(text)
    assert (shape.branching, shape.keep, str(shape)) == (branching, keep, text)
    assert shape.num_nodes == sum(keep)
    assert shape.is_chain == all(k == 1 for k in keep)


@pytest.mark.parametrize(
    "text",
    [
        *("", "chain", "chain:", "chain:0", "chain:-1", "chain:1,2", "beam:3", "beam:3,0", "beam:1,2,3", "branch:"),
        *("branch:2,0", "branch:2,,2", "star:3", "chain:3 ", "beam:2.5,1", "chain:257", "branch:17,16", "beam:100,100"),
        *("chain:" + "9" * 5000, "branch:" + "1," * 300 + "1"),
    ],
)
def test_anything_else_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(InputError, match=r"chain:N|at most 256"):
        TreeShape.parse(text)


@pytest.mark.parametrize(
    ("text", "max_nodes", "max_depth", "fits"),
    [
        ("chain:5", 3, 9, "chain:3"),
        ("chain:5", 9, 2, "chain:2"),
        ("chain:5", 0, 9, "chain:0"),
        ("branch:3,2,1", 15, 9, "branch:3,2,1"),
        ("branch:3,2,1", 14, 9, "branch:3,2"),
        ("branch:3,2,1", 2, 9, "branch:2"),
        ("beam:3,4", 12, 9, "beam:3,4"),
        ("beam:3,4", 8, 9, "beam:3,2"),
        ("beam:3,4", 2, 9, "beam:2,1"),
        ("beam:3,4", 12, 1, "beam:3,1"),
    ],
)
def test_what_does_not_fit_loses_whole_levels(text: str, max_nodes: int, max_depth: int, fits: str) -> None:
    shape = TreeShape.parse(text).within(max_nodes, max_depth)
    assert str(shape) == fits
    assert shape.num_nodes <= max_nodes
    assert shape.depth <= max_depth


@pytest.mark.parametrize("text", ["chain:7", "branch:3,2,2", "beam:4,5"])
def test_a_shape_within_itself_is_itself_and_within_nothing_is_empty(text: str) -> None:
    shape = TreeShape.parse(text)
    assert shape.within(shape.num_nodes, shape.depth) == shape
    for nodes, depth in ((0, 9), (9, 0)):
        assert shape.within(nodes, depth).num_nodes == 0
