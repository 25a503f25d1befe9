"""`verispec chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program.

Fed from a pipe it answers line by line; then a mistake ends it, as nobody is there to correct it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from verispec.cli import options, terminal
from verispec.cli.parser import option
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.types import SampleOutput, SamplingParams

# What the model's own generation config decides unless an option does.
DEFAULTS: Mapping[str, Any] = {
    "max_tokens": 512, "temperature": None, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None,
}  # fmt: skip
HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation; without TEXT, remove it
/seed N         set the seed; without N, a new random one for every answer
/stats          figures of the last answer
/help           this list
/exit           leave (Ctrl-D does too)
Ctrl-C          stop the answer; what was said of it stays in the conversation
Arrow up, down  earlier lines"""


@dataclass
class Conversation:
    """The messages so far and how to answer them."""

    llm: LLM
    params: SamplingParams
    drafter: str
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: SampleOutput | None = None

    def answer(self, text: str) -> None:
        """Ask, stream the answer, and remember both; interrupted, remember what was said."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            for event in self.llm.chat_stream([*system, *asked], self.params, drafter=self.drafter):
                said += event.text
                self.last = event.output or self.last
                terminal.out(event.text)
                if event.output is not None and event.output.error is not None:
                    raise VerispecError(event.output.error)
        except KeyboardInterrupt:
            terminal.note(" [stopped]")
            raise
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": said}]
        terminal.out("\n")

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.messages = []
            terminal.note("the conversation is forgotten")
        elif name == "/system":
            self.system, self.messages = rest or None, []
            terminal.note("the system message is " + ("set" if rest else "removed") + ", the conversation forgotten")
        elif name == "/seed":
            self._set_seed(rest)
        elif name == "/stats":
            self._show_stats()
        elif name == "/help":
            terminal.note(HELP)
        else:
            raise InputError(f"unknown command {name}; /help lists the commands")

    def _set_seed(self, text: str) -> None:
        if text and not (text.isascii() and text.isdecimal() and len(text) < 100):
            raise InputError(f"/seed takes a whole number, not {text[:100]!r}")
        try:
            self.params = replace(self.params, seed=int(text) if text else None)
        except InputError as error:
            raise InputError(f"/{error}") from error  # "seed must be ..."
        terminal.note(f"the seed is {text}" if text else "every answer gets a random seed")

    def _show_stats(self) -> None:
        from verispec.cli.show import figures

        terminal.note(
            "no answer yet" if self.last is None else figures(self.last, self.params, width=terminal.columns())
        )


@dataclass(frozen=True, kw_only=True)
class Talk:
    title: ClassVar = "Options"
    system: str | None = option(None, help="system message for the chat template")


def chat(talk: Talk, sampling: options.Sampling, drafting: options.Drafting, loading: options.Loading) -> None:
    """Talk to the model, turn by turn. Ctrl-C stops an answer, Ctrl-D leaves.

    The commands: /reset, /system TEXT, /seed N, /stats, /help, /exit. Lines may be piped in, too. What no option says
    of temperature, top-k, top-p, min-p and repetition penalty, the model's own generation config says; without one the
    temperature is 0.7 and top-p 0.95.
    """
    from verispec.model.generation_defaults import chat_sampling

    sampling.params()
    options.check_system(talk.system)
    llm = options.load_llm(loading, drafting, deterministic=sampling.deterministic)
    params = sampling.params(**chat_sampling(llm.generation_defaults))
    conversation = Conversation(llm, params, drafting.method(llm), talk.system)
    if terminal.stdin_is_terminal():
        _converse(conversation)
    else:
        _answer_lines(conversation)


def _converse(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() its history and arrow keys)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # every Ctrl-C counts here, however quick
    terminal.note("/help lists the commands, Ctrl-D leaves")
    while True:
        # Whatever is to be said of an interrupt is said inside: here a second one can only be ignored.
        with contextlib.suppress(KeyboardInterrupt):
            if not _turn(conversation):
                return


def _turn(conversation: Conversation) -> bool:
    """Ask for a line and serve it; False at the end."""
    line = _ask()
    if line is None or line == "/exit":
        return False
    try:
        _serve(conversation, line)
    except terminal.OutputError:
        raise
    except VerispecError as error:
        terminal.note(f"verispec: {error}")
    return True


def _ask() -> str | None:
    """The next line; None at the end of input. The prompt is no part of what goes to stdout."""
    on_terminal = sys.stdout.isatty()
    if not on_terminal and sys.stderr is not None:
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        return input("> " if on_terminal else "").strip()
    except EOFError:
        terminal.note("")
        return None
    except KeyboardInterrupt:
        terminal.note("\nCtrl-D or /exit leaves")
        raise


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin or ():
        if line.strip() == "/exit":
            return
        _serve(conversation, line.strip())


def _serve(conversation: Conversation, line: str) -> None:
    if line.startswith("/"):
        conversation.command(line)
    elif line:
        with options.naming_flags():
            conversation.answer(terminal.checked(line, name="the line"))
