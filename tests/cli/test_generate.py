"""The command line as a person meets it: a process, its streams and its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "verispec"]


def verispec(*arguments: str, stdin: str | None = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_generate_streams_text_and_one_line_of_figures(smollm2_path: Path) -> None:
    done = verispec("generate", "What is the capital of France?", "--max-tokens", "12", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    figures = done.stderr.strip().splitlines()[-1]
    for word in ("tokens", "tok/s", "per pass", "accepted", "seed 1,", "digest", "profile"):
        assert word in figures
    again = verispec(
        "generate", "--max-tokens", "12", "--drafter", "none", "-q", stdin="What is the capital of France?"
    )
    assert again.stdout == done.stdout
    assert again.stderr == ""


def test_raw_continues_the_text(smollm2_path: Path) -> None:
    done = verispec("generate", "--raw", "The capital of France is", "--max-tokens", "4", "-m", str(smollm2_path))
    assert done.stdout.startswith(" Paris")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "  "], "prompt is empty"),
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--top-p", "0"], "top_p"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--no-such-option"], "--no-such-option"),
        (["generate", "x", "--model", "no-such-model"], "known models"),
        (["generate", "x", "--model", __file__], "test_generate.py"),
        (["generate", "x", "--drafter", "magic"], "unknown drafter"),
        (["generate", "x", "--raw", "--system", "y"], "--system"),
        (["generate", "x", "--kv-slots", "1"], "num_slots"),
        (["generate", "word " * 9000], "fit into a length"),
        (["no-such-command"], "no-such-command"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence_and_exit_code_2(smollm2_path: Path, arguments: list[str], words: str) -> None:
    done = verispec(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == ""


def test_help_is_quick_and_complete() -> None:
    start = time.monotonic()
    done = verispec("--help")
    elapsed = time.monotonic() - start
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert elapsed < 2.0  # 0.2 s on an idle machine; the bound only catches an import of the engine
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, verispec.cli.main; print('numpy' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert loaded.stdout.strip() == "False"
    assert "--temperature" in verispec("generate", "--help").stdout
    assert verispec("--version").stdout.startswith("verispec 0.")


def test_ctrl_c_ends_at_once_without_a_traceback(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "Count from 1 to 500.", "--max-tokens", "400", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in stderr


def test_a_closed_pipe_is_no_error(smollm2_path: Path) -> None:
    command = f"{sys.executable} -m verispec generate -q 'Count from 1 to 50.' --max-tokens 30 | head -c 3"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert len(done.stdout) == 3
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_models_pull_prints_the_path(smollm2_path: Path) -> None:
    assert Path(verispec("models", "pull").stdout.strip()) == smollm2_path
