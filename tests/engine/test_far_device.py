"""A device that is far from the host: a pass takes a trip beside its own time, rounds of a burst do without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support import far_backend
from tests.support.adversaries import VOCAB_SIZE, collect
from tests.support.drafters import Eager
from tests.support.fake_backend import FakeBackend
from tests.support.far_backend import FarBackend
from tests.support.far_drafts import FarDrafts, Seconds
from tests.support.faulty_backends import WrappedBackend
from tests.support.sabotages import Restless
from tests.support.skipping import cheap_setup
from verispec.backends.cost import CostTable, measure_cost
from verispec.backends.protocol import Pass, PassResult, Ticket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request, policy, step_rates
from verispec.engine import engine as engine_module
from verispec.engine.policy import TOO_FAR_BEHIND, Policy
from verispec.engine.step_costs import StepCosts
from verispec.engine.step_rates import StepRates
from verispec.kv import Published, RadixPrefixCache
from verispec.spec import model_drafter
from verispec.spec.drafter import Curve, Refusal
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.tree import TreeShape
from verispec.spec.turn import CatchUp, SequenceView
from verispec.types import Draft, SampleOutput, SamplingParams

SHAPES = (1, 2, 4, 8, 16, 32, 64)
TRIP = 1.3e-3
NUM_TOKENS = 192


def seconds(num_rows: int) -> float:
    return 1e-3 * (1 + 0.16 * (num_rows - 1) / 7)


class Far(WrappedBackend):
    """Passes run one after the other; the host's clock goes on when it asks for a result, and half a trip each way."""

    def __init__(self, *, prepares: bool = True, num_stores: int = 1) -> None:
        fake = FakeBackend(
            vocab_size=VOCAB_SIZE, num_slots=4096, context_len=640, num_seq_rows=64, num_stores=num_stores
        )
        fake.limits = replace(fake.limits, prepares=prepares, trees=True)
        super().__init__(fake)
        self.now = self._free = 0.0

    def submit(self, pass_: Pass) -> Ticket:
        self.now += TRIP / 2
        self._free = max(self.now, self._free) + seconds(len(pass_.rows))
        if pass_.burst is not None:
            self._free += pass_.burst.num_rounds * seconds(pass_.burst.shape)
        return _FarTicket(self, self._free, super().submit(pass_))


class _FarTicket:
    def __init__(self, far: Far, end: float, ticket: Ticket) -> None:
        self._far, self._end, self._ticket = far, end, ticket

    def result(self) -> PassResult:
        self._far.now = max(self._far.now, self._end) + TRIP / 2
        return self._ticket.result()


class Knowing(Eager):
    """Drafts what it knows a request will answer, with every so many-th token wrong; promises what is true."""

    def __init__(self, answers: Mapping[int, Sequence[int]], wrong_every: int) -> None:
        self._answers, self._wrong_every = answers, wrong_every

    def curves(self, key: object) -> tuple[Curve, ...]:
        return (Curve.chain(8, 1 - 1 / self._wrong_every),)

    def guess(self, sequence: SequenceView, num_nodes: int) -> Draft:
        start = len(sequence.token_ids) - sequence.prompt_len
        known = self._answers[sequence.token_ids[0]][start : start + num_nodes]
        return Draft.chain([(t + ((start + i) % self._wrong_every == 0)) % VOCAB_SIZE for i, t in enumerate(known)])


def table(speed: float = 1.0) -> CostTable:
    return CostTable(SHAPES, tuple(speed * seconds(m) for m in SHAPES), (0.0,) * len(SHAPES), learns=True, trip=TRIP)


def served(method: str, count: int, wrong_every: int = 2, cost: CostTable | None = None) -> tuple[float, dict]:
    """Tokens a second, and every answer by the first token of its prompt; behind a wave to warm up."""
    backend, answers = Far(), dict[int, list[int]]()
    drafters = {"none": NoDrafter(), "suffix": Knowing(answers, wrong_every)}
    engine = Engine(
        backend, family=SHAPES, drafters=drafters, cost=cost or table(), clock=lambda: backend.now,
        config=EngineConfig(num_slots=4096, max_running=32, max_len=200, depth=2, prefix_cache=False),
    )  # fmt: skip
    for wave in ("none", method, method):
        start = backend.now
        ids = {
            engine.add(Request(
                [i, (i + 1) % VOCAB_SIZE], SamplingParams(max_tokens=NUM_TOKENS), Speculation(wave), is_streamed=False
            )): i for i in range(count)
        }  # fmt: skip
        for (request_id, _), output in collect(engine).items():
            answers[ids[request_id]] = list(output.token_ids)
    return count * NUM_TOKENS / (backend.now - start), answers


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("wrong_every", [2, 3, 5, 20])
def test_auto_knows_what_the_host_costs(count: int, wrong_every: int) -> None:
    found = {method: served(method, count, wrong_every) for method in ("none", "suffix", AUTO)}
    assert found[AUTO][0] >= 0.97 * max(rate for rate, _ in found.values())
    assert found[AUTO][1] == found["none"][1]


def test_control_a_table_that_knows_of_no_trip_drafts_where_that_is_slower() -> None:
    assert served(AUTO, 1, 2, replace(table(), trip=0.0, learns=False))[0] < 0.9 * served("none", 1)[0]


@pytest.mark.parametrize("tree", [None, "branch:2,2", "beam:3,2"])
def test_the_device_does_not_wait_for_the_host_between_drafted_bursts(tree: str | None) -> None:
    """Two flights deep, trips are hidden behind rounds but where choices are made anew. One deep, each burst pays."""
    speculation = Speculation("model", tree and TreeShape.parse(tree))
    took, outputs = {}, {}
    for depth in (1, 2):
        backend = Far(num_stores=2)
        engine = Engine(
            backend, family=SHAPES, drafters=make_drafters(cheap_setup(backend, 3)), cost=table(),
            clock=lambda far=backend: far.now,
            config=EngineConfig(num_slots=4096, max_len=640, depth=depth, max_burst=2, prefix_cache=False),
        )  # fmt: skip
        for i in range(4):
            engine.add(Request([i, 2], SamplingParams(max_tokens=400, seed=i), speculation, is_streamed=False))
        outputs[depth] = {key: output.digest for key, output in collect(engine).items()}
        took[depth] = backend.now
    assert outputs[1] == outputs[2]
    assert took[1] > 1.2 * took[2]


def test_passes_that_wait_for_others_are_timed_from_where_those_end() -> None:
    """Two flights: the second is submitted long before it can run."""
    cost = table(speed=3.0)
    served("none", 1, cost=cost)
    assert cost.seconds(1, 0) == pytest.approx(seconds(1), rel=0.1)


def test_calibration_finds_the_trip_and_what_passes_take_without_it() -> None:
    far, near = Far(), Far(prepares=False)
    cost = measure_cost(far, SHAPES, clock=lambda: far.now, budget_seconds=1e6)
    assert cost.trip == pytest.approx(TRIP, rel=0.05)
    assert cost.base == pytest.approx([seconds(m) for m in SHAPES], rel=0.05)
    as_one = measure_cost(near, SHAPES, clock=lambda: near.now, budget_seconds=1e6)
    assert as_one.base == pytest.approx([seconds(m) + TRIP for m in SHAPES], rel=0.05)  # control
    assert CostTable.from_data(cost.to_data()) == replace(cost, learns=False)


class Quiet(Eager):
    """Has nothing to draft, ever; counts how often a request of two tokens is looked at."""

    num_looks = 0

    def __init__(self, far: Far, look_seconds: float) -> None:
        self._far, self._look_seconds = far, look_seconds
        self.looked_at: set[int] = set()  # answers of so many tokens

    @property
    def now(self) -> float:
        return self._far.now

    def state(self, sequence: SequenceView) -> Refusal:
        self._far.now += self._look_seconds
        self.num_looks += sequence.prompt_len == 2
        self.looked_at.add(len(sequence.token_ids) - sequence.prompt_len)
        return Refusal("nothing")


def quiet_engine(look_seconds: float) -> tuple[Quiet, Engine]:
    backend = Far()
    quiet = Quiet(backend, look_seconds)
    engine = Engine(
        backend, family=SHAPES, drafters={"none": NoDrafter(), "suffix": quiet}, cost=table(),
        clock=lambda: backend.now,
        config=EngineConfig(num_slots=4096, max_running=32, max_len=600, depth=2, prefix_cache=False),
    )  # fmt: skip
    return quiet, engine


@pytest.mark.parametrize("arrivals", [False, True])
@pytest.mark.parametrize(("look_seconds", "fewest", "most"), [(TRIP, 16, 64), (1.8e-3, 4, 15)])
def test_who_rests_looks_again_also_while_others_come_and_go(
    arrivals: bool, look_seconds: float, fewest: int, most: int
) -> None:
    """A short look is hidden by the rounds in the air; a long one is not, and has to be rare."""
    quiet, engine = quiet_engine(look_seconds)
    request_id = engine.add(Request([1, 2], SamplingParams(max_tokens=500), Speculation("suffix")))
    num_steps, ended = 0, False
    while not ended:
        if arrivals and num_steps % 2 == 0:
            engine.add(Request([3, 4, 5], SamplingParams(max_tokens=4), Speculation("none")))
        ended = any(event.output is not None and event.request_id == request_id for event in engine.step())
        num_steps += 1
    assert fewest <= quiet.num_looks <= most


@pytest.mark.parametrize(
    ("count", "look_seconds", "is_early"), [(1, 1.2e-3, True), (1, 30e-3, False), (2, 1.2e-3, False)],
    ids=["alone", "alone, long looks", "two"],
)  # fmt: skip
def test_one_alone_is_looked_at_again_behind_its_first_rounds(count: int, look_seconds: float, is_early: bool) -> None:
    """If that takes little of the time it may have left; several would wait for each other's looks."""
    quiet, engine = quiet_engine(look_seconds)
    for _ in range(2):  # the first wave teaches how long looks take
        quiet.looked_at.clear()
        for i in range(count):
            engine.add(Request([1, 2 + i], SamplingParams(max_tokens=200), Speculation("suffix"), is_streamed=False))
        collect(engine)
    assert bool(quiet.looked_at & set(range(1, 9))) is is_early


def quiet_seconds(method: str) -> float:
    """Of 32 short answers at once, behind a wave that teaches how long looks take."""
    quiet, engine = quiet_engine(0.25e-3)
    start = 0.0
    for _ in range(2):
        start, quiet.num_looks = quiet.now, 0
        for i in range(32):
            params = SamplingParams(max_tokens=64, seed=i)
            engine.add(Request([1, 2], params, Speculation(method), is_streamed=False))
        reasons = {output.stats.no_draft_reason for output in collect(engine).values()}
        assert method == "none" or (quiet.num_looks >= 32 and "not asked yet" not in str(reasons))
    return quiet.now - start


def test_many_that_begin_are_asked_while_their_first_rounds_are_in_the_air(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control asks 32 sequences before anything is sent, and again when the first rounds have landed."""
    plain = quiet_seconds("none")
    assert quiet_seconds(AUTO) < 1.03 * plain
    monkeypatch.setattr(Policy, "are_long_looks", lambda *_: False)
    assert quiet_seconds(AUTO) > 1.05 * plain


# Where nothing pays, who may draft is as quick as who may not; what pays is found.

WORDS, NUM_NEW = 5000, 96


def words(seed: int, length: int) -> list[int]:
    """Text in which words recur, but not what follows them."""
    return (WORDS ** np.random.default_rng(seed).random(length)).astype(int).tolist()


def played(
    method: str, count: int, *, quotes: bool = False, lead: int = 0, look_seconds: float = 0.0, bits: int = 0,
    drafted: float = 0.0, num_waves: int = 2,
) -> tuple[float, list[str]]:  # fmt: skip
    """Tokens a second of the last of some waves of answers, and their digests. They quote behind `lead` words, or now
    and then so many words, behind as many of their own. Rounds that the device drafts take `drafted` more seconds."""
    prompts = [words(i, 200) for i in range(count)]

    def text(seed: int) -> list[int]:
        prompt = prompts[seed % count]
        told = words(count + seed, NUM_NEW)  # by no prompt's seed: it would be a quote
        if bits:
            for start in range(bits, NUM_NEW - bits, 2 * bits):
                at = (37 * start + seed) % (len(prompt) - bits)
                told[start : start + bits] = prompt[at : at + bits]
        return prompt + (told[:lead] + prompt[seed % 50 :][: NUM_NEW - lead] if quotes else told)

    backend = FarBackend(
        text, vocab_size=WORDS, num_slots=64 * count * 300, context_len=300, num_seq_rows=count, drafted=drafted
    )
    cost = CostTable(far_backend.ROWS, far_backend.SECONDS, (0.0,) * 4, learns=True, trip=far_backend.TRIP)
    drafters = make_drafters(DraftSetup(backend=backend, cost=cost, history_len=0))  # type: ignore[arg-type]
    engine = Engine(
        backend, family=FarBackend.shapes, drafters=drafters, cost=cost, clock=lambda: backend.now,  # type: ignore[arg-type]
        config=EngineConfig(num_slots=64 * count * 300, row_budget=2048, max_running=count, depth=2),
    )  # fmt: skip
    states = engine._policy.states

    def slow_states(sequence: SequenceView) -> Any:
        backend._waited += look_seconds
        return states(sequence)

    engine._policy.states = slow_states
    start, digests = 0.0, list[str]()
    for wave in range(num_waves):
        start = backend.now
        for i in range(count):
            params = SamplingParams(max_tokens=NUM_NEW, seed=i + wave * count)
            engine.add(Request(prompts[i], params, Speculation(method), is_streamed=False, batch=1 + wave))
        digests = [output.digest for _, output in sorted(collect(engine).items())]
    return count * NUM_NEW / (backend.now - start), digests


@pytest.mark.parametrize(("count", "share"), [(1, 0.95), (8, 0.97), (32, 0.97)])
@pytest.mark.parametrize("method", ["suffix", "lookup", AUTO])
def test_who_has_nothing_to_draft_is_as_quick_as_who_may_not(method: str, count: int, share: float) -> None:
    """A single one tries drafts in its first rounds, where rows cost little: 96 tokens pay a few percent for that."""
    plain, found = played("none", count), played(method, count)
    assert found[0] >= share * plain[0]
    assert found[1] == plain[1]


def test_control_who_does_not_rest_lets_the_device_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = played("none", 8)[0]
    monkeypatch.setattr(engine_module, "Policy", Restless)
    assert played(AUTO, 8)[0] < 0.95 * plain


@pytest.mark.parametrize(("count", "gain", "look_seconds"), [(1, 4.0, 0.0), (8, 1.8, 0.0), (8, 1.8, 0.2e-3)])
def test_an_answer_that_begins_to_quote_is_drafted(count: int, gain: float, look_seconds: float) -> None:
    """Also where looks take long, so that the first one is made when the answer has begun."""
    plain, found = played("none", count, quotes=True), played(AUTO, count, quotes=True, look_seconds=look_seconds)
    assert found[0] >= gain * plain[0]
    assert found[1] == plain[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_rounds_that_take_longer_than_their_passes_are_learned(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By passes alone drafts of what is quoted now and then would pay. The control believes that."""
    how: dict[str, Any] = {"bits": bits, "drafted": 0.15e-3, "num_waves": 6}
    plain, found = played("none", 1, **how), played(AUTO, 1, **how)
    assert found[0] >= 0.97 * plain[0]
    assert found[1] == plain[1]
    monkeypatch.setattr(Policy, "note_burst", lambda self, turns: None)
    monkeypatch.setattr(step_rates, "_BEYOND", 0.0)
    assert played(AUTO, 1, **how)[0] < 0.94 * plain[0]


def test_what_pays_with_the_time_of_its_rounds_is_drafted() -> None:
    how: dict[str, Any] = {"bits": 5, "drafted": 0.05e-3, "num_waves": 6}
    assert played(AUTO, 1, **how)[0] > 1.05 * played("none", 1, **how)[0]


def test_what_rounds_take_is_learned_both_ways_and_by_drafter_and_load() -> None:
    rates = StepRates(StepCosts((), table(), row_budget=64), table(), row_budget=64, max_draft=None, max_burst=16,
                      fits_rows=False)  # fmt: skip
    believed = rates.beyond("lookup", 1)
    for _ in range(60):
        rates.note_burst("lookup", 1, 16 * 1.3e-3, 16 * 1.0e-3, 16)
        rates.note_burst("lookup", 8, 16 * 0.9e-3, 16 * 1.0e-3, 16)
        rates.note_burst("model", 1, 16 * 9e-3, 16 * 1.0e-3, 16)  # the host was late for it
        rates.note_burst("model", 1, 16 * 0.1e-3, 16 * 1.0e-3, 16)  # or for the one before
    assert abs(rates.beyond("lookup", 1) - 0.3e-3) < 0.03e-3
    assert abs(rates.beyond("lookup", 8) + 0.1e-3) < 0.03e-3
    assert rates.beyond("model", 1) == rates.beyond("lookup", 64) == believed
    assert rates.version > 10
    near = replace(table(), trip=0.0)
    assert StepRates(StepCosts((), near, row_budget=64), near, row_budget=64, max_draft=None, max_burst=16,
                     fits_rows=False).beyond("lookup", 1) == 0.0  # fmt: skip


@pytest.mark.parametrize("look_seconds", [0.05e-3, 0.2e-3])
@pytest.mark.parametrize("method", ["lookup", AUTO])
def test_answers_that_quote_behind_their_first_words_are_drafted(
    method: str, look_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control looks at beginnings as rarely as at the rest; short looks by those that were not in vain are frequent
    anyway."""
    plain, found = (
        played("none", 8, quotes=True, lead=8),
        played(method, 8, quotes=True, lead=8, look_seconds=look_seconds),
    )
    assert found[0] >= 1.4 * plain[0]
    assert found[1] == plain[1]
    if look_seconds > 0.1e-3:
        monkeypatch.setattr(policy, "_REST_AT_FIRST", policy._LONGEST_REST)
        assert played(method, 8, quotes=True, lead=8, look_seconds=look_seconds)[0] < 0.9 * found[0]


def drafted_by_force(method: str, *, is_late: bool) -> int:
    """By one request beside another that does not draft."""
    backend, found = Far(num_stores=2), dict[int, SampleOutput]()
    setup = replace(cheap_setup(backend, 3), draft_cost=replace(table(0.9), trip=0.0))
    engine = Engine(
        backend, family=SHAPES, drafters=make_drafters(setup), cost=table(), clock=lambda: backend.now,
        config=EngineConfig(num_slots=4096, max_running=8, max_len=600, depth=2, prefix_cache=False),
    )  # fmt: skip
    params = SamplingParams(max_tokens=400, seed=5)
    engine.add(Request([7, 2], params, Speculation("none"), is_streamed=False))
    for _ in range(3 * is_late):
        engine.step()
    late = engine.add(Request([1, 2, 3], replace(params, max_tokens=200), Speculation(method), is_streamed=False))
    while engine.has_work:
        found |= {event.request_id: event.output for event in engine.step() if event.output is not None}
    return found[late].stats.drafted


@pytest.mark.parametrize("method", ["model", "decode"])
@pytest.mark.parametrize("is_late", [False, True])
def test_who_is_to_draft_by_force_does_so_also_beside_others(
    method: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that does not pay: a draft model that takes as long as the target, and windows of passes like others. Who
    joins while others are in the air begins at rest; the control leaves it there."""
    assert drafted_by_force(method, is_late=is_late) > 100
    monkeypatch.setattr(Policy, "_stays", lambda self, turn, last, entries, crowd: not last.drafter)
    assert bool(drafted_by_force(method, is_late=is_late)) is not is_late


class Preparing(Far):
    """The first pass that drafts takes the host a second: graphs are captured."""

    is_prepared = False

    def submit(self, pass_: Pass) -> Ticket:
        if pass_.burst is not None and pass_.burst.drafts and not self.is_prepared:
            self.now, self.is_prepared = self.now + 1.0, True
        return super().submit(pass_)


def accepted_one_by_one() -> list[int]:
    """Of four answers, each behind the last, by a draft model that agrees."""
    backend = Preparing(num_stores=2)
    backend.inner.markov[1] = backend.inner.markov[0]
    setup = replace(cheap_setup(backend, 4), force=False, draft_cost=replace(table(0.2), trip=0.0))
    engine = Engine(
        backend, family=SHAPES, drafters=make_drafters(setup), cost=table(), clock=lambda: backend.now,
        config=EngineConfig(num_slots=4096, max_running=4, max_len=200, depth=2, prefix_cache=False),
    )  # fmt: skip
    found = []
    for i in range(4):
        params = SamplingParams(max_tokens=100, temperature=1.0, seed=i)
        engine.add(Request([i, 1, 2], params, Speculation("model"), is_streamed=False))
        (output,) = collect(engine).values()
        found.append(output.stats.accepted)
    return found


def test_what_preparing_takes_keeps_no_drafts_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control takes it for what every round costs the host."""
    assert min(accepted_one_by_one()) > 30
    monkeypatch.setattr(engine_module, "_PREPARING", 10.0)
    assert max(accepted_one_by_one()[1:]) == 0


@pytest.mark.parametrize("num_quoting", [8, 3])
def test_a_batch_that_quotes_drafts_together(num_quoting: int) -> None:
    """Prompts of many lengths, so that looks would not be due at once; where only some quote, the batch ends with the
    others, and loses nothing by it."""
    rng, taken = np.random.default_rng(1), {}
    prompts = [rng.integers(2, 40_000, 100 + 120 * i).tolist() for i in range(8)]

    def text(seed: int) -> list[int]:
        new = np.random.default_rng(100 + seed).integers(2, 40_000, 300).tolist()
        return prompts[seed] + (new[:60] + prompts[seed] * 3 if seed < num_quoting else new)[:260]

    for method in ("none", "lookup"):
        backend = FarBackend(text, vocab_size=49_152, num_slots=32_000, context_len=2048, num_seq_rows=8)
        cost = CostTable(
            far_backend.ROWS, far_backend.SECONDS, (0.0,) * len(far_backend.ROWS), learns=True, trip=far_backend.TRIP
        )
        engine = Engine(
            backend, family=FarBackend.shapes, drafters=make_drafters(DraftSetup(backend=backend, cost=cost)),
            cost=cost, clock=lambda backend=backend: backend.now,
            config=EngineConfig(num_slots=32_000, row_budget=2048, max_running=8, depth=2),
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=256, seed=i, ignore_eos=True)
            engine.add(Request(prompt, params, Speculation(method), is_streamed=False, batch=1))
        while engine.has_work:
            engine.step()
        taken[method] = backend.now
    ratio = taken["lookup"] / taken["none"]
    assert ratio < 0.85 if num_quoting == 8 else ratio < 1.03


# A draft model that reads what was committed without it.

SHORT_ANSWER = 24


class DraftedOneByOne:
    """A draft model that knows most of the text, on a device of known times; answers one behind the other."""

    def __init__(self, *, force: bool = False) -> None:
        seconds = Seconds()
        self.backend = backend = FarDrafts(seconds, likeness=0.97, vocab_size=64, context_len=1024)
        cost, draft_cost = (
            CostTable((1, 512), (first, first + 511 * row), (0.0, 0.0), trip=seconds.trip)
            for first, row in ((seconds.target, seconds.row), (seconds.draft, seconds.row / 2))
        )
        setup = DraftSetup(backend=backend, cost=cost, draft_cost=draft_cost, force=force, history_len=0)
        self.engine = Engine(
            backend, family=FarDrafts.shapes, drafters=make_drafters(setup), cost=cost, clock=lambda: backend.now,
            config=EngineConfig(num_slots=8 * 1024, max_running=4, depth=2),
        )  # fmt: skip

    def answer(self, seed: int, method: str, max_tokens: int = SHORT_ANSWER, prompt_len: int = 200) -> SampleOutput:
        prompt = np.random.default_rng(seed).integers(4, 64, prompt_len).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=1, ignore_eos=True)
        self.engine.add(Request(prompt, params, Speculation(method), is_streamed=False))
        (output,) = collect(self.engine).values()
        self.engine.check()
        return output

    def counts(self, methods: Sequence[str], num_prompts: int = 4) -> tuple[int, int]:
        """Passes of the draft model by themselves, and waits for them, in answers to prompts by the last method; those
        of all methods are the same."""
        num_passes = num_waits = 0
        for seed in range(num_prompts):
            outputs = [self.answer(seed, method) for method in methods[:-1]]
            passes, waits = self.backend.num_draft_passes, self.backend.num_waits
            outputs.append(self.answer(seed, methods[-1]))
            num_passes += self.backend.num_draft_passes - passes
            num_waits += self.backend.num_waits - waits
            assert len({output.digest for output in outputs}) == 1
            assert outputs[-1].stats.accepted
        return num_passes, num_waits


def test_what_a_draft_model_has_read_of_a_cached_prompt_is_not_read_again() -> None:
    assert DraftedOneByOne().counts(["model", "model"]) == (0, 0)


def test_auto_reads_at_most_what_it_drew_plainly() -> None:
    """Where it does not draft from the first round on; nobody waits for that."""
    num_passes, num_waits = DraftedOneByOne().counts(["model", AUTO], num_prompts=4)
    assert num_passes < 4
    assert num_waits == 0


class Forgetful(RadixPrefixCache):
    """Takes what was computed in slots that are given up for lost, though the cache's copy has it too."""

    def publish(
        self, token_ids: Sequence[int], slots: list[int], valid_lens: tuple[int, ...], **rest: Any
    ) -> Published:
        found = super().publish(token_ids, list(slots), valid_lens, **rest)
        same = next((i for i, (a, b) in enumerate(zip(slots, found.slots, strict=True)) if a != b), len(slots))
        return found._replace(valid_lens=tuple(min(length, same) for length in found.valid_lens))


def test_control_a_cache_that_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first step of every answer."""
    monkeypatch.setattr(engine_module, "RadixPrefixCache", Forgetful)
    assert DraftedOneByOne().counts(["model", "model"])[0] >= 4


@pytest.mark.parametrize("before", [[], ["none"]])
@pytest.mark.parametrize("method", ["model", AUTO])
def test_nobody_waits_while_a_draft_model_reads_a_prompt(method: str, before: list[str]) -> None:
    """It reads the prompt once, right before its first draft, though the cache has it already; later only what others
    drafted meanwhile."""
    num_passes, num_waits = DraftedOneByOne().counts([*before, method])
    assert num_waits == 0
    assert num_passes == 4 or (method == AUTO and 4 < num_passes < 8)


def awaited(ticket: Ticket) -> CatchUp:
    ticket.result()
    return CatchUp(None)


def test_control_who_waits_for_a_draft_model_that_reads_a_prompt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_drafter, "CatchUp", awaited)
    assert DraftedOneByOne().counts(["model"]) == (4, 4)


@pytest.mark.parametrize(
    ("max_tokens", "prompt_len", "drafts"), [(12, 800, False), (12, 20, True), (120, 800, True), (40, 800, True)]
)
def test_a_prompt_is_read_where_the_answer_can_save_as_much(max_tokens: int, prompt_len: int, drafts: bool) -> None:
    bench = DraftedOneByOne()
    for seed in range(4, 7):  # what drafts are worth
        bench.answer(seed, "model", 100)
    output = bench.answer(0, "model", max_tokens, prompt_len)
    assert bool(output.stats.drafted) is drafts
    assert drafts or output.stats.no_draft_reason == TOO_FAR_BEHIND.reason
    assert DraftedOneByOne(force=True).answer(0, "model", max_tokens, prompt_len).stats.drafted
    bench.answer(1, "model", 120, prompt_len)
    assert bench.answer(1, "model", max_tokens, prompt_len).stats.drafted, "it knows the prompt"
