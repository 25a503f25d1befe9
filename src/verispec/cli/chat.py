"""`verispec chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import typer

from verispec.cli import options
from verispec.config import DEFAULTS
from verispec.errors import VerispecError

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.types import SampleOutput, SamplingParams

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation; without TEXT, remove it
/seed N         set the seed; without N, a new random one for every answer
/stats          figures of the last answer
/exit           leave (Ctrl-D does too)
Ctrl-C          stop the answer; what was said of it stays in the conversation"""


@dataclass
class Conversation:
    """The messages so far and how to answer them."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: SampleOutput | None = None

    def answer(self, text: str) -> None:
        """Ask, stream the answer, and remember both."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            for event in self.llm.chat_stream([*system, *asked], self.params):
                said += event.text
                _write(event.text)
                self.last = event.output or self.last
        except KeyboardInterrupt:
            _write(" [stopped]")
        _write("\n")
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def command(self, line: str) -> None:
        """Carry out a line that starts with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.messages = []
        elif name == "/system":
            self.system, self.messages = rest or None, []
        elif name == "/seed":
            self._set_seed(rest)
        elif name == "/stats":
            self._show_stats()
        else:
            _note(HELP if name == "/help" else f"unknown command {name}\n{HELP}")

    def _set_seed(self, text: str) -> None:
        if text and not text.isdecimal():
            _note(f"/seed takes a whole number, not {text!r}")
            return
        self.params = replace(self.params, seed=int(text) if text else None)

    def _show_stats(self) -> None:
        from verispec.cli.show import figures

        _note("no answer yet" if self.last is None else figures(self.last, self.llm.profile))


def chat(
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
    drafter: options.Drafter = "ngram",
    draft_len: options.DraftLen = DEFAULTS.max_draft,
    backend: options.Backend = "numpy",
    threads: options.Threads = None,
    kv_slots: options.KVSlots = DEFAULTS.num_slots,
    max_len: options.MaxLen = None,
) -> None:
    """Talk to the model, turn by turn. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""
    from verispec.types import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )

    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    with LoadingDisplay() as display:
        llm = LLM(
            model,
            drafter=drafter,
            backend=backend,
            threads=threads,
            kv_slots=kv_slots,
            max_len=max_len,
            draft_len=draft_len,
            progress=display.update,
        )
    _converse(Conversation(llm, params, system))


def _converse(conversation: Conversation) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its history and arrow keys)
        _note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _write("\n")
            continue
        if line == "/exit":
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                conversation.command(line)
            else:
                conversation.answer(line)
        except VerispecError as error:  # too long a conversation, say: it can be reset
            _note(f"verispec: {error}")


def _write(text: str) -> None:
    from verispec.cli.show import safe

    sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _note(text: str) -> None:
    typer.echo(text, err=True)
