"""Which BLAS numpy runs on, and how to keep it to one thread: what products' bits depend on."""

import ctypes
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

# OpenBLAS as bundled with numpy decorates its names; other builds do not.
_DECORATIONS = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))


def blas_name() -> str:
    """Library, version, kernel family; and the number of threads where it cannot be set to one."""
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    core = _call("openblas_get_corename", ctypes.c_char_p)
    kernels = f" {core.decode()}" if isinstance(core, bytes) else f", {num_cores()} threads"
    return f"{built['name']} {built['version']}{kernels}"


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _SingleThreadedBlas(ContextDecorator):
    """One thread per product, as far as the BLAS can be told: verispec shares out products itself.

    The count is the process's: whoever is first in sets it to one, the last one out puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 1

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = int(_call("openblas_get_num_threads", ctypes.c_int) or 1)
                if self._before != 1:
                    _call("openblas_set_num_threads", None, 1)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before != 1:
                _call("openblas_set_num_threads", None, self._before)


single_threaded_blas = _SingleThreadedBlas()


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


def _call(name: str, result_type: type | None, *arguments: int) -> bytes | int | None:
    """Call OpenBLAS by whatever name it has here; True for a function without result, None if there is none."""
    for library in _libraries():
        for prefix, suffix in _DECORATIONS:
            function = getattr(library, f"{prefix}{name}{suffix}", None)
            if function is not None:
                function.restype = result_type
                value: bytes | int | None = function(*arguments)
                return True if result_type is None else value
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


class LibraryRow(NamedTuple):
    """One row of a matrix product: its values below `num_others` rows, compared with its values alone."""

    num_others: int
    num_values: int
    num_different: int
    largest_difference: float


def rows_beside_others(num_in: int, num_out: int, numbers_of_others: Sequence[int]) -> list[LibraryRow]:
    """How much a row's bits depend on its neighbours where the library multiplies, on random float32 matrices."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((num_in, num_out), dtype=np.float32)
    rows = rng.standard_normal((max(numbers_of_others) + 1, num_in), dtype=np.float32)
    (alone,) = rows[-1:] @ weights

    def compared(num_others: int) -> LibraryRow:
        beside = (rows[-1 - num_others :] @ weights)[-1]
        different = alone.view(np.int32) != beside.view(np.int32)
        return LibraryRow(num_others, num_out, int(different.sum()), float(np.abs(alone - beside).max()))

    return [compared(num_others) for num_others in numbers_of_others]
