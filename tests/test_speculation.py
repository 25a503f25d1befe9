"""What requests may say of their drafts, and what is refused at the door: in words that name what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.skipping import fake_setup
from tests.support.tiny_llm import loaded, write_model
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.tree import TreeShape
from verispec.types import Accept, SamplingParams

DEFAULT = Speculation.of("model", tree="beam:2,3", accept="recursive")
FREE = SamplingParams(max_tokens=8, temperature=1.0, seed=1, deterministic=False)


# The words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, DEFAULT),
        (True, DEFAULT),
        ({}, DEFAULT),
        (False, Speculation("none")),
        ({"method": "skip"}, Speculation("skip")),
        ({"method": "model"}, Speculation("model")),  # a method leaves nothing of the default, also if it is the same
        ({"tree": "chain:2"}, Speculation("model", TreeShape.chain(2), Accept.RECURSIVE)),
        ({"tree": None}, Speculation("model", None, Accept.RECURSIVE)),
        ({"accept": "match"}, Speculation("model", TreeShape.beam(2, 3), Accept.MATCH)),
        (
            {"method": "skip", "tree": "branch:3,2,1", "accept": "recursive"},
            Speculation("skip", TreeShape.branch(3, 2, 1), Accept.RECURSIVE),
        ),
    ],
)
def test_what_a_request_may_say(value: Any, expected: Speculation) -> None:
    assert Speculation.parse(value, DEFAULT) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("model", "speculative must be false or a mapping, not str"),
        (1, "speculative must be false or a mapping, not int"),
        (0, "speculative must be false or a mapping, not int"),
        ([("method", "skip")], "speculative must be false or a mapping, not list"),
        ({"methods": "skip"}, "speculative has no 'methods'; known: method, tree, accept"),
        ({3: "skip"}, "speculative has no '3'; known: method, tree, accept"),
        ({"method": None}, "method must be the name of a drafter, not NoneType"),
        ({"method": ["skip"]}, "method must be the name of a drafter, not list"),
        ({"accept": "maybe"}, "unknown accept 'maybe'; known: match, rejection, recursive"),
        ({"accept": None}, "unknown accept None; known: match, rejection, recursive"),
        ({"tree": 4}, "tree must be text such as chain:4, not int"),
        ({"tree": ["chain:4"]}, "tree must be text such as chain:4, not list"),
    ],
    ids=str,
)
def test_what_it_may_not(value: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        Speculation.parse(value, DEFAULT)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "tree", ["", "chain", "chain:0", "beam:3", "branch:2,,2", "star:3", "chain:999,1", "beam:-1,2"]
)
def test_a_bad_tree_is_told_what_is_possible(tree: str) -> None:
    with pytest.raises(InputError) as error:
        Speculation.parse({"tree": tree}, DEFAULT)
    assert str(error.value) == (
        f"tree must be chain:N, branch:b1,b2,... or beam:W,L with whole numbers from 1 to 999, not {tree!r}"
    )


# The engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    backend = FakeBackend(num_stores=2)
    return Engine(backend, family=(4, 16), drafters=make_drafters(fake_setup(backend)))


def refusal(engine: Engine, drafter: str, tree: str, accept: str, *, deterministic: bool) -> str:
    params = SamplingParams(deterministic=deterministic)
    shape = TreeShape.parse(tree) if tree else None
    with pytest.raises(InputError) as error:
        engine.add(Request([1, 2], params, speculation=Speculation(drafter, tree=shape, accept=Accept(accept))))
    assert not engine.has_work
    return str(error.value)


def test_a_drafter_that_is_not_there_is_refused(engine: Engine) -> None:
    message = "unknown drafter 'magic'; known: none, suffix, lookup, grammar, decode, skip, model, auto"
    assert refusal(engine, "magic", "", "match", deterministic=True) == message


@pytest.mark.parametrize("drafter", ["none", "decode"])
@pytest.mark.parametrize("tree", ["chain:3", "beam:3,3"])
def test_a_tree_needs_a_drafter_of_trees(engine: Engine, drafter: str, tree: str) -> None:
    message = f"tree {tree} needs a drafter of trees (suffix, skip, model, auto), not {drafter!r}"
    assert refusal(engine, drafter, tree, "match", deterministic=True) == message


@pytest.mark.parametrize("accept", ["rejection", "recursive"])
@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_rules_of_probabilities_are_not_deterministic(engine: Engine, drafter: str, accept: str) -> None:
    assert refusal(engine, drafter, "chain:3", accept, deterministic=True) == (
        f"accept {accept} lets tokens depend on the drafter, the tree and the load, so it needs deterministic=False"
    )


@pytest.mark.parametrize("accept", ["rejection", "recursive"])
@pytest.mark.parametrize("drafter", ["none", "suffix", "decode", "auto"])
def test_rules_of_probabilities_need_them(engine: Engine, drafter: str, accept: str) -> None:
    assert refusal(engine, drafter, "", accept, deterministic=False) == (
        f"accept {accept} needs the probabilities of drafter skip or model, not {drafter!r}"
    )


@pytest.mark.parametrize("tree", ["branch:2,2", "beam:3,3", "branch:4"])
def test_rejection_is_for_chains(engine: Engine, tree: str) -> None:
    assert refusal(engine, "model", tree, "rejection", deterministic=False) == (
        f"accept rejection is for chains; tree {tree} needs accept recursive"
    )


@pytest.mark.parametrize(
    ("drafter", "tree", "accept"),
    [
        ("skip", "beam:3,3", "recursive"),
        ("model", "", "rejection"),
        ("model", "beam:1,4", "rejection"),
        ("skip", "branch:1,1", "rejection"),
        ("auto", "branch:2,2", "match"),
    ],
)
def test_what_is_not_refused(engine: Engine, drafter: str, tree: str, accept: str) -> None:
    shape = TreeShape.parse(tree) if tree else None
    request_id = engine.add(Request([1, 2], FREE, speculation=Speculation(drafter, tree=shape, accept=Accept(accept))))
    assert engine.abort(request_id)
    engine.step()


def test_an_engine_whose_drafters_have_no_probabilities_says_so() -> None:
    """Without a backend in their set-up, `skip` and `model` cannot draft; `auto` has the trees of `suffix`."""
    engine = Engine(FakeBackend(), family=(4, 16), drafters=make_drafters())
    for drafter in ("skip", "model"):
        assert "needs a drafter of trees" in refusal(engine, drafter, "chain:3", "match", deterministic=True)


# The LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(folder: Path, model: Path) -> Iterator[LLM]:
    """Its draft model is the model itself; it drafts trees unless a request wants something else."""
    with loaded(model, folder, draft_model=model, drafter="model", tree="beam:2,3", force=True, kv_slots=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder: Path, model: Path) -> Iterator[LLM]:
    with loaded(model, folder, drafter="none", kv_slots=256) as llm:
        yield llm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "model"}, "drafter model needs a draft_model"),
        ({"drafter": "magic"}, "unknown drafter 'magic'; known: none, suffix, lookup, grammar, decode, skip, model, "
                               "auto"),
        ({"tree": "chain"}, "tree must be chain:N, branch:b1,b2,... or beam:W,L with whole numbers from 1 to 999, "
                            "not 'chain'"),
        ({"accept": "magic"}, "unknown accept 'magic'; known: match, rejection, recursive"),
        ({"drafter": "auto", "tree": "chain:3", "draft_len": 4},
         "tree chain:3 and draft_len exclude each other: both say how long drafts are"),
        ({"drafter": "model", "draft_model": "no-such-model"},
         "draft_model: 'no-such-model' is neither an existing path nor a known model; known models: smollm2-135m"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_options_that_make_no_sense_load_nothing(
    folder: Path, model: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error, loaded(model, folder, **options):
        pass
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "skip", "speculative": False}, "drafter and speculative exclude each other"),
        ({"drafter": "model", "speculative": {}}, "drafter and speculative exclude each other"),
        ({"speculative": "off"}, "speculative must be false or a mapping, not str"),
        ({"speculative": {"method": "magic"}}, "unknown drafter 'magic'"),
        ({"speculative": {"tree": "beam:9"}}, "tree must be chain:N"),
        ({"speculative": {"method": "decode", "tree": "beam:2,2"}}, "tree beam:2,2 needs a drafter of trees"),
        ({"speculative": {"accept": "recursive"}}, "accept recursive lets tokens depend on the drafter"),
        ({"drafter": "magic"}, "unknown drafter 'magic'"),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InputError, match=message):
            call("abc", SamplingParams(max_tokens=4), **options)
    assert not llm.engine.has_work


def test_the_draft_model_that_is_not_there(plain: LLM) -> None:
    for options in ({"drafter": "model"}, {"speculative": {"method": "model", "tree": "chain:2"}}):
        with pytest.raises(InputError) as error:
            plain.generate("abc", SamplingParams(max_tokens=4), **options)  # type: ignore[arg-type]
        assert str(error.value) == "drafter model needs a draft_model"
    assert "model" not in plain.drafter_names


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative": True},
        {"speculative": False},
        {"drafter": "none"},
        {"drafter": "model"},
        {"drafter": "ngram"},
        {"speculative": {"method": "suffix", "tree": "branch:3,2"}},
        {"speculative": {"tree": "branch:3,2"}},
        {"speculative": {"method": "model"}},
        {"speculative": {"method": "model", "tree": "chain:3"}},
        {"speculative": {"method": "auto", "tree": "beam:2,2"}},
    ],
    ids=str,
)
def test_whatever_is_asked_for_the_answer_is_the_same(llm: LLM, plain: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    (expected,) = plain.generate("abc the", params)
    (found,) = llm.generate("abc the", params, **options)
    assert (found.digest, found.text, found.profile) == (expected.digest, expected.text, expected.profile)
    off = options in ({"speculative": False}, {"drafter": "none"})
    wants_model = not off and not any(name in str(options) for name in ("ngram", "suffix", "auto"))
    assert (found.stats.draft_passes > 0) == wants_model or "auto" in str(options)


def test_naming_the_default_drafter_keeps_its_tree(llm: LLM) -> None:
    def tree(**options: Any) -> TreeShape | None:
        return (llm.request("abc", FREE, **options).speculation or Speculation()).tree

    assert tree(drafter="model") == TreeShape.beam(2, 3)
    assert tree(speculative={"method": "model"}) is None
    assert tree(drafter="suffix") is None


@pytest.mark.parametrize("options", [{"tree": "chain:3", "accept": "rejection"}, {"accept": "recursive"}], ids=str)
def test_rules_of_probabilities_give_answers_and_no_receipts(llm: LLM, options: dict[str, str]) -> None:
    (done,) = llm.generate("abc the", FREE, speculative=options)
    assert len(done.token_ids) == 8
    assert done.stats.drafted > 0
    with pytest.raises(InputError, match="deterministic"):
        llm.generate("abc the", FREE, speculative=options, receipts=True)
    assert not llm.engine.has_work
    output = done.samples[0]
    with pytest.raises(InputError):
        llm.receipt("abc the", FREE, output)


def test_streams_tell_of_their_drafts_if_asked(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    traced = list(llm.stream("abc", params, trace=True))
    assert sum(e.trace is not None for e in traced) > 2
    for event in traced:
        if event.trace is not None:
            path = event.trace.verdict.path
            tokens = tuple(event.trace.draft.token_ids[i] for i in path)
            assert (*tokens, event.trace.verdict.bonus_id)[: len(event.token_ids)] == event.token_ids
    assert all(e.trace is None for e in llm.stream("abc", params))
