"""What drafter `suffix` promises is what comes true: learned from committed text, drafted or not, and once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from verispec.spec.drafter import Refusal
from verispec.spec.match_rates import ALL, FEW, MOST, ONE, MatchKind, believed
from verispec.spec.rate import Rate
from verispec.spec.speculation import Speculation
from verispec.spec.suffix import SuffixConfig, SuffixDrafter
from verispec.spec.texts import LENGTHS
from verispec.types import Draft, SamplingParams, Verdict

SEEN_ONCE = [9, 1, 2, 3, 4, 7, 9]  # the last token was followed by 1 2 3 4
EVENLY = [9, 1, 5, 9, 2, 7, 9]  # by 2 as often as by 1, which is older
MOSTLY = [9, 1, 5, 9, 2, 6, 9, 2, 7, 9]  # by 2 more often than by 1
NEW = 50  # a token that occurs nowhere
_ids = count()


def fresh() -> SuffixDrafter:
    return SuffixDrafter(SuffixConfig(history_len=0))


def sequence(token_ids: Sequence[int], *, temperature: float = 0.0, tree: str | None = None) -> Any:
    params, speculation = SamplingParams(temperature=temperature), Speculation.of("suffix", tree=tree)
    return SimpleNamespace(
        sequence_id=next(_ids), token_ids=list(token_ids), prompt_len=len(token_ids), prediction_ids=(), salt="",
        is_traced=False, speculation=speculation, params=params,
    )  # fmt: skip


def promised(drafter: SuffixDrafter, token_ids: Sequence[int], **fields: Any) -> list[float]:
    """The chances of the nodes of a draft behind this text."""
    key = drafter.state(sequence(token_ids, **fields))
    assert not isinstance(key, Refusal)
    return [level.tokens for curve in drafter.curves(key) for level in curve.levels]


def path_of(draft: Draft, came: Sequence[int]) -> tuple[int, ...]:
    """The nodes that are accepted where these tokens are drawn."""
    path: list[int] = []
    for token_id in came:
        parent = path[-1] if path else -1
        found = [n for n, at in enumerate(draft.parents) if at == parent and draft.token_ids[n] == token_id]
        if not found:
            break
        path += found
    return tuple(path)


def go_on(drafter: SuffixDrafter, seen: Any, came: Sequence[int], num_nodes: int) -> Draft:
    """A round as the engine plays it: a look, a draft of so many nodes, if any, and what was accepted and one more."""
    key, draft = drafter.state(seen), Draft()
    if num_nodes and not isinstance(key, Refusal):
        turn: Any = SimpleNamespace(sequence=seen, choice=SimpleNamespace(num_nodes=num_nodes))
        (draft,) = drafter.draft([turn])
        turn.draft, turn.verdict = draft, Verdict(path_of(draft, came), 0)
        seen.token_ids += came[: len(turn.verdict.path) + 1]
        drafter.observe(turn)
    else:
        seen.token_ids += came[:1]
    return draft


def answered(
    drafter: SuffixDrafter, prompt: Sequence[int], came: Sequence[int], *, num_nodes: int, **fields: Any
) -> Draft:
    """A request that is answered so, to its end; returns the first draft."""
    seen = sequence(prompt, **fields)
    drafts = []
    while len(seen.token_ids) < len(prompt) + len(came):
        drafts.append(go_on(drafter, seen, came[len(seen.token_ids) - len(prompt) :], num_nodes))
    drafter.forget(seen)
    return drafts[0]


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
@pytest.mark.parametrize("prompt", [SEEN_ONCE, EVENLY, MOSTLY])
def test_where_nothing_comes_true_nothing_is_promised(prompt: list[int], num_nodes: int) -> None:
    """Of no path, whether it was drafted or not."""
    drafter = fresh()
    before = promised(drafter, prompt)
    for _ in range(1000):
        answered(drafter, prompt, [NEW], num_nodes=num_nodes)
    assert before[0] > 0.1
    assert max(promised(drafter, prompt), default=0.0) < 0.02


@pytest.mark.parametrize("num_nodes", [0, 1, 2])
def test_it_is_the_most_frequent_path_whose_outcome_is_learned(num_nodes: int) -> None:
    """The other child always comes. Once that is known it is drafted first, and stays so."""
    drafter = fresh()
    for _ in range(100):
        answered(drafter, MOSTLY, [1, NEW], num_nodes=num_nodes)
    for _ in range(50):
        assert promised(drafter, MOSTLY)[0] > 0.9
        assert answered(drafter, MOSTLY, [1, NEW], num_nodes=max(1, num_nodes)).token_ids[0] == 1


def test_a_chain_promises_its_own_tokens_alone() -> None:
    """Where the other child always comes, a tree has it, and a chain never."""
    drafter = fresh()
    for _ in range(100):
        answered(drafter, MOSTLY, [1, NEW], num_nodes=2)
    assert promised(drafter, MOSTLY, tree="branch:2,1")[0] > 0.9
    chain = promised(drafter, MOSTLY, tree="chain:3")
    assert max(chain, default=0.0) < 0.05
    assert answered(drafter, MOSTLY, [1], num_nodes=3, tree="chain:3").token_ids[0] == 2


@pytest.mark.parametrize("tree", ["chain:2", "branch:3,2", "beam:2,2", "branch:1,4"])
@pytest.mark.parametrize(
    ("prompt", "came"), [(SEEN_ONCE, [1, 2, 3, 4]), (EVENLY, [2, 7, 9, 2]), (MOSTLY, [2, 7, 9, 2])]
)
def test_no_more_is_promised_or_drafted_than_the_shape_holds(tree: str, prompt: list[int], came: list[int]) -> None:
    """Two levels of each: both are sure to come true, and nothing behind them counts."""
    drafter = fresh()
    for _ in range(200):
        answered(drafter, prompt, came, num_nodes=0)
    assert 1.8 < sum(promised(drafter, prompt, tree=tree)) <= 2
    assert sum(promised(drafter, prompt)) > 4
    assert answered(drafter, prompt, came, num_nodes=32, tree=tree).depth == 2


def test_a_tree_is_no_deeper_than_the_backend_can_follow() -> None:
    drafter = SuffixDrafter(SuffixConfig(history_len=0, max_depth=4))
    for tree in ("beam:2,40", "branch:" + ",".join("1" * 39 + "2"), None):
        assert answered(drafter, EVENLY, [NEW], num_nodes=32, tree=tree).depth <= 4
    assert answered(drafter, EVENLY, [NEW], num_nodes=32, tree="chain:40").depth == 32


def test_the_first_token_and_those_behind_it_are_told_apart() -> None:
    """Every other match comes true, then to its end."""
    drafter = fresh()
    for _ in range(100):
        answered(drafter, SEEN_ONCE, [1, 2, 3, 4, 7], num_nodes=4)
        answered(drafter, SEEN_ONCE, [NEW], num_nodes=4)
    chances = promised(drafter, SEEN_ONCE)
    assert chances[0] == pytest.approx(0.5, abs=0.05)
    assert chances[4] == pytest.approx(0.5, abs=0.06)


def test_who_samples_is_told_apart() -> None:
    drafter = fresh()
    for _ in range(100):
        answered(drafter, SEEN_ONCE, [1, 2, 3, 4], num_nodes=4)
        answered(drafter, SEEN_ONCE, [NEW], num_nodes=4, temperature=1.0)
    assert promised(drafter, SEEN_ONCE)[3] > 0.9
    assert max(promised(drafter, SEEN_ONCE, temperature=0.7), default=0.0) < 0.1


def repeating(rng: random.Random) -> list[int]:
    """Text that repeats itself, and goes on otherwise at times."""
    text = [rng.randrange(40) for _ in range(30)]
    while len(text) < 200:
        start = rng.randrange(len(text) - 10)
        text += text[start : start + rng.randrange(1, 12)]
        text += [rng.randrange(40) for _ in range(rng.randrange(0, 4))]
    return text[:200]


def rolled(rng: random.Random) -> list[int]:
    """Text in which everything occurred before, and anything may follow."""
    return [rng.randrange(6) for _ in range(200)]


def test_a_look_is_learned_from_once_whether_it_drafts_or_not() -> None:
    """Of two that look at the same places one drafts: what they promise stays the same."""
    rng, drafting, looking = random.Random(1), fresh(), fresh()
    num_drafted = 0
    for _ in range(20):
        text = repeating(rng)
        one, other = sequence(text[:60]), sequence(text[:60])
        while len(one.token_ids) < len(text):
            assert looking.state(other) == drafting.state(one)
            num_drafted += len(go_on(drafting, one, text[len(one.token_ids) :], 4))
            other.token_ids = list(one.token_ids)
        drafting.forget(one)
        looking.forget(other)
    assert num_drafted > 1000


def test_tokens_that_the_client_gave_are_nothing_that_came_true() -> None:
    """They stand in the text at the first look; what comes behind them counts."""
    drafter = fresh()
    before = promised(drafter, SEEN_ONCE)
    for _ in range(100):
        seen = sequence([*SEEN_ONCE, NEW, *SEEN_ONCE])
        seen.prompt_len = len(SEEN_ONCE)
        drafter.state(seen)
        drafter.forget(seen)
    assert promised(drafter, SEEN_ONCE) == before


def gap(drafter: SuffixDrafter, text_of: Callable[[random.Random], list[int]], num_nodes: int) -> float:
    """By how many tokens a draft gives less than was promised, behind 20 texts to learn from."""
    rng, total, num_drafts = random.Random(2), 0.0, 0
    for answer in range(60):
        text = text_of(rng)
        seen = sequence(text[:60])
        while len(seen.token_ids) < len(text):
            start, key = len(seen.token_ids), drafter.state(seen)
            curves = () if isinstance(key, Refusal) else drafter.curves(key)
            go_on(drafter, seen, text[start:], num_nodes)
            if answer >= 20 and curves:
                num_drafts += 1
                total += sum(level.tokens for level in curves[0].levels[:num_nodes]) - (len(seen.token_ids) - start - 1)
        drafter.forget(seen)
    return total / num_drafts


@pytest.mark.parametrize("num_nodes", [1, 4, 8])
@pytest.mark.parametrize("text_of", [repeating, rolled])
def test_what_is_promised_comes_true(num_nodes: int, text_of: Callable[[random.Random], list[int]]) -> None:
    assert abs(gap(fresh(), text_of, num_nodes)) < 0.07 * num_nodes**0.5


def test_control_what_is_only_believed_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rate, "observe", lambda *args: None)
    assert gap(fresh(), rolled, 1) > 0.15
    assert gap(fresh(), rolled, 4) > 0.4


def test_what_is_believed_before() -> None:
    """Longer matches more than shorter ones; those that agree, own text and temperature 0 more than others."""
    for length in LENGTHS:
        for is_own in (True, False):
            for samples in (True, False):
                one, all_, most, few = (believed(MatchKind(length, v, is_own, samples)) for v in (ONE, ALL, MOST, FEW))
                assert 0 < few.first < one.first <= all_.first < 1
                assert one == most
                assert one.first < one.later < 1
                assert believed(MatchKind(length + 1, ONE, is_own, samples)).first > one.first
        for votes in (ONE, ALL, MOST, FEW):
            greedy, sampled = (believed(MatchKind(length, votes, True, samples)) for samples in (False, True))
            earlier = believed(MatchKind(length, votes, False, False))
            assert all(a > b for a, b in zip(greedy, sampled, strict=True))
            assert all(a > b for a, b in zip(greedy, earlier, strict=True))
