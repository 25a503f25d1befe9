"""`verispec score` and `verispec audit`: what the model thinks of a text, and what the machine does to its bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from verispec.cli import options, terminal
from verispec.cli.parser import argument, option
from verispec.errors import InputError

if TYPE_CHECKING:
    from verispec.backends.audit import Audit
    from verispec.llm import LLM
    from verispec.types import TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Scoring:
    title: ClassVar = "Options"
    file: str = argument(metavar="FILE", help="a text file, or - for stdin")
    json: bool = option(False, help="print one JSON object")
    window: int | None = option(
        None, bounds=(2, options.MAX_COUNT), help="tokens scored together; longer texts are cut. Default: what fits"
    )


def score(what: Scoring, loading: options.Loading) -> None:
    """Print the log-probability of every token of a text, and its perplexity.

    The text is taken as it is, without chat template. A text longer than the window is scored in windows that share
    one token, so every token but the first has a value; at the start of a window it has little context.
    """
    file, window = what.file, what.window
    text = terminal.read_text(file, name=_name(file))
    if not text:
        raise InputError(f"{_name(file)} is empty")
    llm = options.load_llm(loading, drafter="none")
    longest = llm.max_len
    if window is not None and window > longest:
        raise InputError(f"--window is {window}, but at most {longest} tokens fit")
    ids = llm.tokenizer.encode(text)
    if len(ids) < 2:
        raise InputError(f"{_name(file)} has {len(ids)} token; scoring needs at least two")
    entries = _score_windows(llm, ids, window or longest)
    perplexity = math.exp(-sum(entry.logprob for entry in entries) / len(entries))
    if what.json:
        result = {"token_ids": ids, "logprobs": [e.logprob for e in entries], "perplexity": perplexity}
        terminal.out_json({**result, "profile": llm.profile})
        return
    rows = (f"{e.logprob:10.4f}  {e.token_id:6}  {llm.tokenizer.token_text(e.token_id)!r}\n" for e in entries)
    terminal.out("".join(rows))
    terminal.note(f"{len(ids)} tokens, perplexity {perplexity:.4f}, profile {llm.profile}")


def _name(file: str) -> str:
    return "stdin" if file == "-" else file


def _score_windows(llm: LLM, ids: list[int], window: int) -> list[TokenLogprob]:
    from verispec.cli.progress import CountDisplay

    entries: list[TokenLogprob] = []
    starts = range(0, len(ids) - 1, window - 1)
    with CountDisplay("scoring", len(starts)) as display:
        for start in starts:
            entries += llm.score(ids[start : start + window]).logprobs
            display.advance()
    return entries


@dataclass(frozen=True, kw_only=True)
class Auditing:
    title: ClassVar = "Options"
    fresh: bool = option(False, help="measure again, whatever is cached")
    json: bool = option(False, help="print one JSON object")


def audit(what: Auditing, loading: options.Loading) -> None:
    """Show the device, which pass shapes are row-pure on it, what passes cost, and the profile.

    Loading checks the kernels of the native and the CUDA backend by known answers; this measures every kernel at every
    shape, which takes minutes for a large model, and is kept.
    A shape is a number of rows that a pass computes at once. It is row-pure if the bits of a row do not depend on the
    other rows; shapes in one pair of braces give the same bits, and so do the implementations that serve them. Outputs
    can be equal only where the profile's hash is.
    """
    llm = options.load_llm(loading, full_audit=True, fresh_audit=what.fresh)
    if what.json:
        terminal.out_json(_audit_object(llm))
    else:
        terminal.out(_audit_text(llm))


def _audit_text(llm: LLM) -> str:
    found = llm.calibration
    lines = [
        "Device:",
        *(f"{name:>10}  {value}" for name, value in llm.backend.device().items()),
        "\nShapes whose bits agree, kernel by kernel:",
        found.audit.table(),
        *_forms(found.audit),
        *_answers(found.wrong_answers),
        f"\nCanonical family: {', '.join(map(str, found.family)) or 'none'}",
        "\nCost of a pass, T(M, context):",
        f"{'rows':>8} {'ms':>7} + us per context token",
        *map(_cost_line, _costs(llm)),
        "\nProfile:",
        *(f"{name:>10}  {value}" for name, value in found.profile.fingerprint),
        f"{'version':>10}  {found.profile.weights_version} of the weights",
        f"{'hash':>10}  {found.profile.hash}",
    ]
    return "\n".join(lines) + "\n"


def _forms(audit: Audit) -> list[str]:
    table = audit.forms_table()
    return [f"\nImplementations that were compared, by number of rows:\n{table}"] if table else []


class _Cost(NamedTuple):
    """T of a shape: seconds without context, and per context token."""

    rows: int
    seconds: float
    seconds_per_context_token: float
    is_timed: bool


def _costs(llm: LLM) -> list[_Cost]:
    """Of the shapes that were timed; and as predicted, from the largest of these, of larger ones, doubling."""
    cost, largest = llm.calibration.cost, max(llm.backend.shapes)
    lines = zip(cost.shapes, cost.base, cost.per_context_token, strict=True)
    found, rows = [_Cost(*line, is_timed=True) for line in lines], 2 * cost.shapes[-1]
    while rows <= largest:
        base = cost.seconds(rows, 0)
        found.append(_Cost(rows, base, cost.seconds(rows, 1) - base, is_timed=False))
        rows *= 2
    return found


def _cost_line(cost: _Cost) -> str:
    shown = f"{cost.rows:8} {cost.seconds * 1e3:7.1f} {cost.seconds_per_context_token * 1e6:7.2f}"
    return shown if cost.is_timed else f"{shown}  not timed: as predicted from the largest that was"


def _answers(wrong: tuple[str, ...] | None) -> list[str]:
    return [] if wrong is None else [f"\nKnown answers: {'wrong for ' + '; '.join(wrong) if wrong else 'all right'}"]


def _audit_object(llm: LLM) -> dict[str, Any]:
    found = llm.calibration
    return {
        "device": dict(llm.backend.device()),
        "kernels": [{**outcome._asdict(), "forms": dict(outcome.forms)} for outcome in found.audit.outcomes],
        "families": found.audit.families,
        "wrong_answers": found.wrong_answers,
        "family": found.family,
        "cost": [cost._asdict() for cost in _costs(llm)],
        "fingerprint": dict(found.profile.fingerprint),
        "weights_version": found.profile.weights_version,
        "profile": found.profile.hash,
    }
