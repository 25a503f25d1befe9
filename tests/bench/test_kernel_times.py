"""How the time of a device is divided among its kernels: made-up events."""

import pytest

from bench import kernel_times
from bench.kernel_times import MOST_LETTERS, PAUSE_US, PAUSES, KernelEvent, KernelGroup, events_of, grouped, lines_of


def test_kernels_that_overlap_are_charged_from_the_last_end() -> None:
    events = [
        KernelEvent("b", (4, 1, 1), 1.0, 15.0),  # began while the first ran
        KernelEvent("a", (8, 1, 1), 0.0, 10.0),
        KernelEvent("inside", (), 11.0, 13.0),  # ends before one that began earlier
        KernelEvent("a", (8, 1, 1), 16.0, 20.0),
    ]
    assert grouped(events) == [
        KernelGroup("a", (8, 1, 1), 2, 15.0),
        KernelGroup("b", (4, 1, 1), 1, 5.0),
        KernelGroup("inside", (), 1, 0.0),
    ]


def test_grids_of_one_name_stand_apart() -> None:
    events = [KernelEvent("a", (8, 1, 1), 0.0, 1.0), KernelEvent("a", (9, 1, 1), 1.0, 3.0)]
    assert [group.grid for group in grouped(events)] == [(9, 1, 1), (8, 1, 1)]


def test_the_sum_is_the_time_of_the_whole_and_pauses_are_nobodys() -> None:
    late = 10.0 + 2 * PAUSE_US
    groups = grouped([KernelEvent("a", (), 0.0, 10.0), KernelEvent("b", (), late, late + 3.0)])
    assert {group.name: group.total_us for group in groups} == {"a": 10.0, "b": 3.0, PAUSES: 2 * PAUSE_US}
    assert sum(group.total_us for group in groups) == late + 3.0


def test_a_trace_has_kernels_and_copies_of_the_device_alone() -> None:
    kernel = {"name": "k", "cat": "kernel", "ts": 5.0, "dur": 2.0, "args": {"grid": [3, 1, 1]}}
    copy = {"name": "Memcpy", "cat": "gpu_memcpy", "ts": 1.0, "dur": 1.0, "args": {}}
    host = {"name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 0.0, "dur": 9.0}
    found = events_of({"traceEvents": [kernel, copy, host, {"name": "process_name", "ph": "M"}]})
    assert found == [KernelEvent("k", (3, 1, 1), 5.0, 7.0), KernelEvent("Memcpy", (), 1.0, 2.0)]


def test_the_table_is_cut_and_loses_no_time() -> None:
    groups = [KernelGroup("x" * 99, (i, 1, 1), 2, 100.0) for i in range(5)]
    lines = lines_of(groups, num_rounds=10, most=2)
    assert len(lines) == 4
    assert "x" * MOST_LETTERS in lines[1]
    assert "x" * (MOST_LETTERS + 1) not in lines[1]
    assert lines[1].split()[1:] == ["0x1x1", "2", "50.00", "0.10", "20.0%", "10.0"]
    assert lines[3].split()[:2] == ["(others)", "6"]
    assert sum(float(line.split()[-2].rstrip("%")) for line in lines[1:]) == pytest.approx(100, abs=0.2)


def test_a_profiler_that_fails_or_sees_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(work: object) -> None:
        raise RuntimeError("not permitted")

    monkeypatch.setattr(kernel_times, "_KEPT", {})
    monkeypatch.setattr(kernel_times, "traced", refused)
    assert kernel_times.kernel_times("it", lambda: list) == []
    assert "the profiler failed: not permitted" in capsys.readouterr().out
    kernel_times.start_tracing()
    assert "not permitted" in capsys.readouterr().out
    monkeypatch.setattr(kernel_times, "traced", lambda work: ([], 1.0))
    assert kernel_times.kernel_times("it", lambda: list) == []
    assert "saw none" in capsys.readouterr().out
    monkeypatch.setattr(kernel_times, "traced", lambda work: ([KernelEvent("k", (), 0.0, 5.0)], 1.0))
    assert kernel_times.kernel_times("it", lambda: list) == [KernelGroup("k", (), 1, 5.0)]
