"""A batch that is killed again and again, in every way there is, ends with the same bytes as one that never was."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.batch_lines import BAD, line, write_lines
from tests.support.nursery import Nursery
from verispec.batch.journal import Commit, Journal

NUM_LINES = 300
EXIT_INTERRUPTED, EXIT_FAILED = 130, 2
WAYS = {"kill": 16, "cut": 3, "interrupt": 2, "term": 1, "full": 2}


class Victim:
    """A batch of 300 lines and some that cannot be served, and what it should come to."""

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
        options = ["--drafter", chance.choice(("none", "suffix")), "--batch-size", chance.choice("248"), "--workers"]
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
        assert known[code] in said or f"{len(BAD) - 1} of" in said or not said, (code, said)
        self.counts[way if code in (-signal.SIGKILL, EXIT_INTERRUPTED) or way == "full" else "ended"] += 1

    @property
    def num_kills(self) -> int:
        return self.counts["kill"] + self.counts["cut"]

    def forget_a_token(self, name: str) -> None:
        """Of all unfinished samples in the journal, their first. Those of a regex would be refused without it."""
        path = self._folder / f"{name}.jsonl.journal"
        with Journal.open(path) as journal:
            header, finished = journal.header, set(journal.finished)
            unfinished = [i for i in range(NUM_LINES) if i not in finished and "regex" not in line(i)]
            left = {i: samples for i in unfinished if (samples := journal.samples(i))}
        assert any(len(sample) > 1 for samples in left.values() for sample in samples.values())
        path.unlink()
        with Journal.open(path) as journal:
            journal.begin(header)
            for i, samples in left.items():
                for number, sample in samples.items():
                    journal.commit(i, Commit(number, 0, sample.since(1), sample.text))

    def check_result(self, name: str) -> None:
        assert self.whole(name) == EXIT_FAILED
        assert f"{len(BAD) - 1} of {NUM_LINES + len(BAD)} lines failed" in self._nursery.said()
        is_same = self._files(name) == self._expected  # so that no difference of a megabyte is worked out
        assert is_same, "the files differ"
        assert sorted(p.name for p in self._folder.glob(f"*{name}*")) == [
            f"{name}.jsonl", f"{name}.jsonl.journal", f"{name}.receipts"
        ]  # fmt: skip


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("kills")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("XDG_CACHE_HOME", str(tiny_path.parent / "cache"))
        yield Victim(opened.enter_context(Nursery(folder / "log")), folder, tiny_path)


def kill(victim: Victim, *, num_kills: int, lives_per_batch: int) -> None:
    """Batches in lives that end in every way, until so many of them ended by kill -9. Every 12th has two workers."""
    number, batch, end = 0, 0, victim.num_kills + num_kills
    while victim.num_kills < end:
        batch += 1
        name, chance = f"out-{num_kills}-{batch}", random.Random(batch)
        for way in chance.choices(list(WAYS), list(WAYS.values()), k=lives_per_batch):
            number += 1
            victim.die(name, way, chance, 1 / lives_per_batch, workers=2 if number % 12 == 0 else 1)
            if victim.num_kills == end:
                break
        victim.check_result(name)
    print(f"{batch} batches, {number} lives: {dict(victim.counts)}")


@pytest.mark.slow
def test_killed_twenty_times_the_files_are_the_same(victim: Victim) -> None:
    kill(victim, num_kills=20, lives_per_batch=25)


@pytest.mark.long
def test_killed_two_hundred_times_the_files_are_the_same(victim: Victim) -> None:
    kill(victim, num_kills=200, lives_per_batch=40)


@pytest.mark.slow
def test_control_a_journal_that_forgets_a_token_is_noticed(victim: Victim) -> None:
    """The same comparison fails for records that lost a token and have the checksum of what is left."""
    victim.die("control", "interrupt", random.Random(3), 0.1)
    victim.forget_a_token("control")
    with pytest.raises(AssertionError, match="the files differ"):
        victim.check_result("control")
