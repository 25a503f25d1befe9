"""`verispec verify`: tables or one object, and an exit code that means something."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.support import sabotage as spoils
from tests.support.sabotage import sabotage
from tests.support.tiny_llm import CONFIG, fix_cost, loaded, write_model
from verispec.backends.protocol import PassKind
from verispec.cli.demonstration import Demonstration
from verispec.llm import LLM
from verispec.spec.passes import Flight, Passes
from verispec.spec.speculation import GRAMMAR
from verispec.spec.turn import Step

pytestmark = pytest.mark.slow

ASK = ["verify", "one two one two one", "--max-tokens", "12", "--crowd", "4"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    with loaded(write_model(folder / "model.gguf"), folder, kv_slots=2000, threads=1) as llm:
        fix_cost(llm)
        yield llm


@pytest.fixture
def tiny_cli(bare_cli: Cli, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command here on the tiny model."""
    monkeypatch.setattr("verispec.llm.LLM", lambda **options: llm)
    return bare_cli


def test_two_tables(tiny_cli: Cli, llm: LLM) -> None:
    done = tiny_cli(*ASK)
    assert done.code == 0
    assert done.err == f"profile {llm.profile}\n"
    title, cases, outcome, fast_title, fast, fast_outcome, *_ = done.out.split("\n\n")
    request, *promise = title.splitlines()
    assert re.fullmatch(r"One request: \d+ prompt tokens, at most 12 new ones, temperature 1, seed 0\.", request)
    assert promise[0].startswith("Promised: every bit of its tokens")
    head, *rows = cases.splitlines()
    assert head.split(maxsplit=4) == ["case", "drafter", "digest", "equal", "what was different"]
    assert len({re.search(r" ([0-9a-f]{16})  yes ", row)[1] for row in rows}) == 1  # type: ignore[index]
    assert all(any(f" {drafter} " in row for row in rows) for drafter in llm.drafter_names if drafter != GRAMMAR)
    for start, end in [
        ("alone           none ", "nothing: this is the reference"),
        ("warm cache ", " prompt tokens from the cache"),
        ("last of crowd ", " 4 beside it"),
        ("preempted ", " computed again"),
        ("small chunks ", " passes"),
    ]:
        assert any(row.startswith(start) and row.endswith(end) for row in rows), start
    assert outcome.startswith(f"All {len(rows)} digests are equal, each over 12 tokens and their log-probabilities.")
    assert "deterministic=False" in fast_title
    assert [line.split()[0] for line in fast.splitlines()] == ["beside", "alone", "1", "2", "4", "5"]
    assert fast_outcome.startswith("No difference, by construction: ")
    assert max(map(len, done.out.splitlines())) <= 100


def test_one_object(tiny_cli: Cli, llm: LLM) -> None:
    done = tiny_cli(*ASK, "--json", "--raw", "--seed", "5", "--top-p", "0.9")
    found = done.json()
    assert (done.code, done.err, found["equal"]) == (0, "", True)
    assert set(found) == {
        "equal", "digest", "text", "token_ids", "prompt_tokens", "seed", "profile", "cases", "fast",
        "library",
    }  # fmt: skip
    assert (found["seed"], found["profile"]) == (5, llm.profile)
    assert found["prompt_tokens"] == len(llm.tokenizer.encode(ASK[1]))
    assert {case["digest"] for case in found["cases"]} == {found["digest"]}
    assert {case["drafter"] for case in found["cases"]} == {*llm.drafter_names} - {GRAMMAR}
    assert all(set(case) == {
        "case", "drafter", "digest", "equal", "took_place", "beside", "steps_to_first_token", "cached_tokens",
        "preemptions", "drafted", "accepted",
    } for case in found["cases"])  # fmt: skip
    assert [case["preemptions"] for case in found["cases"] if case["case"] == "preempted"] == [1]
    assert [case["beside"] for case in found["fast"]] == [0, 1, 2, 4, 5]
    assert [(row["num_others"], row["num_values"]) for row in found["library"]] == [
        (others, CONFIG.hidden_size) for others in (1, 2, 4, 5)
    ]
    assert set(found["fast"][0]) == {
        "beside", "digest", "compared", "different", "first_different", "first_other_token", "largest_difference",
    }  # fmt: skip


def test_the_digest_is_that_of_generate(tiny_cli: Cli) -> None:
    question = [
        "a question",
        "--json",
        "--max-tokens",
        "9",
        "--temperature",
        "1",
        "--seed",
        "3",
        "--system",
        "be brief",
    ]
    assert tiny_cli("verify", *question).json()["digest"] == tiny_cli("generate", *question).json()["digest"]


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_control_a_broken_promise_is_exit_code_1_and_names_the_case(
    tiny_cli: Cli, monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    sabotage(monkeypatch, PassKind.CANONICAL, spoils.by_index)
    done = tiny_cli(*ASK, *extra)
    assert done.code == 1
    sentence = done.err.splitlines()[-1]
    assert sentence.startswith("verispec: the promise is broken: ")
    assert '"amid a crowd" (drafter none)' in sentence
    if extra:
        assert done.json()["equal"] is False
    else:
        assert re.search(r"^amid a crowd +none +[0-9a-f]{16}  NO ", done.out, re.MULTILINE)
        assert re.search(r"^\d+ of \d+ digests DIFFER", done.out, re.MULTILINE)


def test_fast_passes_that_differ_are_counted_and_no_failure(tiny_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, PassKind.FAST, spoils.shifted_by_neighbours)
    done = tiny_cli(*ASK)
    assert done.code == 0
    assert "by construction" not in done.out
    assert len(re.findall(r" equal +11 of 12 differ, first at token 2, by at most \d$", done.out, re.MULTILINE)) == 4
    assert "Here the crowd changes bits: " in done.out


def test_fast_tokens_that_differ(tiny_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, PassKind.FAST, spoils.other_tokens)
    done = tiny_cli(*ASK)
    assert done.code == 0
    assert len(re.findall(r" differ from token 2 +0 of 1 differ$", done.out, re.MULTILINE)) == 4
    assert "Here the crowd changes bits, and then tokens: " in done.out


@pytest.mark.usefixtures("native_kernels")
def test_native_fast_passes_agree_and_it_says_why(tiny_cli: Cli) -> None:
    done = tiny_cli(*ASK)
    assert done.code == 0
    reason, table, hint = done.out.split("\n\n")[-3:]
    assert "the native kernels compute each row of a pass by itself" in reason
    assert f"({CONFIG.mlp_size} x {CONFIG.hidden_size})" in reason
    head, *rows = table.splitlines()
    assert head.split() == ["beside", "it", "values", "that", "differ", "by", "at", "most"]
    assert [row.split()[0] for row in rows] == ["1", "2", "4", "5"]
    assert hint == "--backend numpy shows what that does to this request.\n"


def test_fast_passes_of_a_library_that_agree_are_no_failure_either(
    tiny_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, PassKind.FAST, spoils.indifferent)
    monkeypatch.setattr(Demonstration, "has_only_pure_passes", False)
    done = tiny_cli(*ASK)
    assert done.code == 0
    assert "No difference seen" in done.out
    assert "by construction" not in done.out


def test_what_could_not_be_brought_about_is_said(tiny_cli: Cli) -> None:
    done = tiny_cli("verify", "--raw", "a", "--max-tokens", "1")
    assert done.code == 0
    assert "could not be brought about: it was not preempted" in done.out
    assert "of the cases did not take place as meant: see their rows.)" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing argument"),
        ([""], "the prompt is empty"),
        ([" \n"], "the prompt is empty"),
        (["a\udcff"], "the prompt argument: byte 1 (0xff) is not UTF-8"),
        (["x", "--system", "\udcff"], "--system: byte 0 (0xff)"),
        (["x", "--raw", "--system", "y"], "--system needs"),
        (["x" * 300, "--raw"], "the prompt has 300 tokens; at most 255 fit"),
        (["x", "--max-tokens", "0"], "--max-tokens must be from 1"),
        (["x", "--temperature", "nan"], "--temperature must"),
        (["x", "--seed", "-1"], "--seed must"),
        (["x", "--crowd", "0"], "--crowd must be from 1 to 64"),
        (["x", "--crowd", "99999"], "--crowd must be from 1 to 64"),
        (["x", "--drafter", "suffix"], "--drafter"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tiny_cli: Cli, arguments: list[str], words: str) -> None:
    done = tiny_cli("verify", *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.startswith("verispec: ")


def test_a_model_that_is_not_there(bare_cli: Cli) -> None:
    done = bare_cli("verify", "x", "-m", "no-such-model")
    assert (done.code, done.out) == (2, "")
    assert "--model: 'no-such-model' is neither" in done.err


def test_an_interrupt_leaves_the_model_sound(tiny_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_cli(*ASK, "--json").json()["digest"]
    num_steps, submit = 0, Passes.submit

    def interrupted(self: Passes, step: Step) -> Flight:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 30:
            raise KeyboardInterrupt
        return submit(self, step)

    monkeypatch.setattr(Passes, "submit", interrupted)
    done = tiny_cli(*ASK)
    assert (done.code, done.err) == (130, "")
    assert num_steps == 30
    assert done.out.count(" yes ") == 2  # the cases that were over
    assert tiny_cli(*ASK, "--json").json()["digest"] == expected


def test_a_process_that_is_interrupted(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "verify", "hello", "-m", str(write_model(tmp_path / "model.gguf")), "--max-tokens", "150",
         "--crowd", "31", "--threads", "1", "--kv-slots", "6000"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
