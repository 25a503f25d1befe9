"""Commands run in this process, on the model that all tests share; and real processes for what only those have."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import verispec.cli.app  # before any test puts another LLM in place
import verispec.cli.prompt_file
from verispec.cli.main import EXIT_INTERRUPTED, run
from verispec.llm import LLM
from verispec.spec.registry import SUFFIX_DRAFTER
from verispec.spec.speculation import Speculation

COMMAND = [sys.executable, "-m", "verispec"]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        return json.loads(line)

    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Done]


@pytest.fixture
def bare_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command here; what it loads, it loads, and says nothing of it, however long it takes."""
    monkeypatch.setattr("verispec.cli.progress._QUIET_SECONDS", float("inf"))

    def call(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            code = run(list(arguments))
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED  # as `main` does, for the whole process
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def cli(bare_cli: Cli, smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command here on the shared model, drafter suffix. What concerns loading is checked elsewhere."""
    monkeypatch.setattr(smollm2, "_speculation", Speculation(SUFFIX_DRAFTER))
    monkeypatch.setattr("verispec.llm.LLM", lambda **options: smollm2)
    return bare_cli


def verispec(*arguments: str, stdin: str | None = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a process."""
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False, **more
    )


def press_ctrl_c() -> None:
    """Interrupt the main thread, once it waits, from the thread that steps the engine."""
    time.sleep(0.3)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
    time.sleep(0.3)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # makes stdin the session's terminal, so that its Ctrl-C is a signal


class Terminal:
    """A process on a terminal of its own, driven by keys."""

    def __init__(self, command: list[str]) -> None:
        self._fd, inner = pty.openpty()
        self._process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env={**os.environ, "TERM": "xterm"},
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(inner)
        self.seen = ""

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def press_until(self, keys: str, text: str = "") -> None:
        """Press keys every second until `text` has come, or without one until the process has ended.

        Python overlooks a signal between showing the prompt and waiting for keys, and loses a line to it later.
        """
        end = time.monotonic() + 60
        while not (text and text in self.seen):
            assert time.monotonic() < end, f"{text!r} did not come; seen: {self.seen!r}"
            self.press(keys)
            again = time.monotonic() + 1
            while time.monotonic() < again and not (text and text in self.seen):
                if not self._read(0.1):
                    assert not text, f"{text!r} did not come before the end; seen: {self.seen!r}"
                    return
        self.wait_for(text)

    def wait_for(self, text: str, *, seconds: float = 30) -> str:
        """Read until `text` has come; returns everything up to its end, and forgets it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come; seen: {self.seen!r}"
            if not self._read(0.2):
                raise AssertionError(f"{text!r} did not come before the end; seen: {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def rest(self) -> str:
        """Everything until the process ends."""
        end = time.monotonic() + 60
        while self._read(0.2):
            assert time.monotonic() < end, f"it does not end; seen: {self.seen!r}"
        return self.seen

    def exit_code(self) -> int:
        self.rest()
        return self._process.wait(timeout=20)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def _read(self, seconds: float) -> bool:
        """Take in what comes; False once the other side has closed."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return self._process.poll() is None
        try:
            chunk = os.read(self._fd, 65536)
        except OSError:
            return False
        self.seen += chunk.decode(errors="replace")
        return bool(chunk)


@pytest.fixture
def terminal(smollm2_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, command: list[str] = COMMAND) -> Terminal:
        opened.append(Terminal([*command, *arguments]))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
