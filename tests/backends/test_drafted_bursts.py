"""Bursts whose rounds begin with a draft, on every backend: n rounds of one submit are n submits, bit for bit.

What they draft is what single passes of the draft model draw, or what is looked up by its definition; what they commit
is what plain decoding gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from tests.backends.test_bursts import LIMIT_SETS, PROMPT_LEN, REPEATING_PARAMS, Driven, a_pass
from tests.backends.test_conformance import BACKENDS, PROMPT
from tests.support.fake_backend import FakeBackend
from tests.support.passes import NO_UPDATE, RowsBuilder, Tape
from verispec.backends.native_backend import NativeBackend
from verispec.backends.protocol import (
    FROM_DRAFT,
    FROM_STATE,
    Backend,
    Burst,
    Drafting,
    DrawWanted,
    Pass,
    PassKind,
    PassResult,
    TableUpdate,
    Tree,
    View,
    Wanted,
)
from verispec.backends.rounds import looked_up
from verispec.errors import InputError
from verispec.kv import DUMP_SLOT, NUM_RESERVED
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import SamplingParams

SKIP = View.without({1})
LENGTHS = (3, 1, 3, 2, 3, 3, 2, 3)  # the most that each sequence drafts
# Of sequences without penalties, bias or a least length, whose rounds the native backend runs in one call.
NO_EDITS = ("greedy", "filters") * 4
GREEDY = ("greedy",) * 8
SHAPE = 64
# Texts that were written before; 3 is a stop id, and stands in what the first one looks up.
REPEATING = [[7, 5, 7, 3, 5, 5, 3, 7, 5], *(np.random.default_rng(i).choice([3, 5, 7], 9).tolist() for i in range(7))]


class Round(NamedTuple):
    """What one round of one sequence gave."""

    draft: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    logprobs: bytes


@pytest.fixture(params=["fake", "numpy-llama", "native-llama"])
def make(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    def made() -> Backend:
        backend = BACKENDS[request.param]()
        if isinstance(backend, FakeBackend):
            backend.markov[1] = 0.8 * backend.markov[0] + 0.2 * backend.markov[1]
        return backend

    return made


class Drafted(Driven):
    """Eight sequences that draft, and where each of them stands."""

    def __init__(self, backend: Backend, drafter: str, *, names: tuple[str, ...] = (), limits: str = "none near"):
        more: dict[str, object] = {"names": names} if names else {}
        near = LIMIT_SETS[limits]
        if drafter == "lookup":  # greedy text gets into loops; other text repeats itself by these
            names = names if names == GREEDY else (*REPEATING_PARAMS,) * 2
            more, near = {"names": names, "prompts": REPEATING}, tuple(limit + 4 for limit in near)
        super().__init__(backend, limits=near, **more)  # type: ignore[arg-type]
        self.drafter = drafter
        self.token_ids = [[*tape.token_ids, last] for tape, last in zip(self.tapes, self.last, strict=True)]
        if drafter == "model":  # which has computed all but the last two tokens
            builder = RowsBuilder()
            for tape in self.tapes:
                for p, token in enumerate(tape.token_ids[:-1]):
                    builder.add(
                        token_id=token, position=p, slot=tape.slot(p), seq_row=tape.seq_row, prefix_len=p + 1
                    )  # fmt: skip
            backend.submit(replace(a_pass(builder.build(64), Wanted(), NO_UPDATE), store=1)).result()

    def drafting(self, which: list[int], *, lengths: tuple[int, ...] = LENGTHS) -> Drafting:
        """Canonical drafts, whose bits do not depend on who else drafts."""
        looks_up = self.drafter == "lookup"
        store, view = (1, View()) if self.drafter == "model" else (0, SKIP)
        every = np.arange(len(which), dtype=np.int32)
        least = -1.5 if self.drafter == "skip" else -np.inf
        return Drafting(
            every,
            np.array([lengths[i] for i in which], np.int32),
            16,
            16,
            store,
            view,
            PassKind.CANONICAL,
            least,
            looks_up=looks_up,
        )

    def submit(
        self, which: list[int], num_rounds: int, *, drafts: tuple[Drafting, ...] | None = None, is_ahead: bool = False
    ) -> PassResult:
        """So many rounds of some sequences in one submit, with rows for all that may be drafted.

        `is_ahead`: from where the backend left them.
        """
        draftings = (self.drafting(which),) if drafts is None else drafts
        builder, first, lengths = RowsBuilder(), [], np.zeros(len(which), np.int32)
        for part in draftings:
            lengths[part.sequences] = part.lengths
        for i, length in zip(which, lengths.tolist(), strict=True):
            tape, start = self.tapes[i], len(self.token_ids[i]) - 1
            first.append(len(builder))
            if is_ahead:
                for token in (FROM_STATE, *[FROM_DRAFT] * length):
                    builder.add(token_id=token, position=0, slot=DUMP_SLOT, seq_row=tape.seq_row, prefix_len=1)
                continue
            for p, token in enumerate([self.token_ids[i][-1], *[FROM_DRAFT] * length], start):
                builder.add(token_id=token, position=p, slot=tape.slot(p), seq_row=tape.seq_row, prefix_len=p + 1)
        drawn = np.arange(len(builder), dtype=np.int32)
        burst = Burst(np.array(first, np.int32), np.full(len(which), num_rounds - 1, np.int32), SHAPE, draftings)
        pass_ = Pass(
            PassKind.CANONICAL, builder.build(SHAPE), Wanted(draw=DrawWanted(drawn)), NO_UPDATE, SHAPE, burst=burst
        )
        return self.backend.submit(pass_).result()

    def rounds(self, which: list[int], num_rounds: int, *, is_ahead: bool = False) -> list[list[Round]]:
        """The same, cut into rounds; sequences move on."""
        result = self.submit(which, num_rounds, is_ahead=is_ahead)
        draw, burst = result.draw, result.burst
        assert draw is not None
        assert burst is not None
        found, row = [], 0
        for s, i in enumerate(which):
            count = 1 + int(burst.accepted[s, 0])
            tokens = draw.token_ids[row : row + count].tolist() + burst.token_ids[s].tolist()
            values = np.concatenate([draw.logprobs[row : row + count], burst.logprobs[s]])
            row += 1 + LENGTHS[i]
            own, at = [], 0
            for drafted, accepted in zip(burst.drafts[s].tolist(), burst.accepted[s].tolist(), strict=True):
                if accepted < 0:
                    assert set(drafted) <= {NO_TOKEN}
                    continue
                end = at + accepted + 1
                draft = tuple(t for t in drafted if t >= 0)
                own.append(Round(draft, accepted, tuple(tokens[at:end]), values[at:end].tobytes()))
                at = end
            assert set(tokens[at:]) <= {NO_TOKEN}
            self.token_ids[i] += tokens[:at]
            found.append(own)
        return found

    def goes_on(self, i: int, rounds: list[Round]) -> bool:
        """Whether another round follows."""
        length = len(self.token_ids[i])
        tokens = rounds[-1].tokens
        return not any(self.ended(i, t, length - len(tokens) + 1 + k) for k, t in enumerate(tokens))


def one_by_one(driven: Drafted, num_rounds: int) -> list[list[Round]]:
    """What single rounds give, the host feeding them back."""
    found: list[list[Round]] = [[] for _ in driven.tapes]
    going = list(range(len(driven.tapes)))
    for _ in range(num_rounds):
        for i, rounds in zip(going, driven.rounds(going, 1), strict=True) if going else ():
            found[i] += rounds
        going = [i for i in going if driven.goes_on(i, found[i])]
    return found


CASES = [
    (drafter, names, limits)
    for drafter in ("skip", "model", "lookup")
    for names, limits in (((), "none near"), ((), "some near"), (NO_EDITS, "none near"), (NO_EDITS, "some near"))
    if (drafter, names) != ("lookup", NO_EDITS)  # whose parameters are its own
]


@pytest.mark.parametrize(("drafter", "names", "limits"), CASES)
def test_a_burst_is_its_rounds(make: Callable[[], Backend], drafter: str, names: tuple[str, ...], limits: str) -> None:
    """Drafts, accepted counts, tokens and log-probabilities, with penalties and without, stops and limits inside."""
    for num_rounds in (1, 2, 4):
        burst = Drafted(make(), drafter, names=names, limits=limits)
        found = burst.rounds(list(range(8)), num_rounds)
        assert found == one_by_one(Drafted(make(), drafter, names=names, limits=limits), num_rounds)
    rounds = [r for own in found for r in own]
    assert any(r.accepted == len(r.draft) > 0 for r in rounds), "nothing was accepted: no control"
    assert any(r.accepted < len(r.draft) for r in rounds), "nothing was rejected: no control"
    if limits == "some near":
        assert any(len(own) < 4 for own in found), "nothing ended early: no control"


@pytest.mark.parametrize(("drafter", "names", "limits"), CASES)
def test_a_burst_goes_on_from_where_the_last_left_it(
    make: Callable[[], Backend], drafter: str, names: tuple[str, ...], limits: str
) -> None:
    """The host names neither tokens nor positions; whoever had ended idles from the first round on."""
    every = list(range(8))
    whole = Drafted(make(), drafter, names=names, limits=limits).rounds(every, 5)
    cut = Drafted(make(), drafter, names=names, limits=limits)
    parts = [cut.rounds(every, 2), cut.rounds(every, 1, is_ahead=True), cut.rounds(every, 2, is_ahead=True)]
    assert [first + second + third for first, second, third in zip(*parts, strict=True)] == whole
    num_further = [len(third) for third in parts[2]]
    assert max(num_further) == 2, "nobody went on: no control"
    assert min(num_further) == 0 or limits == "none near", "nobody had ended: no control"


@pytest.mark.parametrize(("drafter", "names", "limits"), CASES)
def test_what_is_committed_is_what_plain_rounds_give(
    make: Callable[[], Backend], drafter: str, names: tuple[str, ...], limits: str
) -> None:
    found = Drafted(make(), drafter, names=names, limits=limits).rounds(list(range(8)), 4)
    plain = Drafted(make(), drafter, names=names, limits=limits).round_by_round((16,) * 8)
    for own, expected in zip(found, plain, strict=True):
        tokens = [t for r in own for t in r.tokens]
        values = np.frombuffer(b"".join(r.logprobs for r in own), np.float32)
        count = min(len(tokens), len(expected))  # behind a stop that was accepted one more token was drawn
        assert count >= len(tokens) - 1
        assert [(t, x.tobytes()) for t, x in zip(tokens, values, strict=True)][:count] == expected[:count]


@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_drafts_are_what_passes_of_the_draft_model_draw(make: Callable[[], Backend], drafter: str) -> None:
    """A round's drafts, drawn once more by the host: one pass and one sequence at a time."""
    found = Drafted(make(), drafter).rounds(list(range(8)), 1)
    host = Drafted(make(), drafter)
    for i, ((round_,), tape) in enumerate(zip(found, host.tapes, strict=True)):
        part = host.drafting([i])
        tokens = list(host.token_ids[i])
        start, drafted = len(tokens) - part.first_rows, []
        while len(drafted) < LENGTHS[i]:
            builder = RowsBuilder()
            for p in range(start, len(tokens)):
                builder.add(
                    token_id=tokens[p], position=p, slot=tape.slot(p), seq_row=tape.seq_row, prefix_len=p + 1
                )  # fmt: skip
            wanted = Wanted(draw=DrawWanted(np.array([len(builder) - 1], np.int32)))
            pass_ = replace(a_pass(builder.build(16), wanted, NO_UPDATE), store=part.store, view=part.view)
            draw = host.backend.submit(pass_).result().draw
            assert draw is not None
            token, logprob = int(draw.token_ids[0]), draw.logprobs[0]
            drafted.append(token)
            start, tokens = len(tokens), [*tokens, token]
            if host.ended(i, token, len(tokens)) or logprob < np.float32(part.least_logprob):
                break
        assert round_.draft == tuple(drafted)


def followed(tokens: list[int], length: int) -> tuple[int, ...]:
    """What is looked up, by a search of its own."""
    for n in (4, 3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tuple(tokens[end : end + length])
    return ()


@pytest.mark.parametrize("names", [(), GREEDY], ids=["edits", "none"])
@pytest.mark.parametrize("limits", list(LIMIT_SETS))
def test_drafts_are_what_followed_the_last_tokens(
    make: Callable[[], Backend], limits: str, names: tuple[str, ...]
) -> None:
    driven = Drafted(make(), "lookup", limits=limits, names=names)
    texts = [list(ids) for ids in driven.token_ids]
    num_found = num_cut = 0
    for i, own in enumerate(driven.rounds(list(range(8)), 4)):
        for round_ in own:
            expected = followed(texts[i], min(LENGTHS[i], driven.bound[i].limit - len(texts[i]) - 1))
            ends = [n for n, t in enumerate(expected, 1) if driven.ended(i, t, len(texts[i]) + n)]
            assert round_.draft == expected[: ends[0] if ends else None]
            num_found, num_cut = num_found + bool(expected), num_cut + (len(round_.draft) < len(expected))
            texts[i] += round_.tokens
    assert num_found > 3
    assert num_cut > 0 or limits == "some near"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xabcdPabcdQbcdRcdSabcd", "Qbc"),  # four tokens, although three and two occurred later; the last time of two
        ("abcdxybcdPcdQbcd", "Pcd"),  # three
        ("cdPQRScd", "PQR"),  # two, from the very beginning
        ("dPQd", ""),  # one is not looked up
        ("abcabc", "abc"),  # up to the end of the text
        ("aaaaaa", "a"),  # which is not gone round
        ("abab", "ab"),
        ("ab", ""), ("a", ""), ("aa", ""), ("aaa", "a"),
    ],
)  # fmt: skip
def test_what_is_looked_up(text: str, expected: str) -> None:
    found = looked_up(np.array([ord(c) for c in text], np.int64), 3)
    assert "".join(map(chr, found.tolist())) == expected
    assert followed([ord(c) for c in text], 3) == tuple(found.tolist())


@pytest.mark.parametrize("limits", list(LIMIT_SETS))
def test_looked_up_without_edits(limits: str) -> None:
    """Something is found and accepted: cut anyhow, tokens of plain rounds."""
    make, every = BACKENDS["native-llama"], list(range(8))
    whole = Drafted(make(), "lookup", names=GREEDY, limits=limits).rounds(every, 9)
    cut = Drafted(make(), "lookup", names=GREEDY, limits=limits)
    parts = [cut.rounds(every, 4), cut.rounds(every, 5, is_ahead=True)]
    assert [first + second for first, second in zip(*parts, strict=True)] == whole
    plain = Drafted(make(), "lookup", names=GREEDY, limits=limits).round_by_round((16,) * 8)
    for own, expected in zip(whole, plain, strict=True):
        tokens = [t for r in own for t in r.tokens]
        assert tokens[: len(expected)] == [t for t, _ in expected[: len(tokens)]]
    assert sum(r.accepted for own in whole for r in own) > 4 or limits == "some near"
    assert any(r.accepted < len(r.draft) for own in whole for r in own)


@pytest.mark.parametrize("drafter", ["skip", "lookup"])
def test_native_rounds_are_one_call(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without penalties, bias or least lengths nothing of a burst runs in Python; with them everything does."""
    num_run = 0

    def counted(backend: NativeBackend, pass_: Pass) -> PassResult:
        nonlocal num_run
        num_run += 1
        return run(backend, pass_)

    run = NativeBackend.run
    driven = {names: Drafted(BACKENDS["native-llama"](), drafter, names=names) for names in (GREEDY, ())}
    monkeypatch.setattr(NativeBackend, "run", counted)
    driven[GREEDY].rounds(list(range(8)), 4)
    assert num_run == 0
    driven[()].rounds(list(range(8)), 4)
    assert num_run >= 4


def test_three_drafters_and_none_in_one_burst(make: Callable[[], Backend]) -> None:
    """Sequences 0 to 2 by a view, 3 to 5 by the second model, 6 looks up, 7 does nothing: tokens of plain rounds."""
    driven = Drafted(make(), "model")
    lengths = np.full(3, 2, np.int32)
    three = np.arange(3, dtype=np.int32)
    six = np.full(1, 6, np.int32)
    parts = (
        Drafting(three, lengths, 16, 16, 0, SKIP), Drafting(six, lengths[:1], 1, 1, looks_up=True),
        Drafting(3 + three, lengths, 16, 16, 1),
    )  # fmt: skip
    result = driven.submit(list(range(8)), 6, drafts=parts)
    assert result.draw is not None
    assert result.burst is not None
    plain = Drafted(make(), "model").round_by_round((17,) * 8)
    row = 0
    for i in range(8):
        count = 1 + int(result.burst.accepted[i, 0])
        tokens = [*result.draw.token_ids[row : row + count].tolist(), *result.burst.token_ids[i].tolist()]
        row += 3 if i < 7 else 1
        tokens = [t for t in tokens if t >= 0]
        expected = [t for t, _ in plain[i]][: len(tokens)]
        assert tokens[: len(expected)] == expected
        assert len(tokens) - len(expected) <= 1
        assert (result.burst.drafts[i] >= 0).any() == (i < 7)


@pytest.mark.parametrize("make", [BACKENDS["fake"], BACKENDS["numpy-llama"]], ids=["fake", "numpy"])
def test_trees_end_with_the_table(make: Callable[[], Backend]) -> None:
    """In the first round the places reach to the very end of the table's row; further rounds draft nothing."""
    tree, plain, shown = Tree((2, 2), (2, 4)), list[int](), list[int]()
    for drafts in (False, True):
        backend = make()
        backend.limits = replace(backend.limits, trees=True)  # type: ignore[misc]
        start = backend.limits.context_len - 1 - tree.num_nodes
        tape, at = Tape(backend, seq_row=1, first_slot=0), np.zeros(1, np.int32)
        backend.bind(1, Sampler(SamplingParams(), SampleKey(0, 0)))
        builder = RowsBuilder()
        _, update = tape.add_prompt_rows(builder, (PROMPT * 2)[:start])
        backend.submit(a_pass(builder.build(256), Wanted(), update)).result()
        positions = np.arange(start, backend.limits.context_len, dtype=np.int32)
        update, builder = TableUpdate(positions * 0 + 1, positions, positions + NUM_RESERVED), RowsBuilder()
        for p in positions[: None if drafts else 1].tolist():
            token_id = 1 if p == start else FROM_DRAFT
            builder.add(token_id=token_id, position=p, slot=tape.slot(p), seq_row=1, prefix_len=p + 1)
        part = Drafting(at, at + tree.num_nodes, 16, 16, view=SKIP, kind=PassKind.CANONICAL, tree=tree)
        burst = Burst(at, at + 20, 16, (part,) if drafts else ())
        wanted = Wanted(draw=DrawWanted(np.arange(len(builder), dtype=np.int32)))
        result = backend.submit(a_pass(builder.build(16), wanted, update, burst=burst)).result()
        assert result.draw is not None
        assert result.burst is not None
        shown = [int(result.draw.token_ids[0]), *result.burst.token_ids[0].tolist()]
        plain = plain or shown
    drafted = (result.burst.drafts[0] >= 0).sum(axis=1)
    assert drafted[0] > 0 == drafted[1:].max()
    first = 1 + int(result.burst.accepted[0, 0])
    assert [t for t in shown[1:] if t >= 0] == [t for t in plain[first:] if t >= 0]


class Nan(FakeBackend):
    """Logits are NaN at one position, in the draft model's passes or in the target's."""

    def __init__(self, position: int, *, of_drafts: bool) -> None:
        super().__init__(num_slots=600, context_len=256, num_seq_rows=8, num_stores=2)
        self.markov[1] = self.markov[0]
        self.position, self.of_drafts = position, of_drafts

    def run(self, pass_: Pass) -> PassResult:
        result = super().run(pass_)
        if result.draw is not None and pass_.wanted.draw is not None and (pass_.store == 1) == self.of_drafts:
            at = pass_.rows.positions[pass_.wanted.draw.rows] == self.position
            result.draw.token_ids[at], result.draw.logprobs[at] = NO_TOKEN, np.nan
        return result


def test_a_draw_that_fails_idles_its_sequence_and_is_never_fed_back() -> None:
    found = Drafted(Nan(PROMPT_LEN + 3, of_drafts=False), "model").rounds(list(range(8)), 8)
    assert sum(own[-1].tokens[-1] == NO_TOKEN for own in found) > 3
    for own in found:
        assert all(NO_TOKEN not in r.tokens for r in own[:-1])
        assert NO_TOKEN not in own[-1].tokens[:-1]


def test_a_draft_that_cannot_go_on_is_short_and_nothing_more() -> None:
    make = partial(Nan, PROMPT_LEN + 1, of_drafts=True)
    found = Drafted(make(), "model").rounds(list(range(8)), 4)
    assert found == one_by_one(Drafted(make(), "model"), 4)
    assert any(len(r.draft) < LENGTHS[i] for i, own in enumerate(found) for r in own)
    assert all(NO_TOKEN not in r.tokens for own in found for r in own)


def bad(**changes: object) -> Drafting:
    one = np.zeros(1, np.int32)
    return Drafting(one, one + 2, 16, 16)._replace(**changes)  # type: ignore[arg-type]


BAD = {
    "no such sequence": bad(sequences=np.array([9], np.int32)),
    "no such store": bad(store=7),
    "length 0": bad(lengths=np.zeros(1, np.int32)),
    "a length too many": bad(lengths=np.ones(2, np.int32)),
    "a shape too small": bad(shape=0),
    "a first shape too small": bad(store=1, first_shape=1),
    "a draft without rows": bad(lengths=np.full(1, 3, np.int32)),
    "judged by probabilities": bad(by_probability=True),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_drafts_raise(make: Callable[[], Backend], case: str) -> None:
    driven = Drafted(make(), "skip")
    builder = RowsBuilder()
    for p, token in enumerate([driven.last[0], FROM_DRAFT, FROM_DRAFT], PROMPT_LEN - 1):
        builder.add(token_id=token, position=p, slot=driven.tapes[0].slot(p), seq_row=1, prefix_len=p + 1)
    rows, one = builder.build(16), np.zeros(1, np.int32)
    wanted = Wanted(draw=DrawWanted(np.arange(3, dtype=np.int32)))
    good = a_pass(rows, wanted, NO_UPDATE, burst=Burst(one, one + 1, 16, (bad(),)))
    with pytest.raises(InputError):
        driven.backend.submit(replace(good, burst=Burst(one, one + 1, 16, (BAD[case],))))
    with pytest.raises(InputError):
        driven.backend.submit(replace(good, burst=None))
    with pytest.raises(InputError):
        driven.backend.submit(replace(good, burst=Burst(one, one + 1, 2, (bad(),))))
    driven.backend.submit(good)
