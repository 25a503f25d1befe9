"""Recursive rejection sampling: the right distribution, wrong variants noticed, a plain walk as reference, edge cases.

The chi-square tests are joint over three committed tokens, through the library's noise, beam and rule. Each control
breaks one thing and must be rejected by the same test with the same number of draws.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support import toy_trees
from tests.support.chi_square import chi_square_p, upper_gamma
from tests.support.scale import scaled
from tests.support.toy_trees import Beam, Branch, Markov, Round, cells, make_markov, sample, softmax, words_of
from verispec.sampling import noise, recursive
from verispec.sampling.beam import Paths, Survivors, greedy_level
from verispec.sampling.draw import NO_TOKEN, NoisyTopK
from verispec.sampling.noise import Domain, gumbel_f32, noise_words, philox4x32, split_seed, stream
from verispec.sampling.recursive import Distributions, RoundKeys, judge_recursive
from verispec.types import NO_PARENT, Draft, Verdict

NUM_DRAWS = 100_000
NUM_COMPARED = min(NUM_DRAWS, scaled(NUM_DRAWS))
LIMIT = 1e-6  # below, a p-value rejects
CHAIN = Branch((1, 1, 1))
TREES: dict[str, Beam | Branch] = {
    "chain": CHAIN,
    "branch:2,2": Branch((2, 2)),
    "branch:3,1": Branch((3, 1)),
    "beam:2,2": Beam(2, 2),
    "beam:3,3": Beam(3, 3),
}


def p_value(toy: Markov, *parts: toy_trees.Sampled) -> float:
    vocab_size = toy.vocab_size
    outputs = np.concatenate([part.outputs for part in parts])
    counts = np.bincount(cells(outputs, vocab_size), minlength=vocab_size**toy_trees.NUM_TOKENS)
    return chi_square_p(counts, toy_trees.output_probabilities(toy.q))


def cousins_toy(temperature: float) -> Markov:
    """Where a beam with shared noise shows: the likely first child is sharp and rejected, the second follows p = q.

    Whether the second's child survives depends on how far the first's second child lies behind. With one noise for
    both, that tells which token the second's child is.
    """
    p = np.array([[0.01, 0.8, 0.19], [0.8, 0.1, 0.1], [0.5, 0.25, 0.25]])
    q = np.array([[0.01, 0.1, 0.89], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]])
    return Markov(softmax(np.log(q), temperature), softmax(np.log(p), temperature))


def test_chi_square_against_known_values() -> None:
    for statistic, freedom, p in [
        (3.841458820694124, 1, 0.05),
        (18.307038053275146, 10, 0.05),
        (124.34211340400407, 100, 0.05),
        (30.0, 2, np.exp(-15.0)),
        (0.0, 7, 1.0),
    ]:
        assert upper_gamma(freedom / 2, statistic / 2) == pytest.approx(p, rel=1e-12)
    p = np.array([0.5, 0.3, 0.2 - 1e-7, 1e-7])
    assert chi_square_p(np.array([500, 300, 199, 1]), p) > 0.5  # one count in a rare cell is no sensation
    assert chi_square_p(np.array([600, 250, 150, 0]), p) < 1e-6
    assert chi_square_p(np.array([10, 1]), np.array([1.0, 0.0])) == 0.0


# --- The distribution ---


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("name", TREES)
def test_outputs_are_distributed_as_the_targets(name: str, temperature: float) -> None:
    toy = make_markov(4, temperature)
    sampled = sample(toy, TREES[name], NUM_COMPARED)
    assert p_value(toy, sampled) > LIMIT
    assert 0 < sampled.accepted < sampled.drafted


@pytest.mark.parametrize(
    ("tree", "toy"),
    [
        (Beam(2, 2), cousins_toy(1.0)),
        (Beam(3, 3), cousins_toy(1.0)),
        (Beam(5, 2), make_markov(3, 1.0, seed=1, likeness=0.0)),  # wider than the vocabulary
        (Branch((2, 2)), make_markov(8, 1.0, seed=2, likeness=0.0)),
        (Beam(3, 3), make_markov(8, 1.0, seed=2)),
    ],
)
def test_outputs_are_distributed_as_the_targets_elsewhere(tree: Beam | Branch, toy: Markov) -> None:
    assert p_value(toy, sample(toy, tree, NUM_COMPARED)) > LIMIT


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("toy", ["random", "cousins"])
def test_outputs_are_distributed_as_the_targets_in_a_million_draws(name: str, temperature: float, toy: str) -> None:
    chains = make_markov(4, temperature, seed=3) if toy == "random" else cousins_toy(temperature)
    parts = [sample(chains, TREES[name], NUM_DRAWS, first_seed=(1 + i) * NUM_DRAWS) for i in range(10)]
    assert p_value(chains, *parts) > LIMIT


def test_a_chain_is_accepted_as_often_as_the_overlap_allows() -> None:
    """Losslessness alone would allow to reject everything; the first token's acceptance is sum min(p, q)."""
    toy = make_markov(4, 1.0)
    seeds = np.arange(NUM_DRAWS).astype(np.uint64)
    start = Round(seeds, np.full(NUM_DRAWS, 9), np.zeros(NUM_DRAWS, np.int64))
    tokens = toy_trees.grow(toy, Branch((1,)), start).tokens
    verdicts = judge(tokens, toy.q[0], toy.p[0], seeds=seeds)
    rate = float(np.minimum(toy.q[0], toy.p[0]).sum())
    accepted = sum(len(v.path) for v in verdicts)
    assert abs(accepted - rate * NUM_DRAWS) < 5 * np.sqrt(rate * (1 - rate) * NUM_DRAWS)


# --- Controls ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "branch:2,2", "beam:3,3"])
def test_control_a_reused_coin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_for_all_nodes(ids: Any, *, stream: Any, **key: Any) -> Any:
        return noise_words(ids, stream=stream % 256, **key)

    monkeypatch.setattr(recursive, "noise_words", one_for_all_nodes)
    toy = make_markov(4, 1.0)
    assert p_value(toy, sample(toy, TREES[name], NUM_DRAWS)) < LIMIT


@pytest.mark.slow
def test_control_the_residual_drawn_with_the_drafts_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token noise for the draft, and for the token that the target adds; on a chain node i samples token 1 + i."""

    def token_words(start: Round, nodes: Any, level: int, vocab_size: int) -> Any:
        return words_of(start, start.committed_len[:, None] + level, 0 * nodes, vocab_size)

    def draw(q: Any, keys: RoundKeys, sequences: Any, nodes: Any) -> Any:
        start = Round(keys.seeds[sequences], keys.committed_len[sequences] + 1 + nodes, nodes)
        words = token_words(start, nodes[:, None], 0, q.shape[-1])[:, 0]
        with np.errstate(divide="ignore"):
            return np.argmax(np.log(q) + gumbel_f32(np, words), axis=-1)

    toy = make_markov(4, 1.0)
    shared = functools.partial(toy_trees.grow, words=token_words)
    monkeypatch.setattr(recursive, "_draw", draw)
    assert p_value(toy, sample(toy, CHAIN, NUM_DRAWS)) > LIMIT  # the draw itself is right
    assert p_value(toy, sample(toy, CHAIN, NUM_DRAWS, grow=shared)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Beam(2, 2), Beam(3, 3)])
def test_control_cousins_that_share_noise_under_a_beam(tree: Beam) -> None:
    def one_for_a_level(start: Round, nodes: Any, level: int, vocab_size: int) -> Any:
        t = start.committed_len[:, None] + 0 * nodes
        return words_of(start, t, 0 * nodes + stream(Domain.DRAFT, level), vocab_size)

    toy = cousins_toy(1.0)
    shared = functools.partial(toy_trees.grow, words=one_for_a_level)
    assert p_value(toy, sample(toy, tree, NUM_DRAWS, grow=shared)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branch:2,2", "branch:3,1"])
def test_control_children_sorted_by_probability(name: str) -> None:
    def by_probability(children: NoisyTopK) -> NoisyTopK:
        order = np.argsort(-children.logprobs, axis=-1, kind="stable")
        return NoisyTopK(*(np.take_along_axis(array, order, axis=-1) for array in children))

    toy = make_markov(4, 1.0)
    sorted_later = functools.partial(toy_trees.grow, reorder=by_probability)
    assert p_value(toy, sample(toy, TREES[name], NUM_DRAWS, grow=sorted_later)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branch:2,2", "beam:3,3"])
def test_control_p_not_renormalised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = recursive._reject

    def wrong(q: Any, p: Any, rows: Any, x: Any) -> None:
        factors = p.factors[rows].copy()
        right(q, p, rows, x)
        p.factors[rows] = factors

    monkeypatch.setattr(recursive, "_reject", wrong)
    toy = make_markov(4, 1.0)
    assert p_value(toy, sample(toy, TREES[name], NUM_DRAWS)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "beam:2,2"])
def test_control_another_p_than_was_drawn_from(name: str) -> None:
    toy = make_markov(4, 1.0)
    assert p_value(toy, sample(toy, TREES[name], NUM_DRAWS, proposal=make_markov(4, 1.1).p)) < LIMIT


def by_path_probability(paths: Paths, children: NoisyTopK, *, width: int) -> Survivors:
    return greedy_level(paths, children, width=width)


def by_own_probability(paths: Paths, children: NoisyTopK, *, width: int) -> Survivors:
    return greedy_level(paths._replace(phi=0 * paths.phi), children, width=width)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [by_path_probability, by_own_probability])
def test_control_a_beam_pruned_by_probability(rank: Any) -> None:
    toy = make_markov(4, 1.0)
    assert p_value(toy, sample(toy, Beam(2, 2, rank), NUM_DRAWS)) < LIMIT


# --- Noise ---


def test_no_word_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every counter of drafting, coins and final draws, over all rounds of some sequences."""
    used: list[tuple[int, ...]] = []

    def recorded(counter: Any, key: Any) -> Any:
        arrays = (array.ravel().tolist() for array in np.broadcast_arrays(*counter, *key))
        used.extend(set(zip(*arrays, strict=True)))  # a set: one call may take several words of one block
        return philox4x32(counter, key)

    monkeypatch.setattr(noise, "philox4x32", recorded)
    monkeypatch.setattr(toy_trees, "philox4x32", recorded)
    for first_seed, tree in enumerate(TREES.values()):
        sample(make_markov(4, 1.0), tree, 300, first_seed=300 * first_seed)
    assert len(used) > 10_000
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_uniforms_lie_strictly_between_0_and_1(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the draw at the ends is a token that has mass, whatever the masses add up to."""
    monkeypatch.setattr(recursive, "noise_words", lambda ids, *, t, **_: ids * 0 + t * 0 + word)
    keys = round_keys(range(200))
    u = recursive._uniforms(keys, np.arange(200), np.arange(200))
    assert ((u > 0) & (u < 1)).all()
    q = np.random.default_rng(0).random((200, 9)) + 0.1
    q[:, [0, 1, 5, 8]] = 0.0
    drawn = recursive._draw(q, keys, np.arange(200), np.arange(200))
    assert (drawn == (2 if word == 0 else 7)).all()


# --- One round against a walk in plain Python ---


SAMPLE = 3


def round_keys(seeds: Any, *, committed_len: int = 9) -> RoundKeys:
    num = len(seeds)
    return RoundKeys(np.array(seeds, np.uint64), np.full(num, SAMPLE), np.full(num, committed_len))


def uniform(seed: int, committed_len: int, which: int) -> float:
    low, high = split_seed(seed)
    key = {"seed_low": low, "seed_high": high, "t": committed_len, "sample_index": SAMPLE, "stream": which}
    first, second = (int(w) for w in noise_words(np.arange(2), **key))
    return ((first << 32 | second) // 2**12 + 0.5) / 2**52


def walk(draft: Draft, q_rows: list[list[float]], p_rows: list[list[float]], seed: int, committed_len: int) -> Verdict:
    node, path = NO_PARENT, []
    while True:
        q = [value / sum(q_rows[node + 1]) for value in q_rows[node + 1]]
        p = [value / (sum(p_rows[node + 1]) or 1.0) for value in p_rows[node + 1]]
        for child in (i for i, parent in enumerate(draft.parents) if parent == node):
            x = draft.token_ids[child]
            if p[x] == 0:
                continue
            if uniform(seed, committed_len, stream(Domain.COIN, child)) < q[x] / p[x]:
                break
            residual = [max(a - b, 0.0) for a, b in zip(q, p, strict=True)]
            if sum(residual) > 0:
                q = [value / sum(residual) for value in residual]
            p[x] = 0.0
            p = [value / (sum(p) or 1.0) for value in p]
        else:
            left = uniform(seed, committed_len, stream(Domain.RESIDUAL, node + 1)) * sum(q)
            for token_id, value in enumerate(q):
                left -= value
                if left < 0:
                    return Verdict(tuple(path), token_id)
        node = child
        path.append(child)


VOCAB = 4
# Eighths: zeros, equal rows and exhausted proposals are common.
ROWS = st.lists(st.integers(0, 8).map(lambda i: i / 8), min_size=VOCAB, max_size=VOCAB)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Draft, list[list[float]], list[list[float]], int]:
    num_nodes = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(NO_PARENT, i - 1)) for i in range(num_nodes))
    tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(num_nodes))
    q = [draw(ROWS.filter(any)) for _ in range(num_nodes + 1)]
    p = [draw(ROWS) for _ in range(num_nodes + 1)]
    return Draft(tokens, parents), q, p, draw(st.integers(0, 2**64 - 1))


def stacked(tables: list[list[list[float]]]) -> Distributions:
    """One matrix for all drafts, rows in reversed order so that nothing is right by chance."""
    sizes = [len(table) for table in tables]
    rows = np.full((len(tables), max(sizes, default=1)), -1)
    last = sum(sizes)
    for s, size in enumerate(sizes):
        rows[s, :size] = np.arange(last - 1, last - 1 - size, -1)
        last -= size
    return Distributions(np.array([row for table in tables for row in table][::-1]).reshape(-1, VOCAB), rows)


@settings(max_examples=scaled(120), deadline=None)
@given(st.lists(rounds(), max_size=5))
def test_judge_equals_the_walk(batch: list[tuple[Draft, list[list[float]], list[list[float]], int]]) -> None:
    keys = round_keys([seed for *_, seed in batch], committed_len=77)
    found = judge_recursive(
        [draft for draft, *_ in batch], stacked([q for _, q, _, _ in batch]), stacked([p for _, _, p, _ in batch]), keys
    )
    assert found == [walk(draft, q, p, seed, 77) for draft, q, p, seed in batch]


def test_many_children_are_tried_in_the_order_drawn() -> None:
    """More than a sort by insertion would take, with the grandchildren between them."""
    rng = np.random.default_rng(5)
    parents = (NO_PARENT, *(0 if i % 3 else NO_PARENT for i in range(59)))
    draft = Draft(tuple(rng.integers(0, VOCAB, 60).tolist()), parents)
    q, p = rng.dirichlet(np.ones(VOCAB), (2, 61)).tolist()
    found = judge_recursive([draft] * 50, *(stacked([table] * 50) for table in (q, p)), round_keys(range(50)))
    assert found == [walk(draft, q, p, seed, 9) for seed in range(50)]


def test_a_verdict_does_not_depend_on_the_batch() -> None:
    """float32 rows of an odd width, together and alone."""
    rng = np.random.default_rng(4)
    num, vocab_size = 40, 1003
    q, p = (rng.dirichlet(np.full(vocab_size, 0.05), 4 * num).astype(np.float32) for _ in range(2))
    alike = rng.random(len(q)) < 0.7
    p[alike] = q[alike]
    tokens = np.array([rng.choice(vocab_size, p=row / row.sum()) for row in p.astype(np.float64)]).reshape(num, 4)
    drafts = [Draft.chain(row[:3].tolist()) for row in tokens]
    keys = round_keys(range(num))
    rows = np.arange(4 * num).reshape(num, 4)
    together = judge_recursive(drafts, Distributions(q, rows), Distributions(p, rows), keys)
    alone = [
        judge_recursive([drafts[s]], Distributions(q, rows[[s]]), Distributions(p, rows[[s]]), round_keys([s]))[0]
        for s in range(num)
    ]
    assert together == alone
    assert len({len(v.path) for v in together}) > 1


# --- Edge cases ---

NUM_ROUNDS = 20_000


def judge(
    tokens: NDArray[np.int64], q: Any, p: Any, *, seeds: Any = None, parents: tuple[int, ...] | None = None
) -> list[Verdict]:
    """Verdicts on drafts [S, N] (siblings unless told otherwise) where every node has the same q and p."""
    num, num_nodes = tokens.shape
    drafts = [Draft(tuple(row), parents or (NO_PARENT,) * num_nodes) for row in tokens.tolist()]
    rows = np.zeros((num, 1 + num_nodes), np.int64)
    keys = round_keys(np.arange(num) if seeds is None else seeds)
    return judge_recursive(drafts, Distributions(np.array([q]), rows), Distributions(np.array([p]), rows), keys)


def first_tokens(tokens: NDArray[np.int64], verdicts: list[Verdict]) -> NDArray[np.int64]:
    """The first token each verdict commits."""
    return np.array([row[v.path[0]] if v.path else v.bonus_id for row, v in zip(tokens, verdicts, strict=True)])


def siblings(p: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Honest children: draws without replacement, NUM_ROUNDS times."""
    seeds = np.arange(NUM_ROUNDS).astype(np.uint64)
    start = Round(seeds, np.full(NUM_ROUNDS, 9), np.zeros(NUM_ROUNDS, np.int64))
    with np.errstate(divide="ignore"):
        return toy_trees.grow(Markov(p[None], p[None]), Branch((count,)), start).tokens


Q = np.array([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("p", "change"),
    [
        pytest.param([0.6, 0.4, 0.0, 0.0], lambda x: x[:, :2], id="support smaller than asked"),
        pytest.param([0.4, 0.3, 0.2, 0.1], lambda x: x[:, [0, 0, 1]], id="a copy between"),
        pytest.param([0.4, 0.3, 0.2, 0.1], lambda x: x[:, [0, 1, 1, 0, 2]], id="copies among the later"),
        pytest.param([0.6, 0.4, 0.0, 0.0], lambda x: x * 0 + 2, id="forged: p is 0, q is not"),
        pytest.param([0.6, 0.4, 0.0, 0.0], lambda x: np.c_[x * 0 + 3, x], id="forged before honest"),
        pytest.param([0.4, 0.3, 0.2, 0.1], lambda x: x[:, :0], id="empty draft"),
        pytest.param([np.nan, 0.3, 0.2, 0.1], lambda x: x * 0 + 1, id="p is not a number"),
        pytest.param([0.0, 0.0, 0.0, 0.0], lambda x: x * 0 + 1, id="p is nothing"),
        pytest.param(Q, lambda x: x, id="p equals q"),
    ],
)
def test_what_a_drafter_may_do_without_changing_the_distribution(p: Any, change: Any) -> None:
    p = np.array(p, np.float64)
    usable = np.isfinite(p).all() and p.any()
    tokens = change(siblings(p if usable else Q, 2 if (p == 0).any() else 3))
    found = first_tokens(tokens, judge(tokens, Q, p))
    assert chi_square_p(np.bincount(found, minlength=4), Q) > LIMIT


def test_control_an_adversary_who_picks_likely_tokens_is_noticed() -> None:
    """The test above has power: children that were not drawn from p do change the distribution."""
    tokens = np.full((NUM_ROUNDS, 1), 0)
    found = first_tokens(tokens, judge(tokens, Q, [0.4, 0.3, 0.2, 0.1]))
    assert chi_square_p(np.bincount(found, minlength=4), Q) < LIMIT


def test_children_without_a_proposal_row_are_not_looked_at() -> None:
    rows = np.zeros((NUM_ROUNDS, 2), np.int64)
    found = judge_recursive(
        [Draft((0,), (NO_PARENT,))] * NUM_ROUNDS,
        Distributions(Q[None], rows),
        Distributions(np.zeros((0, 0)), rows - 1),
        round_keys(range(NUM_ROUNDS)),
    )
    assert {v.path for v in found} == {()}
    assert chi_square_p(np.bincount([v.bonus_id for v in found], minlength=4), Q) > LIMIT


def test_an_empty_residual_draws_from_q() -> None:
    """A token that q excludes and p barely holds is rejected; q - p is 0 everywhere."""
    tokens = np.full((NUM_ROUNDS, 1), 2)
    found = judge(tokens, [0.5, 0.5, 0.0], [0.5, 0.5, 1e-300])
    assert {v.path for v in found} == {()}
    assert chi_square_p(np.bincount([v.bonus_id for v in found], minlength=2), np.array([0.5, 0.5])) > LIMIT


def test_a_token_that_q_excludes_is_rejected_and_p_may_run_out() -> None:
    tokens = np.tile([0, 1, 2, 0], (NUM_ROUNDS, 1))
    found = judge(tokens, [0.0, 0.25, 0.75], [1.0, 0.0, 0.0])
    assert {v.path for v in found} == {()}
    assert chi_square_p(np.bincount([v.bonus_id for v in found])[1:], np.array([0.25, 0.75])) > LIMIT


def test_a_token_whose_p_is_below_q_is_always_accepted() -> None:
    tokens = np.tile([1, 1, 1], (1000, 1))
    found = judge(tokens, [0.0, 1.0], np.float32([0.5, 0.5]), parents=(NO_PARENT, 0, 1))
    assert set(found) == {Verdict((0, 1, 2), 1)}


@pytest.mark.parametrize("broken", [[np.nan, 1.0], [np.inf, 0.0], [np.inf, -np.inf], [-0.5, 1.5], [0.0, 0.0]])
def test_a_broken_target_gives_no_token_and_hurts_no_other(broken: list[float]) -> None:
    q = np.array([[0.0, 1.0], [1.0, 0.0], broken])
    p = np.array([[0.5, 0.5]])
    drafts = [Draft((1, 0), (NO_PARENT, 0)), Draft((1, 0), (NO_PARENT, 0)), Draft((1, 0), (NO_PARENT, 0)), Draft()]
    rows = np.array([[0, 1, 1], [2, 1, 1], [0, 2, 1], [2, -1, -1]])
    found = judge_recursive(
        drafts, Distributions(q, rows), Distributions(p, np.zeros((4, 3), np.int64)), round_keys(range(4))
    )
    assert found == [Verdict((0, 1), 0), Verdict((), NO_TOKEN), Verdict((0,), NO_TOKEN), Verdict((), NO_TOKEN)]


def test_a_missing_target_row_gives_no_token() -> None:
    rows = np.array([[0, -1]])
    found = judge_recursive(
        [Draft((1,), (NO_PARENT,))],
        Distributions(np.array([[0.0, 1.0]]), rows),
        Distributions(np.array([[0.5, 0.5]]), rows),
        round_keys([0]),
    )
    assert found == [Verdict((0,), NO_TOKEN)]


def test_nothing_to_judge() -> None:
    nothing = Distributions(np.zeros((0, 5), np.float32), np.zeros((0, 1), np.int64))
    assert judge_recursive([], nothing, nothing, round_keys([])) == []
