"""Builds the native kernels into one shared library with the C++ compiler at hand. Standard library only.

    python native/build.py [--sanitize] [--portable] [--selftest] OUTPUT

One object per instruction set the compiler knows, and two for every CPU alike; the library picks at run time.
Contraction into fused multiply-add is off: it would change bits from CPU to CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
    "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Wshadow",
]  # fmt: skip
PER_SET = ("kernels", "hopper")  # compiled once per instruction set
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
# GCC 12 warns of its own header for AVX-512, where a register is left as it is on purpose.
X86_SETS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mf16c",
        "-Wno-uninitialized", "-Wno-maybe-uninitialized",
    ],
}  # fmt: skip


class BuildError(Exception):
    """Why there is no library, in one line."""


def compiler() -> str:
    """The C++ compiler: $CXX, or the first of the usual names."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C++ compiler was found (c++, g++, clang++, or the one that CXX names)")


def build(
    output: Path,
    *,
    sanitize: bool = False,
    portable: bool = False,
    selftest: bool = False,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """Compile and link; returns the instruction sets inside. The library appears whole or not at all.

    What was made before of the same sources, by the same compiler with the same flags, is left as it is. With
    `selftest` it is a program that prints a hash per kernel instead.
    """
    command = compiler().split()
    flags = FLAGS + (SANITIZE if sanitize else []) + [*extra]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sets = {"portable": [], **(X86_SETS if is_x86 and not portable else {})}
    made_of, note = _made_of(command, flags, sets, selftest), output.with_suffix(".made-of")
    with contextlib.suppress(OSError, ValueError, KeyError):
        before = json.loads(note.read_text())
        if (before["made_of"], before["sha256"]) == (made_of, _sha256(output)):
            return list(before["sets"])
    with tempfile.TemporaryDirectory() as folder:

        def unit(source: str, name: str) -> str:
            return str(Path(folder) / f"{source}-{name}.o")

        def compiles(name: str) -> bool:
            try:
                for source in PER_SET:
                    target = ["-c", str(HERE / f"{source}.cpp"), "-o", unit(source, name)]
                    _run([*command, *flags, *sets[name], f"-DVS_ISA={name}", *target])
            except BuildError:
                if name == "portable":
                    raise
                return False  # a compiler too old for this instruction set: the others serve
            return True

        with ThreadPoolExecutor() as pool:  # the compiler is a process of its own
            built = [name for name, done in zip(sets, pool.map(compiles, sets), strict=True) if done]
        objects = [unit(source, name) for name in built for source in PER_SET]
        known = [f"-DVS_HAS_{name.upper()}" for name in built if name != "portable"]
        for name in ("api", "pack"):  # for every CPU alike
            objects.append(str(Path(folder) / f"{name}.o"))
            _run([*command, *flags, *known, "-c", str(HERE / f"{name}.cpp"), "-o", objects[-1]])
        library = Path(folder) / "library.so"
        link = ["-static", str(HERE / "selftest.cpp")] if selftest else ["-shared"]
        _run([*command, *flags, *link, *objects, "-o", str(library)])
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_suffix(".partial")
        shutil.copy(library, partial)
        partial.replace(output)
    note.write_text(json.dumps({"made_of": made_of, "sha256": _sha256(output), "sets": built}))
    return built


def _made_of(command: list[str], flags: list[str], sets: dict[str, list[str]], selftest: bool) -> str:
    """A digest of all that decides what comes out."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    sources = [(path.name, _sha256(path)) for path in sorted(HERE.glob("*.[ch]*"))]
    whole = json.dumps([command, version, platform.machine(), flags, sets, selftest, sources])
    return hashlib.sha256(whole.encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} failed: {first}")
    sys.stderr.write(done.stderr)  # warnings: there are none with the compilers it was tried with


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--portable", action="store_true", help="only the portable kernels")
    parser.add_argument("--selftest", action="store_true", help="a program that prints a hash per kernel")
    options = parser.parse_args()
    try:
        built = build(options.output, sanitize=options.sanitize, portable=options.portable, selftest=options.selftest)
    except BuildError as error:
        sys.exit(f"native kernels were not built: {error}")
    print(f"{options.output}: {', '.join(built)}")


if __name__ == "__main__":
    main()
