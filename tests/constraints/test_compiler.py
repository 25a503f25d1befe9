"""Schemas, regexes and grammars: what they allow token by token, and what is said of the bad ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.golden_tokenizers import SMALL
from verispec.constraints import Compiler, compiler, json_term
from verispec.constraints.limits import MAX_CHARS
from verispec.constraints.positions import Position
from verispec.errors import ConstraintError, InputError
from verispec.types import SamplingParams

WIDTH = 37  # logits behind the vocabulary, which must never be drawn
COMPILERS = {kind: Compiler(tokenizer, tokenizer.vocab_size + WIDTH) for kind, tokenizer in SMALL.items()}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def start(kind: str, stop_ids: tuple[int, ...] = (), **constraint: Any) -> Position:
    wanted = SamplingParams(**constraint).constraint
    assert wanted is not None
    return COMPILERS[kind].compile(wanted).start(stop_ids)


def ids(position: Position) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(position.allowed.view(np.uint8), bitorder="little")).tolist())


def refusal(**constraint: Any) -> ConstraintError:
    with pytest.raises(ConstraintError) as caught:
        start("qwen2", **constraint)
    return caught.value


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_masks_allow_ends_in_the_shape(kind: str, seed: int) -> None:
    """S13: random tokens out of every mask, on every kind of vocabulary; the end is allowed where the JSON is whole."""
    tokenizer, rng = SMALL[kind], np.random.default_rng(seed)
    end = tokenizer.eos_ids[0]
    at, taken = start(kind, (end,), schema=PERSON), []
    while not at.is_exhausted:
        allowed = sorted(ids(at))
        assert all(i < tokenizer.vocab_size and (tokenizer.table[i] or i == end) for i in allowed)
        assert (end in allowed) == at.is_complete
        taken.append(int(rng.choice(allowed)))
        following = at.after(taken[-1])
        assert following is not None
        at = following
    found = json.loads(tokenizer.decode(taken))
    assert set(found) == {"name", "age"}
    assert len(found["name"]) <= 8
    assert type(found["age"]) is int


def test_a_space_that_the_decoder_takes_away_is_no_part_of_the_text() -> None:
    """SentencePiece puts a space before a text. A model may write it, and has to where the text has one of its own."""
    tokenizer = SMALL["sentencepiece"]
    assert tokenizer.strips_leading_space

    def texts(regex: str) -> set[str]:
        found, open_ends = set(), [((), start("sentencepiece", regex=regex))]
        while open_ends:
            taken, at = open_ends.pop()
            if at.is_exhausted:
                found.add(tokenizer.decode(taken))
            else:
                open_ends += [((*taken, i), following) for i in ids(at) if (following := at.after(i))]
        return found

    assert texts("no|yes") == {"no", "yes"}
    assert texts(" (no|yes)") == {" no", " yes"}
    root = start("sentencepiece", schema=PERSON)
    first = {tokenizer.token_bytes(i)[:1] for i in ids(root)}
    assert first == {b" ", b"{"}


def test_a_position_is_a_value() -> None:
    """Forks neither move nor disturb each other, and equal a fresh walk."""
    root = start("qwen2", regex="(ab|ac){2}x")
    encode = SMALL["qwen2"].encode
    a, b, c, x = (encode(letter)[0] for letter in "abcx")
    before = root.allowed.copy()
    fork = root.after(a)
    assert fork is not None
    assert root.after(x) is None
    one, other = fork.after(b), fork.after(c)
    assert one is not None
    assert other is not None
    for _ in range(3):
        assert fork.after(x) is None
    fresh = start("qwen2", regex="(ab|ac){2}x").after(a)
    assert fresh is not None
    assert np.array_equal(fresh.allowed, fork.allowed)
    assert np.array_equal(root.allowed, before)
    assert one.after(a) is not other.after(a)


def test_the_end_is_allowed_only_where_the_text_is_complete() -> None:
    tokenizer = SMALL["qwen2"]
    end, one = tokenizer.eos_ids[0], tokenizer.encode("1")[0]
    root = start("qwen2", (end, one), regex="1{2,3}")
    assert end not in ids(root)
    assert one in ids(root)  # a stop id with text of its own is for the grammar to allow
    at = root.committed(one).committed(one)
    assert at.is_complete
    assert not at.is_exhausted
    assert {end, one} <= ids(at)
    at = at.committed(one)
    assert at.is_exhausted
    assert ids(at) == {end}
    assert at.after(end) is None
    with pytest.raises(ConstraintError, match="does not allow"):
        at.committed(one)


def test_what_cannot_be_followed_says_why() -> None:
    """The mask allows the token, and what is forced behind it has no end."""
    at = start("qwen2", grammar='start: "a" start')
    token_id = min(ids(at))
    with pytest.raises(ConstraintError, match=r"cannot be followed: .*limit"):
        at.committed(token_id)


@pytest.mark.parametrize("kind", SMALL)
def test_forced_tokens_write_what_is_left_to_write(kind: str) -> None:
    """They are the tokenizer's own cut of the forced text, without a space that it would put before it."""
    at = start(kind, schema=PERSON).after(SMALL[kind].table.index(b"{"))
    assert at is not None
    forced = at.forced_ids
    assert forced
    assert b'"name": "'.startswith(b"".join(SMALL[kind].token_bytes(i) for i in forced))
    for token_id in forced:
        assert at is not None
        at = at.after(token_id)
    assert at is not None


@pytest.mark.parametrize("text", ["e\u0301", "<|im_end|>", "\u0000 \ud7ff"])
def test_forced_text_that_the_tokenizer_would_change_is_written_as_it_is(text: str) -> None:
    """Qwen's normalises, and takes the names of control tokens for the tokens."""
    at, taken = start("qwen2", schema={"const": text}), []
    while not at.is_exhausted:
        taken.append(min(ids(at)))
        at = at.committed(taken[-1])
    assert json.loads(SMALL["qwen2"].decode(taken)) == text


def test_what_is_wrong_with_a_schema_and_where() -> None:
    inner: dict[str, Any] = {"type": "object", "properties": {"a/b": {"type": "array", "items": {"type": "strin"}}}}
    found = refusal(schema=inner)
    assert (found.field, found.path) == ("schema", "/properties/a~1b/items")
    assert "strin" in found.reason
    unsupported = refusal(
        schema={"$defs": {"x": {"not": {}, "if": {}}}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}
    )
    assert '"not"' in unsupported.reason
    assert unsupported.path == "/$defs/x"
    pattern = refusal(schema={"properties": {"p": {"type": "string", "pattern": "("}}})
    assert pattern.path == "/properties/p"
    unused = refusal(schema={"$defs": {"u": {"not": {}}}, "type": "object", "properties": {"a": {"not": {}}}})
    assert (unused.path, unused.reason) == ("/properties/a", 'unsupported: "not"')
    overlap = refusal(schema={"items": {"oneOf": [{"type": "string"}, {"type": "string"}]}})
    assert (overlap.path, overlap.reason) == (
        "/items",
        "unsupported: a oneOf whose options may overlap; anyOf takes them",
    )


AGE = {"type": "integer", "minimum": 3, "maximum": 2}
EMPTY = "minimum (3) is greater than maximum (2)"
NO_OPTIONS = "there are no options"
ENDLESS = "it requires itself without end"
SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"type": "object", "properties": {"n": {"enum": []}}, "required": ["n"]}, "/properties/n", NO_OPTIONS),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "", "incompatible types"),
        (AGE, "", EMPTY),
        ({"type": "object", "properties": {"age": AGE}, "required": ["age"]}, "/properties/age", EMPTY),
        ({"anyOf": [{"type": "object", "properties": {"a/b": AGE}, "required": ["a/b"]}]},
         "/anyOf/0/properties/a~1b", EMPTY),
        ({"type": "array", "items": AGE, "minItems": 1}, "/items", EMPTY),
        ({"type": "array", "prefixItems": [{}, AGE], "minItems": 2}, "/prefixItems/1", EMPTY),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "/properties/a", "it is false"),
        ({"anyOf": []}, "", NO_OPTIONS),
        ({"anyOf": [False]}, "/anyOf/0", "it is false"),
        ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "/items", "it is false"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "",
         "required property 'a' is unsatisfiable"),
        ({"$defs": {"u": {"enum": []}, "v": {"enum": []}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/v"}},
          "required": ["a"]}, "/$defs/v", NO_OPTIONS),
        (SELF, "", ENDLESS),
        ({"anyOf": [SELF, {"allOf": [SELF]}]}, "", ENDLESS),
        ({"anyOf": [False, SELF]}, "", ENDLESS),
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, "", ENDLESS),
        ({"type": "object", "required": ["a"], "additionalProperties": SELF}, "", ENDLESS),
        ({"type": "object", "required": ["a"], "patternProperties": {"a": SELF}}, "", ENDLESS),
        ({"type": "object", "minProperties": 1, "additionalProperties": SELF}, "", ENDLESS),
        ({"type": "object", "minProperties": 2, "properties": {"n": {}}, "required": ["n"],
          "additionalProperties": SELF}, "", ENDLESS),
        ({"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}, "minItems": 1}}, "$ref": "#/$defs/l"},
         "/$defs/l", ENDLESS),
        ({"$defs": {"x": SELF, "l": {"type": "array", "prefixItems": [{"$ref": "#/$defs/l"}], "minItems": 1}},
          "type": "object", "properties": {"o": SELF, "l": {"$ref": "#/$defs/l"}}, "required": ["l"]},
         "/$defs/l", ENDLESS),
    ],
)  # fmt: skip
def test_a_schema_that_can_match_nothing_is_told_before_anything_runs(
    schema: dict[str, Any], path: str, reason: str
) -> None:
    found = refusal(schema=schema)
    assert (found.path, found.reason) == (path, f"can match nothing: {reason}")


def test_a_schema_that_may_end_its_recursion_is_fine() -> None:
    tree = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]}
    linked = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}]}
    names = {"type": "object", "additionalProperties": SELF}
    apart = {**names, "required": ["a"], "properties": {"a": {"type": "null"}}, "minProperties": 1}
    unlike = {"type": "object", "required": ["a"], "patternProperties": {"^b": SELF, "^a": {"type": "null"}}}
    for schema in (tree, linked, names, apart, unlike):
        assert ids(start("qwen2", schema=schema))


def test_control_a_schema_without_an_end_is_found_by_us_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "endless", lambda schema, matches: None)
    assert ids(start("gpt-2", schema={"type": "object", "required": ["a"], "additionalProperties": SELF}))


def test_schemas_inside_of_grammars_have_to_end_too() -> None:
    endless = {"type": "object", "required": ["a"], "additionalProperties": SELF}
    assert "without end" in refusal(grammar=f"start: %json {json.dumps(endless)}").reason


def test_keywords_that_demand_nothing_are_taken() -> None:
    plain = {"type": "array", "items": {"type": "integer"}}
    for schema in (
        {**plain, "uniqueItems": False},
        {"properties": {"uniqueItems": False, "l": {"uniqueItems": False}}},
    ):
        assert ids(start("qwen2", schema=schema))
        assert ids(start("qwen2", grammar=f"start: {json_term(schema)}"))
    assert "uniqueItems" in refusal(schema={**plain, "uniqueItems": True}).reason


def test_the_examples_of_the_docs_come_out_like_that() -> None:
    text = (Path(__file__).parents[2] / "docs" / "structured.md").read_text()
    tags = {"type": "object", "properties": {"tags": {"type": "array", "contains": {}}}}
    age = {"type": "object", "properties": {"age": AGE}, "required": ["age"]}
    said = [str(refusal(schema=schema)) for schema in (tags, age, SELF)]
    assert "\n".join(said) in text


@pytest.mark.parametrize("grammar", ["start: x", 'foo: "a"', "start: /[/"])
def test_bad_grammars_and_regexes_are_named(grammar: str) -> None:
    assert refusal(grammar=grammar).field == "grammar"
    assert refusal(regex="(").field == "regex"
    assert "match nothing" in refusal(regex=r"[^\x00-\U0010ffff]").reason


def test_limits_are_counts() -> None:
    assert str(MAX_CHARS) in refusal(regex="a" * (MAX_CHARS + 1)).reason
    deep: dict[str, Any] = {}
    for _ in range(80):
        deep = {"items": deep}
    assert "levels" in refusal(schema=deep).reason
    refs = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}}
    assert "$refs" in refusal(schema=refs).reason


def test_parameters_take_one_constraint_as_text_or_object() -> None:
    assert SamplingParams(schema=PERSON) == SamplingParams(schema=json.dumps(PERSON, indent=2))
    assert hash(SamplingParams(schema=PERSON))
    with pytest.raises(InputError, match="exclude"):
        SamplingParams(schema=PERSON, regex="a")
    for bad in ("{", "[]", '{"a": 1, "a": 2}', 3, {"a": {1}}, {"a": float("nan")}):
        with pytest.raises(InputError, match="schema"):
            SamplingParams(schema=bad)  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="max_tokens"):
        SamplingParams(regex="a", max_tokens=0, prompt_logprobs=0)


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llguidance", "verispec.constraints.vocabulary"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    wanted = SamplingParams(regex="a").constraint
    assert wanted is not None
    with pytest.raises(InputError, match=r"verispec\[structured\]"):
        Compiler(SMALL["qwen2"], 100).compile(wanted)
