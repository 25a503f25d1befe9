"""The batched rule `match` against a walk in plain Python, on random trees with duplicates."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scale import scaled
from verispec.sampling.judge import judge_by_draws
from verispec.types import NO_PARENT, Draft, Verdict


def walk(draft: Draft, draws: list[int]) -> Verdict:
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
@given(st.lists(scored_drafts(), max_size=6))
def test_judge_equals_the_walk(batch: list[tuple[Draft, list[int]]]) -> None:
    found = judge_by_draws([d for d, _ in batch], [np.array(draws, np.int64) for _, draws in batch])
    assert found == [walk(draft, draws) for draft, draws in batch]


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    draft = Draft.chain([1, 2, 3, 4])
    assert judge_by_draws([draft], [np.array([1, 2, 9, 4, 5])]) == [Verdict((0, 1), 9)]
    assert judge_by_draws([draft], [np.array([1, 2, 3, 4, 5])]) == [Verdict((0, 1, 2, 3), 5)]
    assert judge_by_draws([draft], [np.array([7, 2, 3, 4, 5])]) == [Verdict((), 7)]
    assert judge_by_draws([Draft()], [np.array([7])]) == [Verdict((), 7)]
