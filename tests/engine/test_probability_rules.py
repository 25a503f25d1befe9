"""Rules `rejection` and `recursive` end to end: outputs are distributed as the target's own, and reported as such.

Joint chi-square over three tokens through the engine: scheduler, growth of the drafts, production noise, judge, commit.
Target and draft model are Markov chains, so that the probability of every output is known. Each control breaks one
thing and must be rejected by the same test. What does not need many draws is shown on tiny real models.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.chi_square import chi_square_p
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import AgreeingFastPasses
from tests.support.sampling_rows import History, SamplingRowsBuilder
from tests.support.scale import scaled
from tests.support.skipping import CHEAP, cheap_setup, fake_setup
from tests.support.toy_backend import ToyBackend
from tests.support.toy_trees import NUM_TOKENS, START, Markov, cells, make_markov, output_probabilities, softmax
from tests.support.world import Second, World, native_world, numpy_world, run
from verispec.backends import tree_rounds, weighing
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.sampling import draw, noise, recursive
from verispec.sampling.noise import Domain, gumbel_f32, noise_words
from verispec.sampling.rows import SampleKey
from verispec.spec import growth
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.tree import TreeShape
from verispec.types import Accept, FinishReason, NoText, SampleOutput, SamplingParams, TextPiece

LIMIT = 1e-6  # below, a p-value rejects
RULES = {"chain:1": Accept.REJECTION, "chain:3": Accept.REJECTION}  # others are recursive


class StopAfter(NoText):
    """Ends a sample behind so many tokens, however many more its drafts have room for."""

    can_stop = True

    def __init__(self) -> None:
        self._left = NUM_TOKENS

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        self._left -= 1
        return TextPiece("", stopped=self._left <= 0)


@dataclass(frozen=True)
class Case:
    """What is asked for, of which chains, beside how many others."""

    tree: str
    drafter: str = "model"
    temperature: float = 1.0
    chains: str = "random"
    is_crowded: bool = False

    def __str__(self) -> str:
        return f"{self.tree}-{self.drafter}-{self.temperature:g}-{self.chains}{'-crowded' * self.is_crowded}"


@cache
def chains_of(name: str) -> Markov:
    """`cousins`: see tests/sampling/test_recursive.py. `apart`: drafts are mostly rejected."""
    if name == "apart":
        return Markov(np.tile([0.1, 0.5, 0.4], (3, 1)), np.tile([0.7, 0.28, 0.02], (3, 1)))
    if name == "cousins":
        p = np.array([[0.01, 0.8, 0.19], [0.8, 0.1, 0.1], [0.5, 0.25, 0.25]])
        q = np.array([[0.01, 0.1, 0.89], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]])
        return Markov(q, p)
    return make_markov(8 if name == "wide" else 4, 1.0, seed=2 if name == "wide" else 0)


def at(probabilities: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    return softmax(np.log(probabilities), temperature)


def sample(
    backend: ToyBackend, case: Case, num: int, *, params: SamplingParams | None = None, first_seed: int = 0
) -> list[SampleOutput]:
    """As many requests with different seeds, all with the same prompt of one token."""
    shape = TreeShape.parse(case.tree)
    family, running = ((16, 64), 12) if case.is_crowded else ((64, 256, 1024), 64)
    config = EngineConfig(num_slots=1 << 14, max_running=running, row_budget=family[-1], max_waiting=2 * running)
    cheap = backend.limits.by_probability  # so that a step has several rounds
    drafters = make_drafters(cheap_setup(backend, 3) if cheap else fake_setup(backend))
    costs = {"cost": CHEAP} if cheap else {}
    engine = Engine(backend, family=family, drafters=drafters, config=config, **costs)
    asked = params or SamplingParams(max_tokens=shape.num_nodes + 6, temperature=case.temperature)
    seeds = iter((first_seed + i) * noise._WEYL_0**2 % 2**64 for i in range(num))
    outputs: list[SampleOutput] = []
    while len(outputs) < num:
        is_full = cheap and engine.num_running > 0  # nobody joins while rounds may go on
        while not is_full and engine.has_room(asked) and (seed := next(seeds, None)) is not None:
            is_full = cheap and engine.num_waiting + 1 == running
            engine.add(
                Request(
                    [START] * (3 if cheap else 1),  # the last one counts
                    replace(asked, seed=seed, deterministic=False),
                    speculation=Speculation(case.drafter, tree=shape, accept=RULES.get(case.tree, Accept.RECURSIVE)),
                    text=StopAfter,
                )
            )
        outputs += [event.output for event in engine.step() if event.output is not None]
        backend.passes.clear()
    return outputs


def p_value(case: Case, outputs: list[SampleOutput]) -> float:
    q = at(chains_of(case.chains).q, case.temperature)
    tokens = np.array([o.token_ids for o in outputs])
    counts = np.bincount(cells(tokens, len(q)), minlength=len(q) ** NUM_TOKENS)
    return chi_square_p(counts, output_probabilities(q))


def check_distribution(case: Case, num: int, *, first_seed: int = 0, by_probability: bool = False) -> None:
    backend = ToyBackend(chains_of(case.chains), by_probability=by_probability)
    outputs = sample(backend, case, num, first_seed=first_seed)
    assert (backend.most_rounds > 1) is by_probability
    p = p_value(case, outputs)
    print(f"{case}: p = {p:.3g}")
    assert p > LIMIT
    drafted, accepted = (sum(getattr(o.stats, name) for o in outputs) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted
    assert case.is_crowded or drafted > num, "a draft for everyone"


# The distribution


NUM_DRAWS = min(10_000, scaled(10_000))  # the controls need half as many, and test-long makes six times as many
CASES = (
    Case("chain:3", "skip", 1.0),
    Case("branch:2,2", "model", 2.0),
    Case("branch:3,1", "skip", 0.3),
    Case("beam:2,2", "model", 1.0, "cousins"),
    Case("beam:3,3", "model", 1.0, is_crowded=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_are_distributed_as_the_targets(case: Case) -> None:
    """In a crowd drafts lose levels or are not made at all, as rows allow."""
    check_distribution(case, NUM_DRAWS)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_rounds_that_the_backend_judges_are_distributed_as_the_targets(case: Case) -> None:
    check_distribution(case, NUM_DRAWS, by_probability=True)


EVERYTHING = SamplingParams(
    max_tokens=26, temperature=1.2, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.2,
    logit_bias=((1, 0.5),), min_tokens=4, stop_ids=(5,), deterministic=False,
)  # fmt: skip
SOME = (
    replace(EVERYTHING, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0, logit_bias=()),
    EVERYTHING,
    replace(EVERYTHING, temperature=0.5, top_k=3, min_tokens=0),
    replace(EVERYTHING, temperature=0.0),
)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("drafter", ["skip", "model"])
@pytest.mark.parametrize("tree", ["chain:3", "branch:3,2,1", "branch:2", "beam:3,3"])
def test_what_the_backend_judges_is_what_the_host_does(drafter: str, tree: str, is_short: bool) -> None:
    """Tokens, log-probabilities and counters, of several rounds at once; where slots are short, of one at a time."""
    shape, rule = TreeShape.parse(tree), RULES.get(tree, Accept.RECURSIVE)
    num_slots = 512 if not is_short else 28 if shape.is_chain else 34

    def outputs(*, by_probability: bool, max_burst: int) -> list[object]:
        inner = FakeBackend(num_stores=2, num_slots=num_slots)
        inner.limits = replace(inner.limits, trees=by_probability, by_probability=by_probability)
        inner.markov[1] = 0.8 * inner.markov[0] + 0.2 * inner.markov[1]
        backend, most = AgreeingFastPasses(inner), set[int]()
        submit = backend.submit
        backend.submit = lambda pass_: (
            most.add(1 if pass_.burst is None else 1 + pass_.burst.num_rounds) or submit(pass_)
        )
        config = EngineConfig(
            num_slots=num_slots, max_burst=max_burst, max_running=4 if is_short else 1, prefix_cache=False
        )
        engine = Engine(
            backend, family=(1, 4, 16, 64), drafters=make_drafters(cheap_setup(backend, 3)), config=config, cost=CHEAP
        )  # fmt: skip
        requests = [
            Request([i, 3, 5], replace(SOME[i % 4], seed=i), speculation=Speculation(drafter, tree=shape, accept=rule))
            for i in range(8)
        ]
        found = [samples[0] for samples in run(engine, requests)]
        assert (max(most) > 1) is (by_probability and max_burst > 1)
        assert (sum(o.stats.preemptions for o in found) > 0) is is_short
        assert 0 < sum(o.stats.accepted for o in found) < sum(o.stats.drafted for o in found)
        counted = ("passes", "fast_passes", "draft_passes", "drafted", "accepted")
        return [(o.digest, [getattr(o.stats, name) for name in counted]) for o in found]

    expected = outputs(by_probability=False, max_burst=1)
    assert outputs(by_probability=True, max_burst=1 if is_short else 6) == expected


@pytest.mark.long
@pytest.mark.parametrize("tree", ["chain:3", "branch:2,2", "branch:3,1", "beam:2,2", "beam:3,3"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("chains", ["random", "wide", "cousins"])
def test_outputs_are_distributed_as_the_targets_in_many_draws(tree: str, temperature: float, chains: str) -> None:
    drafter = "skip" if temperature == 1 else "model"
    case = Case(tree, drafter, temperature, chains, is_crowded=chains == "wide")
    check_distribution(case, 60_000, first_seed=10**6)


STOP_ID = 2
EDITED = SamplingParams(
    max_tokens=12,
    temperature=1.2,
    top_k=3,
    top_p=0.9,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((1, 0.5),),
    stop_ids=(STOP_ID,),
    min_tokens=1,
)


def edited_probabilities(backend: ToyBackend) -> dict[tuple[int, ...], float]:
    """The probability of each output of a request with every parameter, token by token."""
    found: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], float] = {(): 1.0}
    while going:
        output, probability = going.popitem()
        builder = SamplingRowsBuilder()
        history = History(frozenset([START]), Counter(output), len(output))
        builder.add(
            EDITED, SampleKey(0, 0), t=0, history=history, path_ids=(), stopping_ids=(STOP_ID,), vocab_size=4
        )  # fmt: skip
        (q,) = draw.probabilities(np, backend.logits[0][[(START, *output)[-1]]], builder.build())
        for token_id in np.flatnonzero(q).tolist():
            ended = token_id == STOP_ID or len(output) == NUM_TOKENS - 1
            (found if ended else going)[*output, token_id] = probability * float(q[token_id])
    return found


@pytest.mark.parametrize("tree", ["chain:3", "branch:2,2"])
def test_filters_penalties_and_stops_hold_along_every_path(tree: str) -> None:
    """Penalties count the path to a node, stop tokens are banned until they may come, and then end the request."""
    backend = ToyBackend(chains_of("random"), is_plain=False)
    outputs = sample(backend, Case(tree), 1500, params=EDITED)
    expected = edited_probabilities(backend)
    counts = Counter(o.token_ids for o in outputs)
    assert set(counts) <= set(expected)
    p = chi_square_p(np.array([counts[key] for key in expected]), np.array(list(expected.values())))
    print(f"{tree}: p = {p:.3g}")
    assert p > LIMIT
    assert sum(o.stats.accepted for o in outputs) > 300
    assert STOP_ID not in {o.token_ids[0] for o in outputs}, "min_tokens"
    assert STOP_ID in {o.token_ids[1] for o in outputs}


# Controls


def control(case: Case, num: int = 5000, *, told: NDArray[np.float64] | None = None) -> float:
    p = p_value(case, sample(ToyBackend(chains_of(case.chains), told=told), case, num))
    print(f"{case}: p = {p:.3g}")
    return p


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain:3", "beam:2,2"])
def test_control_a_coin_for_all_nodes(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_for_all_nodes(ids: Any, *, stream: Any, **key: Any) -> Any:
        return noise_words(ids, stream=stream % noise.NODE_STRIDE, **key)

    monkeypatch.setattr(recursive, "noise_words", one_for_all_nodes)
    assert control(Case(tree)) < LIMIT


@pytest.mark.slow
def test_control_token_noise_for_the_draft_and_for_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of one token: it, and the token in its place if it is rejected, come from one vector of noise."""

    def token_draw(q: Any, keys: Any, sequences: Any, nodes: Any) -> Any:
        seeds = keys.seeds[sequences][:, None]
        words = noise_words(
            np.arange(q.shape[-1])[None],
            seed_low=(seeds & np.uint64(0xFFFFFFFF)).astype(np.int64),
            seed_high=(seeds >> np.uint64(32)).astype(np.int64),
            t=(keys.committed_len[sequences] + 1 + nodes)[:, None],
            sample_index=keys.sample_index[sequences][:, None],
        )
        with np.errstate(divide="ignore"):
            return np.argmax(np.log(q) + gumbel_f32(np, words), axis=-1)

    monkeypatch.setattr(recursive, "_draw", token_draw)
    assert control(Case("chain:1", chains="apart"), 4000) > LIMIT, "the draw itself is right"
    monkeypatch.setattr(growth, "stream", lambda domain, node=0: noise.stream(Domain.TOKEN))
    assert control(Case("chain:1", chains="apart"), 4000) < LIMIT


@pytest.mark.slow
def test_control_cousins_that_share_noise_under_a_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream for all nodes of a level; right as in CASES, wrong here."""
    monkeypatch.setattr(growth, "stream", lambda domain, node=0: noise.stream(domain, min(node, 1)))
    assert control(Case("beam:2,2", "model", 1.0, "cousins")) < LIMIT


@pytest.mark.slow
def test_control_cousins_that_share_noise_in_rounds_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rounds, "draft_noise", lambda t, nodes: weighing.draft_noise(t, np.minimum(nodes, 0)))
    case = Case("beam:2,2", "model", 1.0, "cousins")
    assert p_value(case, sample(ToyBackend(chains_of("cousins"), by_probability=True), case, 5000)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain:3", "beam:2,2"])
def test_control_another_p_than_was_drawn_from(tree: str) -> None:
    assert control(Case(tree), told=at(chains_of("random").p, 1.5)) < LIMIT


# Temperature 0


@pytest.mark.parametrize("drafter", ["skip", "model"])
@pytest.mark.parametrize("tree", ["chain:4", "branch:2,2", "beam:3,3"])
def test_at_temperature_0_every_rule_gives_the_tokens_of_match(drafter: str, tree: str) -> None:
    backend = AgreeingFastPasses(FakeBackend(num_stores=2, num_slots=512))
    params = SamplingParams(max_tokens=30, deterministic=False, logprobs=2)

    def outputs(drafter: str, tree: TreeShape | None, accept: Accept) -> list[SampleOutput]:
        engine = Engine(backend, family=(4, 16, 64), drafters=make_drafters(fake_setup(backend)))
        requests = [
            Request([i, 3, 5], params, speculation=Speculation(drafter, tree=tree, accept=accept)) for i in range(4)
        ]
        return [samples[0] for samples in run(engine, requests)]

    shape = TreeShape.parse(tree)
    plain = outputs("none", None, Accept.MATCH)
    for accept in Accept if shape.is_chain else (Accept.MATCH, Accept.RECURSIVE):
        found = outputs(drafter, shape, accept)
        assert [o.logprobs for o in found] == [o.logprobs for o in plain]
        assert sum(o.stats.drafted for o in found) > 50


# What is reported


@cache
def make_world(name: str) -> World:
    return numpy_world("llama", Second.OTHER) if name == "numpy" else native_world("qwen3", Second.OTHER)


@pytest.mark.parametrize("world_name", ["numpy", "native"])
@pytest.mark.parametrize("drafter", ["skip", "model"])
@pytest.mark.parametrize("tree", ["chain:3", "branch:2,2", "beam:3,3"])
def test_logprobs_are_the_targets_raw_ones(world_name: str, drafter: str, tree: str) -> None:
    """Of the committed tokens, accepted and added: what scoring the text gives, to the bit where fast passes agree."""
    world, shape = make_world(world_name), TreeShape.parse(tree)
    accept = Accept.REJECTION if shape.is_chain else Accept.RECURSIVE
    params = SamplingParams(max_tokens=30, temperature=1.4, top_p=0.95, logprobs=3, deterministic=False)
    requests = [
        Request([i, 7, 3 * i], replace(params, seed=i), speculation=Speculation(drafter, tree=shape, accept=accept))
        for i in range(4)
    ]
    for request, (output,) in zip(requests, run(world.engine(), requests), strict=True):
        text = [*request.prompt_ids, *output.token_ids]
        ((scored,),) = run(world.engine(), [Request(text, SamplingParams(max_tokens=0, prompt_logprobs=3))])
        wanted = (scored.prompt_logprobs or ())[len(request.prompt_ids) - 1 :]
        assert len(wanted) == len(output.logprobs) == 30
        if world_name == "native":
            assert tuple(output.logprobs) == wanted
        for entry, expected in zip(output.logprobs, wanted, strict=True):
            assert entry.token_id == expected.token_id
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [i for i, _ in entry.alternatives] == [i for i, _ in expected.alternatives]
            assert len(entry.alternatives) == 3
        assert output.stats.drafted > 15
    assert sum(o.stats.accepted for (o,) in run(world.engine(), requests)) > 5


@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_every_parameter_with_every_rule_ends_as_it_should(drafter: str) -> None:
    """Stop tokens end a request where they first may; nothing is committed behind them, and slots are given back."""
    backend = FakeBackend(vocab_size=8, num_stores=2, num_slots=300, context_len=80)
    engine = Engine(backend, family=(4, 16, 64), drafters=make_drafters(fake_setup(backend)))
    rng = np.random.default_rng(5)
    requests = []
    for i in range(60):
        tree = TreeShape.parse(str(rng.choice(["chain:3", "branch:2,2", "branch:3", "beam:3,3", "beam:2,4"])))
        params = SamplingParams(
            max_tokens=int(rng.integers(8, 40)),
            min_tokens=int(rng.integers(0, 8)),
            temperature=float(rng.choice([0.0, 0.6, 1.5])),
            top_k=int(rng.choice([0, 1, 2, 5])),
            top_p=float(rng.choice([0.3, 0.9, 1.0])),
            min_p=float(rng.choice([0.0, 0.2])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
            frequency_penalty=float(rng.choice([0.0, 0.3])),
            stop_ids=tuple(rng.integers(0, 8, rng.integers(0, 3)).tolist()),
            logprobs=int(rng.integers(0, 3)),
            n=int(rng.choice([1, 2])),
            seed=i,
            deterministic=False,
        )
        accept = Accept.REJECTION if tree.is_chain and rng.random() < 0.5 else Accept.RECURSIVE
        requests.append(
            Request(
                rng.integers(0, 8, 5).tolist(),
                params,
                speculation=Speculation(drafter, tree=tree, accept=accept),
                eos_ids=(7,),
            )
        )
    accepted = 0
    for request, outputs in zip(requests, run(engine, requests, abort_every=4), strict=True):
        stopping = {*request.params.stop_ids, 7}
        for output in outputs:
            first = next(
                (i for i, t in enumerate(output.token_ids, 1) if t in stopping and i >= request.params.min_tokens), None
            )  # fmt: skip
            assert stopping.isdisjoint(output.token_ids[: request.params.min_tokens])
            assert output.finish_reason is (FinishReason.LENGTH if first is None else FinishReason.STOP)
            assert len(output.token_ids) == (first or request.params.max_tokens)
            assert all(len(e.alternatives) == request.params.logprobs for e in output.logprobs)
            accepted += output.stats.accepted
    assert accepted > 10
    assert engine.num_free_slots == engine._pool.num_slots


def test_the_nodes_of_a_draft_are_told_with_their_probabilities() -> None:
    """Traces hold the target's raw probability of every node's token, along the node's own path."""
    world = make_world("native")
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=2, deterministic=False)
    request = Request(
        [4, 7, 1],
        params,
        speculation=Speculation("model", tree=TreeShape.parse("beam:3,2"), accept=Accept.RECURSIVE),
        is_traced=True,
    )
    engine = world.engine()
    engine.add(request)
    text, traces = [4, 7, 1], []
    while engine.has_work:
        for event in engine.step():
            if event.trace is not None:
                traces.append((list(text), event.trace))
            text += event.token_ids
    assert len(traces) > 3
    for before, (drafted, verdict, target, drafter) in traces[:4]:
        for node in range(len(drafted)):
            path = [drafted.token_ids[i] for i in drafted.path_to(node)]
            scoring = Request([*before, *path], SamplingParams(max_tokens=0, prompt_logprobs=0))
            ((scored,),) = run(world.engine(), [scoring])
            assert target[node] == pytest.approx(np.exp((scored.prompt_logprobs or ())[-1].logprob), rel=1e-5)
        assert len(drafted.probabilities) == len(drafted)
        assert all(0 < p <= 1 for p in drafted.probabilities)
        assert verdict.bonus_id >= 0
        assert drafter == "model"
