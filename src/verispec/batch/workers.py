"""Who answers lines: this process, or others. Both tell now and then what unfinished lines have committed.

Processes speak in JSON lines over their standard streams. One that dies is replaced. One whose parent is gone ends at
once, so whatever kills a batch leaves nothing behind that could write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from verispec.batch.answers import Answerer, Options, Result
from verispec.batch.journal import Commit, Sample, StoppedError
from verispec.batch.resume import Progress
from verispec.errors import VerispecError

T = TypeVar("T")
OnCommit = Callable[[int, Commit], None]
_MAX_MESSAGE_NBYTES = 2**30
_GOODBYE_SECONDS = 5.0
_MAX_FUTILE = 3  # processes in a row that die without finishing a line: the next one would do no better
NOTE_SECONDS = 3.0
_GO_ON = "what is finished is kept, and the same command goes on from there"


class Worker(Protocol):
    """Answers up to `size` lines at once. `parts` are what its results depend on."""

    size: int
    parts: Mapping[str, str]

    async def start(self, on_commit: OnCommit) -> None: ...
    def tell(self) -> None:
        """Tell what unfinished lines have committed, if it does not do so by itself."""
        return

    async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result: ...
    async def stop(self) -> None:
        """Tell what unfinished lines have committed, and end."""


class LocalWorker(Worker):
    """This process."""

    def __init__(self, answerer: Answerer) -> None:
        self.size = 2 * answerer.llm.backend.limits.num_seq_rows  # as many wait as run, so that none of these is idle
        self.parts = answerer.parts
        self._answerer = answerer
        self._under_way: dict[int, Progress] = {}
        self._on_commit: OnCommit = lambda index, commit: None

    async def start(self, on_commit: OnCommit) -> None:
        self._on_commit = on_commit

    async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
        progress = self._under_way[index] = Progress(samples)
        result = await self._answerer.answer(index, line, progress, earlier=earlier)
        del self._under_way[index]
        return result

    async def stop(self) -> None:
        self.tell()

    def tell(self) -> None:
        for index, progress in self._under_way.items():
            for commit in progress.news():
                self._on_commit(index, commit)


@dataclass(slots=True)
class _Asked:
    """A line under way, with what it has committed; `answer` is its result, once there is one."""

    line: bytes
    samples: dict[int, Sample]
    earlier: int | None
    answer: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def note(self, commit: Commit) -> None:
        self.samples.setdefault(commit.sample, Sample()).extend(commit.entries, commit.text)

    def to_plain(self) -> dict[str, Any]:
        commits = [Commit(number, 0, s.since(0), s.text).to_plain() for number, s in self.samples.items()]
        return {"data": self.line.decode("latin-1"), "samples": commits, "earlier": self.earlier}


class ProcessWorker(Worker):
    """Another process with a model of its own, made from `loading`, the arguments of LLM.

    When it dies, which `note` is told, a new one goes on with its lines behind what they have committed; not if it has
    said what is wrong, if it has never been ready, or if the last few came to nothing.
    """

    def __init__(
        self, loading: Mapping[str, Any], options: Options, *,
        seconds: float = NOTE_SECONDS, note: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.size = 1
        self.parts: Mapping[str, str] = {}
        self._setup = {"loading": dict(loading), "options": options.to_json(), "seconds": seconds}
        self._note = note
        self._asked: dict[int, _Asked] = {}
        self._num_finished = 0
        self._is_stopping = False
        self._living: asyncio.Task[None] | None = None

    async def start(self, on_commit: OnCommit) -> None:
        self._on_commit = on_commit
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._begin()
        self._living = asyncio.ensure_future(self._live())
        await self._unless_it_ends(self._ready)

    async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
        asked = self._asked[index] = _Asked(line, samples, earlier)
        self._send({"line": index, **asked.to_plain()})
        try:
            return await self._unless_it_ends(asked.answer)
        finally:
            del self._asked[index]

    async def stop(self) -> None:
        if self._living is None:
            return
        self._is_stopping = True
        with contextlib.suppress(TimeoutError, OSError):
            self._send({"stop": True})
            await asyncio.wait_for(self._process.wait(), _GOODBYE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.gather(self._living, return_exceptions=True)

    async def _unless_it_ends(self, awaited: asyncio.Future[T]) -> T:
        """What comes of it; raises what ended the last process, if that is earlier."""
        assert self._living is not None
        await asyncio.wait((awaited, self._living), return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done():
            self._living.result()
        return awaited.result()

    async def _live(self) -> None:
        """Process after process. Raises why there is no other one."""
        num_futile = 0
        while True:
            num_before = self._num_finished
            failure = await self._read()
            ended = f"a worker process ended with code {await self._process.wait()}"
            num_futile = num_futile + 1 if self._num_finished == num_before else 0
            if failure or self._is_stopping or not self._ready.done() or num_futile == _MAX_FUTILE:
                raise StoppedError(failure or f"{ended}; {_GO_ON}")
            self._note(f"{ended}; another one goes on with its lines")
            await self._begin()

    async def _begin(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_MAX_MESSAGE_NBYTES, start_new_session=True,
        )  # fmt: skip
        self._send(self._setup)
        for index, asked in self._asked.items():
            self._send({"line": index, **asked.to_plain()})
        if self._is_stopping:
            self._process.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> str:
        """Hear a process out. Returns what it said is wrong."""
        assert self._process.stdout is not None
        failure = ""
        while message := await self._process.stdout.readline():
            with contextlib.suppress(ValueError):  # cut off: it was killed
                failure = self._take(json.loads(message)) or failure
        return failure

    def _take(self, message: dict[str, Any]) -> str | None:
        """Returns why the process will end, if it says so."""
        match message:
            case {"commit": plain, "line": index}:
                commit = Commit.from_plain(plain)
                self._on_commit(index, commit)
                if index in self._asked:
                    self._asked[index].note(commit)
            case {"result": _, "line": index}:
                self._num_finished += 1
                if index in self._asked and not self._asked[index].answer.done():
                    found = Result(message["result"], tuple(message["receipts"]), message["error"])
                    self._asked[index].answer.set_result(found)
            case {"parts": parts, "size": size}:
                if self._ready.done() and parts != self.parts:
                    raise StoppedError("the model was changed while the batch ran")
                self.parts, self.size = parts, size
                if not self._ready.done():
                    self._ready.set_result(None)
            case {"failure": failure}:
                return str(failure)
        return None


def main() -> None:
    """A process's side. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no message

    def send(message: Mapping[str, Any]) -> None:
        try:
            out.write(json.dumps(message).encode() + b"\n")
            out.flush()
        except OSError:  # the parent is gone
            os._exit(0)

    try:
        asyncio.run(_serve(send))
    except VerispecError as error:
        send({"failure": str(error)})
        os._exit(2)
    os._exit(0)


async def _serve(send: Callable[[Mapping[str, Any]], None]) -> None:
    from verispec.llm import LLM

    setup = json.loads(sys.stdin.buffer.readline())
    llm = LLM(**setup["loading"])
    worker = LocalWorker(Answerer(llm, Options.from_json(setup["options"])))
    await worker.start(lambda index, commit: send({"line": index, "commit": commit.to_plain()}))
    send({"parts": worker.parts, "size": worker.size})
    messages = _messages(asyncio.get_running_loop())
    tasks: set[asyncio.Task[None]] = set()

    async def tell() -> None:
        while True:
            await asyncio.sleep(setup["seconds"])
            worker.tell()

    async def answer(message: Mapping[str, Any]) -> None:
        samples: dict[int, Sample] = {}
        for commit in map(Commit.from_plain, message["samples"]):
            samples.setdefault(commit.sample, Sample()).extend(commit.entries, commit.text)
        index = message["line"]
        try:
            result = await worker.answer(index, message["data"].encode("latin-1"), samples, message["earlier"])
            send({"line": index, **asdict(result)})
        except Exception as error:
            send({"failure": f"{type(error).__name__}: {error}"})
            os._exit(1)

    tasks.add(asyncio.ensure_future(tell()))
    while not (message := await messages.get()).get("stop"):
        task = asyncio.ensure_future(answer(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await worker.stop()
    os._exit(0)


def _messages(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[dict[str, Any]]:
    """What comes in, read on a thread: at its end, the parent's death, the process ends even while a pass runs."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(queue.put_nowait, json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return queue


if __name__ == "__main__":
    main()
