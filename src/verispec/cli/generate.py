"""`verispec generate`: one prompt streamed, several samples of it, or a file of prompts as one batch."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from verispec.cli import options, terminal
from verispec.cli.options import Drafting, Loading, Sampling
from verispec.cli.parser import argument, option
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from verispec.cli.receipt_file import NoReceipts, ReceiptFile
    from verispec.llm import LLM
    from verispec.text.prompts import Prompt
    from verispec.types import DraftTrace, SampleOutput, SamplingParams

    Receipts = NoReceipts | ReceiptFile

_TREES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    title: ClassVar = "Options"
    prompt: str | None = argument(None, metavar="PROMPT", help="the prompt; read from stdin if absent or '-'")
    p: str | None = option(None, "--prompt", help="the same as an option; it may begin with a dash")
    prompts: str | None = option(
        None, metavar="FILE",
        help='JSON lines, or - for stdin: {"prompt": "..."}, {"token_ids": [...]} or {"messages": [{"role": ..., '
        '"content": ...}]}, plus "prediction" and sampling parameters ("max_tokens", ...), which win over the options. '
        "One JSON line each comes out, in input order; other keys (id, answer, ...) go through",
    )  # fmt: skip
    prediction: str | None = option(
        None, metavar="FILE", help="text the answer is expected to have, say a file to be edited: drafts come from it"
    )
    system: str | None = option(None, help="system message for the chat template")
    raw: bool = option(False, help="continue the prompt as it is, without chat template")
    schema: str | None = option(None, metavar="FILE", help="a JSON schema that the answer follows")
    regex: str | None = option(None, help="a regular expression that the whole answer matches")
    grammar: str | None = option(None, metavar="FILE", help="a grammar in Lark's notation that the answer follows")
    json: bool = option(False, help="print one JSON object: text, token ids, log-probabilities, seed, digest, stats")
    stats: bool = option(False, help="with --prompts: counts and times in every line, too")
    color: str | None = option(
        None, metavar="WHAT", choices=("drafts",),
        help="drafts: accepted draft tokens in green, rejected ones struck through in red; on a terminal",
    )  # fmt: skip
    show_tree: bool = option(False, help="after the answer show the last few drafts on stderr, as trees")
    quiet: bool = option(False, "-q", help="only the text: no progress, no notes, no line of figures")
    receipt: str | None = option(
        None, metavar="FILE", help="write a receipt, or one per line, for `verispec replay` to check"
    )
    receipt_private: bool = option(False, help="the receipt holds a hash of the prompt instead of the prompt")


def generate(asked: Asked, sampling: Sampling, drafting: Drafting, loading: Loading) -> None:
    """Generate text. Streams the answer to a prompt, then one line of figures on stderr.

    The digest in that line is over tokens and log-probabilities: the same prompt, parameters and seed give it again, in
    any batch and with any drafter. A prompt from stdin loses one line end at its end, as `echo` adds one.
    """
    file, quiet = asked.prompts, asked.quiet
    _check(asked, sampling)
    shape = _shape(asked)
    params = sampling.params(**shape)
    from verispec.batch.prompts import LineReader
    from verispec.cli.prompt_file import read_lines, run_file
    from verispec.cli.receipt_file import open_receipts

    lines = read_lines(file) if file is not None else []
    text = _read_prompt(asked) if file is None else ""
    predicted = ""
    if asked.prediction is not None:
        predicted = terminal.read_text(asked.prediction, name=f"--prediction {asked.prediction}")
    if file is None:
        sampling.note_no_effect(quiet=quiet)
    with open_receipts(asked.receipt, private=asked.receipt_private, quiet=quiet) as receipts:
        llm = options.load_llm(loading, drafting, deterministic=sampling.deterministic, quiet=quiet)
        if file is not None:
            reader = LineReader(llm, params, drafting.method(llm), asked.raw, asked.system, recorded=receipts.wanted)
            run_file(lines, reader, stats=asked.stats, quiet=quiet, receipts=receipts, name=f"--prompts {file}")
            return
        prompt_ids = options.prompt_ids(llm, text, system=asked.system, raw=asked.raw)
        prompt = {"token_ids": prompt_ids, "prediction": predicted}
        with options.naming_flags():
            answer = _print_whole if asked.json or sampling.n > 1 else _print_stream
            answer(llm, prompt, sampling.seeded(**shape), asked, drafting, receipts)


def _shape(asked: Asked) -> dict[str, str]:
    """What the answer has to look like, read from the files that say so."""
    shape = {} if asked.regex is None else {"regex": asked.regex}
    for name, file in (("schema", asked.schema), ("grammar", asked.grammar)):
        if file is not None:
            shape[name] = terminal.read_text(file, name=f"--{name} {file}")
    return shape


def _check(asked: Asked, sampling: Sampling) -> None:
    """Raise for what contradicts each other, and tell what is given in vain."""
    options.check_system(asked.system, raw=asked.raw)
    if asked.prompt is not None and asked.p is not None:
        raise InputError("the prompt is there twice, as an argument and with -p")
    if asked.prompts is not None and (asked.prompt is not None or asked.p is not None):
        raise InputError("--prompts takes its prompts from a file; leave the prompt out")
    if asked.prompts is not None and asked.prediction is not None:
        raise InputError('--prediction is of one prompt; a line of --prompts has its own under "prediction"')
    if asked.receipt_private and asked.receipt is None:
        raise InputError("--receipt-private needs --receipt FILE")
    if asked.receipt is not None and not sampling.deterministic:
        raise InputError("--receipt needs an answer that can be had again, which --no-deterministic gives up")
    if asked.receipt in ("", "-"):
        raise InputError("--receipt takes the name of a file; stdout is the answer's")
    given = [asked.prompts, asked.prediction, asked.schema, asked.grammar]
    if asked.receipt is not None and os.path.realpath(asked.receipt) in (os.path.realpath(f) for f in given if f):
        raise InputError(f"--receipt {asked.receipt}: is a file that this command reads")
    whole = "--prompts" if asked.prompts is not None else "--json" if asked.json else "-n" if sampling.n > 1 else None
    for flag, is_given in (("--color", asked.color is not None), ("--show-tree", asked.show_tree)):
        if is_given and whole is not None:
            options.no_effect(flag, f"with {whole}", quiet=asked.quiet)
    if asked.stats and asked.prompts is None and not asked.json:
        options.no_effect("--stats", "without --prompts or --json", quiet=asked.quiet)


def _read_prompt(asked: Asked) -> str:
    prompt = asked.prompt if asked.p is None else asked.p
    if prompt is None and terminal.stdin_is_terminal():
        raise InputError("no prompt: give one as an argument, or pipe it to stdin")
    if asked.p is None and prompt in (None, "-"):
        text = terminal.read_text("-", name="the prompt on stdin")
        text = text.removesuffix("\n").removesuffix("\r")
    else:
        text = terminal.checked(prompt or "", name="the prompt argument")
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


def _print_whole(
    llm: LLM, prompt: Prompt, params: SamplingParams, asked: Asked, drafting: Drafting, receipts: Receipts
) -> None:
    """Print all samples when they are there: as one object, or as texts under numbers."""
    from verispec.batch.prompts import as_object

    (completion,) = llm.generate([prompt], params, drafter=drafting.method(llm), receipts=receipts.wanted)
    receipts.put(0, completion.receipts)
    if asked.json:
        terminal.out_json(as_object(completion, drafter=drafting.method(llm), stats=True))
    for i, sample in enumerate(() if asked.json else completion.samples, start=1):
        terminal.out(f"--- sample {i} of {params.n}\n{sample.text}\n")
        if not asked.quiet:
            _note_figures(sample, params, drafting)
    for sample in completion.samples:
        if sample.error is not None:
            raise VerispecError(sample.error)


def _print_stream(
    llm: LLM, prompt: Prompt, params: SamplingParams, asked: Asked, drafting: Drafting, receipts: Receipts
) -> None:
    from verispec.cli.show import coloured

    paint = asked.color is not None and terminal.shows_colour()
    output = None
    begun = False
    traces: deque[DraftTrace] = deque(maxlen=_TREES_SHOWN)
    try:
        for event in llm.stream(prompt, params, drafter=drafting.method(llm), trace=asked.show_tree):
            begun = True
            if event.trace is not None:
                traces.append(event.trace)
            if paint:
                terminal.styled_out(coloured(event, llm.tokenizer.token_text))
            else:
                terminal.out(event.text)
            output = event.output
    finally:
        if begun:  # an answer cut short ends its line too
            terminal.out("\n")
    if output is None:
        return
    if output.error is not None:
        raise VerispecError(output.error)
    if receipts.wanted:
        receipts.put(0, [llm.receipt(prompt, params, output)])
    if asked.show_tree:
        _print_trees(llm, traces)
    if not asked.quiet:
        _note_figures(output, params, drafting)


def _note_figures(output: SampleOutput, params: SamplingParams, drafting: Drafting) -> None:
    """The line of figures; before it why a drafter that was asked for has drafted nothing."""
    from verispec.cli.show import figures

    reason = output.stats.no_draft_reason
    if drafting.drafter not in (None, "none") and not output.stats.drafted and reason:
        terminal.note(f"nothing drafted: {reason}")
    terminal.note(figures(output, params, width=terminal.columns()))


def _print_trees(llm: LLM, traces: Sequence[DraftTrace]) -> None:
    from verispec.cli.show import tree_lines

    paint = sys.stderr is not None and terminal.shows_colour(sys.stderr)
    if not traces:
        terminal.note("no drafts to show")
    for i, trace in enumerate(traces, start=1):
        nodes, accepted = len(trace.draft), len(trace.verdict.path)
        head = f"draft {i} of the last {len(traces)} ({trace.drafter})"
        terminal.note(f"{head}: {nodes} node{'s' * (nodes != 1)}, {accepted} accepted")
        for line in tree_lines(trace, llm.tokenizer.token_text, paint=paint):
            terminal.styled_note(line)
