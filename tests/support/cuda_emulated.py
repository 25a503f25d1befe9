"""CUDA C++ on a CPU: the sources of the kernels, compiled by the host's C++ compiler and run thread by thread.

Threads of a block run one after the other from barrier to barrier, forwards or backwards, warps beside each other or
each alone: what a kernel gives must not depend on that. Blocks run one after the other, or take turns.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from verispec.backends.cuda import compiler

_SOURCES, _HEADER = Path(compiler.__file__).parent, Path(__file__).with_name("cuda_on_cpu.h")
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(const (?:__grid_constant__ )?(\w+) \w+\)'
)
_WRAPPER = """
extern "C" bool run_{name}(const {args}* a, const int* grid, int threads, int backwards, int apart) {{
  return emulated::run_grid(grid, threads, backwards, apart, [&] {{ {name}(*a); }});
}}"""


_COPY = "emulated::copy<LATE_COPIES>(emulated::dynamic_memory + to, from, {});"
# What only a GPU has, by heads of functions: copies in the background, launch-ahead, products of a warp. LATE_COPIES
# must be among the defines: whether copies end as late as they can.
GPU_ONLY = {
    "unsigned shared_address(const void* p)": "return static_cast<const unsigned char*>(p) - emulated::dynamic_memory;",
    "void copy16(unsigned to, const void* from, bool wanted)": _COPY.format("wanted"),
    "void copy16_cached(unsigned to, const void* from)": _COPY.format("true"),
    "void copy16_once(unsigned to, const void* from, bool wanted, unsigned long long policy)": _COPY.format("wanted"),
    "void copy_commit()": "emulated::commit_copies();",
    "void copy_wait()": "emulated::wait_for_copies(LEFT);",
    "void wait_for_previous()": "emulated::previous_ended();",
    "void mma(float* d, const unsigned* a, const unsigned* b)": "emulated::mma(d, a, b);",
}
# What blocks of a cluster do together.
OF_CLUSTERS = {
    "void meet_cluster()": "emulated::meet_cluster();",
    "void put_there(float* at, int rank, float value)": "emulated::put_there(at, rank, value);",
}


class StuckError(RuntimeError):
    """Nothing can go on, and not all threads have ended."""


def bodies(by_head: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Changes of a source: these functions do that instead."""
    return tuple((f"{head} {{", f"{head} {{ {body}") for head, body in by_head.items())


def dynamic_memory(align: int, to: str = "auto& memory = emulated::dynamic_memory;") -> tuple[str, str]:
    """The change of a source that declares its dynamic shared memory."""
    return f"extern __shared__ __align__({align}) unsigned char memory[];", to


def _text(name: str, seen: set[str]) -> str:
    """A source with its headers in place, each once, without what only a GPU's assembler knows."""
    if name in seen:
        return ""
    seen.add(name)
    text = (_SOURCES / name).read_text()
    text = re.sub(r"asm(?: volatile)?\(.*?\);", ";", text, flags=re.DOTALL)
    text = text.replace("#pragma once", "").replace("#include <cuda_bf16.h>", "")
    return re.sub(r'#include "(\w+\.cuh)"', lambda found: _text(found[1], seen), text)


@cache
def _library(
    source: str, defines: tuple[str, ...], threads: int | None, changes: tuple[tuple[str, str], ...], together: bool
) -> ctypes.CDLL:
    text = "".join(f"#define {name.replace('=', ' ') if '=' in name else f'{name} 1'}\n" for name in defines)
    text += _text(source, set())
    if threads is not None:
        text = re.sub(r"(k\w*Threads) = \d+", rf"\1 = {threads}", text)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    text = f'#include "{_HEADER}"\n{text}' + "".join(_WRAPPER.format(name=n, args=a) for n, a in _KERNEL.findall(text))
    command = "g++ -std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -fPIC -shared -w -Wno-psabi".split()
    command += ["-fno-gnu-unique"]  # each library has its own threads and memory
    command += ["-DTOGETHER", "-pthread"] if together else []
    command += [*os.environ.get("VERISPEC_TEST_EMULATED", "").split(), "-o"]  # of `make cuda-asan`
    with tempfile.TemporaryDirectory() as name:
        made, written = Path(name, "kernel.so"), Path(name, "kernel.cpp")
        written.write_text(text)
        subprocess.run([*command, made, written], check=True)
        return ctypes.CDLL(str(made))


def launch(
    source: str, name: str, args: ctypes.Structure, *, grid: tuple[int, int, int], threads: int,
    fewer: int | None = None, defines: tuple[str, ...] = (), backwards: bool = False,
    apart: bool = False, together: bool = False, changes: tuple[tuple[str, str], ...] = (),
) -> None:  # fmt: skip
    """One kernel, block by block; with `fewer` threads where given. `together`: all blocks take turns, each until it
    cannot go on; those beside each other in x are a cluster, and may meet. `backwards` is then also the order of
    blocks. `changes` are made to the source's text first. Raises StuckError where threads wait for each other."""
    library, sizes = _library(source, defines, fewer, changes, together), (ctypes.c_int * 3)(*grid)
    run = getattr(library, f"run_{name}")
    run.restype = ctypes.c_bool
    if not run(ctypes.byref(args), sizes, fewer or threads, int(backwards), int(apart)):
        raise StuckError(f"{name}: some threads wait for what never comes")
