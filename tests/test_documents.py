"""What the documents show must run: the README's Python, the examples, and every option that is mentioned."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from verispec.backends.cost import probe_pass
from verispec.backends.protocol import Burst
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.llm import LLM
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

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


def plain(said: str) -> list[str]:
    """The lines, without progress, and without what depends on the machine's speed."""
    lines = [line for line in said.splitlines() if not re.fullmatch(r"[a-z ]+ \.\.\.|replaying .*: about [\d:]+", line)]
    return [re.sub(r" [\d.]+/s|, drafts \d+/\d+|, [\d.]+ per pass", "", line) for line in lines]


def console(path: Path) -> list[tuple[str, list[str]]]:
    """The commands of a terminal session, and what each prints."""
    (session,) = blocks(path, "console")
    return [(part.partition("\n")[0], plain(part.partition("\n")[2])) for part in session.split("$ ")[1:]]


def test_the_readme_session_is_a_real_one(smollm2_path: Path, tmp_path: Path) -> None:
    """Every bit of it: the native backend gives the same digests on every machine."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "80"}
    for command, expected in console(ROOT / "README.md"):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert plain(done.stdout) == expected, command


def test_control_a_session_with_another_digest_or_text_is_found_out() -> None:
    lines = "The sky is blue.\n37 prompt tokens 412/s, 8 new 72.4/s, drafts 1/1, digest b94aabb69a95\n"
    assert plain("loading ...\n" + lines.replace("72.4", "3.1").replace(", drafts 1/1", "")) == plain(lines)
    assert plain(lines.replace("b94", "b95")) != plain(lines)
    assert plain(lines.replace("blue", "grey")) != plain(lines)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(smollm2_path: Path, path: Path) -> None:
    done = run([str(path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "DIFFERENT" not in done.stdout


class _Application:
    """As much of FastAPI as the example uses: what it keeps, and which function answers which path."""

    def __init__(self, lifespan: Any) -> None:
        self.lifespan, self.state, self.routes = lifespan, SimpleNamespace(), dict[str, Any]()

    def get(self, path: str) -> Any:
        return lambda function: self.routes.setdefault(path, function)


def test_the_application_that_is_shown_answers(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [code for code in blocks(ROOT / "docs" / "python.md", "python") if "FastAPI" in code]
    responses = SimpleNamespace(StreamingResponse=lambda parts: parts)
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(FastAPI=_Application, responses=responses))
    monkeypatch.setitem(sys.modules, "fastapi.responses", responses)
    monkeypatch.setattr("verispec.LLM", lambda name: smollm2)
    monkeypatch.setattr(smollm2, "close", lambda: None)  # others use it too
    shown: dict[str, Any] = {}
    exec(code, shown)
    app = shown["app"]

    async def asked() -> tuple[dict[str, str], str]:
        async with app.lifespan(app):
            answer = await app.routes["/ask"]("What is the capital of France?", seed=1)
            parts = await app.routes["/tell"]("What is the capital of France?")
            return answer, "".join([part async for part in parts])

    answer, told = asyncio.run(asked())
    assert "Paris" in answer["text"]
    assert len(answer["digest"]) == 64
    assert told


def test_the_drafter_that_is_shown_drafts_and_changes_nothing() -> None:
    (code,) = blocks(ROOT / "docs" / "adding-a-drafter.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    drafters = {**make_drafters(), "again": names["LastTokenAgain"]()}
    params = SamplingParams(max_tokens=30, seed=1)
    outputs: dict[str, Any] = {}
    for name in ("none", "again"):
        engine = Engine(FakeBackend(), family=(4, 8, 16), drafters=drafters, config=EngineConfig(num_slots=256))
        engine.add(Request([1, 2, 3], params, Speculation(name)))
        while engine.has_work:
            outputs[name] = next((event.output for event in engine.step() if event.output is not None), None)
    assert outputs["again"].stats.drafted > 0
    assert outputs["again"].token_ids == outputs["none"].token_ids


def test_the_backend_that_is_shown_runs_rounds() -> None:
    (code,) = blocks(ROOT / "docs" / "adding-a-backend.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    fake = FakeBackend()
    shown = names["MyBackend"](fake.limits)
    fake.resident = shown.resident
    shown.run = fake.run
    shown.submit(probe_pass(shown, 4, 12))  # so that the table has the positions that follow
    pass_ = probe_pass(shown, 4, 8)
    burst = Burst(np.array([0, 2], np.int32), np.array([2, 1], np.int32), 4)
    result = shown.submit(replace(pass_, burst=burst)).result()
    assert (result.burst.token_ids >= 0).tolist() == [[True, True], [True, False]]


@cache
def help_text(command: tuple[str, ...]) -> str:
    return run(["-m", "verispec", *command, "--help"]).stdout


def shown_commands() -> list[tuple[str, str]]:
    """Every `verispec ...` line in a code block of a document."""
    lines = []
    for path in DOCUMENTS:
        for block in (*blocks(path, ""), *blocks(path, "console")):
            for line in block.splitlines():
                part = line.removeprefix("$ ").rpartition("| ")[2].strip()
                if part.startswith("verispec "):
                    lines.append((path.name, part))
    return lines


@pytest.mark.parametrize(("document", "line"), shown_commands())
def test_shown_commands_exist(document: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
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
