"""Self-speculation: whatever is skipped, the output and the committed K/V are those of drafter `none`.

The oracle is the same request alone with drafter `none`. Views are random, also of everything and of nothing.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.skipping import menu_of, skip_setup
from tests.support.world import World, bits, kv_bits, make_requests, native_world, numpy_world, run
from verispec.backends.cost import CostTable
from verispec.backends.protocol import FULL_VIEW, Backend, Pass, PassKind, Ticket, View
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.sequence import Sequence
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.skip import NOT_TUNED, skip_drafter
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput, SamplingParams

NUM_LAYERS = 3
EVERYTHING = View.without(range(NUM_LAYERS), range(NUM_LAYERS))


def random_view(seed: int) -> View:
    """Each sub-layer is skipped or not by the toss of a coin."""
    rng = np.random.default_rng(seed)
    return View.without(*(np.flatnonzero(rng.random(NUM_LAYERS) < 0.5).tolist() for _ in range(2)))


@pytest.fixture(scope="module", params=["numpy", "native"])
def world(request: pytest.FixtureRequest) -> World:
    return numpy_world("llama") if request.param == "numpy" else native_world("qwen3")


@pytest.mark.parametrize(
    ("view", "draft_len"),
    [(FULL_VIEW, 12), (EVERYTHING, 1), (EVERYTHING, 12), *((random_view(i), 1 + 2 * i) for i in range(6))],
    ids=["nothing", "everything-1", "everything-12", *(f"random{i}-{1 + 2 * i}" for i in range(6))],
)
def test_whatever_is_skipped_the_output_is_the_same(world: World, view: View, draft_len: int) -> None:
    """Random views, drafts of 1 to 12 tokens, every sampling parameter, shared prefixes, batches of many kinds."""
    requests = make_requests(8, seed=draft_len, drafter="skip")
    requests += [replace(r, speculation=Speculation("none")) for r in make_requests(3, seed=100 + draft_len)]
    engine = world.engine(make_drafters(skip_setup(world.backend, view, draft_len=draft_len)))
    outputs = run(engine, requests, abort_every=9)
    for wanted, found in zip(requests, outputs, strict=True):
        assert bits(found) == bits(world.alone(wanted))
    assert sum(o.stats.drafted for outs in outputs for o in outs) > 30
    assert all(o.stats.drafted >= o.stats.accepted for outs in outputs for o in outs)


@pytest.mark.parametrize("config", [{"num_slots": 150, "max_len": 150}, {"row_budget": 8, "max_running": 4}])
def test_preemption_and_small_passes_change_nothing(world: World, config: dict[str, int]) -> None:
    requests = make_requests(14, seed=3, drafter="skip")
    engine = world.engine(make_drafters(skip_setup(world.backend, random_view(2), draft_len=4)), **config)
    for wanted, found in zip(requests, run(engine, requests, abort_every=7), strict=True):
        assert bits(found) == bits(world.alone(wanted))
    assert (engine.totals.preemptions > 0) == ("num_slots" in config)


# Committed K/V


class Watched:
    """A backend that remembers the K/V which draft passes left in their slots."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.drafted: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def submit(self, pass_: Pass) -> Ticket:
        ticket = self._backend.submit(pass_)
        ticket.result()
        if pass_.kind is PassKind.FAST:
            for slot in pass_.rows.slots.tolist():
                self.drafted[slot] = kv_bits(self._backend, [slot])
        return ticket


def committed_kv(
    world: World, drafter: str, view: View, params: SamplingParams, *, is_traced: bool = False
) -> tuple[list[int], bytes, int, int]:
    """Tokens and K/V of every committed position just before the end; drafted tokens; slots whose K/V was replaced.

    Only drafts of a request that is traced are passes of their own, whose K/V can be looked at.
    """
    watched = Watched(world.backend)
    drafters = make_drafters(skip_setup(watched, view, draft_len=6))  # type: ignore[arg-type]
    engine = world.engine(drafters, backend=watched, prefix_cache=False)  # type: ignore[arg-type]
    prompt = [5, 9, 5, 9, 5, 30, 41]
    engine.add(Request(prompt, params, speculation=Speculation(drafter), is_traced=is_traced))
    engine.step()
    (sequence,) = engine._roster.running
    assert isinstance(sequence, Sequence)
    while sequence.committed_len < 60:
        engine.step()
    count = 55
    slots = sequence.slots[:count]
    replaced = sum(kv_bits(world.backend, [s]) != watched.drafted[s] for s in slots if s in watched.drafted)
    return sequence.token_ids[:count], kv_bits(world.backend, slots), sequence.stats.drafted, replaced


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("view", [random_view(1), random_view(4), EVERYTHING], ids=["some", "others", "everything"])
def test_committed_kv_is_that_of_plain_decoding(world: World, view: View, temperature: float) -> None:
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=3, ignore_eos=True)
    tokens, expected, _, _ = committed_kv(world, "none", view, params)
    for is_traced in (True, False):
        found_tokens, found, drafted, replaced = committed_kv(world, "skip", view, params, is_traced=is_traced)
        assert (found_tokens, found) == (tokens, expected)
        assert drafted > 20
        assert replaced > 0 or not is_traced, "the control: what drafting left in those slots was other K/V"


# Acceptance


def canonical_drafts(world: World, view: View, draft_len: int) -> ModelDrafter:
    """Drafts in canonical passes, where the full view gives the target's own bits."""
    return skip_drafter(
        world.backend,
        lambda: menu_of(view),
        ModelDrafterConfig(max_draft=draft_len, exits=True, force=True),
        kind=PassKind.CANONICAL,
        fit=lambda num_rows: min(m for m in world.family if m >= num_rows),
    )


def acceptance(world: World, view: View, draft_len: int, temperature: float) -> tuple[int, int]:
    engine = world.engine({"skip": canonical_drafts(world, view, draft_len), "none": NoDrafter()})
    params = SamplingParams(max_tokens=40, temperature=temperature, top_p=0.9 if temperature else 1.0, ignore_eos=True)
    requests = [Request([i, 7, 3 * i], replace(params, seed=i)) for i in range(4)]
    outputs = run(engine, requests)
    for wanted, found in zip(requests, outputs, strict=True):
        assert bits(found) == bits(world.alone(wanted))
    stats = [o.stats for outs in outputs for o in outs]
    return sum(s.accepted for s in stats), sum(s.drafted for s in stats)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_len", [1, 4, 12])
def test_skipping_nothing_accepts_everything(world: World, draft_len: int, temperature: float) -> None:
    accepted, drafted = acceptance(world, FULL_VIEW, draft_len, temperature)
    assert accepted == drafted > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_control_skipping_everything_does_not(world: World, temperature: float) -> None:
    accepted, drafted = acceptance(world, EVERYTHING, 4, temperature)
    assert accepted < 0.7 * drafted


# Passes


def fake_run(
    setup: DraftSetup, backend: FakeBackend, num: int, *, temperature: float = 0.0, cost: CostTable | None = None
) -> list[SampleOutput]:
    engine = Engine(
        backend, family=(4, 8, 16, 64), drafters=make_drafters(setup), config=EngineConfig(num_slots=256),
        **({} if cost is None else {"cost": cost}),
    )  # fmt: skip
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=1)
    ids = [engine.add(Request([i, 3, 5], params, speculation=Speculation("skip"))) for i in range(num)]
    found = {}
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] = event.output
    engine.check()
    outputs = [found[i] for i in ids]
    assert all(o is not None for o in outputs)
    return outputs  # type: ignore[return-value]


def test_drafting_is_one_pass_per_token_for_all_sequences_with_an_exit_each() -> None:
    backend = FakeBackend(vocab_size=16)
    outputs = fake_run(skip_setup(backend, draft_len=6), backend, 5, temperature=1.0)
    sizes: list[list[int]] = []  # per round, the real rows of each draft pass
    for pass_ in backend.passes:
        real = int((pass_.rows.seq_rows > 0).sum())
        if pass_.kind is PassKind.CANONICAL:
            sizes.append([])
        elif pass_.view != FULL_VIEW:
            sizes[-1].append(real)
    rounds = [s for s in sizes if s]
    assert 3 <= max(map(len, rounds)) <= 6
    assert max(s[0] for s in rounds) == 5, "all sequences share a pass"
    assert all(a >= b for s in rounds for a, b in pairwise(s)), "an exit costs no further rows"
    assert any(s[0] > s[-1] for s in rounds), "and some sequences left earlier than others"
    drafted = sum(o.stats.drafted for o in outputs)
    assert drafted == sum(map(sum, rounds))
    assert sum(o.stats.draft_passes for o in outputs) == drafted
    assert all(o.stats.exit_threshold is not None for o in outputs)


def test_a_draft_ends_behind_a_stopping_token() -> None:
    backend = FakeBackend(vocab_size=4)
    engine = Engine(backend, family=(4, 8, 16), drafters=make_drafters(skip_setup(backend, FULL_VIEW, draft_len=8)))
    engine.add(Request([1, 2], SamplingParams(max_tokens=30, min_tokens=25, temperature=1.0, seed=2, stop_ids=(3,))))
    engine.add(
        Request(
            [1, 2],
            SamplingParams(max_tokens=30, temperature=1.0, seed=4, stop_ids=(3,)),
            speculation=Speculation("skip"),
        )
    )
    while engine.has_work:
        engine.step()
    for pass_ in backend.passes:
        if pass_.kind is PassKind.FAST:
            assert 3 not in pass_.rows.token_ids[pass_.rows.seq_rows > 0].tolist()


# Self-restraint


def restrained(agreement: float, attention: float, *, force: bool = False) -> list[SampleOutput]:
    backend = FakeBackend()
    menu = menu_of(View.without({0, 1}), agreement=agreement, attention=attention)
    setup = DraftSetup(backend=backend, find_menu=lambda: menu, force=force)
    return fake_run(setup, backend, 1, cost=CostTable((1, 64), (1.0, 1.0), (0.0, 0.0)))


def test_it_drafts_nothing_where_that_is_not_predicted_to_pay_and_says_so() -> None:
    (output,) = restrained(agreement=0.8, attention=0.02)
    assert output.stats.drafted == 0
    assert output.stats.no_draft_reason == (
        "layer skipping predicted 0.91x on this model and device; not drafting; --force to draft anyway"
    )


def test_forced_or_where_it_pays_it_drafts() -> None:
    for options in ({"agreement": 0.8, "attention": 0.02, "force": True}, {"agreement": 0.95, "attention": 0.4}):
        (output,) = restrained(**options)  # type: ignore[arg-type]
        assert output.stats.drafted > 0


def test_without_a_menu_it_says_how_to_get_one() -> None:
    backend = FakeBackend()
    (output,) = fake_run(DraftSetup(backend=backend), backend, 1)
    assert (output.stats.drafted, output.stats.no_draft_reason) == (0, NOT_TUNED)


def test_bad_acceptance_ends_drafting_and_a_new_sequence_tries_again(world: World) -> None:
    """Predicted to pay, it drafts; what it sees is far worse, so it stops, until something new begins."""
    menu = menu_of(EVERYTHING, agreement=0.9, attention=0.05, mlp=0.05)
    setup = DraftSetup(backend=world.backend, find_menu=lambda: menu)
    engine = world.engine(make_drafters(setup))
    drafted = []
    for seed in range(2):
        params = SamplingParams(max_tokens=120, temperature=2.0, seed=seed, ignore_eos=True)
        ((output,),) = run(engine, [Request([seed, 3], params, speculation=Speculation("skip"))])
        assert "not drafting" in output.stats.no_draft_reason
        drafted.append(output.stats.drafted)
    assert 0 < drafted[0] < 100
    assert 0 < drafted[1] < 100
