"""The model's own text: what skip sets are judged on, because it is what drafts will have to continue.

Built-in beginnings of several kinds, continued greedily and at temperature 1. Half of them is for the search, the other
half for the figures that are reported: those of a set found on the same text would flatter it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verispec.backends.audit import Progress, no_progress
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import BackendLimits
from verispec.errors import InputError
from verispec.kv import NUM_RESERVED
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, Sampler
from verispec.tuning.passes import Runner
from verispec.types import SamplingParams

Encode = Callable[[str], Sequence[int]]
TEMPERATURES = (0.0, 1.0)
SEED = 1
_LINE_TOKENS = 8  # the fewest that are worth another line


class Beginnings(NamedTuple):
    """Prompts: questions for the chat template, and raw text to go on with."""

    questions: tuple[str, ...]
    texts: tuple[str, ...]


# Many short lines say more than a few long ones: what a model writes repeats itself.
SEARCH_BEGINNINGS = Beginnings(
    questions=(
        "How do plants turn sunlight into food?",
        "Write a list of things to take on a walk in the mountains.",
        "What is the difference between a virus and a bacterium?",
        "Write a short poem about the sea in winter.",
        "Explain what a binary search does, step by step.",
        "Who was Marie Curie?",
        "Translate into French: Where is the station, please?",
        "I cannot sleep at night. What can I do?",
    ),
    texts=(
        "def mean(values):\n    total = 0\n    for value in values:\n",
        "Once upon a time there was an old lighthouse keeper who",
        "1. Wash the rice in cold water.\n2.",
        "The history of the Roman Empire begins",
        "SELECT name, price FROM products WHERE",
        "Dear Ms Lee,\n\nThank you for your letter of 3 May. I",
        "In this paper we study the problem of",
        "| country | capital |\n|---|---|\n| France | Paris |\n|",
    ),
)
REPORT_BEGINNINGS = Beginnings(
    questions=(
        "Why does the moon change its shape during a month?",
        "Give me the steps to bake a simple loaf of bread.",
        "What does a heart do, and how?",
        "Tell me a story about a robot that learns to paint.",
        "How can I reverse a string in Python?",
        "What happened at the battle of Hastings?",
        "Summarise in one sentence: The meeting was moved to Friday because two of us are ill.",
        "Which languages should a beginner learn first, and why?",
    ),
    texts=(
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
        "The train left the city early in the morning, and",
        "Three reasons to read more books:\n-",
        "Water is a chemical compound of",
        "#include <stdio.h>\n\nint main(void) {\n",
        "Hi all,\n\njust a short note to say that the new",
        "Theorem. Every natural number greater than one",
        '{"name": "Alice", "age": 30, "city":',
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt and its continuation. The full model's K/V of position p lies in slot `first_slot + p`."""

    token_ids: tuple[int, ...]
    prompt_len: int
    seq_row: int
    first_slot: int


@dataclass(slots=True)
class _Writing:
    """A line that is being written."""

    prompt_len: int
    seq_row: int
    first_slot: int
    params: SamplingParams
    token_ids: list[int]
    num_computed: int = 0

    @property
    def pending(self) -> range:
        """Positions whose K/V is still missing."""
        return range(self.num_computed, len(self.token_ids))

    def done(self) -> Line:
        return Line(tuple(self.token_ids), self.prompt_len, self.seq_row, self.first_slot)


def token_prompts(beginnings: Beginnings, encode: Encode, chat: Encode) -> tuple[tuple[int, ...], ...]:
    """The beginnings as token ids, questions and texts by turns."""
    pairs = zip(map(chat, beginnings.questions), map(encode, beginnings.texts), strict=True)
    return tuple(tuple(ids) for pair in pairs for ids in pair if ids)


def write_text(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    eos_ids: Sequence[int],
    progress: Progress = no_progress,
) -> tuple[Line, ...]:
    """Let the model continue the prompts, all together, by about so many tokens; EOS is not an option for it.

    The lines' K/V stays where they say. As many rows as one pass can hold are left free behind it.
    """
    lines = _lay_out(runner.backend.limits, prompts, num_tokens, spare=runner.max_rows)
    for line in lines:
        key = SampleKey(SEED, line.seq_row)
        runner.backend.bind(line.seq_row, Sampler(line.params, key, line.prompt_len, stop_ids=tuple(eos_ids)))
    longest = lines[0].params.min_tokens
    for i in range(longest):
        progress("generating text", i / longest)
        for line, token_id in zip(lines, _next_tokens(runner, lines), strict=True):
            line.token_ids.append(token_id)
    return tuple(line.done() for line in lines)


def first_free_slot(lines: Sequence[Line]) -> int:
    """The first slot behind the lines."""
    return max(line.first_slot + len(line.token_ids) for line in lines)


def _lay_out(limits: BackendLimits, prompts: Sequence[Sequence[int]], num_tokens: int, *, spare: int) -> list[_Writing]:
    """As many lines as make sense and as there are table rows: each prompt at one temperature, then at the other."""
    if not prompts:
        raise InputError("the tokenizer made nothing of the built-in prompts; this model cannot be tuned")
    num_prompts = len(prompts)
    num_lines = min(2 * num_prompts, limits.num_seq_rows, max(1, num_tokens // _LINE_TOKENS))
    chosen = [prompts[i % num_prompts] for i in range(num_lines)]
    longest, total = max(map(len, chosen)), sum(map(len, chosen))
    room = min((limits.num_slots - spare - total) // num_lines, limits.context_len - longest)
    count = min(room, -(-num_tokens // num_lines))
    if count < 1:
        raise InputError(
            f"tuning needs {spare + total + num_lines} K/V slots and a context of {longest + 1}; there are "
            f"{limits.num_slots} and {limits.context_len}"
        )
    writings, slot = [], NUM_RESERVED
    for i, prompt in enumerate(chosen):
        temperature = TEMPERATURES[(i % num_prompts // 2 + i // num_prompts) % 2]  # prompts of two kinds take turns
        # min_tokens keeps the model from ending: what follows an end would be no text.
        params = SamplingParams(max_tokens=count, min_tokens=count, temperature=temperature)
        writings.append(_Writing(len(prompt), 1 + i, slot, params, list(prompt)))
        slot += len(prompt) + count
    return writings


def _next_tokens(runner: Runner, lines: Sequence[_Writing]) -> list[int]:
    """Compute what is pending of every line, in passes that fit, and draw its next token."""
    waiting = [(line, position) for line in lines for position in line.pending]
    drawn: dict[int, int] = {}
    for start in range(0, len(waiting), runner.max_rows):
        drawn |= _compute(runner, waiting[start : start + runner.max_rows])
    return [drawn[line.seq_row] for line in lines]


def _compute(runner: Runner, rows: Sequence[tuple[_Writing, int]]) -> dict[int, int]:
    """One pass; the draws of those lines, by their table rows, whose last token is in it."""
    builder = PassBuilder()
    last: list[int] = []  # table rows of the lines that draw
    for line, position in rows:
        slot = line.first_slot + position
        builder.update_table(line.seq_row, position, (slot,))
        row = builder.add_chain(line.seq_row, position, (line.token_ids[position],), (slot,))
        line.num_computed = position + 1
        if not line.pending:
            last.append(line.seq_row)
            builder.draw.add(row)
    result = runner.run(builder)
    token_ids = [] if result.draw is None else result.draw.token_ids.tolist()
    if NO_TOKEN in token_ids:
        raise InputError("the model gives NaN for the built-in prompts; it cannot be tuned")
    return dict(zip(last, token_ids, strict=True))
