"""`verispec generate` as a person meets it: streams, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.support.tiny_llm import loaded, write_model
from verispec.backends import native_library
from verispec.batch.prompts import as_object
from verispec.cli.show import GREEN, PLAIN, STRUCK_RED, coloured, figures
from verispec.cli.terminal import safe
from verispec.llm import LLM
from verispec.types import FinishReason, SampleOutput, SamplingParams, SequenceStats, TokenEvent, TokenLogprobs

QUESTION = "What is the capital of France?"


def test_text_goes_to_stdout_and_one_line_of_figures_to_stderr(cli: Cli) -> None:
    done = cli("generate", QUESTION, "--max-tokens", "12", "--seed", "1")
    assert (done.code, done.out) == (0, "The capital of France is Paris.\n")
    (line,) = done.err.splitlines()
    assert re.fullmatch(
        r"\d+ prompt tokens [\d.]+/s, 8 new [\d.]+/s, (drafts \d+/\d+, )?([\d.]+ per pass, )?(\d+ cached, )?"
        r"digest [0-9a-f]{12}",
        line,
    )
    assert len(line) <= 80
    again = cli("generate", "-q", "--drafter", "none", "-", "--max-tokens", "12", stdin=QUESTION.encode() + b"\n")
    assert (again.out, again.err) == (done.out, "")


def test_raw_continues_the_text_and_a_dashed_prompt_follows_two_dashes(cli: Cli) -> None:
    assert cli("generate", "--raw", "The capital of France is", "--max-tokens", "2").out.startswith(" Paris")
    assert cli("generate", "--max-tokens", "1", "--", "--traceback").code == 0


def test_names_that_people_type(cli: Cli) -> None:
    short = ["--max-tokens", "3", "-q"]
    plain = cli("generate", QUESTION, *short).out
    assert plain
    assert cli("generate", "-p", QUESTION, "--temp", "0", "-t", "2", *short).out == plain
    assert cli("run", QUESTION, *short).out == plain
    assert cli("run", *short, stdin=QUESTION.encode()).out == plain
    assert cli("run", "-p", "--help me", *short).code == 0
    assert cli("run", "--help").out == cli("generate", "--help").out
    assert cli("generate", "-p", "- one -", *short).code == cli("generate", "-p", "--raw", *short).code == 0
    assert cli("generate", QUESTION, "--stop", "---", "--presence-penalty", "-1e-9", *short).out == plain
    assert cli("generate", f"--prompt={QUESTION}", "--deterministic", "--max-tokens=3", "-q").out == plain


def test_run_without_a_prompt_is_a_chat_at_a_terminal(terminal: Callable[..., Any]) -> None:
    session = terminal("run", "--temp", "0")
    session.wait_for("/help lists the commands")
    session.press("/exit\r")
    assert session.exit_code() == 0


def test_samples_come_one_after_the_other(cli: Cli) -> None:
    arguments = ["generate", "Name a colour.", "-n", "2", "--max-tokens", "4", "--temp", "1.5", "--seed", "3"]
    first, second = (sample["text"] for sample in cli(*arguments, "--json").json()["samples"])
    done = cli(*arguments)
    assert done.out == f"--- sample 1 of 2\n{first}\n--- sample 2 of 2\n{second}\n"
    assert first != second
    assert len(done.err.splitlines()) == 2


def test_what_greedy_decoding_makes_pointless_is_said(cli: Cli) -> None:
    done = cli("generate", "hi", "--top-p", "0.9", "--top-k", "5", "-n", "2", "--max-tokens", "2")
    assert done.code == 0
    assert done.err.splitlines()[:3] == [
        "note: --top-k has no effect at temperature 0",
        "note: --top-p has no effect at temperature 0",
        "note: -n has no effect at temperature 0: all samples are the same",
    ]
    assert "note" not in cli("generate", "hi", "--top-p", "0.9", "--temp", "1", "--max-tokens", "2").err


def test_figures_tell_prompt_and_generation_speed_apart_in_one_row() -> None:
    def shown(stats: SequenceStats, params: SamplingParams, *, prompt_len: int = 3000, num_new: int = 5) -> str:
        entries = TokenLogprobs((7,) * num_new, (-0.5,) * num_new)
        output = SampleOutput(0, prompt_len, entries, "", FinishReason.LENGTH, 123456789, stats)
        return figures(output, params, width=80)

    slow_prompt = SequenceStats(arrival_time=10.0, first_token_time=20.0, finish_time=20.1, passes=30)
    assert shown(slow_prompt, SamplingParams()).startswith("3000 prompt tokens 300/s, 5 new 40.0/s, ")
    busy = replace(slow_prompt, drafted=1234, accepted=1000, cached_tokens=16, replays=5)
    row = shown(busy, SamplingParams(temperature=1), prompt_len=8192, num_new=4096)
    assert ", seed 123456789, " in row
    assert len(row) <= 80
    assert shown(SequenceStats(), SamplingParams(), num_new=1).startswith("3000 prompt tokens, 1 new, ")


def test_output_that_tells_nothing_of_drafts_has_no_tokens_per_pass(tmp_path: Path) -> None:
    """With shared history passes are not counted, and so many tokens by none of them is no figure."""
    for shares in (True, False):
        with loaded(write_model(tmp_path / "tiny.gguf"), tmp_path, share_history=shares) as llm:
            (answer,) = llm.generate("abc", SamplingParams(max_tokens=6, ignore_eos=True))
        told = as_object(answer, drafter="none", stats=True)["stats"]["tokens_per_pass"]
        assert told == answer.samples[0].tokens_per_pass == (None if shares else 1.0)
        assert ("1.00 per pass" in figures(answer.samples[0], SamplingParams(), width=200)) is not shares


def test_stdin_loses_a_byte_order_mark_and_one_line_end_only(cli: Cli) -> None:
    def prompt_tokens(stdin: bytes) -> int:
        return int(cli("generate", "--raw", "--json", "--max-tokens", "1", stdin=stdin).json()["prompt_tokens"])

    assert prompt_tokens(b"\xef\xbb\xbfone two\r\n") == prompt_tokens(b"one two") == prompt_tokens(b"one two\n") == 2
    assert prompt_tokens(b"one two\n\n") == 3


MISTAKES: list[tuple[list[str], str]] = [
    (["generate", ""], "the prompt is empty"),
    (["generate"], "the prompt is empty"),
    (["generate", " \n"], "the prompt is empty"),
    (["generate", "a\udcffb"], "the prompt argument: byte 1 (0xff) is not UTF-8"),
    (["generate", "x", "--system", "\udcff"], "--system: byte 0 (0xff)"),
    (["generate", "x", "y"], "unexpected extra argument"),
    (["generate", "x", "--temperature", "nan"], "--temperature must be in [0, 100], not nan"),
    (["generate", "x", "--temperature", "inf"], "--temperature must"),
    (["generate", "x", "--temperature", "-1"], "--temperature must"),
    (["generate", "x", "--top-p", "2"], "--top-p must be in (0, 1], not 2.0"),
    (["generate", "x", "--top-k", "-1"], "--top-k must"),
    (["generate", "x", "--min-p", "2"], "--min-p must"),
    (["generate", "x", "--repetition-penalty", "0"], "--repetition-penalty must"),
    (["generate", "x", "--presence-penalty", "nan"], "--presence-penalty must"),
    (["generate", "x", "--frequency-penalty", "1e9"], "--frequency-penalty must"),
    (["generate", "x", "--max-tokens", "0"], "--max-tokens must be from 1"),
    (["generate", "x", "--max-tokens", "many"], "--max-tokens must be a whole number, not 'many'"),
    (["generate", "x", "--max-tokens"], "--max-tokens needs a value"),
    (["generate", "x", "--temp", "hot"], "--temperature must be a number, not 'hot'"),
    (["generate", "x", "-t", "two"], "--threads must be a whole number, not 'two'"),
    (["generate", "x", "-n", "two"], "-n must be a whole number, not 'two'"),
    (["generate", "x", "-p", "y"], "the prompt is there twice"),
    (["generate", "-p", ""], "the prompt is empty"),
    (["generate", "-p", "y", "--prompts", "z"], "leave the prompt out"),
    (["generate", "x", "--raw=yes"], "--raw takes no value"),
    (["generate", "x", "-qx"], "--quiet takes no value"),
    (["generate", "x", "--seed", "-1"], "--seed must"),
    (["generate", "x", "--seed", "9" * 30], "--seed must"),
    (["generate", "x", "--stop", ""], "--stop must be a string that is not empty"),
    (["generate", "x", "-n", "0"], "-n must"),
    (["generate", "x", "--no-such-option"], "--no-such-option"),
    (["generate", "x", "--model", "no-such-model"], "--model: 'no-such-model' is neither"),
    (["generate", "x", "--model", ""], "--model: ''"),
    (["generate", "x", "--model", __file__], "test_generate.py"),
    (["generate", "x", "--drafter", "magic"], "unknown --drafter 'magic'; known: none, suffix"),
    (["generate", "x", "--draft-len", "-1"], "--draft-len must"),
    (["generate", "x", "--accept", "magic"], "--accept must be match or rejection or recursive, not 'magic'"),
    (["generate", "x", "--backend", "magic"], "unknown --backend 'magic'"),
    (["generate", "x", "--threads", "0"], "--threads must"),
    (["generate", "x", "--kv-slots", "1"], "--kv-slots must be from 2 to 2147483647, not 1"),
    (["generate", "x", "--kv-slots", "9" * 30], "--kv-slots must be from 2"),
    (["generate", "x", "--max-len", "9999"], "--max-len must be from 2 to --kv-slots (8192), not 9999"),
    (["generate", "x", "--raw", "--system", "y"], "--system needs"),
    (["generate", "x", "--color", "all"], "--color must be drafts, not 'all'"),
    (["generate", "x", "--prompts", "y"], "leave the prompt out"),
    (["generate", "-", "--prompts", "-"], "leave the prompt out"),
    (["no-such-command"], "unknown command no-such-command"),
    (["--no-such-option"], "unknown option --no-such-option"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value).encode("ascii", "replace")
                         .decode()[:40] if isinstance(value, list) else "")  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_it_and_exit_code_2(
    bare_cli: Cli, arguments: list[str], words: str
) -> None:
    done = bare_cli(*arguments)
    assert (done.code, done.out) == (2, "")
    *notes, sentence = done.err.splitlines()  # without its kernels the backend notes that it is slow
    assert bool(notes) <= bool(native_library.why_missing())
    assert sentence.startswith("verispec: ")
    assert words in sentence


def test_mistakes_that_need_the_model(cli: Cli) -> None:
    done = cli("generate", "word " * 9000)
    assert (done.code, done.out) == (2, "")
    assert re.search(r"the prompt has \d+ tokens; at most 8191 fit", done.err)
    done = cli("generate", stdin=b"ab\xffcd")
    assert (done.code, done.err) == (2, "verispec: the prompt on stdin: byte 2 (0xff) is not UTF-8\n")


def test_traceback_shows_where_and_keeps_the_exit_code(bare_cli: Cli) -> None:
    done = bare_cli("generate", "x", "--top-p", "2", "--traceback")
    assert done.code == 2
    assert "Traceback" in done.err


def test_a_defect_is_no_bad_input(bare_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: Any) -> LLM:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("verispec.llm.LLM", broken)
    done = bare_cli("generate", "x")
    assert done.code == 1
    assert done.err == "verispec: unexpected ZeroDivisionError: oh (a defect; --traceback shows where)\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_loading_may_be_interrupted_or_fail(
    bare_cli: Cli, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def loading(**options: Any) -> LLM:
        raise error

    monkeypatch.setattr("verispec.llm.LLM", loading)
    done = bare_cli("generate", "x")
    assert (done.code, done.err) in ((130, ""), (2, f"verispec: {done.err[10:]}"))
    assert ("--kv-slots" in done.err) == (error is MemoryError)


def test_options_reach_the_model(bare_cli: Cli, smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}
    monkeypatch.setattr("verispec.llm.LLM", lambda **options: got.update(options) or smollm2)
    assert bare_cli(
        "generate", "x", "--max-tokens", "1", "-m", "M", "--threads", "3", "--kv-slots", "99", "--max-len", "50",
        "--draft-len", "5", "--drafter", "auto", "--backend", "numpy", "--weights", "q8", "--draft-model", "D",
        "--force",
    ).code == 0  # fmt: skip
    del got["progress"]
    assert got == {
        "model": "M", "threads": 3, "kv_slots": 99, "max_len": 50, "draft_len": 5, "drafter": "auto",
        "backend": "numpy", "weights": "q8", "draft_model": "D", "tree": None, "accept": "match", "force": True,
        "device": 0, "gpu_memory": 0.9, "fast_weights": "same",
    }  # fmt: skip


def test_drafts_in_colour() -> None:
    event = TokenEvent(
        0, 0, TokenLogprobs((1,) * 3, (0.0,) * 3), ("go", "od", " day\x1b[2J"), num_accepted=2, rejected_ids=(7, 8)
    )
    shown = coloured(event, lambda token_id: {7: "\x1b]0;x\x07", 8: "no\n"}[token_id])
    assert shown == f"{GREEN}good{PLAIN}{STRUCK_RED}\\x1b]0;x\\x07no\\n{PLAIN} day\\x1b[2J"


def test_the_terminal_gets_no_commands_from_the_model() -> None:
    assert safe("a\tb\nc\x1b[31m\r\x07\x9b1mé") == "a\tb\nc\\x1b[31m\\x0d\\x07\\x9b1mé"


def test_colour_on_a_terminal_and_never_elsewhere(cli: Cli, terminal: Callable[..., Any]) -> None:
    # decode drafts whatever passes cost; suffix would not on a machine too busy to time them
    arguments = ["generate", "Say: a b a b", "--color", "drafts", "--max-tokens", "12", "--drafter", "decode"]
    on_terminal = terminal(*arguments).rest()
    assert GREEN in on_terminal
    assert " prompt tokens " in on_terminal
    elsewhere = cli(*arguments)
    assert elsewhere.code == 0
    assert "\x1b" not in elsewhere.out + elsewhere.err


def test_ctrl_c_ends_at_once_without_a_traceback_even_twice(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "Count from 1 to 500.", "--max-tokens", "400", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in stderr


def test_streams_that_fail(smollm2_path: Path) -> None:
    """One shell for all: a reader that leaves is no error, a full disk and a closed stdout are."""
    command = f"{sys.executable} -m verispec generate -q hi --max-tokens 5"
    script = f"""
        {command} | head -c 3; echo " ${{PIPESTATUS[0]}}"
        {command} > /dev/full; echo $?
        {command} >&-; echo $?
        {command.replace(" hi ", " ")} <&-; echo $?
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["Hel", "0", "2", "2", "2"]
    assert done.stderr.splitlines() == [
        "verispec: stdout: No space left on device",
        "verispec: stdout is closed; there is nowhere to write to",
        "verispec: the prompt on stdin: stdin is closed",
    ]


def test_an_encoding_that_cannot_show_everything_is_no_error(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    sys.stdout.reconfigure(encoding="ascii")  # type: ignore[union-attr]
    done = cli("generate", "--raw", "Un café, deux café", "--json", "--max-tokens", "4")
    assert "\\u00e9" in cli("generate", "--raw", "un café, un caf", "--json", "--max-tokens", "1").out
    assert done.json()["text"]
