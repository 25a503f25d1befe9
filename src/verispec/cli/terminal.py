"""The standard streams and files as every command uses them: UTF-8 comes in, text goes out, a failure is one sentence.

Text goes to stdout and nothing else does; notes go to stderr. Knows nothing of models.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from verispec.errors import InputError, VerispecError
from verispec.strict_json import decode

MAX_INPUT_NBYTES = 1 << 30
_COLUMNS = 80  # of lines that go elsewhere than to a terminal
# A model's text may hold terminal commands; on a terminal they are shown as what they are.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_C1 = re.compile(r"[\x7f-\x9f]")


class OutputError(VerispecError):
    """What was to be written could not be written: a full disk, say."""


class ReaderGoneError(OutputError):
    """Nobody reads any more (`| head`), which is no mistake."""


def prepare() -> None:
    """Let no character that the streams cannot show stop the program, and bad bytes of stdin come in as marks."""
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)
    if sys.stdout is None:
        raise OutputError("stdout is closed; there is nowhere to write to")


def safe(text: str) -> str:
    """Text for a terminal: control characters other than newline and tab as escapes."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def out(text: str) -> None:
    """Write to stdout now; on a terminal without the text's control characters."""
    styled_out(safe(text) if sys.stdout.isatty() else text)


def styled_out(text: str) -> None:
    """Write to stdout now, escape sequences included."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError("the reader of stdout has gone") from error
    except OSError as error:
        raise OutputError(f"stdout: {error.strerror or error}") from error


def out_json(value: dict[str, Any]) -> None:
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, ensure_ascii=not is_utf8)
    # JSON escapes most control characters; a terminal would obey the others.
    styled_out(_C1.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def note(text: str) -> None:
    """A line on stderr. Where stderr is closed or full there is nobody to tell."""
    styled_note(safe(text))


def styled_note(text: str, *, end: str = "\n") -> None:
    """`note` for text that is safe already and holds colours of our own."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text + end)
            sys.stderr.flush()


def drop_stdout() -> None:
    """Send what is still buffered nowhere: the reader has gone or the disk is full, and exiting must not try again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def shows_colour(stream: TextIO | None = None) -> bool:
    """Whether stdout, or the stream given, is a terminal that knows colours."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM", "dumb") != "dumb"


def columns() -> int:
    """How long a line of stderr may be."""
    return shutil.get_terminal_size().columns if sys.stderr is not None and sys.stderr.isatty() else _COLUMNS


def stdin_is_terminal() -> bool:
    """Whether a person types; False where stdin is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_bytes(file: str, *, name: str) -> bytes:
    """A whole file; `-` is stdin. `name` is what messages call it."""
    try:
        if file != "-":
            with Path(file).open("rb") as source:
                data = source.read(MAX_INPUT_NBYTES + 1)
        elif sys.stdin is None:
            raise InputError(f"{name}: stdin is closed")
        else:
            data = sys.stdin.buffer.read(MAX_INPUT_NBYTES + 1)
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from error
    if len(data) > MAX_INPUT_NBYTES:
        raise InputError(f"{name}: more than {MAX_INPUT_NBYTES} bytes")
    return data


def read_text(file: str, *, name: str) -> str:
    """A whole file as text; a byte order mark is no part of it."""
    return decode(read_bytes(file, name=name), name=name)


def checked(text: str, *, name: str) -> str:
    """Text from an argument or a typed line: Python marks bytes that are not UTF-8 by lone surrogates."""
    try:
        decode(text.encode("utf-8", "surrogateescape"), name=name)
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: character {error.start} is half of a surrogate pair, not text") from error
    return text


def check_plot(path: str | None, *, extra: str) -> None:
    """Raise InputError for what would only fail in the end; `extra` is the install that brings matplotlib."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib: pip install 'verispec[{extra}]'") from error
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise InputError(f"--plot {path}: the name of a plot ends in .png")
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(target if target.exists() else folder, os.W_OK):
        raise InputError(f"--plot {path}: is not a file that can be written")


def write_plot(path: str | None, draw: Callable[[Path], None]) -> None:
    """Let `draw` make the picture, if one is wanted."""
    if path is None:
        return
    try:
        draw(Path(path))
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)
        raise OutputError(f"--plot {path}: {error.strerror or error}") from error
    note(f"plot in {path}")
