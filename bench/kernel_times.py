"""Which kernels the device's time goes to: a piece of work under the profiler, its kernels by name and grid.

Kernels overlap, because each may start before the one in front of it has ended. So a kernel is charged with the time
from the last end before it to its own end, and the sum is the time of the whole. Longer pauses, in which the device
waits for the host, stand in a line of their own. Only `traced` needs torch and a device.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

PAUSE_US = 20.0  # a longer one is no kernel's
PAUSES = "(no kernel runs)"
MOST_LETTERS = 40
Work = Callable[[], object]
# With captured graphs the profiler of torch 2.10 may crash when it comes up a second time: it is not taken down.
_KEPT = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
_FAILURES = (RuntimeError, AssertionError, ValueError, OSError)  # nobody may profile here, or no trace came
_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class KernelEvent(NamedTuple):
    """One kernel or copy on the device; microseconds."""

    name: str
    grid: tuple[int, ...]  # () of a copy
    start: float
    end: float


class KernelGroup(NamedTuple):
    """All kernels of one name and grid."""

    name: str
    grid: tuple[int, ...]
    calls: int
    total_us: float


def grouped(events: Iterable[KernelEvent]) -> list[KernelGroup]:
    """What each name and grid is charged with, the most first."""
    found: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    ended: float | None = None
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        begin = event.start if ended is None else ended
        if event.start - begin > PAUSE_US:
            found.setdefault((PAUSES, ()), []).append(event.start - begin)
            begin = event.start
        found.setdefault((event.name, event.grid), []).append(max(0.0, event.end - begin))
        ended = event.end if ended is None else max(ended, event.end)
    groups = [KernelGroup(name, grid, len(each), sum(each)) for (name, grid), each in found.items()]
    return sorted(groups, key=lambda group: -group.total_us)


def events_of(trace: dict[str, Any]) -> list[KernelEvent]:
    """Those of the device, from a trace as the profiler writes it."""
    return [
        KernelEvent(e["name"], tuple(e.get("args", {}).get("grid", ())), e["ts"], e["ts"] + e["dur"])
        for e in trace["traceEvents"]
        if e.get("cat") in _CATEGORIES and "dur" in e
    ]


def start_tracing() -> None:
    """Bring the profiler up, for the rest of the process. Graphs that were captured before may hide their kernels."""
    os.environ |= _KEPT
    try:
        traced(lambda: None)
    except _FAILURES as error:
        print(f"the profiler does not start: {error}", flush=True)


def traced(work: Work) -> tuple[list[KernelEvent], float]:
    """What ran on the device, those of captured graphs too, and the milliseconds that the work took meanwhile."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) * 1e3
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text())), took


def lines_of(groups: list[KernelGroup], num_rounds: int, most: int = 18) -> list[str]:
    """A table; with rounds, also the microseconds of each. What is beyond `most` is one line."""
    total = sum(group.total_us for group in groups)
    lines = [f"  {'kernel':{MOST_LETTERS}} {'grid':>14} {'calls':>7} {'us each':>9} {'ms':>9} {'share':>6} us a round"]
    rest = groups[most:]
    others = [KernelGroup("(others)", (), sum(g.calls for g in rest), sum(g.total_us for g in rest))] if rest else []
    for group in (*groups[:most], *others):
        name, grid = group.name[:MOST_LETTERS], "x".join(map(str, group.grid))
        per_round = f"{group.total_us / num_rounds:10.1f}" if num_rounds else ""
        lines.append(
            f"  {name:{MOST_LETTERS}} {grid:>14} {group.calls:7} {group.total_us / group.calls:9.2f} "
            f"{group.total_us / 1e3:9.2f} {group.total_us / total:6.1%} {per_round}".rstrip()
        )
    return lines


def kernel_times(name: str, ready: Callable[[], Work], num_rounds: int = 0) -> list[KernelGroup]:
    """Of the work that `ready` returns, printed too; it runs three times, at first to capture its graphs. If the
    profiler has none, a line says so."""
    ready()()
    work = ready()
    begin = time.perf_counter()
    work()
    alone = (time.perf_counter() - begin) * 1e3
    try:
        events, took = traced(ready())
    except _FAILURES as error:
        print(f"kernels of {name}: the profiler failed: {error}", flush=True)
        return []
    if not events:
        print(f"kernels of {name}: the profiler saw none", flush=True)
        return []
    groups = grouped(events)
    total = sum(group.total_us for group in groups) / 1e3
    print(f"kernels of {name}: {total:.2f} ms; the work took {took:.2f}, and {alone:.2f} without the profiler")
    print("\n".join(lines_of(groups, num_rounds)), flush=True)
    return groups
