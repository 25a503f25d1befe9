"""What `judges.py` needs: environments for programs of others, servers for them to judge, and what they say."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Outcome(NamedTuple):
    version: str
    said: str
    is_good: bool = True


class UnavailableError(Exception):
    """A judge cannot be had here."""


class Bench:
    """A server to be judged, and the folder with what judges it."""

    def __init__(self, url: str, asked: argparse.Namespace) -> None:
        self.url = url
        self.model = asked.model
        self.folder = asked.folder.resolve()
        self.examples = asked.examples
        self.llama_cpp = asked.llama_cpp

    @contextmanager
    def tiny(self, *options: str) -> Iterator[str]:
        """Another server, on the tiny model of the tests; its address."""
        sys.path.insert(0, str(HERE.parent))
        from tests.support.chat_model import write_chat_model

        with serving(str(write_chat_model(self.folder / "tiny.gguf")), *options) as url:
            yield url

    def environment(self, name: str, *packages: str) -> Path:
        """The Python of an environment that has these packages."""
        python = self.folder / name / "bin" / "python"
        listed = self.folder / name / "packages"
        if not listed.exists() or listed.read_text() != " ".join(packages):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder / name)], check=True)
            if run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]).returncode:
                raise UnavailableError(f"pip cannot install {' '.join(packages)}")
            listed.write_text(" ".join(packages))
        return python

    def node_modules(self, *packages: str) -> Path:
        """A folder in which Node finds these packages."""
        if shutil.which("npm") is None:
            raise UnavailableError("there is no npm on this machine")
        folder = self.folder / "node"
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *packages]
        if run(command).returncode:
            raise UnavailableError(f"npm cannot install {' '.join(packages)}")
        return folder / "node_modules"


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """A server; its address. Fails if it is dead at the end, or does not leave as it should."""
    command = [sys.executable, "-m", "verispec", "serve", "-m", model, "--log-level", "error", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]
        assert server.poll() is None, "the server died"
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == 0, f"the server left with exit code {code}"


def run(command: Sequence[str | Path], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload,no-any-return]


def version_of(python: str | Path, package: str) -> str:
    return run([python, "-c", f"from importlib.metadata import version; print(version('{package}'))"]).stdout.strip()


def verdict(done: subprocess.CompletedProcess[str], version: str) -> Outcome:
    if done.returncode == 0:
        return Outcome(version, "passed")
    print(done.stdout[-3000:], done.stderr[-3000:])
    return Outcome(version, f"failed (exit code {done.returncode})", False)


def counted(done: subprocess.CompletedProcess[str], version: str, known: str, why: str) -> Outcome:
    """What tests of others said; those whose names match `known` fail for a reason."""
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout)
    if passed is None:
        return verdict(done, version)
    unexpected = [name for name in failed if not re.search(known, name)]
    print("\n".join(unexpected))
    said = f"{passed[1]} passed, {len(failed)} failed, of which {len(failed) - len(unexpected)} {why}"
    return Outcome(version, said, not unexpected)
