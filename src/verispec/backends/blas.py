"""Which BLAS numpy runs on, with how many threads: parts of the fingerprint, since both change a product's bits."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

# OpenBLAS as bundled with numpy decorates its names; other builds do not.
_DECORATIONS = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))


def blas_name() -> str:
    """Library, version, kernel family and number of threads."""
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    core = _call("openblas_get_corename", ctypes.c_char_p)
    kernels = f" {core.decode()}" if isinstance(core, bytes) else ""
    return f"{built['name']} {built['version']}{kernels}, {num_threads()} threads"


def num_threads() -> int:
    """Threads of the BLAS; the cores this process may use where it does not say."""
    found = _call("openblas_get_num_threads", ctypes.c_int)
    return int(found) if found is not None else _num_cores()


def cpu_name() -> str:
    """The processor's name and its vector extensions, as the operating system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    entries = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    named = {key.strip(): value.strip() for key, value in entries.items()}
    flags = {"avx2", "fma", "avx512f", "avx512vl", "amx_tile", "asimd", "sve"} & set(
        named.get("flags", named.get("Features", "")).split()
    )
    return " ".join([named.get("model name", platform.machine()), *sorted(flags)])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _call(name: str, result_type: type) -> bytes | int | None:
    for library in _libraries():
        for prefix, suffix in _DECORATIONS:
            function = getattr(library, f"{prefix}{name}{suffix}", None)
            if function is not None:
                function.restype = result_type
                value: bytes | int = function()
                return value
    return None


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    return tuple(_open_libraries())


def _open_libraries() -> Iterator[ctypes.CDLL]:
    root = Path(np.__file__).parent
    for folder in (root.parent / "numpy.libs", root / ".libs", root / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            try:
                yield ctypes.CDLL(str(path))
            except OSError:
                continue
