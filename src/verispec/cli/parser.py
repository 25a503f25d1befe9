"""Commands made from dataclasses: every field is an option or an argument, with its help text.

A command is a function whose parameters are such dataclasses; each one is a section of the help. What is wrong with a
command line is one sentence, an InputError. Knows nothing of models.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, NoReturn

from verispec.errors import InputError

PROGRAM = "verispec"
_MAX_WIDTH = 100
_HELP_COLUMN = 24
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class _Spec:
    """How a field is written and described; `values` are what a shell can complete it to."""

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    values: Callable[[], Iterable[str]] = tuple
    is_argument: bool = False


def option(default: Any, *names: str, help: str, **more: Any) -> Any:
    """A field that is an option: its name with dashes, and these other `names`."""
    return field(default=default, metadata={"spec": _Spec(help, names, **more)})


def argument(default: Any = MISSING, *, help: str, metavar: str, **more: Any) -> Any:
    """A field that is a word by its position; without default it must be there."""
    spec = _Spec(help, (), metavar, is_argument=True, **more)
    return field(default=default, metadata={"spec": spec})


def flags(one: Field[Any]) -> list[str]:
    """How an option is typed, the usual form first. What is on by default has an option that turns it off."""
    dashes = "-" if len(one.name) == 1 else "--no-" if one.default is True else "--"
    return [dashes + one.name.replace("_", "-"), *one.metadata["spec"].names]


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the known one that was probably meant, if any."""
    bare = {each.lstrip("-"): each for each in known}  # dashes would make all options alike
    found = get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)
    return f"; did you mean {bare[found[0]]}?" if found else ""


@dataclass(frozen=True, slots=True)
class Command:
    """A function as a command; its docstring is the help. `defaults` stand in for fields' own ones, and `without` names
    fields that are no options here.
    """

    run: Callable[..., int | None]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def summary(self) -> str:
        return re.split(r"(?<=\.)\s", self.run.__doc__ or "", maxsplit=1)[0]

    def __call__(self, words: Sequence[str]) -> int:
        parser = self.parser()
        if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
            from verispec.cli.terminal import out

            out(parser.format_help())
            return 0
        given = parser.parse(words)
        return self.run(**{name: self._filled(group, given) for name, group in self._groups().items()}) or 0

    def parser(self) -> Parser:
        words = [one for group in self._groups().values() for one in fields(group) if one.metadata["spec"].is_argument]
        shape = [f"[{_metavar(w)}]" if w.default is not MISSING else _metavar(w) for w in words]
        parser = Parser(" ".join([PROGRAM, self.name, *shape, "[OPTION ...]"]), self.run.__doc__ or "")
        for group in self._groups().values():
            hints = typing.get_type_hints(group)
            section = parser.add_argument_group(group.title)
            for one in fields(group):
                if one.name not in self.without:
                    parser.add_field(section, one, hints[one.name], self._default(one))
        section.add_argument("-h", "--help", action="store_true", help="show this text")
        return parser

    def _groups(self) -> dict[str, Any]:
        hints = typing.get_type_hints(self.run)
        return {name: hint for name, hint in hints.items() if name != "return"}

    def _default(self, one: Field[Any]) -> Any:
        return self.defaults.get(one.name, one.default)

    def _filled(self, group: Any, given: Mapping[str, Any]) -> Any:
        return group(**{one.name: given.get(one.name, self._default(one)) for one in fields(group)})


class Parser(argparse.ArgumentParser):
    """Reads one command's words. Only what was given is in the result."""

    def __init__(self, usage: str, description: str) -> None:
        super().__init__(
            usage=usage, description=description, formatter_class=_Formatter, add_help=False, allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )  # fmt: skip
        self.values: dict[str, Callable[[], Iterable[str]]] = {}

    def add_field(self, section: Any, one: Field[Any], hint: Any, default: Any) -> None:
        spec: _Spec = one.metadata["spec"]
        kinds = [kind for kind in typing.get_args(hint) if kind not in (NoneType, ...)] or [hint]
        has_default = isinstance(default, str | float | int) and kinds[0] is not bool
        shown = f"{spec.help} [{default}]" if has_default else spec.help
        names = flags(one)
        more: dict[str, Any] = {"help": shown.replace("%", "%%")}
        if kinds[0] is bool:
            section.add_argument(*names, dest=one.name, action="store_const", const=default is not True, **more)
            if default is True:
                self.add_argument(f"--{names[0][5:]}", dest=one.name, action="store_true", help=argparse.SUPPRESS)
            return
        more |= {"metavar": _metavar(one), "type": _converter(kinds[0], spec)}
        if spec.is_argument:
            section.add_argument(one.name, nargs=None if default is MISSING else "?", **more)
        else:
            is_list = typing.get_origin(hint) is tuple
            section.add_argument(*names, dest=one.name, action="append" if is_list else "store", **more)
        for name in [one.name] if spec.is_argument else names:
            self.values[name] = (lambda: spec.choices) if spec.choices else spec.values

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        found, rest = self.parse_known_args(self._joined(words))
        if rest:
            raise InputError(f"unexpected extra argument {rest[0][:_MAX_SHOWN_CHARS]!r}")
        return vars(found)

    def known_options(self) -> list[str]:
        """Every option that help shows, in its long forms."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def completions(self, before: Sequence[str], begun: str) -> list[str]:
        """What can follow these words: options, or values of the option or of the arguments that are there."""
        if begun.startswith("-"):
            return self.known_options()
        if before and before[-1] in self.values:
            return list(self.values[before[-1]]())
        return [value for action in self._get_positional_actions() for value in self.values[action.dest]()]

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Options with their values in one word: a value may begin with a dash, which argparse alone would not take."""
        joined: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "--":
                return [*joined, word, *rest]
            self._check_known(word)
            action = self._option_string_actions.get(word)
            value = next(rest, None) if action is not None and action.nargs is None else None
            joined.append(word if value is None else f"{word}={value}")
        return joined

    def _check_known(self, word: str) -> None:
        """Raise if it is an option that this command does not have; what holds a space is no option."""
        name = word.partition("=")[0]
        if len(word) < 2 or word[0] != "-" or " " in name or {name, name[:2]} & set(self._option_string_actions):
            return
        raise InputError(f"unknown option {name[:_MAX_SHOWN_CHARS]}{nearest(name, self.known_options())}")

    def error(self, message: str) -> NoReturn:
        """Say it in one sentence that begins with the option."""
        match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        if match is None:
            raise InputError(message.replace("the following arguments are required:", "missing argument:"))
        name = max(match[1].split("/"), key=lambda each: (each.startswith("--"), -match[1].index(each)))
        what = match[2].replace("expected one argument", "needs a value")
        raise InputError(f"{name} {'takes no value' if 'ignored explicit' in what else what}")


class _Formatter(argparse.HelpFormatter):
    """Paragraphs stay apart, and an option's value is shown once however many names it has."""

    def __init__(self, prog: str) -> None:
        width = min(_MAX_WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width - 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.strip())
        return "\n\n".join("\n".join(self._split_lines(" ".join(each.split()), width)) for each in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = sorted(action.option_strings, key=lambda name: name.startswith("--"))
        return ", ".join(names) + ("" if action.nargs == 0 else f" {action.metavar}")


def _metavar(one: Field[Any]) -> str:
    return one.metadata["spec"].metavar or {"int": "N", "float": "X"}.get(str(one.type).split(" ")[0], "TEXT")


def _converter(kind: type, spec: _Spec) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text == argparse.SUPPRESS:  # an argument that is not there
            return text
        shown = repr(text[:_MAX_SHOWN_CHARS])
        if spec.choices and text not in spec.choices:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(spec.choices)}, not {shown}")
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name}, not {shown}") from None
        if spec.bounds is not None and not spec.bounds[0] <= value <= spec.bounds[1]:
            low, high = spec.bounds
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text[:_MAX_SHOWN_CHARS]}")
        return value

    return convert
