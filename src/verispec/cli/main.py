"""The `verispec` command. Heavy imports happen inside commands, so that help is instant.

Text goes to stdout, everything else to stderr. A mistake becomes one sentence and exit code 2; --traceback, anywhere
before a `--`, shows where it came from. Even the commands are imported inside `run`: Ctrl-C may come that early.
"""

import math
import signal
import sys
import time
import traceback
from types import FrameType

EXIT_DEFECT = 1
EXIT_DIFFERENT = 1  # what `replay` found is not what was recorded
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_IMPATIENCE_SECONDS = 1.0


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the shell may have it ignored
        signal.signal(signal.SIGINT, _Interrupts())
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the interpreter's own shutdown is left
    sys.exit(code)


class _Interrupts:
    """Ctrl-C. A second one right after the first is the same wish, and must not disturb a command that is ending."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > _IMPATIENCE_SECONDS:
            self._last = now
            raise KeyboardInterrupt


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code, or raises KeyboardInterrupt."""
    arguments, wants_traceback = _split_traceback(arguments)
    try:
        from verispec.cli import terminal
        from verispec.cli.app import run_command

        terminal.prepare()
        return run_command(arguments)
    except (SystemExit, KeyboardInterrupt):
        raise
    except Exception as error:
        if wants_traceback:
            traceback.print_exc()
        return _report(error)


def _split_traceback(arguments: list[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [a for a in arguments[:end] if a != "--traceback"]
    return kept + arguments[end:], len(kept) < end


def _report(error: Exception) -> int:
    """Say in one sentence what ended a command; returns the exit code."""
    from verispec.cli import terminal
    from verispec.errors import VerispecError

    if isinstance(error, OSError | terminal.OutputError):
        terminal.drop_stdout()
    if isinstance(error, terminal.ReaderGoneError):
        return 0
    if isinstance(error, VerispecError):
        sentence = str(error)
    elif isinstance(error, MemoryError):
        sentence = "not enough memory; a smaller --kv-slots or a smaller model needs less"
    elif isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        sentence = f"{place}{error.strerror or error}"
    else:
        terminal.note(f"verispec: unexpected {type(error).__name__}: {error} (a defect; --traceback shows where)")
        return EXIT_DEFECT
    terminal.note(f"verispec: {sentence}")
    return EXIT_BAD_INPUT
