"""Calls of tools in answers: found in every family's format, however the text is cut; what is no call is text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verispec.server.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    ToolFormat,
    calls_as_text,
    recognised,
    tools_as_text,
)
from verispec.server.tool_reader import Part, ToolReader

NAMES = ("look", "say")
ARGUMENTS = '{"city": "a </tool_call> b", "deep": [{"x": "}\\""}]}'
FORMATS = {fmt.name: fmt for fmt in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}
# What texts are made of: everything that a reader looks at, whole and in parts.
FRAGMENTS = [
    "hi", " ", "\n", "<tool_call>", "</tool_call>", "<tool", "_call>", "[TOOL_CALLS]", "[", "]", "{", "}", ", ", '"',
    '{"name": "look", "arguments": ', '{"name": "say", "parameters": ', '{"x": 1}', '{"x": "}"}', "é",
    '{"name": "look", "arguments": {"x": 1}}', '{"name": "other", "arguments": {}}', "[ARGS]", "look[ARGS]",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def written(fmt: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as a grammar writes them."""
    items = [head + arguments + fmt.tail for name, arguments in calls for head in fmt.heads([name])]
    return ("" if fmt.is_leading else fmt.open + fmt.begin) + (fmt.between or "").join(items) + fmt.end


def told(parts: list[Part]) -> list[tuple[str | None, str, bool]]:
    """Text and calls in order, pieces joined; the last value tells whether a call is whole."""
    found: list[tuple[str | None, str, bool]] = []
    for part in parts:
        if not part.opens and found and found[-1][0] == part.name:
            found[-1] = (part.name, found[-1][1] + part.text, found[-1][2] or part.closes)
        else:
            found.append((part.name, part.text, part.closes))
    return found


def read(fmt: ToolFormat, pieces: list[str], *, is_exact: bool = False, is_leading: bool = False) -> list[Part]:
    reader = ToolReader(fmt, NAMES, is_exact=is_exact, is_leading=is_leading)
    return [part for piece in pieces for part in reader.read(piece)] + reader.finish()


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_leading", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_how_a_text_is_cut_changes_nothing(
    name: str, is_leading: bool, is_exact: bool, text: str, cuts: list[int]
) -> None:
    """After every prefix the same has been told, so a stream can be joined at any token."""
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    whole = ToolReader(FORMATS[name], NAMES, is_exact=is_exact, is_leading=is_leading)
    by_char = ToolReader(FORMATS[name], NAMES, is_exact=is_exact, is_leading=is_leading)
    parts: list[Part] = []
    chars: list[Part] = []
    for start, end in pairwise(places):
        parts += whole.read(text[start:end])
        for char in text[start:end]:
            chars += by_char.read(char)
        assert told(parts) == told(chars)
    found = told(parts + whole.finish())
    assert found == told(chars + by_char.finish())
    if not any(call for call, *_ in found):
        assert "".join(each for _, each, _ in found) == text


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_a_grammar_are_told_as_they_come(name: str) -> None:
    fmt = FORMATS[name]
    calls = [("look", ARGUMENTS)] if fmt.between is None else [("look", ARGUMENTS), ("say", "{}")]
    text = written(fmt, *calls)
    assert told(read(fmt, list(text), is_exact=True)) == [(*call, True) for call in calls]
    cut = text[: text.index("deep")]
    (part,) = told(read(fmt, [cut], is_exact=True))
    assert part == ("look", ARGUMENTS[: ARGUMENTS.index("deep")], False)
    reader = ToolReader(fmt, NAMES, is_exact=True, is_leading=False)
    pieces = [part for char in text for part in reader.read(char) if part.text]
    assert len(pieces) == sum(len(arguments) for _, arguments in calls)  # none was held back


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("hermes", "Well.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"a\": 1}}\n</tool_call>\n",
     [(None, "Well.", False), ("look", '{"a": 1}', True)]),
    ("hermes", '<tool_call>[{"name": "look"}, {"name": "say", "arguments": {}}]</tool_call>',
     [("look", "{}", True), ("say", "{}", True)]),
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {}}', [("look", "{}", True)]),
    ("llama3_json", '{"name": "look", "parameters": {"a": 1}}', [("look", '{"a": 1}', True)]),
    ("mistral", 'So: [TOOL_CALLS] [{"name": "look", "arguments": {"a": 1}, "id": "x"}]',
     [(None, "So:", False), ("look", '{"a": 1}', True)]),
    ("mistral_args", 'So: [TOOL_CALLS]look[ARGS]{"a": 1}[TOOL_CALLS]say[CALL_ID]abc[ARGS] {}',
     [(None, "So:", False), ("look", '{"a": 1}', True), ("say", "{}", True)]),
])  # fmt: skip
def test_calls_of_the_models_own_are_read(name: str, text: str, expected: list[object]) -> None:
    assert told(read(FORMATS[name], [text])) == expected


@pytest.mark.parametrize(("name", "text"), [
    ("hermes", "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"a\": 1}\n</tool_call> and so on"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": "a"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", "a <tool_call"),
    ("hermes", "a <tool_call> "),
    ("llama3_json", '{"answer": 4}'),
    ("llama3_json", 'I call {"name": "look", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]" + "[" * 5000),
    ("mistral_args", '[TOOL_CALLS]look{"a": 1}'),
    ("mistral_args", '[TOOL_CALLS]look[ARGS]{"a": 1'),
    ("mistral_args", '[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]lock[ARGS]{}'),
])  # fmt: skip
def test_a_broken_call_is_text(name: str, text: str) -> None:
    assert told(read(FORMATS[name], list(text))) == [(None, text, False)]


def test_an_answer_that_begins_otherwise_has_no_calls() -> None:
    text = '{"tag": "' + written(HERMES, ("look", "{}")) + '"}'
    assert told(read(HERMES, list(text), is_exact=True, is_leading=True)) == [(None, text, False)]
    assert told(read(HERMES, [text]))[1][0] == "look"  # control: elsewhere it is one


def test_families_are_known_by_their_template() -> None:
    rest = "{{ tools }}{{ tool_calls }}"
    assert recognised("<tool_call>" + rest) == HERMES
    assert recognised("<|python_tag|>" + rest) == LLAMA3
    assert recognised("[TOOL_CALLS] [" + rest).begin == " ["
    assert recognised("[TOOL_CALLS]" + rest) == MISTRAL
    assert recognised("{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}" + rest) == MISTRAL_ARGS
    plain = recognised("<|im_start|>{{ messages }}")
    assert (plain.open, plain.has_tools, plain.has_calls) == (HERMES.open, False, False)


def test_tools_are_written_into_texts_where_the_template_has_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": "é"}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
        {"role": "tool", "content": "seen again", "tool_call_id": "2"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    system, user, calls, results = tools_as_text(calls_as_text(messages), [tool])
    assert json.dumps(tool) in system["content"]
    assert user == messages[0]
    assert told(read(HERMES, [calls["content"]])) == [("look", '{"a": "é"}', True)] * 2
    assert results["role"] == "user"
    assert results["content"].count("<tool_response>\nseen") == 2
    (system,) = tools_as_text([{"role": "system", "content": "Be brief."}], [tool])
    assert system["content"].startswith("Be brief.\n\n")
    assert calls_as_text(messages[:1]) == messages[:1]
