"""`score`, `audit`, `--version`, help and shell completion."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, verispec
from tests.support.tiny_llm import loaded, write_model
from verispec.cli.app import COMMANDS
from verispec.llm import LLM
from verispec.types import SamplingParams

TEXT = b"The sun rises in the east and sets in the west."


def test_score_prints_every_token_and_the_perplexity(cli: Cli, smollm2: LLM, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(TEXT)
    done = cli("score", str(file))
    rows = [line.split(maxsplit=2) for line in done.out.splitlines()]
    assert "".join(eval(text) for _, _, text in rows) == TEXT.decode().removeprefix("The")
    perplexity = math.exp(-sum(float(value) for value, _, _ in rows) / len(rows))
    assert float(re.search(r"perplexity ([\d.]+)", done.err)[1]) == pytest.approx(perplexity, rel=1e-3)  # type: ignore[index]
    found = cli("score", "-", "--json", stdin=TEXT).json()
    assert found["perplexity"] == smollm2.score(TEXT.decode()).perplexity
    assert len(found["logprobs"]) == len(found["token_ids"]) - 1 == len(rows)


def test_windows_give_every_token_a_value(cli: Cli) -> None:
    whole = cli("score", "-", "--json", stdin=TEXT).json()
    cut = cli("score", "-", "--json", "--window", "4", stdin=TEXT).json()
    assert len(cut["logprobs"]) == len(whole["logprobs"])
    assert cut["logprobs"][:3] == whole["logprobs"][:3]
    assert cut["logprobs"][3:] != whole["logprobs"][3:]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["-"], b"", "stdin is empty"),
        (["-"], b"a", "stdin has 1 token"),
        (["-"], b"a\xff", "stdin: byte 1 (0xff) is not UTF-8"),
        (["/"], b"", "/: Is a directory"),
        (["no-such-file"], b"", "no-such-file: No such file"),
        (["-", "--window", "1"], b"a b", "--window must be from 2"),
        (["-", "--window", "99999"], b"a b", "--window is 99999, but at most 8192 tokens fit"),
        ([], b"", "missing argument: FILE"),
    ],
)
def test_what_score_refuses(cli: Cli, arguments: list[str], stdin: bytes, words: str) -> None:
    done = cli("score", *arguments, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


@pytest.mark.usefixtures("native_kernels")
def test_audit_shows_purity_family_cost_and_profile(
    bare_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a full audit, whatever the load that went before did without."""
    path, cache = write_model(tmp_path / "tiny.gguf"), tmp_path / "cache"
    with loaded(path, cache) as llm:
        profile, family = llm.profile, llm.calibration.family
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    text = bare_cli("audit", "--model", str(path)).out
    assert text.count("pure: {") == 1, "one row, because the same was found of every kernel"
    for part in (
        "Device:\n", "attention", "  pure: {", "Known answers: all right", "Canonical family: ", "T(M, context)",
        f"hash  {profile}",
    ):  # fmt: skip
        assert part in text
    found = bare_cli("audit", "--json", "--model", str(path)).json()
    assert (found["profile"], found["family"], found["wrong_answers"]) == (profile, list(family), [])
    assert {"rows", "seconds", "seconds_per_context_token", "is_timed"} == set(found["cost"][0])
    assert [cost["rows"] for cost in found["cost"] if not cost["is_timed"]] == [256]
    assert text.count("not timed: as predicted") == 1
    assert {f"  {value}\n" in text for value in found["device"].values()} == {True}
    assert {str(kernel["forms"]) for kernel in found["kernels"]} == {"{}"}
    assert "Implementations" not in text, "there is one of each"


def test_version_names_backend_and_profile(bare_cli: Cli, smollm2: LLM) -> None:
    version, backend, profile = bare_cli("--version").out.splitlines()
    assert re.fullmatch(r"verispec \d+\.\d+\.\d+", version)
    assert backend.startswith("backend: native with ")
    assert profile == f"profile: {smollm2.profile} (smollm2-135m)"


def test_help_is_quick_because_it_loads_nothing() -> None:
    done = verispec("--help", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})  # names what is imported on stderr
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "verispec.cli.app" in imported
    assert not imported & {"numpy", "verispec.llm", "verispec.engine"}
    assert done.returncode == 0
    for command in ("generate", "chat", "score", "audit", "models", "run", "--version", "completion"):
        assert command in done.stdout


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_fits_on_a_terminal_and_says_something_of_every_option(
    bare_cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = bare_cli(command, "--help")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert len(lines) < 110
    assert max(map(len, lines)) < 80
    assert "<" not in done.out
    assert done.out == bare_cli("help", command).out == bare_cli(command, "-m", "x", "-h", "--json").out
    for name in COMMANDS[command].parser().known_options():
        assert re.search(rf"^  (\S+, )?{name}(, --\S+)?( [A-Z][A-Z,.%]*)?(  +|\n {{24}})\w", done.out, re.MULTILINE), (
            name
        )


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_wrong_option_suggests_the_nearest_one(bare_cli: Cli, command: str) -> None:
    for name in COMMANDS[command].parser().known_options():
        done = bare_cli(command, *["x"] * (command != "tune"), f"{name}x")
        assert (done.code, done.out) == (2, "")
        assert done.err == f"verispec: unknown option {name}x; did you mean {name}?\n"
    assert bare_cli(command, *["x"] * (command != "tune"), "--jxyz").err == "verispec: unknown option --jxyz\n"
    assert bare_cli(command, "--zzzzzzz").err == "verispec: unknown option --zzzzzzz\n"
    assert bare_cli(command[:-1]).err == f"verispec: unknown command {command[:-1]}; did you mean {command}?\n"


def test_defaults_are_those_of_the_library() -> None:
    from verispec.cli.options import Drafting, Loading, Sampling
    from verispec.model import DEFAULT_MODEL

    assert Sampling().params() == SamplingParams()
    assert Loading().model == DEFAULT_MODEL
    taken = inspect.signature(LLM).parameters
    for name, value in {**asdict(Loading()), **asdict(Drafting())}.items():
        assert taken[name].default == value, name


def test_nothing_asked_is_answered_with_help(bare_cli: Cli) -> None:
    done = bare_cli()
    assert (done.code, done.err) == (2, "")
    assert "Usage" in done.out
    assert bare_cli("--help").out == bare_cli("help").out == done.out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["gen"], ["generate"]),
        (["generate", "--top-"], ["--top-k", "--top-p"]),
        (["generate", "x", "--drafter", "n"], ["none"]),
        (["generate", "--accept", ""], ["match", "rejection", "recursive"]),
        (["run", "-m", "smol"], ["smollm2-135m"]),
        (["models", "p"], ["pull", "path"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["generate", "x"], []),
        (["no-such-command", ""], []),
    ],
)
def test_what_shells_complete(bare_cli: Cli, words: list[str], found: list[str]) -> None:
    assert bare_cli("completion", "words", "--", *words).out.split() == found


def test_bash_completes(tmp_path: Path) -> None:
    """The script that `completion bash` prints, run by a real shell."""
    (tmp_path / "verispec").write_text(f'#!/bin/sh\nexec {sys.executable} -m verispec "$@"\n')
    (tmp_path / "verispec").chmod(0o755)
    script = """
        eval "$(verispec completion bash)"
        COMP_WORDS=(verispec generate --drafter n); COMP_CWORD=3
        _verispec; echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("none\n", "")
