"""Resident state on every backend: sampling inputs against the reference, bursts against single passes, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest

from tests.backends.test_conformance import BACKENDS, NUM_SLOTS, PROMPT
from tests.backends.test_provisions import as_bits
from tests.support.passes import NO_UPDATE, RowsBuilder, Tape, joined
from tests.support.sampling_rows import History, SamplingRowsBuilder
from verispec.backends import native_backend, native_library
from verispec.backends.protocol import (
    FROM_STATE,
    Backend,
    BackendLimits,
    Burst,
    DrawWanted,
    Noise,
    Pass,
    PassKind,
    PassResult,
    Rows,
    TableUpdate,
    Wanted,
)
from verispec.backends.resident import Resident
from verispec.errors import InputError
from verispec.kv import NUM_RESERVED
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, Sampler, SamplingRows
from verispec.types import NO_PARENT, Draft, SamplingParams

LIMITS = BackendLimits(vocab_size=16, context_len=256, num_slots=NUM_SLOTS, num_seq_rows=8, max_tail=32)
STOP = (3, 99)  # 99 is not in the vocabulary
PARAMS = {
    "greedy": {},
    "filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": -0.25},
    "all penalties": {"repetition_penalty": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.3},
    "bias": {"logit_bias": ((2, 3.0), (5, -1.0))},
    "least length": {"temperature": 1.0, "min_tokens": 4, "logit_bias": ((3, 9.0),)},
}  # fmt: skip
FEW = {"temperature": 2.0, "logit_bias": ((3, 24.0), (5, 30.0), (7, 30.0))}  # tokens: a text that repeats itself
REPEATING_PARAMS = {
    "few": FEW,
    "few, filters": {**FEW, "top_k": 2, "top_p": 0.9},
    "few, penalties": {**FEW, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "few, least length": {**FEW, "min_tokens": 9},
}
PROMPT_LEN, NUM_OUTPUT = 5, 3
TREE = Draft((7, 7, 1, 2, 3, 3), (NO_PARENT, 0, 0, 1, NO_PARENT, 4))


def sampler(name: str, *, seed: int = 7, limit: int = 200, stop_ids: tuple[int, ...] = STOP) -> Sampler:
    params = SamplingParams(**(PARAMS | REPEATING_PARAMS)[name])  # type: ignore[arg-type]
    return Sampler(params, SampleKey(seed, seed % 3), PROMPT_LEN, limit, stop_ids)


def same(found: SamplingRows, expected: SamplingRows) -> bool:
    if found.masks is not None or expected.masks is not None:
        return False  # no row here has one, and the table of masks belongs to no row
    for name in {field.name for field in fields(SamplingRows)} - {"masks", "allowed"}:
        a, b = getattr(found, name), getattr(expected, name)
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            return False
    return True


def expected_rows(bound: Sampler, tape: Tape, rows: list[tuple[int, tuple[int, ...]]], stream: int) -> SamplingRows:
    """Of rows behind so many tokens of the tape and a path, by the reference."""
    builder = SamplingRowsBuilder()
    for length, path in rows:
        output = tape.token_ids[PROMPT_LEN:length]
        builder.add(
            bound.params, bound.key, t=length + len(path), path_ids=path, stopping_ids=bound.stop_ids,
            history=History(frozenset(tape.token_ids[:PROMPT_LEN]), Counter(output), len(output)),
            vocab_size=LIMITS.vocab_size, stream=stream,
        )  # fmt: skip
    return builder.build()


@pytest.mark.parametrize("stream", [0, 259])
@pytest.mark.parametrize("name", list(PARAMS))
def test_sampling_inputs_are_those_of_the_reference(name: str, stream: int) -> None:
    """Rows of a chain and of a tree, also on a table row whose last owner had everything switched on."""
    for before in ("", "all penalties", "least length"):
        resident = Resident(LIMITS)
        if before:
            old = sampler(before, seed=3, limit=9, stop_ids=(1, 2, 4, 6, 8))
            resident.bind(1, old)
            note(resident, Tape(None, seq_row=1, first_slot=0), PROMPT[50:70])  # type: ignore[arg-type]
        bound, tape = sampler(name), Tape(None, seq_row=1, first_slot=40)  # type: ignore[arg-type]
        resident.bind(1, bound)
        note(resident, tape, PROMPT[: PROMPT_LEN + NUM_OUTPUT - 2])
        builder = RowsBuilder()
        chain, update = tape.add_prompt_rows(builder, [1, 1])
        nodes = tape.add_draft_rows(builder, TREE, scratch=100)
        rows = resident.take(a_pass(builder.build(16), Wanted(), update)).rows
        drawn = np.array([*chain, *nodes], np.int32)
        noise = Noise(rows.positions[drawn].astype(np.int64) + 1, np.full(len(drawn), stream)) if stream else None
        first = len(tape.token_ids)
        wanted: list[tuple[int, tuple[int, ...]]] = [(first - 1, ()), (first, ())]
        wanted += [(first, tuple(TREE.token_ids[i] for i in TREE.path_to(node))) for node in range(len(TREE))]
        assert same(resident.sampling(rows, drawn, noise), expected_rows(bound, tape, wanted, stream))  # type: ignore[arg-type]
        # The control: the rules of another row must not do.
        resident.bind(1, sampler("greedy", seed=8))
        assert not same(resident.sampling(rows, drawn, noise), expected_rows(bound, tape, wanted, stream))  # type: ignore[arg-type]


def note(resident: Resident, tape: Tape, token_ids: list[int]) -> None:
    builder = RowsBuilder()
    _, update = tape.add_prompt_rows(builder, token_ids)
    resident.take(a_pass(builder.build(32), Wanted(), update))


def a_pass(rows: Rows, wanted: Wanted, update: TableUpdate, **more: object) -> Pass:
    return Pass(PassKind.CANONICAL, rows, wanted, update, 16 if wanted.draw else 0, **more)  # type: ignore[arg-type]


@pytest.fixture(params=["fake", "numpy-llama", "native-llama", "hopper-qwen3"])
def make(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    return BACKENDS[request.param]


ROUNDS = (6, 9, 2, 9, 1, 0, 9, 9)  # further rounds of each sequence
END = PROMPT_LEN + 20  # slots in the table
ENDS_AT = 7  # every so many tokens one ends an answer under masks


class Driven:
    """Eight sequences, one for each kind of parameters, at the end of their prompts."""

    def __init__(
        self,
        backend: Backend,
        *,
        limits: tuple[int, ...] = (200,) * 8,
        names: tuple[str, ...] = tuple(PARAMS),
        masked: tuple[int, ...] = (),
        prompts: Sequence[list[int]] = tuple(PROMPT[9 * i :][:PROMPT_LEN] for i in range(8)),
    ) -> None:
        self.backend, self.masked, self.prompt_len = backend, masked, len(prompts[0])
        self.tapes = [Tape(backend, seq_row=1 + i, first_slot=40 * i) for i in range(len(names))]
        builder, updates = RowsBuilder(), []
        for i, (tape, name) in enumerate(zip(self.tapes, names, strict=True)):
            stops = (3, 99) if i != 1 else ()
            backend.bind(tape.seq_row, sampler(name, seed=i, limit=limits[i], stop_ids=stops))
            updates.append(tape.add_prompt_rows(builder, prompts[i][:-1])[1])
            positions = np.arange(self.prompt_len - 1, END, dtype=np.int32)
            slots = np.array([tape.slot(p) for p in positions.tolist()], np.int32)
            updates.append(TableUpdate(np.full(len(slots), tape.seq_row, np.int32), positions, slots))
        backend.submit(a_pass(builder.build(64), Wanted(), joined(*updates))).result()
        self.last = [prompt[-1] for prompt in prompts]
        self.bound = [sampler(name, seed=i, limit=limits[i]) for i, name in enumerate(names)]

    def one_row_each(self, which: list[int], positions: list[int], tokens: list[int]) -> Rows:
        builder = RowsBuilder()
        for i, position, token in zip(which, positions, tokens, strict=True):
            tape = self.tapes[i]
            builder.add(
                token_id=token, position=position, slot=tape.slot(position), seq_row=tape.seq_row,
                prefix_len=position + 1,
            )  # fmt: skip
        rows = builder.build(16)
        if not self.masked:
            return rows
        masks = np.zeros(16, np.int32)
        for row, (i, token) in enumerate(zip(which, tokens, strict=True)):
            if i in self.masked:
                masks[row] = 1 + i
                self.backend.set_masks(1 + i, self.behind(token))
        return replace(rows, masks=masks)

    def behind(self, token: int) -> np.ndarray:
        """A third of the tokens, by the last one."""
        return as_bits(((np.arange(self.backend.limits.vocab_size) + token) % 3 == 1)[None])

    def follow(self, i: int, token: int) -> np.ndarray | None:
        assert i in self.masked
        return None if token % ENDS_AT == 1 else self.behind(token)[0]

    def first_pass(self, rounds: tuple[int, ...] | None) -> PassResult:
        every = list(range(len(self.tapes)))
        rows = self.one_row_each(every, [self.prompt_len - 1] * len(every), self.last)
        at = np.array(every, np.int32)
        follow = self.follow if self.masked else None
        burst = None if rounds is None else Burst(at, np.array(rounds, np.int32), 16, follow=follow)
        return self.backend.submit(a_pass(rows, Wanted(draw=DrawWanted(at)), NO_UPDATE, burst=burst)).result()

    def ended(self, i: int, token: int, length: int) -> bool:
        params, stops = self.bound[i].params, () if i == 1 else (3,)
        is_stop = token in stops and length - PROMPT_LEN >= params.min_tokens
        is_complete = i in self.masked and token % ENDS_AT == 1
        return token == NO_TOKEN or is_stop or is_complete or length >= self.bound[i].limit

    def round_by_round(self, rounds: tuple[int, ...]) -> list[list[tuple[int, bytes]]]:
        """What single passes draw, the host feeding every token back."""
        found: list[list[tuple[int, bytes]]] = [[] for _ in self.tapes]
        draw = self.first_pass(None).draw
        assert draw is not None
        for i in range(len(self.tapes)):
            found[i].append((int(draw.token_ids[i]), draw.logprobs[i].tobytes()))
        for n in range(max(rounds)):
            going = [
                i for i in range(len(self.tapes))
                if n < rounds[i] and not self.ended(i, found[i][-1][0], self.prompt_len + len(found[i]))
            ]  # fmt: skip
            if not going:
                break
            positions = [self.prompt_len - 1 + len(found[i]) for i in going]
            rows = self.one_row_each(going, positions, [found[i][-1][0] for i in going])
            wanted = Wanted(draw=DrawWanted(np.arange(len(going), dtype=np.int32)))
            draw = self.backend.submit(a_pass(rows, wanted, NO_UPDATE)).result().draw
            assert draw is not None
            for k, i in enumerate(going):
                found[i].append((int(draw.token_ids[k]), draw.logprobs[k].tobytes()))
        return found


def drawn_by(result: PassResult) -> list[list[tuple[int, bytes]]]:
    draw, burst = result.draw, result.burst
    assert draw is not None
    assert burst is not None
    found = []
    for i, (tokens, logprobs) in enumerate(zip(burst.token_ids.tolist(), burst.logprobs, strict=True)):
        count = next((n for n, token in enumerate(tokens) if token == NO_TOKEN), len(tokens))
        assert all(token == NO_TOKEN for token in tokens[count:])
        first = (int(draw.token_ids[i]), draw.logprobs[i].tobytes())
        found.append([first, *((t, x.tobytes()) for t, x in zip(tokens[:count], logprobs, strict=False))])
    return found


LIMIT_SETS = {"none near": (200,) * 8, "some near": (7, 200, 6, 8, 200, 200, 9, 10)}


@pytest.mark.parametrize("limits", list(LIMIT_SETS))
def test_a_burst_is_its_rounds(make: Callable[[], Backend], limits: str) -> None:
    """Penalties, bias, least lengths, stops, limits and mixed numbers of rounds: the bits of single passes."""
    burst = Driven(make(), limits=LIMIT_SETS[limits])
    found = drawn_by(burst.first_pass(ROUNDS))
    single = Driven(make(), limits=LIMIT_SETS[limits])
    assert found == single.round_by_round(ROUNDS)
    lengths = [len(tokens) - 1 for tokens in found]
    assert any(0 < n < m for n, m in zip(lengths, ROUNDS, strict=True)), "nothing stopped early: no control"
    assert any(n == m > 1 for n, m in zip(lengths, ROUNDS, strict=True)), "nothing ran to its end: no control"


@pytest.mark.parametrize("names", [("greedy", "filters") * 4, tuple(PARAMS)], ids=["plain", "edited"])
def test_a_burst_under_masks_is_its_rounds(make: Callable[[], Backend], names: tuple[str, ...]) -> None:
    """The next masks are asked for between rounds, for some of the sequences; where there is none, one ends."""
    masked = (0, 1, 3, 6)
    found = drawn_by(Driven(make(), names=names, masked=masked).first_pass(ROUNDS))
    assert found == Driven(make(), names=names, masked=masked).round_by_round(ROUNDS)
    free = drawn_by(Driven(make(), names=names).first_pass(ROUNDS))
    assert {i for i in range(8) if found[i] != free[i]} <= {*masked}, "masks are for whom they are"
    assert any(len(found[i]) > 2 for i in masked), "nothing went on under a mask: no control"
    assert found != free


def test_a_burst_goes_on_from_where_the_last_left_it(make: Callable[[], Backend]) -> None:
    """Rows of FROM_STATE: two bursts, the second planned without knowing what the first drew, are one longer one."""
    rounds = (4,) * 8
    whole = drawn_by(Driven(make()).first_pass((8,) * 8))
    split = Driven(make())
    first = drawn_by(split.first_pass(rounds))
    every = list(range(8))
    rows = split.one_row_each(every, [PROMPT_LEN - 1] * 8, [0] * 8)
    rows.token_ids[:8] = FROM_STATE
    at = np.array(every, np.int32)
    pass_ = a_pass(rows, Wanted(draw=DrawWanted(at)), NO_UPDATE, burst=Burst(at, np.full(8, 3, np.int32), 16))
    second = drawn_by(split.backend.submit(pass_).result())
    for i in every:
        behind = [] if second[i][0][0] == NO_TOKEN else second[i]
        assert [*first[i], *behind] == whole[i]
    assert any(tokens[0][0] == NO_TOKEN for tokens in second), "no sequence had ended"
    assert any(tokens[0][0] != NO_TOKEN for tokens in second), "every sequence had ended"


def test_an_ended_row_disturbs_nobody_and_writes_nothing(make: Callable[[], Backend]) -> None:
    """FROM_STATE of a row that was bound anew: it has nothing to go on from."""
    driven = Driven(make())
    driven.first_pass((0,) * 8)
    driven.backend.bind(2, sampler("greedy"))
    rows = driven.one_row_each([0, 1], [0, 0], [0, 0])
    rows.token_ids[:2] = FROM_STATE
    draw = (
        driven.backend.submit(a_pass(rows, Wanted(draw=DrawWanted(np.array([0, 1], np.int32))), NO_UPDATE))
        .result()
        .draw
    )
    assert draw is not None
    assert draw.token_ids[0] != NO_TOKEN
    assert draw.token_ids[1] == NO_TOKEN


def test_a_burst_ends_with_the_table(make: Callable[[], Backend]) -> None:
    """A sequence without a limit of its own stops at the context's end, and never reads behind its table row."""
    backend = make()
    end = backend.limits.context_len
    tape = Tape(backend, seq_row=1, first_slot=0)
    backend.bind(1, Sampler(SamplingParams(), SampleKey(0, 0)))
    tape.feed((PROMPT * 2)[: end - 4], shape=256)
    positions = np.arange(end - 4, end, dtype=np.int32)
    update = TableUpdate(np.ones(4, np.int32), positions, positions + NUM_RESERVED)
    builder = RowsBuilder()
    builder.add(token_id=1, position=end - 4, slot=tape.slot(end - 4), seq_row=1, prefix_len=end - 3)
    at = np.zeros(1, np.int32)
    pass_ = a_pass(
        builder.build(16), Wanted(draw=DrawWanted(at)), update, burst=Burst(at, np.array([20], np.int32), 16)
    )
    burst = backend.submit(pass_).result().burst
    assert burst is not None
    assert (burst.token_ids[0] != NO_TOKEN).tolist() == [True] * 2 + [False] * 18


BAD_BURSTS = {
    "a row that does not draw": Burst(np.array([1], np.int32), np.array([1], np.int32), 16),
    "rounds below 0": Burst(np.array([0], np.int32), np.array([-1], np.int32), 16),
    "as many rounds as rows": Burst(np.array([0], np.int32), np.array([1, 1], np.int32), 16),
    "a shape too small": Burst(np.array([0], np.int32), np.array([1], np.int32), 0),
    "no rows": Burst(np.zeros(0, np.int32), np.zeros(0, np.int32), 16),
}


@pytest.mark.parametrize("case", list(BAD_BURSTS))
def test_bad_bursts_raise(make: Callable[[], Backend], case: str) -> None:
    driven = Driven(make())
    rows = driven.one_row_each([0, 1], [PROMPT_LEN - 1] * 2, driven.last[:2])
    good = a_pass(rows, Wanted(draw=DrawWanted(np.zeros(1, np.int32))), NO_UPDATE)
    with pytest.raises(InputError):
        driven.backend.submit(replace(good, burst=BAD_BURSTS[case]))
    driven.backend.submit(good)


@pytest.mark.parametrize("is_kernels", [False, True])
def test_native_tells_what_the_host_took(is_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second in Python is the host's, and a second in the library is not."""
    now = 0.0
    driven = Driven(BACKENDS["native-llama"](), names=("greedy",) * 8)

    def late(call: Callable[..., object], *arguments: object) -> object:
        nonlocal now
        now += 1
        return call(*arguments)

    class Slow:
        def __getattr__(self, name: str) -> object:
            return partial(late, getattr(native_library.load(native_library.PATH)[0], name))

    if is_kernels:
        monkeypatch.setattr(driven.backend._kernels, "_library", Slow())
    else:
        monkeypatch.setattr(native_backend, "check_pass", partial(late, native_backend.check_pass))
    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert driven.first_pass((5,) * 8).host_seconds == (0.0 if is_kernels else 1.0)
    assert now > 0
