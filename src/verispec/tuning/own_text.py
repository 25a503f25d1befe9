"""The model's own text: what skip sets are judged on, because it is what drafts will have to continue.

Built-in beginnings of several kinds, continued greedily and at temperature 1. Half of them is for the search, the other
half for the figures that are reported: those of a set found on the same text would flatter it. Tuning owns the backend:
all slots and table rows are its own to lay out. Bits decide which tokens agree, so every pass is canonical where the
backend has a family: the same menu comes out on every run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verispec.backends.audit import Progress, no_progress
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import Backend, BackendLimits, Pass, PassKind
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.kv import NUM_RESERVED
from verispec.spec.none import NoDrafter
from verispec.types import SamplingParams

Encode = Callable[[str], Sequence[int]]
TEMPERATURES = (0.0, 1.0)
SEED = 1
MAX_ROWS = 128  # of one pass
_LINE_TOKENS = 8  # the fewest that are worth another line


class Beginnings(NamedTuple):
    """Prompts: questions for the chat template, and raw text to go on with."""

    questions: Sequence[str]
    texts: Sequence[str]


# Many short lines say more than a few long ones: what a model writes repeats itself.
_BEGINNINGS = json.loads(Path(__file__).with_name("beginnings.json").read_text(encoding="utf-8"))
SEARCH_BEGINNINGS, REPORT_BEGINNINGS = Beginnings(**_BEGINNINGS["search"]), Beginnings(**_BEGINNINGS["report"])


@dataclass(frozen=True, slots=True)
class Runner:
    """Makes passes in shapes of the family, or of any size where there is none."""

    backend: Backend
    family: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        return max((m for m in self.family if m <= MAX_ROWS), default=min(self.family, default=MAX_ROWS))

    def build(self, builder: PassBuilder) -> Pass:
        kind = PassKind.CANONICAL if self.family else PassKind.FAST
        shape = min((m for m in self.family if m >= len(builder)), default=0)
        return builder.build(kind, lambda num_rows: shape or num_rows, vocab_size=self.backend.limits.vocab_size)


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt and its continuation. The full model's K/V of position p lies in slot `first_slot + p`."""

    token_ids: tuple[int, ...]
    prompt_len: int
    seq_row: int
    first_slot: int


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
    """Let the model continue the prompts, all together, by about `num_tokens`; EOS is not an option for it.

    The lines' K/V stays where they say. As many slots as one pass can hold rows are left free behind it.
    """
    requests = _requests(runner, prompts, num_tokens, eos_ids)
    lines, slot = [], NUM_RESERVED
    for request, answer in zip(requests, _answers(runner, requests, progress), strict=True):
        lines.append(Line((*request.prompt_ids, *answer), len(request.prompt_ids), request.first_sample, slot))
        slot += len(lines[-1].token_ids)
    _fill(runner, lines)
    return tuple(lines)


def first_free_slot(lines: Sequence[Line]) -> int:
    return max(line.first_slot + len(line.token_ids) for line in lines)


def _requests(
    runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: int, eos_ids: Sequence[int]
) -> list[Request]:
    """As many lines as make sense and as there are table rows: each prompt at one temperature, then at the other."""
    if not prompts:
        raise InputError("the tokenizer made nothing of the built-in prompts; this model cannot be tuned")
    limits, num_prompts = runner.backend.limits, len(prompts)
    num_lines = min(2 * num_prompts, limits.num_seq_rows, max(1, num_tokens // _LINE_TOKENS))
    chosen = [prompts[i % num_prompts] for i in range(num_lines)]
    count = min(_room(limits, chosen, spare=runner.max_rows), -(-num_tokens // num_lines))
    requests = []
    for i, prompt in enumerate(chosen):
        temperature = TEMPERATURES[(i % num_prompts // 2 + i // num_prompts) % 2]  # prompts of two kinds take turns
        # min_tokens keeps the model from ending: what follows an end would be no text.
        params = SamplingParams(
            max_tokens=count, min_tokens=count, temperature=temperature, seed=SEED, deterministic=bool(runner.family)
        )
        requests.append(Request(prompt, params, eos_ids=eos_ids, first_sample=1 + i))
    return requests


def _room(limits: BackendLimits, prompts: Sequence[Sequence[int]], *, spare: int) -> int:
    """The most tokens that each prompt can be continued by."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    room = min((limits.num_slots - spare - total) // len(prompts), limits.context_len - longest)
    if room < 1:
        raise InputError(
            f"tuning needs {spare + total + len(prompts)} K/V slots and a context of {longest + 1}; there are "
            f"{limits.num_slots} and {limits.context_len}"
        )
    return room


def _answers(runner: Runner, requests: Sequence[Request], progress: Progress) -> list[tuple[int, ...]]:
    """What an engine of its own makes of the requests; afterwards its K/V means nothing."""
    config = EngineConfig(num_slots=runner.backend.limits.num_slots, prefix_cache=False)
    engine = Engine(runner.backend, family=runner.family, drafters={"none": NoDrafter()}, config=config)
    answers: dict[int, tuple[int, ...]] = {engine.add(request): () for request in requests}
    total = sum(request.params.min_tokens for request in requests)
    while engine.has_work:
        progress("generating text", sum(map(len, answers.values())) / total)
        for event in engine.step():
            answers[event.request_id] += event.token_ids
            if event.output is not None and event.output.error is not None:
                raise InputError(f"the model cannot be tuned: {event.output.error}")
    return list(answers.values())


def _fill(runner: Runner, lines: Sequence[Line]) -> None:
    """Compute the K/V of all lines."""
    rows = [(line, position) for line in lines for position in range(len(line.token_ids))]
    for start in range(0, len(rows), runner.max_rows):
        builder = PassBuilder()
        for line, position in rows[start : start + runner.max_rows]:
            slot = line.first_slot + position
            builder.update_table(line.seq_row, position, (slot,))
            builder.add_chain(line.seq_row, position, (line.token_ids[position],), (slot,))
        runner.backend.submit(runner.build(builder)).result()
