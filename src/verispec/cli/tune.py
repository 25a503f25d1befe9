"""`verispec tune`: which sub-layers the drafter `skip` should leave out, and what that is predicted to gain.

What is measured and searched is the library's `tuning`; here it becomes a table, JSON or a plot. What could stop the
command at its end is looked for at its beginning: a search takes minutes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from verispec.cli import options, terminal
from verispec.cli.parser import option
from verispec.errors import InputError

if TYPE_CHECKING:
    from verispec.tuning import TuneOptions

_DEFAULT_TRIALS = 200
_GREEDY = "greedy"


@dataclass(frozen=True, kw_only=True)
class Tuning:
    title: ClassVar = "Options"
    search: str = option(
        _GREEDY, metavar="KIND", choices=(_GREEDY, "bayes", "both"),
        help="greedy: remove one sub-layer after the other. bayes: a quick greedy search, then Bayesian optimisation. "
        "both: a full one, then Bayesian optimisation",
    )  # fmt: skip
    trials: int | None = option(
        None, bounds=(1, 100_000), help=f"sets that Bayesian optimisation tries. Default: {_DEFAULT_TRIALS}"
    )
    plot: str | None = option(None, metavar="FILE", help="also write a plot of agreement against draft cost, as PNG")
    fresh: bool = option(False, help="time the model's parts again, whatever is kept from before")
    json: bool = option(False, help="print one JSON object instead of the table")


def tune(tuning: Tuning, loading: options.Loading) -> None:
    """Find sub-layers to skip for `--drafter skip`, and predict what that gains.

    Times the parts of a pass, searches for sets of sub-layers whose next token is usually the whole model's, and keeps
    the result for this model on this machine. It takes minutes. The output of the model does not depend on it, only how
    fast it comes.

    In the table, c is what a draft step costs and v what a verification costs, both in steps of the whole model. The
    best draft length of each set is marked with *, the best set with >.
    """
    from verispec.cli.progress import LoadingDisplay
    from verispec.model import cache_dir
    from verispec.tuning import Search, Subject, TuneOptions, report
    from verispec.tuning import tune as find_sets

    if tuning.trials is not None and tuning.search == _GREEDY:
        raise InputError("--trials needs --search bayes or both: a greedy search decides itself what to try")
    chosen = TuneOptions(search=Search(tuning.search), trials=tuning.trials or _DEFAULT_TRIALS)
    _check(chosen, tuning.plot)
    llm = options.load_llm(loading, drafter="none")
    with llm.separate_engine(), LoadingDisplay() as display:
        menu = find_sets(
            Subject.of(llm), key=llm.menu_key, cache_dir=cache_dir(), options=chosen, fresh=tuning.fresh,
            progress=display.update,
        )  # fmt: skip
    if tuning.json:
        terminal.out_json({**report.as_object(menu, llm.architecture), "profile_hash": llm.profile})
    else:
        terminal.out(report.table(menu, llm.architecture))
        terminal.out(f"\n{report.verdict(menu, llm.architecture.num_layers)}\n")
    terminal.write_plot(tuning.plot, lambda path: report.plot({llm.identity.name: menu}, path))


def _check(chosen: TuneOptions, plot: str | None) -> None:
    """Raise InputError for what would only fail in the end."""
    from verispec.model import cache_dir
    from verispec.tuning.search import check_optuna

    cache_dir().mkdir(parents=True, exist_ok=True)  # an OSError becomes a sentence that names the folder
    if not os.access(cache_dir(), os.W_OK):
        raise InputError(f"{cache_dir()}: cannot be written")
    if chosen.search.optimises:
        check_optuna()
    terminal.check_plot(plot, extra="tune")
