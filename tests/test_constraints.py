"""Constrained answers through `LLM`: receipts and replays, drafts by a second model, real vocabularies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from tests.support.shapes import JSON_VOCABULARY, PERSON, VOCAB_SIZE
from tests.support.tiny_llm import CONFIG, loaded, write_model
from verispec.errors import ConstraintError
from verispec.llm import LLM
from verispec.receipt.reading import parse
from verispec.receipt.rerun import replay
from verispec.types import SamplingParams

PARAMS = SamplingParams(schema=PERSON, max_tokens=80, temperature=1.0, seed=3)
BACKENDS = ["numpy", "native"]


@pytest.fixture(scope="module", params=BACKENDS)
def llm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("m")
    config = replace(CONFIG, vocab_size=VOCAB_SIZE)
    model = write_model(folder / "m.gguf", config, **JSON_VOCABULARY)
    smaller = write_model(folder / "d.gguf", replace(config, num_layers=1), **JSON_VOCABULARY)
    with loaded(model, folder, backend=request.param, draft_model=smaller, kv_slots=600) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_way_of_drafting_gives_the_same_answer_in_the_shape(llm: LLM, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature)
    (plain,) = llm.generate("tell me", params, drafter="none")
    jsonschema.validate(json.loads(plain.text), PERSON)
    ways: list[dict[str, str]] = [{"method": name} for name in ("suffix", "grammar", "decode", "model", "auto")]
    ways += [{"method": "model", "tree": tree} for tree in ("chain:4", "branch:3,2", "beam:3,3")]
    for speculative in ways:
        (found,) = llm.generate("tell me", params, speculative=speculative)
        assert found.digest == plain.digest, speculative
    (streamed,) = (event.output for event in llm.stream("tell me", params) if event.output)
    assert (streamed.digest, streamed.text) == (plain.digest, plain.text)


def test_a_receipt_names_the_constraint_and_replays(llm: LLM) -> None:
    (found,) = llm.generate("tell me", PARAMS, receipts=True)
    (receipt,) = found.receipts
    assert receipt.constraint is not None
    assert PARAMS.constraint is not None
    assert receipt.constraint.sha256 == PARAMS.constraint.sha256
    assert re.fullmatch(r"llguidance 1\..*, dialect \d+", receipt.constraint.library)
    assert parse(receipt.to_json()) == receipt
    assert replay(llm, receipt).reproduced
    other = replace(receipt, constraint=replace(receipt.constraint, library="llguidance 0.1"))
    result = replay(llm, replace(other, digest=receipt.digest))
    assert [difference.name for difference in result.profile] == ["constraint.library"]
    assert not result.same_profile
    without = replay(llm, replace(receipt, constraint=None))
    assert [difference.name for difference in without.fields] == ["constraint.sha256"]


def test_a_bad_schema_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ConstraintError, match=r"schema at #/properties/a: unsupported: \"not\""):
        llm.generate("tell me", {"schema": {"type": "object", "properties": {"a": {"not": {}}}}})
