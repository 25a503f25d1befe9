"""The native library is built once for the same sources: an install into another environment finds it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.native import ROOT

COMPILER = """#!/bin/sh
echo "$@" >> "$0.log"
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo compiled > "$2"; shift; done
"""


def load_build(sources: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build", sources / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, compiler = tmp_path / "native", tmp_path / "c++"
    shutil.copytree(ROOT / "native", sources)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build, output = load_build(sources).build, tmp_path / "library.so"

    def compiles(**options: object) -> bool:
        log = tmp_path / "c++.log"
        log.unlink(missing_ok=True)
        assert "portable" in build(output, **options)
        return " -c " in log.read_text()

    assert compiles()
    assert not compiles()
    output.write_text("damaged")
    assert compiles()
    assert compiles(extra=("-O1",))
    assert not compiles(extra=("-O1",))
    (sources / "simd.h").write_text("// changed")
    assert compiles(extra=("-O1",))
    (tmp_path / "library.made-of").write_text("{")
    assert compiles(extra=("-O1",))
