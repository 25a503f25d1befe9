"""`verispec score` and `verispec audit`: what the model thinks of a text, and what the machine does to its bits."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verispec.cli import options
from verispec.config import DEFAULTS
from verispec.errors import InputError

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.types import TokenLogprob


def score(
    file: Annotated[str, typer.Argument(help="A text file, or - for stdin.")],
    model: options.Model = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    window: Annotated[
        int | None, typer.Option(help="Tokens scored together; longer texts are cut. Default: what fits.")
    ] = None,
    backend: options.Backend = "numpy",
    threads: options.Threads = None,
    kv_slots: options.KVSlots = DEFAULTS.num_slots,
) -> None:
    """Print the log-probability of every token of a text, and its perplexity.

    A text longer than the window is scored in windows that share one token, so every token but the first has a value;
    at the start of a window it has little context.
    """
    text = _read_text(file)
    if window is not None and window < 2:
        raise InputError(f"--window must be at least 2, not {window}")

    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    with LoadingDisplay() as display:
        llm = LLM(model, drafter="none", backend=backend, threads=threads, kv_slots=kv_slots, progress=display.update)
    ids = llm.tokenizer.encode(text)
    if len(ids) < 2:
        raise InputError(f"{file} has {len(ids)} token; scoring needs at least two")
    entries = _score_windows(llm, ids, min(window or llm.engine.max_len, llm.engine.max_len))
    perplexity = math.exp(-sum(entry.logprob for entry in entries) / len(entries))
    if as_json:
        result = {"token_ids": ids, "logprobs": [e.logprob for e in entries], "perplexity": perplexity}
        typer.echo(json.dumps({**result, "profile": llm.profile}))
        return
    for entry in entries:
        typer.echo(f"{entry.logprob:10.4f}  {entry.token_id:6}  {llm.tokenizer.token_text(entry.token_id)!r}")
    typer.echo(f"{len(ids)} tokens, perplexity {perplexity:.4f}, profile {llm.profile}", err=True)


def _score_windows(llm: LLM, ids: list[int], window: int) -> list[TokenLogprob]:
    entries: list[TokenLogprob] = []
    starts = range(0, len(ids) - 1, window - 1)
    for start in starts:
        entries += llm.score(ids[start : start + window]).logprobs
    return entries


def _read_text(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: byte {error.start} is not UTF-8") from error
    if not text:
        raise InputError(f"{file} is empty")
    return text


def audit(
    model: options.Model = "smollm2-135m",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is cached.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    backend: options.Backend = "numpy",
    threads: options.Threads = None,
) -> None:
    """Show which pass shapes are row-pure here, the family that was chosen, what passes cost, and the profile."""
    from verispec.cli.progress import LoadingDisplay
    from verispec.llm import LLM

    with LoadingDisplay() as display:
        llm = LLM(model, backend=backend, threads=threads, fresh_audit=fresh, progress=display.update)
    found = llm.calibration
    if as_json:
        typer.echo(json.dumps(_audit_object(llm)))
        return
    typer.echo("Shapes whose bits agree, kernel by kernel:")
    typer.echo(found.audit.table())
    typer.echo(f"\nCanonical family: {', '.join(map(str, found.family))}")
    typer.echo("\nCost of a pass, T(M, context):\n    rows  ms  + us per context token")
    for shape, base, slope in zip(found.cost.shapes, found.cost.base, found.cost.per_context_token, strict=True):
        typer.echo(f"{shape:8} {base * 1e3:7.1f} {slope * 1e6:7.2f}")
    typer.echo("\nProfile:")
    for name, value in found.profile.fingerprint:
        typer.echo(f"{name:>10}  {value}")
    typer.echo(f"{'hash':>10}  {found.profile.hash}")


def _audit_object(llm: LLM) -> dict[str, Any]:
    found = llm.calibration
    return {
        "kernels": [outcome._asdict() for outcome in found.audit.outcomes],
        "families": found.audit.families,
        "family": found.family,
        "cost": [
            {"rows": shape, "seconds": base, "seconds_per_context_token": slope}
            for shape, base, slope in zip(found.cost.shapes, found.cost.base, found.cost.per_context_token, strict=True)
        ],
        "fingerprint": dict(found.profile.fingerprint),
        "profile": found.profile.hash,
    }
