"""`score`, `audit`, `--version`, help and shell completion."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Cli, verispec
from tests.support.tiny_llm import loaded, write_model
from verispec.llm import LLM

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
        (["-", "--window", "1"], b"a b", "'--window'"),
        (["-", "--window", "99999"], b"a b", "--window is 99999, but at most 8192 tokens fit"),
        ([], b"", "Missing argument"),
    ],
)
def test_what_score_refuses(cli: Cli, arguments: list[str], stdin: bytes, words: str) -> None:
    done = cli("score", *arguments, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_audit_shows_purity_family_cost_and_profile(
    bare_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a full audit, whatever the load that went before did without."""
    path, cache = write_model(tmp_path / "tiny.gguf"), tmp_path / "cache"
    with loaded(path, cache) as llm:
        profile, family = llm.profile, llm.calibration.family
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    text = bare_cli("audit", "--model", str(path)).out
    for part in (
        "attention  pure: {", "Known answers: all right", "Canonical family: ", "T(M, context)", f"hash  {profile}",
    ):  # fmt: skip
        assert part in text
    found = bare_cli("audit", "--json", "--model", str(path)).json()
    assert (found["profile"], found["family"], found["wrong_answers"]) == (profile, list(family), [])
    assert {"rows", "seconds", "seconds_per_context_token"} == set(found["cost"][0])


def test_version_names_backend_and_profile(bare_cli: Cli, smollm2: LLM) -> None:
    version, backend, profile = bare_cli("--version").out.splitlines()
    assert re.fullmatch(r"verispec \d+\.\d+\.\d+", version)
    assert backend.startswith("backend: native with ")
    assert profile == f"profile: {smollm2.profile} (smollm2-135m)"


def test_help_is_quick_because_it_loads_nothing() -> None:
    start = time.monotonic()
    done = verispec("--help")
    assert time.monotonic() - start < 2.0  # 0.2 s on an idle machine; the bound only catches an import of the engine
    assert done.returncode == 0
    for command in ("generate", "chat", "score", "audit", "models", "--version", "--install-completion"):
        assert command in done.stdout
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, verispec.cli.app; print('numpy' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert loaded.stdout.strip() == "False"


@pytest.mark.parametrize("command", ["generate", "chat", "score", "audit", "models", "replay", "tune"])
def test_every_option_has_a_text(bare_cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = bare_cli(command, "--help")
    assert done.code == 0
    for line in re.findall(r"│ +(--\S+.*?)│", done.out):
        assert re.search(r"(<\w.*?>|FILE(\.jsonl)?|SHAPE)( \[.*?\])? +\w", line), line


def test_nothing_asked_is_answered_with_help(bare_cli: Cli) -> None:
    done = bare_cli()
    assert (done.code, done.err) == (2, "")
    assert "Usage" in done.out


def test_shells_complete_commands_options_and_values() -> None:
    def complete(line: str) -> list[str]:
        environment = {
            **os.environ,
            "_VERISPEC_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        return subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False).stdout.split()

    assert complete("verispec gen") == ["generate"]
    assert complete("verispec generate --top-") == ["--top-k", "--top-p"]
    assert complete("verispec generate --drafter n") == ["none", "ngram"]
