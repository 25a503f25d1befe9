"""The commands, put together. Imported by `main.run`, and by whoever wants the typer application itself."""

from __future__ import annotations

from typing import Annotated

import typer

from verispec.cli import chat, generate, inspect, models, replay, tune, verify
from verispec.cli.terminal import out

# Newer typer brings its own click, older versions import it: the classes are found through what both export.
UsageMistake: type[Exception] = typer.BadParameter.__mro__[2]
Abort: type[Exception] = typer.Abort

app = typer.Typer(
    help="LLM inference that is fast and bit-for-bit reproducible.",
    epilog='Start with: verispec generate "Why is the sky blue?". Each command has its own --help. An option for '
    "developers, with any command: --traceback shows where an error came from. Exit codes: 0 done, 1 a defect of "
    "verispec or a difference that replay found, 2 bad input or a failed request, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(inspect.score)
app.command()(inspect.audit)
app.command()(tune.tune)
app.command()(verify.verify)
app.command()(replay.replay)
app.add_typer(models.app, name="models")


def _show_version(wanted: bool) -> None:
    if wanted:
        from verispec.cli.version import describe

        out(describe() + "\n")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show version, backend and profile."),
    ] = False,
) -> None:
    """LLM inference that is fast and bit-for-bit reproducible."""
