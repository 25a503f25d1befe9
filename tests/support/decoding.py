"""Regular decoding under watch: an engine with windows on a fake backend, and what must hold after every step.

`Watched` compares each client's stream with the oracle as it arrives, the K/V of committed positions with that of
canonical passes, and every pass with the rules for passes. Whoever breaks the promise fails here with AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from tests.support.adversaries import VOCAB_SIZE, alone, facts, keep_apart
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import AgreeingFastPasses, FaultyFastPasses, Redraw, WrappedBackend
from tests.support.skipping import cheap_setup
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.pass_builder import padded
from verispec.backends.protocol import FULL_VIEW, Backend, Pass, PassKind, PassResult, TableUpdate, Wanted
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.sequence import Sequence as EngineSequence
from verispec.kv import DRAFT_STORE, NUM_RESERVED, TARGET_STORE, RadixPrefixCache
from verispec.spec.decode import DecodeConfig, DecodeDrafter
from verispec.spec.drafter import Drafter, Held
from verispec.spec.none import NoDrafter
from verispec.spec.registry import LOOKUP_DRAFTER, MODEL_DRAFTER, SKIP_DRAFTER, make_drafters
from verispec.spec.speculation import AUTO
from verispec.spec.suffix import SuffixDrafter
from verispec.text.detokenizer import TextStream
from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenEvent, TokenLogprob, Totals

MAX_LEN = 72
FAMILY = (4, 8, 16)
PROMPT = (0, 1, 2)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=2)
# A pass costs its rows: where only large shapes are canonical, regular decoding is far cheaper than plain decoding.
STEEP_COST = CostTable((1, 64), (1.0, 64.0), (0.0, 0.0))


class Letters:
    """A tokenizer: token i is the i-th letter."""

    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id])


@cache
def letters(*stop: str) -> Callable[[], TextStream]:
    """What makes the text of each sample, with these stop strings; one object, by which the oracle knows a request."""
    return partial(TextStream, Letters(), stop)


def oracle(request: Request) -> tuple[SampleOutput, ...]:
    """What each sample of a deterministic request must give."""
    return alone(request, max_len=MAX_LEN)


_canonical: dict[tuple[int, ...], int] = {}


def canonical_hash(prefix: tuple[int, ...]) -> int:
    """The K/V of a prefix's last token, by one canonical pass over the prefix in a fresh backend."""
    if prefix not in _canonical:
        backend, count = FakeBackend(num_slots=MAX_LEN, context_len=MAX_LEN), len(prefix)
        built = padded(prefix, range(count), range(NUM_RESERVED, NUM_RESERVED + count), [1] * count, shape=count)
        update = TableUpdate(built.seq_rows, built.positions, built.slots)
        backend.submit(Pass(PassKind.CANONICAL, built, Wanted(), update, head_shape=0))
        for i in range(len(prefix)):
            _canonical[prefix[: i + 1]] = int(backend.kv[0, NUM_RESERVED + i])
    return _canonical[prefix]


class Recording(WrappedBackend):
    """The rounds of the last step, and who drew what in which kind; checks their rows."""

    engine: Engine

    def __init__(self, inner: Backend, family: Sequence[int]) -> None:
        super().__init__(inner)
        self._family = tuple(family)
        self.passes: list[Pass] = []
        self.drawn: set[tuple[int, int, int, PassKind]] = set()

    def run(self, pass_: Pass) -> PassResult:
        roster = self.engine._roster
        owners = {s.kv.seq_row: s for s in (*roster.running, *roster.departing)}
        self._check_rows(pass_, owners)
        self.passes.append(pass_)
        result, wanted = self.inner.run(pass_), pass_.wanted.draw
        if wanted is not None and result.draw is not None:
            seq_rows, positions = (a[wanted.rows].tolist() for a in (pass_.rows.seq_rows, pass_.rows.positions))
            for seq_row, position, token_id in zip(seq_rows, positions, result.draw.token_ids, strict=True):
                self.drawn.add((owners[seq_row].sequence_id, position + 1, int(token_id), pass_.kind))
        return result

    def _check_rows(self, pass_: Pass, owners: Mapping[int, EngineSequence]) -> None:
        leased = {slot for lease in self.engine._pool.leases for slot in lease.slots}
        written = [slot for slot in pass_.rows.slots.tolist() if slot >= NUM_RESERVED]
        if pass_.store != TARGET_STORE:
            return  # a draft model catches up with what is committed, also where sequences share it
        assert len(set(written)) == len(written), "two rows write to one slot"
        assert set(written) <= leased, "a row writes to a slot that is not leased"
        rows = [owners[r] for r in pass_.rows.seq_rows.tolist() if r]
        if pass_.kind is PassKind.CANONICAL:
            assert len(pass_.rows) in self._family, f"a canonical pass of {len(pass_.rows)} rows"
            assert pass_.head_shape in (0, *self._family), f"a canonical head of {pass_.head_shape} rows"
        elif pass_.view == FULL_VIEW:
            deterministic = [s for s in rows if s.params.deterministic]
            assert all(s.speculation.method in ("decode", AUTO) for s in deterministic), (
                "a deterministic row in a fast pass"
            )
            assert len({s.sequence_id for s in deterministic}) == len(deterministic), "decoding is one row a step"


@dataclass
class Stream:
    """What a client has received of one sample, and what it must receive."""

    request: Request
    sequence: EngineSequence
    truth: SampleOutput | None  # None: the request asked for no determinism
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    output: SampleOutput | None = None
    is_aborted: bool = False
    num_events: int = 0

    def receive(self, event: TokenEvent) -> None:
        assert self.output is None, "an event after the last one"
        self.logprobs += event.logprobs
        self.text += event.text
        self.output = event.output
        self.num_events += 1
        if self.truth is not None:
            expected = self.truth.logprobs[: len(self.logprobs)]
            assert repr(self.logprobs) == repr(list(expected)), "not what the oracle gives"
        if self.output is not None:
            assert (list(self.output.logprobs), self.output.text) == (self.logprobs, self.text), "the stream differs"
            if self.truth is not None and not self.is_aborted:
                assert facts(self.output) == facts(self.truth), "another end than the oracle's"


class Watched:
    """An engine whose drafter `decode` has windows of `window_len` tokens, stepped by hand and checked every step.

    `agreeing` makes fast passes equal to canonical ones, `redraw` spoils what they draw, `apart` keeps fast rows out of
    canonical passes. `deep` compares K/V as well. With a `draft_len` there are `skip`, `model` and `lookup` too. `wrap`
    puts something between the engine and the backend that is watched, `device` something behind it, `wrap_drafter`
    something around drafter `decode`.
    """

    def __init__(
        self,
        window_len: int = 4,
        *,
        decode: DecodeConfig | None = None,
        agreeing: bool = False,
        redraw: Redraw | None = None,
        num_slots: int = 256,
        family: Sequence[int] = FAMILY,
        cost: CostTable = FLAT_COST,
        clock: Callable[[], float] = lambda: 0.0,
        apart: bool = False,
        deep: bool = True,
        draft_len: int = 0,
        wrap: Callable[[Any], Any] = lambda backend: backend,
        device: Callable[[Any], Any] = lambda backend: backend,
        wrap_drafter: Callable[[DecodeDrafter], Drafter] = lambda drafter: drafter,
        **options: int,
    ) -> None:
        self.fake = FakeBackend(
            vocab_size=VOCAB_SIZE, context_len=MAX_LEN, num_slots=num_slots, num_stores=2 if draft_len else 1,
            looks_up=draft_len > 0,
        )  # fmt: skip
        backend: Backend = AgreeingFastPasses(self.fake) if agreeing else self.fake
        backend = device(backend)
        self.backend = Recording(backend if redraw is None else FaultyFastPasses(backend, redraw), family)
        self.decode = DecodeDrafter(decode or DecodeConfig(window_len=window_len))
        drafters: dict[str, Drafter] = {
            "none": NoDrafter(),
            "suffix": SuffixDrafter(),
            "decode": wrap_drafter(self.decode),
        }
        engine_side = wrap(self.backend)
        if draft_len:
            self.fake.markov[DRAFT_STORE] += 4 * self.fake.markov[TARGET_STORE]  # right now and then
            made = make_drafters(cheap_setup(engine_side, draft_len))
            drafters |= {name: made[name] for name in (SKIP_DRAFTER, MODEL_DRAFTER, LOOKUP_DRAFTER)}
        config = EngineConfig(num_slots=num_slots, **{"max_len": min(MAX_LEN, num_slots), **options})
        self.engine = Engine(
            engine_side,
            family=family,
            drafters=drafters,
            default_drafter="decode",
            config=config,
            cost=cost,
            clock=clock,
        )
        if apart:
            keep_apart(self.engine)
        self.backend.engine = self.engine
        self.deep = deep
        self.streams: dict[int, list[Stream]] = {}
        self.passes: list[Pass] = []  # of all steps
        self.num_joined = 0  # steps whose canonical pass had the fast rows too
        self.totals = Totals()  # of the samples that have ended

    def add(self, request: Request) -> int:
        request_id = self.engine.add(request)
        truths = oracle(request) if request.params.deterministic else (None,) * request.params.n
        sequences = self.engine._live[request_id]
        self.streams[request_id] = [Stream(request, s, truth) for s, truth in zip(sequences, truths, strict=True)]
        return request_id

    def ask(self, prompt: Sequence[int] = PROMPT, params: SamplingParams = SAMPLED, **options: object) -> int:
        """Add a request with drafter `decode`."""
        return self.add(Request(tuple(prompt), params, **options))  # type: ignore[arg-type]

    def abort(self, request_id: int) -> bool:
        for stream in self.streams[request_id]:
            stream.is_aborted = stream.output is None
        return self.engine.abort(request_id)

    def step(self) -> list[TokenEvent]:
        self.backend.passes, self.backend.drawn = [], set()
        self.fake.passes.clear()
        live = [sequence for samples in self.engine._live.values() for sequence in samples]
        fast_before = sum(s.stats.fast_passes for s in live)
        events = self.engine.step()
        had_fast_rows = sum(s.stats.fast_passes for s in live) > fast_before
        self.num_joined += had_fast_rows and [p.kind for p in self.backend.passes] == [PassKind.CANONICAL]
        self.passes += self.backend.passes
        for event in events:
            self._receive(event)
        self.check()
        free = self.engine._pool._free
        self.fake.kv[:, free] ^= np.uint64(0x5DEECE66D)  # rubbish: whoever reads a free slot shows
        return events

    def finish(self, max_steps: int = 10_000) -> dict[int, SampleOutput]:
        """Step until nothing is left, and look at the books; sample 0 of every request that ended by now."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"not finished after {max_steps} steps"
        pool = self.engine._pool
        assert pool.leases == ()
        assert self.engine.num_free_slots == pool.num_slots, "slots are held after the last request"
        assert self.engine.totals == self.totals, "the totals are not the sums"
        return {i: s[0].output for i, s in self.streams.items() if s[0].output is not None}

    def sequence(self, request_id: int, sample_index: int = 0) -> EngineSequence:
        return self.streams[request_id][sample_index].sequence

    def real_rows(self, kind: PassKind) -> list[int]:
        """Rows of every pass of a kind so far, padding not counted."""
        return [int((p.rows.seq_rows > 0).sum()) for p in self.passes if p.kind is kind]

    def check(self) -> None:
        """The books, windows and leases; with `deep` the K/V of everything that counts as canonical."""
        self.engine.check()
        for s in self.engine._roster.running:
            stream = self._stream(s)
            assert [e.token_id for e in stream.logprobs] == s.token_ids[s.prompt_len :], "a commit was not reported"
            window = self.decode.state(s)
            if not s.kv.num_flights and s.kv.lease is not None:
                num_kept = 1 + window.target_len if isinstance(window, Held) else 0
                assert len(s.kv.lease.slots) <= num_kept, "a lease between steps"
        if self.deep:
            everyone = [stream.sequence for samples in self.streams.values() for stream in samples]
            committed = {tuple(s.token_ids[:i]) for s in everyone for i in range(1, s.committed_len + 1)}
            kv = self.fake.kv[0]
            for s in self.engine._roster.running:
                for i in range(s.kv.canonical_len):
                    assert int(kv[s.slots[i]]) == canonical_hash(tuple(s.token_ids[: i + 1])), "K/V is not canonical"
            for prefix, slot in self.cached_prefixes():
                assert prefix in committed, "the prefix cache holds what nobody committed"
                assert int(kv[slot]) == canonical_hash(prefix), "the prefix cache holds K/V that is not canonical"

    def cached_prefixes(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Every path of the prefix cache from the root, with the slot of its last token."""
        if isinstance(self.engine._cache, RadixPrefixCache):
            stack = [((), root) for root in self.engine._cache._roots.values()]
            while stack:
                path, node = stack.pop()
                for i, slot in enumerate(node.slots):
                    yield (*path, *node.token_ids[: i + 1]), slot
                stack += [((*path, *node.token_ids), child) for child in node.children.values()]

    def _stream(self, sequence: EngineSequence) -> Stream:
        return self.streams[sequence.request_id][sequence.sample_key.sample_index]

    def _receive(self, event: TokenEvent) -> None:
        stream = self.streams[event.request_id][event.sample_index]
        start = stream.sequence.prompt_len + len(stream.logprobs)
        stream.receive(event)
        if stream.truth is not None:
            for i, token_id in enumerate(event.token_ids):
                drawn = (stream.sequence.sequence_id, start + i, token_id, PassKind.CANONICAL)
                assert drawn in self.backend.drawn, "a committed token that no canonical pass drew"
        if event.output is not None:
            self.totals.add(event.output.stats, len(event.output.token_ids))


def finish_reasons(watched: Watched) -> set[FinishReason]:
    """Why samples ended."""
    return {s.output.finish_reason for samples in watched.streams.values() for s in samples if s.output is not None}
