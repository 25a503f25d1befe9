"""Batches whose worker is a toy: stopped at every single thing they do to the disk, they end with the same bytes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verispec.batch.answers import Options, Result
from verispec.batch.journal import Commit, Sample, StoppedError
from verispec.batch.run import Batch, Summary
from verispec.batch.workers import OnCommit, Worker
from verispec.errors import InputError, VerispecError
from verispec.types import TokenLogprob, TokenLogprobs

NUM_TOKENS = 3
Act = Callable[..., Any]


class Toy(Worker):
    """Answers with as many tokens as it has steps, telling of each; `wrong` ones forget what they are resumed from."""

    def __init__(self, size: int = 2, *, wrong: bool = False, parts: dict[str, str] | None = None) -> None:
        self.size = size
        self.parts = parts or {"model": "toy"}
        self._wrong = wrong
        self.num_resumed = 0

    async def start(self, on_commit: OnCommit) -> None:
        self._on_commit = on_commit

    async def stop(self) -> None: ...

    async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
        sample = samples.get(0) or Sample()
        self.num_resumed += len(sample)
        tokens = [] if self._wrong else list(sample.token_ids)
        for at in range(len(sample), NUM_TOKENS):
            await asyncio.sleep(0)
            tokens.append(10 * index + at)
            entry = TokenLogprobs.of([TokenLogprob(tokens[-1], -0.5)])
            self._on_commit(index, Commit(0, at, entry, "x"))
        found = {"index": index, "text": line.decode(), "tokens": tokens}
        return Result(json.dumps(found), (f'"r{index}"',), "no" if b"bad" in line else None)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run(folder: Path, worker: Worker | None = None, **options: Any) -> Summary:
    """One life of a batch, as the command runs it."""
    chosen = Options(receipts=True)
    with Batch(folder / "in", folder / "out", chosen, receipts=folder / "receipts", **options) as batch:
        if batch.summary is not None:
            return batch.summary
        batch.run([worker or Toy()])
        return batch.publish()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class CrashError(BaseException):
    """The machine stops here."""


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, at: int, *, half: bool = False) -> Iterator[list[str]]:
    """Stop at the thing number `at` that is done to the disk: before it, or with half of what was to be written."""
    done: list[str] = []

    def counted(name: str, act: Act) -> Act:
        def do(*arguments: Any, **more: Any) -> Any:
            done.append(name)
            if len(done) > at:
                if len(done) == at + 1 and half and name == "pwrite":
                    file, data, start = arguments
                    act(file, bytes(data)[: len(data) // 2], start)
                raise CrashError  # and nothing more is done: nobody is left to clean up
            return act(*arguments, **more)

        return do

    with monkeypatch.context() as patch:
        for owner, name in ((os, "pwrite"), (os, "fsync"), (os, "ftruncate"), (Path, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, counted(name, getattr(owner, name)))
        yield done


@pytest.mark.parametrize("half", [False, True])
def test_crashed_at_any_point_the_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    lines = ("a", "b", "c is bad", "d")
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole" / "in", *lines)
    with crashing(monkeypatch, 10**9) as done:
        summary = run(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    assert set(whole) == {"in", "out", "out.journal", "receipts"}
    assert len(done) > 4 * NUM_TOKENS
    num_resumed = 0
    for at in range(len(done)):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        write(folder / "in", *lines)
        with pytest.raises(CrashError), crashing(monkeypatch, at, half=half):
            run(folder)
        worker = Toy()
        assert run(folder, worker) == summary
        num_resumed += worker.num_resumed
        assert files(folder) == whole, (at, done[at])
    assert num_resumed


def test_control_a_worker_that_forgets_what_it_resumes_from_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", "a", "b")
    with pytest.raises(CrashError), crashing(monkeypatch, 6):
        run(tmp_path)
    run(tmp_path, Toy(wrong=True))
    tokens = [json.loads(line)["tokens"] for line in (tmp_path / "out").read_text().splitlines()]
    assert tokens != [[0, 1, 2], [10, 11, 12]]


def test_a_full_disk_anywhere_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", "a", "b", "c")
    run(tmp_path)
    whole = files(tmp_path)
    pwrite = os.pwrite
    said: list[str] = []
    for room in range(0, 1200, 40):
        run_folder = tmp_path / f"{room}"
        run_folder.mkdir()
        write(run_folder / "in", "a", "b", "c")

        def bounded(file: int, data: memoryview, start: int, room: int = room) -> int:
            if start >= room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(file, data[: room - start], start)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", bounded)
            try:
                run(run_folder)
            except StoppedError as error:
                said.append(str(error))
        run(run_folder)
        assert files(run_folder) == {name: whole[name] for name in ("in", "out", "out.journal", "receipts")}
    assert len(said) > 20
    assert all("No space left on device" in each and "the same command goes on" in each for each in said)


def test_no_room_for_the_output_keeps_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", "a", "b")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(StoppedError, match="all lines are finished and kept"):
            run(tmp_path)
    assert set(files(tmp_path)) == {"in", "out.journal"}
    assert run(tmp_path, Failing(0)).num_lines == 2


def test_unordered_is_the_same_after_sorting(tmp_path: Path) -> None:
    class Backwards(Toy):
        async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
            await asyncio.sleep(0.05 * (3 - index))
            return await super().answer(index, line, samples, earlier)

    for name in ("ordered", "unordered"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "in", "a", "b", "c")
        run(tmp_path / name, Backwards(3), unordered=name == "unordered")
    ordered, unordered = ((tmp_path / name / "out").read_text() for name in ("ordered", "unordered"))
    assert ordered != unordered
    assert ordered == "".join(f"{line}\n" for line in sorted(unordered.splitlines()))


def test_what_is_not_this_batch_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "a", "b")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, Failing(after=1))
    with pytest.raises(InputError, match="its model"):
        run(tmp_path, Toy(parts={"model": "other"}))
    with (
        pytest.raises(InputError, match="its options"),
        Batch(tmp_path / "in", tmp_path / "out", Options(raw=True)),
    ):
        pass
    write(tmp_path / "in", "a", "c")
    with pytest.raises(InputError, match="its input"):
        run(tmp_path)
    write(tmp_path / "in", "a", "b")
    assert run(tmp_path).num_failed == 0


class Failing(Toy):
    """Something is wrong that no line is to blame for."""

    def __init__(self, after: int) -> None:
        super().__init__(1)
        self._left = after

    async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
        if not self._left:
            raise ZeroDivisionError
        self._left -= 1
        return await super().answer(index, line, samples, earlier)


def test_a_batch_that_is_complete_stays_so(tmp_path: Path) -> None:
    write(tmp_path / "in", "a", "bad")
    summary = run(tmp_path)
    assert (summary.num_failed, summary.first_failure) == (1, "line 2: no")
    before = files(tmp_path)
    assert run(tmp_path, Failing(0)) == summary
    assert files(tmp_path) == before
    (tmp_path / "out").write_text("edited")
    with pytest.raises(InputError, match="not what this batch has written"):
        run(tmp_path)
    run(tmp_path, restart=True)
    assert files(tmp_path) == before


def test_receipts_of_a_complete_batch_are_not_missing_in_silence(tmp_path: Path) -> None:
    write(tmp_path / "in", "a")
    run(tmp_path)
    (tmp_path / "receipts").unlink()
    with pytest.raises(InputError, match="receipts: it is not there, and this batch is complete"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["in", "out", "out.journal", "link", "folder", "missing/receipts"])
def test_receipts_go_to_a_file_of_their_own(tmp_path: Path, name: str) -> None:
    """Which is found out before anything is answered."""
    write(tmp_path / "in", "a")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=f"--receipts .*{name}: "):
        Batch(tmp_path / "in", tmp_path / "out", Options(receipts=True), receipts=tmp_path / name)
    assert (tmp_path / "in").read_bytes() == b"a\n"
    assert not (tmp_path / "out.journal").exists()


def test_what_was_there_before_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "in", "a")
    (tmp_path / "out").write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        run(tmp_path)
    assert files(tmp_path) == {"in": b"a\n", "out": b"precious"}


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "in", "a", "b")

    class Meddling(Toy):
        async def stop(self) -> None:
            (tmp_path / "in").write_text("a\nother\n")

    with pytest.raises(InputError, match="changed while"):
        run(tmp_path, Meddling())
    assert not (tmp_path / "out").exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "a")
    with (
        Batch(tmp_path / "in", tmp_path / "out", Options()),
        pytest.raises(VerispecError, match="another batch"),
    ):
        run(tmp_path)


def test_ctrl_c_notes_what_is_under_way(tmp_path: Path) -> None:
    write(tmp_path / "in", "a", "b")

    class Interrupted(Toy):
        async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
            raise AssertionError

        async def stop(self) -> None:
            self._on_commit(1, Commit(0, 0, TokenLogprobs((10,), (-0.5,)), "x"))

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupted())
    assert signal.getsignal(signal.SIGINT) is before
    worker = Toy()
    run(tmp_path, worker)
    assert worker.num_resumed == 1


def test_a_sample_of_lines_is_compared(tmp_path: Path) -> None:
    write(tmp_path / "in", *map(str, range(50)))
    with Batch(tmp_path / "in", tmp_path / "out", Options()) as batch:
        batch.run([Toy()])
        assert len(batch.sample(0.1)) == 5
        assert batch.sample(0.1) == batch.sample(0.1) != batch.sample(0.12)
        assert len(batch.sample(1e-9)) == 1
        assert batch.differing(Toy(), 0.1) == []

        class Wrong(Toy):
            async def answer(self, index: int, line: bytes, samples: Any, earlier: int | None) -> Result:
                return await super().answer(index, b"?" if index == batch.sample(0.1)[2] else line, samples, earlier)

        assert batch.differing(Wrong(), 0.1) == [batch.sample(0.1)[2]]
        assert batch.publish([4]).differing == (4,)
