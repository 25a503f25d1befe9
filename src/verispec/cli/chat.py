"""`verispec chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program.

Fed from a pipe it answers line by line; then a mistake ends it, as nobody is there to correct it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import typer

from verispec.cli import options, terminal
from verispec.config import DEFAULTS
from verispec.errors import InputError, VerispecError
from verispec.types import Accept

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.types import SampleOutput, SamplingParams

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
        """Carry out a line that starts with a slash."""
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

        terminal.note("no answer yet" if self.last is None else figures(self.last, self.llm.profile))


def chat(
    ctx: typer.Context,
    model: options.Model = "smollm2-135m",
    system: options.System = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    drafter: options.Drafter = "ngram",
    draft_len: options.DraftLen = None,
    draft_model: options.DraftModel = None,
    tree: options.Tree = None,
    accept: options.Accept = Accept.MATCH,
    force: options.Force = False,
    deterministic: options.Deterministic = True,
    backend: options.Backend = None,
    threads: options.Threads = None,
    weights: options.Weights = "as-stored",
    kv_slots: options.KVSlots = DEFAULTS.num_slots,
    max_len: options.MaxLen = None,
) -> None:
    """Talk to the model, turn by turn. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.

    The commands: /reset, /system TEXT, /seed N, /stats, /help, /exit. Lines may be piped in, too.
    """
    params = options.sampling_params(ctx.params)
    if system is not None:
        terminal.checked(system, name="--system")
    conversation = Conversation(options.load_llm(ctx.params), params, drafter, system)
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
