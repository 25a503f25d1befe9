"""Limits on what is compiled are counts, and they hold: in time, in memory, and on the stack."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.hostile_shapes import (
    DEEP,
    GRAMMARS,
    HEAVY,
    REFERENCES,
    SCHEMAS,
    chained_rules,
    leading_on,
    met_terms,
    patterns,
    shared,
)
from tests.support.shapes import VOCAB_SIZE, VOCABULARY, compiled
from verispec.constraints import Compiler
from verispec.constraints.limits import MAX_LEVELS, MAX_MULTIPLE, MAX_RULES
from verispec.constraints.positions import CompiledGrammar
from verispec.errors import ConstraintError
from verispec.server.tool_formats import HERMES, LLAMA3, calls_grammar
from verispec.types import ConstraintText, SamplingParams

# Compiles on a thread what comes on stdin, one after the other, within a memory and a time; {change} comes before.
CHILD = """
import json, resource, sys, threading
from tests.support.shapes import COMPILER, compiled
from verispec.constraints import compiler, limits, stack
from verispec.errors import ConstraintError
from verispec.types import SamplingParams

COMPILER._tables()
resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
threading.stack_size(256 << 10)  # as small as any platform's
{change}

def work():
    for line in sys.stdin:
        try:
            compiled(SamplingParams(**json.loads(line))).start(())
            print("fine", flush=True)
        except ConstraintError as error:
            print(str(error).splitlines()[0][:200], flush=True)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


SMALL_STACK, USUAL_STACK = (f"stack._NUM_BYTES = {mib} << 20" for mib in (1, 8))


def in_a_child(*constraints: dict[str, Any], change: str = "", seconds: int = 60) -> tuple[int, list[str]]:
    """How a process ends that compiles them, and what it said of each."""
    made = CHILD.format(change=change, seconds=seconds)
    lines = "".join(json.dumps(each) + "\n" for each in constraints)
    done = subprocess.run([sys.executable, "-c", made], input=lines, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def refused(**constraint: Any) -> ConstraintError:
    with pytest.raises(ConstraintError) as caught:
        compiled(SamplingParams(**constraint))
    return caught.value


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_would_take_minutes_are_refused_at_once(name: str) -> None:
    start = time.thread_time()
    found = refused(schema=SCHEMAS[name])
    assert "pattern" in found.reason or "multipleOf" in found.reason
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("name", REFERENCES)
def test_references_that_lead_where_nothing_is_counted_are_refused(name: str) -> None:
    assert "unsupported: " in refused(schema=REFERENCES[name]).reason


def test_references_that_are_followed() -> None:
    leaf = {"$defs": {"a b~/": {"const": 7}}}
    for schema in (
        {**leaf, "$ref": "#/%24defs/a%20b~0~1"},
        {**leaf, "$id": "http://a/b", "$ref": "#/$defs/a%20b~0~1"},
        {**leaf, "properties": {"id": {"$id": "http://a/b", "type": "integer"}, "$ref": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"$id": "http://a/b", "const": {"$ref": "http://c/d"}}}},
    ):
        assert compiled(SamplingParams(schema=schema))


@pytest.mark.parametrize("name", DEEP)
def test_schemas_that_go_too_deep_by_references_are_refused(name: str) -> None:
    assert "levels" in refused(schema=DEEP[name]).reason


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_that_would_take_the_process_are_refused_at_once(name: str) -> None:
    start = time.thread_time()
    assert refused(grammar=GRAMMARS[name]).field == "grammar"
    assert time.thread_time() - start < 1


@pytest.mark.slow
def test_what_the_limits_allow_is_compiled_or_refused_and_no_more() -> None:
    """In a process of its own, with 2 GiB and a minute for all."""
    code, said = in_a_child(*HEAVY.values())
    assert code == 0, said
    assert len(said) == len(HEAVY)
    assert said.count("fine") >= 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        (f"compiler.check_grammar = lambda text: []; {USUAL_STACK}", {"grammar": GRAMMARS["brackets in rules"]}),
        ("compiler.check_schema = lambda schema: None", {"schema": {"allOf": patterns(26)}}),
        ("compiler.check_schema = lambda schema: None", {"schema": SCHEMAS["a large multiple"]}),
        ("limits._check_place = lambda part, path: None", {"schema": REFERENCES["by name"]}),
        (f"limits._num_levels = lambda schema: 0; {USUAL_STACK}", {"schema": DEEP["references"]}),
        (SMALL_STACK, HEAVY["rules"]),
        (USUAL_STACK, HEAVY["levels by references"]),
    ],
)
def test_control_without_the_guards_the_process_is_lost(change: str, constraint: dict[str, Any]) -> None:
    code, said = in_a_child(constraint, change=change, seconds=4)
    assert code < 0
    assert not said
    assert in_a_child(constraint)[0] == 0


def test_limits_are_where_they_are_said_to_be() -> None:
    assert compiled(SamplingParams(grammar=chained_rules(MAX_RULES - 2)))
    assert compiled(SamplingParams(schema=leading_on(340, 9)))
    assert str(MAX_LEVELS) in refused(schema=leading_on(400, 9)).reason
    assert str(MAX_RULES) in refused(grammar=chained_rules(MAX_RULES - 1)).reason
    assert compiled(SamplingParams(schema={"type": "integer", "multipleOf": MAX_MULTIPLE}))
    beyond = refused(schema={"properties": {"n": {"type": "integer", "multipleOf": MAX_MULTIPLE + 1}}})
    assert (beyond.path, str(MAX_MULTIPLE) in beyond.reason) == ("/properties/n", True)
    for each in ({"type": "number", "multipleOf": 0.01}, {"type": "number", "multipleOf": 0.125}):
        assert compiled(SamplingParams(schema=each))
    assert "levels" in refused(grammar=GRAMMARS["a deep schema"]).reason


def test_what_lies_apart_is_not_multiplied() -> None:
    """Patterns of different properties, of different options, and texts that only look like rules."""
    apart = {f"p{i}": each for i, each in enumerate(patterns(40))}
    assert compiled(SamplingParams(schema={"type": "object", "properties": apart}))
    assert compiled(SamplingParams(schema={"anyOf": patterns(40)}))
    assert compiled(SamplingParams(schema={"const": {"multipleOf": 10**9, "allOf": patterns(40)}}))
    assert compiled(SamplingParams(schema=shared([{"minLength": i} for i in range(40)])))
    quoted = " ".join(json.dumps("a: (b & c | d " * 20) for _ in range(40))
    assert compiled(SamplingParams(grammar=f"start: {quoted} // {':' * 600}\n"))
    assert compiled(SamplingParams(grammar=met_terms(4).replace("&", "|")))


@pytest.mark.parametrize("fmt", [HERMES, LLAMA3])
def test_the_grammars_of_many_tools_are_within_the_limits(fmt: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a|b)*$"}}, "required": ["a"]}
    made = calls_grammar(
        fmt, {f"tool_{i}": schema for i in range(128)}, control={}, is_single=False, must_call=False
    )  # fmt: skip
    assert compiled(SamplingParams(grammar=made))


def test_a_large_schema_is_walked_in_little_time() -> None:
    """Definitions that each wait for the next one, and each with many names that do not matter."""
    filler = {f"f{i}": {"type": "integer"} for i in range(4)}
    chain: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {**filler, "n": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["n", *filler],
        }
        for i in range(250)
    }
    schema = {"$defs": {**chain, "d250": {"type": "null"}}, "$ref": "#/$defs/d0"}
    endless = {"$defs": {**chain, "d250": {"$ref": "#/$defs/d0"}}, "$ref": "#/$defs/d0"}
    assert 40_000 < len(json.dumps(schema)) < 65_000
    start = time.thread_time()
    assert compiled(SamplingParams(schema=schema))
    assert "without end" in refused(schema=endless).reason
    assert time.thread_time() - start < 3


class Held(Compiler):
    """Compiles what begins with "slow" only when it is let."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, VOCAB_SIZE)
        self.let = threading.Event()
        self.begun: list[str] = []

    def _compiled(self, wanted: ConstraintText) -> CompiledGrammar:
        self.begun.append(wanted.text)
        if wanted.text.startswith("slow"):
            assert self.let.wait(30)
        return super()._compiled(wanted)


def regex(text: str) -> ConstraintText:
    return ConstraintText("regex", text)


def test_what_is_kept_waits_for_no_compilation_and_each_is_compiled_once() -> None:
    held = Held()
    kept = held.compile(regex("kept"))
    with ThreadPoolExecutor(12) as pool:
        slow = [pool.submit(held.compile, regex(f"slow{i % 3}")) for i in range(9)]
        while len(held.begun) < 3:
            time.sleep(0.001)
        for _ in range(3):
            assert pool.submit(held.compile, regex("kept")).result(timeout=10) is kept
        time.sleep(0.05)
        assert len(held.begun) == 3  # the kept one, and two of three at a time
        held.let.set()
        found = [each.result(timeout=30) for each in slow]
    assert sorted(held.begun) == ["kept", "slow0", "slow1", "slow2"]
    assert [found.index(each) for each in found] == [0, 1, 2] * 3


def num_waiting(result: Future[CompiledGrammar]) -> int:
    """Threads that wait for it."""
    return len(result._condition._waiters)  # type: ignore[attr-defined]


def test_what_is_wrong_is_told_to_all_who_wait_and_not_kept() -> None:
    held = Held()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(held.compile, regex("slow(")) for _ in range(4)]
        while not held.begun or num_waiting(held._running[regex("slow(")]) < 3:
            time.sleep(0.001)
        held.let.set()
        for each in waiting:
            with pytest.raises(ConstraintError):
                each.result(timeout=30)
    assert held.begun == ["slow("]
    with pytest.raises(ConstraintError):
        held.compile(regex("slow("))
    assert held.begun == ["slow("] * 2
