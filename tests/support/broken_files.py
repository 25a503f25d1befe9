"""One broken model on disk, and the judge of what verispec makes of it.

A broken file must work or be refused with a `VerispecError` of one or two printable lines that names the file, in less
than a second and in memory that the file's size justifies. Everything else is a complaint.
"""

import functools
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from verispec.errors import VerispecError
from verispec.model import open_checkpoint
from verispec.model.architecture import expected_tensors
from verispec.model.load import load_tokenizer
from verispec.text.chat import ChatTemplate

MAX_SECONDS = 2.0  # of processor time; a chat template may take half of it
MAX_MESSAGE_CHARS = 700
# Tokens, keys and JSON values of a few bytes are Python objects of some fifty; the floor is for templates and imports.
PEAK_PER_FILE_BYTE = 24
PEAK_FLOOR_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Files of a folder by name, and which of them (or ".") is opened. Without a verdict either outcome is right."""

    name: str
    target: str
    files: Mapping[str, bytes] = field(repr=False)
    must_work: bool = False
    must_fail: bool = False
    floor_nbytes: int = PEAK_FLOOR_NBYTES

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.files.values()))


def open_fully(path: Path) -> None:
    """Everything that generation does with a model file before its first pass."""
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        for name in expected_tensors(checkpoint.architecture):
            checkpoint.tensor(name)
    tokenizer.decode(tokenizer.encode("ab b\n"))
    if tokenizer.chat_template is not None:
        _render(tokenizer.chat_template, tuple(tokenizer.special_tokens.items()))


@functools.lru_cache(maxsize=4)
def _render(template: str, special_tokens: tuple[tuple[str, str], ...]) -> None:
    """Most cases share one sound template, whose compilation would take half of all the time."""
    ChatTemplate(template).render([{"role": "user", "content": "ab"}], special_tokens=dict(special_tokens))


@dataclass(frozen=True, slots=True)
class Outcome:
    error: BaseException | None
    seconds: float
    peak_nbytes: int


def observe(action: Callable[[], None]) -> Outcome:
    """Run it, with its peak of memory if `tracemalloc` has been started."""
    error: BaseException | None = None
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    before_nbytes, _ = tracemalloc.get_traced_memory()
    start = time.process_time()
    try:
        action()
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # panics of Rust libraries are no `Exception`
        error = caught.with_traceback(None)
    seconds = time.process_time() - start
    _, peak_nbytes = tracemalloc.get_traced_memory()
    return Outcome(error, seconds, peak_nbytes - before_nbytes)


def complaints(outcome: Outcome, *, folder: Path, nbytes: int, floor_nbytes: int = PEAK_FLOOR_NBYTES) -> list[str]:
    """What is wrong with how a file of this size in this folder was met."""
    found = []
    error, message = outcome.error, str(outcome.error)
    if error is not None and not isinstance(error, VerispecError):
        found.append(f"{type(error).__name__}: {message[:200]}")
    elif error is not None:
        plain = message.replace(str(folder), "")
        # The chat template and the text to encode are no files of their own.
        if str(folder) not in message and not message.startswith(
            ("the chat template", "the model has no chat template", "text to encode")
        ):
            found.append(f"does not name the file: {message[:200]}")
        if plain.count("\n") > 1 or not plain.replace("\n", "").isprintable() or len(plain) > MAX_MESSAGE_CHARS:
            found.append(f"not a line or two: {plain[:200]!r}")
    if outcome.seconds > MAX_SECONDS:
        found.append(f"takes {outcome.seconds:.1f} s")
    if outcome.peak_nbytes > floor_nbytes + PEAK_PER_FILE_BYTE * nbytes:
        found.append(f"allocates {outcome.peak_nbytes} bytes for {nbytes} bytes of files")
    return found


class Bench:
    """A folder that holds one case at a time; files that two cases share are not written again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[str, bytes] = {}

    def judge(self, case: Case) -> list[str]:
        """Lay the case out, open it, and say what is wrong."""
        # Removed before they are written: some file systems write through when a file is overwritten.
        for name, content in self._written.items():
            if case.files.get(name) != content:
                (self.folder / name).unlink()
        for name, content in case.files.items():
            if self._written.get(name) != content:
                (self.folder / name).write_bytes(content)
        self._written = dict(case.files)
        path = self.folder / case.target
        outcome = observe(lambda: open_fully(path))
        if outcome.seconds > MAX_SECONDS:
            outcome = replace(outcome, seconds=untraced_seconds(lambda: open_fully(path)))
        found = complaints(outcome, folder=self.folder, nbytes=case.nbytes, floor_nbytes=case.floor_nbytes)
        if case.must_work and outcome.error is not None:
            found.append(f"refused: {outcome.error}")
        if case.must_fail and outcome.error is None:
            found.append("accepted")
        return [f"{case.name}: {complaint}" for complaint in found]


def untraced_seconds(action: Callable[[], None]) -> float:
    """Tracing makes Python several times slower; what seems slow is timed again without it."""
    tracemalloc.stop()
    try:
        return observe(action).seconds
    finally:
        tracemalloc.start()
