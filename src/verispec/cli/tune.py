"""`verispec tune`: which sub-layers the drafter `skip` should leave out, and what that is predicted to gain.

What is measured and searched is the library's `tuning`; here it becomes a table, JSON or a plot. What could stop the
command at its end is looked for at its beginning: a search takes minutes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verispec.cli import options, terminal
from verispec.errors import InputError

if TYPE_CHECKING:
    from verispec.llm import LLM
    from verispec.spec.skip_menu import SkipMenu
    from verispec.tuning import TuneOptions

_DEFAULT_TRIALS = 200


class SearchChoice(StrEnum):
    """What --search can be."""

    GREEDY = "greedy"
    BAYES = "bayes"
    BOTH = "both"


def tune(
    ctx: typer.Context,
    model: options.Model = "smollm2-135m",
    search: Annotated[
        SearchChoice,
        typer.Option(
            help="greedy: remove one sub-layer after the other. bayes: a quick greedy search, then Bayesian "
            "optimisation. both: a full one, then Bayesian optimisation."
        ),
    ] = SearchChoice.GREEDY,
    trials: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help=f"Sets that Bayesian optimisation tries. Default: {_DEFAULT_TRIALS}."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a plot of agreement against draft cost, as PNG.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Time the model's parts again, whatever is kept from before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    backend: options.Backend = None,
    threads: options.Threads = None,
    weights: options.Weights = "as-stored",
) -> None:
    """Find sub-layers to skip for `--drafter skip`, and predict what drafting with the rest of the model gains.

    Times the parts of a pass, searches for sets of sub-layers whose next token is usually the whole model's, and keeps
    the result for this model on this machine. It takes minutes. The output of the model does not depend on it, only how
    fast it comes.

    In the table, c is what a draft step costs and v what a verification costs, both in steps of the whole model. The
    best draft length of each set is marked with *, the best set with >.
    """
    from verispec.tuning import Search, TuneOptions

    if trials is not None and search is SearchChoice.GREEDY:
        raise InputError("--trials needs --search bayes or both: a greedy search decides itself what to try")
    chosen = TuneOptions(search=Search(search.value), trials=_DEFAULT_TRIALS if trials is None else trials)
    _check(chosen, plot)
    llm = options.load_llm(ctx.params, drafter="none")
    menu = _tune(llm, chosen, fresh=fresh)
    _show(llm, menu, as_json=as_json)
    if plot is not None:
        _plot(llm, menu, plot)


def _check(chosen: TuneOptions, plot: str | None) -> None:
    """Raise InputError for what would only fail in the end."""
    from verispec.model import cache_dir
    from verispec.tuning.report import check_matplotlib
    from verispec.tuning.search import check_optuna

    cache_dir().mkdir(parents=True, exist_ok=True)  # an OSError becomes a sentence that names the folder
    if not os.access(cache_dir(), os.W_OK):
        raise InputError(f"{cache_dir()}: cannot be written")
    if chosen.search.optimises:
        check_optuna()
    if plot is None:
        return
    check_matplotlib()
    target = Path(plot)
    if target.suffix.lower() != ".png":
        raise InputError(f"--plot {plot}: the name of a plot ends in .png")
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(target if target.exists() else folder, os.W_OK):
        raise InputError(f"--plot {plot}: is not a file that can be written")


def _tune(llm: LLM, chosen: TuneOptions, *, fresh: bool) -> SkipMenu:
    from verispec.cli.progress import LoadingDisplay
    from verispec.model import cache_dir
    from verispec.tuning import Subject, tune

    with llm.separate_engine(), LoadingDisplay() as display:
        return tune(
            Subject.of(llm), key=llm.menu_key, cache_dir=cache_dir(), options=chosen, fresh=fresh,
            progress=display.update,
        )  # fmt: skip


def _show(llm: LLM, menu: SkipMenu, *, as_json: bool) -> None:
    from verispec.tuning import report

    if as_json:
        terminal.out_json({**report.as_object(menu, llm.architecture), "profile_hash": llm.profile})
        return
    terminal.out(report.table(menu, llm.architecture))
    terminal.out(f"\n{report.verdict(menu, llm.architecture.num_layers)}\n")


def _plot(llm: LLM, menu: SkipMenu, path: str) -> None:
    from verispec.tuning import report

    try:
        report.plot({llm.identity.name: menu}, Path(path))
    except OSError as error:
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)
        raise terminal.OutputError(f"--plot {path}: {error.strerror or error}") from error
    terminal.note(f"plot in {path}")
