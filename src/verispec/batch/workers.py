"""Who answers lines: this process, or others. Both tell now and then what unfinished lines have committed.

Processes speak in JSON lines over their standard streams. One whose parent is gone ends at once, so whatever kills a
batch leaves nothing behind that could write.
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
from dataclasses import asdict
from typing import Any, Protocol

from verispec.batch.answers import Answerer, Options, Result
from verispec.batch.journal import Commit, Sample, StoppedError
from verispec.batch.resume import Progress
from verispec.errors import VerispecError

OnCommit = Callable[[int, Commit], None]
_MAX_MESSAGE_NBYTES = 2**30
_GOODBYE_SECONDS = 5.0
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


class ProcessWorker(Worker):
    """Another process with a model of its own, made from `loading`, the arguments of LLM."""

    def __init__(self, loading: Mapping[str, Any], options: Options, *, seconds: float = NOTE_SECONDS) -> None:
        self.size = 1
        self.parts: Mapping[str, str] = {}
        self._setup = {"loading": dict(loading), "options": options.to_json(), "seconds": seconds}
        self._answers: dict[int, asyncio.Future[Result]] = {}
        self._ready: asyncio.Future[None] | None = None

    async def start(self, on_commit: OnCommit) -> None:
        self._on_commit = on_commit
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_MAX_MESSAGE_NBYTES, start_new_session=True,
        )  # fmt: skip
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read())
        self._send(self._setup)
        await self._ready

    async def answer(self, index: int, line: bytes, samples: dict[int, Sample], earlier: int | None) -> Result:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._answers[index] = answer
        before = [Commit(number, 0, s.since(0), s.text).to_plain() for number, s in samples.items()]
        self._send({"line": index, "data": line.decode("latin-1"), "samples": before, "earlier": earlier})
        try:
            return await answer
        finally:
            del self._answers[index]

    async def stop(self) -> None:
        if self._ready is None:
            return
        with contextlib.suppress(TimeoutError, OSError):
            self._send({"stop": True})
            await asyncio.wait_for(self._process.wait(), _GOODBYE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._reading

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        failure = ""
        try:
            while message := await self._process.stdout.readline():
                with contextlib.suppress(ValueError):  # cut off: it was killed
                    failure = self._take(json.loads(message)) or failure
            code = await self._process.wait()
            error: Exception = StoppedError(failure or f"a worker process ended with code {code}; {_GO_ON}")
        except Exception as found:  # the journal has no room, say
            error = found
        for waiting in (self._ready, *self._answers.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)

    def _take(self, message: dict[str, Any]) -> str | None:
        """Returns why the process will end, if it says so."""
        match message:
            case {"commit": plain, "line": index}:
                self._on_commit(index, Commit.from_plain(plain))
            case {"result": _, "line": index}:
                if (answer := self._answers.get(index)) is not None and not answer.done():
                    answer.set_result(Result(message["result"], tuple(message["receipts"]), message["error"]))
            case {"parts": parts, "size": size} if self._ready is not None:
                self.parts, self.size = parts, size
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
