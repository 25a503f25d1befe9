"""A batch from its first line to its file, over any number of lives.

>>> with Batch(source, target, options) as batch:               # refuses what belongs to another batch
...     batch.run([LocalWorker(Answerer(llm, options))])
...     summary = batch.publish()

The file appears when all lines are finished, whole; until then `target` + ".journal" has what there is. Afterwards the
journal holds one record, by which the same batch started again sees that there is nothing to do.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from verispec.batch.answers import Options, parts_of
from verispec.batch.journal import Journal, StoppedError, atomic
from verispec.batch.lines import PARQUET, derived, find_repeated, import_parquet, open_lines, write_parquet
from verispec.batch.workers import NOTE_SECONDS, Worker
from verispec.errors import InputError

JOURNAL_SUFFIX = ".journal"
_STOPS = (signal.SIGINT, signal.SIGTERM)
_SHARE_DIGITS = 12  # of a hash, in hex, that decides whether a line is in a sample


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of a batch: how many lines it has, how many failed, what the first of these said, which differed."""

    done: str  # the SHA-256 of the output
    num_lines: int
    num_failed: int = 0
    first_failure: str = ""
    differing: tuple[int, ...] = ()


def _check_receipts(path: Path, others: Sequence[Path]) -> None:
    """Raise InputError, before anything is answered, for a file that receipts cannot go to."""
    if any(path.resolve() == other.resolve() for other in others):
        raise InputError(f"--receipts {path}: it is another file of this batch")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise InputError(f"--receipts {path}: is not a file that can be written")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"--receipts {path}: its folder is not there, or cannot be written to")


class Batch:
    """Lines of a file, where their results go, and the journal between them. Locked as long as it is open."""

    def __init__(
        self, source: Path, target: Path, options: Options, *,
        receipts: Path | None = None, unordered: bool = False, restart: bool = False, seconds: float = NOTE_SECONDS,
    ) -> None:  # fmt: skip
        self._target = target
        self._receipts = receipts
        self._unordered = unordered
        self._seconds = seconds
        if target.suffix == PARQUET:
            import_parquet()
        place = target.with_name(target.name + JOURNAL_SUFFIX)
        if receipts is not None:
            _check_receipts(receipts, (source, target, place))
        if target.is_dir() or (target.exists() and not place.exists() and not restart):
            raise InputError(f"{target}: it exists already; give another name, or --restart to replace it")
        with ExitStack() as opened:
            self.lines = opened.enter_context(closing(open_lines(source)))
            self.journal = opened.enter_context(Journal.open(place, fresh=restart))
            self._parts = {"input": self.lines.sha256, **parts_of(options)}
            self.journal.check(self._parts)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    @property
    def summary(self) -> Summary | None:
        """Of a batch that is complete already; raises InputError if its output is not what was written then."""
        header = self.journal.header
        if "done" not in header:
            return None
        if not self._target.exists() or _digest(self._target) != header["done"]:
            raise InputError(f"{self._target}: it is not what this batch has written; --restart makes it anew")
        if self._receipts is not None and not self._receipts.exists():
            raise InputError(
                f"--receipts {self._receipts}: it is not there, and this batch is complete; --restart makes both anew"
            )
        found = {name: header[name] for name in Summary.__dataclass_fields__}
        return Summary(**{**found, "differing": tuple(header["differing"])})

    def run(self, workers: Sequence[Worker], *, on_finish: Callable[[int], None] = lambda num_finished: None) -> None:
        """Answer what is left. Raises KeyboardInterrupt, after noting everything, if it is told to stop."""
        handlers = {number: signal.getsignal(number) for number in _STOPS} if _is_main_thread() else {}
        try:
            asyncio.run(self._run(workers, on_finish))
        except BaseExceptionGroup as group:  # what one feeder raised ends the others
            raise group.exceptions[0] from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def differing(self, worker: Worker, share: float) -> list[int]:
        """Answer a share of the lines once more, from their beginning, and return those that come out otherwise."""
        return asyncio.run(self._differing(worker, self.sample(share)))

    def sample(self, share: float) -> list[int]:
        """Lines that stand for all: the same ones in every life, at least one."""
        ranks = sorted((derived(self.lines.sha256, str(i))[:_SHARE_DIGITS], i) for i in range(len(self.lines)))
        return sorted(i for _, i in ranks[: max(1, round(share * len(ranks)))])

    def publish(self, differing: Sequence[int] = ()) -> Summary:
        """Make the output out of the journal."""
        self.lines.check_unchanged()
        if self._receipts is not None:
            with self._written(self._receipts) as file:
                for record in self._records():
                    file.writelines(f"{receipt}\n".encode() for receipt in record["receipts"])
        with self._written(self._target) as file:
            if self._target.suffix == PARQUET:
                write_parquet(file, (record["result"] for record in self._records()))
            else:
                file.writelines(f"{record['result']}\n".encode() for record in self._records())
        errors = {i: self.journal.record(i)["error"] for i in range(len(self.lines))}
        failed = [i for i, error in errors.items() if error is not None]
        first = f"line {failed[0] + 1}: {errors[failed[0]]}" if failed else ""
        summary = Summary(_digest(self._target), len(self.lines), len(failed), first, tuple(differing))
        self.journal.replace(asdict(summary))
        return summary

    @contextmanager
    def _written(self, path: Path) -> Iterator[Any]:
        """A file that takes its place whole. What cannot be written is named, and nothing is lost."""
        try:
            with atomic(path) as file:
                yield file
        except OSError as error:
            raise StoppedError(
                f"{path}: {error.strerror or error}; all lines are finished and kept in {self.journal.path}, "
                "and the same command goes on from there"
            ) from error

    def _records(self) -> Iterator[dict[str, Any]]:
        finished = self.journal.finished
        return map(self.journal.record, finished if self._unordered else sorted(finished))

    async def _run(self, workers: Sequence[Worker], on_finish: Callable[[int], None]) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in _STOPS if _is_main_thread() else ():
            loop.add_signal_handler(number, stopped.set)
        work = asyncio.ensure_future(self._work(workers, on_finish))
        tasks = (work, asyncio.ensure_future(self._note(workers)), asyncio.ensure_future(stopped.wait()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if work not in done:
                raise KeyboardInterrupt
        finally:
            for worker in workers:  # before work is cancelled, which forgets what is under way
                await worker.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.journal.sync()

    async def _work(self, workers: Sequence[Worker], on_finish: Callable[[int], None]) -> None:
        first, *others = workers
        await first.start(self.journal.commit)  # alone: it may have to fetch the model
        await asyncio.gather(*(worker.start(self.journal.commit) for worker in others))
        for worker in workers:
            self.journal.begin({**self._parts, **worker.parts})
        repeated = find_repeated(self.lines)
        left = deque(i for i in range(len(self.lines)) if i not in self.journal.finished)

        async def feed(worker: Worker) -> None:
            while left:
                index = left.popleft()
                result = await worker.answer(index, self.lines[index], self.journal.samples(index), repeated.get(index))
                self.journal.finish(index, asdict(result))
                on_finish(len(self.journal.finished))

        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                for _ in range(worker.size):
                    tasks.create_task(feed(worker))

    async def _note(self, workers: Sequence[Worker]) -> None:
        """Now and then see to it that little would be lost."""
        while True:
            await asyncio.sleep(self._seconds)
            for worker in workers:
                worker.tell()
            await asyncio.to_thread(self.journal.sync)

    async def _differing(self, worker: Worker, sample: Sequence[int]) -> list[int]:
        await worker.start(lambda index, commit: None)
        repeated = find_repeated(self.lines)
        try:
            results = await asyncio.gather(*(worker.answer(i, self.lines[i], {}, repeated.get(i)) for i in sample))
        finally:
            await worker.stop()
        return [i for i, r in zip(sample, results, strict=True) if r.result != self.journal.record(i)["result"]]


def _is_main_thread() -> bool:
    """Only there signals can be had."""
    return threading.current_thread() is threading.main_thread()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
