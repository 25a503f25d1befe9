"""Draft trees under rule `match`: whatever grows, the output and the committed K/V are those of drafter `none`.

The oracle is the same request alone with drafter `none`. Trees of every shape are drafted by layer skipping and by a
second, different model, for requests of every kind side by side. The controls break one thing each and must be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.support.skipping import fake_setup
from tests.support.toy_backend import ToyBackend
from tests.support.toy_trees import Markov
from tests.support.world import Second, World, bits, kv_bits, make_requests, native_world, numpy_world, run
from verispec.backends.cost import CostTable
from verispec.backends.protocol import PassKind
from verispec.engine import Engine, Request
from verispec.engine.sequence import Sequence as EngineSequence
from verispec.kv import DRAFT_STORE, SlotPool
from verispec.spec.growth import DraftModel
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig, Source
from verispec.spec.none import NoDrafter
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.tree import TreeShape
from verispec.spec.turn import Turn
from verispec.types import Accept, Draft, SampleOutput, SamplingParams

DRAFTERS = ("skip", "model")
SHAPES = (
    *("chain:1", "chain:5", "branch:4", "branch:2,2,2", "branch:3,2,1"),
    *("beam:1,3", "beam:3,3", "beam:4,5"),
)
FLAT = CostTable((1, 64), (0.1, 0.1), (0.0, 0.0))


@cache
def make_world(name: str) -> World:
    return numpy_world("llama", Second.OTHER) if name == "numpy" else native_world("qwen3", Second.OTHER)


@pytest.fixture(params=["numpy", "native"])
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param)


@pytest.fixture
def native() -> World:
    return make_world("native")


@cache
def crowd(count: int, seed: int) -> tuple[Request, ...]:
    """Prompts that share prefixes, prompts longer than a pass, and every sampling parameter."""
    return tuple(make_requests(count, seed=seed))


_expected: dict[tuple[int, int, int, int], list[object]] = {}


def expected(world: World, count: int, seed: int) -> list[list[object]]:
    """What each request of a crowd gives alone."""
    keys = [(id(world), count, seed, i) for i in range(count)]
    for key, request in zip(keys, crowd(count, seed), strict=True):
        if key not in _expected:
            _expected[key] = bits(world.alone(request))
    return [_expected[key] for key in keys]


def asking(requests: Sequence[Request], drafter: str, tree: str) -> list[Request]:
    return [replace(r, speculation=Speculation(drafter, tree=TreeShape.parse(tree))) for r in requests]


def random_shape(rng: np.random.Generator) -> str:
    kind = ("chain", "branch", "beam")[rng.integers(3)]
    if kind == "branch":
        return "branch:" + ",".join(map(str, rng.integers(1, 4, rng.integers(1, 5))))
    return f"chain:{rng.integers(1, 9)}" if kind == "chain" else f"beam:{rng.integers(1, 7)},{rng.integers(1, 6)}"


def totals(outputs: list[list[SampleOutput]]) -> tuple[int, int]:
    """Nodes drafted and accepted."""
    stats = [o.stats for samples in outputs for o in samples]
    assert all(s.drafted >= s.accepted for s in stats)
    return sum(s.drafted for s in stats), sum(s.accepted for s in stats)


def recorded(engine: Engine) -> list[Draft]:
    """Every draft that the engine has verified, as it goes; those of the backend too."""
    drafts: list[Draft] = []
    observe = engine._drafters.observe

    def watched(turns: Sequence[Turn]) -> None:
        drafts.extend(part.draft for t in turns for part in t.rounds or (t,))  # type: ignore[misc]
        observe(turns)

    engine._drafters.observe = watched  # type: ignore[method-assign]
    return drafts


# The output


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", SHAPES)
def test_whatever_tree_is_drafted_the_output_is_the_same(native: World, drafter: str, tree: str) -> None:
    """Beside them run requests that draft nothing, and others that are aborted with their trees."""
    requests = asking(crowd(15, 0)[:12], drafter, tree) + [
        replace(r, speculation=Speculation("none")) for r in crowd(15, 0)[12:]
    ]
    victim = Request(
        [1, 2, 3] * 20, SamplingParams(max_tokens=50, temperature=0.7), Speculation(drafter, TreeShape.parse(tree))
    )
    engine = native.engine()
    drafts = recorded(engine)
    outputs = run(engine, requests, abort_every=9, victim=victim)
    assert [bits(o) for o in outputs] == expected(native, 15, 0)
    drafted, accepted = totals(outputs)
    assert drafted > 30
    assert accepted > 5
    deepest = TreeShape.parse(tree).depth
    assert max(d.depth for d in drafts) == deepest
    assert max(len(d) for d in drafts) == TreeShape.parse(tree).num_nodes


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", ["branch:3,2,1", "beam:3,3"])
def test_the_same_in_float32(drafter: str, tree: str) -> None:
    """The numpy backend, whose draft passes round otherwise than its canonical ones."""
    world = make_world("numpy")
    outputs = run(world.engine(), asking(crowd(8, 1), drafter, tree), abort_every=9)
    assert [bits(o) for o in outputs] == expected(world, 8, 1)
    assert totals(outputs)[1] > 5


@pytest.mark.parametrize("seed", range(8))
def test_shapes_and_drafters_side_by_side(native: World, seed: int) -> None:
    """Each request has a random shape and drafter of its own; some leave the choice."""
    rng = np.random.default_rng(seed)
    requests = []
    for request in crowd(14, 2):
        drafter = (*DRAFTERS, AUTO, "suffix", "decode", "none")[rng.integers(6)]
        tree = TreeShape.parse(random_shape(rng)) if drafter in (*DRAFTERS, AUTO) and rng.random() < 0.8 else None
        requests.append(replace(request, speculation=Speculation(drafter, tree=tree)))
    outputs = run(native.engine(), requests, abort_every=5)
    assert [bits(o) for o in outputs] == expected(native, 14, 2)


@pytest.mark.parametrize(
    "config",
    [
        {"num_slots": 150, "max_len": 150},
        {"row_budget": 8, "max_running": 4},
        {"row_budget": 16, "max_running": 3, "prefix_cache": False},
    ],
    ids=["preempting", "small-passes", "no-cache"],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", ["branch:2,2,2", "beam:3,3"])
def test_preemption_and_small_passes_change_nothing(
    native: World, drafter: str, tree: str, config: dict[str, int]
) -> None:
    engine = native.engine(**config)
    outputs = run(engine, asking(crowd(14, 2), drafter, tree), abort_every=7)
    assert [bits(o) for o in outputs] == expected(native, 14, 2)
    assert (engine.totals.preemptions > 0) == ("num_slots" in config)
    assert totals(outputs)[0] > 30


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_warm_cache_changes_nothing(native: World, drafter: str) -> None:
    """Prefixes that others left, with and without K/V of the draft model."""
    requests = crowd(14, 2)
    engine = native.engine()
    first = run(engine, [replace(r, speculation=Speculation("none")) for r in requests[:7]])
    first += run(engine, asking(requests[7:], drafter, "beam:2,3"))
    warm = run(engine, asking(requests[::-1], drafter, "branch:2,2"))
    assert [bits(o) for o in first] == expected(native, 14, 2)
    assert [bits(o) for o in warm[::-1]] == expected(native, 14, 2)
    assert sum(o.stats.cached_tokens for samples in warm for o in samples) > 100
    assert totals(warm)[1] > 5


@pytest.mark.parametrize("config", [{}, {"num_slots": 150, "max_len": 150}], ids=["roomy", "preempting"])
def test_rules_of_probabilities_beside_them_change_nothing(native: World, config: dict[str, int]) -> None:
    """Every second request is judged by probabilities, in passes of any shape; the others do not notice."""
    requests = asking(crowd(14, 2), "model", "beam:3,3")
    beside = [
        replace(
            r,
            params=replace(r.params, deterministic=False, prompt_logprobs=None),
            speculation=replace(r.speculation or Speculation(), accept=Accept.RECURSIVE),
        )
        for r in requests
    ]
    engine = native.engine(**config)
    outputs = run(engine, [r for pair in zip(requests, beside, strict=True) for r in pair], abort_every=7)
    assert [bits(o) for o in outputs[::2]] == expected(native, 14, 2)
    drafted, accepted = totals(outputs[1::2])
    assert drafted > accepted > 5


def test_auto_takes_trees_and_changes_nothing(world: World) -> None:
    """Passes cost the same whatever their rows: then a wide tree is the best offer there is."""
    engine = world.engine(cost=CostTable((1, 64), (1.0, 1.05), (0.0, 0.0)))
    drafts = recorded(engine)
    outputs = run(engine, [replace(r, speculation=Speculation(AUTO)) for r in crowd(8, 1)])
    assert [bits(o) for o in outputs] == expected(world, 8, 1)
    assert sum(not d.is_chain for d in drafts) > 20
    assert totals(outputs)[1] > 5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_linear_tree_is_the_chain_bit_for_bit(
    native: World, monkeypatch: pytest.MonkeyPatch, drafter: str, temperature: float
) -> None:
    """Grown with children and ranks, and verified as a tree, it has the chain's drafts and the chain's bits."""
    params = SamplingParams(max_tokens=40, temperature=temperature, top_k=9, seed=4, ignore_eos=True, logprobs=2)

    def drafted(tree: str) -> tuple[list[tuple[int, ...]], list[object]]:
        engine = native.engine(make_drafters(fake_setup(native.backend, exits=False)))
        drafts = recorded(engine)
        (output,) = run(
            engine, [Request([5, 9, 5], params, speculation=Speculation(drafter, tree=TreeShape.parse(tree)))]
        )
        return [d.token_ids for d in drafts], bits(output)

    chain = drafted("chain:3")
    assert max(map(len, chain[0])) == 3
    assert drafted("branch:1,1,1") == drafted("beam:1,3") == chain
    monkeypatch.setattr(TreeShape, "is_chain", property(lambda shape: shape.kind == "chain"))
    assert drafted("branch:1,1,1") == chain
    assert drafted("beam:1,3") == chain
    monkeypatch.setattr(Draft, "is_chain", property(lambda draft: len(draft) == 0))
    assert drafted("branch:1,1,1") == chain
    assert drafted("beam:1,3") == chain


# Controls: each breaks one thing, and the comparison above must see it


def with_a_sibling(path_to: Callable[[Draft, int], tuple[int, ...]]) -> Callable[[Draft, int], tuple[int, ...]]:
    """A node's path, with its parent's sibling in the place of the parent where there is one."""

    def wrong(draft: Draft, node: int) -> tuple[int, ...]:
        path = path_to(draft, node)
        if len(path) < 2:
            return path
        siblings = [i for i, p in enumerate(draft.parents) if p == draft.parents[path[-2]] and i != path[-2]]
        return (*path[:-2], siblings[0], path[-1]) if siblings else path

    return wrong


@pytest.mark.parametrize("tree", ["branch:2,2,2", "beam:3,3"])
def test_control_rows_that_see_their_siblings(native: World, monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    monkeypatch.setattr(Draft, "path_to", with_a_sibling(Draft.path_to))
    outputs = run(native.engine(), asking(crowd(14, 2), "model", tree))
    assert [bits(o) for o in outputs] != expected(native, 14, 2)


@pytest.mark.parametrize("tree", ["branch:2,2,2", "beam:3,3"])
def test_control_slots_of_another_path(native: World, monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    commit = SlotPool.commit

    def wrong(pool: SlotPool, lease: object, indices: Sequence[int]) -> list[int]:
        others = [i for i in range(len(lease.slots)) if i not in indices]  # type: ignore[attr-defined]
        return commit(pool, lease, [*indices[:-1], others[0]] if len(indices) > 1 else indices)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotPool, "commit", wrong)
    outputs = run(native.engine(), asking(crowd(14, 2), "model", tree))
    assert [bits(o) for o in outputs] != expected(native, 14, 2)


# Committed K/V


def committed_kv(world: World, request: Request) -> tuple[list[int], bytes, list[Draft]]:
    """Tokens and the target's K/V of every committed position just before the end; and the drafts."""
    engine = world.engine(prefix_cache=False)
    drafts = recorded(engine)
    engine.add(request)
    engine.step()
    (sequence,) = engine._roster.running
    assert isinstance(sequence, EngineSequence)
    while sequence.committed_len < 60:
        engine.step()
    return sequence.token_ids[:55], kv_bits(world.backend, sequence.slots[:55]), drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", ["branch:2,2,2", "beam:4,5"])
def test_committed_kv_is_that_of_plain_decoding(world: World, drafter: str, tree: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=90, temperature=temperature, seed=3, ignore_eos=True)
    request = Request([5, 9, 5, 9, 5, 30, 41], params, speculation=Speculation("none"))
    tokens, kv, _ = committed_kv(world, request)
    found_tokens, found_kv, drafts = committed_kv(world, *asking([request], drafter, tree))
    assert (found_tokens, found_kv) == (tokens, kv)
    assert sum(not d.is_chain for d in drafts) > 10


def test_control_kv_of_another_path_is_other_kv(native: World, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=90, seed=3, ignore_eos=True)
    request = Request([5, 9, 5, 9, 5, 30, 41], params, speculation=Speculation("none"))
    tokens, kv, _ = committed_kv(native, request)
    monkeypatch.setattr(Draft, "path_to", with_a_sibling(Draft.path_to))
    found_tokens, found_kv, _ = committed_kv(native, *asking([request], "model", "branch:2,2,2"))
    assert (found_tokens, found_kv) != (tokens, kv)


# A draft model that is the target


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [
        *((tree, t) for tree in ("chain:4", "branch:2,2,2", "branch:3,2,1") for t in (0.0, 0.7, 1.0)),
        *((tree, t) for tree in ("beam:3,3", "beam:4,5") for t in (0.7, 1.0)),
    ],
)
def test_a_draft_model_that_is_the_target_is_always_right(tree: str, temperature: float) -> None:
    """In canonical passes it draws the target's own bits: every draft is accepted down to its deepest level.

    Beams keep what is likely of a model that is like the target, so they may lose the path of first choices: seldom
    with noise, and at temperature 0, where they keep the most likely sequences, more often.
    """
    world = same_world()
    fit = {n: min(m for m in world.family if m >= n) for n in range(1, 65)}
    model = DraftModel(world.backend, FLAT, store=DRAFT_STORE, kind=PassKind.CANONICAL, fit=fit.__getitem__)
    config = ModelDrafterConfig(max_draft=4, force=True)
    engine = world.engine({"model": ModelDrafter("it", lambda: Source(model, 0.9, 0.9), config), "none": NoDrafter()})
    params = SamplingParams(max_tokens=40, temperature=temperature, top_p=1 - temperature / 10, ignore_eos=True)
    shape = TreeShape.parse(tree)
    speculation = Speculation("model", shape)
    requests = [Request([i, 7, 3 * i], replace(params, seed=i), speculation, is_traced=True) for i in range(3)]
    ids = [engine.add(r) for r in requests]
    outputs, rounds, lost = {}, 0, 0
    while engine.has_work:
        for event in engine.step():
            if event.trace is not None and event.output is None:
                lost += len(event.trace.verdict.path) < event.trace.draft.depth
                rounds += event.trace.draft.depth == shape.depth
            outputs[event.request_id] = event.output
    for request, i in zip(requests, ids, strict=True):
        found = outputs[i]
        assert found is not None
        assert bits([found]) == bits(world.alone(request))
        assert found.stats.passes <= 3 + lost + -(-39 // (1 + shape.depth)) + shape.num_nodes // (1 + shape.depth)
    assert rounds > 5
    assert lost <= (rounds // 5 if shape.kind == "beam" else 0)


@cache
def same_world() -> World:
    return native_world("qwen3", Second.SAME)


def test_control_another_draft_model_is_not(native: World) -> None:
    request = Request([1, 7, 3], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    outputs = run(native.engine(), asking([request], "model", "chain:4"))
    drafted, accepted = totals(outputs)
    assert accepted < 0.7 * drafted


# The worked example of the specification


def example_chains() -> Markov:
    """Tokens s, a .. i and x: the draft model's beam is worked out by hand, the target goes s, a, e, i, x."""
    tokens = {letter: i for i, letter in enumerate("sabcdefghix")}

    def rows(following: dict[str, dict[str, float]]) -> np.ndarray:
        table = np.full((len(tokens), len(tokens)), 1e-6)
        for letter, shares in following.items():
            for other, share in shares.items():
                table[tokens[letter], tokens[other]] = share
        return table / table.sum(axis=-1, keepdims=True)

    draft = {
        "s": {"a": 0.6, "b": 0.3, "c": 0.1},
        "a": {"d": 0.5, "e": 0.4, "x": 0.1},  # of the whole: d 0.30, e 0.24
        "b": {"f": 0.7, "x": 0.3},  # f 0.21, x 0.09
        "c": {"x": 1.0},  # x 0.10
        "d": {"g": 0.5, "x": 0.2, "s": 0.3},  # g 0.15
        "e": {"i": 0.6, "h": 0.4},  # i 0.144, h 0.096
        "f": {"h": 0.5, "s": 0.4, "x": 0.1},  # h 0.105
    }
    target = {"s": {"a": 0.9}, "a": {"e": 0.9}, "e": {"i": 0.9}, "i": {"x": 0.9}, "x": {"x": 0.9}}
    return Markov(rows(target), rows(draft))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_beam_3_3_drafts_nine_nodes_in_three_passes_and_a_path_of_three_yields_four_tokens(drafter: str) -> None:
    """Root 0 -> {1, 2, 3} -> {4, 5, 6} -> {7, 8, 9}; the accepted path 0, 1, 5, 8 yields bonus token 10."""
    backend = ToyBackend(example_chains(), is_plain=False)
    engine = Engine(backend, family=(16,), drafters=make_drafters(fake_setup(backend)))
    shape = TreeShape.parse("beam:3,3")
    engine.add(
        Request([0], SamplingParams(max_tokens=20), speculation=Speculation(drafter, tree=shape), is_traced=True)
    )
    (event,) = engine.step()
    draft, verdict, _, named = event.trace or pytest.fail("no trace")
    assert named == drafter
    letters = "sabcdefghix"
    assert "".join(letters[i] for i in draft.token_ids) == "abc" + "def" + "gih"
    assert [1 + parent for parent in draft.parents] == [0, 0, 0, 1, 1, 2, 4, 5, 6]
    assert draft.probabilities == pytest.approx([0.6, 0.3, 0.1, 0.5, 0.4, 0.7, 0.5, 0.6, 0.5], abs=1e-3)
    assert [1 + node for node in verdict.path] == [1, 5, 8]
    assert [letters[i] for i in event.token_ids] == ["a", "e", "i", "x"]
    assert event.num_accepted == 3
    *drafting, verifying = [int((p.rows.seq_rows > 0).sum()) for p in backend.passes]
    assert (drafting, verifying) == ([1, 3, 3], 10)
    assert backend.passes[-1].rows.positions[:10].tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
