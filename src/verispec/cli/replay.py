"""`verispec replay`: receipts checked one by one, by running them again on the model.

Receipts come from anywhere. They are read strictly, and nothing in one is used as a path: the model is the one that
-m names, or one of the known models that is already here. What a result says in words is in `receipt.report`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from verispec.cli import options, terminal
from verispec.cli.main import EXIT_DIFFERENT
from verispec.cli.parser import argument, option
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verispec.llm import LLM
    from verispec.receipt import Receipt, ReplayResult


_WORTH_SAYING = 2.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Replay:
    title: ClassVar = "Options"
    file: str = argument(metavar="FILE", help="a receipt, or several as JSON lines; - for stdin")
    prompt: str | None = option(
        None, metavar="FILE",
        help="the prompt of a private receipt, or - for stdin: text, which is tried through the chat template and raw, "
        'or JSON: a list of token ids, {"prompt": "..."}, {"messages": [...]}; or JSON lines of these',
    )  # fmt: skip
    signed_by: str | None = option(
        None, metavar="FILE", help="a public key; receipts that its owner has not signed are refused"
    )
    first: int | None = option(None, bounds=(1, options.MAX_COUNT), help="check the first N tokens of each answer only")
    json: bool = option(False, help="print one JSON object per receipt")


def replay(what: Replay, loading: options.Loading) -> int:
    """Check receipts: run each answer again, in parallel passes over the recorded tokens, and compare every bit.

    Prints "reproduced", or what differs and the first position where: exactly for a token, within a block of 32
    positions for a log-probability. It also tells when the receipt was edited since it was written, which fields cannot
    be true, when the model's file is another one, and when this machine has another numeric profile, where equal tokens
    are all one can expect. Without --model the receipt says which, if that is a known name; without --backend one that
    gives the receipt's bits runs it, if there is one here. --signed-by also checks who wrote it, before anything runs.
    What takes more than a moment is announced with the time that passes were measured to take; --first checks less.

    Exit code 0: reproduced, or on another profile all tokens equal. 1: something differs. 2: bad input.
    """
    file, prompt = what.file, what.prompt
    if file == prompt == "-":
        raise InputError("the receipt and --prompt cannot both come from stdin")
    receipts = read_receipts(file)
    if what.signed_by is not None:
        _check_signatures(receipts, what.signed_by)
    model = loading.model if loading.model is not None else _known_model(receipts)
    content = None if prompt is None else terminal.read_bytes(prompt, name=f"--prompt {prompt}")
    for name, receipt in receipts:
        if receipt.is_private and content is None:
            raise InputError(f"{name} is private: it holds only a hash of its prompt; --prompt FILE gives the prompt")
    backend = loading.backend or _serving(receipts)
    llm = options.load_llm(replace(loading, model=model, backend=backend), drafter="none")
    candidates = None if content is None else prompt_candidates(llm, content, name=f"--prompt {prompt}")
    results = [result for _, result in _replay_all(llm, receipts, candidates, what)]
    if len(results) > 1:
        terminal.note(f"{len(results)} receipts: {sum(result.reproduced for result in results)} reproduced")
    return 0 if all(result.agrees for result in results) else EXIT_DIFFERENT


def read_receipts(file: str) -> list[tuple[str, Receipt]]:
    """The receipts of a file with the names that messages use. An object that is spread over lines is one receipt."""
    from verispec.receipt import parse

    name = "stdin" if file == "-" else file
    data = terminal.read_bytes(file, name=name).rstrip()
    lines = data.split(b"\n")
    if len(lines) == 1 or lines[0].strip() == b"{":
        return [(name, parse(data, name=name))]
    named = [(f"{name}, line {i}", line) for i, line in enumerate(lines, start=1)]
    return [(each, parse(line, name=each)) for each, line in named]


def _check_signatures(receipts: Sequence[tuple[str, Receipt]], key_file: str) -> None:
    from verispec.receipt.signing import PublicKey

    key = PublicKey.read(key_file)
    for name, receipt in receipts:
        try:
            key.check(receipt)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error


def _serving(receipts: Sequence[tuple[str, Receipt]]) -> str | None:
    """The backend for the arithmetic of all receipts; None, the usual one, if they differ or nothing here serves it."""
    from verispec.backends.select import serving

    recorded = {dict(receipt.profile.fingerprint).get("arithmetic", "") for _, receipt in receipts}
    return serving(recorded.pop()) if len(recorded) == 1 else None


def _known_model(receipts: Sequence[tuple[str, Receipt]]) -> str:
    """The path of the one known model that all receipts name. It is not fetched for a receipt's sake."""
    from verispec.model.hub import REGISTRY, cached_path

    for name, receipt in receipts:
        if receipt.model.name not in REGISTRY:
            raise InputError(f"{name}: its model {receipt.model.name!r} is not a known name; -m names the model")
        if receipt.model.name != receipts[0][1].model.name:
            raise InputError(f"{name}: its model is another one than the first receipt's; replay them one by one")
    known = receipts[0][1].model.name
    path = cached_path(known)
    if path is None:
        raise InputError(f"{receipts[0][0]}: its model {known} is not here; `verispec models pull {known}` fetches it")
    return str(path)


def prompt_candidates(llm: LLM, content: bytes, *, name: str) -> list[list[int]]:
    """Every prompt that the file can mean; a receipt's hash tells which one is right."""
    from verispec.strict_json import decode

    text = decode(content, name=name)
    candidates = [ids for value in _json_values(content) for ids in _meanings(llm, value)]
    for each in dict.fromkeys((text, text.removesuffix("\n").removesuffix("\r"))):
        candidates += _meanings(llm, {"prompt": each})
    return candidates


def _json_values(content: bytes) -> Iterator[Any]:
    """The file as JSON, or else those of its lines that are."""
    from verispec.strict_json import load_value

    try:
        yield load_value(content, name="the file")
    except InputError:
        for line in content.splitlines():
            with suppress(InputError):
                yield load_value(line, name="the line")


def _meanings(llm: LLM, value: Any) -> Iterator[list[int]]:
    """Token ids that a prompt, in one of its forms, can stand for; none if it is no prompt or cannot be encoded."""
    match value:
        case [*ids] | {"token_ids": [*ids]}:
            if all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
                yield list(ids)
        case {"messages": [*messages]}:
            with suppress(VerispecError):
                yield llm.chat_ids(messages)
        case {"prompt": str(text)}:
            with suppress(VerispecError):
                yield llm.chat_ids([{"role": "user", "content": text}])
            with suppress(VerispecError):
                yield llm.tokenizer.encode(text)


def _replay_all(
    llm: LLM, receipts: Sequence[tuple[str, Receipt]], candidates: Sequence[list[int]] | None, what: Replay
) -> Iterator[tuple[str, ReplayResult]]:
    """Replay each receipt and print what came out, as it comes."""
    from verispec.cli.progress import CountDisplay
    from verispec.receipt import replay as run_again
    from verispec.receipt.report import as_object, as_text
    from verispec.receipt.rerun import expected_seconds

    counts = [min(len(r.output.drawn_ids), what.first or options.MAX_COUNT) for _, r in receipts]
    seconds = expected_seconds(llm, [receipt for _, receipt in receipts], what.first)
    if seconds >= _WORTH_SAYING:
        terminal.note(f"replaying {sum(counts)} tokens: about {timedelta(seconds=round(seconds))}")
    with CountDisplay("replaying", sum(counts)) as display:
        for (name, receipt), count in zip(receipts, counts, strict=True):
            done = display.num_done
            try:
                prompt_ids = None if candidates is None else _matching(receipt, candidates)
                result = run_again(
                    llm, receipt, prompt_ids, first=what.first, progress=partial(display.reach, since=done)
                )
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            with display.aside():
                if what.json:
                    terminal.out_json(as_object(result, receipt))
                else:
                    prefix = f"{name}: " if len(receipts) > 1 else ""
                    terminal.out(prefix + as_text(result, receipt, llm.tokenizer.token_text) + "\n")
            display.reach(done + count)
            yield name, result


def _matching(receipt: Receipt, candidates: Sequence[list[int]]) -> list[int]:
    for ids in candidates:
        if receipt.prompt.matches(ids):
            return ids
    edited = "; the receipt was edited" if receipt.is_edited else ""
    raise InputError(f"--prompt is not its prompt: no reading of it has the recorded hash{edited}")
