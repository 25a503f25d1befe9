"""The promise on the real numpy backend: whatever runs beside it, a request gives the bits it gives alone.

The oracle is the same request alone, drafter `none`, cold cache, in a fresh engine. Tokens, log-probabilities,
alternatives and prompt log-probabilities must be equal bit for bit. The controls show that the comparison can fail.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.adversaries import keep_apart
from tests.support.drafters import Eager
from tests.support.faulty_backends import AtRate, Bf16FastPasses, FaultyFastPasses
from tests.support.sabotage import sabotage
from tests.support.scale import thinned
from tests.support.world import VOCAB, World, bits, make_requests, numpy_world, run
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import DrawResult, Pass, PassKind
from verispec.engine import Engine, Request
from verispec.llm import LLM
from verispec.spec.passes import Flight
from verispec.spec.registry import DRAFTER_NAMES, DRAFTERS, DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.turn import SequenceView, Step, Turn
from verispec.types import NO_PARENT, Draft, FinishReason, SamplingParams

STEEP_COST = CostTable((1, 64), (1.0, 64.0), (0.0, 0.0))  # a pass costs its rows


@pytest.fixture(scope="module", params=thinned(["llama", "gemma3"]))
def world(request: pytest.FixtureRequest) -> World:
    """It looks drafts up, too."""
    world = numpy_world(request.param)
    world.backend.limits = replace(world.backend.limits, looks_up=True)
    return world


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"row_budget": 8, "max_running": 8},
        {"row_budget": 16, "max_running": 3, "prefix_cache": False},
        {"num_slots": 150, "max_len": 150},  # slots run out: eviction and preemption
    ],
    ids=["roomy", "small-chunks", "no-cache", "preempting"],
)
def test_a_crowd_changes_nothing(world: World, drafter: str, config: dict[str, int]) -> None:
    requests = make_requests(14, drafter=drafter)
    engine = world.engine(**config)
    outputs = run(engine, requests, abort_every=7)
    for request, found in zip(requests, outputs, strict=True):
        assert bits(found) == bits(world.alone(request))
    if config.get("num_slots"):
        assert sum(o.stats.preemptions for outs in outputs for o in outs) > 0
    if drafter in ("suffix", "lookup", "decode") and not config:
        assert sum(o.stats.accepted for outs in outputs for o in outs) > 0
    if drafter != "auto":
        assert (engine.totals.replays > 15) is (drafter == "decode")


def counted_rounds(engine: Engine) -> list[tuple[int, bool]]:
    """Of every cohort that runs from now on: its rounds, and whether it was planned ahead."""
    found: list[tuple[int, bool]] = []
    submit = engine._passes.submit

    def watched(step: Step) -> Flight:
        found.extend((c.num_rounds, c.is_ahead) for c in step.cohorts)
        return submit(step)

    engine._passes.submit = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_burst", [1, 3, 16])
@pytest.mark.parametrize(
    "config", [{}, {"num_slots": 150, "max_len": 150}, {"max_running": 3}], ids=["roomy", "preempting", "queueing"]
)
def test_bursts_and_steps_in_the_air_change_nothing(
    world: World, max_burst: int, depth: int, config: dict[str, int]
) -> None:
    """Stops, limits and aborts inside a burst, beside requests that need the host after every round."""
    plain = [replace(r, is_streamed=i % 2 > 0) for i, r in enumerate(make_requests(14, drafter="none"))]
    requests = plain + make_requests(4, seed=9, drafter="decode") + make_requests(3, seed=8, drafter="suffix")
    engine = world.engine(max_burst=max_burst, depth=depth, **config)
    rounds = counted_rounds(engine)
    outputs = run(engine, requests, abort_every=7)
    unwatched = [replace(r, is_streamed=False) for r in plain if not r.params.logprobs]
    outputs += run(engine, unwatched)  # nobody waits for the host: cohorts of everyone
    lone = Request([4, 5, 6], SamplingParams(max_tokens=60, ignore_eos=True), Speculation("none"))
    outputs += run(engine, [lone])  # and nobody comes or goes: steps stay in the air
    for request, found in zip([*requests, *unwatched, lone], outputs, strict=True):
        assert bits(found) == bits(world.alone(request))
    assert (max(count for count, _ in rounds) > 1) == (max_burst > 1)
    assert max(count for count, _ in rounds) <= max_burst
    assert any(is_ahead for _, is_ahead in rounds) == (depth > 1)


def test_control_a_burst_that_draws_otherwise_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request([4, 5, 6], SamplingParams(max_tokens=20), is_streamed=False)
    expected = bits(world.alone(request))
    sabotage(monkeypatch, PassKind.CANONICAL, shifted_by_bursts)
    assert bits(run(world.engine(max_burst=16), [request])[0]) != expected
    assert bits(run(world.engine(max_burst=1), [request])[0]) == expected


def shifted_by_bursts(pass_: Pass, drawn: DrawResult) -> DrawResult:
    """Log-probabilities that tell whether there are further rounds."""
    return DrawResult(drawn.token_ids, drawn.logprobs - np.float32(pass_.burst is not None))


@pytest.mark.parametrize("draft_len", [2, 32])
@pytest.mark.parametrize(
    "config",
    [{"family": (64,)}, {"family": (8,), "max_running": 8}, {"family": (64,), "num_slots": 150, "max_len": 150}],
    ids=["roomy", "small-chunks", "preempting"],
)
def test_regular_decoding_in_another_precision_changes_nothing(
    world: World, draft_len: int, config: dict[str, int]
) -> None:
    """Fast passes round to bf16 and now and then draw another token; some requests leave the choice to the planner."""
    requests = [
        replace(r, speculation=Speculation(("decode", AUTO)[i % 2])) for i, r in enumerate(make_requests(14, seed=7))
    ]
    backend = FaultyFastPasses(Bf16FastPasses(world.backend), AtRate(0.2, vocab_size=VOCAB))
    engine = world.engine(
        make_drafters(DraftSetup(draft_len=draft_len)),
        backend=backend,
        cost=STEEP_COST,
        **config,
    )  # type: ignore[arg-type]
    outputs = run(engine, requests, abort_every=7)
    for request, found in zip(requests, outputs, strict=True):
        assert bits(found) == bits(world.alone(request))
    assert engine.totals.mismatches > 5
    if draft_len == 32 and config["family"] == (64,):  # where plain passes are padded to 64 rows
        assert sum(o.stats.replays for outs in outputs[1::2] for o in outs) > 10, "`auto` opened windows"


def test_arrival_order_and_warm_cache_change_nothing(world: World) -> None:
    requests = make_requests(10, seed=3)
    engine = world.engine()
    first = run(engine, requests)
    warm = run(engine, reversed(requests))
    assert [bits(o) for o in first] == [bits(o) for o in reversed(warm)]
    assert sum(o.stats.cached_tokens for outs in warm for o in outs) > 100
    for request, found in zip(requests, first, strict=True):
        assert bits(found) == bits(world.alone(request))


class Adversary(Eager):
    """Drafts from the oracle's own tokens, spoiled in a chosen way."""

    def __init__(self, spoil: str, truth: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._spoil = spoil
        self._truth = truth
        self._rng = np.random.default_rng(0)

    def guess(self, sequence: SequenceView, quota: int) -> Draft:
        prompt = tuple(sequence.token_ids[: sequence.prompt_len])
        done = len(sequence.token_ids) - sequence.prompt_len
        right = [*self._truth[prompt][done : done + quota], *([1] * quota)][:quota]
        wrong = [(t + 1) % VOCAB for t in right]
        if self._spoil == "right":
            return Draft.chain(right)
        if self._spoil == "wrong":
            return Draft.chain(wrong)
        if self._spoil == "every second":
            return Draft.chain(w if (done + i) % 2 else r for i, (r, w) in enumerate(zip(right, wrong, strict=True)))
        if self._spoil == "random tree":
            parents = [int(self._rng.integers(NO_PARENT, i)) if i else NO_PARENT for i in range(quota)]
            return Draft(tuple(int(t) for t in self._rng.integers(0, VOCAB, quota)), tuple(parents))
        if self._spoil == "duplicates":
            half = quota // 2
            return Draft((*right[:half], *right[:half]), (*range(-1, half - 1), *range(-1, half - 1)))
        if self._spoil == "out of vocabulary":
            return Draft.chain([VOCAB + 5, -1, *right][:quota])
        if self._spoil == "too long":
            return Draft.chain(right * 3)
        raise RuntimeError("a drafter that fails")

    def observe(self, turn: Turn) -> None:
        if self._spoil == "fails":
            raise RuntimeError("and fails again")


@pytest.mark.parametrize(
    "spoil",
    ["right", "wrong", "every second", "random tree", "duplicates", "out of vocabulary", "too long", "fails"],
)
def test_no_drafter_changes_anything(world: World, spoil: str) -> None:
    requests = [r for r in make_requests(10, seed=5) if r.params.n == 1]
    expected = [world.alone(request) for request in requests]
    truth = {tuple(r.prompt_ids): out[0].token_ids for r, out in zip(requests, expected, strict=True)}
    engine = world.engine({"adversary": Adversary(spoil, truth), "none": DRAFTERS["none"](DraftSetup())})
    outputs = run(engine, requests)
    assert [bits(o) for o in outputs] == [bits(o) for o in expected]
    accepted = sum(o.stats.accepted for outs in outputs for o in outs)
    drafted = sum(o.stats.drafted for outs in outputs for o in outs)
    assert (accepted > 0.5 * drafted) == (spoil == "right") or spoil in {"every second", "duplicates", "fails"}
    assert (drafted == 0) == (spoil in {"out of vocabulary", "too long", "fails"})


@pytest.mark.parametrize("draft_len", [1, 2, 3, 8, 16, 17])
def test_every_draft_length(world: World, draft_len: int) -> None:
    """S15: sweep N to one more than the default maximum, with drafts that are right and that end in the limit."""
    requests = [Request([5, 6, 7] * 9, SamplingParams(max_tokens=m, seed=1)) for m in range(1, draft_len + 4)]
    expected = [world.alone(request) for request in requests]
    longest = expected[-1][0].token_ids
    engine = world.engine({"adversary": Adversary("right", {tuple([5, 6, 7] * 9): longest})}, max_draft=draft_len)
    assert [bits(o) for o in run(engine, requests)] == [bits(o) for o in expected]


def test_samples_of_one_request(world: World) -> None:
    """Sample 0 of n equals n = 1, and the others differ from it."""
    one = Request([4, 5, 6], SamplingParams(max_tokens=20, temperature=1.0, seed=8))
    many = replace(one, params=replace(one.params, n=4))
    samples = run(world.engine(), [many])[0]
    assert bits(samples[:1]) == bits(world.alone(one))
    assert len({o.digest for o in samples}) == 4


def test_control_other_bits_are_seen(world: World) -> None:
    """Fast passes (any shape) give other log-probabilities in a crowd than alone: so equality above means something."""
    params = SamplingParams(max_tokens=30, seed=1, deterministic=False)
    requests = [Request([7 + i, 8, 9] * 5, params) for i in range(6)]
    crowd = run(world.engine(prefix_cache=False), requests)
    alone = [run(world.engine(prefix_cache=False), [r])[0] for r in requests]
    assert any(c[0].digest != a[0].digest for c, a in zip(crowd, alone, strict=True))
    for c, a in zip(crowd, alone, strict=True):
        assert c[0].finish_reason is a[0].finish_reason is FinishReason.LENGTH


def test_control_another_seed_differs(world: World) -> None:
    request = Request([1, 2, 3], SamplingParams(max_tokens=20, temperature=1.0, seed=1))
    other = replace(request, params=replace(request.params, seed=2))
    assert bits(world.alone(request)) != bits(world.alone(other))


def test_the_real_model(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2: prompts alone with `none`, and as one batch with `suffix` beside non-deterministic traffic."""
    prompts = [
        "one two three four one two three four one two three four one two",
        "def fibonacci(n):\n    ",
        "1, 2, 3, 4, 5, 6, 7,",
        "Once upon a time",
    ]
    params = [SamplingParams(max_tokens=24, seed=i, temperature=(0.0, 1.0)[i % 2]) for i in range(4)]
    alone = [smollm2.generate(p, s, drafter="none")[0] for p, s in zip(prompts, params, strict=True)]
    noise = [replace(s, deterministic=False, seed=99) for s in params]
    crowd = smollm2.generate([*prompts, *prompts], [*params, *noise], drafter="suffix")
    assert [c.digest for c in crowd[:4]] == [a.digest for a in alone]
    assert [c.text for c in crowd[:4]] == [a.text for a in alone]
    with monkeypatch.context() as patch:  # whatever the clock said of this machine, a draft is worth its rows
        patch.setattr(smollm2, "calibration", replace(smollm2.calibration, cost=FLAT_COST))
        engine = smollm2.fresh_engine()
    ((drafted,),) = run(engine, [smollm2.request(prompts[0], params[0], drafter="suffix")])
    smollm2.engine = smollm2.fresh_engine()  # the other engine has overwritten its K/V
    assert drafted.digest == alone[0].digest
    assert drafted.stats.accepted > 0


def test_the_real_model_with_faulty_fast_passes(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular decoding draws a wrong token at every fifth place; the control commits them, for it asked for nothing."""
    params = SamplingParams(max_tokens=24, seed=1)
    prompts = ["def fibonacci(n):\n    ", "Once upon a time"]
    alone = [smollm2.generate(p, params, drafter="none")[0] for p in prompts]
    requests = [smollm2.request(p, params, drafter=name) for p in prompts for name in ("decode", AUTO)]
    requests.append(smollm2.request(prompts[0], replace(params, deterministic=False), drafter="none"))
    with monkeypatch.context() as patch:
        faulty = FaultyFastPasses(smollm2._backend, AtRate(0.2, vocab_size=smollm2.vocab_size))
        patch.setattr(smollm2, "_backend", faulty)
        engine = keep_apart(smollm2.fresh_engine(max_draft=8, family=smollm2.calibration.family[1:]))
    *outputs, control = (samples[0] for samples in run(engine, requests))
    smollm2.engine = smollm2.fresh_engine()  # the other engine has overwritten its K/V
    assert [o.digest for o in outputs] == [a.digest for a in alone for _ in range(2)]
    assert engine.totals.mismatches >= 3
    assert control.digest != alone[0].digest
