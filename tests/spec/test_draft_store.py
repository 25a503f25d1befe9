"""The draft model's own K/V: whatever happens to a sequence, what counts as computed is what was fed.

On the fake backend a slot holds a hash of its whole history. Drafts run in canonical passes there, whose hashes do not
depend on the pass, so that every claim of every step can be compared with feeding the same tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.fake_backend import GOLDEN, FakeBackend, combine, mix
from tests.support.passes import Tape
from tests.support.scale import is_whole, scaled
from tests.support.world import NUM_SLOTS, Second, World, make_requests, native_world, numpy_world
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import Pass, PassKind, PassResult, Ticket, View
from verispec.config import EngineConfig
from verispec.engine import Engine, Request, commit
from verispec.engine.sequence import Sequence
from verispec.kv import DRAFT_STORE, NUM_RESERVED, TARGET_STORE, RadixPrefixCache
from verispec.spec.drafter import Drafter
from verispec.spec.growth import DraftModel
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig, Source
from verispec.spec.none import NoDrafter
from verispec.spec.speculation import Speculation
from verispec.spec.suffix import SuffixDrafter
from verispec.spec.tree import TreeShape
from verispec.spec.turn import CatchUp, Turn
from verispec.types import FinishReason, SampleOutput, SamplingParams, Stored, TokenEvent

VOCAB = 6
FAMILY = (4, 8, 16, 64)
COST = CostTable((1, 64), (0.0002, 0.0002), (0.0, 0.0))
TREES = ("chain:1", "chain:4", "branch:3", "branch:2,2", "branch:2,1,2", "beam:2,2", "beam:3,3", "beam:2,4")

_hashes: dict[tuple[int, ...], int] = {}


def fed(tokens: tuple[int, ...]) -> list[int]:
    """What the draft model's slots hold after these tokens alone, fed one after the other."""
    found: list[int] = []
    for i, token_id in enumerate(tokens):
        prefix = tokens[: i + 1]
        if prefix not in _hashes:
            with np.errstate(over="ignore"):
                folded = mix(np.array(found, np.uint64) + np.arange(i, dtype=np.uint64) * np.uint64(GOLDEN)).sum()
            _hashes[prefix] = combine(token_id, i, int(folded) if i else 0, combine(DRAFT_STORE, 0))
        found.append(_hashes[prefix])
    return found


def canonical_drafts(backend: FakeBackend, cost: CostTable) -> dict[str, Drafter]:
    model = DraftModel(
        backend, cost, store=DRAFT_STORE, kind=PassKind.CANONICAL, fit=lambda n: min(m for m in (*FAMILY, n) if m >= n)
    )
    view = replace(model, store=TARGET_STORE, view=View.without({1}))
    config = ModelDrafterConfig(max_draft=5, force=True)
    return {
        "model": ModelDrafter("it", lambda: Source(model, 0.8, 0.8), config),
        "skip": ModelDrafter("it", lambda: Source(view, 0.8, 0.8), config),
        "none": NoDrafter(),
        "suffix": SuffixDrafter(),
    }


class Bench:
    """An engine with a draft model whose K/V is looked at after every step; free slots are overwritten."""

    def __init__(
        self, *, likeness: float = 1.0, context_len: int = 128, cost: CostTable = FLAT_COST, trip: float = 0.0,
        trees: bool = False, **config: int,
    ) -> None:  # fmt: skip
        num_slots = config.setdefault("num_slots", 256)
        self.backend = FakeBackend(vocab_size=VOCAB, num_slots=num_slots, num_stores=2, context_len=context_len)
        self.backend.limits = replace(self.backend.limits, trees=trees)
        target, other = self.backend.markov
        self.backend.markov[DRAFT_STORE] = likeness * target + (1 - likeness) * other
        config.setdefault("max_len", min(context_len, num_slots))
        self.engine = Engine(
            self.backend,
            family=FAMILY,
            drafters=canonical_drafts(self.backend, replace(COST, trip=trip)),
            config=EngineConfig(**config),
            cost=cost,
        )
        self.outputs: dict[tuple[int, int], SampleOutput] = {}
        self.claims = 0  # positions compared

    def add(self, prompt: list[int], params: SamplingParams, drafter: str = "model", tree: str = "") -> int:
        shape = TreeShape.parse(tree) if tree else None
        return self.engine.add(Request(prompt, params, speculation=Speculation(drafter, tree=shape)))

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            if event.output is not None:
                self.outputs[event.request_id, event.sample_index] = event.output
        self.engine.check()
        self.check()
        self.backend.poison(self.engine._pool._free)
        return events

    def finish(self) -> list[SampleOutput]:
        while self.engine.has_work:
            self.step()
        return [output for _, output in sorted(self.outputs.items())]

    def check(self) -> None:
        """What the books say the draft model has computed, its store holds: of sequences, and of the prefix cache."""
        kv = self.backend.kv[DRAFT_STORE]
        for sequence in self.engine._roster.running:
            count = sequence.kv.store_lens[DRAFT_STORE]
            assert count <= sequence.computed_len
            self._compare(sequence.token_ids[:count], sequence.slots[:count], kv)
        for token_ids, slots in self._cached():
            self._compare(token_ids, slots, kv)

    def _compare(self, token_ids: list[int], slots: list[int], kv: np.ndarray) -> None:
        assert [int(h) for h in kv[slots]] == fed(tuple(token_ids))[len(token_ids) - len(slots) :]
        self.claims += len(slots)

    def _cached(self) -> Iterator[tuple[list[int], list[int]]]:
        """Every node of the prefix cache that claims K/V of the draft model: the tokens up to its end, its slots."""
        cache = self.engine._cache
        assert isinstance(cache, RadixPrefixCache)
        stack: list[tuple[list[int], object]] = [([], root) for root in cache._roots.values()]
        while stack:
            before, node = stack.pop()
            token_ids = [*before, *node.token_ids]  # type: ignore[attr-defined]
            if DRAFT_STORE in node.stores and node.slots:  # type: ignore[attr-defined]
                yield token_ids, node.slots  # type: ignore[attr-defined]
            stack += [(token_ids, child) for child in node.children.values()]  # type: ignore[attr-defined]

    def sequence(self, request_id: int, sample_index: int = 0) -> Sequence:
        return self.engine._live[request_id][sample_index]


# Any history


def random_history(seed: int, *, trees: bool = False) -> Bench:
    """Trees, chains and no drafts; shared prompts; few slots now and then; samples, stops, aborts.

    With `trees` the backend drafts those, too; some of their places lie behind the sequences' ends.
    """
    rng = np.random.default_rng(seed)
    few_slots = bool(rng.random() < 0.5)
    bench = Bench(
        likeness=float(rng.choice([0.3, 0.8, 1.0])),
        num_slots=int(rng.integers(50, 64)) if few_slots else 256,
        max_running=int(rng.integers(2, 8)),
        max_len=50,
        max_burst=int(rng.choice([1, 2, 4, 16])),
        depth=1 + seed // 2 % 2,
        cost=COST,  # so that a stream may wait for several rounds
        trip=float(seed % 2),
        trees=trees,
        context_len=int(rng.choice([50, 52, 60])) if trees else 128,
    )
    shared = rng.integers(0, VOCAB, 24).tolist()
    live: list[int] = []
    for _ in range(10):
        prompt = [*shared[: rng.integers(0, 24)], *rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()]
        drafter = ("model", "model", "model", "none", "suffix")[rng.integers(5)]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 22)),
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 2])),
            stop_ids=tuple(rng.integers(0, VOCAB, rng.integers(0, 3)).tolist()),
            n=int(rng.choice([1, 1, 3])),
            seed=int(rng.integers(100)),
        )
        params = replace(params, min_tokens=int(rng.integers(0, params.max_tokens or 0)))
        tree = str(rng.choice(TREES)) if drafter == "model" and rng.random() < 0.9 else ""
        live.append(bench.add(prompt, params, drafter, tree))
        for _ in range(rng.integers(0, 5)):
            bench.step()
        if rng.random() < 0.15:
            bench.engine.abort(int(rng.choice(live)))
            bench.check()
    bench.finish()
    return bench


@pytest.mark.parametrize("trees", [False, True])
def test_what_counts_as_computed_is_what_was_fed(trees: bool) -> None:
    preemptions = accepted = stops = claims = 0
    for seed in range(scaled(25)):
        bench = random_history(seed, trees=trees)
        preemptions += bench.engine.totals.preemptions
        accepted += bench.engine.totals.accepted
        stops += sum(o.finish_reason is FinishReason.STOP for o in bench.outputs.values())
        claims += bench.claims
    assert claims
    if is_whole():
        assert preemptions > 10
        assert accepted > 300
        assert stops > 30
        assert claims > 30_000


@pytest.mark.parametrize(
    "claimed",
    [
        pytest.param(lambda nodes: range(99), id="the last level"),
        pytest.param(lambda nodes: range(1 + max(nodes, default=-1)), id="stop tokens inside the tree"),
    ],
)
def test_control_nodes_that_were_never_computed_are_noticed(
    claimed: Callable[[frozenset[int]], range], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = commit._with_stored

    def wrong(store_lens: tuple[int, ...], turn: Turn, stored: Stored, path: tuple[int, ...]) -> tuple[int, ...]:
        return right(store_lens, turn, stored._replace(nodes=frozenset(claimed(stored.nodes))), path)

    monkeypatch.setattr(commit, "_with_stored", wrong)
    for trees in (False, True):
        with pytest.raises(AssertionError):
            list(map(partial(random_history, trees=trees), range(10)))


# One event at a time

GREEDY = SamplingParams(max_tokens=60)


def draft_rows(bench: Bench) -> list[int]:
    """Rows of each pass of the draft model, padding not counted; forgets them."""
    rows = [int((p.rows.seq_rows > 0).sum()) for p in bench.backend.passes if p.store == DRAFT_STORE]
    bench.backend.passes.clear()
    return rows


def lengths(bench: Bench, request_id: int) -> tuple[int, int]:
    """Committed tokens, and how many of them the draft model has computed."""
    sequence = bench.sequence(request_id)
    return sequence.committed_len, sequence.kv.store_lens[DRAFT_STORE]


def test_behind_an_accepted_path_it_catches_up_with_the_last_level_and_the_bonus() -> None:
    bench = Bench()
    request_id = bench.add([1, 2, 3], GREEDY, tree="chain:3")
    bench.step()
    assert lengths(bench, request_id) == (4, 0)
    assert draft_rows(bench) == []
    seen = set()
    for _ in range(12):
        before, known = lengths(bench, request_id)
        (event,) = bench.step()
        accepted = event.num_accepted
        assert draft_rows(bench) == [max(2, before - known), 1, 1]
        # The last of three nodes was never computed; neither was the token that the target added.
        assert lengths(bench, request_id) == (before + accepted + 1, before + min(accepted, 2))
        seen.add(accepted)
    assert {0, 3} <= seen


def test_one_pass_for_each_level_whatever_is_drafted_for_whom() -> None:
    bench = Bench(num_slots=1000, likeness=0.9)
    shapes = ["chain:2", "branch:3,2,1", "beam:3,3", "beam:2,4", "branch:4"]
    ids = [bench.add([i, 3, 5], replace(GREEDY, temperature=1.0, seed=i), tree=t) for i, t in enumerate(shapes)]
    bench.step()
    bench.backend.passes.clear()
    bench.step()
    assert draft_rows(bench) == [
        5 * 4,  # the committed tokens of all, prompts included: nothing was computed before
        1 + 3 + 3 + 2,  # chain, branch:3, beam:3 and beam:2; one level has no further one
        0 + 6 + 3 + 2,
        2,
    ]
    passes = [bench.sequence(i).stats.draft_passes for i in ids]
    assert passes == [TreeShape.parse(tree).depth for tree in shapes]
    assert [bench.sequence(i).stats.drafted for i in ids] == [TreeShape.parse(tree).num_nodes for tree in shapes]


def test_a_prefix_without_its_kv_is_caught_up() -> None:
    """Whoever drafted nothing left the target's K/V alone; the next one to share it computes the rest once."""
    bench = Bench()
    prompt = [i % VOCAB for i in range(40)]
    bench.add(prompt, SamplingParams(max_tokens=2), "none")
    bench.finish()
    second = bench.add(prompt, replace(GREEDY, max_tokens=30), tree="beam:2,2")
    bench.step()
    assert bench.sequence(second).stats.cached_tokens == 39
    assert (draft_rows(bench), lengths(bench, second)) == ([39], (41, 39)), "too far behind to draft"
    bench.step()
    assert (draft_rows(bench), lengths(bench, second)[1] >= 41) == ([2, 2], True)
    bench.finish()
    bench.backend.passes.clear()
    third = bench.add(prompt, GREEDY, tree="beam:2,2")
    bench.step()
    assert bench.sequence(third).stats.cached_tokens == 39
    assert draft_rows(bench) == [1, 2], "and leaves it to others"
    bench.finish()


def test_samples_that_share_slots_compute_them_to_the_same_values() -> None:
    bench = Bench()
    prompt = [i * i % VOCAB for i in range(30)]
    bench.add(prompt, SamplingParams(max_tokens=30, temperature=1.0, seed=4, n=4), tree="branch:2,2")
    outputs = bench.finish()
    assert sum(o.stats.cached_tokens for o in outputs) == 3 * 29
    assert all(o.stats.accepted for o in outputs)


def test_long_prompts_are_caught_up_over_several_steps() -> None:
    """128 tokens a step for all sequences together; meanwhile they go on without drafts."""
    bench = Bench(num_slots=2000, context_len=400)
    short = bench.add([5, 5], replace(GREEDY, max_tokens=90), tree="chain:2")
    ids = [bench.add([i, 2] * 120, GREEDY, tree="chain:2") for i in range(3)]
    caught_up: list[int] = []  # in each step that did nothing else for some sequence
    behind = dict.fromkeys(ids, 240)
    while max(behind.values()) > 3:
        drafted = {i: bench.sequence(i).stats.drafted for i in ids}
        bench.backend.passes.clear()
        bench.step()
        passes = [p for p in bench.backend.passes if p.store == DRAFT_STORE]
        caught_up += [int((p.rows.seq_rows > 0).sum()) for p in passes if not len(p.wanted.head_rows())]
        for i in ids:
            assert behind[i] <= 16 or bench.sequence(i).stats.drafted == drafted[i], "drafts while far behind"
            committed_len, known_len = lengths(bench, i)
            behind[i] = committed_len - known_len
    assert max(caught_up) == 128
    assert 3 * 240 < sum(caught_up) < 3 * 240 + 30
    assert len(caught_up) <= 8
    assert bench.sequence(short).stats.drafted > 8, "others draft all the while"
    assert all(o.stats.drafted > 20 for o in bench.finish())


def test_where_the_host_is_far_prompts_are_caught_up_in_the_first_step_that_drafts() -> None:
    """Two prompts of three fit into the rows of a step; the third, which is cut, has a step without a draft."""
    bench = Bench(num_slots=6000, context_len=1200, trip=1e-3)
    prompts = [[i, 2] * 450 for i in range(3)]
    for prompt in prompts:
        bench.add(prompt, SamplingParams(max_tokens=1), "none")
    bench.finish()
    ids = [bench.add(prompt, GREEDY, tree="chain:2") for prompt in prompts]
    bench.step()
    assert [bench.sequence(i).stats.drafted > 0 for i in ids] == [True, True, False]
    assert [bench.sequence(i).stats.draft_passes for i in ids] == [3, 3, 1]
    assert draft_rows(bench) == [2048, 4, 2]
    bench.step()
    assert all(bench.sequence(i).stats.drafted for i in ids)


def test_control_where_it_is_near_the_same_prompt_takes_steps_without_drafts() -> None:
    steps = {}
    for trip in (0.0, 1e-3):
        bench = Bench(num_slots=2000, context_len=600, trip=trip)
        request_id, steps[trip] = bench.add([1, 2] * 200, GREEDY, tree="chain:2"), 0
        while not bench.sequence(request_id).stats.drafted:
            bench.step()
            steps[trip] += lengths(bench, request_id)[0] > 400
    assert steps == {0.0: 6, 1e-3: 2}


class LosesPasses(FakeBackend):
    """The first passes of the draft model by themselves fail, but nobody hears of it before their result is read."""

    num_to_lose = 2

    def submit(self, pass_: Pass) -> Ticket:  # type: ignore[override]
        if pass_.store == DRAFT_STORE and not len(pass_.wanted.head_rows()) and self.num_to_lose:
            self.num_to_lose -= 1
            return Lost()
        return super().submit(pass_)


class Lost:
    def result(self) -> PassResult:
        raise RuntimeError("lost")


def with_lost_passes(depth: int) -> Bench:
    bench = Bench(num_slots=2000, context_len=400, trip=1e-3, depth=depth)
    bench.backend.__class__ = LosesPasses
    for i in range(2):
        bench.add([i, 2, 3] * 40, replace(GREEDY, max_tokens=40), tree="chain:2")
        bench.finish()
    return bench


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_lost_pass_should_have_computed_is_computed_later(depth: int) -> None:
    """The answers are those of everybody else; another pass reads the prompt."""
    bench = with_lost_passes(depth)
    assert bench.backend.num_to_lose == 0  # type: ignore[attr-defined]
    assert all(output.stats.accepted for output in bench.outputs.values())
    plain = Bench(num_slots=2000, context_len=400)
    for i in range(2):
        plain.add([i, 2, 3] * 40, replace(GREEDY, max_tokens=40), "none")
    assert [output.digest for output in plain.finish()] == [output.digest for output in bench.finish()]


@pytest.mark.parametrize("depth", [1, 2])
def test_control_a_lost_pass_that_counts_as_computed_is_noticed(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: CatchUp) -> None:
        self.ticket = None

    monkeypatch.setattr(CatchUp, "settle", settle)
    with pytest.raises(AssertionError):
        with_lost_passes(depth)


# Real models


@pytest.mark.parametrize("make", [numpy_world, native_world], ids=["numpy", "native"])
def test_the_draft_models_kv_is_that_of_the_same_tokens_alone(make: object) -> None:
    """In the fast passes of production: to the bit where passes of any shape agree, closely where they do not."""
    world, reference = make("llama", Second.OTHER), make("llama", Second.OTHER)  # type: ignore[operator]
    engine = world.engine(num_slots=300, max_len=150)
    trees = [TreeShape.parse(tree) for tree in ("beam:3,3", "branch:2,2,2", "chain:4")]
    for i, request in enumerate(make_requests(9, seed=4)):
        engine.add(replace(request, speculation=Speculation("model", tree=trees[i % 3])))
    steps = compared = 0
    while engine.has_work:
        engine.step()
        steps += 1
        for sequence in engine._roster.running[: 9 if steps % 4 == 0 else 0]:
            count = sequence.kv.store_lens[DRAFT_STORE]
            found = world.backend.kv(DRAFT_STORE, np.array(sequence.slots[:count], np.int64))
            wanted = kv_alone(reference, sequence.token_ids[:count])
            for a, b in zip(found, wanted, strict=True):
                assert np.array_equal(a, b) if make is native_world else np.allclose(a, b, atol=1e-4)
            compared += count
    assert engine.totals.preemptions > 0
    assert compared > 1000


def kv_alone(world: World, token_ids: list[int]) -> tuple[np.ndarray, ...]:
    """K and V of the draft model after these tokens."""
    tape = Tape(world.backend, seq_row=1, first_slot=0, store=DRAFT_STORE)
    for start in range(0, len(token_ids), 64):
        tape.feed(token_ids[start : start + 64], shape=64)
    assert len(token_ids) <= NUM_SLOTS
    return world.backend.kv(DRAFT_STORE, np.arange(len(token_ids)) + NUM_RESERVED)
