"""The native backend as tests need it: which kernels run here, the real model on them, a library built badly."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

from verispec.backends import native_answers
from verispec.backends import native_library as native
from verispec.backends.native_backend import NativeBackend
from verispec.backends.options import LoadedModel, NativeOptions
from verispec.errors import InputError
from verispec.model import open_checkpoint

ROOT = Path(__file__).parents[2]


def available() -> list[str]:
    names = []
    for isa in ("portable", "avx2", "avx512"):
        try:
            native.Kernels(1, isa).close()
        except InputError:
            continue
        names.append(isa)
    return names


ISAS = available()


def smollm2_backend(path: Path, isa: str = "", threads: int = 2) -> NativeBackend:
    with open_checkpoint(path) as checkpoint:
        model = LoadedModel(checkpoint.architecture, checkpoint.tensor, checkpoint.stored)
        return NativeBackend([model], NativeOptions(num_slots=512, num_seq_rows=8, isa=isa, threads=threads))


def on(isa: str, threads: int) -> native_answers.MakeBackend:
    """Backends for the known-answer test."""

    def make(model: LoadedModel, options: NativeOptions) -> NativeBackend:
        return NativeBackend([model], replace(options, isa=isa, threads=threads))

    return make


def build_sabotaged(path: Path) -> Path:
    """A library from changed sources: the order of blocks depends on how many rows are computed together, and the
    tensor core's sums keep one bit less.
    """
    sources = path.with_suffix(".sources")
    shutil.copytree(ROOT / "native", sources)
    loop = "for (int b = 0; b < num_blocks; ++b) {\n    const uint8_t* w = weights"
    changed = loop.replace("b = 0; b < num_blocks; ++b", "i = 0; i < num_blocks; ++i")
    changed = changed.replace("{\n", "{\n    const int b = R > 1 ? num_blocks - 1 - i : i;\n")
    for name, old, new in (("kernels", loop, changed), ("hopper", "kFractionBits = 25", "kFractionBits = 24")):
        source = sources / f"{name}.cpp"
        text = source.read_text(encoding="utf-8")
        assert text.count(old) == 1
        source.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("native_build", sources / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.build(path, portable=True, extra=("-O1", "-Werror")) == ["portable"]
    return path
