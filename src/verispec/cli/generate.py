"""`verispec generate`: one prompt streamed, or a file of prompts as one batch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from verispec.cli import options
from verispec.config import DEFAULTS
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.types import SamplingParams

ACCEPTANCE_RULES = ("match",)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if absent or '-'.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help='A file of JSON lines, or -: {"prompt": ...}, {"token_ids": [...]} or {"messages": [...]}, plus any '
            "sampling parameters. All lines run as one batch; one JSON line each comes out, in input order."
        ),
    ] = None,
    model: options.Model = "smollm2-135m",
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    color: Annotated[
        str | None, typer.Option(help="'drafts': accepted draft tokens in green, rejected ones struck through in red.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Only the text: no progress, no line of figures.")
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
    draft_len: options.DraftLen = DEFAULTS.max_draft,
    accept: options.Accept = "match",
    deterministic: options.Deterministic = True,
    backend: options.Backend = "numpy",
    threads: options.Threads = None,
    kv_slots: options.KVSlots = DEFAULTS.num_slots,
    max_len: options.MaxLen = None,
) -> None:
    """Generate text. Streams the answer to a prompt, then one line of figures on stderr.

    The digest in that line is over tokens and log-probabilities: the same prompt, parameters and seed give it again, in
    any batch and with any drafter.
    """
    _check_choices(prompt, prompts, raw=raw, system=system, as_json=as_json, color=color, accept=accept, n=n)

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
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        n=n,
        deterministic=deterministic,
    )
    text = _read_prompt(prompt) if prompts is None else ""
    lines = _read_lines(prompts) if prompts is not None else []

    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    with LoadingDisplay(quiet=quiet) as display:
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
    if prompts is not None:
        _run_file(llm, lines, params, raw=raw, system=system, drafter=drafter, quiet=quiet)
        return
    prompt_ids = llm.tokenizer.encode(text) if raw else _chat_ids(llm, system, text)
    if as_json:
        _print_json(llm, prompt_ids, params, drafter)
    else:
        _print_stream(llm, prompt_ids, params, color=color, quiet=quiet)


def _check_choices(
    prompt: str | None,
    prompts: str | None,
    *,
    raw: bool,
    system: str | None,
    as_json: bool,
    color: str | None,
    accept: str,
    n: int,
) -> None:
    if accept not in ACCEPTANCE_RULES:
        raise InputError(f"--accept must be one of {', '.join(ACCEPTANCE_RULES)}, not {accept!r}")
    if color not in (None, "drafts"):
        raise InputError(f"--color must be 'drafts', not {color!r}")
    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw turns off")
    if prompts is not None and prompt is not None:
        raise InputError("--prompts takes its prompts from a file; leave the prompt argument out")
    if prompts is not None and (as_json or color):
        raise InputError("--prompts prints JSON lines; leave --json and --color out")
    if as_json and color:
        raise InputError("--json and --color exclude each other")
    if n > 1 and not as_json and prompts is None:
        raise InputError("-n above 1 needs --json or --prompts: one text cannot stream several samples")


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise InputError("no prompt: give one as an argument, or pipe it to stdin")
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InputError(f"stdin: byte {error.start} is not UTF-8") from error
    if not prompt.strip():
        raise InputError("the prompt is empty")
    return prompt


def _read_lines(path: str) -> list[str]:
    from verispec.cli.batch import read_lines

    return read_lines(path)


def _chat_ids(llm: LLM, system: str | None, text: str) -> list[int]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_ids([*messages, {"role": "user", "content": text}])


def _print_json(llm: LLM, prompt_ids: list[int], params: SamplingParams, drafter: str) -> None:
    from verispec.cli.show import as_object

    (completion,) = llm.generate([prompt_ids], params)
    sys.stdout.write(json.dumps(as_object(completion, drafter=drafter), ensure_ascii=False) + "\n")
    if completion.error is not None:
        raise VerispecError(completion.error)


def _print_stream(llm: LLM, prompt_ids: list[int], params: SamplingParams, *, color: str | None, quiet: bool) -> None:
    from verispec.cli.show import coloured, figures, safe

    on_terminal = sys.stdout.isatty()
    output = None
    try:
        for event in llm.stream(prompt_ids, params):
            if on_terminal and color:
                sys.stdout.write(coloured(event, llm.tokenizer.token_text))
            else:
                sys.stdout.write(safe(event.text) if on_terminal else event.text)
            sys.stdout.flush()
            output = event.output
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if output is not None and output.error is not None:
        raise VerispecError(output.error)
    if output is not None and not quiet:
        typer.echo(figures(output, llm.profile), err=True)


def _run_file(
    llm: LLM, lines: list[str], params: SamplingParams, *, raw: bool, system: str | None, drafter: str, quiet: bool
) -> None:
    from verispec.cli.batch import OrderedPrinter, parse_line, run_batch
    from verispec.cli.progress import BatchDisplay

    def chat(text: str) -> list[int]:
        return _chat_ids(llm, system, text)

    def write(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    parsed = [parse_line(line, llm=llm, defaults=params, chat=None if raw else chat, drafter=drafter) for line in lines]
    with BatchDisplay(len(parsed), quiet=quiet) as display:
        failed = run_batch(llm, parsed, drafter=drafter, printer=OrderedPrinter(write), on_done=display.advance)
    if failed and not quiet:
        typer.echo(f"verispec: {failed} of {len(parsed)} lines failed; their objects say why", err=True)
