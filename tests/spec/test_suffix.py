"""Drafts from text that was seen: they are the longest match's, come from nobody else's text, and change no token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.tiny_llm import fix_cost, loaded, write_model
from verispec.backends.cost import CostTable
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.spec.drafter import Refusal
from verispec.spec.match_rates import Chances
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DRAFTER_NAMES, DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.suffix import SuffixConfig, SuffixDrafter, grown
from verispec.spec.texts import Match, Texts
from verispec.spec.tree import TreeShape
from verispec.types import NO_PARENT, SampleOutput, SamplingParams, TokenEvent, Verdict

CHEAP_ROWS = CostTable((1, 64), (1.0, 1.1), (0.0, 0.0))
VOCAB = 16


def test_a_tree_grows_where_the_text_is_split_and_inside_its_shape() -> None:
    texts = Texts()
    for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 3, 4]):
        texts.extend(text)
        texts.close()
    match, chances = texts.find([9, 1, 2]), Chances(first=0.6, later=0.6, other=0.5)
    assert isinstance(match, Match)
    tree = grown(match, 8, TreeShape.beam(4, 3), chances)
    paths = {tuple(tree.token_ids[n] for n in tree.path_to(node)): p for node, p in enumerate(tree.probabilities)}
    assert paths == {(3,): 0.75, (3, 4): 2 / 3, (3, 5): 1 / 3, (6,): 0.25, (6, 7): 1.0}
    assert tree.token_ids[:2] == (3, 4), "the likeliest nodes come first"
    narrow = grown(match, 8, TreeShape.branch(2, 1), chances)
    assert (set(zip(narrow.token_ids, narrow.parents, strict=True))) == {(3, NO_PARENT), (4, 0), (6, NO_PARENT), (7, 2)}
    assert len(grown(match, 3, TreeShape.beam(4, 3), chances)) == 3
    assert grown(match, 1, TreeShape.beam(4, 3), chances._replace(first=0.1)).token_ids == (6,)


def view(token_ids: Sequence[int], **fields: Any) -> Any:
    defaults = {"sequence_id": 0, "prompt_len": 3, "prediction_ids": (), "salt": "", "is_traced": False}
    defaults |= {"speculation": Speculation("suffix"), "params": SamplingParams()}
    return SimpleNamespace(token_ids=list(token_ids), **{**defaults, **fields})


@pytest.mark.parametrize("is_looked_at", [False, True])
@pytest.mark.parametrize(
    ("shares", "traced", "expected"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_only_answers_of_the_same_salt_are_drafted_from_unless_they_are_shared(
    shares: bool, traced: bool, expected: bool, is_looked_at: bool
) -> None:
    drafter = SuffixDrafter(SuffixConfig(shares_history=shares))
    first = view([1, 2, 3, 4, 5, 6], salt="one")
    if is_looked_at:
        drafter.state(first)
    drafter.forget(first)
    assert isinstance(drafter.state(view([7, 4, 5], salt="two", is_traced=traced)), Refusal) is not expected
    assert isinstance(drafter.state(view([7, 4, 5], salt="one", sequence_id=1)), tuple)


@pytest.mark.parametrize(
    ("fields", "is_left"),
    [
        ({}, True),
        ({"speculation": Speculation("suffix")}, False),
        ({"needs_host": True}, False),
        ({"uses_probabilities": True}, False),
        ({"prediction_ids": ((9, 9),)}, False),
        ({"speculation": Speculation.of("auto", tree="branch:2,2")}, False),
        ({"token_ids": [1, 2, 3, 4, 5, 2]}, False),
    ],
)
def test_own_text_is_left_to_a_backend_that_looks_up_where_auto_may_choose_that(
    fields: dict[str, Any], is_left: bool
) -> None:
    """Not where that backend could draft nothing, nor what a client predicts, nor a match that it does not look for.
    History is still drafted from, where it has the longer match."""
    tokens = fields.pop("token_ids", [1, 2, 3, 4, 1, 2])
    more = {"speculation": Speculation("auto"), "needs_host": False, "uses_probabilities": False, **fields}
    leaving, keeping = SuffixDrafter(SuffixConfig(leaves_own_text=True)), SuffixDrafter()
    quoting = view(tokens, **more)
    assert isinstance(leaving.state(quoting), Refusal) is is_left
    assert not isinstance(keeping.state(quoting), Refusal)
    for drafter in (leaving, keeping):
        drafter.forget(view([7, 7, 7, 5, 4, 1, 2, 8], sequence_id=1, **more))
        again = view([1, 2, 3, 4, 1, 2], sequence_id=2, **more)
        assert not isinstance(drafter.state(again), Refusal), "4 1 2 is a longer match than 1 2"


def test_a_prompt_without_an_answer_is_not_kept() -> None:
    drafter = SuffixDrafter()
    drafter.forget(view([1, 2, 3]))
    assert isinstance(drafter.state(view([7, 1, 2])), Refusal)


def test_a_prediction_is_followed_from_the_first_token_and_again_behind_a_change() -> None:
    drafter = SuffixDrafter()
    sequence = view([1, 2, 3], prediction_ids=((5, 6, 7, 8, 9, 10),))

    def follow() -> list[int]:
        assert isinstance(drafter.state(sequence), tuple)
        turn: Any = SimpleNamespace(sequence=sequence, choice=SimpleNamespace(num_nodes=3))
        return list(drafter.draft([turn])[0].token_ids)

    assert follow() == [5, 6, 7]
    sequence.token_ids += [5, 20]
    assert isinstance(drafter.state(sequence), Refusal)
    sequence.token_ids += [7]
    assert follow() == [8, 9, 10]


# Through the engine: nothing of it changes a token.


def make_engine(**config: Any) -> Engine:
    backend, history_len = FakeBackend(num_stores=2), config.pop("history_len", 4096)
    setup = DraftSetup(
        backend=backend, history_len=history_len, shares_history=config.get("shares_history", False),
        draft_cost=CHEAP_ROWS,
    )  # fmt: skip
    return Engine(
        backend, family=(4, 8, 16, 64), drafters=make_drafters(setup), cost=CHEAP_ROWS,
        config=EngineConfig(num_slots=256, row_budget=64, **config),
    )  # fmt: skip


def play(engine: Engine, requests: Sequence[Request]) -> tuple[list[SampleOutput], list[TokenEvent]]:
    for request in requests:
        engine.add(request)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    done = sorted((e for e in events if e.output is not None), key=lambda e: e.request_id)
    return [e.output for e in done if e.output is not None], events


def asked(
    seed: int, tree: str | None = None, temperature: float = 0.7, method: str = "suffix", **fields: Any
) -> Request:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
    return Request([1, 2, 3, seed % 4], params, Speculation.of(method, tree=tree), **fields)


def truth(requests: Sequence[Request]) -> list[SampleOutput]:
    engine = Engine(FakeBackend(), family=(4, 8, 16, 64), drafters={"suffix": NoDrafter()})
    return [play(engine, [replace(r, speculation=Speculation("suffix"))])[0][0] for r in requests]


def told(request: Request, answer: Sequence[int], **fields: Any) -> Request:
    """The same question with this answer, all but the last token of which the client has already: the rest of it is
    drawn, and all of it becomes history."""
    params = replace(request.params, max_tokens=len(answer))
    return replace(request, params=params, committed_ids=[answer[:-1]], **fields)


def misleading(requests: Sequence[Request], answers: Sequence[Sequence[int]], vocab_size: int) -> list[Request]:
    """Requests whose answers become a history of what the target nearly draws and what it never draws, of each of these
    requests, and of what it draws, of half of them."""
    rng, found = random.Random(0), []
    for number, (request, right) in enumerate(zip(requests, answers, strict=True)):
        nearly = [(t + 1) % vocab_size if rng.random() < 0.3 else t for t in right]
        texts = [nearly, rng.choices(range(vocab_size), k=len(right)), right]
        found += [told(request, text) for text in texts[: 2 + number // 2 % 2]]
    return found


@pytest.mark.parametrize("tree", [None, "chain:3", "branch:3,2,1", "beam:4,6"])
@pytest.mark.parametrize("config", [{}, {"prefix_cache": False}, {"max_len": 60, "max_running": 8}], ids=str)
def test_predictions_and_an_adversarial_history_change_nothing(tree: str | None, config: dict[str, Any]) -> None:
    """The history says of every context what the target never draws there, and what it does; predictions likewise."""
    requests = [asked(i, tree, temperature=i % 2) for i in range(10)]
    expected = truth(requests)
    rng = random.Random(1)
    engine = make_engine(shares_history=True, **config)
    play(engine, misleading(requests, [list(output.token_ids) for output in expected], VOCAB))
    before = engine.totals
    wrong = [[(t + (rng.random() < 0.4)) % VOCAB for t in output.token_ids] for output in expected]
    predicted = [
        replace(r, prediction_ids=p, salt=str(i)) for i, (r, p) in enumerate(zip(requests, wrong, strict=True))
    ]
    request_id = engine.add(replace(requests[0], salt="aborted"))
    engine.step()
    engine.abort(request_id)
    outputs, _ = play(engine, predicted)
    found = outputs[-len(requests) :]
    assert [(o.digest, o.finish_reason) for o in found] == [(o.digest, o.finish_reason) for o in expected]
    accepted = engine.totals.accepted - before.accepted
    assert accepted > 40
    assert engine.totals.drafted - before.drafted > accepted + 40


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_on_real_kernels_it_changes_nothing_either(backend: str, tmp_path: Path) -> None:
    with loaded(write_model(tmp_path / "tiny.gguf"), tmp_path, backend=backend, kv_slots=1024) as llm:
        fix_cost(llm)
        params = [SamplingParams(max_tokens=32, temperature=i % 2, seed=i, ignore_eos=True) for i in range(6)]
        requests = [llm.request(f"abc {'xyz'[i % 3]}", p, drafter="suffix") for i, p in enumerate(params)]
        plain = [llm.run([replace(r, speculation=Speculation("none"), salt="plain")])[0] for r in requests]
        llm.run(misleading(requests, [list(output.token_ids) for output in plain], llm.tokenizer.vocab_size))
        before = llm.engine.totals
        assert [completion.digest for completion in llm.run(requests)] == [completion.digest for completion in plain]
        accepted = llm.engine.totals.accepted - before.accepted
        assert accepted > 20
        assert llm.engine.totals.drafted - before.drafted > accepted + 20


@pytest.mark.parametrize("method", DRAFTER_NAMES)
def test_answers_are_kept_whichever_drafter_they_had(method: str) -> None:
    """An answer with `suffix` to the same question is drafted from them, by the same salt alone."""
    (plain,) = truth([asked(3)])
    passes = {}
    for salt, history_len in (("one", 4096), ("two", 4096), ("one", 0)):
        engine = make_engine(history_len=history_len)
        play(engine, [asked(3, method=method, salt="one")])
        (again,), _ = play(engine, [asked(3, salt=salt)])
        assert again.digest == plain.digest
        passes[salt, history_len] = again.stats.passes
    assert passes["one", 4096] < 0.6 * passes["two", 4096]
    assert passes["one", 0] == passes["two", 4096]


def test_control_a_history_that_is_taken_for_true_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that accepts every draft gives other tokens: the comparison above has power."""
    requests = [asked(i, "chain:3") for i in range(4)]

    def gullible(turns: Any) -> None:
        for turn in turns:
            if turn.score.draws and len(turn.draft):
                turn.score.draws[: len(turn.draft)] = turn.draft.token_ids
                turn.verdict = Verdict(tuple(range(len(turn.draft))), turn.score.draws[len(turn.draft)])
            elif turn.score.draws:
                turn.verdict = Verdict((), turn.score.draws[0])

    monkeypatch.setattr("verispec.engine.engine.judge", gullible)
    outputs, _ = play(make_engine(), requests)
    assert [o.digest for o in outputs] != [o.digest for o in truth(requests)]


def test_with_shared_history_nothing_tells_what_others_wrote() -> None:
    """No trace, no rejected token, no count that tells acceptance, and events as of a request that is alone; one that
    asks for traces has them."""
    _, alone = play(make_engine(shares_history=True), [asked(3, "chain:4", salt="two")])
    engine = make_engine(shares_history=True)
    (secret,), _ = play(engine, [asked(3, "chain:4", salt="one")])
    before = engine.totals.accepted
    (same,), events = play(engine, [asked(3, "chain:4", salt="two")])
    assert same.digest == secret.digest
    assert engine.totals.accepted > before + 10, "it was drafted from the other's answer"
    assert all(not e.num_accepted and not e.rejected_ids and e.trace is None for e in events)
    assert [(e.token_ids, e.pieces) for e in events] == [(e.token_ids, e.pieces) for e in alone]
    stats = same.stats
    assert (stats.drafted, stats.accepted, stats.passes, stats.fast_passes, stats.gaps) == (0, 0, 0, 0, [])
    assert not stats.chosen
    (told,), traced = play(engine, [asked(3, salt="two", is_traced=True)])
    assert told.stats.drafted > 0
    assert any(e.trace is not None for e in traced)
    (whole,), (only,) = play(engine, [asked(3, salt="two", is_streamed=False)])
    assert only.token_ids == whole.token_ids == same.token_ids, "whoever does not stream has one event, the last"
    engine = make_engine()  # control: where drafts are told, so is what each round committed
    for _ in range(2):
        _, events = play(engine, [asked(3, "chain:4")])
    assert [e.token_ids for e in events] != [e.token_ids for e in alone]


def test_bad_predictions_and_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="prediction_ids: token id 99 is not in the vocabulary of 16"):
        make_engine().add(asked(1, prediction_ids=[1, 99]))
    with pytest.raises(InputError, match="history_len"):
        EngineConfig(history_len=-1)


def test_python_takes_a_prediction_with_a_prompt(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with loaded(path, tmp_path) as llm:
        (plain,) = llm.generate("abc", params, drafter="none")
        for prediction in (plain.text, list(plain.token_ids)):
            request = llm.request({"prompt": "abc", "prediction": prediction}, params)
            assert len(request.prediction_ids) > 4
            assert llm.run([request])[0].digest == plain.digest
        with pytest.raises(InputError, match=r"prompt\['prediction'\] must be text or token ids"):
            llm.request({"prompt": "abc", "prediction": 7}, params)
