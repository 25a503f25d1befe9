"""A batch that is killed again and again, in every way there is, ends with the same bytes as one that never was."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.batch_lines import BAD, write_lines
from tests.support.nursery import Nursery

NUM_LINES = 300
EXIT_INTERRUPTED, EXIT_FAILED = 130, 2
WAYS = {"kill": 16, "cut": 3, "interrupt": 2, "term": 1, "full": 2}


class Victim:
    """A batch, and what it should come to."""

    def __init__(self, nursery: Nursery, folder: Path, model: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._model = model
        self.counts: Counter[str] = Counter()
        write_lines(folder / "in.jsonl", NUM_LINES, bad=True, num_tokens=12)
        assert self.whole("expected") == EXIT_FAILED  # some lines cannot be served
        self._expected = self._files("expected")
        self._num_bytes = 2 * len(self._expected[0])  # about what a journal grows to

    def _files(self, name: str) -> tuple[bytes, bytes]:
        return tuple((self._folder / f"{name}{end}").read_bytes() for end in (".jsonl", ".receipts"))  # type: ignore[return-value]

    def _start(self, name: str, *options: str, **more: int) -> int:
        place = self._folder / name
        return self._nursery.start([
            "batch", f"{self._folder / 'in.jsonl'}", f"{place}.jsonl", "--receipts", f"{place}.receipts",
            "-m", str(self._model), "--save-every", "0.05", *options,
        ], **more)  # fmt: skip

    def whole(self, name: str, *options: str) -> int:
        self._start(name, *options)
        return self._nursery.wait()

    def _size(self, name: str) -> int:
        try:
            return (self._folder / f"{name}.jsonl.journal").stat().st_size
        except FileNotFoundError:
            return 0

    def die(self, name: str, way: str, chance: random.Random, share: float, *, workers: int = 1) -> None:
        """One life: up to a random moment, of which about `share` of all its work goes by."""
        options = ["--drafter", chance.choice(("none", "ngram")), "--batch-size", chance.choice("248"), "--workers"]
        room = self._size(name) + round(2 * share * self._num_bytes * chance.random())
        more = {"max_file_nbytes": room} if way == "full" else {}
        process = self._start(name, *options, str(workers), **more)
        end = time.monotonic() + (chance.random() if chance.random() < 0.2 else 60)  # some die while they load
        while (code := self._nursery.ended()) is None and time.monotonic() < end and self._size(name) < room:
            time.sleep(0.002)
        if code is None:
            stop = {"interrupt": signal.SIGINT, "term": signal.SIGTERM}.get(way, signal.SIGKILL)
            os.kill(process, stop)
            code = self._nursery.wait()
        self._check(way, code)
        if way == "cut" and (size := self._size(name)):
            os.truncate(self._folder / f"{name}.jsonl.journal", size - chance.randrange(min(size, 3000)))

    def _check(self, way: str, code: int) -> None:
        said = self._nursery.said()
        known = {
            -signal.SIGKILL: "", -signal.SIGTERM: "", EXIT_INTERRUPTED: "the same command goes on",
            EXIT_FAILED: "File too large" if way == "full" else "lines failed",
        }  # fmt: skip
        assert code in known, (code, said)
        assert known[code] in said or f"{len(BAD) - 1} of" in said, (code, said)
        self.counts[way if code in (-signal.SIGKILL, EXIT_INTERRUPTED) or way == "full" else "ended"] += 1

    def check_result(self, name: str) -> None:
        assert self.whole(name) == EXIT_FAILED
        assert f"{len(BAD) - 1} of {NUM_LINES + len(BAD)} lines failed" in self._nursery.said()
        assert self._files(name) == self._expected
        assert sorted(p.name for p in self._folder.glob(f"*{name}*")) == [
            f"{name}.jsonl", f"{name}.jsonl.journal", f"{name}.receipts"
        ]  # fmt: skip


def killed(victim: Victim, num_lives: int, *, seed: int, with_workers: int) -> None:
    chance = random.Random(seed)
    for number in range(num_lives):
        (way,) = chance.choices(list(WAYS), list(WAYS.values()))
        workers = 2 if number % max(1, num_lives // with_workers) == num_lives // with_workers - 1 else 1
        victim.die(f"out-{seed}", way, chance, 1 / num_lives, workers=workers)
    victim.check_result(f"out-{seed}")


@pytest.mark.slow
def test_killed_twenty_times_the_files_are_the_same(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_path.parent / "cache"))
    with Nursery(tmp_path / "log") as nursery:
        victim = Victim(nursery, tmp_path, tiny_path)
        killed(victim, 24, seed=1, with_workers=2)
    print(victim.counts)
    assert victim.counts["kill"] + victim.counts["cut"] >= 12


@pytest.mark.long
def test_killed_two_hundred_times(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_path.parent / "cache"))
    with Nursery(tmp_path / "log") as nursery:
        victim = Victim(nursery, tmp_path, tiny_path)
        seed = 2
        while victim.counts["kill"] + victim.counts["cut"] < 200:
            killed(victim, 30, seed=seed, with_workers=3)
            seed += 1
    print(victim.counts)
