"""200 schemas on a model that tries everything, and some on a real one: every answer that ends is in its shape."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tests.support.formats import FORMATS
from tests.support.hostile_shapes import HEAVY
from tests.support.hostile_shapes import SCHEMAS as HOSTILE
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
            jsonschema.validate(json.loads(found.text), schema, format_checker=FORMATS)
            count += 1
    return count


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        ("date", "2024-11-30", "2024-11-31"),
        ("date", "2024-02-29", "2023-02-29"),
        ("time", "23:59:59.5+01:30", "24:00:00Z"),
        ("date-time", "2024-02-29T01:02:03z", "2023-02-29T01:02:03Z"),
        ("uuid", "0" * 8 + "-0000-0000-0000-" + "0" * 12, "0" * 32),
        ("ipv4", "1.2.3.255", "1.2.3.256"),
        ("duration", "P1Y2M3DT4H", "P1YT"),
    ],
)
def test_control_formats_are_checked(format_: str, good: str, bad: str) -> None:
    schema = {"type": "string", "format": format_}
    jsonschema.validate(good, schema, format_checker=FORMATS)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema, format_checker=FORMATS)


def test_control_every_format_of_the_schemas_has_a_check() -> None:
    assert set(re.findall(r'"format": "([^"]*)"', json.dumps(SCHEMAS))) <= FORMATS.checkers.keys()


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


def entangled(rng: random.Random) -> Any:
    """A random schema, sometimes one that would take a process, whole or as a part."""
    made = random_schema(rng)
    if rng.random() < 0.9:
        return made
    heavy = rng.choice([*HOSTILE.values(), *(each["schema"] for each in HEAVY.values() if "schema" in each)])
    return rng.choice(
        [heavy, {"allOf": [heavy, made]}, {"properties": {"a": heavy, "b": made}}, {"anyOf": [made, heavy]}]
    )


@pytest.mark.parametrize("num_schemas", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_random_schemas_neither_crash_nor_hang(num_schemas: int) -> None:
    rng = random.Random(num_schemas)
    followed = sum(walk(entangled(rng), rng, 40) for _ in range(num_schemas))
    assert num_schemas / 10 < followed < num_schemas
