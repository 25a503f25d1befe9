"""The `verispec` command. Heavy imports happen inside commands, so that help is instant.

Text goes to stdout, everything else to stderr. A VerispecError becomes one line and exit code 2.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from verispec import __version__
from verispec.config import DEFAULTS
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from verispec.types import SampleOutput

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="verispec: LLM inference that is fast and bit-for-bit reproducible.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verispec {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """LLM inference that is fast and bit-for-bit reproducible."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if absent or '-'.")] = None,
    model: Annotated[
        str, typer.Option("-m", "--model", help="A known name, a GGUF file or a folder with safetensors.")
    ] = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set with this probability; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the best; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise; random, and shown, if absent.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    drafter: Annotated[str, typer.Option(help="none or ngram; changes speed, never the output.")] = "ngram",
    deterministic: Annotated[
        bool, typer.Option(help="Commit only what canonical passes confirm; off allows other bits.")
    ] = True,
    kv_slots: Annotated[int, typer.Option(help="K/V capacity in tokens.")] = DEFAULTS.num_slots,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only the text.")] = False,
) -> None:
    """Stream the model's answer to a prompt, then one line of figures on stderr."""
    from verispec.types import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        deterministic=deterministic,
    )
    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw turns off")
    text = _read_prompt(prompt)

    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    with LoadingDisplay(quiet=quiet) as display:
        llm = LLM(model, drafter=drafter, kv_slots=kv_slots, progress=display.update)
    if raw:
        events = llm.stream(text, params)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        events = llm.chat_stream([*messages, {"role": "user", "content": text}], params)
    output: SampleOutput | None = None
    try:
        for event in events:
            sys.stdout.write(event.text)
            sys.stdout.flush()
            output = event.output
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if output is not None and output.error is not None:
        raise VerispecError(output.error)
    if output is not None and not quiet:
        typer.echo(_figures(output, llm.profile), err=True)


models_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(models_app, name="models")


@models_app.command()
def pull(name: Annotated[str, typer.Argument(help="A known model's name.")] = "smollm2-135m") -> None:
    """Fetch a model into the cache, if it is not there, and print its path."""
    from verispec.cli.progress import LoadingDisplay
    from verispec.model.hub import resolve

    with LoadingDisplay() as display:
        path = resolve(name, progress=lambda stage, done, total: display.update(stage, done / max(1, total)))
    typer.echo(path)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise InputError("no prompt: give one as an argument, or pipe it to stdin")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise InputError("the prompt is empty")
    return prompt


def _figures(output: SampleOutput, profile: str) -> str:
    """One line: tokens, speed, tokens per target pass, drafts, seed, digest, profile."""
    stats = output.stats
    seconds = (stats.finish_time or 0.0) - stats.arrival_time
    passes = max(1, stats.passes + stats.fast_passes)
    tokens = len(output.token_ids)
    return (
        f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tok/s, {tokens / passes:.2f} per pass, "
        f"drafts {stats.accepted}/{stats.drafted} accepted, seed {output.seed}, digest {output.digest[:16]}, "
        f"profile {profile}"
    )


def main() -> None:
    """Run the command line."""
    try:
        app(standalone_mode=True)
    except VerispecError as error:
        typer.echo(f"verispec: {error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing more to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
