"""`verispec bench`: how fast this model is here, on the user's own prompts, by drafter and number of sequences.

Prompts and drafts of one run do not help the next: there is no prefix cache. Whether all runs gave the same outputs is
checked on the way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from verispec.cli import options, terminal
from verispec.cli.options import known_models
from verispec.cli.parser import option
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from verispec.engine import Request
    from verispec.llm import LLM
    from verispec.types import SampleOutput, SamplingParams

DEFAULTS = MappingProxyType({"max_tokens": 64})
WITHOUT = frozenset(("n", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty"))
_MIN_REQUESTS = 4  # per measurement, one after the other if need be
_MAX_SEQUENCES = 1024
_PROMPTS = (
    "Why is the sky blue?",
    "List ten animals that live in the sea, one per line, each with one sentence about it.",
    "Write a Python function that returns the prime numbers below n, and a test for it.",
    "Correct the spelling and repeat the text: Teh harbour was quite in the early morning, and only a few guls circled "
    "above the boats. Maria counted the crates twise, wrote the number into her book, and waited for the captain.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "Summarise in two sentences: The steam engine turned heat into motion. It drained mines first, then drove looms, "
    "ships and trains, and in a hundred years it changed where people lived, what they ate and how far they travelled.",
    "Translate into French: The train leaves at seven, and we should not be late.",
    "What is the difference between a virus and a bacterium? Answer as a table.",
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    title: ClassVar = "Options"
    prompts: str | None = option(
        None, metavar="FILE", help="JSON lines as for generate, or - for stdin. Default: eight prompts of various kinds"
    )
    raw: bool = option(False, help="continue the prompts as they are, without chat template")
    sequences: str = option("1,8,32", metavar="N,N,...", help="how many sequences run at once")
    drafters: str | None = option(
        None, metavar="NAME,...", values=options.drafters, help="which drafters. Default: all that can draft here"
    )
    draft_model: str | None = option(None, metavar="NAME", values=known_models, help="for drafter model")
    force: bool = option(False, help="let skip and model draft even where that is predicted not to pay")
    repeats: int = option(2, bounds=(1, 100), help="how often each is measured; the fastest counts")
    json: bool = option(False, help="print one JSON object instead of the table")
    plot: str | None = option(None, metavar="FILE", help="also write a plot, as PNG")


class Speed(NamedTuple):
    """One drafter at one number of sequences: tokens and seconds of prompts and of what follows the first token."""

    drafter: str
    sequences: int
    prompt_tokens: int
    prompt_seconds: float
    new_tokens: int
    decode_seconds: float
    passes: int
    drafted: int
    accepted: int

    def faster(self, other: Speed) -> Speed:
        """The shorter of both times up to first tokens, and of both whole times; decoding is the difference, so that a
        busy moment while prompts were timed does not make it look fast.
        """
        prompt_seconds = min(self.prompt_seconds, other.prompt_seconds)
        seconds = min(each.prompt_seconds + each.decode_seconds for each in (self, other))
        return self._replace(prompt_seconds=prompt_seconds, decode_seconds=seconds - prompt_seconds)

    @property
    def prompt_rate(self) -> float:
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second, all sequences together; None where nothing came after first tokens."""
        return self.new_tokens / self.decode_seconds if self.new_tokens and self.decode_seconds > 0 else None


def bench(what: Benchmark, sampling: options.Sampling, loading: options.Loading) -> None:
    """Measure prompt and decode speed, with 1, 8 and 32 sequences and every drafter.

    Each measurement serves at least four requests, in groups of N sequences. The prompt speed is that up to the
    first token of each, the decode speed that of all further tokens; answers end where the model ends them, or at
    --max-tokens. All runs must give the same outputs, and a line says whether they did.
    """
    params = sampling.params()
    sizes = _sizes(what.sequences)
    terminal.check_plot(what.plot, extra="bench")
    lines = _lines(what.prompts)
    llm = options.load_llm(
        loading, drafter="none", draft_model=what.draft_model, force=what.force, prefix_cache=False,
        history_len=0, max_running=max(sizes),
    )  # fmt: skip
    requests = {name: _requests(llm, lines, params, name, what) for name in _drafters(llm, what.drafters)}
    speeds, outputs = _measure(llm, requests, sizes, repeats=what.repeats)
    equal = all(len(digests) == 1 for digests in outputs.values())
    if what.json:
        rows = [{**s._asdict(), "prompt_rate": s.prompt_rate, "decode_rate": s.decode_rate} for s in speeds]
        terminal.out_json({"model": llm.identity.name, "profile": llm.profile, "prompts": len(lines), "equal": equal,
                           "speeds": rows})  # fmt: skip
    else:
        terminal.out(_table(speeds))
        terminal.out(_outcome(equal, deterministic=params.deterministic, num_prompts=len(lines)))
    terminal.write_plot(what.plot, lambda path: _plot(speeds, path, title=llm.identity.name))


def _sizes(text: str) -> list[int]:
    sizes = [int(part) if part.isascii() and part.isdecimal() and len(part) < 9 else 0 for part in text.split(",")]
    if not all(1 <= size <= _MAX_SEQUENCES for size in sizes):
        raise InputError(f"--sequences must be numbers from 1 to {_MAX_SEQUENCES} with commas between, not {text!r}")
    return sorted(set(sizes))


def _lines(file: str | None) -> list[bytes]:
    from verispec.cli.prompt_file import read_lines

    return [json.dumps({"prompt": prompt}).encode() for prompt in _PROMPTS] if file is None else read_lines(file)


def _drafters(llm: LLM, text: str | None) -> list[str]:
    if text is None:
        return list(llm.drafter_names)
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in llm.drafter_names:
            missing = {"skip": "; `verispec tune` makes it possible", "model": "; it needs --draft-model"}.get(name, "")
            raise InputError(f"--drafters: {name!r} cannot draft here, only {', '.join(llm.drafter_names)}{missing}")
    return names


def _requests(llm: LLM, lines: Sequence[bytes], params: SamplingParams, drafter: str, what: Benchmark) -> list[Request]:
    from verispec.batch.prompts import LineReader

    reader, name = LineReader(llm, params, drafter, what.raw), f"--prompts {what.prompts}"
    requests = []
    for i, line in enumerate(lines):
        parsed = reader.parse(i, line)
        if parsed.request is None:
            raise InputError(f"{name}, line {i + 1}: {parsed.error}")
        requests.append(parsed.request)
    return requests


def _measure(
    llm: LLM, requests: dict[str, list[Request]], sizes: Sequence[int], *, repeats: int
) -> tuple[list[Speed], dict[int, set[str]]]:
    """The speeds, and the digests that were seen of each prompt. Drafters take turns: a busy moment hits all."""
    from verispec.cli.progress import CountDisplay

    best: dict[tuple[str, int], Speed] = {}
    digests: dict[int, set[str]] = {}
    with CountDisplay("measuring", repeats * len(sizes) * len(requests)) as display:
        for _ in range(repeats):
            for size in sizes:
                for name, known in requests.items():
                    indices = [i % len(known) for i in range(-(-_MIN_REQUESTS // size) * size)]
                    speed = _run(llm, name, [known[i] for i in indices], size, digests, indices)
                    best[name, size] = speed.faster(best.get((name, size), speed))
                    display.advance()
    return list(best.values()), digests


def _run(
    llm: LLM, drafter: str, requests: Sequence[Request], size: int, digests: dict[int, set[str]], indices: Sequence[int]
) -> Speed:
    """Serve the requests in groups of `size`: first one token of each, then all of them."""
    prompt_seconds = seconds = 0.0
    outputs: list[SampleOutput] = []
    for start in range(0, len(requests), size):
        group = requests[start : start + size]
        firsts = [replace(r, params=replace(r.params, max_tokens=1, min_tokens=0)) for r in group]
        began = time.perf_counter()
        llm.run(firsts)
        between = time.perf_counter()
        outputs += [sample for completion in llm.run(group) for sample in completion.samples]
        prompt_seconds, seconds = prompt_seconds + between - began, seconds + time.perf_counter() - between
    for index, output in zip(indices, outputs, strict=True):
        if output.error is not None:
            raise VerispecError(output.error)
        digests.setdefault(index, set()).add(output.digest)
    stats = [output.stats for output in outputs]
    return Speed(
        drafter=drafter,
        sequences=size,
        prompt_tokens=sum(output.prompt_len for output in outputs),
        prompt_seconds=prompt_seconds,
        new_tokens=sum(len(output.token_ids) - 1 for output in outputs),
        decode_seconds=seconds - prompt_seconds,
        passes=sum(each.passes + each.fast_passes for each in stats),
        drafted=sum(each.drafted for each in stats),
        accepted=sum(each.accepted for each in stats),
    )


def _table(speeds: Sequence[Speed]) -> str:
    """A row per drafter, a pair of columns per number of sequences."""
    sizes = list(dict.fromkeys(speed.sequences for speed in speeds))
    heads = "".join(f"{f'{size} sequence' + 's' * (size > 1):>20}" for size in sizes)
    lines = [f"{'tok/s':8}{heads}", f"{'drafter':8}" + f"{'prompt':>11}{'decode':>9}" * len(sizes)]
    for drafter in dict.fromkeys(speed.drafter for speed in speeds):
        row = [speed for speed in speeds if speed.drafter == drafter]
        cells = (f"{s.prompt_rate:11.1f}{'-' if s.decode_rate is None else f'{s.decode_rate:.1f}':>9}" for s in row)
        lines.append(f"{drafter:8}" + "".join(cells))
    return "\n".join(lines) + "\n"


def _outcome(equal: bool, *, deterministic: bool, num_prompts: int) -> str:
    if equal:
        return f"\nAll runs gave the same outputs, bit for bit, for each of {num_prompts} prompts.\n"
    if not deterministic:
        return "\nOutputs differed between runs, as --no-deterministic allows.\n"
    return "\nOutputs DIFFERED between runs. This is a defect; docs/determinism.md says what to do.\n"


def _plot(speeds: Sequence[Speed], path: Path, *, title: str) -> None:
    """Bars by number of sequences, a colour per drafter: decode speed above prompt speed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(speed.sequences for speed in speeds))
    drafters = list(dict.fromkeys(speed.drafter for speed in speeds))
    width = 0.8 / len(drafters)
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1)
    for axes, name in zip(panels, ("decode", "prompt"), strict=True):
        for i, drafter in enumerate(drafters):
            rates = [getattr(speed, f"{name}_rate") or 0.0 for speed in speeds if speed.drafter == drafter]
            places = [group + (i - (len(drafters) - 1) / 2) * width for group in range(len(sizes))]
            axes.bar_label(axes.bar(places, rates, width=0.95 * width, label=drafter), fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set(ylabel=f"{name} speed, tok/s", xlabel="sequences at once")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    panels[0].set_title(title)
    figure.legend(*panels[0].get_legend_handles_labels(), title="drafter", loc="outside right upper")
    figure.savefig(path, dpi=150)
