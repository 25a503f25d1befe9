"""Seconds from starting Python to the first token, and memory, of first and later starts. Figures: docs/benchmarks.md.

    python bench/load.py smollm2-135m path/to/other.gguf --repeats 5

Each start is a process of its own. A first start finds an empty cache folder, a second start what a first one left; the
model's file is in the system's cache both times. The least of the repeats is shown: other work on the machine makes
starts slower, never faster. Peak and steady are the resident memory of the process: its largest, and after the token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from verispec.backends.blas import cpu_name
from verispec.model import resolve


class Start(NamedTuple):
    seconds: float  # from the start of the process to the first token
    cpu_seconds: float  # of all threads: it shows what a busy machine hides
    peak_mb: float
    steady_mb: float


def start_once(model: str, began: float, options: dict[str, str]) -> Start:
    """Run inside the process that is measured."""
    from verispec import LLM, SamplingParams

    llm = LLM(model, drafter="none", **options)  # type: ignore[arg-type]
    next(iter(llm.stream([1, 2, 3, 4], SamplingParams(max_tokens=1, ignore_eos=True))))
    seconds = time.monotonic() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, steady = (int(status[name].split()[0]) / 1e3 for name in ("VmHWM", "VmRSS"))
    llm.close()
    return Start(seconds, time.process_time(), peak, steady)


def measured(model: str, cache: str, options: dict[str, str]) -> Start:
    command = [sys.executable, __file__, model, "--inside", str(time.monotonic()), "--options", json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, check=True)
    return Start(*json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", type=json.loads, default={}, help='of LLM, as JSON: {"backend": "numpy"}')
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(start_once(options.models[0], options.inside, options.options)))
        return
    print(f"{cpu_name()}; least of {options.repeats}\n")
    print("| model | first start, s (CPU s) | second start, s (CPU s) | peak MB | steady MB | peak / steady |")
    print("|---|---|---|---|---|---|")
    for model in options.models:
        path = str(resolve(model))
        firsts, seconds = [], []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as cache:
                firsts.append(measured(path, cache, options.options))
                seconds.append(measured(path, cache, options.options))
        first, second = (
            f"{min(s.seconds for s in listed):.1f} ({min(s.cpu_seconds for s in listed):.1f})"
            for listed in (firsts, seconds)
        )
        peak, steady = (max(getattr(s, name) for s in (*firsts, *seconds)) for name in ("peak_mb", "steady_mb"))
        print(f"| {Path(path).name} | {first} | {second} | {peak:.0f} | {steady:.0f} | {peak / steady:.2f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
