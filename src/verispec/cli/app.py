"""The commands, put together; what is asked of no command in particular; and what shells complete."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verispec import __version__
from verispec.cli import batch, bench, chat, generate, inspect, keys, models, replay, serve, tune, verify
from verispec.cli.parser import PROGRAM, Command, argument, nearest
from verispec.cli.terminal import out, stdin_is_terminal
from verispec.errors import InputError

EXIT_NOTHING_ASKED = 2
_HEAD = f"""\
Usage: {PROGRAM} COMMAND [OPTION ...]

LLM inference that is fast and bit-for-bit reproducible.
Start with: {PROGRAM} generate "Why is the sky blue?"

Commands:"""
_FOOT = f"""
{PROGRAM} COMMAND --help describes a command. Beside that:
  --version    version, backend and profile
  --traceback  with any command: show where an error came from

Exit codes: 0 done, 1 a defect of {PROGRAM} or a difference that replay found,
2 bad input or a failed request, 130 interrupted.
"""


@dataclass(frozen=True, kw_only=True)
class Shell:
    title: ClassVar = "Arguments"
    shell: str = argument(metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def completion(shell: Shell) -> None:
    """Print what makes a shell complete commands, options and values.

    In ~/.bashrc or ~/.zshrc (after compinit): eval "$(verispec completion bash)", or zsh. In
    ~/.config/fish/config.fish: verispec completion fish | source
    """
    out(Path(__file__).with_name(f"completion.{shell.shell}").read_text(encoding="utf-8"))


_NOT_IN_VERIFY = frozenset(
    "repetition_penalty presence_penalty frequency_penalty stop ignore_eos n deterministic max_len".split()
)
COMMANDS = {
    command.name: command
    for command in (
        Command(generate.generate),
        Command(chat.chat, defaults=chat.DEFAULTS, without=frozenset(("ignore_eos", "n"))),
        Command(batch.batch, without=frozenset(("deterministic",))),
        Command(serve.serve),
        Command(inspect.score, without=frozenset(("max_len",))),
        Command(inspect.audit, without=frozenset(("kv_slots", "max_len"))),
        Command(tune.tune, without=frozenset(("kv_slots", "max_len"))),
        Command(verify.verify, defaults={"max_tokens": 48, "temperature": 1.0, "seed": 0}, without=_NOT_IN_VERIFY),
        Command(replay.replay, defaults={"model": None}, without=frozenset(("max_len",))),
        Command(bench.bench, defaults=bench.DEFAULTS, without=bench.WITHOUT),
        Command(models.models),
        Command(keys.keys),
        Command(completion),
    )
}
_RUN = "run"


def run_command(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if len(words) > 1 and words[1] in COMMANDS:
            return COMMANDS[words[1]](["--help"])
        out(_overview())
        return 0 if words else EXIT_NOTHING_ASKED
    name, *rest = words
    if name == "--version":
        out(_version() + "\n")
        return 0
    if name == completion.__name__ and rest[:2] == ["words", "--"]:
        out("".join(f"{each}\n" for each in candidates(rest[2:])))
        return 0
    if name == _RUN:
        name = _what_run_is(rest)
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise InputError(f"unknown {kind} {name}{nearest(name, [*COMMANDS, '--version', '--help'])}")
    return COMMANDS[name](rest)


def _overview() -> str:
    width = min(shutil.get_terminal_size().columns, 100) - 1
    rows = [(command.name, command.summary) for command in COMMANDS.values()]
    rows.insert(2, (_RUN, "`generate` if there is a prompt, otherwise `chat`."))
    lines = [
        textwrap.fill(text, width, initial_indent=f"  {name:12}", subsequent_indent=" " * 14) for name, text in rows
    ]
    return "\n".join([_HEAD, *lines, _FOOT])


def _what_run_is(words: Sequence[str]) -> str:
    """`run` is `chat` for somebody at a terminal who gives no prompt, and otherwise `generate`."""
    has_prompt = {"prompt", "p", "prompts"} & set(COMMANDS["generate"].parser().parse(words))
    return "generate" if has_prompt or not stdin_is_terminal() else "chat"


def candidates(words: Sequence[str]) -> list[str]:
    """What the last of these words, perhaps empty, can become."""
    *before, begun = words or [""]
    if not before:
        known: Sequence[str] = [*COMMANDS, _RUN, "--help", "--version"]
    elif before[0] not in COMMANDS and before[0] != _RUN:
        return []
    else:
        known = COMMANDS.get(before[0], COMMANDS["generate"]).parser().completions(before[1:], begun)
    return [each for each in known if each.startswith(begun)]


def _version() -> str:
    """Three lines, and one more if the native backend is missing."""
    from verispec.backends.blas import cpu_name
    from verispec.backends.select import default_backend, what_is_lost

    name = default_backend()
    lines = [f"verispec {__version__}", f"backend: {name}{_kernels(name)}; {cpu_name()}"]
    if (lost := what_is_lost(name)) is not None:
        lines.append(f"note: {lost}")
    return "\n".join([*lines, f"profile: {_default_profile(name)}"])


def _kernels(name: str) -> str:
    if name == "numpy":
        from verispec.backends.blas import blas_name

        return f" on {blas_name()}"
    if name in ("cuda", "torch"):
        from verispec.backends.select import OPTIONS

        return f" in arithmetic {OPTIONS[name].SERVES['arithmetic'][0]}"
    from verispec.backends.native_library import Kernels

    return f" with {Kernels(1).isa} kernels"


def _default_profile(name: str) -> str:
    from verispec.backends.calibration import cached_profile
    from verispec.backends.select import describe as describe_backend
    from verispec.errors import VerispecError
    from verispec.model import DEFAULT_MODEL, cache_dir, open_checkpoint
    from verispec.model.hub import cached_path

    path = cached_path(DEFAULT_MODEL)
    if path is None:
        return f"none yet ({DEFAULT_MODEL} is not fetched)"
    try:
        with open_checkpoint(path) as checkpoint:
            profile = cached_profile(*describe_backend(name, [checkpoint.architecture]), cache_dir())
    except VerispecError as error:
        return f"none ({error})"
    return f"{profile.hash} ({DEFAULT_MODEL})" if profile else f"none yet ({DEFAULT_MODEL} was not loaded yet)"
