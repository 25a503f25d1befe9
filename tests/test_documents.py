"""What the documents show must run: the README's Python, the examples, and every option that is mentioned."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(code_or_path: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *code_or_path], capture_output=True, text=True, timeout=120, check=False)


def test_the_readme_python_runs(smollm2_path: Path) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(smollm2_path: Path, path: Path) -> None:
    done = run([str(path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "DIFFERENT" not in done.stdout


@cache
def help_text(command: tuple[str, ...]) -> str:
    return run(["-m", "verispec", *command, "--help"]).stdout


def shown_commands() -> list[tuple[str, str]]:
    """Every `verispec ...` line in a code block of a document."""
    lines = []
    for path in DOCUMENTS:
        for block in blocks(path, ""):
            for line in block.splitlines():
                part = line.removeprefix("$ ").rpartition("| ")[2].strip()
                if part.startswith("verispec "):
                    lines.append((path.name, part))
    return lines


@pytest.mark.parametrize(("document", "line"), shown_commands())
def test_shown_commands_exist(document: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])[1:]
    text = help_text((words[0],))
    for word in words[1:]:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), f"{document}: {word} is not an option"


def test_the_check_of_commands_can_fail() -> None:
    with pytest.raises(AssertionError, match="--no-such-thing"):
        test_shown_commands_exist("x", "verispec generate --no-such-thing")
    assert len(shown_commands()) > 5


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in (*DOCUMENTS, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"^make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
