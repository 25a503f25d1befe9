"""Installs a wheel into a fresh environment and runs it there; `make test-wheel`. No part of the suite: it uses pip.

    python tests/check_wheel.py dist/verispec-*.whl

The wheel must hold the native kernels and nothing of the checkout but the package, and answer, with the default model
from the cache, by the same bits as the checkout whose Python runs this.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

LIBRARY = "verispec/backends/_native.so"
GENERATE = ["-m", "verispec", "generate", "What is the capital of France?", "--max-tokens", "8", "--json"]


def check_contents(wheel: Path) -> None:
    """The kernels are inside, the tag says for which machine, and there is one top-level package."""
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY in names, f"{wheel.name} has no {LIBRARY}: was there a C++ compiler?"
    assert not wheel.stem.endswith("-any"), f"{wheel.name} claims to run on any machine, and holds machine code"
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"verispec"}, f"{wheel.name} also installs {tops - {'verispec'}}"


def output(python: Path | str, *arguments: str, cwd: Path) -> str:
    """What a command prints. `-I` and `cwd` keep the checkout out of its sight."""
    return subprocess.run(
        [str(python), "-I", *arguments], cwd=cwd, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def main() -> None:
    """Exit code 0 if the wheel works."""
    wheel = Path(sys.argv[1]).resolve()
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env/bin/python"
        install = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        output(python, *install, str(wheel), cwd=folder)
        version = subprocess.run([folder / "env/bin/verispec", "--version"], cwd=folder, capture_output=True, text=True)
        assert version.returncode == 0, version.stderr
        assert "backend: native" in version.stdout, version.stdout
        answer, expected = (json.loads(output(p, *GENERATE, cwd=folder)) for p in (python, sys.executable))
    assert answer["text"], answer
    assert answer["digest"] == expected["digest"], f"wheel and checkout differ: {answer} {expected}"
    print(f"{version.stdout.splitlines()[0]} from {wheel.name}: {answer['text']!r}, digest {answer['digest'][:16]}")


if __name__ == "__main__":
    main()
