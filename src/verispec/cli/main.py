"""The `verispec` command. Heavy imports happen inside commands, so that help is instant.

Text goes to stdout, everything else to stderr. A mistake becomes one sentence and exit code 2; --traceback, anywhere
before a `--`, shows where it came from.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from verispec.cli import chat, generate, inspect, models
from verispec.errors import VerispecError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# Newer typer brings its own click, older versions import it: the classes are found through what both export.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="verispec: LLM inference that is fast and bit-for-bit reproducible.",
    epilog="A developer's option, anywhere: --traceback shows where an error came from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(inspect.score)
app.command()(inspect.audit)
app.add_typer(models.app, name="models")


def _show_version(wanted: bool) -> None:
    if wanted:
        from verispec.cli.version import describe

        typer.echo(describe())
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show version, backend and profile."),
    ] = False,
) -> None:
    """LLM inference that is fast and bit-for-bit reproducible."""


def main() -> None:
    """Run the command line."""
    arguments, wants_traceback = _split_traceback(sys.argv[1:])
    try:
        code = app(arguments, prog_name="verispec", standalone_mode=False)
        _flush()
        sys.exit(code if isinstance(code, int) else 0)
    except (VerispecError, _ClickError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has gone (`| head`): nothing more to say, and nothing to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        if wants_traceback:
            raise
        typer.echo(f"verispec: {_sentence(error)}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        if wants_traceback:
            raise
        sys.exit(EXIT_INTERRUPTED)


def _split_traceback(arguments: list[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [a for a in arguments[:end] if a != "--traceback"]
    return kept + arguments[end:], len(kept) < end


def _flush() -> None:
    """Write what is buffered now, so that a full disk or a closed pipe is noticed here and not at exit."""
    sys.stdout.flush()


def _sentence(error: BaseException) -> str:
    """What to say of an error: the message a user can act on."""
    if isinstance(error, _ClickError):
        return str(error.format_message())  # type: ignore[attr-defined]
    if isinstance(error, MemoryError):
        return "not enough memory; a smaller --kv-slots or a smaller model needs less"
    if isinstance(error, OSError) and not isinstance(error, VerispecError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}"
    return str(error)
