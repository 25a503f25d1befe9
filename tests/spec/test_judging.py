"""The rule `match` against a descent from child to child, on random trees with duplicates."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scale import scaled
from verispec.spec.judging import match
from verispec.types import NO_PARENT, Draft, Verdict


def descent(draft: Draft, draws: list[int]) -> Verdict:
    node, path = NO_PARENT, []
    while True:
        children = [i for i, p in enumerate(draft.parents) if p == node and draft.token_ids[i] == draws[node + 1]]
        if not children:
            return Verdict(tuple(path), draws[node + 1])
        node = children[0]
        path.append(node)


@st.composite
def scored_drafts(draw: st.DrawFn) -> tuple[Draft, list[int]]:
    num_nodes = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(NO_PARENT, i - 1)) for i in range(num_nodes))
    tokens = tuple(draw(st.integers(0, 2)) for _ in range(num_nodes))
    draws = [draw(st.integers(-1, 2)) for _ in range(num_nodes + 1)]
    return Draft(tokens, parents), draws


@settings(max_examples=scaled(500), deadline=None)
@given(scored_drafts())
def test_match_equals_the_descent(scored: tuple[Draft, list[int]]) -> None:
    assert match(*scored) == descent(*scored)


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    draft = Draft.chain([1, 2, 3, 4])
    assert match(draft, [1, 2, 9, 4, 5]) == Verdict((0, 1), 9)
    assert match(draft, [1, 2, 3, 4, 5]) == Verdict((0, 1, 2, 3), 5)
    assert match(draft, [7, 2, 3, 4, 5]) == Verdict((), 7)
    assert match(Draft(), [7]) == Verdict((), 7)
