"""`verispec chat`, on a terminal and from a pipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.conftest import Cli
from verispec.cli.chat import Conversation
from verispec.llm import LLM
from verispec.types import SamplingParams, TokenEvent

UP = "\x1b[A"


def test_a_conversation_on_a_terminal(terminal: Callable[..., Any]) -> None:
    session = terminal("chat", "--max-tokens", "6000", "--temp", "0")
    session.wait_for("/help lists the commands")
    session.press("What is the capital of France?\r")
    session.wait_for("Paris.")
    session.wait_for("> ")
    session.press(f"/stats\r{UP}")
    session.wait_for("digest")
    session.press(f"{UP}\r")  # past /stats, back to the question
    session.wait_for("What is the capital of France?")
    session.wait_for("Paris")
    session.wait_for("> ")
    session.press("/reset\r")
    session.wait_for("forgotten")
    session.press("Write a very long novel.\r")  # the answer is as long as it may be
    session.wait_for("story")
    session.press("\x03")
    session.wait_for("[stopped]")
    session.wait_for("> ")
    session.press("/seed no\r")
    session.wait_for("/seed takes a whole number")
    session.wait_for("> ")
    session.press_until("\x03", "leaves")
    session.wait_for("> ")
    session.press_until("/exit\r")
    assert session.exit_code() == 0
    assert "Traceback" not in session.seen


def test_it_samples_as_the_model_says_unless_told_otherwise(
    cli: Cli, smollm2: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def params(*options: str) -> tuple[float, float, int]:
        assert cli("chat", *options, stdin=b"hi\n").code == 0
        return seen[-1].temperature, seen[-1].top_p, seen[-1].top_k

    seen: list[SamplingParams] = []
    monkeypatch.setattr(Conversation, "answer", lambda self, text: seen.append(self.params))
    assert params() == (0.7, 0.95, 0)
    assert params("--temp", "0") == (0.0, 0.95, 0)
    assert params("--top-p", "0.5", "--top-k", "3") == (0.7, 0.5, 3)
    monkeypatch.setattr(smollm2, "generation_defaults", {"temperature": 0.3, "top_k": 20})
    assert params() == (0.3, 1.0, 20)
    assert params("--top-k", "0") == (0.3, 1.0, 0)


def test_lines_from_a_pipe(cli: Cli) -> None:
    stdin = b"hi\n\n/stats\n/seed 5\nhi again\n/stats\n/exit\nnever\n"
    done = cli("chat", "--max-tokens", "3", "--seed", "1", stdin=stdin)  # not every seed's answers are one line each
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    assert re.search(r"^\d+ prompt tokens .*, seed 5, .*digest [0-9a-f]{12}$", done.err, re.MULTILINE)
    assert ">" not in done.out


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (b"/fly\n", "unknown command /fly; /help lists"),
        (b"/seed x\n", "/seed takes a whole number, not 'x'"),
        (b"/seed 99999999999999999999\n", "/seed must be from 0"),
        (b"a\xff\n", "the line: byte 1 (0xff) is not UTF-8"),
        (b"word " * 9000, "the prompt has"),
    ],
)
def test_from_a_pipe_a_mistake_ends_it(cli: Cli, stdin: bytes, words: str) -> None:
    done = cli("chat", stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_options_are_checked_first(bare_cli: Cli) -> None:
    done = bare_cli("chat", "--top-p", "0")
    assert (done.code, done.err) == (2, "verispec: --top-p must be in (0, 1], not 0.0\n")


class OneAnswer:
    """Answers "Yes, sir", and is interrupted after `num_events`."""

    def __init__(self, num_events: int) -> None:
        self.num_events = num_events
        self.asked: list[Any] = []

    def chat_stream(self, messages: Any, params: SamplingParams, *, drafter: str) -> Iterator[TokenEvent]:
        self.asked = list(messages)
        for i, text in enumerate(("Yes", ", sir")):
            if i == self.num_events:
                raise KeyboardInterrupt
            yield TokenEvent(0, 0, pieces=(text,))


@pytest.mark.parametrize(("num_events", "remembered"), [(2, ["Well?", "Yes, sir"]), (1, ["Well?", "Yes"]), (0, [])])
def test_what_was_said_stays(num_events: int, remembered: list[str]) -> None:
    model = OneAnswer(num_events)
    talk = Conversation(model, SamplingParams(), "none", system="Obey.")  # type: ignore[arg-type]
    if num_events < 2:
        with pytest.raises(KeyboardInterrupt):
            talk.answer("Well?")
    else:
        talk.answer("Well?")
    assert [message["content"] for message in model.asked] == ["Obey.", "Well?"]
    assert [message["content"] for message in talk.messages] == remembered


def test_system_and_reset_forget(smollm2: LLM) -> None:
    talk = Conversation(smollm2, SamplingParams(max_tokens=2), "none")
    talk.answer("hi")
    assert len(talk.messages) == 2
    talk.command("/system  Be terse. ")
    assert (talk.system, talk.messages) == ("Be terse.", [])
    talk.answer("hi")
    talk.command("/reset")
    assert (talk.system, talk.messages) == ("Be terse.", [])
    talk.command("/system")
    assert talk.system is None
