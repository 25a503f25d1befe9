"""`generate` with --schema, --regex and --grammar, on the real model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
QUESTION = "Which city is the capital of France?"


def test_an_answer_by_schema_regex_and_grammar(cli: Cli, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "It is " CITY "."\nCITY: "Paris" | "London"')
    found = json.loads(cli("generate", QUESTION, "--schema", str(schema), "-q").out)
    assert set(found) == {"city", "big"}
    assert cli("generate", QUESTION, "--regex", "(Paris|London)!", "-q").out in ("Paris!\n", "London!\n")
    whole = cli("generate", QUESTION, "--grammar", str(grammar), "--json").json()
    assert whole["text"] == "It is Paris."
    assert whole["finish_reason"] == "stop"


def test_bad_ones_are_one_sentence_and_exit_code_2(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for text, said in (
        ('{"properties": {"a": {"not": {}}}}', '--schema at #/properties/a: unsupported: "not"'),
        ("[]", "--schema must be an object"),
    ):
        file.write_text(text)
        done = cli("generate", QUESTION, "--schema", str(file), "-q")
        assert done.code == 2
        assert said in done.err
        assert len(done.err.splitlines()) == 1
    assert cli("generate", QUESTION, "--schema", str(tmp_path / "none.json"), "-q").code == 2
    assert cli("generate", QUESTION, "--regex", "a", "--grammar", str(file), "-q").code == 2
