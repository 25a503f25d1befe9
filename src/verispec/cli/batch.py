"""`verispec batch`: a file of requests, answered into a file; killed and started again, it goes on where it was."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verispec.cli import options, terminal
from verispec.cli.options import Drafting, Loading, Sampling
from verispec.cli.parser import argument, option
from verispec.errors import InputError, VerispecError

if TYPE_CHECKING:
    from verispec.batch.answers import Options
    from verispec.batch.run import Batch, Summary

EXIT_DIFFERENT = 1
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")


@dataclass(frozen=True, kw_only=True)
class Asked:
    title: ClassVar = "Options"
    source: str = argument(
        metavar="IN.jsonl",
        help='one request per line, as in OpenAI\'s batch files ({"custom_id", "method", "url", "body"}) or like '
        "those of `generate --prompts`; or a parquet file with such columns",
    )
    target: str = argument(metavar="OUT.jsonl", help="one result per line, in input order; or a parquet file")
    unordered: bool = option(False, help="results in the order in which they were finished")
    receipts: str | None = option(None, metavar="FILE", help="write a receipt of every answer, one per line")
    restart: bool = option(False, help="throw away what an earlier run has left, and begin anew")
    workers: int = option(1, bounds=(1, 1024), help="processes that answer, each with the model; cuda: a GPU each")
    batch_size: int | None = option(None, bounds=(1, 2**16), help="samples that run at once, in each process")
    save_every: float = option(
        3.0,
        metavar="SECONDS",
        bounds=(0.01, 3600),
        help="how often the journal notes what unfinished lines have come to",
    )
    verify_sample: str | None = option(
        None, metavar="N%", help="answer this share of the lines again in another process, and compare"
    )
    stats: bool = option(False, help="times, cached and drafted tokens in every line; two runs then differ")
    system: str | None = option(None, help="system message of prompt lines")
    raw: bool = option(False, help="continue prompt lines as they are, without chat template")
    served_model_name: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="model that lines of OpenAI's form may name; may be given several times. Default: its own",
    )
    quiet: bool = option(False, "-q", help="no progress and no notes")


def batch(asked: Asked, sampling: Sampling, drafting: Drafting, loading: Loading) -> int:
    """Answer a file of requests. Killed at any moment, the same command goes on where it was.

    The output appears at the end, whole, and is the same to the byte whatever was interrupted, whatever the number of
    processes, the batch size or the drafter. Until then OUT.jsonl.journal holds what is finished and, every few
    seconds, what the rest has come to. A line that cannot be served has an error in its place. Sampling options are of
    prompt lines that say nothing else. docs/batch.md says more.
    """
    from verispec.batch.answers import Options
    from verispec.batch.run import Batch

    share = _share(asked.verify_sample)
    options.check_system(asked.system, raw=asked.raw)
    for name, path in (("IN", asked.source), ("OUT", asked.target), ("--receipts", asked.receipts)):
        if path == "-":
            raise InputError(f"{name} must be a file: a batch can only go on from one")
    chosen = Options(
        params=sampling.params(), raw=asked.raw, system=asked.system, served_names=asked.served_model_name,
        receipts=asked.receipts is not None, stats=asked.stats,
    )  # fmt: skip
    target, receipts = Path(asked.target), None if asked.receipts is None else Path(asked.receipts)
    with Batch(
        Path(asked.source), target, chosen,
        receipts=receipts, unordered=asked.unordered, restart=asked.restart, seconds=asked.save_every,
    ) as found:  # fmt: skip
        summary = found.summary
        if summary is None:
            summary = _run(found, chosen, asked, drafting, loading, share)
        elif not asked.quiet:
            terminal.note(f"{target} is complete already")
    return _told(summary, target)


def _run(
    batch: Batch, chosen: Options, asked: Asked, drafting: Drafting, loading: Loading, share: float | None
) -> Summary:
    from verispec.cli.progress import CountDisplay

    quiet, journal, total = asked.quiet, batch.journal, len(batch.lines)
    num_before = len(journal.finished)
    try:
        if num_before and not quiet:
            terminal.note(f"{num_before} of {total} lines are finished; going on with the others")
        if journal.num_damaged and not quiet:
            terminal.note(f"{journal.path}: {journal.num_damaged} damaged records; what they held is computed again")
        if num_before < total:
            display = CountDisplay("answering", total, quiet=quiet, num_before=num_before)
            workers, close = _workers(chosen, asked, drafting, loading, note=display.note)
            with display:
                batch.run(workers, on_finish=display.reach)
            close()
        differing = []
        if share is not None:
            from verispec.batch.workers import ProcessWorker

            if not quiet:
                terminal.note(f"answering {len(batch.sample(share))} lines again in another process ...")
            arguments = options.llm_arguments(loading, drafting, quiet=True)
            differing = batch.differing(ProcessWorker(arguments, chosen), share)
        return batch.publish(differing)
    except KeyboardInterrupt:
        terminal.note(
            f"interrupted; {len(journal.finished)} of {total} lines are finished, and what the others have come to is "
            "noted; the same command goes on from there"
        )
        raise


def _workers(
    chosen: Options, asked: Asked, drafting: Drafting, loading: Loading, *, note: Callable[[str], None]
) -> tuple[list[Any], Any]:
    """Who answers, and what gives their memory back."""
    from verispec.backends.select import default_backend
    from verispec.batch.answers import Answerer
    from verispec.batch.workers import LocalWorker, ProcessWorker

    size: dict[str, Any] = {} if asked.batch_size is None else {"max_running": asked.batch_size}
    if asked.workers == 1:
        llm = options.load_llm(loading, drafting, quiet=asked.quiet, **size)
        return [LocalWorker(Answerer(llm, chosen))], llm.close
    arguments = {**options.llm_arguments(loading, drafting, quiet=asked.quiet), **size}
    has_gpus = (loading.backend or default_backend()) == "cuda"
    if not has_gpus and loading.threads is None:
        arguments["threads"] = max(1, (os.cpu_count() or 1) // asked.workers)
    places = [{"device": loading.device + i} if has_gpus else {} for i in range(asked.workers)]
    return [
        ProcessWorker({**arguments, **place}, chosen, seconds=asked.save_every, note=note) for place in places
    ], lambda: None


def _share(text: str | None) -> float | None:
    match = None if text is None else _SHARE.fullmatch(text)
    if text is None:
        return None
    if match is None or not 0 < float(match[1]) <= 100:
        raise InputError(f"--verify-sample must be a share such as 1%, not {text[:50]!r}")
    return float(match[1]) / 100


def _told(summary: Summary, target: Path) -> int:
    if summary.differing:
        named = ", ".join(str(i + 1) for i in summary.differing[:10])
        terminal.note(
            f"verispec: {len(summary.differing)} lines of {target} came out differently in another process: {named}. "
            "This machine computes wrongly, or some line asks for deterministic: false"
        )
        return EXIT_DIFFERENT
    if summary.num_failed:
        count = f"{summary.num_failed} of {summary.num_lines} lines" if summary.num_lines > 1 else "the only line"
        raise VerispecError(f"{target}: {count} failed; {summary.first_failure}")
    return 0
