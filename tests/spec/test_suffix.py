"""Drafts from text that was seen: they are the longest match's, come from nobody else's text, and change no token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.tiny_llm import loaded, write_model
from verispec.backends.cost import CostTable
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.spec.drafter import Refusal
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.suffix import History, SuffixConfig, SuffixDrafter, grown
from verispec.spec.texts import LENGTHS, Match, Texts
from verispec.spec.tree import TreeShape
from verispec.types import NO_PARENT, SampleOutput, SamplingParams, TokenEvent, Verdict

CHEAP_ROWS = CostTable((1, 64), (1.0, 1.1), (0.0, 0.0))
VOCAB = 16


def texts_of(*texts: Sequence[int]) -> Texts:
    texts_ = Texts()
    for text in texts:
        texts_.extend(text)
        texts_.close()
    return texts_


def common_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at their ends are equal."""
    return next(
        (i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b))
    )


def level_of(length: int) -> int:
    return sum(n <= length for n in LENGTHS) - 1


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_match_is_found_and_followed(seed: int) -> None:
    """Against a search of the whole text, which is short enough for every occurrence to be looked at."""
    rng = random.Random(seed)
    piece = [rng.randrange(30) for _ in range(rng.randrange(2, 40))]
    text = [rng.randrange(30) for _ in range(30)] + piece + [30, 31] + piece[: rng.randrange(1, len(piece) + 1)]
    texts = Texts()
    for start in range(0, len(text), 3):
        texts.extend(text[start : start + 3])
    reach = {p: common_len(text[:p], text) for p in range(1, len(text))}
    longest = max(reach.values())
    match = texts.find_end()
    assert (match is not None) == (longest > 0)
    if match is None:
        return
    pad = len(texts.text) - len(text)
    assert match.level == level_of(longest)
    assert {p - pad for p in match.positions} == {p for p, n in reach.items() if level_of(n) == match.level}
    expected = list(text)
    positions = [p - pad for p in match.positions]
    for _ in range(9):
        votes = Counter(expected[p] for p in positions)
        expected.append(votes.most_common(1)[0][0])
        positions = [p + 1 for p in positions if expected[p] == expected[-1]]
    assert match.follow(9) == expected[len(text) :]
    chain = grown(match, 9, TreeShape.chain(9), rate=0.5)
    assert (list(chain.token_ids), chain.is_chain) == (expected[len(text) :], True)


def test_a_match_in_another_text_ends_with_it() -> None:
    match = texts_of([1, 2, 3, 4], [5, 6, 3, 4, 7]).find([9, 3, 4])
    assert isinstance(match, Match)
    assert LENGTHS[match.level] == 2
    assert match.follow(5) == [7]
    assert texts_of([1, 2, 3]).find([8, 8, 3]).follow(4) == []  # type: ignore[union-attr]
    assert texts_of([1, 2, 3]).find([4]) is None


def test_the_path_is_that_of_the_most_frequent_child_at_each_node() -> None:
    """Whatever the occurrences agree on is taken at once, which changes nothing; closed texts and loops included."""
    rng, num_splits = random.Random(5), 0
    for _ in range(3000):
        texts = Texts()
        for is_last in (False, False, True):
            texts.extend([rng.randrange(2) for _ in range(rng.randrange(1, 12))] * rng.choice((1, 1, 3)))
            if not is_last or rng.random() < 0.2:
                texts.close()
        end = len(texts.text)
        positions = sorted(rng.sample(range(end), min(end, rng.randrange(1, 6))), reverse=True)
        match, num_tokens = Match(texts.text, 0, positions), rng.randrange(1, 20)
        path: list[int] = []
        while len(path) < num_tokens and (children := match.children(path, positions)):
            num_splits += len(children) > 1
            path.append(children[0][0])
            positions = children[0][1]
        assert match.follow(num_tokens) == path
    assert num_splits > 1000


def test_every_token_of_a_large_vocabulary_is_a_character() -> None:
    """Also those whose numbers are surrogates or no characters at all."""
    ids = [0, 10, 0xD800, 0xDFFF, 0xFFFF, 0x10000, 0x10FFFE]
    match = texts_of(ids).find(ids[:3])
    assert isinstance(match, Match)
    assert match.follow(9) == ids[3:]


def test_a_tree_grows_where_the_text_is_split_and_inside_its_shape() -> None:
    match = texts_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 3, 4]).find([9, 1, 2])
    assert isinstance(match, Match)
    tree = grown(match, 8, TreeShape.beam(4, 3), rate=0.6)
    paths = {tuple(tree.token_ids[n] for n in tree.path_to(node)): p for node, p in enumerate(tree.probabilities)}
    assert paths == {(3,): 0.75, (3, 4): 2 / 3, (3, 5): 1 / 3, (6,): 0.25, (6, 7): 1.0}
    assert tree.token_ids[:2] == (3, 4), "the likeliest nodes come first"
    narrow = grown(match, 8, TreeShape.branch(2, 1), rate=0.6)
    assert (set(zip(narrow.token_ids, narrow.parents, strict=True))) == {(3, NO_PARENT), (4, 0), (6, NO_PARENT), (7, 2)}
    assert len(grown(match, 3, TreeShape.beam(4, 3), rate=0.6)) == 3


def test_history_is_bounded_and_the_oldest_goes() -> None:
    history = History(64)
    for i in range(50):
        history.add("a", [100 + i, 200 + i, 300 + i])
        kept = sum(len(t.text) for half in (history._newer, history._older) for t in half.values())
        assert kept <= 64 + 2 * 3, "beside what stands before the first text of each half"
    assert history.find("a", [149, 249]) is not None
    assert history.find("a", [100, 200]) is None
    history.add("a", range(1000))
    assert history.find("a", [997]) is not None
    assert history.find("a", [500]) is None
    nothing = History(0)
    nothing.add("a", [1, 2, 3])
    assert nothing.find("a", [1, 2]) is None


def view(token_ids: Sequence[int], **fields: Any) -> Any:
    defaults = {"sequence_id": 0, "prompt_len": 3, "prediction_ids": (), "salt": "", "is_traced": False}
    return SimpleNamespace(token_ids=list(token_ids), speculation=Speculation("suffix"), **{**defaults, **fields})


@pytest.mark.parametrize(
    ("shares", "traced", "expected"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_only_answers_of_the_same_salt_are_drafted_from_unless_they_are_shared(
    shares: bool, traced: bool, expected: bool
) -> None:
    drafter = SuffixDrafter(SuffixConfig(shares_history=shares))
    first = view([1, 2, 3, 4, 5, 6], salt="one")
    drafter.state(first)
    drafter.forget(first)
    assert isinstance(drafter.state(view([7, 4, 5], salt="two", is_traced=traced)), Refusal) is not expected
    assert isinstance(drafter.state(view([7, 4, 5], salt="one", sequence_id=1)), tuple)


def test_a_prediction_is_followed_from_the_first_token_and_again_behind_a_change() -> None:
    drafter = SuffixDrafter()
    sequence = view([1, 2, 3], prediction_ids=(5, 6, 7, 8, 9, 10))

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
    setup = DraftSetup(backend=FakeBackend(), shares_history=config.get("shares_history", False))
    return Engine(
        FakeBackend(), family=(4, 8, 16, 64), drafters=make_drafters(setup), cost=CHEAP_ROWS,
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


def asked(seed: int, tree: str | None = None, temperature: float = 0.7, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
    return Request([1, 2, 3, seed % 4], params, Speculation.of("suffix", tree=tree), **fields)


def truth(requests: Sequence[Request]) -> list[SampleOutput]:
    engine = Engine(FakeBackend(), family=(4, 8, 16, 64), drafters={"suffix": NoDrafter()})
    return [play(engine, [replace(r, speculation=Speculation("suffix"))])[0][0] for r in requests]


@pytest.mark.parametrize("tree", [None, "chain:3", "branch:3,2,1", "beam:4,6"])
@pytest.mark.parametrize("config", [{}, {"prefix_cache": False}, {"max_len": 60, "max_running": 8}], ids=str)
def test_predictions_and_an_adversarial_history_change_nothing(tree: str | None, config: dict[str, Any]) -> None:
    """The history says of every context what the target never draws there, and what it does; predictions likewise."""
    requests = [asked(i, tree, temperature=i % 2) for i in range(10)]
    expected = truth(requests)
    rng = random.Random(0)
    engine = make_engine(shares_history=True, **config)
    history = engine._drafters._drafters["suffix"]._history  # type: ignore[attr-defined]
    for output in expected:
        right = list(output.token_ids)
        for text in (
            right,
            [(t + 1) % VOCAB if rng.random() < 0.3 else t for t in right],
            rng.choices(range(VOCAB), k=40),
        ):
            history.add("", text)
    wrong = [[(t + (rng.random() < 0.4)) % VOCAB for t in output.token_ids] for output in expected]
    predicted = [
        replace(r, prediction_ids=p, salt=str(i)) for i, (r, p) in enumerate(zip(requests, wrong, strict=True))
    ]
    engine.add(replace(requests[0], salt="aborted"))
    engine.step()
    engine.abort(0)
    outputs, _ = play(engine, predicted)
    found = outputs[-len(requests) :]
    assert [(o.digest, o.finish_reason) for o in found] == [(o.digest, o.finish_reason) for o in expected]
    assert engine.totals.accepted > 40
    assert engine.totals.drafted > engine.totals.accepted + 40


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
