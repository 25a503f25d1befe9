"""`verispec generate`: one prompt streamed, or a file of prompts as one batch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from verispec.cli import options, terminal
from verispec.config import DEFAULTS
from verispec.errors import InputError, VerispecError
from verispec.types import Accept

if TYPE_CHECKING:
    from verispec.cli.receipt_file import NoReceipts, ReceiptFile
    from verispec.llm import LLM
    from verispec.types import DraftTrace, SamplingParams

    Receipts = NoReceipts | ReceiptFile


_TREES_SHOWN = 3


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if absent or '-'.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='A file of JSON lines, or - for stdin: {"prompt": "..."}, {"token_ids": [...]} or {"messages": '
            '[{"role": ..., "content": ...}]}, plus any sampling parameters ("max_tokens", "seed", ...), which win '
            "over the options. All lines run as one batch; one JSON line each comes out, in input order. A bad line "
            "gives an error object in its place, and exit code 2 in the end.",
        ),
    ] = None,
    model: options.Model = "smollm2-135m",
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: text, token ids, log-probabilities, seed, digest, stats."),
    ] = False,
    color: Annotated[
        options.Colour | None,
        typer.Option(
            help="drafts: accepted draft tokens in green, rejected ones struck through in red. Only on a terminal."
        ),
    ] = None,
    show_tree: Annotated[
        bool,
        typer.Option(
            "--show-tree",
            help="After the answer show the last few drafts on stderr, as trees: each token with the probability that "
            "drafter and model gave it, accepted ones in green, rejected ones in red, and the token the model added.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Only the text: no progress, no line of figures.")
    ] = False,
    receipt: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a receipt, which `verispec replay` checks: the answer and everything it is a function of. With "
            "-n above 1 or --prompts, one per line.",
        ),
    ] = None,
    receipt_private: Annotated[
        bool, typer.Option("--receipt-private", help="The receipt holds a hash of the prompt instead of the prompt.")
    ] = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    n: options.Samples = 1,
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
    """Generate text. Streams the answer to a prompt, then one line of figures on stderr.

    The digest in that line is over tokens and log-probabilities: the same prompt, parameters and seed give it again, in
    any batch and with any drafter. A prompt from stdin loses one line end at its end, as `echo` adds one.

    A prompt that begins with a dash goes after --, as in: verispec generate --max-tokens 9 -- "-1 is"
    """
    _check_choices(prompt, prompts, raw=raw, system=system, as_json=as_json, color=color, n=n)
    if show_tree and (as_json or prompts is not None):
        raise InputError("--show-tree goes with one streamed answer; leave --json and --prompts out")
    _check_receipt(receipt, receipt_private, deterministic)
    params = options.sampling_params(ctx.params)
    if system is not None:
        terminal.checked(system, name="--system")
    if prompts is not None:
        from verispec.cli.batch import read_lines, run_file

        lines = read_lines(prompts)
        with _receipts(receipt, private=receipt_private, quiet=quiet) as receipts:
            llm = options.load_llm(ctx.params, quiet=quiet)
            run_file(
                llm, lines, params, raw=raw, system=system, drafter=drafter, quiet=quiet, receipts=receipts,
                name=f"--prompts {prompts}",
            )  # fmt: skip
        return
    text = _read_prompt(prompt)
    with _receipts(receipt, private=receipt_private, quiet=quiet) as receipts:
        llm = options.load_llm(ctx.params, quiet=quiet)
        prompt_ids = llm.tokenizer.encode(text) if raw else _chat_ids(llm, system, text)
        with options.naming_flags():
            if as_json:
                _print_json(llm, prompt_ids, params, drafter, receipts)
            else:
                shown = Shown(drafts=color is not None, trees=show_tree, figures=not quiet)
                _print_stream(llm, prompt_ids, params, receipts, shown)


def _check_choices(
    prompt: str | None,
    prompts: str | None,
    *,
    raw: bool,
    system: str | None,
    as_json: bool,
    color: options.Colour | None,
    n: int,
) -> None:
    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw turns off")
    if prompts is not None and prompt is not None:
        raise InputError("--prompts takes its prompts from a file; leave the prompt argument out")
    if prompts is not None and (as_json or color):
        raise InputError(f"--prompts prints JSON lines; leave {'--json' if as_json else '--color'} out")
    if as_json and color:
        raise InputError("--json and --color exclude each other")
    if n > 1 and not as_json and prompts is None:
        raise InputError("-n above 1 needs --json or --prompts: one text cannot stream several samples")


def _check_receipt(receipt: str | None, private: bool, deterministic: bool) -> None:
    if private and receipt is None:
        raise InputError("--receipt-private needs --receipt FILE")
    if receipt is not None and not deterministic:
        raise InputError("--receipt needs an answer that can be had again, which --no-deterministic gives up")
    if receipt in ("", "-"):
        raise InputError("--receipt takes the name of a file; stdout is the answer's")


def _receipts(path: str | None, *, private: bool, quiet: bool) -> Receipts:
    from verispec.cli.receipt_file import open_receipts

    return open_receipts(path, private=private, quiet=quiet)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and terminal.stdin_is_terminal():
        raise InputError("no prompt: give one as an argument, or pipe it to stdin")
    if prompt is None or prompt == "-":
        text = terminal.read_text("-", name="the prompt on stdin")
        text = text.removesuffix("\n").removesuffix("\r")
    else:
        text = terminal.checked(prompt, name="the prompt argument")
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


def _chat_ids(llm: LLM, system: str | None, text: str) -> list[int]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_ids([*messages, {"role": "user", "content": text}])


def _print_json(llm: LLM, prompt_ids: list[int], params: SamplingParams, drafter: str, receipts: Receipts) -> None:
    from verispec.cli.show import as_object

    (completion,) = llm.generate([prompt_ids], params, drafter=drafter, receipts=receipts.wanted)
    receipts.put(0, completion.receipts)
    terminal.out_json(as_object(completion, drafter=drafter))
    if completion.error is not None:
        raise VerispecError(completion.error)


class Shown(NamedTuple):
    """What is shown beside the answer: drafts in colour, the last trees, the line of figures."""

    drafts: bool
    trees: bool
    figures: bool


def _print_stream(llm: LLM, prompt_ids: list[int], params: SamplingParams, receipts: Receipts, shown: Shown) -> None:
    from verispec.cli.show import coloured, figures

    paint = shown.drafts and terminal.shows_colour()
    output = None
    begun = False
    traces: deque[DraftTrace] = deque(maxlen=_TREES_SHOWN)
    try:
        for event in llm.stream(prompt_ids, params, trace=shown.trees):
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
    if output is not None and output.error is not None:
        raise VerispecError(output.error)
    if output is not None and receipts.wanted:
        receipts.put(0, [llm.receipt(prompt_ids, params, output)])
    if shown.trees:
        _print_trees(llm, traces)
    if output is not None and shown.figures:
        terminal.note(figures(output, llm.profile))


def _print_trees(llm: LLM, traces: Sequence[DraftTrace]) -> None:
    from verispec.cli.tree_text import tree_lines

    paint = sys.stderr is not None and terminal.shows_colour(sys.stderr)
    if not traces:
        terminal.note("no drafts to show")
    for i, trace in enumerate(traces, start=1):
        nodes, accepted = len(trace.draft), len(trace.verdict.path)
        terminal.note(f"draft {i} of the last {len(traces)}: {nodes} nodes, {accepted} accepted")
        for line in tree_lines(trace, llm.tokenizer.token_text, paint=paint):
            terminal.styled_note(line)
