"""200 schemas on a model that tries everything, and some on a real one: every answer that ends is in its shape."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tests.support.schemas import SCHEMAS, TOOLS, random_schema
from tests.support.shapes import JSON_VOCABULARY, VOCAB_SIZE, compiled
from tests.support.tiny_llm import CONFIG, loaded, write_model
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.types import FinishReason, SamplingParams


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("m")
    model = write_model(folder / "m.gguf", replace(CONFIG, vocab_size=VOCAB_SIZE), **JSON_VOCABULARY)
    with loaded(model, folder, kv_slots=8192) as llm:
        yield llm


def finished(llm: LLM, prompt: str, schemas: Sequence[Any], **params: Any) -> int:
    """How many answers ended by themselves; all of them validate, and none failed."""
    each = [SamplingParams(**{"max_tokens": 160, "seed": i, **params}, schema=s) for i, s in enumerate(schemas)]
    count = 0
    for schema, found in zip(schemas, llm.generate([prompt] * len(each), each, drafter="auto"), strict=True):
        assert found.error is None, (schema, found)
        if found.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(found.text), schema)
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_tries_everything_stays_in_every_shape(tiny: LLM, temperature: float) -> None:
    assert len(SCHEMAS) >= 200
    assert finished(tiny, "tell me", SCHEMAS, temperature=temperature) > 0.9 * len(SCHEMAS)


@pytest.mark.slow
def test_a_real_model_answers_by_the_schemas_of_tools(smollm2: LLM) -> None:
    assert finished(smollm2, "Call the tool:", TOOLS[:4], max_tokens=96) == 4
    assert finished(smollm2, "Call the tool:", TOOLS[-2:], max_tokens=96, temperature=1.0) == 2


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_model_stays_in_every_shape(smollm2: LLM, temperature: float) -> None:
    assert finished(smollm2, "Some JSON:", SCHEMAS, temperature=temperature) > 0.9 * len(SCHEMAS)


def walk(schema: Any, rng: random.Random, num_tokens: int) -> bool:
    """Follow a schema at random; False if it is refused, in one sentence."""
    try:
        place = compiled(SamplingParams(schema=schema)).start((0,))
    except InputError:
        return False
    for _ in range(num_tokens):
        if place.is_exhausted:
            return True
        allowed = [i for i in range(VOCAB_SIZE) if place.allowed[i // 32] >> i % 32 & 1]
        token_id = rng.choice(allowed)
        if token_id == 0:
            assert place.is_complete
            return True
        place = place.committed(token_id)
    return True


@pytest.mark.parametrize("num_schemas", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_random_schemas_neither_crash_nor_hang(num_schemas: int) -> None:
    rng = random.Random(num_schemas)
    followed = sum(walk(random_schema(rng), rng, 40) for _ in range(num_schemas))
    assert num_schemas / 10 < followed < num_schemas
